"""Published losses with their settings; each returns a ``MarginLoss``.

Defaults are the settings that the authors of the loss or the Q-Margin paper recommend. The
``_face`` and ``_speaker`` presets have the best settings of the paper's tables. ``reduction``,
``ignore_index`` and ``debug`` are passed on to ``MarginLoss``.
"""

from __future__ import annotations

from typing import Literal

from qmargin.losses.divergences import Alpha
from qmargin.losses.margin_loss import MarginLoss, Reduction
from qmargin.losses.margins import (
    AdaFaceMargin,
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    ElasticMargin,
    MagFaceMargin,
    Margin,
    PriorMargin,
)


def _loss(
    alpha: float, margin: Margin, scale: float, reduction: Reduction, ignore_index: int, debug: bool
) -> MarginLoss:
    parts = Alpha(alpha), margin
    return MarginLoss(
        *parts, scale=scale, reduction=reduction, ignore_index=ignore_index, debug=debug
    )


def q_margin(
    *,
    alpha: float = 1.25,
    scale: float = 32.0,
    margin: float = 0.2,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """Q-Margin; the defaults are the starting point that the paper recommends.

    Examples:
        >>> q_margin()
        MarginLoss(Alpha(alpha=1.25), PriorMargin(margin=0.2), scale=32, effective_margin=0.494)
    """
    return _loss(alpha, PriorMargin(margin), scale, reduction, ignore_index, debug)


def q_margin_face(
    *, reduction: Reduction = "mean", ignore_index: int = -100, debug: bool = False
) -> MarginLoss:
    """Q-Margin with the paper's best settings for faces: alpha 1.25, scale 35, margin 0.2."""
    return _loss(1.25, PriorMargin(0.2), 35.0, reduction, ignore_index, debug)


def q_margin_speaker(
    *, reduction: Reduction = "mean", ignore_index: int = -100, debug: bool = False
) -> MarginLoss:
    """Q-Margin with the paper's best settings for speakers at FAR 1e-3: alpha 1.5, s 10, m 0.1."""
    return _loss(1.5, PriorMargin(0.1), 10.0, reduction, ignore_index, debug)


def q_margin_speaker_strict(
    *, reduction: Reduction = "mean", ignore_index: int = -100, debug: bool = False
) -> MarginLoss:
    """Q-Margin with the paper's best settings for speakers at FAR 1e-4: alpha 1.75, s 5, m 0.1."""
    return _loss(1.75, PriorMargin(0.1), 5.0, reduction, ignore_index, debug)


def cosface(
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """CosFace: cross-entropy with a cosine margin; the defaults are for faces."""
    return _loss(1.0, CosineMargin(margin), scale, reduction, ignore_index, debug)


def cosface_speaker(
    *, reduction: Reduction = "mean", ignore_index: int = -100, debug: bool = False
) -> MarginLoss:
    """CosFace with the paper's settings for speakers: scale 32, margin 0.2."""
    return _loss(1.0, CosineMargin(0.2), 32.0, reduction, ignore_index, debug)


def arcface(
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    gradient: Literal["exact", "straight_through"] = "exact",
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """ArcFace: cross-entropy with an angular margin in radians; the defaults are for faces.

    ``gradient="straight_through"`` omits the factor sin(angle + m) / sin(angle) from the gradient,
    as InsightFace does.
    """
    angular = AngularMargin(margin, gradient=gradient)
    return _loss(1.0, angular, scale, reduction, ignore_index, debug)


def arcface_speaker(
    *,
    gradient: Literal["exact", "straight_through"] = "exact",
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """ArcFace with the paper's settings for speakers: scale 32, margin 0.2."""
    margin = AngularMargin(0.2, gradient=gradient)
    return _loss(1.0, margin, 32.0, reduction, ignore_index, debug)


def entmax_face(
    *,
    alpha: float = 1.25,
    scale: float = 64.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """EntMax with an angular margin in radians; the defaults are the paper's for faces."""
    return _loss(alpha, AngularMargin(margin), scale, reduction, ignore_index, debug)


def entmax_speaker(
    *, reduction: Reduction = "mean", ignore_index: int = -100, debug: bool = False
) -> MarginLoss:
    """EntMax with the paper's settings for speakers: alpha 1.75, scale 5, angular margin 0.1."""
    return _loss(1.75, AngularMargin(0.1), 5.0, reduction, ignore_index, debug)


def sparsemax_face(
    *,
    scale: float = 1.9,
    margin: float = 0.2,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """SparseMax with an angular margin in radians; the defaults are the paper's for faces."""
    return _loss(2.0, AngularMargin(margin), scale, reduction, ignore_index, debug)


def sphereface(
    *,
    scale: float = 30.0,
    multiplier: float = 1.5,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """SphereFace: cross-entropy with a multiplied angle; defaults of OpenSphere (SphereFace-R)."""
    margin = CombinedMargin(multiplier=multiplier)
    return _loss(1.0, margin, scale, reduction, ignore_index, debug)


def adaface(
    *,
    scale: float = 64.0,
    margin: float = 0.4,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """AdaFace: margins depend on the embedding norm; pass ``norms`` to the loss."""
    return _loss(1.0, AdaFaceMargin(margin), scale, reduction, ignore_index, debug)


def magface(
    *,
    scale: float = 64.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """MagFace: margin and penalty grow with the embedding norm; pass ``norms`` to the loss."""
    return _loss(1.0, MagFaceMargin(), scale, reduction, ignore_index, debug)


def elasticface(
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    debug: bool = False,
) -> MarginLoss:
    """ElasticFace: an angular margin sampled for every row in each training step."""
    return _loss(1.0, ElasticMargin(margin), scale, reduction, ignore_index, debug)
