r"""Angles behind cosines: functions of ``[B]`` that stay finite and monotone at the ends.

The derivative of an angle's sine with respect to its cosine, ``-c / sin(angle)``, is infinite at
cosines of one and minus one. Values here are exact; in derivatives the sine counts as no smaller
than ``SMALLEST_SINE``. That is one step of float32 from the end: cosines rarely come from anything
finer, and a closer one says nothing about the angle but that it is smaller still.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
