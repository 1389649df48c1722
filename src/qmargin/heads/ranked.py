"""The sparse solve when the classes are split over ranks (M11, M13).

Each rank lists the candidates among its own classes. A lower bound of ``tau`` from any rank's
classes bounds it for all, so the largest serves everyone. Then the ranks exchange the candidates'
scores, a few numbers per row, and each solves every row with all of them: no rank waits for another
in the middle of a solve, and all have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.heads.collectives import Ranks
from qmargin.kernels.head_records import Candidates, Lengths, ListOverflow, Rows, Support
from qmargin.kernels.head_reference import class_order
from qmargin.reading import Reading

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


def own_labels(head: MarginClassifier, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels among this rank's classes, ``[B]``: -1 elsewhere; and with 0 there, to index with.

    A row that does not count has class 0 for its own: its loss is discarded.
    """
    columns = labels.clamp_min(0)
    if head.ranks.world == 1:
        return columns, columns
    local = head.shard.local(columns)
    return local, local.clamp_min(0)


def poisoned(target_cosines: Tensor, copy_error: Tensor) -> Tensor:
    """The targets' cosines ``[B]``; all NaN if a prototype of this rank has no direction.

    Lists and kernels compare, and a NaN loses every comparison: a class without a cosine would
    just not be listed. The loss of every row depends on it, so every row gets to know. Summed over
    the ranks, the NaN of one reaches all.
    """
    return torch.add(target_cosines, copy_error, alpha=0.0)


def find_support_of_ranks(
    kernels: Any,
    ranks: Ranks,
    batch: Rows,
    maxima: Tensor | None,
    target_logits: Tensor,
    target_log_reference: Tensor,
    slack: Tensor,
    *,
    scale: float,
    order: float,
    limit: int,
    has_gradient: bool,
) -> Support:
    """See ``head_reference.find_support``; lists are of this rank's classes, sums of everyone's."""
    assert maxima is not None
    terms = (target_logits, target_log_reference)
    numbers: dict[str, Any] = {"scale": scale, "order": order}
    pairs = kernels.list_pairs(maxima, *terms, slack, reduce=ranks.max_, **numbers)
    device = maxima.device
    listed = ranks.integers(len(pairs.groups), limit, device=device)
    if any(count > most for count, most in listed):  # all of them go on by blocks together
        raise ListOverflow(maxima)
    candidates = kernels.score_candidates(batch, pairs)
    merged, own = merge_candidates(candidates, ranks)
    solved = kernels.solve_lists(merged, *terms, **numbers)
    is_active = solved.posterior > 0
    support = torch.bincount(merged.rows[is_active].long(), minlength=len(target_logits))
    solved = solved._replace(
        rows=candidates.rows,
        columns=candidates.columns,
        posterior=solved.posterior[own],
        starts=candidates.starts,
    )
    pulled = sorted_classes = None
    if has_gradient:
        pulled = kernels.pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(solved.columns, batch.labels.clamp_min(0))
    lengths = Lengths(sum(count for count, _ in listed), len(candidates.rows))
    reading = Reading(torch.tensor(lengths))
    return Support(solved, pulled, sorted_classes, reading, lengths, lengths.pairs, support)


def merge_candidates(candidates: Candidates, ranks: Ranks) -> tuple[Candidates, Tensor]:
    """Everyone's candidates, row by row, and where in them this rank's own are."""
    device = candidates.scores.device
    asked = ranks.integers(len(candidates.rows), device=device)
    sizes = [size for (size,) in asked]
    rows = ranks.gather(candidates.rows.long(), sizes)
    rows, order = rows.sort(stable=True)
    scores = ranks.gather(candidates.scores, sizes)[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    counts = torch.bincount(rows, minlength=len(candidates.starts) - 1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    merged = Candidates(rows.to(candidates.rows.dtype), torch.zeros_like(rows), scores, starts)
    return merged, ranks.part(place, sizes)
