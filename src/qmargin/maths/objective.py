r"""The Fenchel-Young loss in closed form, as a sum of terms that are never negative (M6).

The textbook form ``softmax_f + D_f(y:q) - <theta, y>`` subtracts two numbers of size ``k / alpha``.
With the height ``x_j = 1 + b (theta_j - tau)``, ``b = alpha - 1``, the same loss is

.. math:: \frac1\alpha \Big[ \sum_{j \ne y} p_j x_j + q_y^{-b} \varphi(r) \Big], \qquad
          r = \sum_{j \ne y} p_j, \quad \varphi(r) = \frac{1 - (1 - r)^b (1 + b r)}{b},

so nothing cancels, nothing grows with the number of classes, and a satisfied row is exactly zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qmargin.maths.threshold import heights, level_cost, level_step, log_ratio, slacks


def posterior_rows(
    logits: Tensor, log_reference: Tensor | None, anchor: Tensor, level: Tensor, order: float
) -> tuple[Tensor, Tensor]:
    """Posterior and levels of every class, ``[B, k]`` each, from a solved row (M1)."""
    levels = level[:, None] - level_step(order) * (anchor[:, None] - logits)
    log_posterior = log_ratio(levels, order)
    if log_reference is not None:
        log_posterior = log_posterior + log_reference
    return log_posterior.exp(), levels


def others_gain(others_mass: Tensor, log_target: Tensor, order: float) -> Tensor:
    r"""``phi(r)``, the cost of a target that lost the mass ``r``, without cancellation.

    Args:
        others_mass: ``r``, the posterior mass of all classes but the target.
        log_target: ``log(1 - r)``; given because the caller knows it better when ``r`` is near one.
        order: ``b = alpha - 1``.
    """
    b, r = order, others_mass
    if b == 0.0:
        exact = -log_target - r
    else:
        exact = -torch.expm1(b * log_target + torch.log1p(b * r)) / b
    # For small r the exponent is a difference of nearly equal terms: use its series divided by b.
    series = torch.zeros_like(r)
    for power in range(12, 1, -1):
        series = (series + (1.0 + (-1.0) ** power * b ** (power - 1)) / power) * r
    series = series * r
    small = series if b == 0.0 else -torch.expm1(-b * series) / b
    return torch.where(r * max(1.0, abs(b)) < 0.02, small, exact)


def label_loss(
    posterior: Tensor, levels: Tensor, log_reference: Tensor, order: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, ``p_y`` and ``1 - p_y`` of rows whose target is the *last* column, ``[B]`` each (M6).

    Args:
        posterior: ``[B, K]``, float64.
        levels: Their levels, ``[B, K]``.
        log_reference: Of the target, ``[B]``.
        order: ``alpha - 1``.
    """
    others, height = posterior[:, :-1], heights(levels[:, :-1], order)
    excess = torch.where(others > 0, others * height, 0.0).sum(1)
    # A row without a root has no others either where its list is empty: it must not look solved.
    others_mass = torch.where(levels[:, -1].isnan(), torch.nan, others.sum(1))
    loss, target = loss_from_sums(excess, others_mass, levels[:, -1], log_reference, order)
    return loss, target, others_mass


def loss_from_sums(
    excess: Tensor, others_mass: Tensor, target_level: Tensor, log_reference: Tensor, order: float
) -> tuple[Tensor, Tensor]:
    """Loss and target posterior, ``[B]`` each and accurate on their own, from sums over the others.

    Args:
        excess: Sum of ``p_j x_j`` over the classes that are not the target, ``[B]`` float64.
        others_mass: Sum of their ``p_j``, ``[B]``.
        target_level: ``[B]``.
        log_reference: Of the target, ``[B]``.
        order: ``alpha - 1``.
    """
    b = order
    # 1 - r is exact for a small r; the direct value is, when the target has almost nothing.
    is_small = others_mass < 0.5
    log_target = torch.where(
        is_small,
        torch.log1p(-others_mass.clamp_max(0.5)),
        log_reference + log_ratio(target_level, b),
    )
    loss = excess + (-b * log_reference).exp() * others_gain(others_mass, log_target, b)
    if b > 0:  # a target outside the support: linear in its missing height
        height = heights(target_level, b)
        missing = slacks(level_cost(-log_reference, b), b) - slacks(target_level, b)
        loss = torch.where(height <= 0, excess + missing - height, loss)
    return loss / (1.0 + b), torch.where(is_small, 1.0 - others_mass, log_target.exp())


def distribution_loss(
    posterior: Tensor, levels: Tensor, log_reference: Tensor | None, target: Tensor, order: float
) -> Tensor:
    """Loss ``[B]`` against a target distribution ``[B, k]``: a sum of Bregman terms (M6)."""
    b, alpha = order, 1.0 + order
    reference = torch.zeros_like(target) if log_reference is None else log_reference
    has_target, is_active = target > 0, posterior > 0
    height = heights(levels, b)
    log_target = torch.where(has_target, target, 1.0).log()
    log_posterior = torch.where(is_active, posterior, 1.0).log()
    t = log_target - log_posterior
    change = t if b == 0.0 else torch.expm1(b * t) / b
    both = posterior * height * (t.exp() * change - torch.expm1(t))
    only_posterior = posterior * height
    ratio = level_cost(log_target - reference, b)
    only_target = target * (slacks(ratio, b) - slacks(levels, b) - height)
    terms = torch.where(
        is_active,
        torch.where(has_target, both, only_posterior),
        torch.where(has_target, only_target, 0.0),
    )
    terms = torch.where(has_target & levels.isinf(), math.inf, terms)  # a masked class
    return terms.sum(1) / alpha


def log_partition(
    posterior: Tensor, logits: Tensor, anchor: Tensor, level: Tensor, order: float
) -> Tensor:
    """``max_p <p, theta> - D(p:q)``, ``[B]``: log-sum-exp at ``alpha = 1``.

    ``D(p:q) = sum_j p_j f'(p_j / q_j) / alpha``, which is the paper's ``D_f`` whenever the
    reference measure sums to one; otherwise they differ by ``(sum_j q_j - 1) / alpha``.
    """
    gaps = torch.where(posterior > 0, posterior * (anchor[:, None] - logits), 0.0).sum(1)
    return anchor - (slacks(level, order) + order * gaps) / (1.0 + order)
