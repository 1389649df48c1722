"""The sparse head's operations in plain PyTorch: the truth for the kernels, and the CPU path.

Classes come in groups of ``GROUP`` consecutive ones. A *pair* is a row and a group that may hold
active classes of that row; pairs are listed row by row (``groups``, ``starts``). No operation here
makes a ``[B, k]`` tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.maths.objective import posterior_rows
from qmargin.maths.threshold import bound_from_below, heights, slacks, solve_newton, solve_rows

GROUP = 32
BLOCK_CLASSES = 1 << 14  # classes scored at a time: [B, 16384] stays in cache for usual batches
BLOCK_ENTRIES = 1 << 16  # gathered prototypes at a time


class SolvedRows(NamedTuple):
    """The posterior of a batch as lists, row by row, with what the loss needs."""

    anchor: Tensor  # [B] float64, logit
    level: Tensor  # [B] float64
    others_mass: Tensor  # [B] float64, posterior mass of all classes but the target
    excess: Tensor  # [B] float64, sum of p * x over them
    mass_error: Tensor  # [B] float64
    rows: Tensor  # [n]: the batch's active entries, row by row
    columns: Tensor  # [n]: their classes
    posterior: Tensor  # [n] in the dtype of the scores
    starts: Tensor  # [B + 1] int64: where each row's list begins
    has_overflowed: Tensor  # [B] bool: lists that were too short; their other fields are void


def refresh_copy(prototypes: Tensor, copy: Tensor, inverse_norms: Tensor) -> Tensor:
    """Write unit prototypes into ``copy`` and their inverse norms; return the largest error.

    Args:
        prototypes: ``[k, d]``, the master copy.
        copy: ``[K, d]``, any dtype, ``K >= k``; rows past ``k`` are left alone.
        inverse_norms: ``[k]`` in the dtype of the prototypes.

    Returns:
        ``max_j |w_j - copy_j|``, a scalar: half of the certificate of the screen (F3).
    """
    largest = prototypes.new_zeros(())
    for start in range(0, len(prototypes), BLOCK_ENTRIES):
        block = prototypes[start : start + BLOCK_ENTRIES]
        inverse = 1.0 / block.norm(dim=1)
        unit = block * inverse[:, None]
        inverse_norms[start : start + len(block)] = inverse
        rounded = unit.to(copy.dtype)
        copy[start : start + len(block)] = rounded
        largest = torch.maximum(largest, (unit - rounded.to(unit.dtype)).norm(dim=1).amax())
    return largest


def group_maxima(embeddings: Tensor, copy: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Largest cosine of each group, ``[B, ceil(k / GROUP)]``, the target and padding left out."""
    num_groups = -(-num_classes // GROUP)
    maxima = embeddings.new_full((len(embeddings), num_groups), -math.inf)
    for start in range(0, num_classes, BLOCK_CLASSES):
        stop = min(start + BLOCK_CLASSES, num_classes)
        cosines = embeddings @ copy[start:stop].t()  # [B, block]
        _drop_targets_(cosines, labels - start)
        full = (stop - start) // GROUP
        first = start // GROUP
        grouped = cosines[:, : full * GROUP].unflatten(1, (full, GROUP)) if full else None
        if grouped is not None:
            torch.amax(grouped, 2, out=maxima[:, first : first + full])
        if full * GROUP < stop - start:
            maxima[:, first + full] = cosines[:, full * GROUP :].amax(1)
    return maxima


def _drop_targets_(cosines: Tensor, local_labels: Tensor) -> None:
    """Mask the target where it lies in this block of columns."""
    rows = ((local_labels >= 0) & (local_labels < cosines.shape[1])).nonzero().flatten()
    cosines[rows, local_labels[rows]] = -math.inf


def bound_tau(
    maxima: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    *,
    scale: float,
    order: float,
) -> Tensor:
    """Lower bound of ``tau`` for logits within rounding of ``scale * maxima``, ``[B]`` (F1, F4)."""
    logits = torch.cat([maxima.double() * scale, target_logits[:, None]], 1)
    reference = torch.zeros_like(logits)
    reference[:, -1] = target_log_reference
    if order > 1.0:
        anchor, level = bound_from_below(logits, reference, order)
    else:
        anchor, level, _ = solve_newton(logits, reference, order, tolerance=1e-6)
    return anchor - slacks(level, order)


def list_groups(maxima: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs above each row's floor, row by row: ``groups [n]``, ``rows [n]``, ``starts [B + 1]``."""
    is_listed = maxima > floor[:, None].to(maxima.dtype)
    counts = is_listed.sum(1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows, groups = is_listed.nonzero(as_tuple=True)
    return groups, rows, starts


def rescore(
    embeddings: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    labels: Tensor,
    groups: Tensor,
    rows: Tensor,
) -> Tensor:
    """Exact cosines of every listed pair, ``[n, GROUP]``; ``-inf`` for targets and padding."""
    num_classes = len(prototypes)
    scores = embeddings.new_empty((len(groups), GROUP))
    member = torch.arange(GROUP, device=groups.device)
    order = groups.argsort(stable=True)  # each group's prototypes are read once
    step = max(1, BLOCK_ENTRIES // GROUP)
    for first in range(0, len(groups), step):
        pairs = order[first : first + step]
        columns = groups[pairs][:, None] * GROUP + member
        is_void = (columns >= num_classes) | (columns == labels[rows[pairs]][:, None])
        columns = columns.clamp_max(num_classes - 1)
        needed, position = torch.unique_consecutive(groups[pairs], return_inverse=True)
        block_columns = (needed[:, None] * GROUP + member).clamp_max(num_classes - 1)
        unit = prototypes[block_columns] * inverse_norms[block_columns][..., None]
        product = torch.bmm(unit[position], embeddings[rows[pairs]][:, :, None]).squeeze(2)
        scores[pairs] = product.masked_fill(is_void, -math.inf)
    return scores


def solve_lists(
    scores: Tensor,
    groups: Tensor,
    rows: Tensor,
    starts: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    *,
    scale: float,
    order: float,
    floor: Tensor,
    capacity: int,
) -> SolvedRows:
    """Root, posterior and loss terms from the exact scores of the listed pairs.

    Args:
        scores: ``[n, GROUP]`` cosines.
        groups: ``[n]``.
        rows: ``[n]``.
        starts: ``[B + 1]``.
        target_logits: ``[B]`` float64.
        target_log_reference: ``[B]`` float64.
        scale: ``s``.
        order: ``alpha - 1``, positive.
        floor: ``[B]``: cosines at or below it are certainly inactive.
        capacity: Entries a row's list may hold per listed pair; more is an overflow.
    """
    is_candidate = scores > floor[rows, None].to(scores.dtype)
    pair, member = is_candidate.nonzero(as_tuple=True)
    row, columns = rows[pair], groups[pair] * GROUP + member
    counts = torch.bincount(row, minlength=len(starts) - 1)
    has_overflowed = counts > capacity * starts.diff()
    width = int(counts.max()) if len(counts) else 0
    begins = counts.cumsum(0) - counts
    position = torch.arange(len(row), device=row.device) - begins[row]
    logits = scores.new_full((len(counts), width + 1), -math.inf, dtype=torch.float64)
    logits[row, position] = scores[pair, member].double() * scale
    logits[:, -1] = target_logits
    reference = torch.zeros_like(logits)
    reference[:, -1] = target_log_reference
    anchor, level, _ = solve_rows(logits, reference, order)
    posterior, levels = posterior_rows(logits, reference, anchor, level, order)
    others = posterior[:, :-1]
    excess = torch.where(others > 0, others * heights(levels[:, :-1], order), 0.0).sum(1)
    entry = others[row, position]
    is_active = entry > 0
    active_counts = torch.bincount(row[is_active], minlength=len(counts))
    return SolvedRows(
        anchor,
        level,
        others.sum(1),
        excess,
        (posterior.sum(1) - 1.0).abs(),
        row[is_active],
        columns[is_active],
        entry[is_active].to(scores.dtype),
        torch.nn.functional.pad(active_counts.cumsum(0), (1, 0)),
        has_overflowed,
    )


def embedding_gradient(
    solved: SolvedRows, prototypes: Tensor, inverse_norms: Tensor, weights: Tensor
) -> Tensor:
    """``weight_r * sum_j p_rj w_j``, ``[B, d]``: gradient of the cosines of the others."""
    gradient = prototypes.new_zeros((len(weights), prototypes.shape[1]))
    for first in range(0, len(solved.rows), BLOCK_ENTRIES):
        part = slice(first, first + BLOCK_ENTRIES)
        rows, columns = solved.rows[part], solved.columns[part]
        factor = solved.posterior[part] * weights[rows] * inverse_norms[columns]
        gradient.index_add_(0, rows, prototypes[columns] * factor[:, None])
    return gradient


class ClassGradient(NamedTuple):
    """Gradient of the cosines' classes as a sparse matrix, sorted by class."""

    columns: Tensor  # [n], ascending
    rows: Tensor  # [n]
    values: Tensor  # [n]


def sort_by_class(
    solved: SolvedRows, labels: Tensor, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """Every (class, row) with a gradient, the targets included, in ascending order of class."""
    rows = solved.rows
    columns = torch.cat([solved.columns, labels.to(solved.columns.dtype)])
    values = torch.cat([solved.posterior * weights[rows], target_weights.to(weights.dtype)])
    rows = torch.cat([rows, torch.arange(len(labels), dtype=rows.dtype, device=rows.device)])
    columns, order = columns.sort(stable=True)
    return ClassGradient(columns, rows[order], values[order])


def prototype_gradient(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Active classes ``[A]`` and the gradient of their (unnormalised) prototypes ``[A, d]``."""
    classes, position = torch.unique_consecutive(gradient.columns, return_inverse=True)
    result = prototypes.new_zeros((len(classes), prototypes.shape[1]))
    for first in range(0, len(position), BLOCK_ENTRIES):
        part = slice(first, first + BLOCK_ENTRIES)
        entries = embeddings[gradient.rows[part]] * gradient.values[part][:, None]
        result.index_add_(0, position[part], entries.to(result.dtype))
    inverse = inverse_norms[classes][:, None]
    unit = prototypes[classes] * inverse
    radial = (result * unit).sum(1, keepdim=True)
    return classes, (result - radial * unit) * inverse
