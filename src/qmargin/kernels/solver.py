"""Normaliser, posterior and Fenchel-Young loss of rows: the plain reference (M2-M7).

Throughout, ``b`` is ``alpha - 1``, and the *level* of a class is its height ``x = 1 + b v`` or,
near ``alpha = 1``, its slack ``v = theta - tau``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def uses_slack(b: float) -> bool:
    """Whether powers are taken through ``log1p`` of the slack, or ``log`` of the height.

    ``log1p(b v)`` is the accurate form near ``alpha = 1`` and ``log(x)`` away from it. Below one a
    rare class can have a height of ``exp(-200 |b|)``, which only the second form resolves, so the
    limits are not symmetric.
    """
    return -1e-3 < b < 0.1


def log_ratio(levels: Tensor, b: float) -> Tensor:
    """Logarithm of ``p / q`` at the given slacks or heights, ``-inf`` off the support (M1)."""
    if b == 0.0:
        return levels
    if uses_slack(b):
        return torch.log1p((b * levels).clamp_min(-1.0)) / b
    return levels.clamp_min(0.0).log() / b


def row_exp(numbers: Tensor) -> Tensor:
    """``exp`` of one number per row, to ``1e-16`` of it times the number.

    From a hundred numbers on, ``exp`` and ``log`` on a CPU start threads, and wait for them.
    """
    return torch.pow(math.e, numbers)


def row_log(numbers: Tensor) -> Tensor:
    """``log`` of one number per row, on one thread."""
    logarithm: Tensor = torch.special.xlogy(1.0, numbers)
    return logarithm


MAX_STEPS = 256  # cosine logits take 4 to 15; a measure of e^-200 at alpha < 1 has taken 90
MOST_ERROR = 1e-2  # of a row's mass: a search that ends further off has found no root
MAX_HALVINGS = 1100  # the paper's bracket can be 1e300 wide: 1000 halvings to 1, 53 to rounding


class Solution(NamedTuple):
    """Where a row's threshold lies, relative to its anchor."""

    anchor: Tensor  # [B] logit of the anchor class
    level: Tensor  # [B] its height or slack at the root
    num_evaluations: int  # passes over the classes


class RowSums(NamedTuple):
    """What the solver needs of a row: the posterior's mass and slope in ``-tau``, ``[B]`` each."""

    mass: Tensor
    slope: Tensor


def level_step(b: float) -> float:
    """How much the level falls per unit of logit: ``b`` for heights, 1 for slacks."""
    return 1.0 if uses_slack(b) else b


def level_cost(log_ratio: Tensor, b: float) -> Tensor:
    """Level at which a class has the given ``log(p / q)``: ``f'`` or ``1 + b f'`` of the ratio."""
    if b == 0.0:
        return log_ratio
    if uses_slack(b):
        return torch.expm1(b * log_ratio) / b
    return torch.exp(b * log_ratio)  # 1 + expm1 would lose what is below rounding of one


def level_change(log_factor: Tensor, b: float) -> Tensor:
    """Change of level when a ratio of one is multiplied by ``exp(log_factor)``."""
    if b == 0.0:
        return log_factor
    change = torch.expm1(b * log_factor)
    return change / b if uses_slack(b) else change


def heights(levels: Tensor, b: float) -> Tensor:
    """``x = 1 + b v`` at the given levels, not clipped at zero."""
    return 1.0 + b * levels if uses_slack(b) else levels


def slacks(levels: Tensor, b: float) -> Tensor:
    """``v = theta - tau`` at the given levels."""
    return levels if uses_slack(b) else (levels - 1.0) / b


def row_sums(gaps: Tensor, log_reference: Tensor | None, level: Tensor, b: float) -> RowSums:
    """Mass and slope of each row at a trial level: sums over classes, hence over shards (M11).

    ``gaps`` are the anchor's logit minus each logit, ``[B, k]``; without ``log_reference`` every
    class has reference measure one.
    """
    levels = torch.sub(level[:, None], gaps, alpha=level_step(b))  # [B, k]
    if b == 1.0 and log_reference is None:  # SparseMax: no powers
        return RowSums(levels.clamp_min(0.0).sum(1), (levels > 0).sum(1, dtype=levels.dtype))
    if b in (0.5, 0.25) and log_reference is None:  # products instead of logarithms
        positive = levels.clamp_min_(0.0)
        square = positive.square()
        if b == 0.5:
            return RowSums(square.sum(1), positive.sum(1))
        return RowSums(square.square().sum(1), positive.mul_(square).sum(1))
    log_posterior = log_ratio(levels, b)
    if log_reference is not None:
        log_posterior = log_posterior + log_reference
    posterior = log_posterior.exp_()
    if b == 0.0:
        mass = posterior.sum(1)
        return RowSums(mass, mass)
    height = heights(levels, b)
    return RowSums(posterior.sum(1), torch.where(height > 0, posterior / height, 0.0).sum(1))


def bound_from_below(
    logits: Tensor, log_reference: Tensor | None, b: float
) -> tuple[Tensor, Tensor]:
    """Anchor logit and starting level of each row, equivalent to ``tau_low`` (M4).

    The anchor maximises ``theta_j - f'(1 / q_j)``: it is the class that would first hold the whole
    mass as ``tau`` falls, so the level at which it does is a lower bound of ``tau``.
    """
    if log_reference is None:
        anchor = logits.amax(1)
        return anchor, level_cost(torch.zeros_like(anchor), b)
    cost = level_cost(-log_reference, b)  # where each class alone has mass one
    bounds = logits - slacks(cost, b)
    best = bounds.amax(1, keepdim=True)
    best = torch.where((log_reference == math.inf).any(1, keepdim=True), math.nan, best)
    # Ties to rounding go to the class with the lowest level: the others' heights are then sums, not
    # differences. (A NaN anywhere makes `best` NaN and the row stays broken.)
    rounding = 1e-15 * (logits.abs() + slacks(cost, b).abs())
    is_best = (bounds >= best - rounding) & (bounds > -math.inf)
    index = torch.where(is_best, cost, math.inf).argmin(1, keepdim=True)
    logits = torch.where(best.isnan(), best, logits)
    return logits.gather(1, index).squeeze(1), cost.gather(1, index).squeeze(1)


def solve_newton(
    logits: Tensor, log_reference: Tensor | None, b: float, *, tolerance: float
) -> Solution:
    """Root by Newton's method on ``mass ** (alpha - 1)`` (M5).

    Monotone from ``tau_low`` and never overshooting for every ``alpha <= 2``.
    """
    anchor, level = bound_from_below(logits, log_reference, b)
    gaps = anchor[:, None] - logits
    num_evaluations = 0
    while num_evaluations < MAX_STEPS:
        num_evaluations += 1
        sums = row_sums(gaps, log_reference, level, b)
        log_mass = sums.mass.log()
        update = sums.mass / sums.slope * level_change(-log_mass, b)
        level = level + update
        is_done = (log_mass.abs() <= tolerance) | (update.abs() <= 4e-16 * level.abs())
        if b == 0.0 or bool((is_done | level.isnan()).all()):  # log-sum-exp: one step is exact
            break
    return Solution(anchor, level, num_evaluations)


def tau_from_below(
    logits: Tensor, log_reference: Tensor | None, b: float, *, tolerance: float
) -> Tensor:
    """Lower bound of ``tau``, ``[B]``: an iterate of Newton, or above ``alpha = 2`` M4's."""
    if b > 1.0:
        anchor, level = bound_from_below(logits, log_reference, b)
    else:
        anchor, level, _ = solve_newton(logits, log_reference, b, tolerance=tolerance)
    return anchor - slacks(level, b)


def solve_bisection(
    logits: Tensor, log_reference: Tensor | None, b: float, *, bracket: str, tolerance: float
) -> Solution:
    """Root by halving a bracket: the paper's algorithm, valid for every ``alpha`` (M2).

    ``bracket="paper"`` starts from the largest logit alone; ``"tight"`` from the better of two
    bounds on each side. The level is halved, not ``tau``.
    """
    step = level_step(b)
    if log_reference is None:
        log_reference = torch.zeros_like(logits[:, :1]).expand_as(logits)
    top = logits.argmax(1, keepdim=True)
    if bracket == "paper":
        anchor = logits.gather(1, top).squeeze(1)
        left = level_cost(-log_reference.gather(1, top).squeeze(1), b)  # at tau_min
    else:
        anchor, left = bound_from_below(logits, log_reference, b)
    gaps = anchor[:, None] - logits
    top_gap = gaps.gather(1, top).squeeze(1)
    right = step * top_gap + level_cost(-log_reference.logsumexp(1), b)  # at tau_max
    if bracket != "paper":
        uniform = step * gaps + level_cost(-log_reference - math.log(logits.shape[1]), b)
        if step > 0:
            right = torch.maximum(right, uniform.amin(1))
        else:
            right = torch.minimum(right, uniform.amax(1))
    level, num_evaluations = _halve(
        lambda trial: row_sums(gaps, log_reference, trial, b).mass, left, right, tolerance
    )
    solution = Solution(anchor, level, num_evaluations)
    if b <= 1.0:
        return solution
    return _refine_edge(logits, log_reference, solution, b, tolerance)


def _refine_edge(
    logits: Tensor, log_reference: Tensor, solution: Solution, b: float, tolerance: float
) -> Solution:
    """Anchor a row at its lowest active class and halve that class's own posterior.

    Above ``alpha = 2`` a ratio is a high root of its height: at ``alpha = 12`` a class 1e-16 above
    the edge has a ratio of 0.04, so the rounding of any other class's level would show. The lowest
    active class has no cancellation. A class is active if the others hold less than one where its
    own height is zero.
    """
    anchor, level, num_evaluations = solution
    reach = level + 1e-14 * level.abs()  # within rounding
    is_open = b * (anchor[:, None] - logits) < reach[:, None]
    is_open &= log_reference > -math.inf
    while True:
        index = torch.where(is_open, logits, math.inf).argmin(1, keepdim=True)
        anchor = torch.where(level.isnan(), level, logits.gather(1, index).squeeze(1))
        own = log_reference.gather(1, index).squeeze(1)
        gaps = anchor[:, None] - logits
        num_evaluations += 1
        is_idle = row_sums(gaps, log_reference, torch.zeros_like(level), b).mass >= 1.0
        if not bool((is_idle & is_open.any(1)).any()):
            break
        is_open &= ~(is_idle[:, None] & (logits <= anchor[:, None]))

    def mass_at(posterior: Tensor) -> Tensor:
        trial = level_cost(posterior.log() - own, b)
        return row_sums(gaps, log_reference, trial, b).mass

    # Every entry grows with this one, so none is further off than the mass is from one.
    posterior, more = _halve(mass_at, torch.ones_like(level), torch.zeros_like(level), tolerance)
    refined = torch.where(level.isnan(), level, level_cost(posterior.log() - own, b))
    return Solution(anchor, refined, num_evaluations + more)


def _halve(
    mass_at: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, tolerance: float
) -> tuple[Tensor, int]:
    """Halve brackets ``[B]`` until the mass is one to ``tolerance``, or rounding stops it."""
    num_evaluations = 0
    while num_evaluations < MAX_HALVINGS:
        num_evaluations += 1
        middle = 0.5 * (left + right)
        mass = mass_at(middle)
        is_left = mass > 1.0
        left, right = torch.where(is_left, middle, left), torch.where(is_left, right, middle)
        width = (left - right).abs()
        is_done = (width <= 4e-16 * middle.abs()) | ((mass - 1.0).abs() <= tolerance)
        if bool((is_done | mass.isnan()).all()):
            break
    return torch.where(mass.isnan(), mass, middle), num_evaluations  # a broken row stays broken


def solve_rows(
    logits: Tensor,
    log_reference: Tensor | None,
    b: float,
    *,
    solver: str = "auto",
    bracket: str = "tight",
    tolerance: float = 1e-14,
) -> Solution:
    """Solve every row: Newton where proven (``alpha <= 2``), bisection above or on request."""
    if solver == "auto":
        solver = "newton" if b <= 1.0 else "bisection"
    if solver == "newton":
        return solve_newton(logits, log_reference, b, tolerance=tolerance)
    return solve_bisection(logits, log_reference, b, bracket=bracket, tolerance=tolerance)


def posterior_rows(
    logits: Tensor, log_reference: Tensor | None, anchor: Tensor, level: Tensor, b: float
) -> tuple[Tensor, Tensor]:
    """Posterior and levels of every class, ``[B, k]`` each, from a solved row (M1)."""
    levels = level[:, None] - level_step(b) * (anchor[:, None] - logits)
    log_posterior = log_ratio(levels, b)
    if log_reference is not None:
        log_posterior = log_posterior + log_reference
    return log_posterior.exp(), levels


def others_gain(others_mass: Tensor, log_target: Tensor, b: float) -> Tensor:
    """``phi(r)``, the cost of a target that lost the mass ``r``, without cancellation.

    ``log_target`` is ``log(1 - r)``, which the caller knows better when ``r`` is near one.
    """
    r = others_mass
    if b == 0.0:
        exact = -log_target - r
    else:
        exact = -torch.expm1(b * log_target + torch.log1p(b * r)) / b
    # For small r the exponent is a difference of nearly equal terms: use its series divided by b.
    powers = torch.arange(2, 13, dtype=r.dtype, device=r.device)
    factors = (1.0 - (-b) ** (powers - 1.0)) / powers
    series = (r[:, None].expand(-1, 12).cumprod(1)[:, 1:] * factors).sum(1)
    small = series if b == 0.0 else -torch.expm1(-b * series) / b
    return torch.where(r * max(1.0, abs(b)) < 0.02, small, exact)


def label_loss(
    posterior: Tensor, levels: Tensor, log_reference: Tensor, b: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, ``p_y`` and ``1 - p_y`` of rows whose target is the *last* column, ``[B]`` (M6)."""
    others, height = posterior[:, :-1], heights(levels[:, :-1], b)
    excess = torch.where(others > 0, others * height, 0.0).sum(1)
    # A row without a root may have an empty list of others: it must not count as solved.
    others_mass = torch.where(levels[:, -1].isnan(), torch.nan, others.sum(1))
    loss, target = loss_from_sums(excess, others_mass, levels[:, -1], log_reference, b)
    return loss, target, others_mass


def loss_from_sums(
    excess: Tensor, others_mass: Tensor, target_level: Tensor, log_reference: Tensor, b: float
) -> tuple[Tensor, Tensor]:
    """Loss and target posterior, ``[B]`` each and accurate on their own, from sums over the others.

    ``excess`` is the sum of ``p_j x_j`` over the others; ``log_reference`` is that of the target.
    """
    # 1 - r is exact for a small r; the direct value is, when the target has almost nothing.
    is_small = others_mass < 0.5
    is_slack, cost = uses_slack(b), row_exp(-b * log_reference)
    own = log_ratio(target_level, b) if is_slack else row_log(target_level.clamp_min(0.0)) / b
    log_target = torch.where(
        is_small, torch.log1p(-others_mass.clamp_max(0.5)), log_reference + own
    )
    loss = excess + cost * others_gain(others_mass, log_target, b)
    if b > 0:  # a target outside the support: linear in its missing height
        height = heights(target_level, b)
        alone = level_cost(-log_reference, b) if is_slack else cost
        missing = slacks(alone, b) - slacks(target_level, b)
        loss = torch.where(height <= 0, excess + missing - height, loss)
    return loss / (1.0 + b), torch.where(is_small, 1.0 - others_mass, row_exp(log_target))


def reference_gradient(
    target_posterior: Tensor, target_level: Tensor, log_reference: Tensor, b: float
) -> Tensor:
    """Gradient of the loss in the target's log reference, ``[B]``: the envelope's (M7)."""
    height = heights(target_level, b).clamp_min(0.0)
    return (target_posterior * height - row_exp(-b * log_reference)) / (1.0 + b)


def distribution_loss(
    posterior: Tensor, levels: Tensor, log_reference: Tensor | None, target: Tensor, b: float
) -> Tensor:
    """Loss ``[B]`` against a target distribution ``[B, k]``: a sum of Bregman terms (M6)."""
    reference = torch.zeros_like(target) if log_reference is None else log_reference
    has_target, is_active = target > 0, posterior > 0
    height = heights(levels, b)
    log_target = torch.where(has_target, target, 1.0).log()
    log_posterior = torch.where(is_active, posterior, 1.0).log()
    t = log_target - log_posterior
    change = t if b == 0.0 else torch.expm1(b * t) / b
    only_posterior = posterior * height
    both = only_posterior * (t.exp() * change - torch.expm1(t))
    ratio = level_cost(log_target - reference, b)
    only_target = target * (slacks(ratio, b) - slacks(levels, b) - height)
    inactive = torch.where(has_target, only_target, 0.0)
    terms = torch.where(is_active, torch.where(has_target, both, only_posterior), inactive)
    terms = torch.where(has_target & levels.isinf(), math.inf, terms)  # a masked class
    return terms.sum(1) / (1.0 + b)


def log_partition(
    posterior: Tensor, logits: Tensor, anchor: Tensor, level: Tensor, b: float
) -> Tensor:
    """``max_p <p, theta> - sum_j p_j f'(p_j / q_j) / alpha``: log-sum-exp at ``alpha = 1``."""
    gaps = torch.where(posterior > 0, posterior * (anchor[:, None] - logits), 0.0).sum(1)
    return anchor - (slacks(level, b) + b * gaps) / (1.0 + b)
