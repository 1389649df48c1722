r"""Margins: from the target's cosine to its logit and its reference measure (M9).

A margin sees one cosine per row. A *prior* margin lowers the target's reference measure, a
*geometric* one lowers its logit, and one of each may be added: ``PriorMargin(0.2) +
AngularMargin(0.1)``. At ``alpha = 1`` a prior and a cosine margin are the same loss (M10).

- The terms keep the shape of the cosines; float16 and bfloat16 are computed in float32.
- Cosines outside [-1, 1] by rounding count as -1 or 1 wherever an angle is taken. ``-inf`` (masked
  out) stays ``-inf``, NaN stays NaN, and ``+inf`` never becomes finite.
- A setting is a number; a tensor with one value per row (or one for all); or ``PerClass`` around
  one value per class. Gradients flow into tensors. Numbers are checked when the margin is built;
  tensors are checked for shape, dtype and device only, because reading them makes a GPU wait.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, MarginWarning, ShapeError
from qmargin.losses.checks import check_norms, check_number, check_positive, describe
from qmargin.registry import register_margin

LARGEST_GAP = 2.0  # between two cosines: an effective margin above it cannot be reached
SMALLEST_SINE = 2.0**-11.5  # of an angle of 3.5e-4, or 0.02 degrees


def main_number(kind: Callable[..., Any]) -> str | None:
    """Name of the number of a margin or divergence that recipes give alone and schedules change.

    It is the attribute ``main_number``, else the first parameter; None without parameters.
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

    Args:
        values: Floating-point tensor ``[num_classes]``.

    Examples:
        >>> PerClass(torch.tensor([0.1, 0.4])).lookup(torch.tensor([1, 0, 1]), torch.zeros(3))
        tensor([0.4000, 0.1000, 0.4000])
    """

    values: Tensor

    def __post_init__(self) -> None:
        values = self.values
        is_floating = isinstance(values, Tensor) and values.is_floating_point()
        if not is_floating or values.ndim != 1 or len(values) == 0:
            raise ShapeError(
                f"PerClass needs floating-point values, one per class [num_classes], got "
                f"{describe(values)}"
            )

    def lookup(self, labels: Tensor | None, like: Tensor) -> Tensor:
        """Values of the labels' classes, in the shape of ``like``.

        A label past the end gives NaN. A negative one, which marks a row that the caller discards,
        gives zero, so that nothing in that row can spoil a gradient.
        """
        if labels is None:
            raise ConfigError("a PerClass margin got no labels; pass labels with the cosines")
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
    """Every value inside a nested margin, named by its path: ``prior_margin_values``."""
    for field in fields(owner) if isinstance(owner, ByValue) else ():  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        yield field.name, value
        yield from ((f"{field.name}_{name}", inner) for name, inner in settings_in(value))


def register_learnable(module: nn.Module, owner: object, prefix: str) -> None:
    """Register the parameters inside a margin, so that an optimizer of the module finds them."""
    for name, value in settings_in(owner):
        if isinstance(value, nn.Parameter):
            module.register_parameter(f"{prefix}_{name}", value)


def as_working(cosines: Tensor) -> Tensor:
    """Cosines in float32 or better."""
    return cosines.float() if cosines.dtype in (torch.float16, torch.bfloat16) else cosines


def keep_non_finite(shifted: Tensor, cosines: Tensor) -> Tensor:
    """``shifted``, but infinite and NaN cosines unchanged, with a zero gradient."""
    return torch.where(cosines.isfinite(), shifted, cosines.detach())


def sine(cosines: Tensor) -> Tensor:
    """``sin(arccos c)`` of cosines in [-1, 1]; its slope is ``-c / max(sin, SMALLEST_SINE)``."""
    squared = (1.0 - cosines) * (1.0 + cosines)  # unlike 1 - c^2 this loses no digits at the ends
    floor = SMALLEST_SINE**2
    root = squared.clamp_min(floor).sqrt()
    slanted = torch.where(squared > floor, root, squared * (0.5 / SMALLEST_SINE))
    # The difference is exactly zero: the value is the root's, the derivative that of ``slanted``.
    return squared.detach().sqrt() + (slanted - slanted.detach())


def widened_cosines(cosines: Tensor, margin: float | Tensor) -> Tensor:
    """``cos(arccos c + m)``, continued past ``pi - m`` by the line ``c - 1 - cos(pi - m)``.

    It never decreases with the cosines. A margin outside [0, pi) gives NaN where it is a tensor.
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


class TargetTerm(NamedTuple):
    """Output of a margin; each field has one number per row."""

    logits: Tensor  # [B]
    log_reference: Tensor  # [B]
    penalty: Tensor | None = None  # [B], added to the row's loss


class Margin(Protocol):
    """Interface of a margin: maps target cosines to target logits and log references."""

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Apply the margin to target cosines ``[B]``.

        ``labels`` ``[B]`` are used by per-class settings, ``norms`` ``[B]`` (lengths of the
        embeddings) by margins that depend on the quality of a sample. A negative label marks a row
        that the caller discards: it gets a finite term and is left out of running statistics.
        """

    def effective(self, alpha: float, scale: float) -> float | None:
        """Cosine gap the margin adds (M12), or ``None`` where that is not one number."""


def geometric_term(shifted: Tensor, scale: float) -> TargetTerm:
    """Term of a margin that only moves the target's cosine: its reference measure stays one."""
    return TargetTerm(scale * shifted, torch.zeros_like(shifted))


class StatelessMargin(ByValue):
    """Base of margins without state: equality by settings, the working dtype, and sums.

    A subclass is a frozen dataclass with a ``term``, which gets cosines in float32 or better.
    """

    _limits: ClassVar[tuple[tuple[str, float, float], ...]] = ()  # of settings: name, low, high

    def __post_init__(self) -> None:
        for name, low, high in self._limits:
            title = f"{name} of {type(self).__name__}"
            value = check_setting(getattr(self, name), title, low=low, high=high)
            object.__setattr__(self, name, value)

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
    """Base of margins with state, which is part of ``state_dict()`` and follows ``train()``."""

    def forward(
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

    _limits = (("margin", -math.inf, math.inf),)
    margin: Setting

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


def _rate(alpha: float, scale: float) -> float:
    """``(alpha - 1) s``, after checking both."""
    alpha = check_positive(alpha, "alpha", "choose a positive number")
    return (alpha - 1.0) * check_positive(scale, "scale", "choose a positive number")


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

    _limits = (("margin", -math.inf, math.inf),)
    margin: Setting

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
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

    The true gradient ``s sin(angle + m) / sin(angle)`` is infinite at a cosine of one. In the
    gradient, not in the value, ``sin(angle)`` counts as no smaller than 3.5e-4, one step of float32
    from the end, which keeps it below ``s (cos m + 2897 sin m)``.

    Args:
        margin: ``m`` in radians, in [0, pi), or a tensor (a value outside gives NaN in its row).
        gradient: ``"exact"``, or ``"straight_through"`` for ``s`` everywhere, as in common code
            that adds the margin outside autograd; the values are the same.

    Examples:
        >>> AngularMargin(0.5)(torch.tensor([1.0, 0.0, -1.0]), 1.0).logits
        tensor([ 0.8776, -0.4794, -1.1224])
    """

    _limits = (("margin", 0.0, math.pi),)
    margin: Setting
    gradient: Literal["exact", "straight_through"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient not in ("exact", "straight_through"):
            raise ConfigError(
                f"gradient is {self.gradient!r}: choose 'exact' or 'straight_through'"
            )

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
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

    ``CombinedMargin(multiplier=4.0)`` is SphereFace (without its annealing). Each further turn of
    ``pi`` is continued as there, ``(-1)^n cos(phi) - 2n`` with ``phi = m1 angle + m2`` and
    ``n = floor(phi / pi)``: continuous and never decreasing in the cosine. The gradient is finite
    everywhere, by the rule of ``AngularMargin``.

    Args:
        multiplier: ``m1``, positive.
        angular: ``m2`` in radians, in [0, pi).
        cosine: ``m3`` in cosine units.

    Examples:
        >>> CombinedMargin(multiplier=2.0)(torch.tensor([1.0, 0.0, -1.0]), 1.0).logits
        tensor([ 1., -1., -3.])
    """

    _limits = (
        ("multiplier", 0.0, math.inf),
        ("angular", 0.0, math.pi),
        ("cosine", -math.inf, math.inf),
    )
    multiplier: Setting = 1.0
    angular: Setting = 0.0
    cosine: Setting = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.multiplier, float) and self.multiplier == 0.0:
            raise ConfigError("multiplier is 0: choose a positive number, 1 to leave angles alone")

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        multiplier, angular, cosine = (
            resolve(value, cosines, labels)
            for value in (self.multiplier, self.angular, self.cosine)
        )
        inside = cosines.clamp(-1.0, 1.0)
        phi = multiplier * torch.atan2(sine(inside), inside) + angular
        turns = (phi.detach() / math.pi).floor()
        sign = 1.0 - 2.0 * turns.remainder(2.0)
        wound = keep_non_finite(sign * phi.cos() - 2.0 * turns, cosines)
        return geometric_term(wound - cosine, scale)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the cosine part where the angle is left alone, else ``None`` (M12)."""
        if isinstance(self.multiplier, float) and isinstance(self.angular, float):
            is_plain = self.multiplier == 1.0 and self.angular == 0.0
            return self.cosine if is_plain and isinstance(self.cosine, float) else None
        return None


@dataclass(frozen=True, eq=False)
class SumMargin(StatelessMargin):
    """Sum of a prior margin and a geometric margin.

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
        term = self.geometric(cosines, scale, labels=labels, norms=norms)
        return term._replace(log_reference=self.prior(cosines, scale, labels=labels).log_reference)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return the sum of the two gaps, ``None`` where one is not a number (M12)."""
        gaps = self.prior.effective(alpha, scale), self.geometric.effective(alpha, scale)
        return None if gaps[0] is None or gaps[1] is None else gaps[0] + gaps[1]


class ModuleSumMargin(StatefulMargin):
    """A prior margin and a geometric one with state: the ``+`` of the two builds it."""

    def __init__(self, left: Margin, right: Margin) -> None:
        super().__init__()
        self.prior: PriorMargin
        self.geometric: Margin
        self.prior, self.geometric = ordered_summands(left, right)
        register_learnable(self, self.prior, "prior")

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        term = self.geometric(cosines, scale, labels=labels, norms=norms)
        return term._replace(log_reference=self.prior(cosines, scale, labels=labels).log_reference)

    def extra_repr(self) -> str:
        """The prior margin; the other is shown as a submodule."""
        return f"{self.prior}"


def ordered_summands(left: Margin, right: Margin) -> tuple[PriorMargin, Margin]:
    """Return the prior and the geometric margin of a sum, or raise ``ConfigError``."""
    prior, geometric = (left, right) if isinstance(left, PriorMargin) else (right, left)
    is_sum = isinstance(geometric, PriorMargin | SumMargin | ModuleSumMargin)
    if is_sum or not isinstance(prior, PriorMargin):
        raise ConfigError(
            f"cannot add {type(left).__name__} and {type(right).__name__}: a sum has exactly one "
            f"PriorMargin and one geometric margin (cosine, angular, combined or adaptive)"
        )
    return prior, geometric


@register_margin("adaface")
class AdaFaceMargin(StatefulMargin):
    r"""AdaFace: the margin depends on the embedding norm, a proxy of image quality (CVPR 2022).

    With the norm's score :math:`z`, clipped to [-1, 1], relative to running statistics of norms,

    .. math::

        z = h (\lVert x \rVert - \mu) / (\sigma + \varepsilon), \qquad
        \theta_y = s [\cos(\operatorname{clip}(\text{angle} - m z)) - (m + m z)]

    so that it is ArcFace at ``z = -1``, CosFace at ``z = 0`` and a negative angular margin at
    ``z = 1``. As published, norms are clipped to [0.001, 100] and detached, the cosine is kept
    ``eps = 0.001`` inside (-1, 1), and the angle ``eps`` inside (0, pi). The statistics start at 20
    and 100 and move before they are used, in training mode only, by rows with finite norms and
    labels that are not negative. Each process has its own.

    Args:
        margin: ``m``, in [0, pi).
        concentration: ``h``, not negative.
        momentum: Share of the new batch in the running statistics, in [0, 1].

    Examples:
        >>> margin = AdaFaceMargin().eval()
        >>> margin(torch.tensor([0.5, 0.5]), 64.0, norms=torch.tensor([20.0, 20.0])).logits
        tensor([6.4000, 6.4000])
    """

    epsilon = 1e-3
    norm_limits = (1e-3, 100.0)
    running_mean: Tensor
    running_std: Tensor

    def __init__(
        self, margin: float = 0.4, *, concentration: float = 0.333, momentum: float = 0.01
    ) -> None:
        super().__init__()
        self.margin = check_number(margin, "margin of AdaFace", low=0.0, high=math.pi)
        self.concentration = check_number(concentration, "concentration of AdaFace", low=0.0)
        self.momentum = check_number(momentum, "momentum of AdaFace", low=0.0)
        if self.momentum > 1.0:
            raise ConfigError(f"momentum of AdaFace is {momentum:g}: choose a value in [0, 1]")
        self.register_buffer("running_mean", torch.tensor(20.0))
        self.register_buffer("running_std", torch.tensor(100.0))

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        lengths = _lengths(norms, cosines, "AdaFaceMargin").detach().clamp(*self.norm_limits)
        if self.training:
            self._update_statistics_(lengths, labels)
        centred = (lengths - self.running_mean) / (self.running_std + self.epsilon)
        score = (self.concentration * centred).clamp(-1.0, 1.0).to(cosines.dtype)
        inside = cosines.clamp(-1.0 + self.epsilon, 1.0 - self.epsilon)
        angle = inside.acos() - self.margin * score
        turned = angle.clamp(self.epsilon, math.pi - self.epsilon).cos()
        shifted = turned - self.margin * (1.0 + score)
        return geometric_term(keep_non_finite(shifted, cosines), scale)

    @torch.no_grad()
    def _update_statistics_(self, lengths: Tensor, labels: Tensor | None) -> None:
        """Move the running mean and deviation towards those of the usable rows."""
        is_used = lengths.isfinite()
        if labels is not None:
            is_used = is_used & (labels >= 0)
        # Sums over a mask instead of indexing: the number of usable rows stays on the device.
        count = is_used.sum()
        mean = lengths.where(is_used, 0.0).sum() / count
        squares = (lengths - mean).square().where(is_used, 0.0).sum()
        deviation = (squares / (count - 1)).sqrt()  # unbiased, as published
        for running, new, is_known in (
            (self.running_mean, mean, count > 0),
            (self.running_std, deviation, count > 1),
        ):
            moved = running + self.momentum * (new - running)
            running.copy_(torch.where(is_known, moved, running))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdaFaceMargin:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A running mean in half precision stops moving: one per cent of a change rounds to nothing.
        for name in ("running_mean", "running_std"):
            setattr(self, name, as_working(getattr(self, name)))
        return self

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        return f"{self.margin}, concentration={self.concentration}, momentum={self.momentum}"


@register_margin("magface")
@dataclass(frozen=True, eq=False, kw_only=True)
class MagFaceMargin(StatelessMargin):
    r"""MagFace: angular margin and penalty depend on the embedding norm (CVPR 2021).

    With the norm :math:`a` clamped to ``[lower_norm, upper_norm]``,

    .. math::

        m(a) = l_m + (u_m - l_m) \frac{a - l_a}{u_a - l_a}, \qquad
        \theta_y = s \cos(\text{angle} + m(a)), \qquad
        \text{penalty} = \lambda_g \left( \frac{a}{u_a^2} + \frac{1}{a} \right)

    The penalty is added to the row's loss. Gradients flow into the norms. Past ``pi - m(a)`` the
    logit is continued as in ``AngularMargin``; the authors' code instead drops the margin, with a
    jump, wherever the cosine is not positive.

    Args:
        lower_norm: ``l_a``, positive.
        upper_norm: ``u_a``, larger than ``lower_norm``.
        lower_margin: ``l_m`` in radians, in [0, pi).
        upper_margin: ``u_m`` in radians, in [lower_margin, pi).
        penalty_weight: ``lambda_g``, not negative.

    Examples:
        >>> margin = MagFaceMargin()
        >>> term = margin(torch.tensor([1.0, 1.0]), 1.0, norms=torch.tensor([10.0, 110.0]))
        >>> term.logits, term.penalty
        (tensor([0.9004, 0.6967]), tensor([3.5289, 0.6364]))
    """

    main_number: ClassVar[str] = "lower_margin"
    lower_norm: float = 10.0
    upper_norm: float = 110.0
    lower_margin: float = 0.45
    upper_margin: float = 0.8
    penalty_weight: float = 35.0

    def __post_init__(self) -> None:
        for field in fields(self):
            high = math.pi if field.name.endswith("margin") else math.inf
            value = getattr(self, field.name)
            number = check_number(value, f"{field.name} of MagFace", low=0.0, high=high)
            object.__setattr__(self, field.name, number)
        if not 0.0 < self.lower_norm < self.upper_norm:
            raise ConfigError(
                f"norms of MagFace are {self.lower_norm:g} and {self.upper_norm:g}: "
                f"choose a positive lower_norm and a larger upper_norm"
            )
        if self.lower_margin > self.upper_margin:
            raise ConfigError(
                f"margins of MagFace are {self.lower_margin:g} and {self.upper_margin:g}: "
                f"choose an upper_margin not below lower_margin"
            )

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        lengths = _lengths(norms, cosines, "MagFaceMargin").to(cosines.dtype)
        lengths = lengths.clamp(self.lower_norm, self.upper_norm)
        slope = (self.upper_margin - self.lower_margin) / (self.upper_norm - self.lower_norm)
        margin = self.lower_margin + slope * (lengths - self.lower_norm)
        penalty = self.penalty_weight * (lengths / self.upper_norm**2 + 1.0 / lengths)
        return geometric_term(widened_cosines(cosines, margin), scale)._replace(penalty=penalty)


def _lengths(norms: Tensor | None, cosines: Tensor, name: str) -> Tensor:
    """Norms in float32 or better, NaN where they are not finite."""
    if norms is None:
        raise ConfigError(
            f"{name} follows the lengths of embeddings and got none: "
            f"call loss_fn(cosines, labels, norms=embeddings.norm(dim=1))"
        )
    check_norms(norms, cosines)
    return as_working(norms).where(norms.isfinite(), math.nan)


@register_margin("elastic")
class ElasticMargin(StatefulMargin):
    """ElasticFace: a margin sampled from a Gaussian for every row (CVPR workshops 2022).

    In training mode each row gets ``margin + std * noise``, in evaluation mode the mean. An angular
    draw is kept in [0, pi). With ``plus=True`` (ElasticFace+) the draws of a batch are assigned by
    cosine: the larger the cosine, the smaller the margin. That is the paper's rule; the authors'
    code indexes with the sorting permutation where its inverse is meant.

    Args:
        margin: Mean; by default 0.5 radians for ``"arc"`` and 0.35 for ``"cos"``.
        std: Deviation of the draws, not negative; by default the published 0.05, and for
            ElasticFace+ 0.0175 (``"arc"``) or 0.02 (``"cos"``).
        variant: ``"arc"`` for an angular margin, ``"cos"`` for a cosine margin.
        plus: Assign the draws by cosine.
        seed: Seed of a generator for this margin only. Its position is part of ``state_dict()`` and
            is restored on the same kind of device; on a different kind the draws start again.
            ``torch.compile`` cannot trace such a generator: use ``torch.manual_seed`` there.

    Examples:
        >>> ElasticMargin(variant="cos").eval()(torch.tensor([0.5]), 64.0).logits
        tensor([9.6000])
    """

    def __init__(
        self,
        margin: float | None = None,
        std: float | None = None,
        *,
        variant: Literal["arc", "cos"] = "arc",
        plus: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if variant not in ("arc", "cos"):
            raise ConfigError(f"variant of ElasticFace is {variant!r}: choose 'arc' or 'cos'")
        low, high = (0.0, math.pi) if variant == "arc" else (-math.inf, math.inf)
        mean = {"arc": 0.5, "cos": 0.35}[variant] if margin is None else margin
        self.margin = check_number(mean, "margin of ElasticFace", low=low, high=high)
        if std is None:
            std = {"arc": 0.0175, "cos": 0.02}[variant] if plus else 0.05
        self.std = check_number(std, "std of ElasticFace", low=0.0)
        self.variant, self.plus, self.seed = variant, plus, seed
        self._generator: torch.Generator | None = None
        self._position: dict[str, Any] = {}  # loaded; used by the first draw

    def _term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        margin = self._draw(cosines.detach()) if self.training else self.margin
        if self.variant == "cos":
            return geometric_term(cosines - margin, scale)
        if isinstance(margin, Tensor):
            margin = margin.clamp(0.0, math.pi * (1.0 - torch.finfo(margin.dtype).eps))
        return geometric_term(widened_cosines(cosines, margin), scale)

    def _draw(self, cosines: Tensor) -> Tensor:
        generator, device = self._own_generator(cosines.device), cosines.device
        noise = torch.randn(cosines.shape, dtype=cosines.dtype, device=device, generator=generator)
        margin = self.margin + self.std * noise
        if not self.plus or cosines.ndim == 0:
            return margin
        order = cosines.argsort(descending=True)
        return torch.empty_like(margin).scatter(0, order, margin.sort().values)

    def _own_generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self.seed)
            position, self._position = self._position, {}
            if position and torch.device(position["device"]).type == device.type:
                self._generator.set_state(position["generator"].cpu())
        return self._generator

    def get_extra_state(self) -> dict[str, Any]:
        """Position of the margin's generator, so that a resumed run continues its draws."""
        if self._generator is None:
            return self._position
        device = str(self._generator.device)
        return {"device": device, "generator": self._generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the position of ``get_extra_state``."""
        self._generator, self._position = None, state

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        settings = f"{self.margin}, std={self.std}, variant={self.variant!r}, plus={self.plus}"
        return settings if self.seed is None else f"{settings}, seed={self.seed}"


class ClosedForm(NamedTuple):
    """Numbers of a margin that a kernel can apply.

    ``theta_y = s (cos(arccos c + angle) - cosine)``, continued past ``pi - angle`` as in
    ``AngularMargin``, and ``log q_y = -s prior``.
    """

    prior: float = 0.0
    cosine: float = 0.0
    angle: float = 0.0
    is_straight: bool = False  # the gradient of the angle is left out

    def term(self, cosines: Tensor, scale: float) -> TargetTerm:
        """Target term of cosines ``[B]``, differentiable."""
        moved = cosines
        if self.angle != 0.0:
            gradient: Any = "straight_through" if self.is_straight else "exact"
            moved = AngularMargin(self.angle, gradient).term(cosines, 1.0, None, None).logits
        logits = scale * (moved - self.cosine)
        return TargetTerm(logits, torch.full_like(logits, 0.0 - scale * self.prior))

    def slope(self, cosines: Tensor, scale: float) -> Tensor:
        """Derivative of the term's logits."""
        is_finite = cosines.isfinite()
        slope = torch.ones_like(cosines)
        if self.angle != 0.0 and not self.is_straight:
            inside = cosines.clamp(-1.0, 1.0)
            sines = ((1.0 - inside) * (1.0 + inside)).sqrt().clamp_min(SMALLEST_SINE)
            turned = math.cos(self.angle) + math.sin(self.angle) * inside / sines
            slope = torch.where(inside > -math.cos(self.angle), turned, slope)
            slope = torch.where(cosines.abs() > 1.0, 0.0, slope)
        return torch.where(is_finite, scale * slope, 0.0)


def closed_form(margin: Margin) -> ClosedForm | None:
    """Closed form of a margin; None with tensors or state, and for user-defined margins."""
    kind = type(margin)  # exactly: a subclass may have another term
    if kind is SumMargin:
        assert isinstance(margin, SumMargin)
        prior, geometric = closed_form(margin.prior), closed_form(margin.geometric)
        return None if prior is None or geometric is None else geometric._replace(prior=prior.prior)
    if kind not in (PriorMargin, CosineMargin, AngularMargin):
        return None
    assert isinstance(margin, PriorMargin | CosineMargin | AngularMargin)
    number = margin.margin
    if not isinstance(number, float):
        return None
    if isinstance(margin, AngularMargin):
        return ClosedForm(angle=number, is_straight=margin.gradient == "straight_through")
    return (
        ClosedForm(prior=number) if isinstance(margin, PriorMargin) else ClosedForm(cosine=number)
    )


def check_margin(margin: Margin, num_classes: int | None = None) -> None:
    """Raise unless it is a margin, with one value for each class in ``PerClass`` settings."""
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


def warn_if_unreachable(margin: Margin, *, alpha: float, scale: float) -> None:
    """Warn, at the line that called this package, if no pair of cosines has the gap (M12)."""
    gap = margin.effective(alpha, scale)
    if gap is None or gap <= LARGEST_GAP:
        return
    room, name = LARGEST_GAP, "margin"
    if isinstance(margin, SumMargin):
        room -= margin.geometric.effective(alpha, scale) or 0.0
        margin = margin.prior if room > 0.0 else margin.geometric
        name = type(margin).__name__
    remedy = f"lower the {name} below {LARGEST_GAP:g}"
    if isinstance(margin, PriorMargin):
        largest = PriorMargin.from_effective(room, alpha=alpha, scale=scale).margin
        remedy = f"lower the {name} below {largest:.3g}, or choose it by PriorMargin.from_effective"
    warn_of_margin(
        f"the effective margin is {gap:.3g} at alpha={alpha:g}, scale={scale:g}, but cosines "
        f"differ by at most {LARGEST_GAP:g}: {remedy}"
    )


def warn_of_margin(text: str) -> None:
    """Give a ``MarginWarning`` at the line that called this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("qmargin."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, MarginWarning, stacklevel=level)
