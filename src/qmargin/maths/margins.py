r"""Margins: from the target's cosine to its logit and its reference measure (M9).

A margin sees one cosine per row. A *prior* margin lowers the target's reference measure, a
*geometric* one lowers its logit, and one of each may be added: ``PriorMargin(0.2) +
AngularMargin(0.1)``. At ``alpha = 1`` a prior and a cosine margin are the same loss (M10).

Rules that hold for every margin here:

- The terms keep the shape of the cosines; float16 and bfloat16 are computed in float32.
- Cosines outside [-1, 1] by rounding count as -1 or 1 wherever an angle is taken. ``-inf`` (masked
  out) stays ``-inf``, NaN stays NaN, and ``+inf`` never becomes finite.
- A setting is a number; a tensor with one value per row (or one for all); or ``PerClass`` around
  one value per class. Gradients flow into tensors. Numbers are checked when the margin is built;
  tensors are checked for shape, dtype and device only, because reading them would stop the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.maths.angles import as_working, widened_cosines, wound_cosines
from qmargin.maths.settings import (
    ByValue,
    PerClass,
    Setting,
    check_number,
    check_positive,
    check_setting,
    resolve,
)

__all__ = [
    "AngularMargin",
    "CombinedMargin",
    "CosineMargin",
    "Margin",
    "PerClass",
    "PriorMargin",
    "SumMargin",
    "TargetTerm",
]


class TargetTerm(NamedTuple):
    """What a margin makes of the target: one number per row in each field."""

    logits: Tensor  # [B]
    log_reference: Tensor  # [B]
    penalty: Tensor | None = None  # [B], added to the row's loss


class Margin(Protocol):
    """Target cosine in, target logit and log reference out."""

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Apply the margin to target cosines ``[B]``.

        ``labels`` ``[B]`` are read by per-class settings, ``norms`` ``[B]`` (lengths of the
        embeddings) by margins that follow the quality of a sample. A negative label marks a row
        that the caller discards: it gets a finite term and is left out of running statistics.
        """

    def effective(self, alpha: float, scale: float) -> float | None:
        """Cosine gap the margin adds (M12), or ``None`` where that is not one number."""


def geometric_term(shifted: Tensor, scale: float) -> TargetTerm:
    """Term of a margin that only moves the target's cosine: its reference measure stays one."""
    return TargetTerm(scale * shifted, torch.zeros_like(shifted))


class StatelessMargin(ByValue):
    """What the margins below share: equality by settings, the working dtype, and sums.

    A subclass is a frozen dataclass with a ``_term``, which gets cosines in float32 or better.
    """

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Apply the margin, see ``Margin``."""
        return self._term(as_working(target_cosines), scale, labels, norms)

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        raise NotImplementedError

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return ``None``: the gap is not one number."""
        return None

    def __add__(self, other: StatelessMargin) -> SumMargin:
        if not isinstance(other, StatelessMargin):
            return NotImplemented  # a margin with state builds its own sum
        return SumMargin(*ordered_summands(self, other))


@dataclass(frozen=True, eq=False)
class PriorMargin(StatelessMargin):
    r"""Q-Margin: lowers the target's reference measure (M9).

    .. math:: \theta_y = s c_y, \qquad \log q_y = -s m

    Args:
        margin: ``m``, any finite number or a tensor; in cosine units at ``alpha = 1`` (M10).

    Examples:
        >>> PriorMargin(0.25)(torch.tensor([0.5]), 32.0)
        TargetTerm(logits=tensor([16.]), log_reference=tensor([-8.]), penalty=None)
    """

    margin: Setting

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", check_setting(self.margin, "prior margin"))

    @classmethod
    def from_effective(cls, effective: float, *, alpha: float, scale: float) -> PriorMargin:
        r"""Build the margin that adds a cosine gap of ``effective`` (inverse of M12).

        .. math:: m = \log(1 + (\alpha - 1) s\, m_\text{eff}) / ((\alpha - 1) s)

        Examples:
            >>> round(PriorMargin.from_effective(0.5, alpha=1.25, scale=32.0).margin, 4)
            0.2012
        """
        rate = _rate(alpha, scale)
        effective = check_number(effective, "effective margin")
        if 1.0 + rate * effective <= 0.0:
            bound = "below" if rate < 0.0 else "above"
            raise ConfigError(
                f"no prior margin adds a cosine gap of {effective:g} at alpha={alpha:g}, "
                f"scale={scale:g}: choose one {bound} {-1.0 / rate:g}"
            )
        return cls(effective if rate == 0.0 else math.log1p(rate * effective) / rate)

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        margin = resolve(self.margin, cosines, labels)
        if isinstance(margin, Tensor):
            return TargetTerm(scale * cosines, (-scale * margin).expand_as(cosines))
        return TargetTerm(scale * cosines, torch.full_like(cosines, 0.0 - scale * margin))

    def effective(self, alpha: float, scale: float) -> float | None:
        r"""Cosine gap the margin adds, ``None`` for a tensor (M12).

        .. math:: m_\text{eff} = (e^{(\alpha - 1) s m} - 1) / ((\alpha - 1) s)

        For ``alpha > 1`` a row has zero loss from a gap of ``m_eff + 1 / ((alpha - 1) s)`` on; the
        second part is there without a margin too. The limit at ``alpha = 1`` is ``m``.

        Examples:
            >>> round(PriorMargin(0.2).effective(1.25, 35.0), 2)
            0.54
        """
        if not isinstance(self.margin, float):
            return None
        exponent = _rate(alpha, scale) * self.margin
        if exponent == 0.0:
            return self.margin
        try:
            return self.margin * (math.expm1(exponent) / exponent)
        except OverflowError:
            return math.copysign(math.inf, self.margin)


@dataclass(frozen=True, eq=False)
class CosineMargin(StatelessMargin):
    r"""CosFace: lowers the target's cosine, ``theta_y = s (c_y - m)`` (M9).

    Args:
        margin: ``m`` in cosine units, any finite number or a tensor.

    Examples:
        >>> CosineMargin(0.25)(torch.tensor([0.5]), 32.0).logits
        tensor([8.])
    """

    margin: Setting

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", check_setting(self.margin, "cosine margin"))

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        return geometric_term(cosines - resolve(self.margin, cosines, labels), scale)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the margin itself, ``None`` for a tensor (M12)."""
        return self.margin if isinstance(self.margin, float) else None


@dataclass(frozen=True, eq=False)
class AngularMargin(StatelessMargin):
    r"""ArcFace: widens the target's angle, ``theta_y = s cos(arccos c_y + m)`` (M9).

    Past an angle of ``pi - m``, where the formula would turn upwards again, it is continued by the
    line ``s (c - 1 - cos(pi - m))``: continuous, increasing in the cosine, ``-s`` at the joint.

    The true gradient ``s sin(angle + m) / sin(angle)``, which is ``s (cos m + sin m cot(angle))``,
    is infinite at a cosine of one. In the gradient, not in the value, ``sin(angle)`` counts as no
    smaller than 3.5e-4, one step of float32 from the end, which keeps it below
    ``s (cos m + 2897 sin m)``.

    Args:
        margin: ``m`` in radians, in [0, pi), or a tensor (a value outside gives NaN in its row).
        gradient: ``"exact"``, or ``"straight_through"`` for ``s`` everywhere, as in common code
            that adds the margin outside autograd; the values are the same.

    Examples:
        >>> AngularMargin(0.5)(torch.tensor([1.0, 0.0, -1.0]), 1.0).logits
        tensor([ 0.8776, -0.4794, -1.1224])
    """

    margin: Setting
    gradient: Literal["exact", "straight_through"] = "exact"

    def __post_init__(self) -> None:
        margin = check_setting(self.margin, "angular margin", low=0.0, high=math.pi)
        object.__setattr__(self, "margin", margin)
        if self.gradient not in ("exact", "straight_through"):
            raise ConfigError(
                f"gradient of an angular margin is {self.gradient!r}: "
                f"choose 'exact' or 'straight_through'"
            )

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        margin = resolve(self.margin, cosines, labels)
        if self.gradient == "exact":
            return geometric_term(widened_cosines(cosines, margin), scale)
        shifted = widened_cosines(cosines.detach(), margin)
        finite = cosines.where(cosines.isfinite(), 0.0)
        # The difference is exactly zero, so the value is untouched; only its derivative is one.
        return geometric_term(shifted + (finite - finite.detach()), scale)


@dataclass(frozen=True, eq=False, kw_only=True)
class CombinedMargin(StatelessMargin):
    r"""Multiplied angle, added angle and lowered cosine in one: ``cos(m1 angle + m2) - m3``.

    The family of the ArcFace paper; ``CombinedMargin(multiplier=4.0)`` is SphereFace (without its
    annealing). Each further turn of ``pi`` is continued as in SphereFace,
    ``(-1)^n cos(phi) - 2n`` with ``n = floor(phi / pi)`` and ``phi = m1 angle + m2``: continuous
    and never decreasing in the cosine. ``AngularMargin`` continues by a line instead. The gradient
    is finite everywhere, by the same rule as there.

    Args:
        multiplier: ``m1``, positive.
        angular: ``m2`` in radians, in [0, pi).
        cosine: ``m3`` in cosine units.

    Examples:
        >>> CombinedMargin(multiplier=2.0)(torch.tensor([1.0, 0.0, -1.0]), 1.0).logits
        tensor([ 1., -1., -3.])
    """

    multiplier: Setting = 1.0
    angular: Setting = 0.0
    cosine: Setting = 0.0

    def __post_init__(self) -> None:
        limits = {"multiplier": (0.0, math.inf), "angular": (0.0, math.pi)}
        for name in ("multiplier", "angular", "cosine"):
            low, high = limits.get(name, (-math.inf, math.inf))
            value = check_setting(getattr(self, name), f"{name} of a margin", low=low, high=high)
            object.__setattr__(self, name, value)
        if isinstance(self.multiplier, float) and self.multiplier == 0.0:
            raise ConfigError(
                "multiplier of a margin is 0: choose a positive one, 1 to leave angles"
            )

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        multiplier, angular, cosine = (
            resolve(value, cosines, labels)
            for value in (self.multiplier, self.angular, self.cosine)
        )
        wound = wound_cosines(cosines, multiplier=multiplier, angular=angular)
        return geometric_term(wound - cosine, scale)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the cosine part where the angle is left alone, else ``None`` (M12)."""
        if isinstance(self.multiplier, float) and isinstance(self.angular, float):
            is_plain = self.multiplier == 1.0 and self.angular == 0.0
            return self.cosine if is_plain and isinstance(self.cosine, float) else None
        return None


@dataclass(frozen=True, eq=False)
class SumMargin(StatelessMargin):
    """A prior margin and a geometric one at once: the reference of one, the logit of the other.

    Args:
        prior: Gives ``log q_y``.
        geometric: Gives ``theta_y``.

    Examples:
        >>> (CosineMargin(0.25) + PriorMargin(0.5))(torch.tensor([0.5]), 32.0)
        TargetTerm(logits=tensor([8.]), log_reference=tensor([-16.]), penalty=None)
    """

    prior: PriorMargin
    geometric: Margin

    def __post_init__(self) -> None:
        prior, geometric = ordered_summands(self.prior, self.geometric)
        object.__setattr__(self, "prior", prior)
        object.__setattr__(self, "geometric", geometric)
        if isinstance(self.geometric, nn.Module):
            raise ConfigError(
                f"SumMargin would hide the state of {type(self.geometric).__name__}: "
                f"write the sum with +, which makes a module of it"
            )

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        term = self.geometric(cosines, scale, labels=labels, norms=norms)
        prior = self.prior(cosines, scale, labels=labels)
        return term._replace(log_reference=prior.log_reference)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the sum of the two gaps, ``None`` where one is not a number (M12)."""
        gaps = self.prior.effective(alpha, scale), self.geometric.effective(alpha, scale)
        return None if gaps[0] is None or gaps[1] is None else gaps[0] + gaps[1]


def ordered_summands(left: Margin, right: Margin) -> tuple[PriorMargin, Margin]:
    """Return the prior and the geometric margin of a sum, or raise ``ConfigError``."""
    prior, geometric = (left, right) if isinstance(left, PriorMargin) else (right, left)
    if not isinstance(prior, PriorMargin) or isinstance(geometric, PriorMargin | SumMargin):
        raise ConfigError(
            f"cannot add {type(left).__name__} and {type(right).__name__}: a sum has exactly one "
            f"PriorMargin and one geometric margin (cosine, angular, combined or adaptive)"
        )
    return prior, geometric


def _rate(alpha: float, scale: float) -> float:
    """``(alpha - 1) s``, after checking both."""
    alpha = check_positive(alpha, "alpha", "choose a positive number")
    return (alpha - 1.0) * check_positive(scale, "scale", "choose a positive number")
