r"""Divergences: the shape of the posterior.

A divergence is a convex generator ``f`` with ``f(1) = 0`` and ``f'(1) = 0``. Everything the solver,
the loss and the gradients need of it are five elementwise functions and one number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qmargin.errors import ConfigError, ShapeError
from qmargin.maths.settings import check_positive, describe

LARGEST_ALPHA = 16.0  # above it heights leave float64: 1e-20 of mass would be 1e-300 high


def uses_slack(order: float) -> bool:
    """Whether powers are taken through ``log1p`` of the slack, or ``log`` of the height.

    With ``b = alpha - 1`` and the height ``x = 1 + b v``, ``log1p(b v)`` is the accurate form near
    ``alpha = 1`` and ``log(x)`` away from it. Below one a rare class can have a height of
    ``exp(-200 |b|)``, which only the second form resolves, so the limits are not symmetric.
    """
    return -1e-3 < order < 0.1


def log_ratio(levels: Tensor, order: float) -> Tensor:
    """Logarithm of ``p / q`` at the given slacks or heights, ``-inf`` off the support (M1)."""
    if order == 0.0:
        return levels
    if uses_slack(order):
        return torch.log1p((order * levels).clamp_min(-1.0)) / order
    return levels.clamp_min(0.0).log() / order


class Divergence(Protocol):
    """Five elementwise functions and one number, ``edge``: the shape of the posterior."""

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
        object.__setattr__(self, "alpha", check_alpha(self.alpha))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alpha) and self.order == other.order

    def __hash__(self) -> int:
        return hash(("Alpha", self.order))

    @property
    def order(self) -> float:
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
        return -1.0 / self.order if self.order > 0 else -math.inf

    def generator(self, ratio: Tensor) -> Tensor:
        """``f(u)``, through its limit at ``alpha = 1`` and at ``u = 0``."""
        b = self.order
        if b == 0.0:
            entropy: Tensor = torch.special.xlogy(ratio, ratio)
            return entropy - (ratio - 1.0)
        is_zero = ratio == 0  # there f' may be infinite, f never is
        safe = torch.where(is_zero, 1.0, ratio)
        product = torch.where(is_zero, 0.0, safe * self.derivative(safe))
        return (product - (ratio - 1.0)) / (1.0 + b)

    def derivative(self, ratio: Tensor) -> Tensor:
        """``f'(u) = (u^(alpha-1) - 1) / (alpha-1)``, ``log u`` at ``alpha = 1``."""
        b = self.order
        log_ratio = ratio.log()
        return log_ratio if b == 0.0 else torch.expm1(b * log_ratio) / b

    def link(self, slack: Tensor) -> Tensor:
        """``[1 + (alpha-1) v]_+ ^ (1/(alpha-1))``, ``exp(v)`` at ``alpha = 1`` (M1)."""
        return self.log_link(slack).exp()

    def log_link(self, slack: Tensor) -> Tensor:
        """Logarithm of ``link``, ``-inf`` off the support."""
        b = self.order
        return log_ratio(slack if uses_slack(b) else 1.0 + b * slack, b)

    def link_slope(self, slack: Tensor) -> Tensor:
        """``link(v)^(2 - alpha)`` on the support, zero elsewhere."""
        log_link = self.log_link(slack)
        is_active = log_link > -math.inf
        return torch.where(is_active, ((1.0 - self.order) * log_link).exp(), 0.0)

    def excess(self, slack: Tensor) -> Tensor:
        """``link(v)^alpha / alpha``: ``f* = (link^alpha - 1) / alpha`` and ``f(0) = 1 / alpha``."""
        alpha = 1.0 + self.order
        return (alpha * self.log_link(slack)).exp() / alpha


@dataclass(frozen=True)
class JensenShannon:
    """The Jensen-Shannon divergence, ``f(u) = u log u - (u + 1) log((u + 1) / 2)``.

    Here to show that a divergence is one record: nothing else in the package knows it. It has no
    edge, so posteriors are never sparse, and slack stays below ``log 2``.
    """

    @property
    def edge(self) -> float:
        """No class ever leaves the support."""
        return -math.inf

    def generator(self, ratio: Tensor) -> Tensor:
        """``f(u)``."""
        entropy: Tensor = torch.special.xlogy(ratio, ratio)
        return entropy - (ratio + 1.0) * ((ratio + 1.0) / 2.0).log()

    def derivative(self, ratio: Tensor) -> Tensor:
        """``log(2u / (u + 1))``."""
        return math.log(2.0) - torch.log1p(1.0 / ratio)

    def link(self, slack: Tensor) -> Tensor:
        """``e^v / (2 - e^v)``."""
        return slack.exp() / (2.0 - slack.exp())

    def link_slope(self, slack: Tensor) -> Tensor:
        """``2 e^v / (2 - e^v)^2``."""
        return 2.0 * slack.exp() / (2.0 - slack.exp()).square()

    def excess(self, slack: Tensor) -> Tensor:
        """``f*(v) + f(0) = log 2 - log(2 - e^v)``."""
        return -torch.log1p(-0.5 * slack.exp())


def check_alpha(alpha: float | Tensor) -> float | Tensor:
    """Return ``alpha`` as a float or a floating tensor with one element, or raise.

    The value of a tensor is checked where it is used: reading it here would stop the device.
    """
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1 or not alpha.is_floating_point():
            raise ShapeError(
                f"alpha is {describe(alpha)}; a learnable order is a floating tensor with one "
                "element, e.g. torch.tensor(1.25)"
            )
        return alpha
    number = check_positive(
        alpha, "alpha", "choose one above 0 (1 is cross-entropy, 1.25 best for faces, 2 SparseMax)"
    )
    if not torch.compiler.is_compiling():
        check_alpha_range(number)
    return number


def check_alpha_range(alpha: float) -> None:
    """Raise unless the value of ``alpha``, given or learned, is in ``(0, LARGEST_ALPHA]``."""
    if not 0.0 < alpha <= LARGEST_ALPHA:
        raise ConfigError(
            f"alpha is {alpha:g}; choose one in (0, {LARGEST_ALPHA:g}], and clamp a learnable one "
            "after each update, e.g. alpha.data.clamp_(1.0, 2.0)"
        )
