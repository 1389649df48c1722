"""Update: gradient, momentum SGD, renormalised copy, all in one sweep over the prototypes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import ClassGradient
from qmargin.kernels.triton.tuning import power_of_two

CLASSES = 4  # prototypes per program: rows enough for wide loads, entries few enough to loop over


@triton.jit
def _sgd(
    COLUMNS, ROWS, VALUES, SEGMENTS, EMBEDDINGS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, LARGEST, lr, momentum, weight_decay, num_classes, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, ONLY_ACTIVE: tl.constexpr,
    CLASSES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    begin = tl.load(SEGMENTS + program)
    end = tl.load(SEGMENTS + program + 1)
    grad_scale = tl.load(GRAD_SCALE)
    is_finite = tl.abs(grad_scale) < float("inf")
    if (is_finite == 0) | (ONLY_ACTIVE & (begin == end)):
        return
    classes = program * CLASSES + tl.arange(0, CLASSES)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    gradient = tl.zeros((CLASSES, DEPTH), dtype=tl.float32)
    num_entries = tl.zeros((CLASSES,), dtype=tl.int32)
    for entry in range(begin, end):
        value = tl.load(VALUES + entry)
        row = tl.load(ROWS + entry).to(tl.int64)
        x = tl.load(EMBEDDINGS + row * depth + dimension, mask=is_value, other=0.0)
        belongs = tl.load(COLUMNS + entry) == classes
        num_entries += (belongs & (value != 0.0)).to(tl.int32)
        gradient += tl.where(belongs, value, 0.0)[:, None] * x[None, :]
    is_stepped = classes < num_classes
    if ONLY_ACTIVE:
        is_stepped = is_stepped & (num_entries > 0)
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    mask = is_stepped[:, None] & is_value[None, :]
    prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    inverse = tl.load(INVERSE_NORMS + classes, mask=is_stepped, other=0.0)
    unit = prototype * inverse[:, None]
    radial = tl.sum(gradient * unit, 1)
    gradient = (gradient - radial[:, None] * unit) * (inverse * grad_scale)[:, None]
    gradient += weight_decay * prototype
    move = gradient
    if HAS_BUFFER:
        move = momentum * tl.load(BUFFER + place, mask=mask, other=0.0) + gradient
        tl.store(BUFFER + place, move, mask=mask)
        if NESTEROV:
            move = gradient + momentum * move
    prototype -= lr * move
    tl.store(PROTOTYPES + place, prototype, mask=mask)
    length = tl.sqrt(tl.sum(prototype * prototype, 1))
    inverse = 1.0 / tl.where(is_stepped, length, 1.0)
    tl.store(INVERSE_NORMS + classes, inverse, mask=is_stepped)
    unit = prototype * inverse[:, None]
    rounded = unit.to(COPY.dtype.element_ty)
    tl.store(COPY + place, rounded, mask=mask)
    error = unit - rounded.to(tl.float32)
    error = tl.max(tl.where(is_stepped, tl.sum(error * error, 1), 0.0), 0)
    tl.atomic_max(LARGEST, error)  # a maximum does not depend on the order


def sgd_update(
    gradient: ClassGradient,
    embeddings: Tensor,
    prototypes: Tensor,
    momentum_buffer: Tensor | None,
    inverse_norms: Tensor,
    copy: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    grad_scale: Tensor,
    only_active: bool,
) -> Tensor:
    """See ``update_reference.sgd_update``."""
    num_classes, depth = prototypes.shape
    programs = triton.cdiv(num_classes, CLASSES)
    edges = torch.arange(programs + 1, dtype=torch.int32, device=prototypes.device) * CLASSES
    columns = gradient.columns.to(torch.int32)
    segments = torch.searchsorted(columns, edges, out_int32=True)
    largest = torch.zeros((), dtype=torch.float32, device=prototypes.device)
    wide = power_of_two(depth)
    _sgd[(programs,)](
        columns, gradient.rows, gradient.values, segments, embeddings, prototypes,
        prototypes if momentum_buffer is None else momentum_buffer, inverse_norms, copy,
        grad_scale.to(torch.float32), largest, lr, momentum, weight_decay, num_classes, depth,
        momentum_buffer is not None, nesterov, only_active, CLASSES, wide,
        num_warps=1 if wide <= 128 else 4 if wide <= 1024 else 8,
    )  # fmt: skip
    return largest.sqrt()
