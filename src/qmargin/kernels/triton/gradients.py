"""Gradients of embeddings and prototypes from the lists of active classes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import ClassGradient, ClassOrder, SolvedRows
from qmargin.kernels.triton.screen import power_of_two

BLOCK = 1024


@triton.jit
def _gather(ORDER, ROWS, POSTERIOR, WEIGHTS, TARGET_WEIGHTS, OUT_ROWS, OUT_VALUES, others, total,
            BLOCK: tl.constexpr):  # fmt: skip
    """Row and value of each entry in the order of classes; entries past the others are targets."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    entry = tl.load(ORDER + place, mask=inside, other=0)
    is_other = inside & (entry < others)
    row = tl.load(ROWS + entry, mask=is_other, other=0)
    value = tl.load(POSTERIOR + entry, mask=is_other, other=0.0)
    value *= tl.load(WEIGHTS + row, mask=is_other, other=0.0)
    is_target = inside & (entry >= others)
    row = tl.where(is_target, (entry - others).to(tl.int32), row)
    value = tl.where(is_target, tl.load(TARGET_WEIGHTS + row, mask=is_target, other=0.0), value)
    tl.store(OUT_ROWS + place, row, mask=inside)
    tl.store(OUT_VALUES + place, value, mask=inside)


def class_gradient(
    order: ClassOrder, solved: SolvedRows, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """See ``head_reference.class_gradient``."""
    columns = order.columns
    rows = torch.empty_like(columns)
    values = torch.empty(columns.shape, dtype=torch.float32, device=columns.device)
    if len(columns):
        _gather[(triton.cdiv(len(columns), BLOCK),)](
            order.order, solved.rows, solved.posterior, weights, target_weights, rows, values,
            order.num_candidates, len(columns), BLOCK, num_warps=4,
        )  # fmt: skip
    return ClassGradient(columns, rows, values)


SPLIT = 8  # programs per row; their parts are added in a fixed order, so results repeat


@triton.jit
def _pull(
    COLUMNS, POSTERIOR, STARTS, PROTOTYPES, INVERSE_NORMS, PARTS, num_rows, depth,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    total = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(begin + part * BLOCK, end, BLOCK * SPLIT):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        column = tl.load(COLUMNS + entry, mask=inside, other=0)
        value = tl.load(POSTERIOR + entry, mask=inside, other=0.0)
        is_active = value != 0.0  # the others' prototypes are not even read
        value *= tl.load(INVERSE_NORMS + column, mask=is_active, other=0.0)
        place = column[:, None].to(tl.int64) * depth + dimension[None, :]
        mask = is_active[:, None] & is_value[None, :]
        prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
        total += tl.sum(value[:, None] * prototype, 0)
    out = PARTS + (part * num_rows + row).to(tl.int64) * depth
    tl.store(out + dimension, total, mask=is_value)


def pull_rows(solved: SolvedRows, prototypes: Tensor, inverse_norms: Tensor) -> Tensor:
    """See ``head_reference.pull_rows``."""
    num_rows, depth = len(solved.loss), prototypes.shape[1]
    parts = torch.empty((SPLIT, num_rows, depth), dtype=torch.float32, device=prototypes.device)
    _pull[(num_rows, SPLIT)](
        solved.columns, solved.posterior, solved.starts, prototypes, inverse_norms, parts,
        num_rows, depth, SPLIT, power_of_two(depth), 16, num_warps=4,
    )  # fmt: skip
    return parts.sum(0)


@triton.jit
def _prototype_gradient(
    CLASSES, SEGMENTS, ROWS, VALUES, EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, OUT, depth,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    begin = tl.load(SEGMENTS + which)
    end = tl.load(SEGMENTS + which + 1)
    column = tl.load(CLASSES + which).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    total = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        row = tl.load(ROWS + entry, mask=inside, other=0)
        value = tl.load(VALUES + entry, mask=inside, other=0.0)
        place = row[:, None].to(tl.int64) * depth + dimension[None, :]
        mask = inside[:, None] & is_value[None, :]
        total += tl.sum(value[:, None] * tl.load(EMBEDDINGS + place, mask=mask, other=0.0), 0)
    inverse = tl.load(INVERSE_NORMS + column)
    unit = tl.load(PROTOTYPES + column * depth + dimension, mask=is_value, other=0.0) * inverse
    total = (total - tl.sum(total * unit, 0) * unit) * inverse
    tl.store(OUT + which * depth + dimension, total, mask=is_value)


def prototype_gradient(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``head_reference.prototype_gradient``."""
    classes, counts = torch.unique_consecutive(gradient.columns, return_counts=True)
    segments = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    depth = prototypes.shape[1]
    out = torch.empty((len(classes), depth), dtype=torch.float32, device=prototypes.device)
    if len(classes):
        _prototype_gradient[(len(classes),)](
            classes, segments, gradient.rows, gradient.values, embeddings, prototypes,
            inverse_norms, out, depth, power_of_two(depth), 4, num_warps=2,
        )  # fmt: skip
    return classes.long(), out
