"""From values to places in a drawing: probit, logarithmic and linear axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from qmargin.report.markup import Html, joined, tag

RATES = (
    *(10.0**exponent for exponent in range(-9, -2)),
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99),
)
_NORMAL = NormalDist()


def probit(rate: float) -> float:
    """Quantile of the standard normal distribution, the axis of a DET plot.

    Examples:
        >>> round(probit(0.5), 3), round(probit(1e-4), 3)
        (0.0, -3.719)
    """
    return _NORMAL.inv_cdf(rate)


def identity(value: float) -> float:
    """The value itself: a linear axis."""
    return value


@dataclass(frozen=True)
class Scale:
    """One axis: values between ``low`` and ``high`` lie between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    transform: Callable[[float], float] = identity

    def __call__(self, value: float) -> float:
        """Place of a value; values outside lie outside.

        Examples:
            >>> Scale(1.0, 100.0, 0.0, 10.0, math.log10)(10.0)
            5.0
        """
        low, high = self.transform(self.low), self.transform(self.high)
        share = (self.transform(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def clamped(self, value: float) -> float:
        """Place of a value, or of the nearer end for one outside."""
        return self(min(max(value, self.low), self.high))

    def ticks(self, values: Iterable[float]) -> list[float]:
        """Those of the values that lie on the axis."""
        slack = 1e-9 * (self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers.

    Examples:
        >>> decades(0.5, 150.0)
        [1.0, 10.0, 100.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**exponent for exponent in range(first, last + 1)]


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About so many round numbers between two numbers.

    Examples:
        >>> round_ticks(-0.13, 0.94)
        [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    rough = (high - low) / max(wanted, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]


def path_data(points: Sequence[tuple[float, float]]) -> str:
    """A polyline for the attribute ``d``, to a tenth of a unit, without repeated points.

    Examples:
        >>> path_data([(0, 0), (0.01, 0.01), (3, 4.25)])
        'M0 0L3 4.2'
    """
    rounded = [f"{round(x, 1):g} {round(y, 1):g}" for x, y in points]
    kept = [text for i, text in enumerate(rounded) if i == 0 or text != rounded[i - 1]]
    return "M" + "L".join(kept) if kept else ""


def text_at(x: float, y: float, text: str, **attributes: str) -> Html:
    """A label in a drawing."""
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def line_at(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line in a drawing."""
    places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", class_=class_, **{key: f"{place:.1f}" for key, place in places.items()})


def bottom_axis(scale: Scale, y: float, labels: Sequence[tuple[float, str]], top: float) -> Html:
    """Tick labels under a plot and the grid lines above them; every second one is minor.

    Minor labels are hidden where the drawing is shown small.
    """
    parts = []
    for index, (value, label) in enumerate(labels):
        place = scale(value)
        parts.append(line_at(place, top, place, y, "grid"))
        minor = "tick bottom minor" if index % 2 else "tick bottom"
        parts.append(text_at(place, y + 20, label, class_=minor, text_anchor="middle"))
    return joined(parts)


def left_axis(scale: Scale, x: float, labels: Sequence[tuple[float, str]], right: float) -> Html:
    """Tick labels left of a plot and the grid lines beside them."""
    parts = []
    for index, (value, label) in enumerate(labels):
        place = scale(value)
        parts.append(line_at(x, place, right, place, "grid"))
        minor = "tick minor" if index % 2 else "tick"
        parts.append(text_at(x - 8, place + 4, label, class_=minor, text_anchor="end"))
    return joined(parts)
