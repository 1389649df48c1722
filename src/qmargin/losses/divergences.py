"""Divergences, and a generic solver for any of them by bisection and automatic differentiation.

The solver serves divergences without a closed form, such as ``JensenShannon``, and checks those
with one. It is dense and slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qmargin.errors import ConfigError, ShapeError
from qmargin.kernels.solver import log_ratio, uses_slack
from qmargin.losses.checks import check_alpha_range, check_number, describe
from qmargin.registry import register_divergence


class Divergence(Protocol):
    """Interface of a divergence: five elementwise functions and the number ``edge``."""

    @property
    def edge(self) -> float:
        """Slack ``f'(0)`` at and below which a class leaves the support; may be ``-inf`` (M3)."""

    def generator(self, ratio: Tensor) -> Tensor:
        """``f(u)``: the convex function that generates the divergence."""

    def derivative(self, ratio: Tensor) -> Tensor:
        """``f'(u)``: the slack at which a class has the ratio ``u = p / q``."""

    def link(self, slack: Tensor) -> Tensor:
        """``(f*)'(v)``: the ratio ``p / q`` of a class with slack ``v``, zero at the edge (M1)."""

    def link_slope(self, slack: Tensor) -> Tensor:
        """``(f*)''(v)``: how fast the ratio grows with the slack."""

    def excess(self, slack: Tensor) -> Tensor:
        """``f*(v) + f(0)``: the class's share of the loss, zero off the support (M6)."""


@register_divergence("alpha")
@dataclass(frozen=True, eq=False)
class Alpha:
    r"""The alpha-divergence, ``f(u) = (u^a - 1 - a(u - 1)) / (a (a - 1))``.

    ``alpha = 1`` is the Kullback-Leibler divergence (softmax cross-entropy), ``alpha = 2`` gives
    SparseMax, and every ``alpha > 1`` makes posteriors that are exactly zero for most classes.

    Args:
        alpha: Order of the divergence, a number in ``(0, 16]``, or a tensor with one element when
            the order itself is to be learned. The posterior's accuracy is tested in that range.

    Examples:
        >>> Alpha(1.5).link(torch.tensor([-3.0, -1.0, 0.0, 1.0]))
        tensor([0.0000, 0.2500, 1.0000, 2.2500])
        >>> Alpha(2.0).edge
        -1.0
    """

    alpha: float | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Tensor):  # its value is checked where it is used
            if self.alpha.numel() != 1 or not self.alpha.is_floating_point():
                raise ShapeError(
                    f"alpha is {describe(self.alpha)}; a learnable order is a floating tensor with "
                    "one element, e.g. torch.tensor(1.25)"
                )
            return
        number = check_number(self.alpha, "alpha")
        object.__setattr__(self, "alpha", number)
        if not torch.compiler.is_compiling():
            check_alpha_range(number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alpha) and self.alpha_minus_one == other.alpha_minus_one

    def __hash__(self) -> int:
        return hash(("Alpha", self.alpha_minus_one))

    @property
    def alpha_minus_one(self) -> float:
        """``alpha - 1`` as a plain number."""
        alpha = self.alpha.detach() if isinstance(self.alpha, Tensor) else self.alpha
        return float(alpha) - 1.0

    def as_tensor(self) -> Tensor:
        """``alpha`` as a tensor: itself when it is learnable, else a float64 constant."""
        if isinstance(self.alpha, Tensor):
            return self.alpha
        return torch.tensor(self.alpha, dtype=torch.float64, device="cpu")

    @property
    def edge(self) -> float:
        """``-1 / (alpha - 1)`` for ``alpha > 1``, else ``-inf`` (M3)."""
        return -1.0 / self.alpha_minus_one if self.alpha_minus_one > 0 else -math.inf

    def generator(self, ratio: Tensor) -> Tensor:
        """``f(u)``, through its limit at ``alpha = 1`` and at ``u = 0``."""
        b = self.alpha_minus_one
        if b == 0.0:
            entropy: Tensor = torch.special.xlogy(ratio, ratio)
            return entropy - (ratio - 1.0)
        is_zero = ratio == 0  # there f' may be infinite, f never is
        safe = torch.where(is_zero, 1.0, ratio)
        product = torch.where(is_zero, 0.0, safe * self.derivative(safe))
        return (product - (ratio - 1.0)) / (1.0 + b)

    def derivative(self, ratio: Tensor) -> Tensor:
        """``f'(u) = (u^(alpha-1) - 1) / (alpha-1)``, ``log u`` at ``alpha = 1``."""
        b = self.alpha_minus_one
        log_ratio = ratio.log()
        return log_ratio if b == 0.0 else torch.expm1(b * log_ratio) / b

    def link(self, slack: Tensor) -> Tensor:
        """``[1 + (alpha-1) v]_+ ^ (1/(alpha-1))``, ``exp(v)`` at ``alpha = 1`` (M1)."""
        return self.log_link(slack).exp()

    def log_link(self, slack: Tensor) -> Tensor:
        """Logarithm of ``link``, ``-inf`` off the support."""
        b = self.alpha_minus_one
        return log_ratio(slack if uses_slack(b) else 1.0 + b * slack, b)

    def link_slope(self, slack: Tensor) -> Tensor:
        """``link(v)^(2 - alpha)`` on the support, zero elsewhere."""
        log_link = self.log_link(slack)
        is_active = log_link > -math.inf
        return torch.where(is_active, ((1.0 - self.alpha_minus_one) * log_link).exp(), 0.0)

    def excess(self, slack: Tensor) -> Tensor:
        """``link(v)^alpha / alpha``: ``f* = (link^alpha - 1) / alpha`` and ``f(0) = 1 / alpha``."""
        alpha = 1.0 + self.alpha_minus_one
        return (alpha * self.log_link(slack)).exp() / alpha


@register_divergence("jensen_shannon")
@dataclass(frozen=True)
class JensenShannon:
    """The Jensen-Shannon divergence, ``f(u) = u log u - (u + 1) log((u + 1) / 2)``.

    It has no edge, so posteriors are never sparse, and slack stays below ``log 2``. No other module
    refers to it: one class is enough for a new divergence.
    """

    @property
    def edge(self) -> float:
        return -math.inf

    def generator(self, ratio: Tensor) -> Tensor:
        entropy: Tensor = torch.special.xlogy(ratio, ratio)
        return entropy - (ratio + 1.0) * ((ratio + 1.0) / 2.0).log()

    def derivative(self, ratio: Tensor) -> Tensor:
        return math.log(2.0) - torch.log1p(1.0 / ratio)

    def link(self, slack: Tensor) -> Tensor:
        return slack.exp() / (2.0 - slack.exp())

    def link_slope(self, slack: Tensor) -> Tensor:
        return 2.0 * slack.exp() / (2.0 - slack.exp()).square()

    def excess(self, slack: Tensor) -> Tensor:
        return -torch.log1p(-0.5 * slack.exp())


def check_divergence(divergence: Divergence) -> Divergence:
    """Return the divergence; raise for a number or a class in its place."""
    is_divergence = isinstance(divergence, Alpha) or hasattr(divergence, "link_slope")
    if isinstance(divergence, type) or not is_divergence:
        raise ConfigError(
            f"divergence is {divergence!r}; give an object with the methods of Divergence, "
            "e.g. Alpha(1.25)"
        )
    return divergence


NUM_HALVINGS = 120


def solve_generic(
    logits: Tensor, log_reference: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """``tau`` ``[..., 1]`` and posterior ``[..., k]`` by bisection and two Newton steps (M2, M5).

    A Newton step from the exact root changes nothing but carries the root's first derivative to
    autograd; a second one carries the derivatives up to order three.
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
    return tau, reference * divergence.link(logits - tau)


def _without_masked(logits: Tensor) -> Tensor:
    """The logits, with ``-inf`` as constants, because a masked class has no gradient."""
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
