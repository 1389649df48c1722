"""Momentum SGD fused with the refresh of the screened copy, in plain PyTorch.

One sweep over blocks of classes builds the gradient of a block, steps its prototypes and rewrites
their unit copy and inverse norms while they are at hand. Nothing of size ``[k, d]`` is allocated.
A kernel with the same signature may stand in for ``sgd_update`` and for ``sgd_update_rows``.

The rule is that of ``torch.optim.SGD`` without dampening. With ``g = grad_scale * gradient +
weight_decay * w``, ``v <- momentum * v + g`` and then ``w <- w - lr * v``, or with Nesterov
``w <- w - lr * (g + momentum * v)``. Buffers start at zero, which makes the first one ``g`` itself,
as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.kernels.head_records import ClassGradient
from qmargin.kernels.head_reference import prototype_gradient, refresh_copy

BLOCK_CLASSES = 1 << 13  # prototypes updated at a time: 16 MiB each for gradient and temporaries


class _Rule(NamedTuple):
    """Settings of one step."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    grad_scale: Tensor


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
    """Step prototypes in place from the sparse gradient of their cosines.

    Args:
        gradient: Sorted by class.
        embeddings: ``[B, d]``, unit length.
        prototypes: ``[k, d]``, stepped in place.
        momentum_buffer: ``[k, d]``, in place; None where ``momentum`` is zero.
        inverse_norms: ``[k]``: read for the gradient, then rewritten.
        copy: ``[K, d]``, ``K >= k``: unit prototypes in the precision of the screen, rewritten.
        lr: Learning rate.
        momentum: Share of the buffer that is kept.
        weight_decay: Added to the gradient, times the prototype.
        nesterov: Look ahead along the new buffer.
        grad_scale: 0-dim tensor on the device, multiplies the gradient. If it is not finite,
            nothing is written.
        only_active: Step only classes that have an entry other than zero in ``gradient``; otherwise
            every class.

    Returns:
        Largest ``|w_j - copy_j|`` of the classes that were stepped, a scalar; zero if none was.
    """
    largest = prototypes.new_zeros(())
    if not bool(grad_scale.isfinite()):
        return largest
    rule = _Rule(lr, momentum, weight_decay, nesterov, grad_scale)
    state = (prototypes, momentum_buffer, inverse_norms, copy)
    if only_active:
        for part in class_parts(with_entries(gradient)):
            active, rows = prototype_gradient(part, embeddings, prototypes, inverse_norms)
            largest = torch.maximum(largest, _step_listed(active.long(), rows, *state, rule))
        return largest
    for classes, rows in gradient_blocks(gradient, embeddings, prototypes, inverse_norms):
        largest = torch.maximum(largest, _step_block(rows, *_views(classes, *state), rule))
    return largest


def sgd_update_rows(
    classes: slice,
    rows: Tensor,
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
    unit_factor: Tensor | None,
) -> Tensor:
    """Step a range of consecutive classes, given the gradient of its prototypes.

    As ``sgd_update``, for the range ``classes`` with the gradient ``rows`` ``[n, d]``, which is
    overwritten. With ``only_active``, classes whose gradient is zero throughout are left alone.
    With ``unit_factor``, a scalar on the device, that times ``rows`` is the gradient of the unit
    prototypes.
    """
    if not bool(grad_scale.isfinite()):
        return prototypes.new_zeros(())
    rule = _Rule(lr, momentum, weight_decay, nesterov, grad_scale)
    rows = rows.to(prototypes.dtype)
    views = _views(classes, prototypes, momentum_buffer, inverse_norms, copy)
    if unit_factor is not None:
        rows = project_rows(rows, views[0], views[2], unit_factor)
    if not only_active:
        return _step_block(rows, *views, rule)
    active = (rows != 0).any(1).nonzero().flatten()
    return _step_listed(active, rows[active], *views, rule)


def project_rows(
    gradient: Tensor, prototypes: Tensor, inverse_norms: Tensor, factor: Tensor
) -> Tensor:
    """``factor`` times the gradient of prototypes ``[n, d]`` from that of their unit vectors.

    In place.
    """
    unit = prototypes * inverse_norms[:, None]
    gradient.sub_((gradient * unit).sum(1, keepdim=True) * unit)  # what would only lengthen it
    return gradient.mul_((inverse_norms * factor)[:, None])


def gradient_blocks(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of all classes, ascending, with the gradient of their prototypes, ``[n, d]``.

    A block may be stepped before the next is asked for: its gradient depends on no other block.
    """
    k, d = prototypes.shape
    starts = range(0, k, BLOCK_CLASSES)
    edges = torch.tensor([*starts, k], device=gradient.columns.device)
    cuts = torch.searchsorted(gradient.columns.long(), edges).tolist()
    for start, (first, last) in zip(starts, pairwise(cuts), strict=True):
        stop = min(start + BLOCK_CLASSES, k)
        block = prototypes.new_zeros((stop - start, d))
        if first < last:
            part = _entries(gradient, slice(first, last))
            classes, rows = prototype_gradient(part, embeddings, prototypes, inverse_norms)
            block.index_copy_(0, classes.long() - start, rows)
        yield slice(start, stop), block


def class_parts(gradient: ClassGradient) -> Iterator[ClassGradient]:
    """The gradient in parts of about ``BLOCK_CLASSES`` entries; no class is cut in two."""
    columns = gradient.columns
    cuts = torch.searchsorted(columns, columns[BLOCK_CLASSES::BLOCK_CLASSES].contiguous()).tolist()
    edges = sorted({0, *cuts, len(columns)})
    for first, last in pairwise(edges):
        yield _entries(gradient, slice(first, last))


def with_entries(gradient: ClassGradient) -> ClassGradient:
    """The gradient without entries that are exactly zero, such as targets of satisfied rows."""
    kept = (gradient.values != 0).nonzero().flatten()
    return ClassGradient(gradient.columns[kept], gradient.rows[kept], gradient.values[kept])


def _entries(gradient: ClassGradient, part: slice) -> ClassGradient:
    return ClassGradient(gradient.columns[part], gradient.rows[part], gradient.values[part])


def _views(
    classes: slice, prototypes: Tensor, buffer: Tensor | None, inverse_norms: Tensor, copy: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    part = None if buffer is None else buffer[classes]
    return prototypes[classes], part, inverse_norms[classes], copy[classes]


def _step_block(
    rows: Tensor,
    prototypes: Tensor,
    buffer: Tensor | None,
    inverse_norms: Tensor,
    copy: Tensor,
    rule: _Rule,
) -> Tensor:
    """Step whole tensors in place and refresh their copy."""
    _descend_(prototypes, rows, buffer, rule)
    return refresh_copy(prototypes, copy, inverse_norms)


def _step_listed(
    classes: Tensor,
    rows: Tensor,
    prototypes: Tensor,
    buffer: Tensor | None,
    inverse_norms: Tensor,
    copy: Tensor,
    rule: _Rule,
) -> Tensor:
    """Step the listed rows of the tensors; every other row is neither read nor written."""
    if not len(classes):
        return prototypes.new_zeros(())
    weights = prototypes[classes]
    velocity = None if buffer is None else buffer[classes]
    norms, rounded = inverse_norms[classes], torch.empty_like(weights, dtype=copy.dtype)
    error = _step_block(rows, weights, velocity, norms, rounded, rule)
    prototypes.index_copy_(0, classes, weights)
    inverse_norms.index_copy_(0, classes, norms)
    copy.index_copy_(0, classes, rounded)
    if buffer is not None and velocity is not None:
        buffer.index_copy_(0, classes, velocity)
    return error


def _descend_(weights: Tensor, rows: Tensor, buffer: Tensor | None, rule: _Rule) -> None:
    """One step of the rule, in the order of operations of ``torch.optim.SGD``."""
    direction = rows.mul_(rule.grad_scale).add_(weights, alpha=rule.weight_decay)
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(direction)
        direction = direction.add_(buffer, alpha=rule.momentum) if rule.nesterov else buffer
    weights.add_(direction, alpha=-rule.lr)
