"""Small charts beside the DET plot: score histograms, reliability, support over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qmargin.evaluation.result import Histogram, Reliability
from qmargin.report.det import curve_class
from qmargin.report.journal import Journal
from qmargin.report.markup import Html, joined, tag
from qmargin.report.numbers import number, short_count
from qmargin.report.scales import (
    Scale,
    bottom_axis,
    decades,
    left_axis,
    line_at,
    path_data,
    round_ticks,
    text_at,
)
from qmargin.report.systems import NUM_COLOURS

WIDTH, HEIGHT = 340.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 14.0, 326.0, 18.0, 172.0


def histogram_chart(histogram: Histogram, threshold: float | None, colour: int, title: str) -> Html:
    """Genuine and impostor scores, each as shares of its own count, linear and logarithmic."""
    edges = histogram.edges
    across = Scale(edges[0], max(edges[-1], edges[0] + 1e-12), LEFT, RIGHT)
    kinds = {
        "area impostor": histogram.impostor,
        f"area genuine c{colour % NUM_COLOURS}": histogram.genuine,
    }
    shapes = []
    for how in ("linear", "log"):
        drawn = [
            tag("path", d=_steps(edges, counts, across, how == "log"), class_=kind)
            for kind, counts in kinds.items()
        ]
        shapes.append(tag("g", *drawn, class_=f"bars-{how}"))
    ticks = [(value, number(value, 3)) for value in round_ticks(across.low, across.high)]
    marks = [bottom_axis(across, BOTTOM, ticks, BOTTOM), _baseline()]
    if threshold is not None and across.low <= threshold <= across.high:
        place = across(threshold)
        marks.append(line_at(place, TOP, place, BOTTOM, "threshold-line"))
    return _chart(title, "Histogram of scores", *shapes, *marks)


def reliability_chart(reliability: Reliability, colour: int, title: str) -> Html:
    """Observed share of genuine trials over the predicted one; larger dots hold more trials."""
    left = 44.0
    across = Scale(0.0, 1.0, left, RIGHT)
    up = Scale(0.0, 1.0, BOTTOM, TOP)
    labels = [(share, f"{share:g}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    most = max([*reliability.count, 1])
    points = zip(reliability.predicted, reliability.observed, reliability.count, strict=False)
    places = [(across(p), up(o), n) for p, o, n in points if p is not None and o is not None]
    dots = [
        tag(
            "circle",
            cx=f"{x:.1f}",
            cy=f"{y:.1f}",
            r=f"{2.5 + 5.0 * math.sqrt(trials / most):.1f}",
            class_=f"reliable {curve_class(colour)}",
        )
        for x, y, trials in places
    ]
    line = path_data([(x, y) for x, y, _ in places])
    return _chart(
        title,
        "Observed against predicted probability",
        bottom_axis(across, BOTTOM, labels, TOP),
        left_axis(up, left, labels[::2], RIGHT),
        line_at(across(0.0), up(0.0), across(1.0), up(1.0), "diagonal"),
        tag("path", d=line, class_=f"curve {curve_class(colour)}"),
        *dots,
    )


def support_chart(journals: Sequence[Journal]) -> Html:
    """Mean and largest number of active classes over the steps of trainings, in their colours."""
    left, right, bottom, height = 62.0, 624.0, 232.0, 280.0
    columns = [column for journal in journals for column in (journal.mean, journal.largest)]
    values = [value for column in columns for value in column if value is not None]
    low = 10.0 ** math.floor(math.log10(max(min(values), 1.0)))
    high = max(*values, 10.0 * low) * 1.15  # so that a line at the top does not hide in the frame
    up = Scale(low, high, bottom, TOP + 8, math.log10)
    steps = [step for journal in journals for step in journal.steps]
    across = Scale(min(steps), max(*steps, min(steps) + 1), left, right)
    ticks = [(value, short_count(value)) for value in round_ticks(across.low, across.high, 6)]
    lines = [
        _support_line(journal, kind, across, up, colour)
        for colour, journal in enumerate(journals)
        for kind in ("largest", "mean")
    ]
    heights = [(value, short_count(value)) for value in decades(low, high)]
    axis = text_at(right, bottom + 42, "step", class_="axis bottom", text_anchor="end")
    return _chart(
        ", ".join(journal.name for journal in journals),
        "Active classes over training steps",
        bottom_axis(across, bottom, ticks, TOP + 8),
        left_axis(up, left, heights, right),
        axis,
        *lines,
        size=(640.0, height),
    )


def _support_line(journal: Journal, kind: str, across: Scale, up: Scale, colour: int) -> Html:
    column = journal.mean if kind == "mean" else journal.largest
    pairs = zip(journal.steps, column, strict=True)
    places = [(across(step), up.clamped(value)) for step, value in pairs if value is not None]
    style = f"curve {curve_class(colour)} support-{kind}"
    return tag("path", d=path_data(places), class_=style)


def _chart(
    title: str, description: str, *parts: Html, size: tuple[float, float] = (WIDTH, HEIGHT)
) -> Html:
    return tag(
        "svg",
        tag("title", f"{description}: {title}"),
        joined(parts),
        viewBox=f"0 0 {size[0]:g} {size[1]:g}",
        class_="plot" if size[0] > WIDTH else "plot small",
        role="img",
    )


def _baseline() -> Html:
    return line_at(LEFT, BOTTOM, RIGHT, BOTTOM, "frame")


def _steps(edges: Sequence[float], counts: Sequence[int], across: Scale, is_log: bool) -> str:
    total = max(sum(counts), 1)
    tallest = max([*counts, 1])
    lowest = math.log10(0.5 / total)

    def height(trials: int) -> float:
        if not is_log:
            return BOTTOM - (BOTTOM - TOP) * trials / tallest
        if trials == 0:
            return BOTTOM
        share = (math.log10(trials / total) - lowest) / (0.0 - lowest)
        return BOTTOM - (BOTTOM - TOP) * share

    points = [(across(edges[0]), BOTTOM)]
    for index, trials in enumerate(counts):
        points += [
            (across(edges[index]), height(trials)),
            (across(edges[index + 1]), height(trials)),
        ]
    points.append((across(edges[-1]), BOTTOM))
    return path_data(points)
