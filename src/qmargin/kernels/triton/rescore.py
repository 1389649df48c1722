"""Filter and rescore: which classes of the listed groups can be active, and their exact scores.

The filter repeats the screen's products for the listed pairs, group by group, and keeps one bit per
class. Only classes whose bit is set are scored from the master prototypes, in float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import GROUP, Candidates, Pairs, Rows
from qmargin.kernels.triton.starts import list_starts
from qmargin.kernels.triton.tuning import power_of_two

SPLIT = 32  # programs per row
PAIRS = 64  # pairs a program expands at a time


@triton.jit
def _filter(
    ROUNDED, COPY, LABELS, FLOOR, SLACK, PAIR_ROWS, ORDER, SEGMENTS, MASKS, num_classes, depth,
    GROUP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    begin = tl.load(SEGMENTS + group)
    end = tl.load(SEGMENTS + group + 1)
    if begin == end:
        return
    member = tl.arange(0, GROUP)
    classes = group * GROUP + member
    prototypes = COPY + classes[:, None].to(tl.int64) * depth
    for start in range(begin, end, BR):
        entry = start + tl.arange(0, BR)
        is_entry = entry < end
        pair = tl.load(ORDER + entry, mask=is_entry, other=0)
        row = tl.load(PAIR_ROWS + pair, mask=is_entry, other=0)
        label = tl.load(LABELS + row, mask=is_entry, other=-1)
        floor = tl.load(FLOOR + row, mask=is_entry, other=0.0)
        floor = (floor - tl.load(SLACK + row, mask=is_entry, other=0.0)).to(tl.float32)
        floor -= 2.4e-7 * tl.abs(floor)  # not above the float64 floor
        embeddings = ROUNDED + row[:, None].to(tl.int64) * depth
        products = tl.zeros((BR, GROUP), dtype=tl.float32)
        for offset in range(0, depth, BK):
            column = offset + tl.arange(0, BK)
            inside = column[None, :] < depth
            x = tl.load(embeddings + column[None, :], mask=is_entry[:, None] & inside, other=0.0)
            w = tl.load(prototypes + column[None, :], mask=inside, other=0.0)
            products = tl.dot(x, w.T, products)
        is_candidate = (products > floor[:, None]) & (classes[None, :] < num_classes)
        is_candidate = is_candidate & (classes[None, :] != label[:, None])
        bits = tl.sum(is_candidate.to(tl.int32) << member[None, :], 1)
        tl.store(MASKS + pair, bits, mask=is_entry)


@triton.jit
def _count(MASKS, STARTS, COUNT, GROUP: tl.constexpr, PAIRS: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    member = tl.arange(0, GROUP)
    counts = tl.zeros((PAIRS,), dtype=tl.int32)
    for start in range(begin, end, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        bits = tl.load(MASKS + pair, mask=pair < end, other=0)
        counts += tl.sum((bits[:, None] >> member[None, :]) & 1, 1)
    tl.store(COUNT + row, tl.sum(counts, 0))


@triton.jit
def _expand(
    MASKS, GROUPS, STARTS, LIST_STARTS, ROWS, COLUMNS, GROUP: tl.constexpr, PAIRS: tl.constexpr
):
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    position = tl.load(LIST_STARTS + row)
    last = tl.load(LIST_STARTS + row + 1)
    member = tl.arange(0, GROUP)
    for start in range(begin, end, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        bits = tl.load(MASKS + pair, mask=pair < end, other=0)
        group = tl.load(GROUPS + pair, mask=pair < end, other=0)
        is_set = tl.reshape((bits[:, None] >> member[None, :]) & 1, (PAIRS * GROUP,))
        column = tl.reshape(group[:, None] * GROUP + member[None, :], (PAIRS * GROUP,))
        place = position + tl.cumsum(is_set, 0) - 1
        fits = (is_set > 0) & (place < last)
        tl.store(COLUMNS + place, column, mask=fits)
        tl.store(ROWS + place, row, mask=fits)
        position += tl.sum(is_set, 0)


@triton.jit
def _score(
    COLUMNS, STARTS, EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, SCORES, depth,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    x = tl.load(EMBEDDINGS + row.to(tl.int64) * depth + dimension, mask=is_value, other=0.0)
    for start in range(begin + part * BLOCK, end, BLOCK * SPLIT):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        column = tl.load(COLUMNS + entry, mask=inside, other=0)
        place = column[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(PROTOTYPES + place, mask=inside[:, None] & is_value[None, :], other=0.0)
        cosine = tl.sum(w * x[None, :], 1) * tl.load(INVERSE_NORMS + column, mask=inside, other=0.0)
        tl.store(SCORES + entry, cosine, mask=inside)


def score_candidates(batch: Rows, pairs: Pairs) -> Candidates:
    """See ``head_reference.score_candidates``."""
    masks, counts = candidate_bits(batch, pairs)
    total = torch.empty(1, dtype=torch.int64, device=masks.device)
    starts = list_starts(counts, total, None)
    return score_entries(batch, *expand_bits(masks, pairs, starts, int(total)), starts)


def candidate_bits(batch: Rows, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """One int32 per pair, whose bit ``j`` is set when the group's class ``j`` may be active.

    And how many bits are set in each row, ``[B]``.
    """
    rounded, groups, num_classes = batch.prepared.rounded, pairs.groups, len(batch.prototypes)
    num_rows = len(batch.labels)
    masks = torch.empty_like(groups)
    counts = torch.zeros(num_rows, dtype=torch.int32, device=groups.device)
    if not len(groups):
        return masks, counts
    num_groups = -(-num_classes // GROUP)
    ordered, order = groups.sort(stable=True)  # each group's prototypes are read once
    segments = torch.searchsorted(ordered, _numbers(num_groups + 1, groups.device), out_int32=True)
    per_group = len(groups) / num_groups
    rows = 16 if per_group < 24 else 32 if per_group < 40 else 64
    _filter[(num_groups,)](
        rounded, batch.copy, batch.labels, pairs.floor, pairs.slack, pairs.rows, order, segments,
        masks, num_classes, rounded.shape[1], GROUP, rows, 128, num_warps=1,
        num_stages=3 if rows == 16 else 2,
    )  # fmt: skip
    _count[(num_rows,)](masks, pairs.starts, counts, GROUP, PAIRS, num_warps=4)
    return masks, counts


@lru_cache(maxsize=4)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def expand_bits(masks: Tensor, pairs: Pairs, starts: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Row and class of every set bit, row by row, in lists of ``room`` entries."""
    rows, columns = torch.empty((2, room), dtype=torch.int32, device=masks.device).unbind()
    if room:
        _expand[(len(starts) - 1,)](
            masks, pairs.groups, pairs.starts, starts, rows, columns, GROUP, PAIRS, num_warps=4
        )
    return rows, columns


def score_entries(batch: Rows, rows: Tensor, columns: Tensor, starts: Tensor) -> Candidates:
    """Exact cosines of listed classes."""
    prototypes, depth = batch.prototypes, batch.prototypes.shape[1]
    scores = torch.empty(columns.shape, dtype=torch.float32, device=columns.device)
    if len(columns):
        _score[(len(batch.labels), SPLIT)](
            columns, starts, batch.prepared.embeddings, prototypes, batch.inverse_norms, scores,
            depth, SPLIT, power_of_two(depth), 8, num_warps=1 if depth <= 512 else 4,
        )  # fmt: skip
    return Candidates(rows, columns, scores, starts)
