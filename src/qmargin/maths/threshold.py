r"""The normaliser ``tau`` of the alpha-divergence posterior, row by row (M2, M4, M5).

Rows are solved in float64. The unknown is not ``tau`` itself but its distance from an *anchor*, the
class that bounds ``tau`` from below: differences of logits are exact where sums with ``tau`` are
not. With ``b = alpha - 1`` the unknown, called ``level``, is

* the anchor's height ``x = 1 + b (theta_a - tau)``: it stays relatively accurate when it is tiny,
  as for two million equal logits at ``alpha = 2``;
* near ``alpha = 1``, the anchor's slack ``v = theta_a - tau``, accurate through the limit.

The height or slack of any other class is then ``level - step * gap``, with ``gap = theta_a -
theta_j`` and ``step`` equal to ``b`` or to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.maths.divergences import log_ratio as log_ratio
from qmargin.maths.divergences import uses_slack

MAX_STEPS = 256  # cosine logits take 4 to 15; a measure of e^-200 at alpha < 1 has taken 90
MAX_HALVINGS = 256  # the paper's bracket can be 1e28 wide: 93 halvings to 1, 53 more to rounding


class Solution(NamedTuple):
    """Where a row's threshold lies, relative to its anchor."""

    anchor: Tensor  # [B] logit of the anchor class
    level: Tensor  # [B] its height or slack at the root
    num_evaluations: int  # passes over the classes


class RowSums(NamedTuple):
    """All the solver ever sees: the posterior's mass and its slope in ``-tau``, ``[B]`` each."""

    mass: Tensor
    slope: Tensor


def level_step(order: float) -> float:
    """How much the level falls per unit of logit: ``b`` for heights, 1 for slacks."""
    return 1.0 if uses_slack(order) else order


def level_cost(log_ratio: Tensor, order: float) -> Tensor:
    """Level at which a class has the given ``log(p / q)``: ``f'`` or ``1 + b f'`` of the ratio."""
    if order == 0.0:
        return log_ratio
    if uses_slack(order):
        return torch.expm1(order * log_ratio) / order
    return torch.exp(order * log_ratio)  # 1 + expm1 would lose what is below rounding of one


def level_change(log_factor: Tensor, order: float) -> Tensor:
    """Change of level when a ratio of one is multiplied by ``exp(log_factor)``."""
    if order == 0.0:
        return log_factor
    change = torch.expm1(order * log_factor)
    return change / order if uses_slack(order) else change


def heights(levels: Tensor, order: float) -> Tensor:
    """``x = 1 + b v`` at the given levels, not clipped at zero."""
    return 1.0 + order * levels if uses_slack(order) else levels


def slacks(levels: Tensor, order: float) -> Tensor:
    """``v = theta - tau`` at the given levels."""
    return levels if uses_slack(order) else (levels - 1.0) / order


def row_sums(gaps: Tensor, log_reference: Tensor | None, level: Tensor, order: float) -> RowSums:
    """Mass and slope of each row at a trial level: sums over classes, hence over shards (M11).

    Args:
        gaps: Anchor's logit minus each logit, float64 ``[B, k]``.
        log_reference: ``[B, k]``, or None when every class has reference measure one.
        level: Trial level of the anchor, ``[B]``.
        order: ``alpha - 1``.
    """
    levels = torch.sub(level[:, None], gaps, alpha=level_step(order))  # [B, k]
    if order == 1.0 and log_reference is None:  # SparseMax: no powers
        return RowSums(levels.clamp_min(0.0).sum(1), (levels > 0).sum(1, dtype=levels.dtype))
    if order in (0.5, 0.25) and log_reference is None:  # products instead of logarithms
        positive = levels.clamp_min_(0.0)
        square = positive.square()
        if order == 0.5:
            return RowSums(square.sum(1), positive.sum(1))
        return RowSums(square.square().sum(1), positive.mul_(square).sum(1))
    log_posterior = log_ratio(levels, order)
    if log_reference is not None:
        log_posterior = log_posterior + log_reference
    posterior = log_posterior.exp_()
    if order == 0.0:
        mass = posterior.sum(1)
        return RowSums(mass, mass)
    height = heights(levels, order)
    return RowSums(posterior.sum(1), torch.where(height > 0, posterior / height, 0.0).sum(1))


def bound_from_below(
    logits: Tensor, log_reference: Tensor | None, order: float
) -> tuple[Tensor, Tensor]:
    """Anchor logit and starting level of each row, ``tau_low`` in disguise (M4).

    The anchor maximises ``theta_j - f'(1 / q_j)``: it is the class that would first hold the whole
    mass as ``tau`` falls, so the level at which it does is a lower bound of ``tau``.
    """
    if log_reference is None:
        anchor = logits.amax(1)
        return anchor, level_cost(torch.zeros_like(anchor), order)
    cost = level_cost(-log_reference, order)  # where each class alone has mass one
    bounds = logits - slacks(cost, order)
    best = bounds.amax(1, keepdim=True)
    best = torch.where((log_reference == math.inf).any(1, keepdim=True), math.nan, best)
    # Ties to rounding go to the class with the lowest level: the others' heights are then sums, not
    # differences. (A NaN anywhere makes `best` NaN and the row stays broken.)
    rounding = 1e-15 * (logits.abs() + slacks(cost, order).abs())
    is_best = (bounds >= best - rounding) & (bounds > -math.inf)
    index = torch.where(is_best, cost, math.inf).argmin(1, keepdim=True)
    logits = torch.where(best.isnan(), best, logits)
    return logits.gather(1, index).squeeze(1), cost.gather(1, index).squeeze(1)


def solve_newton(
    logits: Tensor, log_reference: Tensor | None, order: float, *, tolerance: float
) -> Solution:
    """Root by Newton's method on ``mass ** (alpha - 1)`` (M5).

    Monotone from ``tau_low`` and never overshooting for every ``alpha <= 2``, because there the
    power of the mass is convex (``alpha > 1``), log-linear (``alpha = 1``) or concave
    (``alpha < 1``) in the direction that keeps a tangent's root on the left.
    """
    anchor, level = bound_from_below(logits, log_reference, order)
    gaps = anchor[:, None] - logits
    num_evaluations = 0
    while num_evaluations < MAX_STEPS:
        num_evaluations += 1
        sums = row_sums(gaps, log_reference, level, order)
        log_mass = sums.mass.log()
        update = sums.mass / sums.slope * level_change(-log_mass, order)
        level = level + update
        is_done = (log_mass.abs() <= tolerance) | (update.abs() <= 4e-16 * level.abs())
        if order == 0.0 or bool((is_done | level.isnan()).all()):  # log-sum-exp: one step is exact
            break
    return Solution(anchor, level, num_evaluations)


def solve_bisection(
    logits: Tensor, log_reference: Tensor | None, order: float, *, bracket: str, tolerance: float
) -> Solution:
    """Root by halving a bracket: the paper's algorithm, valid for every ``alpha`` (M2).

    ``bracket="paper"`` starts from the largest logit alone; ``"tight"`` from the better of two
    bounds on each side, which keeps the width small when the largest logit has a tiny reference
    measure. The level is halved, not ``tau``: the two differ by an exact shift and factor.
    """
    step = level_step(order)
    if log_reference is None:
        log_reference = torch.zeros_like(logits[:, :1]).expand_as(logits)
    top = logits.argmax(1, keepdim=True)
    if bracket == "paper":
        anchor = logits.gather(1, top).squeeze(1)
        left = level_cost(-log_reference.gather(1, top).squeeze(1), order)  # at tau_min
    else:
        anchor, left = bound_from_below(logits, log_reference, order)
    gaps = anchor[:, None] - logits
    top_gap = gaps.gather(1, top).squeeze(1)
    right = step * top_gap + level_cost(-log_reference.logsumexp(1), order)  # at tau_max
    if bracket != "paper":
        uniform = step * gaps + level_cost(-log_reference - math.log(logits.shape[1]), order)
        if step > 0:
            right = torch.maximum(right, uniform.amin(1))
        else:
            right = torch.minimum(right, uniform.amax(1))
    level, num_evaluations = _halve(
        lambda trial: row_sums(gaps, log_reference, trial, order).mass, left, right, tolerance
    )
    solution = Solution(anchor, level, num_evaluations)
    if order <= 1.0:
        return solution
    return _refine_edge(logits, log_reference, solution, order, tolerance)


def _refine_edge(
    logits: Tensor, log_reference: Tensor, solution: Solution, order: float, tolerance: float
) -> Solution:
    """Anchor a row at its lowest active class and halve that class's own posterior.

    Above ``alpha = 2`` a ratio is a high root of its height: at ``alpha = 12`` a class 1e-16 above
    the edge has a ratio of 0.04, so the rounding of any other class's level would show. The lowest
    active class has no cancellation: its height is a power of its posterior, which is halved, and
    the heights of the others are sums. A class is active if the others hold less than one where its
    own height is zero.
    """
    anchor, level, num_evaluations = solution
    reach = level + 1e-14 * level.abs()  # what rounding has left open
    is_open = order * (anchor[:, None] - logits) < reach[:, None]
    is_open &= log_reference > -math.inf
    while True:
        index = torch.where(is_open, logits, math.inf).argmin(1, keepdim=True)
        anchor = torch.where(level.isnan(), level, logits.gather(1, index).squeeze(1))
        own = log_reference.gather(1, index).squeeze(1)
        gaps = anchor[:, None] - logits
        num_evaluations += 1
        is_idle = row_sums(gaps, log_reference, torch.zeros_like(level), order).mass >= 1.0
        if not bool((is_idle & is_open.any(1)).any()):
            break
        is_open &= ~(is_idle[:, None] & (logits <= anchor[:, None]))

    def mass_at(posterior: Tensor) -> Tensor:
        trial = level_cost(posterior.log() - own, order)
        return row_sums(gaps, log_reference, trial, order).mass

    # Every entry grows with this one, so none is further off than the mass is from one.
    posterior, more = _halve(mass_at, torch.ones_like(level), torch.zeros_like(level), tolerance)
    refined = torch.where(level.isnan(), level, level_cost(posterior.log() - own, order))
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
    order: float,
    *,
    solver: str = "auto",
    bracket: str = "tight",
    tolerance: float = 1e-14,
) -> Solution:
    """Solve every row: Newton where proven (``alpha <= 2``), bisection above or on request."""
    if solver == "auto":
        solver = "newton" if order <= 1.0 else "bisection"
    if solver == "newton":
        return solve_newton(logits, log_reference, order, tolerance=tolerance)
    return solve_bisection(logits, log_reference, order, bracket=bracket, tolerance=tolerance)
