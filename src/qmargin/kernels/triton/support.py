"""Find the support without waiting for the device: lists with room to spare, checked afterwards.

The lengths of the lists are known to the device alone, and waiting for them twice a step leaves it
idle while the host catches up. So lists get the room that the last step's needed and a quarter
more, all kernels are launched, and only then are the true lengths read, while the device still
works. A list that was too short makes the batch start over, with a wait for each length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qmargin.kernels.head_reference import Lengths, ListOverflow, Rows, SolvedRows
from qmargin.kernels.reading import Reading
from qmargin.kernels.triton.bound import bound_pairs, write_pairs
from qmargin.kernels.triton.rescore import candidate_bits, expand_bits, score_entries
from qmargin.kernels.triton.solve import solve_lists
from qmargin.kernels.triton.starts import list_starts

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
) -> tuple[SolvedRows, Lengths]:
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
            raise ListOverflow
    pairs = write_pairs(maxima, floor, slack, starts, room)
    masks, counts = candidate_bits(batch, pairs)
    room = None if expected is None else _with_spare(expected.candidates)
    starts = list_starts(counts, totals[1:], room)
    lengths = Reading(totals)
    if room is None:
        room = int(lengths.wait()[1])
    rows, columns = expand_bits(masks, pairs, starts, room)
    candidates = score_entries(batch, rows, columns, starts)
    solved = solve_lists(candidates, *terms, **numbers)
    found = Lengths(*lengths.wait().tolist())
    if found.pairs > limit:
        raise ListOverflow
    if found.pairs > len(pairs.groups) or found.candidates > room:
        return find_support(
            batch, maxima, *terms, slack, **numbers, limit=limit, expected=None
        )  # fmt: skip
    length = found.candidates
    return solved._replace(
        rows=rows[:length], columns=columns[:length], posterior=solved.posterior[:length]
    ), found


def _with_spare(length: int) -> int:
    return -(-(length + length // 4) // ROOM) * ROOM
