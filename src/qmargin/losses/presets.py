"""Published losses by name: each is two parts and a scale.

Defaults are the settings its authors, or the Q-Margin paper, recommend. The ``_face`` and
``_speaker`` presets are the best rows of the paper's tables.
"""

from __future__ import annotations

from typing import Any, Literal

from qmargin.losses.module import MarginLoss
from qmargin.maths.adaptive import AdaFaceMargin, ElasticMargin, MagFaceMargin
from qmargin.maths.divergences import Alpha
from qmargin.maths.margins import AngularMargin, CombinedMargin, CosineMargin, PriorMargin


def q_margin(
    *, alpha: float = 1.25, scale: float = 32.0, margin: float = 0.2, **options: Any
) -> MarginLoss:
    """Q-Margin: a sparse posterior whose target has the reference measure ``exp(-s m)``.

    The defaults are where the paper advises to start; its effective margin is 0.49.

    Examples:
        >>> q_margin()
        MarginLoss(Alpha(alpha=1.25), PriorMargin(margin=0.2), scale=32, effective_margin=0.494)
    """
    return MarginLoss(Alpha(alpha), PriorMargin(margin), scale=scale, **options)


def q_margin_face(**options: Any) -> MarginLoss:
    """Q-Margin as it was best on faces: alpha 1.25, scale 35, margin 0.2 (WebFace42M table)."""
    return q_margin(alpha=1.25, scale=35.0, margin=0.2, **options)


def q_margin_speaker(**options: Any) -> MarginLoss:
    """Q-Margin as it was best on speakers at FAR 1e-3: alpha 1.5, scale 10, margin 0.1."""
    return q_margin(alpha=1.5, scale=10.0, margin=0.1, **options)


def q_margin_speaker_strict(**options: Any) -> MarginLoss:
    """Q-Margin as it was best on speakers at FAR 1e-4: alpha 1.75, scale 5, margin 0.1."""
    return q_margin(alpha=1.75, scale=5.0, margin=0.1, **options)


def cosface(*, scale: float = 64.0, margin: float = 0.5, **options: Any) -> MarginLoss:
    """CosFace: cross-entropy with a cosine margin; the paper's settings for faces."""
    return MarginLoss(Alpha(1.0), CosineMargin(margin), scale=scale, **options)


def cosface_speaker(**options: Any) -> MarginLoss:
    """CosFace as in the paper's speaker table: scale 32, margin 0.2."""
    return cosface(scale=32.0, margin=0.2, **options)


def arcface(
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    gradient: Literal["exact", "straight_through"] = "exact",
    **options: Any,
) -> MarginLoss:
    """ArcFace: cross-entropy with an angular margin in radians; the settings for faces.

    ``gradient="straight_through"`` matches code that leaves the factor sin(angle + m) / sin(angle)
    out of the gradient.
    """
    return MarginLoss(Alpha(1.0), AngularMargin(margin, gradient=gradient), scale=scale, **options)


def arcface_speaker(**options: Any) -> MarginLoss:
    """ArcFace as in the paper's speaker table: scale 32, margin 0.2."""
    return arcface(scale=32.0, margin=0.2, **options)


def entmax_face(
    *, alpha: float = 1.25, scale: float = 64.0, margin: float = 0.5, **options: Any
) -> MarginLoss:
    """EntMax with an angular margin in radians, as in the paper's comparison on faces."""
    return MarginLoss(Alpha(alpha), AngularMargin(margin), scale=scale, **options)


def entmax_speaker(**options: Any) -> MarginLoss:
    """EntMax with an angular margin as in the speaker table: alpha 1.75, scale 5, margin 0.1."""
    return entmax_face(alpha=1.75, scale=5.0, margin=0.1, **options)


def sparsemax_face(*, scale: float = 1.9, margin: float = 0.2, **options: Any) -> MarginLoss:
    """SparseMax with an angular margin in radians, as in the paper's comparison on faces."""
    return MarginLoss(Alpha(2.0), AngularMargin(margin), scale=scale, **options)


def sphereface(*, scale: float = 30.0, multiplier: float = 1.5, **options: Any) -> MarginLoss:
    """SphereFace: cross-entropy with a multiplied angle.

    The defaults are those of OpenSphere, its authors' later code: s 30, m 1.5 (SphereFace-R).
    """
    return MarginLoss(Alpha(1.0), CombinedMargin(multiplier=multiplier), scale=scale, **options)


def adaface(*, scale: float = 64.0, margin: float = 0.4, **options: Any) -> MarginLoss:
    """AdaFace: margins that follow the norm of the embedding; pass ``norms`` to the loss."""
    return MarginLoss(Alpha(1.0), AdaFaceMargin(margin), scale=scale, **options)


def magface(*, scale: float = 64.0, **options: Any) -> MarginLoss:
    """MagFace: a margin and a penalty that grow with the norm; pass ``norms`` to the loss."""
    return MarginLoss(Alpha(1.0), MagFaceMargin(), scale=scale, **options)


def elasticface(*, scale: float = 64.0, margin: float = 0.5, **options: Any) -> MarginLoss:
    """ElasticFace: an angular margin drawn anew for every sample in training."""
    return MarginLoss(Alpha(1.0), ElasticMargin(margin), scale=scale, **options)
