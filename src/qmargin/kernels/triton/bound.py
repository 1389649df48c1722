"""Bound and list: the root over group maxima, and the pairs that can matter (F1, F4, F5, F6)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_records import Pairs
from qmargin.kernels.triton.starts import list_starts

BLOCK = 4096
# Newton runs on the maxima of BLOCK strided sets of groups, which stay in registers: a subset too,
# so still a lower bound (F1), and one that lists hardly more groups than all the maxima would.
COARSE_STEPS = 6
ROUNDING = 1e-5  # of float32 sums over the maxima, in units of the height


@triton.jit
def _moved(level, mass, slope, order):
    """Newton on the norm of the mass: climb towards the root, never fall."""
    move = mass / slope * (tl.exp2(-order * tl.log2(mass)) - 1.0)
    return tl.where(mass > 1.0, level + move, level)


@triton.jit
def _powers(height, power, log2_reference):
    """Posterior and slope of classes at a height; zero off the support."""
    safe = tl.where(height > 0, height, 1.0)
    posterior = tl.where(height > 0, tl.exp2(log2_reference + power * tl.log2(safe)), 0.0)
    return posterior, posterior / safe


@triton.jit
def _bound(
    MAXIMA, TARGET_LOGIT, TARGET_LOG_REFERENCE, SLACK, FLOOR, COUNT, num_groups, scale, order,
    STEPS: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    coarse = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        coarse = tl.maximum(coarse, value)
    best = tl.max(coarse, 0)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    # Heights relative to the best other class: x_j = level + order * scale * (c_j - best).
    anchor = best.to(tl.float64) * scale
    log2_reference = tl.load(TARGET_LOG_REFERENCE + row).to(tl.float32) * 1.4426950408889634
    gap = (tl.load(TARGET_LOGIT + row) - anchor).to(tl.float32) * order
    level = tl.minimum(1.0, tl.exp2(-order * log2_reference) - gap)
    power = 1.0 / order
    for _ in range(STEPS):
        mass, slope = _powers(level + gap, power, log2_reference)
        masses, slopes = _powers(level + (coarse - best) * (order * scale), power, 0.0)
        level = _moved(level, mass + tl.sum(masses, 0), slope + tl.sum(slopes, 0), order)
    level += ROUNDING * (1.0 + tl.abs(level))  # a higher level is a lower tau
    slack = tl.load(SLACK + row)
    edge = best.to(tl.float64) - level.to(tl.float64) / (order * scale)
    tl.store(FLOOR + row, edge - slack)
    floor = (edge - 2.0 * slack).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)  # not above the float64 floor
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        counts += (value > floor).to(tl.int32)
    tl.store(COUNT + row, tl.sum(counts, 0))


@triton.jit
def _list(MAXIMA, FLOOR, SLACK, STARTS, GROUPS, ROWS, num_groups, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = (tl.load(FLOOR + row) - tl.load(SLACK + row)).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)
    position = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
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
    maxima: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    slack: Tensor,
    *,
    scale: float,
    order: float,
) -> tuple[Tensor, Tensor]:
    """Floor of each row ``[B]`` (see ``Pairs``) and how many groups it lists, ``[B]``."""
    num_rows, num_groups = maxima.shape
    floor = torch.empty(num_rows, dtype=torch.float64, device=maxima.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=maxima.device)
    _bound[(num_rows,)](
        maxima, target_logits, target_log_reference, slack, floor, counts, num_groups, scale, order,
        COARSE_STEPS if order <= 1.0 else 0, ROUNDING, BLOCK, num_warps=8,
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
def _count_listed(MAXIMA, FLOOR, SLACK, COUNT, num_groups, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = (tl.load(FLOOR + row) - tl.load(SLACK + row)).to(tl.float32)
    floor -= 2.4e-7 * tl.abs(floor)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        counts += (value > floor).to(tl.int32)
    tl.store(COUNT + row, tl.sum(counts, 0))


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
    """See ``head_reference.list_pairs``; float32 sums, their rounding taken off the bound."""
    terms = (target_logits, target_log_reference, slack)
    floor, counts = bound_pairs(maxima, *terms, scale=scale, order=order)
    if reduce is not None:
        floor = reduce(floor + slack) - slack
        num_rows, num_groups = maxima.shape
        _count_listed[(num_rows,)](maxima, floor, slack, counts, num_groups, BLOCK, num_warps=8)
    total = torch.empty(1, dtype=torch.int64, device=maxima.device)
    starts = list_starts(counts, total, None)
    return write_pairs(maxima, floor, slack, starts, int(total))
