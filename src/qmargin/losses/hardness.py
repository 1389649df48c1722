r"""How hard the negatives are that a loss looks at: one number for scale, alpha, classes and dims.

Cosines of ``k`` classes that have nothing to do with a row are nearly normal, with mean 0 and
deviation :math:`1 / \sqrt{d}`. The mean of what the posterior weighs, in deviations, is the
*hardness*, with ``z`` standard normal:

.. math::
    h = \frac{E[w(z)\, z]}{E[w(z)]}, \qquad
    w(z) = [b\, s\, d^{-1/2} (z - c)]_+^{1/b}, \qquad k\, E[w(z)] = 1, \qquad b = \alpha - 1

At ``alpha = 1`` it is :math:`s / \sqrt{d}`, whatever ``k`` is; above, it grows with ``k`` as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr

from qmargin.errors import ConfigError
from qmargin.losses.checks import check_alpha_range, check_number, check_positive

_TAIL = 12.0  # deviations beyond which a normal density is nothing
_POINTS = 8001


class Hardness(NamedTuple):
    """What a loss makes of classes that have nothing to do with a row."""

    mean: float  # of their cosines as the posterior weighs them, in deviations
    support: float  # how many of them have a gradient, in the mean over rows


def hardness(alpha: float, scale: float, *, num_classes: int, embedding_dim: int) -> Hardness:
    """How hard the negatives are that a loss looks at, before anything is learned.

    Losses of equal hardness look at the same negatives, whatever their alpha. The nearest of ``k``
    classes is about ``sqrt(2 log k)`` deviations away: a loss near that looks at single classes.

    Args:
        alpha: Of the divergence, at least 1.
        scale: Of the logits.
        num_classes: ``k``.
        embedding_dim: ``d``.

    Examples:
        >>> face = {"num_classes": 2_059_906, "embedding_dim": 512}
        >>> [round(hardness(*s, **face).mean, 1) for s in ((1.0, 64.0), (1.25, 35.0), (2.0, 1.9))]
        [2.8, 4.5, 4.5]
    """
    deviation = float(_at_least_two(embedding_dim, "embedding_dim") ** -0.5)
    sharpness = check_positive(scale, "scale", "it must be above 0") * deviation
    b, count = _alpha_minus_one(alpha), _at_least_two(num_classes, "num_classes")
    if b == 0.0:
        return Hardness(sharpness, float(count))

    def excess(edge: float) -> float:
        return float(logsumexp(_weights(b, sharpness, edge)[1])) + math.log(count)

    low = -_TAIL - 1.0 / (b * sharpness)  # there every class has a posterior of one or more
    edge = float(brentq(excess, low, _TAIL + sharpness, xtol=1e-12))  # posteriors add up to one
    z, log_weights = _weights(b, sharpness, edge)
    weights = np.exp(log_weights - log_weights.max())
    return Hardness(float((weights * z).sum() / weights.sum()), float(count * ndtr(-edge)))


def scale_of_hardness(mean: float, alpha: float, *, num_classes: int, embedding_dim: int) -> float:
    """The scale with which a loss has a hardness, see ``hardness``.

    Args:
        mean: Above 0 and below ``sqrt(2 log k)``.
        alpha: Of the divergence, at least 1.
        num_classes: ``k``.
        embedding_dim: ``d``.

    Examples:
        >>> scale = scale_of_hardness(2.0, 1.25, num_classes=10_000, embedding_dim=128)
        >>> round(scale, 1)
        3.6
        >>> round(hardness(1.25, scale, num_classes=10_000, embedding_dim=128).mean, 6)
        2.0
    """
    farthest = math.sqrt(2.0 * math.log(_at_least_two(num_classes, "num_classes")))
    if not 0.0 < check_number(mean, "hardness") < farthest:
        raise ConfigError(
            f"hardness is {mean:g}; it must be above 0 and below {farthest:.3g}, where the nearest "
            f"of {num_classes:,} classes is"
        )
    scale = mean / float(_at_least_two(embedding_dim, "embedding_dim") ** -0.5)
    if _alpha_minus_one(alpha) == 0.0:
        return scale

    def excess(log_scale: float) -> float:
        sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
        return hardness(alpha, math.exp(log_scale), **sizes).mean - mean

    low = high = math.log(scale)
    while excess(low) > 0.0:
        low -= 2.0
    while excess(high) < 0.0:
        high += 2.0
    return math.exp(float(brentq(excess, low, high, xtol=1e-12)))


def _alpha_minus_one(alpha: float) -> float:
    check_alpha_range(check_number(alpha, "alpha"))
    if alpha < 1.0:
        raise ConfigError(f"alpha is {alpha:g}; hardness is known from alpha 1 on")
    return alpha - 1.0


def _at_least_two(value: int, name: str) -> int:
    if value < 2:
        raise ConfigError(f"{name} is {value}; it must be at least 2")
    return value


def _weights(b: float, sharpness: float, edge: float) -> tuple[np.ndarray, np.ndarray]:
    """Points above the edge, and the logarithm of density times posterior there."""
    # What is weighed lies around the larger of the edge and, as at alpha 1, the sharpness.
    z, step = np.linspace(max(edge, -_TAIL), _TAIL + max(edge, sharpness), _POINTS, retstep=True)
    with np.errstate(divide="ignore"):
        log_link = np.log(b * sharpness * (z - edge)) / b
    return z, log_link - z * z / 2.0 + math.log(step / math.sqrt(2.0 * math.pi))
