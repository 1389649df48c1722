r"""Reach: the cosine gap at which the loss of a row is exactly zero, and the margin for it (M12).

The gap is the target's cosine minus the largest other one. With ``b = alpha - 1``, a target cosine
``c`` and the target's term ``theta_y``, ``log q_y`` of a margin, the loss of a row is exactly zero
from the gap

.. math:: r(c) = c - \theta_y / s + q_y^{-b} / (b s)

on. For a prior margin that is ``exp(b s m) / (b s)`` and for a cosine margin ``m + 1 / (b s)``, at
every ``c``. For an angular margin it is ``cos t - cos(t + m) + 1 / (b s)`` at the angle ``t``: at
least ``1 - cos m + 1 / (b s)``, and at most ``2 sin(m / 2) + 1 / (b s)``. At ``alpha <= 1`` no loss
is ever exactly zero, and the reach is infinite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.losses.checks import check_alpha_range, check_number, check_positive
from qmargin.losses.margins import (
    LARGEST_GAP,
    Margin,
    PerClass,
    PriorMargin,
    StatelessMargin,
    check_margin,
    settings_in,
)

REACH_KINDS = ("prior", "cosine", "angular")
_ANGLES = 1025  # evaluated for the largest gap, and again between the best of them
_ZOOMS = 3


class UnreachableError(ConfigError):
    """Raised for a reach below that of the divergence alone, which no margin gives."""


def reach(
    alpha: float,
    scale: float,
    margin: float | Margin = 0.0,
    *,
    target_cosine: float | None = None,
) -> float | None:
    """Compute the cosine gap from which on the loss of a row is exactly zero (M12).

    Cosines differ by at most 2: with a larger reach at ``target_cosine=1``, no row of any embedding
    has zero loss.

    Args:
        alpha: Of the divergence; the reach is infinite up to 1.
        scale: Of the logits.
        margin: A prior margin as a number, or any margin.
        target_cosine: The gap that a row with this target cosine needs, in [-1, 1]. None for the
            largest gap that any target cosine needs: rows that have it are satisfied, whatever
            their angle. Prior and cosine margins need the same gap everywhere.

    Returns:
        The gap; None where rows differ, as with settings per class, tensors, norms or draws.

    Examples:
        >>> round(reach(1.25, 35.0, 0.2), 2)
        0.66
        >>> from qmargin import AngularMargin
        >>> arc = AngularMargin(0.3)
        >>> [round(reach(1.5, 16.0, arc, target_cosine=c), 3) for c in (None, 1.0, 0.0)]
        [0.424, 0.17, 0.421]
        >>> reach(1.0, 64.0, 0.35)
        inf
    """
    alpha = check_number(alpha, "alpha")
    check_alpha_range(alpha)
    scale = check_positive(scale, "scale", "choose a positive number")
    given = PriorMargin(margin) if isinstance(margin, int | float) else margin
    check_margin(given)
    if target_cosine is not None and not -1.0 <= target_cosine <= 1.0:  # true for NaN
        raise ConfigError(f"target_cosine is {target_cosine:g}; choose one in [-1, 1]")
    b = alpha - 1.0
    if b <= 0.0:
        return math.inf
    settings = [value for _, value in settings_in(given)]
    if not isinstance(given, StatelessMargin) or any(
        isinstance(value, Tensor | PerClass | nn.Module) for value in settings
    ):
        return None

    @torch.no_grad()
    def gaps(cosines: Tensor) -> Tensor:
        term = given(cosines, scale)
        return cosines - term.logits / scale + (-b * term.log_reference).exp() / (b * scale)

    like: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    try:
        if target_cosine is not None:
            return float(gaps(torch.tensor([target_cosine], **like)))
        low, high = 0.0, math.pi
        for _ in range(_ZOOMS):
            angles = torch.linspace(low, high, _ANGLES, **like)
            found, place = gaps(angles.cos()).max(0)
            step, best = (high - low) / (_ANGLES - 1), float(angles[place])
            low, high = max(0.0, best - step), min(math.pi, best + step)
        return float(found)
    except Exception:  # a margin, perhaps user-defined, that needs norms or labels
        return None


def margin_of_reach(gap: float, alpha: float, scale: float, *, kind: str = "prior") -> float:
    """Compute the margin that gives a loss this reach, see ``reach``.

    Args:
        gap: The reach, from ``1 / ((alpha - 1) scale)``, the reach without a margin, to 2.
        alpha: Of the divergence, above 1.
        scale: Of the logits.
        kind: Of the margin: ``"prior"``, ``"cosine"`` or ``"angular"``.

    Examples:
        >>> margin = margin_of_reach(0.6, 1.25, 35.0)
        >>> round(margin, 4), round(reach(1.25, 35.0, margin), 6)
        (0.1895, 0.6)
    """
    alpha = check_number(alpha, "alpha")
    check_alpha_range(alpha)
    rate = (alpha - 1.0) * check_positive(scale, "scale", "choose a positive number")
    gap = check_number(gap, "reach")
    if kind not in REACH_KINDS:
        raise ConfigError(f"kind is {kind!r}; known ones are {', '.join(REACH_KINDS)}")
    if rate <= 0.0:
        raise ConfigError(
            f"reach is {gap:g} and alpha is {alpha:g}: the loss of a row is never exactly zero up "
            "to alpha 1; choose alpha above 1, or give the margin itself"
        )
    least = 1.0 / rate
    if gap <= 0.0:
        raise ConfigError(f"reach is {gap:g}; it must be above 0")
    if gap > LARGEST_GAP:
        raise ConfigError(
            f"reach is {gap:g}, but cosines differ by at most {LARGEST_GAP:g}; choose a smaller one"
        )
    if gap < least * (1.0 - 1e-12):
        raise UnreachableError(
            f"reach is {gap:g}, but with alpha {alpha:g} and scale {scale:.4g} a row needs a gap "
            f"of {least:.4g} without any margin; choose at least that, or a larger scale"
        )
    added = max(0.0, gap - least)
    if kind == "angular":
        return 2.0 * math.asin(added / 2.0)
    return added if kind == "cosine" else math.log1p(added * rate) / rate
