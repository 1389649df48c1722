"""Geometry of the drawings: scales, ticks and lines in the units of the drawing.

The page writes them as SVG and ``figures`` draws the DET plot from the same places, so both show
the same curves, bands, signs and ticks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist
from typing import Any, NamedTuple

from qmargin.evaluation.result import Histogram, Reliability
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS, rule_of_three
from qmargin.report.journal import Journal
from qmargin.report.numbers import (
    NOT_MEASURABLE,
    count,
    digits_to_differ,
    number,
    percent,
    percent_interval,
    rate_text,
    short_count,
)
from qmargin.report.systems import Entry, Panel

NUM_COLOURS = 8
LARGEST_GAP = 2.0  # between two cosines
RATES = (
    *(10.0**exponent for exponent in range(-9, -2)),
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99),
)
MANTISSAS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
LETTERS = (7.0, 11.5)  # widths of a letter of a label, on a screen and on a phone
Place = tuple[float, float]
probit = NormalDist().inv_cdf  # the axis of a DET plot


class Tick(NamedTuple):
    """A labelled place on an axis; minor ones are hidden where the drawing is small."""

    place: float
    label: str
    is_minor: bool


@dataclass(frozen=True)
class Scale:
    """One axis: values between ``low`` and ``high`` lie between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    transform: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """Place of a value; values outside lie outside."""
        low, high = self.transform(self.low), self.transform(self.high)
        share = (self.transform(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def clamped(self, value: float) -> float:
        """Place of a value, or of the nearer end for one outside."""
        return self(min(max(value, self.low), self.high))

    def within(self, values: Iterable[float]) -> list[float]:
        """Those of the values that lie on the axis."""
        slack = 1e-9 * (self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]

    def ticks(self, values: Iterable[float], label: Callable[[float], str]) -> list[Tick]:
        """Ticks at values; every second one is minor."""
        return [Tick(self(value), label(value), bool(i % 2)) for i, value in enumerate(values)]

    def spaced_ticks(self, values: Iterable[float], label: Callable[[float], str]) -> list[Tick]:
        """Ticks of an axis to the right whose labels do not meet, the largest values first.

        Labels that would meet have no text, or are minor where they meet in large letters only.
        """
        found: list[Tick] = []
        ends = dict.fromkeys(LETTERS, math.inf)  # where the label on the right begins
        for value in sorted(values, reverse=True):
            place, text = self(value), label(value)
            fits = {}
            for letter in LETTERS:
                half = 0.5 * letter * (len(text) + 1)  # and a space
                fits[letter] = place + half <= ends[letter]
                if fits[letter]:
                    ends[letter] = place - half
            small, large = LETTERS
            found.append(Tick(place, text if fits[small] else "", not fits[large]))
        return found[::-1]


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About ``wanted`` round numbers between two numbers."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(index * step, 12) + 0.0 for index in places]


def path_data(points: Sequence[Place]) -> str:
    """A polyline for the attribute ``d``, to a tenth of a unit, without repeated points."""
    rounded = (f"{round(x, 1):g} {round(y, 1):g}" for x, y in points)
    return "M" + "L".join(text for text, _ in groupby(rounded)) if points else ""


# -- DET ------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """Where the plot lies in its drawing."""

    left: float
    right: float
    top: float
    bottom: float


class CurvePoint(NamedTuple):
    """A point of a DET curve that belongs to one threshold."""

    far: float
    frr: float
    threshold: float | None


@dataclass(frozen=True)
class DetCurve:
    """One system in a DET plot; ``cells`` and ``heights`` have an item per stop of the read-out."""

    entry: Entry
    line: list[Place]
    band: list[tuple[float, float, float]]  # place, low, high
    signs: list[tuple[float, float, bool]]  # operating points, hollow with few false accepts
    cells: list[list[str]]  # TAR, interval, false accepts and threshold
    heights: list[float | None]  # of the curve, None outside of the plot


@dataclass(frozen=True)
class DetGeometry:
    """A DET plot on probit axes."""

    panel: Panel
    across: Scale
    up: Scale
    box: Box
    bottom: list[Tick]
    left: list[Tick]
    few: list[float]  # places up to which false accepts are too few, by numbers of impostors
    diagonal: tuple[Place, Place] | None
    curves: list[DetCurve]
    stops: list[Tick]  # of the read-out
    start: int  # the first stop

    @property
    def data(self) -> dict[str, Any]:
        """All read-outs for the page's script."""
        return {
            "start": self.start,
            "labels": [stop.label for stop in self.stops],
            "x": [round(stop.place, 1) for stop in self.stops],
            "systems": [{"cells": curve.cells, "y": curve.heights} for curve in self.curves],
        }


DET_BOX = Box(left=74.0, right=624.0, top=32.0, bottom=542.0)


def det_geometry(panel: Panel) -> DetGeometry:
    """Axes from one false accept to beyond the equal error rate."""
    points = [curve_points(entry) for entry in panel.entries]
    sizes = sorted({entry.result.protocol.num_impostors for entry in panel.entries})
    eer = max(entry.result.measures.eer.value for entry in panel.entries)
    low = max(min(1.0 / sizes[-1], 0.005), RATES[0])
    high = next(rate for rate in RATES if rate >= min(max(2.0 * eer, 0.05), 0.6))
    across = Scale(low, high, DET_BOX.left, DET_BOX.right, probit)
    frrs = [p.frr for own in points for p in own if low <= p.far <= high and 0.0 < p.frr < 1.0]
    bottom = max((r for r in RATES if r <= min(frrs, default=0.01)), default=RATES[0])
    top = min((r for r in RATES if r >= max(frrs, default=0.4)), default=RATES[-1])
    bottom = bottom / 10.0 if bottom == top else bottom
    up = Scale(bottom, top, DET_BOX.bottom, DET_BOX.top, probit)
    # The read-out stops at round FARs and at the targets, which win over their rounding.
    rounds = [m * 10.0**e for e in range(-9, 0) for m in MANTISSAS]
    inside = [far for far in [*rounds, *panel.fars] if low <= far <= high]
    fars = sorted({f"{far:.3g}": far for far in inside}.values())
    wanted = probit(panel.headline_far or fars[len(fars) // 2])
    first, last = max(low, up.low), min(high, up.high)
    shown = [rate for rate in across.within(RATES) if rate not in (0.002, 0.005, 0.02)]
    return DetGeometry(
        panel=panel,
        across=across,
        up=up,
        box=DET_BOX,
        bottom=across.spaced_ticks(shown, rate_text),
        left=up.ticks(up.within(RATES), rate_text),
        few=[across.clamped(ENOUGH_FALSE_ACCEPTS / size) for size in sizes],
        diagonal=((across(first), up(first)), (across(last), up(last))) if first < last else None,
        curves=[
            _det_curve(entry, own, across, up, fars)
            for entry, own in zip(panel.entries, points, strict=True)
        ],
        stops=across.ticks(fars, rate_text),
        start=min(range(len(fars)), key=lambda index: abs(probit(fars[index]) - wanted)),
    )


def curve_points(entry: Entry) -> list[CurvePoint]:
    """Stored points and measured operating points, the smallest FAR and best FRR first."""
    det = entry.result.det
    points = list(map(CurvePoint, det.far, det.frr, det.threshold))
    for measured in entry.result.measures.tar:
        if measured.tar is not None and measured.far is not None:
            points.append(CurvePoint(measured.far, 1.0 - measured.tar, measured.threshold))
    return sorted(points, key=lambda point: (point.far, -point.frr))


def _det_curve(
    entry: Entry, points: list[CurvePoint], across: Scale, up: Scale, fars: Sequence[float]
) -> DetCurve:
    band = entry.result.det.band
    rows = [] if band is None else zip(band.far, band.low, band.high, strict=True)
    stops = [point_below(points, far) for far in fars]
    return DetCurve(
        entry=entry,
        line=[
            (across(p.far), up(p.frr)) for p in points if 0.0 < p.far < 1.0 and 0.0 < p.frr < 1.0
        ],
        band=[
            (across(x), up.clamped(low), up.clamped(high)) for x, low, high in rows if 0.0 < x < 1.0
        ],
        signs=[
            (across(point.far), up(1.0 - point.tar), point.status != "ok")
            for point in entry.result.measures.tar
            if point.tar is not None and point.far and 0.0 < point.tar < 1.0
        ],
        cells=[readout(entry, point, far) for point, far in zip(stops, fars, strict=True)],
        heights=[
            None if p is None or not 0.0 < p.frr < 1.0 else round(up.clamped(p.frr), 1)
            for p in stops
        ],
    )


def point_below(points: list[CurvePoint], far: float) -> CurvePoint | None:
    """The last of the sorted points whose FAR is not above ``far``."""
    place = bisect_right(points, far, key=lambda point: point.far)
    return points[place - 1] if place else None


def readout(entry: Entry, point: CurvePoint | None, far: float) -> list[str]:
    """TAR, its interval, false accepts and threshold at the last stored point not above a FAR."""
    size, band = entry.result.protocol.num_impostors, entry.result.det.band
    if point is None or far * size < 1.0 - 1e-9:
        return [NOT_MEASURABLE, "", "", ""]
    ends = None
    if (measured := entry.point_at(far)) is not None:
        ends = measured.interval
    elif band is not None and (inside := [i for i, x in enumerate(band.far) if x <= far]):
        ends = (1.0 - band.high[inside[-1]], 1.0 - band.low[inside[-1]])
    accepts = f"{count(round(point.far * size))} FA"
    return [
        percent(1.0 - point.frr),
        percent_interval(ends),
        accepts,
        f"≥ {entry.score_text(point.threshold)}",
    ]


# -- small charts ---------------------------------------------------------------------------------


class Chart(NamedTuple):
    """A chart beside the DET plot: its size, ticks, and what is drawn by name."""

    width: float
    height: float
    box: Box
    bottom: list[Tick]
    left: list[Tick]
    shapes: dict[str, Any]
    across_title: str
    up_title: str


SMALL = Box(left=14.0, right=326.0, top=26.0, bottom=172.0)


def histogram_chart(histogram: Histogram, threshold: float | None) -> Chart:
    """Genuine and impostor scores, each on a scale of its own, linear and logarithmic."""
    edges = histogram.edges
    across = Scale(edges[0], max(edges[-1], edges[0] + 1e-12), SMALL.left, SMALL.right)

    def steps(counts: Sequence[int], *, is_log: bool) -> list[Place]:
        total, tallest = max(sum(counts), 1), max([*counts, 1])
        points = [(across(edges[0]), SMALL.bottom)]
        for index, trials in enumerate(counts):
            share = trials / tallest
            if is_log:
                share = (
                    1.0 - math.log10(trials / total) / math.log10(0.5 / total) if trials else 0.0
                )
            height = SMALL.bottom - (SMALL.bottom - SMALL.top) * share
            points += [(across(edge), height) for edge in edges[index : index + 2]]
        return [*points, (across(edges[-1]), SMALL.bottom)]

    kinds = {"impostor": histogram.impostor, "genuine": histogram.genuine}
    areas = {
        how: {kind: steps(counts, is_log=how == "log") for kind, counts in kinds.items()}
        for how in ("linear", "log")
    }
    place = None
    if threshold is not None and across.low <= threshold <= across.high:
        place = across(threshold)
    places = round_ticks(across.low, across.high)
    digits = digits_to_differ(places, 3)  # scores may lie close together
    ticks = across.ticks(places, lambda value: number(value, digits))
    shapes = {"areas": areas, "threshold": place}
    return Chart(340.0, 220.0, SMALL, ticks, [], shapes, "Score", "Share of pairs, own scale")


def reliability_chart(reliability: Reliability) -> Chart:
    """Observed share of genuine trials over the predicted one; larger dots hold more trials."""
    box = SMALL._replace(left=44.0)
    across = Scale(0.0, 1.0, box.left, box.right)
    up = Scale(0.0, 1.0, box.bottom, box.top)
    most = max([*reliability.count, 1])
    points = zip(reliability.predicted, reliability.observed, reliability.count, strict=False)
    dots = [
        (across(p), up(o), 2.5 + 5.0 * math.sqrt(trials / most))
        for p, o, trials in points
        if p is not None and o is not None
    ]
    bottom = across.ticks((0.0, 0.25, 0.5, 0.75, 1.0), "{:g}".format)
    left = up.ticks((0.0, 0.5, 1.0), "{:g}".format)
    shapes = {"dots": dots, "line": [(x, y) for x, y, _ in dots]}
    titles = ("Predicted probability of a genuine pair", "Observed share")
    return Chart(340.0, 220.0, box, bottom, left, shapes, *titles)


def support_chart(journals: Sequence[Journal]) -> Chart:
    """Mean and largest number of active classes over the steps of runs, in their colours."""
    box = Box(left=62.0, right=624.0, top=26.0, bottom=232.0)
    columns = [column for journal in journals for column in (journal.mean, journal.largest)]
    values = [value for column in columns for value in column if value is not None]
    low = 10.0 ** math.floor(math.log10(max(min(values), 1.0)))
    high = max(*values, 10.0 * low) * 1.15  # so that a line at the top does not hide in the frame
    up = Scale(low, high, box.bottom, box.top, math.log10)
    steps = [step for journal in journals for step in journal.steps]
    across = Scale(min(steps), max(*steps, min(steps) + 1), box.left, box.right)

    def line(journal: Journal, column: Sequence[float | None]) -> list[Place]:
        pairs = zip(journal.steps, column, strict=True)
        return [(across(step), up.clamped(value)) for step, value in pairs if value is not None]

    lines = [{"largest": line(j, j.largest), "mean": line(j, j.mean)} for j in journals]
    bottom = across.ticks(round_ticks(across.low, across.high, 6), short_count)
    decades = range(round(math.log10(low)), math.floor(math.log10(high) + 1e-9) + 1)
    left = up.ticks((10.0**exponent for exponent in decades), short_count)
    return Chart(640.0, 290.0, box, bottom, left, {"lines": lines}, "Step", "Active classes")


def time_chart(lines: Sequence[tuple[int, Sequence[Place]]], measure: str) -> Chart:
    """TAR in per cent over training seconds: the colour and the points of each run."""
    box = Box(left=62.0, right=624.0, top=26.0, bottom=232.0)
    tars = [100.0 * tar for _, line in lines for _, tar in line]
    room = 0.06 * (max(tars) - min(tars)) or 1.0
    up = Scale(min(tars) - room, max(tars) + room, box.bottom, box.top)
    longest = max(seconds for _, line in lines for seconds, _ in line)
    across = Scale(0.0, 1.02 * longest or 1.0, box.left, box.right)
    drawn = [
        (colour, [(across(seconds), up(100.0 * tar)) for seconds, tar in line])
        for colour, line in lines
    ]
    bottom = across.ticks(round_ticks(across.low, across.high, 6), short_count)
    left = up.ticks(round_ticks(up.low, up.high, 5), lambda value: number(value, 3))
    return Chart(640.0, 290.0, box, bottom, left, {"lines": drawn}, "Training, s", f"{measure}, %")


OUTCOME_TITLES = {
    "satisfied_share": "Share of satisfied rows",
    "target_posterior": "Posterior of the target",
    "cosine_gap": "Cosine gap",
}


def outcome_charts(journals: Sequence[Journal]) -> list[Chart]:
    """A small chart for each mean that some run has over its steps; gaps beside the reach."""
    box = SMALL._replace(left=44.0)
    steps = [step for journal in journals for step in journal.steps]
    across = Scale(min(steps), max(*steps, min(steps) + 1), box.left, box.right)
    bottom = across.ticks(round_ticks(across.low, across.high, 4), short_count)
    charts = []
    for name, title in OUTCOME_TITLES.items():
        columns = [journal.outcomes.get(name, ()) for journal in journals]
        values = [value for column in columns for value in column if value is not None]
        if not values:
            continue
        is_gap = name == "cosine_gap"
        reaches = [journal.reach if is_gap else None for journal in journals]
        shown = [reach for reach in reaches if reach is not None and reach <= LARGEST_GAP]
        low, high = min(*values, 0.0), max(*values, *shown, 0.0)
        room = 0.05 * (high - low) or 0.05
        up = Scale(low - (room if low < 0.0 else 0.0), high + room, box.bottom, box.top)
        lines = [
            [
                (across(step), up(value))
                for step, value in zip(journal.steps, column, strict=False)
                if value is not None
            ]
            for journal, column in zip(journals, columns, strict=True)
        ]
        marks = [None if reach not in shown else up(reach) for reach in reaches]
        left = up.ticks(round_ticks(up.low, up.high, 4), "{:g}".format)
        shapes = {"lines": lines, "marks": marks}
        charts.append(Chart(340.0, 220.0, box, bottom, left, shapes, "Step", title))
    return charts


def difference_chart(
    rows: Sequence[tuple[str, int, float, tuple[float, float], bool]], measure: str
) -> Chart:
    """Differences to one system: name, colour, difference, interval, beyond chance; in points."""
    box = Box(left=10.0, right=270.0, top=8.0, bottom=16.0 + 40.0 * len(rows))
    ends = [100.0 * end for _, _, _, interval, _ in rows for end in interval] + [0.0]
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    across = Scale(min(ends) - room, max(ends) + room, box.left, box.right)
    shapes = [
        {
            "name": name,
            "colour": colour,
            "at": across(100.0 * difference),
            "ends": [across(100.0 * end) for end in interval],
            "is_shown": is_shown,
            "up": box.top + 28.0 + 40.0 * index,
        }
        for index, (name, colour, difference, interval, is_shown) in enumerate(rows)
    ]
    places = round_ticks(across.low, across.high, 4)
    digits = digits_to_differ(places, 3)
    ticks = across.ticks(places, lambda value: number(value, digits))
    title = f"Difference of {measure.partition(' ')[0]}, percentage points"
    found = {"rows": shapes, "zero": across(0.0)}
    return Chart(280.0, box.bottom + 50.0, box, ticks, [], found, title, "")


# -- drawings in tables ---------------------------------------------------------------------------


def gauge(allowed: int) -> tuple[float, float]:
    """Length of a bar on a logarithmic scale from 1 to 1000, and the place of thirty; of 200."""
    share = min(math.log10(max(allowed, 1)) / 3.0, 1.0)
    return 200.0 * share, 200.0 * math.log10(ENOUGH_FALSE_ACCEPTS) / 3.0


def whisker_scale(intervals: Iterable[tuple[float, float]]) -> Scale:
    """Places of differences from 6 to 194, zero in the middle."""
    reach = max([abs(end) for ends in intervals for end in ends] + [1e-9])
    return Scale(-reach, reach, 6.0, 194.0)


def rate_or_bound(rate: float | None, trials: int) -> float | None:
    """A rate, or the bound 3/n of a group without errors; None without trials."""
    if rate is None or trials < 1:
        return None
    return rate if rate > 0.0 else rule_of_three(trials)


def group_scale(rates: Iterable[float | None]) -> Scale:
    """Logarithmic places of rates from 8 to 152."""
    known = [rate for rate in rates if rate is not None and rate > 0.0] or [0.01]
    room = 10.0**0.15
    return Scale(min(known) / room, max(known) * room, 8.0, 152.0, math.log10)
