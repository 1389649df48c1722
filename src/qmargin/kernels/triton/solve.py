"""Solve: root, posterior and loss of every row on its list, in float64 (F5, F6)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import Candidates, SolvedRows, Target

BLOCK = 1024
MAX_STEPS = 64
NUM_HALVINGS = 90  # above alpha = 2


@triton.jit
def _powers(height, power, log_reference):
    """Posterior and slope of classes at a height; zero off the support."""
    safe = tl.where(height > 0, height, 1.0)
    posterior = tl.where(height > 0, tl.exp(log_reference + power * tl.log(safe)), 0.0)
    return posterior, posterior / safe


@triton.jit
def _sums(SCORES, begin, end, level, best, rate, power, log_reference, gap, BLOCK: tl.constexpr):
    """Mass and slope of a row at a trial level, the target included."""
    mass, slope = _powers(level + gap, power, log_reference)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf")).to(tl.float64)
        masses, slopes = _powers(level + (score - best) * rate, power, 0.0)
        mass += tl.sum(masses, 0)
        slope += tl.sum(slopes, 0)
    return mass, slope


@triton.jit
def _loss(excess, others, own, own_mass, alone, b):
    """Closed form of the loss (M6): ``solver.loss_from_sums`` for one row."""
    r = others
    series_log = -r * (1.0 + r * (0.5 + r * (1.0 / 3.0 + r * (0.25 + r * 0.2))))
    log_rest = tl.where(r < 1e-3, series_log, tl.log(tl.where(r < 0.5, 1.0 - r, 0.5)))
    log_target = tl.where(r < 0.5, log_rest, tl.log(tl.where(own_mass > 0, own_mass, 1.0)))
    exact = (1.0 - tl.exp(b * log_target) * (1.0 + b * r)) / b
    # For small r the exact form cancels: use the series of its exponent divided by the b,
    # whose coefficients are (1 + (-1)^n b^(n-1)) / n for n = 12 .. 2.
    series = r * 0.0
    term = tl.exp(11.0 * tl.log(b))
    number = 12.0
    sign = 1.0
    for _ in range(11):
        series = (series + (1.0 + sign * term) / number) * r
        term = term / b
        number -= 1.0
        sign = -sign
    series = series * r
    x = b * series
    gain = tl.where(r < 0.02, series * (1.0 - x * (0.5 - x / 6.0)), exact)
    active = excess + alone * gain
    inactive = excess + (alone - own) / b - own  # linear in the target's missing height
    return tl.where(own > 0, active, inactive) / (1.0 + b)


@triton.jit
def _solve(
    SCORES, STARTS, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS,
    LOSS, TAU, MASS, IN_REFERENCE, ERROR, POSTERIOR,
    STEPS: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    b = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    power = 1.0 / b
    rate = b * scale
    running = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf"))
        running = tl.maximum(running, score)
    best = tl.where(end > begin, tl.max(running, 0).to(tl.float64), -1.0)
    log_reference = tl.load(TARGET_LOG_REFERENCE + row)
    gap = (tl.load(TARGET_LOGIT + row) - best * scale) * b
    alone = tl.exp(-b * log_reference)  # the target's height when it holds all the mass
    level = tl.minimum(1.0, alone - gap)
    if STEPS > 0:
        step = 0
        is_moving = 1
        while (step < STEPS) & (is_moving > 0):
            mass, slope = _sums(
                SCORES, begin, end, level, best, rate, power, log_reference, gap, BLOCK
            )
            level += mass / slope * (tl.exp(-b * tl.log(mass)) - 1.0)
            is_moving = (tl.abs(mass - 1.0) > 1e-12).to(tl.int32)
            step += 1
    if HALVINGS > 0:
        # Bounds: all mass on one class, or spread evenly over the list and the target.
        share = tl.exp(-b * tl.log((end - begin + 1).to(tl.float64)))
        low = tl.minimum(share, alone * share - gap)
        high = level
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            mass, slope = _sums(
                SCORES, begin, end, middle, best, rate, power, log_reference, gap, BLOCK
            )
            low = tl.where(mass > 1.0, low, middle)
            high = tl.where(mass > 1.0, middle, high)
        level = 0.5 * (low + high)
    level = tl.where(gap == gap, level, gap)  # minima and comparisons pass NaN over
    others = level * 0.0
    excess = level * 0.0
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf")).to(tl.float64)
        height = level + (score - best) * rate
        posterior, _slopes = _powers(height, power, 0.0)  # a name of its own: types are fixed
        others += tl.sum(posterior, 0)
        excess += tl.sum(tl.where(height > 0, posterior * height, 0.0), 0)
        tl.store(POSTERIOR + entry, posterior.to(tl.float32), mask=entry < end)
    own = level + gap
    own_mass, _own_slope = _powers(own, power, log_reference)
    target = tl.where(others < 0.5, 1.0 - others, own_mass)
    tl.store(LOSS + row, _loss(excess, others, own, own_mass, alone, b))
    tl.store(TAU + row, best * scale - (level - 1.0) / b)
    tl.store(MASS + row, others)
    tl.store(IN_REFERENCE + row, (target * tl.where(own > 0, own, 0.0) - alone) / (1.0 + b))
    tl.store(ERROR + row, tl.abs(others + own_mass - 1.0))


@lru_cache(maxsize=64)
def settings_tensor(b: float, scale: float, device: torch.device) -> Tensor:
    """Float64 numbers for kernels, whose plain float arguments are float32."""
    return torch.tensor([b, scale], dtype=torch.float64, device=device)


def solve_lists(candidates: Candidates, target: Target, *, scale: float, b: float) -> SolvedRows:
    """See ``head_reference.solve_lists``."""
    num_rows, device = len(target.logits), target.logits.device
    wide = torch.empty((5, num_rows), dtype=torch.float64, device=device)
    loss, tau, others, in_reference, error = wide.unbind()
    posterior = torch.empty_like(candidates.scores)
    is_newton = b <= 1.0
    _solve[(num_rows,)](
        candidates.scores, candidates.starts, target.logits, target.log_reference,
        settings_tensor(b, scale, device), loss, tau, others, in_reference, error, posterior,
        MAX_STEPS if is_newton else 0, 0 if is_newton else NUM_HALVINGS, BLOCK, num_warps=4,
    )  # fmt: skip
    return SolvedRows(
        loss, tau, others, in_reference, error,
        candidates.rows, candidates.columns, posterior, candidates.starts,
    )  # fmt: skip
