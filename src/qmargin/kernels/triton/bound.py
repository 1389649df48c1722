"""Bound and list: the root over group maxima, and the pairs that can matter (F1, F4, F5, F6)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import Pairs, Target

BLOCK = 1024
NO_LIMIT = (1 << 31) - 1  # entries of a list are counted in 32 bits


@triton.jit
def _starts(COUNTS, STARTS, TOTAL, num_rows, room, BLOCK: tl.constexpr):
    position = tl.zeros((1,), tl.int64)
    tl.store(STARTS + tl.arange(0, 1), position)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = tl.load(COUNTS + row, mask=row < num_rows, other=0).to(tl.int64)
        ends = position + tl.cumsum(counts, 0)
        tl.store(STARTS + 1 + row, tl.minimum(ends, room), mask=row < num_rows)
        position += tl.sum(counts, 0)
    tl.store(TOTAL + tl.arange(0, 1), position)


def list_starts(counts: Tensor, total: Tensor, room: int | None) -> Tensor:
    """Running sums ``[B + 1]`` of ``counts`` ``[B]``, none above ``room``; their sum in ``total``.

    With starts that end at the room, kernels never write past it. Whether that cut a list short is
    for the caller to see, from the total.
    """
    starts = torch.empty(len(counts) + 1, dtype=torch.int64, device=counts.device)
    limit = NO_LIMIT if room is None else room
    _starts[(1,)](counts, starts, total, len(counts), limit, BLOCK, num_warps=4)
    return starts


BOUND_BLOCK = 4096
# Newton runs on the maxima of BLOCK strided sets of groups, which stay in registers: a subset too,
# so still a lower bound (F1), and one that lists hardly more groups than all the maxima would.
COARSE_STEPS = 6
ROUNDING = 1e-5  # of float32 sums over the maxima, in units of the height


@triton.jit
def _moved(level, mass, slope, b):
    """Newton on the norm of the mass: climb towards the root, never fall."""
    move = mass / slope * (tl.exp2(-b * tl.log2(mass)) - 1.0)
    return tl.where(mass > 1.0, level + move, level)


@triton.jit
def _powers(height, power, log2_reference):
    """Posterior and slope of classes at a height; zero off the support."""
    safe = tl.where(height > 0, height, 1.0)
    posterior = tl.where(height > 0, tl.exp2(log2_reference + power * tl.log2(safe)), 0.0)
    return posterior, posterior / safe


@triton.jit
def _bound(
    MAXIMA, TARGET_LOGIT, TARGET_LOG_REFERENCE, SLACK, FLOOR, COUNT, num_groups, scale, b,
    STEPS: tl.constexpr, ROUNDING: tl.constexpr, BOUND_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    coarse = tl.full((BOUND_BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_groups, BOUND_BLOCK):
        group = start + tl.arange(0, BOUND_BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        coarse = tl.maximum(coarse, value)
    best = tl.max(coarse, 0)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    # Heights relative to the best other class: x_j = level + b * scale * (c_j - best).
    anchor = best.to(tl.float64) * scale
    log2_reference = tl.load(TARGET_LOG_REFERENCE + row).to(tl.float32) * 1.4426950408889634
    gap = (tl.load(TARGET_LOGIT + row) - anchor).to(tl.float32) * b
    level = tl.minimum(1.0, tl.exp2(-b * log2_reference) - gap)
    power = 1.0 / b
    for _ in range(STEPS):
        mass, slope = _powers(level + gap, power, log2_reference)
        masses, slopes = _powers(level + (coarse - best) * (b * scale), power, 0.0)
        level = _moved(level, mass + tl.sum(masses, 0), slope + tl.sum(slopes, 0), b)
    level += ROUNDING * (1.0 + tl.abs(level))  # a higher level is a lower tau
    slack = tl.load(SLACK + row)
    edge = best.to(tl.float64) - level.to(tl.float64) / (b * scale)
    tl.store(FLOOR + row, edge - slack)
    floor = (edge - 2.0 * slack).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)  # not above the float64 floor
    counts = tl.zeros((BOUND_BLOCK,), tl.int32)
    for start in range(0, num_groups, BOUND_BLOCK):
        group = start + tl.arange(0, BOUND_BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        counts += (value > floor).to(tl.int32)
    tl.store(COUNT + row, tl.sum(counts, 0))


@triton.jit
def _list(MAXIMA, FLOOR, SLACK, STARTS, GROUPS, ROWS, num_groups, BOUND_BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = (tl.load(FLOOR + row) - tl.load(SLACK + row)).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)
    position = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    for start in range(0, num_groups, BOUND_BLOCK):
        group = start + tl.arange(0, BOUND_BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        is_listed = (value > floor).to(tl.int32)
        count = tl.sum(is_listed, 0)
        if count > 0:
            place = position + tl.cumsum(is_listed, 0) - 1
            fits = (is_listed > 0) & (place < end)
            tl.store(GROUPS + place, group, mask=fits)
            tl.store(ROWS + place, row, mask=fits)
        position += count


def bound_pairs(
    maxima: Tensor, target: Target, slack: Tensor, *, scale: float, b: float
) -> tuple[Tensor, Tensor]:
    """Floor of each row ``[B]`` (see ``Pairs``) and how many groups it lists, ``[B]``."""
    num_rows, num_groups = maxima.shape
    floor = torch.empty(num_rows, dtype=torch.float64, device=maxima.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=maxima.device)
    _bound[(num_rows,)](
        maxima, target.logits, target.log_reference, slack, floor, counts, num_groups, scale, b,
        COARSE_STEPS if b <= 1.0 else 0, ROUNDING, BOUND_BLOCK, num_warps=8,
    )  # fmt: skip
    return floor, counts


def write_pairs(maxima: Tensor, floor: Tensor, slack: Tensor, starts: Tensor, room: int) -> Pairs:
    """The lists, in ``room`` entries: what is left of it holds a group past the last."""
    num_rows, num_groups = maxima.shape
    groups = torch.full((room,), num_groups, dtype=torch.int32, device=maxima.device)
    rows = torch.empty_like(groups)
    if room:
        _list[(num_rows,)](
            maxima, floor, slack, starts, groups, rows, num_groups, 1024, num_warps=4
        )
    return Pairs(groups, rows, starts, floor, slack)


@triton.jit
def _count_listed(MAXIMA, FLOOR, SLACK, COUNT, num_groups, BOUND_BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = (tl.load(FLOOR + row) - tl.load(SLACK + row)).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)
    counts = tl.zeros((BOUND_BLOCK,), tl.int32)
    for start in range(0, num_groups, BOUND_BLOCK):
        group = start + tl.arange(0, BOUND_BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        counts += (value > floor).to(tl.int32)
    tl.store(COUNT + row, tl.sum(counts, 0))


def list_pairs(
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Pairs:
    """See ``head_reference.list_pairs``; float32 sums, their rounding taken off the bound."""
    floor, counts = bound_pairs(maxima, target, slack, scale=scale, b=b)
    if reduce is not None:
        floor = reduce(floor + slack) - slack
        num_rows, num_groups = maxima.shape
        _count_listed[(num_rows,)](
            maxima, floor, slack, counts, num_groups, BOUND_BLOCK, num_warps=8
        )
    total = torch.empty(1, dtype=torch.int64, device=maxima.device)
    starts = list_starts(counts, total, None)
    return write_pairs(maxima, floor, slack, starts, int(total))
