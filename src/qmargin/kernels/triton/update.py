"""Update: gradient, momentum SGD, renormalised copy, all in one sweep over the prototypes.

``refresh_copy`` writes the copy alone, for prototypes that changed in another way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import ClassGradient, PrototypeState, SgdRule
from qmargin.kernels.triton.screen import power_of_two

CLASSES = 2  # prototypes per program of the sweep over all of them
CLASSES_KEPT = 8  # and of the one that only rewrites what is kept of them


@triton.jit
def _add_entry(gradient, num_entries, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes, dimension,
               depth):  # fmt: skip
    """Add one entry's embedding to the gradient of its class."""
    value = tl.load(VALUES + entry)
    row = tl.load(ROWS + entry).to(tl.int64)
    width = tl.where(value != 0.0, depth, 0)  # many entries are candidates that were not active
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=dimension < width, other=0.0)
    share = tl.where(tl.load(COLUMNS + entry) == classes, value, 0.0)
    num_entries += (share != 0.0).to(tl.int32)
    gradient += share[:, None] * x[None, :]
    return gradient, num_entries


@triton.jit
def _tangent(gradient, prototype, inverse):
    """Gradient of prototypes from that of their unit vectors."""
    unit = prototype * inverse[:, None]
    radial = tl.sum(gradient * unit, 1)
    return (gradient - radial[:, None] * unit) * inverse[:, None]


@triton.jit
def _state(
    classes, is_read, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth,
    HAS_BUFFER: tl.constexpr,
):  # fmt: skip
    """Prototypes, momentum and inverse norms of a few classes, and where they are.

    Asked for before the gradient is summed up, so that both ways to memory overlap.
    """
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    mask = is_read[:, None] & (dimension[None, :] < depth)
    prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    inverse = tl.load(INVERSE_NORMS + classes, mask=is_read, other=0.0)
    buffer = prototype
    if HAS_BUFFER:
        buffer = tl.load(BUFFER + place, mask=mask, other=0.0)
    return place, prototype, buffer, inverse


@triton.jit
def _keep(prototype, place, is_kept, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth):
    """Rewrite what is kept of a few prototypes: inverse norms, rounded unit vectors, the error."""
    # In float64 the order of the sum does not show: an update leaves what a refresh would, and a
    # training that goes on has the copy that it had. Memory is what these kernels wait for.
    wide = prototype.to(tl.float64)
    length = tl.sqrt(tl.sum(wide * wide, 1).to(tl.float32))
    inverse = 1.0 / tl.where(is_kept, length, 1.0)
    inverse = tl.where((inverse > 0.0) & (inverse < float("inf")), inverse, float("nan"))
    tl.store(INVERSE_NORMS + classes, inverse, mask=is_kept)
    unit = prototype * inverse[:, None]
    rounded = unit.to(COPY.dtype.element_ty)
    tl.store(COPY + place, rounded, mask=is_kept[:, None] & (dimension[None, :] < depth))
    lost = unit - rounded.to(tl.float32)
    error = tl.sum(lost * lost, 1)
    error = tl.where(error == error, error, float("inf"))  # a maximum would pass NaN over
    error = tl.max(tl.where(is_kept, error, 0.0), 0)
    tl.atomic_max(LARGEST, error)  # a maximum does not depend on the order


@triton.jit
def _refresh(
    PROTOTYPES, INVERSE_NORMS, COPY, LARGEST, num_classes, depth, CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """What is kept of all classes, a few to a program."""
    classes = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    dimension = tl.arange(0, DEPTH)
    is_kept = classes < num_classes
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    mask = is_kept[:, None] & (dimension[None, :] < depth)
    prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    _keep(prototype, place, is_kept, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth)


@triton.jit
def _apply(
    gradient, prototype, buffer, place, is_stepped, classes, dimension, PROTOTYPES, BUFFER,
    INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Step a few prototypes and rewrite what is kept of them."""
    mask = is_stepped[:, None] & (dimension[None, :] < depth)
    gradient += weight_decay * prototype
    move = gradient
    if HAS_BUFFER:
        move = momentum * buffer + gradient
        tl.store(BUFFER + place, move, mask=mask)
        if NESTEROV:
            move = gradient + momentum * move
    prototype -= lr * move
    tl.store(PROTOTYPES + place, prototype, mask=mask)
    _keep(prototype, place, is_stepped, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth)


@triton.jit
def _given(
    GRADIENT, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY, GRAD_SCALE, UNIT_FACTOR, LARGEST,
    lr, momentum, weight_decay, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, ONLY_ACTIVE: tl.constexpr,
    OF_UNIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A range of classes whose gradient is given, one to a program."""
    grad_scale = tl.load(GRAD_SCALE)
    if tl.abs(grad_scale) < float("inf"):
        classes = tl.program_id(0) + tl.arange(0, 1)
        dimension = tl.arange(0, DEPTH)
        place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
        inside = (classes[:, None] >= 0) & (dimension[None, :] < depth)
        gradient = tl.load(GRADIENT + place, mask=inside, other=0.0)
        is_stepped = classes >= 0
        if ONLY_ACTIVE:
            is_stepped = tl.sum((gradient != 0.0).to(tl.int32), 1) > 0
        place, prototype, buffer, inverse = _state(
            classes, is_stepped, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        if OF_UNIT:
            gradient = _tangent(gradient, prototype, inverse) * tl.load(UNIT_FACTOR)
        _apply(
            gradient * grad_scale, prototype, buffer, place, is_stepped, classes, dimension,
            PROTOTYPES, BUFFER, INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth,
            HAS_BUFFER, NESTEROV,
        )  # fmt: skip


@triton.jit
def _sweep(
    COLUMNS, ROWS, VALUES, SEGMENTS, EMBEDDINGS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, LARGEST, lr, momentum, weight_decay, num_classes, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """All classes, a few to a program."""
    program = tl.program_id(0)
    grad_scale = tl.load(GRAD_SCALE)
    if tl.abs(grad_scale) < float("inf"):
        classes = program * CLASSES + tl.arange(0, CLASSES)
        dimension = tl.arange(0, DEPTH)
        is_stepped = classes < num_classes
        place, prototype, buffer, inverse = _state(
            classes, is_stepped, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        gradient = tl.zeros((CLASSES, DEPTH), dtype=tl.float32)
        num_entries = tl.zeros((CLASSES,), dtype=tl.int32)
        for entry in range(tl.load(SEGMENTS + program), tl.load(SEGMENTS + program + 1)):
            gradient, num_entries = _add_entry(
                gradient, num_entries, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes,
                dimension, depth,
            )  # fmt: skip
        gradient = _tangent(gradient, prototype, inverse) * grad_scale
        _apply(
            gradient, prototype, buffer, place, is_stepped, classes, dimension, PROTOTYPES, BUFFER,
            INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth, HAS_BUFFER, NESTEROV,
        )  # fmt: skip


@triton.jit
def _active(
    COLUMNS, ROWS, VALUES, EMBEDDINGS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, LARGEST, lr, momentum, weight_decay, num_entries, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Active classes only: a program per entry, of which the first of a class does the work."""
    entry = tl.program_id(0)
    column = tl.load(COLUMNS + entry)
    before = tl.load(COLUMNS + tl.maximum(entry - 1, 0))
    following = tl.load(COLUMNS + tl.minimum(entry + 1, num_entries - 1))
    is_first = (entry == 0) | (before != column)
    is_last = (entry == num_entries - 1) | (following != column)
    # Not even the prototype of a lone candidate that turned out inactive is read.
    has_work = is_first & ((tl.load(VALUES + entry) != 0.0) | (is_last == 0))
    grad_scale = tl.load(GRAD_SCALE)
    if has_work & (tl.abs(grad_scale) < float("inf")):
        classes = column + tl.arange(0, 1)
        dimension = tl.arange(0, DEPTH)
        place, prototype, buffer, inverse = _state(
            classes, classes >= 0, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        gradient = tl.zeros((1, DEPTH), dtype=tl.float32)
        count = tl.zeros((1,), dtype=tl.int32)
        is_same = 1
        while is_same > 0:
            gradient, count = _add_entry(
                gradient, count, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes, dimension, depth
            )
            entry += 1
            after = tl.load(COLUMNS + tl.minimum(entry, num_entries - 1))
            is_same = ((entry < num_entries) & (after == column)).to(tl.int32)
        gradient = _tangent(gradient, prototype, inverse) * grad_scale
        _apply(
            gradient, prototype, buffer, place, count > 0, classes, dimension, PROTOTYPES, BUFFER,
            INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth, HAS_BUFFER, NESTEROV,
        )  # fmt: skip


def refresh_copy(prototypes: Tensor, copy: Tensor, inverse_norms: Tensor) -> Tensor:
    """See ``head_reference.refresh_copy``."""
    num_classes, depth = prototypes.shape
    largest = torch.zeros((), dtype=torch.float32, device=prototypes.device)
    wide = power_of_two(depth)
    _refresh[(triton.cdiv(num_classes, CLASSES_KEPT),)](
        prototypes.contiguous(), inverse_norms, copy, largest, num_classes, depth, CLASSES_KEPT,
        wide, num_warps=4 if wide <= 512 else 8,
    )  # fmt: skip
    return _error(largest)


def _error(largest: Tensor) -> Tensor:
    """The length of the largest error from its square; NaN of prototypes that have no direction."""
    return torch.where(largest.isinf(), torch.nan, largest.sqrt())


def sgd_update(
    gradient: ClassGradient, embeddings: Tensor, state: PrototypeState, rule: SgdRule
) -> Tensor:
    """See ``head_reference.sgd_update``."""
    num_classes, depth = state.prototypes.shape
    columns = gradient.columns.to(torch.int32)
    entries = (columns, gradient.rows, gradient.values)
    given, largest = _arguments(state, rule)
    wide = power_of_two(depth)
    flags = (state.momentum is not None, rule.nesterov)
    warps = 1 if wide <= 512 else 4
    if rule.only_active and len(columns):
        _active[(len(columns),)](
            *entries, embeddings, *given, largest, rule.lr, rule.momentum, rule.weight_decay,
            len(columns), depth, *flags, wide, num_warps=warps,
        )  # fmt: skip
    elif not rule.only_active:
        programs = triton.cdiv(num_classes, CLASSES)
        edges = torch.arange(programs + 1, dtype=torch.int32, device=columns.device) * CLASSES
        segments = torch.searchsorted(columns, edges, out_int32=True)
        _sweep[(programs,)](
            *entries, segments, embeddings, *given, largest, rule.lr, rule.momentum,
            rule.weight_decay, num_classes, depth, *flags, CLASSES, wide, num_warps=warps,
        )  # fmt: skip
    return _error(largest)


def sgd_update_rows(
    classes: slice, rows: Tensor, state: PrototypeState, rule: SgdRule, unit_factor: Tensor | None
) -> Tensor:
    """See ``head_reference.sgd_update_rows``."""
    depth = state.prototypes.shape[1]
    given, largest = _arguments(state.part(classes), rule)
    wide = power_of_two(depth)
    _given[(len(rows),)](
        rows.contiguous(), *given, largest if unit_factor is None else unit_factor.float(), largest,
        rule.lr, rule.momentum, rule.weight_decay, depth,
        state.momentum is not None, rule.nesterov, rule.only_active, unit_factor is not None, wide,
        num_warps=1 if wide <= 512 else 4,
    )  # fmt: skip
    return _error(largest)


def _arguments(state: PrototypeState, rule: SgdRule) -> tuple[tuple[Tensor, ...], Tensor]:
    """What every update kernel takes, and where it writes the largest squared error."""
    prototypes, momentum, inverse_norms, copy = state
    largest = torch.zeros((), dtype=torch.float32, device=prototypes.device)
    buffer = prototypes if momentum is None else momentum
    return (prototypes, buffer, inverse_norms, copy, rule.grad_scale.float()), largest
