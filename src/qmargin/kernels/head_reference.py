"""The sparse head's operations in plain PyTorch: the truth for the kernels, and the CPU path.

Classes come in groups of ``GROUP`` consecutive ones. A *pair* is a row and a group that may hold
active classes of that row; pairs are listed row by row (``groups``, ``starts``). No operation here
makes a ``[B, k]`` tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qmargin.kernels.head_records import (
    GROUP,
    Candidates,
    ClassGradient,
    ClassOrder,
    Lengths,
    ListOverflow,
    Pairs,
    PreparedRows,
    Rows,
    SolvedRows,
    Support,
)
from qmargin.maths.objective import label_loss, posterior_rows
from qmargin.maths.threshold import bound_from_below, heights, slacks, solve_newton, solve_rows
from qmargin.reading import Reading

BLOCK_CLASSES = 1 << 14  # classes scored at a time: [B, 16384] stays in cache for usual batches
BLOCK_ENTRIES = 1 << 16  # gathered prototypes at a time


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


def unit_rows(embeddings: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Embeddings divided by their lengths, ``[B, d]``, and the lengths ``[B]``.

    Rows whose label is ``ignored`` are taken as all ones, whatever they hold.
    """
    embeddings = torch.where((labels == ignored)[:, None], 1.0, embeddings)
    norms = embeddings.norm(dim=1)
    return embeddings / norms[:, None], norms


def unit_gradient(gradient: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """Gradient of the embeddings from that of the unit embeddings: its tangent, over the length."""
    radial = (gradient * unit).sum(1, keepdim=True)
    return (gradient - radial * unit) / norms[:, None]


def prepare_rows(
    embeddings: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    screen_dtype: torch.dtype,
) -> PreparedRows:
    """Rounded embeddings, the length of their rounding errors (F3), and the target's cosines."""
    rounded = embeddings.to(screen_dtype)
    rounding = (embeddings - rounded.to(embeddings.dtype)).norm(dim=1)
    own = prototypes[labels] * inverse_norms[labels][:, None]
    return PreparedRows(embeddings, rounded, rounding, own, (embeddings * own).sum(1))


def group_maxima(embeddings: Tensor, copy: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Largest cosine of each group, ``[B, ceil(k / GROUP)]``, the target and padding left out."""
    num_groups = -(-num_classes // GROUP)
    if embeddings.dtype in (torch.float16, torch.bfloat16):
        embeddings = embeddings.float()  # products and maxima are float32, as F3 takes for granted
    maxima = embeddings.new_full((len(embeddings), num_groups), -math.inf)
    for start in range(0, num_classes, BLOCK_CLASSES):
        stop = min(start + BLOCK_CLASSES, num_classes)
        cosines = embeddings @ copy[start:stop].to(embeddings.dtype).t()  # [B, block]
        drop_targets_(cosines, labels - start)
        full = (stop - start) // GROUP
        first = start // GROUP
        grouped = cosines[:, : full * GROUP].unflatten(1, (full, GROUP)) if full else None
        if grouped is not None:
            torch.amax(grouped, 2, out=maxima[:, first : first + full])
        if full * GROUP < stop - start:
            maxima[:, first + full] = cosines[:, full * GROUP :].amax(1)
    return maxima


def drop_targets_(cosines: Tensor, local_labels: Tensor) -> None:
    """Mask each row's target where it lies among these columns, without waiting for the device."""
    num_columns = cosines.shape[1]
    is_here = (local_labels >= 0) & (local_labels < num_columns)
    index = local_labels.clamp(0, num_columns - 1)[:, None]
    kept = cosines.gather(1, index)
    cosines.scatter_(1, index, kept.masked_fill(is_here[:, None], -torch.inf))


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


def list_pairs(
    maxima: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    slack: Tensor,
    *,
    scale: float,
    order: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Pairs:
    """Pairs that may hold active classes, given that maxima are within ``slack`` of the truth (F3).

    Args:
        maxima: ``[B, g]`` cosines.
        target_logits: ``[B]`` float64.
        target_log_reference: ``[B]`` float64.
        slack: ``[B]`` float64, in cosine.
        scale: ``s``.
        order: ``alpha - 1``, positive.
        reduce: Makes one bound of those of several ranks, each from its own classes: the largest.
    """
    tau_low = bound_tau(maxima, target_logits, target_log_reference, scale=scale, order=order)
    edge = (tau_low - 1.0 / order) / scale
    edge = edge if reduce is None else reduce(edge)
    is_listed = maxima.double() > (edge - 2.0 * slack)[:, None]
    starts = torch.nn.functional.pad(is_listed.sum(1).cumsum(0), (1, 0))
    rows, groups = is_listed.nonzero(as_tuple=True)
    return Pairs(groups, rows, starts, edge - slack, slack)


def score_candidates(batch: Rows, pairs: Pairs) -> Candidates:
    """Exact cosines of the classes in listed pairs that can be active, row by row.

    Scores come from the master prototypes; the copy is there for kernels, which filter with it.
    """
    prepared, _, prototypes, inverse_norms, labels = batch
    num_classes, groups, rows = len(prototypes), pairs.groups, pairs.rows
    member = torch.arange(GROUP, device=groups.device)
    scores = prototypes.new_empty((len(groups), GROUP))
    order = groups.argsort(stable=True)  # each group's prototypes are read once
    step = max(1, BLOCK_ENTRIES // GROUP)
    for first in range(0, len(groups), step):
        some = order[first : first + step]
        needed, position = torch.unique_consecutive(groups[some], return_inverse=True)
        block = (needed[:, None] * GROUP + member).clamp_max(num_classes - 1)
        unit = prototypes[block] * inverse_norms[block][..., None]
        vectors = prepared.embeddings[rows[some]][:, :, None]
        scores[some] = torch.bmm(unit[position], vectors).squeeze(2)
    columns = groups[:, None] * GROUP + member
    is_candidate = scores.double() > pairs.floor[rows, None]
    is_candidate &= (columns < num_classes) & (columns != labels[rows][:, None])
    pair, which = is_candidate.nonzero(as_tuple=True)
    counts = torch.bincount(rows[pair], minlength=len(labels))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Candidates(rows[pair], columns[pair, which], scores[pair, which], starts)


def solve_lists(
    candidates: Candidates,
    target_logits: Tensor,
    target_log_reference: Tensor,
    *,
    scale: float,
    order: float,
) -> SolvedRows:
    """Root, posterior and loss of every row from the exact scores of its candidates.

    Args:
        candidates: Every class that can be active.
        target_logits: ``[B]`` float64.
        target_log_reference: ``[B]`` float64.
        scale: ``s``.
        order: ``alpha - 1``, positive.
    """
    rows, columns, scores, starts = candidates
    counts = starts.diff()
    width = int(counts.max()) if len(counts) else 0
    position = torch.arange(len(rows), device=rows.device) - starts[rows]
    logits = scores.new_full((len(counts), width + 1), -math.inf, dtype=torch.float64)
    logits[rows, position] = scores.double() * scale
    logits[:, -1] = target_logits
    reference = torch.zeros_like(logits)
    reference[:, -1] = target_log_reference
    anchor, level, _ = solve_rows(logits, reference, order)
    posterior, levels = posterior_rows(logits, reference, anchor, level, order)
    loss, target, others_mass = label_loss(posterior, levels, target_log_reference, order)
    height = heights(levels[:, -1], order).clamp_min(0.0)
    in_reference = (target * height - (-order * target_log_reference).exp()) / (1.0 + order)
    return SolvedRows(
        loss,
        anchor - slacks(level, order),
        others_mass,
        in_reference,
        (posterior.sum(1) - 1.0).abs(),
        rows,
        columns,
        posterior[rows, position].to(scores.dtype),
        starts,
    )


def find_support(
    batch: Rows,
    maxima: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    slack: Tensor,
    *,
    scale: float,
    order: float,
    limit: int,
    expected: Lengths | None,
    has_gradient: bool,
) -> Support:
    """From group maxima to the solution: ``list_pairs``, ``score_candidates``, ``solve_lists``.

    Args:
        batch: What is scored.
        maxima: See ``list_pairs``, as the next three.
        target_logits: ``[B]`` float64.
        target_log_reference: ``[B]`` float64.
        slack: ``[B]`` float64, in cosine.
        scale: ``s``.
        order: ``alpha - 1``, positive.
        limit: Most pairs that may be listed; beyond it ``ListOverflow`` is raised, here or by
            ``Support.confirm``.
        expected: Lengths of an earlier batch's lists: a hint for kernels that would otherwise wait
            for the device to learn them. Wrong ones cost time, never truth.
        has_gradient: Also make what a backward pass will need.
    """
    terms = (target_logits, target_log_reference)
    pairs = list_pairs(maxima, *terms, slack, scale=scale, order=order)
    if len(pairs.groups) > limit:
        raise ListOverflow(maxima)
    candidates = score_candidates(batch, pairs)
    solved = solve_lists(candidates, *terms, scale=scale, order=order)
    lengths = Lengths(len(pairs.groups), len(candidates.rows))
    pulled = sorted_classes = None
    if has_gradient:
        pulled = pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(solved.columns, batch.labels)
    return Support(solved, pulled, sorted_classes, Reading(torch.tensor(lengths)), lengths, limit)


def pull_rows(solved: SolvedRows, prototypes: Tensor, inverse_norms: Tensor) -> Tensor:
    """``sum_j p_rj w_j`` over the others, ``[B, d]``: what pushes on the unit embeddings."""
    pulled = prototypes.new_zeros((len(solved.loss), prototypes.shape[1]))
    for first in range(0, len(solved.rows), BLOCK_ENTRIES):
        part = slice(first, first + BLOCK_ENTRIES)
        rows, columns = solved.rows[part], solved.columns[part]
        factor = solved.posterior[part] * inverse_norms[columns]
        pulled.index_add_(0, rows, prototypes[columns] * factor[:, None])
    return pulled


def class_order(columns: Tensor, labels: Tensor) -> ClassOrder:
    """Candidates' classes and the rows' own, sorted."""
    both = torch.cat([columns, labels.to(columns.dtype)])
    return ClassOrder(*both.sort(stable=True), len(columns))


def class_gradient(
    order: ClassOrder, solved: SolvedRows, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """Every (class, row) with a gradient, the targets included, in ascending order of class."""
    targets = torch.arange(len(weights), dtype=solved.rows.dtype, device=solved.rows.device)
    is_target = order.order >= order.num_candidates
    candidate = torch.where(is_target, 0, order.order)
    target = torch.where(is_target, order.order - order.num_candidates, 0)
    if not len(solved.rows):
        return ClassGradient(order.columns, targets[target], target_weights[target])
    rows = torch.where(is_target, targets[target], solved.rows[candidate])
    values = solved.posterior[candidate] * weights[rows]
    return ClassGradient(
        order.columns, rows, torch.where(is_target, target_weights[target], values)
    )


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
