"""Bound and list: the root over group maxima, and the groups that can matter (F1, F4, F5, F6)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NUM_STEPS = 5  # every iterate is a lower bound; five are within a thousandth of the root
ROUNDING = 1e-5  # of float32 sums over the maxima, in units of the height


@triton.jit
def _bound(
    MAXIMA, TARGET_LOGIT, TARGET_LOG_REFERENCE, TAU, num_groups, scale, order,
    STEPS: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    running = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        running = tl.maximum(running, value)
    best = tl.max(running, 0)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    # Heights relative to the best other class: x_j = level + order * scale * (c_j - best).
    anchor = best.to(tl.float64) * scale
    log_reference = tl.load(TARGET_LOG_REFERENCE + row)
    gap = (tl.load(TARGET_LOGIT + row) - anchor).to(tl.float32) * order
    log2_reference = log_reference.to(tl.float32) * 1.4426950408889634
    alone = tl.exp2(-order * log2_reference)  # height at which the target holds all the mass
    level = tl.minimum(1.0, alone - gap)
    power = 1.0 / order
    for _ in range(STEPS):
        target = level + gap
        log2_target = tl.log2(tl.maximum(target, 1e-30))
        mass = tl.where(target > 0, tl.exp2(log2_reference + power * log2_target), 0.0)
        slope = tl.where(target > 0, tl.exp2(log2_reference + (power - 1.0) * log2_target), 0.0)
        masses = tl.zeros((BLOCK,), tl.float32)
        slopes = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, num_groups, BLOCK):
            group = start + tl.arange(0, BLOCK)
            value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
            height = level + (value - best) * (order * scale)
            log2_height = tl.log2(tl.maximum(height, 1e-30))
            posterior = tl.where(height > 0, tl.exp2(power * log2_height), 0.0)
            masses += posterior
            slopes += tl.where(height > 0, posterior / height, 0.0)
        mass += tl.sum(masses, 0)
        slope += tl.sum(slopes, 0)
        move = mass / slope * (tl.exp2(-order * tl.log2(mass)) - 1.0)
        # A target that holds everything alone is exact; otherwise climb, never fall.
        level = tl.where(mass > 1.0, level + move, level)
    level += ROUNDING * (1.0 + tl.abs(level))  # a higher level is a lower tau
    tl.store(TAU + row, anchor - (level.to(tl.float64) - 1.0) / order)


def bound_tau(
    maxima: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    *,
    scale: float,
    order: float,
) -> Tensor:
    """See ``head_reference.bound_tau``; float32 sums, with their rounding taken off the bound."""
    num_rows, num_groups = maxima.shape
    tau = torch.empty(num_rows, dtype=torch.float64, device=maxima.device)
    _bound[(num_rows,)](
        maxima, target_logits, target_log_reference, tau, num_groups, scale, order,
        NUM_STEPS if order <= 1.0 else 0, ROUNDING, BLOCK, num_warps=8,
    )  # fmt: skip
    return tau


@triton.jit
def _count(MAXIMA, FLOOR, COUNT, num_groups, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = tl.load(FLOOR + row)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        counts += (value > floor).to(tl.int32)
    tl.store(COUNT + row, tl.sum(counts, 0))


@triton.jit
def _list(MAXIMA, FLOOR, STARTS, GROUPS, ROWS, num_groups, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_groups
    floor = tl.load(FLOOR + row)
    position = tl.load(STARTS + row)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        value = tl.load(base + group, mask=group < num_groups, other=float("-inf"))
        is_listed = (value > floor).to(tl.int32)
        count = tl.sum(is_listed, 0)
        if count > 0:
            place = position + tl.cumsum(is_listed, 0) - 1
            tl.store(GROUPS + place, group, mask=is_listed > 0)
            tl.store(ROWS + place, row, mask=is_listed > 0)
        position += count


def list_groups(maxima: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups and rows of the pairs above the floor, int32 ``[n]``, and ``starts``, int64."""
    num_rows, num_groups = maxima.shape
    floor = _round_down(floor)
    counts = torch.empty(num_rows, dtype=torch.int32, device=maxima.device)
    _count[(num_rows,)](maxima, floor, counts, num_groups, BLOCK, num_warps=8)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    total = int(starts[-1])  # the step waits for the device here: lists need their length
    groups = torch.empty(total, dtype=torch.int32, device=maxima.device)
    rows = torch.empty_like(groups)
    if total:
        _list[(num_rows,)](maxima, floor, starts, groups, rows, num_groups, BLOCK, num_warps=8)
    return groups, rows, starts


def _round_down(floor: Tensor) -> Tensor:
    """A float32 floor that is not above the float64 one."""
    rounded = floor.float()
    return torch.where(rounded.double() > floor, rounded.nextafter(rounded - 1.0), rounded)
