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

from qmargin.kernels.head_reference import GROUP, Batch, Candidates, Pairs
from qmargin.kernels.triton.bound import NO_LIMIT
from qmargin.kernels.triton.screen import power_of_two

ENTRIES = 8  # that a program scores at a time
PAIRS = 64  # that a program expands


@triton.jit
def _filter(
    ROUNDED, COPY, LABELS, FLOOR, SLACK, PAIR_ROWS, ORDER, SEGMENTS, MASKS, COUNTS,
    num_classes, depth, GROUP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
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
        tl.store(COUNTS + pair, tl.sum(is_candidate.to(tl.int32), 1), mask=is_entry)


@triton.jit
def _candidate_starts(
    ENDS, PAIR_STARTS, STARTS, TOTAL, num_rows, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Where each row's candidates begin: where the candidates of the pairs before it end."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row <= num_rows
    pair = tl.load(PAIR_STARTS + row, mask=inside, other=0)
    start = tl.load(ENDS + pair - 1, mask=inside & (pair > 0), other=0).to(tl.int64)
    tl.store(STARTS + row, tl.minimum(start, room), mask=inside)
    tl.store(TOTAL + row - num_rows, start, mask=row == num_rows)


@triton.jit
def _expand(
    MASKS, ENDS, GROUPS, PAIR_ROWS, ROWS, COLUMNS, num_pairs, room,
    GROUP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    bits = tl.load(MASKS + pair, mask=inside, other=0)
    member = tl.arange(0, GROUP)
    is_set = (bits[:, None] >> member[None, :]) & 1
    end = tl.load(ENDS + pair, mask=inside, other=0)
    place = (end - tl.sum(is_set, 1))[:, None] + tl.cumsum(is_set, 1) - 1
    fits = (is_set > 0) & (place < room) & inside[:, None]
    group = tl.load(GROUPS + pair, mask=inside, other=0)
    row = tl.load(PAIR_ROWS + pair, mask=inside, other=0)
    tl.store(COLUMNS + place, group[:, None] * GROUP + member[None, :], mask=fits)
    tl.store(ROWS + place, tl.broadcast_to(row[:, None], (PAIRS, GROUP)), mask=fits)


@triton.jit
def _score(
    COLUMNS, STARTS, EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, SCORES, depth,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.load(STARTS + row)
    # Parts of a list are ranges of classes. Rows vary fastest, so programs that run together share
    # a range, and find each other's prototypes in cache.
    share = tl.cdiv(tl.load(STARTS + row + 1) - first, SPLIT)
    begin = first + part * share
    end = tl.minimum(begin + share, tl.load(STARTS + row + 1))
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    x = tl.load(EMBEDDINGS + row.to(tl.int64) * depth + dimension, mask=is_value, other=0.0)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        column = tl.load(COLUMNS + entry, mask=inside, other=0)
        place = column[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(PROTOTYPES + place, mask=inside[:, None] & is_value[None, :], other=0.0)
        cosine = tl.sum(w * x[None, :], 1) * tl.load(INVERSE_NORMS + column, mask=inside, other=0.0)
        tl.store(SCORES + entry, cosine, mask=inside)


def score_candidates(batch: Batch, pairs: Pairs) -> Candidates:
    """See ``head_reference.score_candidates``."""
    masks, ends = candidate_bits(batch, pairs)
    total = torch.empty(1, dtype=torch.int64, device=masks.device)
    starts = candidate_starts(ends, pairs, total, None)
    return score_entries(
        batch, *expand_bits(masks, ends, pairs, int(total), len(batch.prototypes)), starts
    )


def candidate_bits(batch: Batch, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """One int32 per pair, whose bit ``j`` is set when the group's class ``j`` may be active.

    And how many bits are set up to and including each pair.
    """
    rounded, groups, num_classes = batch.prepared.rounded, pairs.groups, len(batch.prototypes)
    masks, counts = torch.zeros((2, *groups.shape), dtype=torch.int32, device=groups.device)
    if not len(groups):
        return masks, counts
    num_groups = -(-num_classes // GROUP)
    ordered, order = groups.sort(stable=True)  # each group's prototypes are read once
    segments = torch.searchsorted(ordered, _numbers(num_groups + 1, groups.device), out_int32=True)
    per_group = len(groups) / num_groups
    rows = 16 if per_group < 24 else 32 if per_group < 40 else 64
    _filter[(num_groups,)](
        rounded, batch.copy, batch.labels, pairs.floor, pairs.slack, pairs.rows, order, segments,
        masks, counts, num_classes, rounded.shape[1], GROUP, rows, 128, num_warps=1,
        num_stages=3 if rows == 16 else 2,
    )  # fmt: skip
    return masks, counts.cumsum(0, dtype=torch.int32)


@lru_cache(maxsize=4)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def candidate_starts(ends: Tensor, pairs: Pairs, total: Tensor, room: int | None) -> Tensor:
    """See ``list_starts``, for the candidates of pairs."""
    num_rows = len(pairs.starts) - 1
    starts = torch.empty_like(pairs.starts)
    _candidate_starts[(triton.cdiv(num_rows + 1, 1024),)](
        ends, pairs.starts, starts, total, num_rows, NO_LIMIT if room is None else room, 1024,
        num_warps=4,
    )  # fmt: skip
    return starts


def expand_bits(
    masks: Tensor, ends: Tensor, pairs: Pairs, room: int, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Row and class of every set bit, row by row; what is left of ``room`` is past the classes."""
    columns = torch.full((room,), num_classes, dtype=torch.int32, device=masks.device)
    rows = torch.zeros_like(columns)  # what is made of spare entries is dropped, but must be safe
    if room and len(masks):
        _expand[(triton.cdiv(len(masks), PAIRS),)](
            masks, ends, pairs.groups, pairs.rows, rows, columns, len(masks), room, GROUP, PAIRS,
            num_warps=4,
        )  # fmt: skip
    return rows, columns


def score_entries(batch: Batch, rows: Tensor, columns: Tensor, starts: Tensor) -> Candidates:
    """Exact cosines of listed classes."""
    prototypes, depth = batch.prototypes, batch.prototypes.shape[1]
    num_rows = len(batch.labels)
    scores = torch.empty(columns.shape, dtype=torch.float32, device=columns.device)
    if len(columns):
        split = power_of_two(-(-len(columns) // (num_rows * 2 * ENTRIES)))
        split = min(max(split, 32), 1024)
        _score[(num_rows, split)](
            columns, starts, batch.prepared.embeddings, prototypes, batch.inverse_norms, scores,
            depth, split, power_of_two(depth), ENTRIES, num_warps=1 if depth <= 512 else 4,
        )  # fmt: skip
    return Candidates(rows, columns, scores, starts)
