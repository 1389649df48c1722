"""Solve: the root of every row on its list, in float64, and the posterior as a list (F5, F6)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import GROUP, SolvedRows
from qmargin.maths.divergences import uses_slack

BLOCK = 1024
MAX_STEPS = 64
NUM_HALVINGS = 90  # above alpha = 2


@triton.jit
def _collect(
    SCORES, GROUPS, STARTS, FLOOR, VALUES, COLUMNS, COUNT, capacity,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the candidates of a row into its list; count them all, fitting or not."""
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    floor = tl.load(FLOOR + row)
    target = begin * capacity
    limit = (end - begin) * capacity
    count = 0
    for start in range(begin * GROUP, end * GROUP, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end * GROUP
        value = tl.load(SCORES + entry, mask=inside, other=float("-inf"))
        is_candidate = (value > floor).to(tl.int32)
        number = tl.sum(is_candidate, 0)
        if number > 0:
            group = tl.load(GROUPS + entry // GROUP, mask=inside, other=0)
            column = group * GROUP + (entry % GROUP).to(tl.int32)
            place = count + tl.cumsum(is_candidate, 0) - 1
            fits = (is_candidate > 0) & (place < limit)
            tl.store(VALUES + target + place, value, mask=fits)
            tl.store(COLUMNS + target + place, column, mask=fits)
        count += number
    tl.store(COUNT + row, count)


@triton.jit
def _sums(VALUES, target, count, level, best, rate, power, log_reference, gap, BLOCK: tl.constexpr):
    """Mass and slope of a row at a trial level, the target included."""
    own = level + gap
    log_own = tl.log(tl.where(own > 0, own, 1.0))
    mass = tl.where(own > 0, tl.exp(log_reference + power * log_own), 0.0)
    slope = tl.where(own > 0, tl.exp(log_reference + (power - 1.0) * log_own), 0.0)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        value = tl.load(VALUES + target + entry, mask=entry < count, other=float("-inf"))
        height = level + (value.to(tl.float64) - best) * rate
        is_active = height > 0
        log_height = tl.log(tl.where(is_active, height, 1.0))
        posterior = tl.where(is_active, tl.exp(power * log_height), 0.0)
        mass += tl.sum(posterior, 0)
        slope += tl.sum(tl.where(is_active, posterior / height, 0.0), 0)
    return mass, slope


@triton.jit
def _root(
    VALUES, STARTS, COUNT, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS,
    ANCHOR, LEVEL, MASS, EXCESS, ERROR, ACTIVE, capacity,
    STEPS: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Root of a row; the posterior replaces the scores in its list."""
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    target = begin * capacity
    count = tl.minimum(tl.load(COUNT + row), ((end - begin) * capacity).to(tl.int32))
    order = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    power = 1.0 / order
    rate = order * scale
    running = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        value = tl.load(VALUES + target + entry, mask=entry < count, other=float("-inf"))
        running = tl.maximum(running, value)
    best = tl.max(running, 0).to(tl.float64)
    best = tl.where(count > 0, best, -1.0)
    log_reference = tl.load(TARGET_LOG_REFERENCE + row)
    gap = (tl.load(TARGET_LOGIT + row) - best * scale) * order
    alone = tl.exp(-order * log_reference)
    level = tl.minimum(1.0, alone - gap)
    step = 0
    is_moving = 1
    while (step < STEPS) & (is_moving > 0):
        mass, slope = _sums(
            VALUES, target, count, level, best, rate, power, log_reference, gap, BLOCK
        )
        move = mass / slope * (tl.exp(-order * tl.log(mass)) - 1.0)
        level += move
        is_moving = (tl.abs(mass - 1.0) > 1e-12).to(tl.int32)
        step += 1
    if HALVINGS > 0:
        # Bounds: all mass on one class, or spread evenly over the list and the target.
        share = tl.exp(-order * tl.log((count + 1).to(tl.float64)))
        low = tl.minimum(share, alone * share - gap)
        high = level
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            mass, slope = _sums(
                VALUES, target, count, middle, best, rate, power, log_reference, gap, BLOCK
            )
            low = tl.where(mass > 1.0, low, middle)
            high = tl.where(mass > 1.0, middle, high)
        level = 0.5 * (low + high)
    others = level * 0.0
    excess = level * 0.0
    active = 0
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < count
        value = tl.load(VALUES + target + entry, mask=inside, other=float("-inf"))
        height = level + (value.to(tl.float64) - best) * rate
        is_active = height > 0
        log_height = tl.log(tl.where(is_active, height, 1.0))
        posterior = tl.where(is_active, tl.exp(power * log_height), 0.0)
        others += tl.sum(posterior, 0)
        excess += tl.sum(tl.where(is_active, posterior * height, 0.0), 0)
        single = posterior.to(tl.float32)
        active += tl.sum((single > 0).to(tl.int32), 0)
        tl.store(VALUES + target + entry, single, mask=inside)
    own = level + gap
    log_own = tl.log(tl.where(own > 0, own, 1.0))
    own_mass = tl.where(own > 0, tl.exp(log_reference + power * log_own), 0.0)
    tl.store(ANCHOR + row, best * scale)
    tl.store(LEVEL + row, level)
    tl.store(MASS + row, others)
    tl.store(EXCESS + row, excess)
    tl.store(ERROR + row, tl.abs(others + own_mass - 1.0))
    tl.store(ACTIVE + row, active)


@triton.jit
def _emit(
    VALUES, COLUMNS, STARTS, COUNT, ACTIVE_STARTS, OUT_COLUMNS, OUT_ROWS, OUT_POSTERIOR, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the active entries of a row to their place in the batch's list."""
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    target = begin * capacity
    limit = (tl.load(STARTS + row + 1) - begin) * capacity
    count = tl.minimum(tl.load(COUNT + row), limit.to(tl.int32))
    place = tl.load(ACTIVE_STARTS + row)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < count
        value = tl.load(VALUES + target + entry, mask=inside, other=0.0)
        column = tl.load(COLUMNS + target + entry, mask=inside, other=0)
        is_active = (value > 0).to(tl.int32)
        position = place + tl.cumsum(is_active, 0) - 1
        tl.store(OUT_COLUMNS + position, column, mask=is_active > 0)
        tl.store(OUT_ROWS + position, row, mask=is_active > 0)
        tl.store(OUT_POSTERIOR + position, value, mask=is_active > 0)
        place += tl.sum(is_active, 0)


@lru_cache(maxsize=64)
def _settings(order: float, scale: float, device: torch.device) -> Tensor:
    """Float64 numbers for kernels, whose plain float arguments are float32."""
    return torch.tensor([order, scale], dtype=torch.float64, device=device)


def solve_lists(
    scores: Tensor,
    groups: Tensor,
    rows: Tensor,
    starts: Tensor,
    target_logits: Tensor,
    target_log_reference: Tensor,
    *,
    scale: float,
    order: float,
    floor: Tensor,
    capacity: int,
) -> SolvedRows:
    """See ``head_reference.solve_lists``."""
    num_rows, device = len(target_logits), scores.device
    values = torch.empty(max(1, len(groups) * capacity), dtype=torch.float32, device=device)
    columns = torch.empty(values.shape, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    floor = floor.float()
    floor = floor - floor.abs() * 2e-7  # not above the float64 floor
    _collect[(num_rows,)](
        scores, groups, starts, floor, values, columns, counts, capacity, GROUP, BLOCK, num_warps=4
    )
    wide = torch.empty((5, num_rows), dtype=torch.float64, device=device)
    anchor, level, others, excess, error = wide.unbind()
    active = torch.empty_like(counts)
    is_newton = order <= 1.0
    _root[(num_rows,)](
        values, starts, counts, target_logits, target_log_reference,
        _settings(order, scale, device), anchor, level, others, excess, error, active, capacity,
        MAX_STEPS if is_newton else 0, 0 if is_newton else NUM_HALVINGS, BLOCK, num_warps=4,
    )  # fmt: skip
    if uses_slack(order):  # the solver's convention near alpha = 1
        level = (level - 1.0) / order
    has_overflowed = counts > starts.diff() * capacity
    active_starts = torch.nn.functional.pad(active.cumsum(0), (1, 0))
    total = int(active_starts[-1])
    out_columns = torch.empty(total, dtype=torch.int32, device=device)
    out_rows = torch.empty_like(out_columns)
    posterior = torch.empty(total, dtype=torch.float32, device=device)
    if total:
        _emit[(num_rows,)](
            values, columns, starts, counts, active_starts, out_columns, out_rows, posterior,
            capacity, BLOCK, num_warps=4,
        )  # fmt: skip
    return SolvedRows(
        anchor, level, others, excess, error, out_rows, out_columns, posterior, active_starts,
        has_overflowed,
    )  # fmt: skip
