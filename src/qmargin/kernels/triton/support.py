"""Find the support without waiting for the device: lists with room to spare, checked afterwards.

The lengths of the lists are known to the device alone, and waiting for them twice a step leaves it
idle while the host catches up. So lists get the room that the last step's needed and a quarter
more, all kernels are launched, and only then are the true lengths read, while the device still
works (``Support.confirm``). A list that was too short makes the batch start over, with a wait for
each length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qmargin.kernels.head_records import Lengths, ListOverflow, Rows, Support
from qmargin.kernels.head_reference import class_order
from qmargin.kernels.triton.bound import bound_pairs, write_pairs
from qmargin.kernels.triton.gradients import pull_rows
from qmargin.kernels.triton.rescore import (
    candidate_bits,
    candidate_starts,
    expand_bits,
    score_entries,
)
from qmargin.kernels.triton.solve import solve_lists
from qmargin.kernels.triton.starts import list_starts
from qmargin.reading import Reading

ROOM = 1 << 14  # lists have a multiple of this many entries: allocations repeat


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
    """See ``head_reference.find_support``."""
    terms = (target_logits, target_log_reference)
    numbers: dict[str, Any] = {"scale": scale, "order": order}
    totals = torch.empty(2, dtype=torch.int64, device=maxima.device)
    floor, counts = bound_pairs(maxima, *terms, slack, **numbers)
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
    solved = solve_lists(candidates, *terms, **numbers)
    pulled = sorted_classes = None
    if has_gradient:
        pulled = pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(columns, batch.labels)
    return Support(solved, pulled, sorted_classes, lengths, Lengths(len(pairs.groups), room), limit)


def _with_spare(length: int) -> int:
    return -(-(length + length // 4) // ROOM) * ROOM
