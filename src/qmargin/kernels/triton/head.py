"""The operations of the sparse step, fused: the same names and meanings as ``head_reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from qmargin.kernels.head_reference import (
    Batch,
    Lengths,
    ListOverflow,
    Support,
    Target,
    class_order,
)
from qmargin.kernels.triton.bound import bound_pairs, list_pairs, list_starts, write_pairs
from qmargin.kernels.triton.gradients import class_gradient, prototype_gradient, pull_rows
from qmargin.kernels.triton.rescore import (
    candidate_bits,
    candidate_starts,
    expand_bits,
    score_candidates,
    score_entries,
)
from qmargin.kernels.triton.screen import group_maxima, prepare_rows, unit_gradient, unit_rows
from qmargin.kernels.triton.solve import solve_lists
from qmargin.kernels.triton.update import refresh_copy, sgd_update, sgd_update_rows
from qmargin.transfers import Reading

ROOM = 1 << 14  # lists have a multiple of this many entries: allocations repeat


def find_support(
    batch: Batch,
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    limit: int,
    expected: Lengths | None,
    has_gradient: bool,
) -> Support:
    """See ``head_reference.find_support``."""
    totals = torch.empty(2, dtype=torch.int64, device=maxima.device)
    floor, counts = bound_pairs(maxima, target, slack, scale=scale, b=b)
    room = None if expected is None else min(_with_spare(expected.pairs), limit)
    starts = list_starts(counts, totals[:1], room)
    if room is None:
        room = int(totals[0])
        if room > limit:
            raise ListOverflow(maxima)
    pairs = write_pairs(maxima, floor, slack, starts, room)
    masks, ends = candidate_bits(batch, pairs)
    room = None if expected is None else _with_spare(expected.candidates)
    starts = candidate_starts(ends, pairs, totals[1:], room)
    lengths = Reading(totals)
    if room is None:
        room = int(lengths.wait()[1])
    rows, columns = expand_bits(masks, ends, pairs, room, len(batch.prototypes))
    candidates = score_entries(batch, rows, columns, starts)
    solved = solve_lists(candidates, target, scale=scale, b=b)
    pulled = sorted_classes = None
    if has_gradient:
        pulled = pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(columns, batch.labels)
    return Support(solved, pulled, sorted_classes, lengths, Lengths(len(pairs.groups), room), limit)


def _with_spare(length: int) -> int:
    return -(-(length + length // 4) // ROOM) * ROOM


__all__ = [
    "class_gradient",
    "class_order",
    "find_support",
    "group_maxima",
    "list_pairs",
    "prepare_rows",
    "prototype_gradient",
    "pull_rows",
    "refresh_copy",
    "score_candidates",
    "sgd_update",
    "sgd_update_rows",
    "solve_lists",
    "unit_gradient",
    "unit_rows",
]
