r"""Reference measures: prior weights of the classes (M14).

A margin lowers the reference measure of the target. A reference gives every class one, and log
references add: ``reference=ClassPrior(counts) + Quality(0.33)``. No gradient flows through a
reference, so the gradient of a logit stays ``p - y``.

A ``Reference`` of your own overrides what it needs: ``per_class``, a number for every class;
``per_pair`` with ``pair_bounds``, a number for every class given the target's, from the cosine of
the two prototypes; ``margin_factor``, the factor of a row's effective margin. All paths of the head
support it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.losses.checks import check_norms, check_number, describe
from qmargin.losses.margins import (
    LARGEST_GAP,
    Margin,
    ModuleSumMargin,
    PriorMargin,
    SumMargin,
    TargetTerm,
    closed_form,
    warn_of_margin,
)
from qmargin.registry import register_reference


class Reference(nn.Module):
    """Log reference measure of the classes, in addition to that of the margin.

    Schedules change the number ``strength``, or the attribute that ``main_number`` names, between
    steps. Do not cache values that depend on it.
    """

    main_number: ClassVar[str] = "strength"
    changes_in_training: ClassVar[bool] = False
    """Whether a training step changes the state; a repeated step restores it first."""

    def per_class(self) -> Tensor | None:
        """``log q_j`` of every class, ``[k]`` float64; None if it is zero for all of them."""
        return None

    def class_bounds(self) -> tuple[float, float]:
        """The smallest and the largest number of ``per_class``; zeros without one."""
        values = self.per_class()
        return (0.0, 0.0) if values is None else (float(values.amin()), float(values.amax()))

    def per_pair(self, cosines: Tensor, scale: float) -> Tensor:
        """``log q_j`` given the target, from cosines ``<w_y, w_j>`` of prototypes, elementwise.

        The target's own is zero, whatever this returns.
        """
        return torch.zeros_like(cosines)

    def pair_bounds(self, scale: float) -> tuple[float, float] | None:
        """Bounds of ``per_pair``; None if it is zero everywhere."""
        return None

    def margin_factor(self, labels: Tensor, norms: Tensor | None) -> Tensor | None:
        """Factors of the effective margins, ``[B]`` float64; None if all are one.

        ``labels`` ``[B]`` are negative in rows that the caller discards; ``norms`` ``[B]`` are the
        lengths of the embeddings.
        """
        return None

    @property
    def scales_margins(self) -> bool:
        """Whether there is a ``margin_factor``."""
        return type(self).margin_factor is not Reference.margin_factor

    @property
    def has_classes(self) -> bool:
        """Whether ``per_class`` is not zero for all classes."""
        return type(self).per_class is not Reference.per_class

    def is_one(self, scale: float) -> bool:
        """Whether it changes nothing, as with a strength of zero; it is then left out."""
        has_pairs = self.pair_bounds(scale) is not None
        return not (self.scales_margins or self.has_classes or has_pairs)

    def check_classes(self, num_classes: int) -> None:
        """Raise unless it fits this number of classes."""
        values = self.per_class()
        if values is not None and values.shape != (num_classes,):
            raise ShapeError(
                f"{type(self).__name__} gives log references of shape {list(values.shape)} and "
                f"there are {num_classes} classes; give one per class"
            )

    def __add__(self, other: Reference) -> SumReference:
        if not isinstance(other, Reference):
            return NotImplemented
        return SumReference((self, other))


class SumReference(Reference):
    """Several references at once: log references add, factors of margins multiply.

    Args:
        parts: The references; a sum among them counts as its own parts.
    """

    def __init__(self, parts: Iterable[Reference]) -> None:
        super().__init__()
        flat: list[Reference] = []
        for part in parts:
            flat += part.parts if isinstance(part, SumReference) else [part]
        self.parts: Any = nn.ModuleList(flat)

    @property
    def changes_in_training(self) -> bool:  # type: ignore[override]
        """Whether any part changes."""
        return any(part.changes_in_training for part in self.parts)

    @property
    def scales_margins(self) -> bool:
        """Whether any part has a ``margin_factor``."""
        return any(part.scales_margins for part in self.parts)

    @property
    def has_classes(self) -> bool:
        """Whether any part has values per class."""
        return any(part.has_classes for part in self.parts)

    def per_class(self) -> Tensor | None:
        """Sum over the parts."""
        found = [values for part in self.parts if (values := part.per_class()) is not None]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None

    def class_bounds(self) -> tuple[float, float]:
        """Sums of the parts' bounds."""
        low, high = zip(*(part.class_bounds() for part in self.parts), strict=True)
        return sum(low), sum(high)

    def per_pair(self, cosines: Tensor, scale: float) -> Tensor:
        """Sum over the parts."""
        total = torch.zeros_like(cosines)
        for part in self.parts:
            if part.pair_bounds(scale) is not None:
                total = total + part.per_pair(cosines, scale)
        return total

    def pair_bounds(self, scale: float) -> tuple[float, float] | None:
        """Sums of the parts' bounds."""
        found = [bounds for part in self.parts if (bounds := part.pair_bounds(scale)) is not None]
        return (sum(low for low, _ in found), sum(high for _, high in found)) if found else None

    def margin_factor(self, labels: Tensor, norms: Tensor | None) -> Tensor | None:
        """Product over the parts."""
        total = None
        for part in self.parts:
            factor = part.margin_factor(labels, norms) if part.scales_margins else None
            if factor is not None:
                total = factor if total is None else total * factor
        return total

    def check_classes(self, num_classes: int) -> None:
        """Check every part."""
        for part in self.parts:
            part.check_classes(num_classes)


MOST_COUNTS = 2**53  # whole numbers from there on are not all numbers of float64


@register_reference("class_prior")
class ClassPrior(Reference):
    r"""Prior of the class frequencies: ``log q_j = strength * log(n_j / mean n)`` (M14).

    At ``alpha = 1`` this is logit adjustment. It applies to the target as to every other class: a
    rare class has to lead by more. Counts are divided by their mean, because a constant in all log
    references acts like the scale (M15). Besides, the effective margin may follow the count,

    .. math:: m_y = m_0 (\bar n / n_y)^{\text{margin\_power}}

    up to the gap that cosines can have.

    Args:
        counts: ``n_j``, training samples of each class ``[k]``, all positive.
        strength: ``rho``, any finite number; zero leaves the measures at one.
        margin_power: Exponent of the effective margin, 0.25 in label-distribution-aware margins.

    Examples:
        >>> ClassPrior([1, 2, 6], strength=0.5).per_class()
        tensor([-0.5493, -0.2027,  0.3466], dtype=torch.float64)
    """

    counts: Tensor

    def __init__(
        self,
        counts: Tensor | Sequence[int],
        strength: float = 1.0,
        *,
        margin_power: float = 0.0,
    ) -> None:
        super().__init__()
        self.strength = check_number(strength, "strength of ClassPrior")
        self.margin_power = check_number(margin_power, "margin_power of ClassPrior")
        try:
            given = torch.as_tensor(counts)
        except (TypeError, ValueError, RuntimeError):
            raise ShapeError(
                f"counts of ClassPrior are {reprlib.repr(counts)}; give one number per class "
                "[num_classes]"
            ) from None
        is_odd = given.is_complex() or given.dtype == torch.bool or given.layout != torch.strided
        if given.ndim != 1 or not len(given) or is_odd:
            raise ShapeError(
                f"counts of ClassPrior are {describe(given)}; give one number per class "
                "[num_classes]"
            )
        _check_counts(given)
        # A copy, so that no other code changes it. Integers, so that casts of the module do not.
        self.register_buffer("counts", given.detach().to(torch.int64, copy=True))
        self._known: tuple[Tensor, int | None] | None = None
        self._range = (1.0, 1.0, 1.0)
        self._measures: tuple[float, Tensor] | None = None  # at a strength

    def extremes(self) -> tuple[float, float, float]:
        """Smallest, mean and largest count, read again whenever the counts have changed."""
        known = self._known
        version = version_of(self.counts)
        if known is None or known[0] is not self.counts or known[1] != version:
            _check_counts(self.counts)
            wide = self.counts.double()
            self._range = (float(wide.amin()), float(wide.mean()), float(wide.amax()))
            self._known, self._measures = (self.counts, version), None
        return self._range

    @property
    def has_classes(self) -> bool:
        """Whether there is a strength, and not all counts are the same."""
        return self.class_bounds() != (0.0, 0.0)

    def per_class(self) -> Tensor | None:
        """``strength * log(n_j / mean n)``; None where that is zero for all classes."""
        if not self.has_classes:
            return None
        mean, known = self.extremes()[1], self._measures
        if known is None or known[0] != self.strength:
            with torch.inference_mode(False):  # it may be kept for training
                measures = self.counts.double().div_(mean).log_().mul_(self.strength)
            known = self._measures = self.strength, measures
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        """Without what follows from the counts."""
        return {**self.__dict__, "_known": None, "_measures": None}

    def class_bounds(self) -> tuple[float, float]:
        """From the smallest and the largest count."""
        low, mean, high = self.extremes()
        first, last = sorted(self.strength * math.log(number / mean) for number in (low, high))
        # Logarithms on a device may round otherwise by a few units.
        return first - 1e-12 * abs(first), last + 1e-12 * abs(last)

    def margin_factor(self, labels: Tensor, norms: Tensor | None) -> Tensor | None:
        """``(mean n / n_y) ** margin_power``."""
        logs = lookup((self.extremes()[1] / self.counts.double()).log(), labels)
        return (self.margin_power * logs).exp()

    @property
    def scales_margins(self) -> bool:
        """Whether there is a power."""
        return self.margin_power != 0.0

    def check_classes(self, num_classes: int) -> None:
        """Raise unless there is a count for every class."""
        if len(self.counts) != num_classes:
            raise ShapeError(
                f"ClassPrior has {len(self.counts)} counts and there are {num_classes} classes; "
                "give the number of training samples of each class"
            )

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        text = f"{len(self.counts)} classes, strength={self.strength:g}"
        return text + (f", margin_power={self.margin_power:g}" if self.margin_power else "")


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None for one of an inference, which keeps no count."""
    return None if tensor.is_inference() else tensor._version


def _check_counts(counts: Tensor) -> None:
    if counts.is_floating_point():
        is_bad = ~((counts > 0) & (counts.double() < MOST_COUNTS) & (counts == counts.floor()))
    else:  # narrow integers cannot be compared with the limit, unsigned ones with nothing
        wide = counts.long()
        is_bad = (wide <= 0) | (wide >= MOST_COUNTS)
    if bool(is_bad.any()):
        place = int(is_bad.nonzero()[0])
        raise DataError(
            f"class {place} has the count {counts[place].item():g}; every class needs a positive "
            "whole number of training samples: remove classes without samples, or count them as 1"
        )


@register_reference("look_alike")
class LookAlike(Reference):
    r"""Prior of similarity: classes whose prototypes resemble the target's weigh more (M14).

    .. math:: \log q_{j \mid y} = s\,[\kappa (c - t)_+ - \delta (c - u)_+],
        \qquad c = \langle w_y, w_j \rangle

    with unit prototypes, and zero for the target itself. A positive ``strength`` makes look-alikes
    count as if their cosine with the row were larger. ``damping`` lowers the weight of nearly
    identical classes: they may be one identity under two labels.

    Args:
        strength: ``kappa``, not negative.
        threshold: ``t``, a cosine in [-1, 1).
        damping: ``delta``, not negative.
        split_threshold: ``u``, a cosine in [-1, 1).

    Examples:
        >>> LookAlike(0.5, 0.25).per_pair(torch.tensor([0.0, 0.75, 1.0]), 32.0)
        tensor([ 0.,  8., 12.])
    """

    def __init__(
        self,
        strength: float = 0.1,
        threshold: float = 0.1,
        *,
        damping: float = 0.0,
        split_threshold: float = 0.7,
    ) -> None:
        super().__init__()
        self.strength = check_number(strength, "strength of LookAlike", low=0.0)
        self.threshold = check_number(threshold, "threshold of LookAlike", low=-1.0, high=1.0)
        self.damping = check_number(damping, "damping of LookAlike", low=0.0)
        self.split_threshold = check_number(
            split_threshold, "split_threshold of LookAlike", low=-1.0, high=1.0
        )

    def per_pair(self, cosines: Tensor, scale: float) -> Tensor:
        """The formula; cosines above one by rounding count as one."""
        inside = cosines.clamp_max(1.0)
        value = (inside - self.threshold).clamp_min(0.0) * (scale * self.strength)
        if self.damping:
            value -= (inside - self.split_threshold).clamp_min(0.0) * (scale * self.damping)
        return value

    def pair_bounds(self, scale: float) -> tuple[float, float] | None:
        """Bounds of a function that is linear between -1, the thresholds and 1."""
        if self.strength == 0.0 and self.damping == 0.0:
            return None
        values = [
            scale * self.strength * max(cosine - self.threshold, 0.0)
            - scale * self.damping * max(cosine - self.split_threshold, 0.0)
            for cosine in (-1.0, self.threshold, self.split_threshold, 1.0)
        ]
        room = 1e-6 * scale * (self.strength + self.damping)  # of float32 cosines
        low = min(*values, 0.0) - room if self.damping else 0.0
        return low, max(*values, 0.0) + room

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        text = f"strength={self.strength:g}, threshold={self.threshold:g}"
        if self.damping:
            text += f", damping={self.damping:g}, split_threshold={self.split_threshold:g}"
        return text


@register_reference("quality")
class Quality(Reference):
    r"""The effective margin follows the norm of the embedding, taken as its quality (M17).

    .. math::

        m_i = m_0 (1 + z_i), \qquad
        z_i = \operatorname{clip}(h\, (\lVert x_i \rVert - \mu) / \sigma,\, -1,\, 1)

    and never above the gap that cosines can have, unless ``m_0`` is. Mean and deviation are running
    statistics: of all batches so far and, after ``1 / momentum`` batches, an average with
    ``momentum``. They are updated before use, in training mode only, from rows with finite norms
    and labels that are not negative. Every process has its own.

    Args:
        strength: ``h``, any finite number.
        momentum: Smallest share of a new batch in the running statistics, in (0, 1].

    Examples:
        >>> quality = Quality(0.5)
        >>> quality.margin_factor(torch.tensor([0, 1, 2]), torch.tensor([10.0, 20.0, 30.0]))
        tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64)
    """

    changes_in_training: ClassVar[bool] = True
    running_mean: Tensor
    running_std: Tensor
    num_batches: Tensor

    def __init__(self, strength: float = 0.33, *, momentum: float = 0.01) -> None:
        super().__init__()
        self.strength = check_number(strength, "strength of Quality")
        self.momentum = check_number(momentum, "momentum of Quality", low=0.0)
        if not 0.0 < self.momentum <= 1.0:
            raise ConfigError(f"momentum of Quality is {momentum:g}: choose a value in (0, 1]")
        self.register_buffer("running_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("running_std", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    @property
    def scales_margins(self) -> bool:
        """Whether the strength is not zero; otherwise no statistics are kept."""
        return self.strength != 0.0

    def margin_factor(self, labels: Tensor, norms: Tensor | None) -> Tensor | None:
        """``1 + z``, NaN where a norm is not finite."""
        if norms is None:
            raise ConfigError(
                "Quality follows the lengths of embeddings and got none: "
                "call loss_fn(cosines, labels, norms=embeddings.norm(dim=1))"
            )
        check_norms(norms, labels)
        lengths = norms.detach().double()
        lengths = lengths.where(lengths.isfinite(), math.nan)
        if self.training:
            self._update_statistics_(lengths, labels)
        spread = self.running_std + 1e-6 * self.running_mean
        spread = spread.where(spread > 0.0, 1.0)
        score = self.strength * (lengths - self.running_mean) / spread
        score = torch.where(self.num_batches > 0, score, 0.0 * lengths)
        return 1.0 + score.clamp(-1.0, 1.0)

    @torch.no_grad()
    def _update_statistics_(self, lengths: Tensor, labels: Tensor) -> None:
        """Move mean and deviation towards those of the usable rows; nothing waits for a device."""
        is_used = lengths.isfinite() & (labels >= 0)
        count = is_used.sum()
        known = lengths.where(is_used, 0.0)
        mean = known.sum() / count
        squares = (lengths - mean).square().where(is_used, 0.0).sum()
        deviation = (squares / (count - 1)).sqrt()
        is_known = count > 1
        share = (1.0 / (self.num_batches + 1)).clamp_min(self.momentum)
        for running, new in ((self.running_mean, mean), (self.running_std, deviation)):
            running.copy_(torch.where(is_known, running + share * (new - running), running))
        self.num_batches += is_known.long()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quality:
        kept = {name: getattr(self, name) for name in ("running_mean", "running_std")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():  # a running mean in half precision stops moving
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        return f"strength={self.strength:g}, momentum={self.momentum:g}"


def lookup(values: Tensor, labels: Tensor) -> Tensor:
    """Values of the labels' classes: zero for a negative label, NaN for one past the end."""
    last = len(values) - 1
    found = values[labels.clamp(0, last)]
    return found.where(labels >= 0, 0.0).where(labels <= last, math.nan)


class ReferencedMargin:
    """A margin with a reference: the target's term of both (M14, M17).

    ``b`` is ``alpha - 1``, None for other divergences.
    """

    def __init__(self, margin: Margin, reference: Reference, b: float | None) -> None:
        self.margin, self.reference, self.b = margin, reference, b

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Apply margin and reference, see ``Margin``."""
        term = self.margin(target_cosines, scale, labels=labels, norms=norms)
        if labels is None:
            raise ConfigError("a reference got no labels; pass labels with the cosines")
        return term._replace(log_reference=self.target(term.log_reference, scale, labels, norms))

    def target(
        self, log_reference: Tensor, scale: float, labels: Tensor, norms: Tensor | None
    ) -> Tensor:
        """The target's log reference from that of the margin, ``[B]``."""
        reference = self.reference
        factor = reference.margin_factor(labels, norms) if reference.scales_margins else None
        if factor is not None:
            assert self.b is not None
            factor = factor.detach().to(log_reference.dtype)
            log_reference = scaled_margin(log_reference, factor, scale, self.b)
        values = reference.per_class() if reference.has_classes else None
        if values is not None:
            found = lookup(on_device_of(values.detach(), log_reference), labels)
            log_reference = log_reference + found.to(log_reference.dtype)
        return log_reference

    def effective(self, alpha: float, scale: float) -> float | None:
        """Effective margin without the reference, see ``Margin``."""
        return self.margin.effective(alpha, scale)


def log_reference_of(
    reference: Reference,
    cosines: Tensor,
    labels: Tensor,
    scale: float,
    prototypes: Tensor | None,
    classes: Tensor | None = None,
) -> Tensor | None:
    """Log reference of every class, broadcastable to the cosines ``[..., k]``; None for zero.

    It has the dtype and the device of the cosines, which are not read.

    ``prototypes`` ``[k, d]`` of any length are read for pairs of classes. ``classes`` ``[k]`` are
    those of the columns where these are a sample.
    """
    num_classes, found = cosines.shape[-1], None
    values = reference.per_class() if reference.has_classes else None
    if values is not None:
        found = on_device_of(values.detach(), cosines).to(cosines.dtype)
        found = found if classes is None else found[classes]
        if found.shape != (num_classes,):
            reference.check_classes(num_classes)
    if reference.pair_bounds(scale) is None:
        return found
    if prototypes is None:
        raise ConfigError(
            "the reference compares prototypes and got none: call "
            "loss_fn(cosines, labels, prototypes=weights), with weights [num_classes, d]"
        )
    if prototypes.ndim != 2 or len(prototypes) != num_classes:
        raise ShapeError(
            f"prototypes are {describe(prototypes)} for cosines with {num_classes} classes; give "
            "one row per class [num_classes, d]"
        )
    unit = on_device_of(prototypes.detach(), cosines).to(cosines.dtype)
    with torch.autocast(cosines.device.type, enabled=False):
        unit = nn.functional.normalize(unit)
        own = unit[labels.clamp(0, num_classes - 1)]
        pairs = reference.per_pair(own @ unit.t(), scale).detach()
    return pairs if found is None else pairs + found


def on_device_of(values: Tensor, like: Tensor) -> Tensor:
    """The values, or an error if they are elsewhere."""
    if values.device != like.device:
        raise ConfigError(
            f"the reference is on {values.device} and the cosines are on {like.device}: move the "
            f"loss with .to({str(like.device)!r})"
        )
    return values


def scaled_margin(log_reference: Tensor, factor: Tensor, scale: float, b: float) -> Tensor:
    """Log reference whose effective margin is ``factor`` times as large, within reach (M17).

    A margin is not raised above ``2 - 1 / (b s)``, where zero loss becomes impossible. A larger
    margin is not raised, and one that is not positive is not changed.
    """
    if b == 0.0:
        effective = -log_reference / scale
        room = LARGEST_GAP
    else:
        effective = torch.expm1(-b * log_reference) / (b * scale)
        room = LARGEST_GAP - 1.0 / (b * scale)
    is_scaled = (effective > 0.0) & effective.isfinite() & (factor != 1.0)
    safe = torch.where(is_scaled, effective, 0.0)  # no NaN may reach a gradient
    scaled = torch.minimum(safe * factor, safe.detach().clamp_min(room))
    found = -scale * scaled if b == 0.0 else -torch.log1p(b * scale * scaled) / b
    found = torch.where(is_scaled, found, log_reference)
    return torch.where(factor.isnan(), factor, found)


def check_reference(reference: Reference | None, margin: Margin, b: float | None) -> None:
    """Raise unless this margin and divergence support the reference."""
    if reference is None:
        return
    if not isinstance(reference, Reference):
        raise ConfigError(
            f"reference is {reference!r}; give a Reference, e.g. ClassPrior(counts), LookAlike(0.1)"
        )
    if not reference.scales_margins:
        return
    kinds = [type(part).__name__ for part in parts_of(reference) if part.scales_margins]
    name = kinds[0]
    if b is None or b < 0.0:
        given = "another divergence" if b is None else f"alpha {b + 1.0:g}"
        raise ConfigError(
            f"{name} multiplies an effective margin, which takes an alpha-divergence of at least "
            f"1, and the loss has {given}"
        )
    is_prior = isinstance(margin, PriorMargin | SumMargin | ModuleSumMargin)
    if not is_prior and type(margin).__module__.startswith("qmargin."):  # others are not known here
        raise ConfigError(
            f"{name} multiplies the effective margin of a PriorMargin, and the margin is a "
            f"{type(margin).__name__}; add a PriorMargin to it"
        )


def pairs_now(reference: Reference, scale: float) -> Callable[[Tensor], Tensor]:
    """``per_pair`` of a reference, with the numbers that it has now.

    A backward pass may compare prototypes once more, after a schedule has changed a strength.
    """
    parts = [copy(part) for part in parts_of(reference) if part.pair_bounds(scale) is not None]
    kept = parts[0] if len(parts) == 1 else SumReference(parts)
    return partial(kept.per_pair, scale=scale)


def only_scales_margins(reference: Reference, scale: float) -> bool:
    """Whether every class but the target has measure one."""
    return not reference.has_classes and reference.pair_bounds(scale) is None


def parts_of(reference: Reference) -> list[Reference]:
    """Parts of a sum, or the reference itself."""
    return list(reference.parts) if isinstance(reference, SumReference) else [reference]


MOST_STEEP = 1e3  # factor of rounding errors: with float32 cosines, 1e-3 of a posterior


def warn_if_steep(reference: Reference, *, b: float, scale: float) -> None:
    """Warn when measures are so large that the rounding of cosines decides (M14).

    A class that holds the mass has the height ``q_j^-b``: an error of its logit counts ``q_j^b``
    times in its posterior.
    """
    pairs = reference.pair_bounds(scale)
    high = reference.class_bounds()[1] + (0.0 if pairs is None else pairs[1])
    if b <= 0.0 or b * high <= math.log(MOST_STEEP):
        return
    share = math.log(MOST_STEEP) / (b * high)
    warn_of_margin(
        f"log reference measures reach {high:.3g} at alpha={b + 1.0:g}, scale={scale:g}, where "
        f"rounding of cosines counts {math.exp(min(b * high, 700.0)):.3g} times in posteriors: "
        f"multiply the strength of the reference by {share:.2g}, or lower alpha"
    )


def warn_if_class_unreachable(
    reference: Reference, margin: Margin, *, b: float, scale: float
) -> None:
    """Warn if the rarest class needs a gap that no pair of cosines has (M12)."""
    form, lowest = closed_form(margin), reference.class_bounds()[0]
    if form is None or lowest >= 0.0:
        return
    room, own = LARGEST_GAP - form.cosine, scale * form.prior
    if room <= 0.0 or 1.0 + b * scale * room <= 0.0:
        return  # the margin's own warning says so; far below alpha = 1 every gap is in reach
    most = scale * room if b == 0.0 else math.log1p(b * scale * room) / b  # of -log q
    if not own < most < own - lowest:
        return
    exponent = b * (own - lowest)
    gap = (own - lowest if b == 0.0 else math.expm1(min(exponent, 700.0)) / b) / scale
    share = (most - own) / -lowest
    named = [part for part in parts_of(reference) if part.class_bounds()[0] < 0.0]
    name, strength = type(named[0]).__name__, getattr(named[0], "strength", None)
    remedy = f"multiply the log references of {name} by {share:.3g}"
    if len(named) == 1 and isinstance(strength, float):
        remedy = f"lower the strength of {name} from {strength:g} to {share * strength:.3g}"
    warn_of_margin(
        f"the class with the smallest reference measure has an effective margin of "
        f"{gap + form.cosine:.3g} at alpha={b + 1.0:g}, scale={scale:g}, but cosines differ by at "
        f"most {LARGEST_GAP:g}: {remedy}"
    )
