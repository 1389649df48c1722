"""Margins that no embedding can reach: a warning with the remedy (M12)."""

from __future__ import annotations

import sys
import warnings

from qmargin.errors import MarginWarning
from qmargin.maths.margins import Margin, PriorMargin, SumMargin

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
