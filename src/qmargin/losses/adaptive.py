"""Published margins that differ from sample to sample: AdaFace, MagFace, ElasticFace.

They are geometric margins (M9 with a margin of their own for every row) and can be added to a
``PriorMargin``. AdaFace and MagFace read the lengths of the embeddings:
``loss_fn(cosines, labels, norms=embeddings.norm(dim=1))``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from qmargin.errors import ConfigError, ShapeError
from qmargin.losses.checks import check_number, describe
from qmargin.losses.margins import (
    StatefulMargin,
    StatelessMargin,
    TargetTerm,
    as_working,
    geometric_term,
    keep_non_finite,
    widened_cosines,
)
from qmargin.registry import register_margin


@register_margin("adaface")
class AdaFaceMargin(StatefulMargin):
    r"""AdaFace: the norm of an embedding, taken as image quality, turns the margin (CVPR 2022).

    With the norm's score :math:`z`, clipped to [-1, 1], relative to running statistics of norms,

    .. math::

        z = h (\lVert x \rVert - \mu) / (\sigma + \varepsilon), \qquad
        \theta_y = s [\cos(\operatorname{clip}(\text{angle} - m z)) - (m + m z)]

    so that it is ArcFace at ``z = -1``, CosFace at ``z = 0`` and a negative angular margin at
    ``z = 1``. As published, norms are clipped to [0.001, 100] and detached, the cosine is kept
    ``eps = 0.001`` inside (-1, 1), and the angle ``eps`` inside (0, pi): outside, the gradient is
    zero. The statistics start at 20 and 100 and move before they are used, in training mode only.
    Non-finite norms and rows with a negative label do not move them; a batch with fewer than two
    usable rows leaves the deviation alone. Each process has its own.

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

    def forward(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Return the AdaFace logits and a zero log reference, each ``[B]``."""
        cosines = as_working(target_cosines)
        lengths = _checked_norms(norms, cosines, "AdaFaceMargin").detach()
        lengths = lengths.clamp(*self.norm_limits)
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
    r"""MagFace: an angular margin and a penalty that follow the norm of an embedding (CVPR 2021).

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
        checked = {
            name: check_number(getattr(self, name), f"{name} of MagFace", low=0.0, high=high)
            for name, high in (
                ("lower_norm", math.inf),
                ("upper_norm", math.inf),
                ("lower_margin", math.pi),
                ("upper_margin", math.pi),
                ("penalty_weight", math.inf),
            )
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
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
        """See ``StatelessMargin.term``."""
        lengths = _checked_norms(norms, cosines, "MagFaceMargin").to(cosines.dtype)
        lengths = lengths.clamp(self.lower_norm, self.upper_norm)
        slope = (self.upper_margin - self.lower_margin) / (self.upper_norm - self.lower_norm)
        margin = self.lower_margin + slope * (lengths - self.lower_norm)
        penalty = self.penalty_weight * (lengths / self.upper_norm**2 + 1.0 / lengths)
        return geometric_term(widened_cosines(cosines, margin), scale)._replace(penalty=penalty)


@register_margin("elastic")
class ElasticMargin(StatefulMargin):
    """ElasticFace: a margin drawn anew for every row from a Gaussian (CVPR workshops 2022).

    In training mode each row gets ``margin + std * noise``, in evaluation mode the mean. An angular
    draw is kept in [0, pi). With ``plus=True`` (ElasticFace+) the draws of a batch are handed out
    by cosine: the larger the cosine, the smaller the margin, so that samples far from their class
    are pushed hardest. That is the paper's rule; the authors' code indexes with the sorting
    permutation where its inverse is meant, and so hands them out in another order.

    Args:
        margin: Mean; by default 0.5 radians for ``"arc"`` and 0.35 for ``"cos"``.
        std: Deviation of the draws, not negative; by default the published 0.05, and for
            ElasticFace+ 0.0175 (``"arc"``) or 0.02 (``"cos"``).
        variant: ``"arc"`` for an angular margin, ``"cos"`` for a cosine margin.
        plus: Hand the draws out by cosine.
        seed: Draw from a generator of this margin's own, seeded so; its position is part of
            ``state_dict()`` and is taken up again on the same kind of device; on another kind the
            draws start anew from the seed. ``torch.compile`` cannot trace such a generator: leave
            the seed out there and use ``torch.manual_seed``.

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
        self.variant = variant
        self.plus = plus
        self.seed = seed
        self._generator: torch.Generator | None = None
        self._position: dict[str, Any] = {}  # loaded, and taken up by the first draw

    def forward(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Return the logits under the drawn (or mean) margins and zeros, each ``[B]``."""
        cosines = as_working(target_cosines)
        margin = self._draw(cosines.detach()) if self.training else self.margin
        if self.variant == "cos":
            return geometric_term(cosines - margin, scale)
        if isinstance(margin, Tensor):
            largest = math.pi * (1.0 - torch.finfo(margin.dtype).eps)
            margin = margin.clamp(0.0, largest)
        return geometric_term(widened_cosines(cosines, margin), scale)

    def _draw(self, cosines: Tensor) -> Tensor:
        noise = torch.randn(
            cosines.shape,
            dtype=cosines.dtype,
            device=cosines.device,
            generator=self._own_generator(cosines.device),
        )
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
        """Position of the margin's own generator, so that a resumed run draws on."""
        if self._generator is None:
            return self._position
        device = str(self._generator.device)
        return {"device": device, "generator": self._generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take up the position that ``get_extra_state`` gave."""
        self._generator, self._position = None, state

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        settings = f"{self.margin}, std={self.std}, variant={self.variant!r}, plus={self.plus}"
        return settings if self.seed is None else f"{settings}, seed={self.seed}"


def _checked_norms(norms: Tensor | None, cosines: Tensor, name: str) -> Tensor:
    """Norms in float32 or better, NaN where they are not finite."""
    if norms is None:
        raise ConfigError(
            f"{name} follows the lengths of embeddings and got none: "
            f"call loss_fn(cosines, labels, norms=embeddings.norm(dim=1))"
        )
    is_fit = isinstance(norms, Tensor) and norms.is_floating_point()
    if not is_fit or norms.shape != cosines.shape or norms.device != cosines.device:
        raise ShapeError(
            f"norms for {name} must be floating-point of shape {list(cosines.shape)} on "
            f"{cosines.device.type}, got {describe(norms)}: "
            f"call loss_fn(cosines, labels, norms=embeddings.norm(dim=1))"
        )
    return as_working(norms).where(norms.isfinite(), math.nan)
