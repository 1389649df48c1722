r"""Margins: from the target's cosine to its logit and its reference measure (M9).

A margin sees one cosine per row. A *prior* margin lowers the target's reference measure, a
*geometric* one lowers its logit, and one of each may be added: ``PriorMargin(0.2) +
AngularMargin(0.1)``. At ``alpha = 1`` a prior and a cosine margin are the same loss (M10).

To add a margin, write a class with the methods of ``Margin`` in a file of your own and register it;
``StatelessMargin`` has all but the formula. Recipes, sweeps and ``--help`` then know it by name::

    @register_margin("mine")
    @dataclass(frozen=True, eq=False)
    class MyMargin(StatelessMargin):
        margin: Setting

        def term(self, cosines, scale, labels, norms):
            return geometric_term(cosines - resolve(self.margin, cosines, labels), scale)

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
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, MarginWarning, ShapeError
from qmargin.losses.checks import check_number, check_positive, describe
from qmargin.registry import register_margin


def main_number(kind: Callable[..., Any]) -> str | None:
    """Name of the number of a margin or divergence that recipes give alone and schedules change.

    It is the attribute ``main_number`` if there is one, else the first parameter; None without
    parameters.

    Examples:
        >>> main_number(PriorMargin), main_number(CombinedMargin)
        ('margin', 'multiplier')
    """
    if hasattr(kind, "main_number"):
        name: str | None = kind.main_number
        return name
    return next(iter(signature(kind).parameters), None)


class ByValue:
    """Equality by fields; two tensors are equal settings when they are the same tensor."""

    def _key(self) -> tuple[object, ...]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return tuple(id(value) if isinstance(value, Tensor) else value for value in values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or type(self) is not type(other):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._key()))


@dataclass(frozen=True, eq=False)
class PerClass(ByValue):
    """One value per class, looked up by label.

    The wrapper keeps a tensor of one value per class apart from a tensor of one value per row,
    which may well have the same length.

    Args:
        values: Floating-point tensor ``[num_classes]``.

    Examples:
        >>> PerClass(torch.tensor([0.1, 0.4])).lookup(torch.tensor([1, 0, 1]), torch.zeros(3))
        tensor([0.4000, 0.1000, 0.4000])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            raise ShapeError(
                f"PerClass needs a floating-point tensor of shape [num_classes], "
                f"got {describe(self.values)}"
            )
        if self.values.ndim != 1 or self.values.shape[0] == 0:
            raise ShapeError(
                f"PerClass needs one value per class in a tensor of shape [num_classes], "
                f"got {describe(self.values)}"
            )

    def lookup(self, labels: Tensor | None, like: Tensor) -> Tensor:
        """Values of the labels' classes, in the shape of ``like``.

        A label past the end gives NaN. A negative one, which marks a row that the caller discards,
        gives zero, so that nothing in that row can spoil a gradient.
        """
        if labels is None:
            raise ConfigError(
                "a PerClass margin looks its values up by label and got no labels: "
                "pass labels=labels along with the target cosines"
            )
        if labels.shape != like.shape or labels.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"labels for a PerClass margin must be integers of shape {list(like.shape)}, "
                f"got {describe(labels)}"
            )
        last = self.values.shape[0] - 1
        found = self.values[labels.clamp(0, last)]
        return found.where(labels >= 0, 0.0).where(labels <= last, math.nan)


Setting = float | Tensor | PerClass
"""A margin: a number, a tensor (one value per row, or one for all), or one value per class."""


def check_setting(
    value: Setting, name: str, *, low: float = -math.inf, high: float = math.inf
) -> Setting:
    """Check a margin when it is built; of a tensor only what can be known without reading it."""
    if isinstance(value, PerClass):
        return value
    if not isinstance(value, Tensor):
        return check_number(value, name, low=low, high=high)
    if not value.is_floating_point() or value.ndim > 1:
        raise ShapeError(
            f"{name} is a tensor of {describe(value)}: give floating-point values, one for all "
            f"rows, one per row (shape [B]), or one per class inside PerClass"
        )
    return value


def resolve(value: Setting, cosines: Tensor, labels: Tensor | None) -> float | Tensor:
    """Turn a setting into a number or into one value per row, in the dtype of the cosines."""
    if isinstance(value, float):
        return value
    tensor = value.values if isinstance(value, PerClass) else value
    # A 0-dim tensor on the CPU mixes with any device, as everywhere in PyTorch.
    if tensor.device != cosines.device and not (tensor.ndim == 0 and tensor.device.type == "cpu"):
        raise ConfigError(
            f"the margin is on {tensor.device} and the cosines are on {cosines.device}: "
            f"move the margin's tensor with .to({str(cosines.device)!r}) when you build it"
        )
    if isinstance(value, PerClass):
        return value.lookup(labels, cosines).to(cosines.dtype)
    if value.ndim > 0 and value.shape != cosines.shape:
        raise ShapeError(
            f"a margin of shape {list(value.shape)} does not fit target cosines of shape "
            f"{list(cosines.shape)}: give one value per row, or put one per class in PerClass"
        )
    return value.to(cosines.dtype)


def settings_in(owner: object) -> Iterator[tuple[str, object]]:
    """Every value inside a margin of margins, named by its path: ``prior_margin_values``."""
    for field in fields(owner) if isinstance(owner, ByValue) else ():  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        yield field.name, value
        yield from ((f"{field.name}_{name}", inner) for name, inner in settings_in(value))


def register_learnable(module: nn.Module, owner: object, prefix: str) -> None:
    """Register the parameters inside a margin, so that an optimizer of the module finds them."""
    for name, value in settings_in(owner):
        if isinstance(value, nn.Parameter):
            module.register_parameter(f"{prefix}_{name}", value)


SMALLEST_SINE = 2.0**-11.5  # of an angle of 3.5e-4, or 0.02 degrees


def as_working(cosines: Tensor) -> Tensor:
    """Cosines in float32 or better."""
    return cosines.float() if cosines.dtype in (torch.float16, torch.bfloat16) else cosines


def keep_non_finite(shifted: Tensor, cosines: Tensor) -> Tensor:
    """``shifted``, but a cosine of ``-inf``, ``+inf`` or NaN as it came, with a zero gradient."""
    return torch.where(cosines.isfinite(), shifted, cosines.detach())


def sine(cosines: Tensor) -> Tensor:
    """``sin(arccos c)`` for cosines in [-1, 1]; its derivative is ``-c / max(sin, SMALLEST_SINE)``.

    Examples:
        >>> sine(torch.tensor([1.0, 0.6, -1.0]))
        tensor([0.0000, 0.8000, 0.0000])
    """
    squared = (1.0 - cosines) * (1.0 + cosines)  # unlike 1 - c^2 this loses no digits at the ends
    floor = SMALLEST_SINE**2
    root = squared.clamp_min(floor).sqrt()
    slanted = torch.where(squared > floor, root, squared * (0.5 / SMALLEST_SINE))
    # The difference is exactly zero: the value is the root's, the derivative that of ``slanted``.
    return squared.detach().sqrt() + (slanted - slanted.detach())


def widened_cosines(cosines: Tensor, margin: float | Tensor) -> Tensor:
    """``cos(arccos c + m)``, continued past ``pi - m`` by the line ``c - 1 - cos(pi - m)``.

    Args:
        cosines: Any shape; rounding outside [-1, 1] is clamped, other rules as for all margins.
        margin: Radians in [0, pi); NaN comes out where a tensor leaves that range.

    Returns:
        A tensor like ``cosines``, never decreasing in them.

    Examples:
        >>> widened_cosines(torch.tensor([1.0, 0.0, -1.0]), math.pi / 2)
        tensor([ 6.1232e-17, -1.0000e+00, -2.0000e+00])
    """
    cos_margin: float | Tensor
    sin_margin: float | Tensor
    if isinstance(margin, Tensor):
        margin = margin.where((margin >= 0.0) & (margin < math.pi), math.nan)
        cos_margin, sin_margin = margin.cos(), margin.sin()
    else:
        cos_margin, sin_margin = math.cos(margin), math.sin(margin)
    inside = cosines.clamp(-1.0, 1.0)
    rotated = inside * cos_margin - sine(inside) * sin_margin
    continued = inside - 1.0 + cos_margin
    return keep_non_finite(torch.where(inside > -cos_margin, rotated, continued), cosines)


def wound_cosines(
    cosines: Tensor, *, multiplier: float | Tensor, angular: float | Tensor
) -> Tensor:
    """``cos(phi)`` of ``phi = m1 angle + m2``, unwound: ``(-1)^n cos(phi) - 2n``.

    With ``n = floor(phi / pi)`` this is continuous and falls with every further turn, as in
    SphereFace, instead of rising again.

    Args:
        cosines: Any shape; rules as in ``widened_cosines``.
        multiplier: ``m1``, positive.
        angular: ``m2`` in radians.

    Returns:
        A tensor like ``cosines``, never decreasing in them.
    """
    inside = cosines.clamp(-1.0, 1.0)
    phi = multiplier * torch.atan2(sine(inside), inside) + angular
    turns = (phi.detach() / math.pi).floor()
    sign = 1.0 - 2.0 * turns.remainder(2.0)
    return keep_non_finite(sign * phi.cos() - 2.0 * turns, cosines)


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

    A subclass is a frozen dataclass with a ``term``, which gets cosines in float32 or better.
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
        term = self.term(as_working(target_cosines), scale, labels, norms)
        if not isinstance(term, TargetTerm):
            raise ConfigError(
                f"{type(self).__name__}.term returns a {type(term).__name__}; return a TargetTerm, "
                "such as that of geometric_term"
            )
        return term

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """Target logits and log reference of cosines ``[B]``, see ``Margin``."""
        raise NotImplementedError

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return ``None``: the gap is not one number."""
        return None

    def __add__(self, other: StatelessMargin) -> SumMargin:
        if not isinstance(other, StatelessMargin):
            return NotImplemented  # a margin with state builds its own sum
        return SumMargin(*ordered_summands(self, other))


class StatefulMargin(nn.Module):
    """A margin with state: it follows ``train()``, ``eval()``, ``to()`` and ``state_dict()``."""

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return ``None``: the gap differs from row to row."""
        return None

    def __add__(self, other: Margin) -> ModuleSumMargin:
        return ModuleSumMargin(self, other)

    def __radd__(self, other: Margin) -> ModuleSumMargin:
        return ModuleSumMargin(other, self)


@register_margin("prior")
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

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """See ``StatelessMargin.term``."""
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


@register_margin("cosine")
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

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """See ``StatelessMargin.term``."""
        return geometric_term(cosines - resolve(self.margin, cosines, labels), scale)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the margin itself, ``None`` for a tensor (M12)."""
        return self.margin if isinstance(self.margin, float) else None


@register_margin("angular")
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

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """See ``StatelessMargin.term``."""
        margin = resolve(self.margin, cosines, labels)
        if self.gradient == "exact":
            return geometric_term(widened_cosines(cosines, margin), scale)
        shifted = widened_cosines(cosines.detach(), margin)
        finite = cosines.where(cosines.isfinite(), 0.0)
        # The difference is exactly zero, so the value is untouched; only its derivative is one.
        return geometric_term(shifted + (finite - finite.detach()), scale)


@register_margin("multiplied")
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

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """See ``StatelessMargin.term``."""
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

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """See ``StatelessMargin.term``."""
        return _sum_term(self.prior, self.geometric, cosines, scale, labels, norms)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the sum of the two gaps, ``None`` where one is not a number (M12)."""
        gaps = self.prior.effective(alpha, scale), self.geometric.effective(alpha, scale)
        return None if gaps[0] is None or gaps[1] is None else gaps[0] + gaps[1]


class ModuleSumMargin(StatefulMargin):
    """A prior margin and a geometric one with state: the ``+`` of the two builds it.

    Examples:
        >>> from qmargin import ElasticMargin
        >>> (PriorMargin(0.1) + ElasticMargin().eval())(torch.tensor([1.0]), 10.0).log_reference
        tensor([-1.])
    """

    def __init__(self, left: Margin, right: Margin) -> None:
        super().__init__()
        if isinstance(left, ModuleSumMargin) or isinstance(right, ModuleSumMargin):
            raise ConfigError(
                "cannot add to a sum: it already has one PriorMargin and one geometric margin"
            )
        self.prior: PriorMargin
        self.geometric: Margin
        self.prior, self.geometric = ordered_summands(left, right)
        register_learnable(self, self.prior, "prior")

    def forward(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Return the geometric margin's logits and penalty, the prior margin's log reference."""
        return _sum_term(self.prior, self.geometric, target_cosines, scale, labels, norms)

    def extra_repr(self) -> str:
        """The prior margin; the other is shown as a submodule."""
        return f"{self.prior}"


def _sum_term(
    prior: PriorMargin,
    geometric: Margin,
    cosines: Tensor,
    scale: float,
    labels: Tensor | None,
    norms: Tensor | None,
) -> TargetTerm:
    term = geometric(cosines, scale, labels=labels, norms=norms)
    return term._replace(log_reference=prior(cosines, scale, labels=labels).log_reference)


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


def check_margin(margin: Margin, num_classes: int | None = None) -> None:
    """Raise unless it is a margin, whose ``PerClass`` settings are as long as there are classes."""
    if isinstance(margin, type) or not (callable(margin) and hasattr(margin, "effective")):
        raise ConfigError(
            f"margin is {margin!r}; give an object with the methods of Margin, e.g. "
            "PriorMargin(0.2)"
        )
    if isinstance(margin, StatelessMargin) and not is_dataclass(margin):
        raise ConfigError(
            f"margin is a {type(margin).__name__}, which is not a dataclass; write "
            "@dataclass(frozen=True, eq=False) above the class"
        )
    if num_classes is None or torch.compiler.is_compiling():  # there a missing class gives NaN
        return
    for name, value in settings_in(margin.prior if isinstance(margin, ModuleSumMargin) else margin):
        if isinstance(value, PerClass) and len(value.values) != num_classes:
            raise ShapeError(
                f"{name} of the margin has {len(value.values)} values and there are {num_classes} "
                "classes; give PerClass one value per class"
            )


LARGEST_GAP = 2.0  # between two cosines: an effective margin above it cannot be reached


def warn_if_unreachable(margin: Margin, *, alpha: float, scale: float) -> None:
    """Warn, at the line that called this package, when no pair of cosines has the gap (M12)."""
    gap = margin.effective(alpha, scale)
    if gap is None or gap <= LARGEST_GAP:
        return
    warnings.warn(
        f"the effective margin is {gap:.3g} at alpha={alpha:g}, scale={scale:g}, but cosines "
        f"differ by at most {LARGEST_GAP:g}: {_remedy(margin, alpha, scale)}",
        MarginWarning,
        stacklevel=_frames_inside(),
    )


def _remedy(margin: Margin, alpha: float, scale: float) -> str:
    """What to lower, and below which number."""
    room, name = LARGEST_GAP, "margin"
    if isinstance(margin, SumMargin):
        room -= margin.geometric.effective(alpha, scale) or 0.0
        margin = margin.prior if room > 0.0 else margin.geometric
        name = type(margin).__name__
    if not isinstance(margin, PriorMargin):
        return f"lower the {name} below {LARGEST_GAP:g}"
    largest = PriorMargin.from_effective(room, alpha=alpha, scale=scale).margin
    return f"lower the {name} below {largest:.3g}, or choose it by PriorMargin.from_effective"


def _frames_inside() -> int:
    """Stack level, for a warning raised by the caller, of the first frame outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("qmargin."):
        frame, level = frame.f_back, level + 1
    return level
