"""The loss of a recipe: four numbers and names, from which a ``MarginLoss`` is built."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

from qmargin.errors import ConfigError, MarginWarning
from qmargin.losses import presets
from qmargin.losses.module import MarginLoss
from qmargin.maths.adaptive import AdaFaceMargin, ElasticMargin, MagFaceMargin
from qmargin.maths.divergences import Alpha
from qmargin.maths.margins import (
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    Margin,
    PriorMargin,
)
from qmargin.training.fields import Option, check_fields, check_known, check_options, hints_of

PRESETS = (
    "q_margin",
    "q_margin_face",
    "q_margin_speaker",
    "q_margin_speaker_strict",
    "cosface",
    "cosface_speaker",
    "arcface",
    "arcface_speaker",
    "entmax_face",
    "entmax_speaker",
    "sparsemax_face",
    "sphereface",
    "adaface",
    "magface",
    "elasticface",
)
MARGINS: dict[str, tuple[type[Any], str]] = {  # the class, and the name of its main number
    "prior": (PriorMargin, "margin"),
    "cosine": (CosineMargin, "margin"),
    "angular": (AngularMargin, "margin"),
    "multiplied": (CombinedMargin, "multiplier"),
    "adaface": (AdaFaceMargin, "margin"),
    "magface": (MagFaceMargin, "lower_margin"),
    "elastic": (ElasticMargin, "margin"),
}
MarginKind = Literal["prior", "cosine", "angular", "multiplied", "adaface", "magface", "elastic"]


class LossSettings(NamedTuple):
    """The numbers of a loss that schedules may change."""

    alpha: float
    margin: float
    scale: float


@dataclass(frozen=True)
class LossPart:
    """A divergence, a margin and a scale, all of them written out.

    A published loss is ``LossPart.from_preset(name)``; files and ``--set`` take ``loss.preset``
    for it. What is kept are its numbers, so that a record stays true when a preset changes.

    Args:
        alpha: Order of the divergence.
        margin_kind: ``"prior"`` (Q-Margin), ``"cosine"``, ``"angular"``, ``"multiplied"``
            (SphereFace), ``"adaface"``, ``"magface"`` or ``"elastic"``.
        margin: The margin's main number, in its own unit: the lower margin of MagFace, the
            multiplier of ``"multiplied"``.
        scale: ``s``, positive.
        options: Further settings of the margin, such as ``gradient`` of an angular one.

    Examples:
        >>> LossPart.from_preset("q_margin", margin=0.25)
        LossPart(alpha=1.25, margin_kind='prior', margin=0.25, scale=32.0, options={})
        >>> LossPart.from_preset("cosface").build()
        MarginLoss(Alpha(alpha=1.0), CosineMargin(margin=0.5), scale=64, effective_margin=0.5)
    """

    alpha: float
    margin_kind: MarginKind
    margin: float
    scale: float
    options: dict[str, Option] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        kind, main = MARGINS[self.margin_kind]
        if main in self.options:
            raise ConfigError(f"options has {main!r}, which is loss.margin; set it there")
        what = f"an option of the {self.margin_kind} margin"
        check_options(self.options, kind, what, given=(main,))
        with warnings.catch_warnings():  # a margin out of reach is said when a run builds the loss
            warnings.simplefilter("ignore", MarginWarning)
            self.build()

    @classmethod
    def from_preset(cls, preset: str, **changes: Any) -> LossPart:
        """The numbers of a published loss, some of them changed."""
        check_known(preset, PRESETS, "preset")
        if "margin_kind" in changes:
            raise ConfigError(
                f"preset is {preset!r} and margin_kind {changes['margin_kind']!r} is given as "
                "well; a preset has a margin of its own, leave one of them out"
            )
        for name in changes:
            check_known(name, hints_of(cls), "a setting of the loss")
        loss: MarginLoss = getattr(presets, preset)()
        kind = next(kind for kind, (made, _) in MARGINS.items() if type(loss.margin) is made)
        number = getattr(loss.margin, MARGINS[kind][1])
        # presets are written with alpha in decimals, and alpha_value went through alpha - 1
        alpha = getattr(loss.divergence, "alpha", loss.alpha_value)
        values = {"alpha": alpha, "margin": number, "scale": loss.scale, **changes}
        return cls(margin_kind=kind, **values)  # type: ignore[arg-type]

    @property
    def settings(self) -> LossSettings:
        """The numbers, where no schedule changes them."""
        return LossSettings(self.alpha, self.margin, self.scale)

    @property
    def has_state(self) -> bool:
        """Whether the margin keeps statistics or draws, which a new object would lose."""
        return issubclass(MARGINS[self.margin_kind][0], nn.Module)

    def build_margin(self, margin: float | None = None, *, seed: int | None = None) -> Margin:
        """The margin, with another main number if one is given.

        Args:
            margin: Instead of the part's own.
            seed: Of the draws of an elastic margin, unless ``options`` has one.
        """
        kind, main = MARGINS[self.margin_kind]
        options: dict[str, Any] = {main: self.margin if margin is None else margin, **self.options}
        if self.margin_kind == "elastic":
            options.setdefault("seed", seed)
        built: Margin = kind(**options)
        return built

    def build(self, settings: LossSettings | None = None, *, seed: int | None = None) -> MarginLoss:
        """The loss, with other numbers if they are given."""
        alpha, margin, scale = self.settings if settings is None else settings
        return MarginLoss(Alpha(alpha), self.build_margin(margin, seed=seed), scale=scale)
