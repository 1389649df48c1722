"""Any f-divergence by bisection and automatic differentiation: a solver that needs no formula.

It serves divergences without a closed form (the proof is ``JensenShannon``) and checks those with
one. It is dense, keeps its intermediates for autograd, and is the slowest way to a right answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.maths.divergences import Divergence

NUM_HALVINGS = 120


class GenericSolution(NamedTuple):
    """A solved batch; ``tau`` and the posterior carry gradients up to second order."""

    tau: Tensor  # [..., 1]
    posterior: Tensor  # [..., k]


def solve_generic(logits: Tensor, log_reference: Tensor, divergence: Divergence) -> GenericSolution:
    """Root by bisection in float64, then two Newton steps that autograd can see (M2, M5).

    A Newton step from the exact root changes nothing but carries the root's first derivative; a
    second one carries the derivatives up to order three.
    """
    logits = _without_masked(logits)
    reference = log_reference.exp()
    with torch.no_grad():
        tau = _bisect(logits.detach(), log_reference.detach(), divergence)
    for _ in range(2):
        slack = logits - tau
        mass = (reference * divergence.link(slack)).sum(-1, keepdim=True)
        slope = (reference * divergence.link_slope(slack)).sum(-1, keepdim=True)
        tau = tau + (mass - 1.0) / slope
    return GenericSolution(tau, reference * divergence.link(logits - tau))


def _without_masked(logits: Tensor) -> Tensor:
    """The logits, those of ``-inf`` as constants: a masked class passes no gradient."""
    return torch.where(logits == -math.inf, logits.detach(), logits)


def _bisect(logits: Tensor, log_reference: Tensor, divergence: Divergence) -> Tensor:
    reference = log_reference.exp()
    alone = divergence.derivative(1.0 / reference)  # slack at which a class alone has mass one
    low = (logits - alone).amax(-1, keepdim=True)
    together = divergence.derivative(1.0 / reference.sum(-1, keepdim=True))
    high = logits.amax(-1, keepdim=True) - together
    for _ in range(NUM_HALVINGS):
        middle = 0.5 * (low + high)
        mass = (reference * divergence.link(logits - middle)).sum(-1, keepdim=True)
        low, high = torch.where(mass > 1.0, middle, low), torch.where(mass > 1.0, high, middle)
    return 0.5 * (low + high)


def generic_log_partition(logits: Tensor, log_reference: Tensor, divergence: Divergence) -> Tensor:
    """``max_p <p, theta> - D_f(p:q)`` plus ``(sum_j q_j - 1) f(0)``, ``[...]`` (M6).

    The constant is zero for a reference measure that sums to one; without it the value would be a
    difference of two sums over all classes.
    """
    logits = _without_masked(logits)
    tau, _ = solve_generic(logits, log_reference, divergence)
    excess = divergence.excess(logits - tau)
    at_zero = divergence.generator(torch.zeros_like(tau)).squeeze(-1)
    return tau.squeeze(-1) + (log_reference.exp() * excess).sum(-1) - at_zero


def generic_loss(
    logits: Tensor, target: Tensor, log_reference: Tensor, divergence: Divergence
) -> Tensor:
    """Fenchel-Young loss against a distribution ``[..., k]``; terms vanish off the support (M6)."""
    logits = _without_masked(logits)
    reference = log_reference.exp()
    has_target = target > 0
    ratio = torch.where(has_target, target, reference) / reference
    at_zero = divergence.generator(torch.zeros_like(ratio))
    cost = torch.where(has_target, reference * (divergence.generator(ratio) - at_zero), 0.0).sum(-1)
    score = torch.where(has_target, target * logits, 0.0).sum(-1)
    value = generic_log_partition(logits, log_reference, divergence)
    return value + at_zero[..., 0] + cost - score
