"""The DET plot: probit axes, bands, operating points, and what the read-out says at each FAR."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from qmargin.metrics.sufficiency import ENOUGH_FALSE_ACCEPTS
from qmargin.report.markup import Html, joined, name_of, tag
from qmargin.report.numbers import NOT_MEASURABLE, count, number, percent, percent_interval, power
from qmargin.report.scales import (
    RATES,
    Scale,
    bottom_axis,
    left_axis,
    line_at,
    path_data,
    probit,
    text_at,
)
from qmargin.report.systems import NUM_COLOURS, Entry, Panel

WIDTH, HEIGHT = 640.0, 470.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 624.0, 32.0, 412.0
MANTISSAS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
MARKERS = (  # a second sign beside the colour, around the origin
    "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0 -5 0Z",
    "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "M0 -5.5L5.5 4.5H-5.5Z",
    "M0 -6L6 0L0 6L-6 0Z",
    "M0 5.5L5.5 -4.5H-5.5Z",
    "M-5 -2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
    "M0 -6L5.7 -1.9L3.5 4.9H-3.5L-5.7 -1.9Z",
    "M-6 -3H6V3H-6Z",
)


@dataclass(frozen=True)
class CurvePoint:
    """A point of a DET curve that belongs to one threshold."""

    far: float
    frr: float
    threshold: float | None


def curve_points(entry: Entry) -> list[CurvePoint]:
    """Stored points and measured operating points, the smallest FAR and best FRR first."""
    det = entry.result.det
    stored = zip(det.far, det.frr, det.threshold, strict=True)
    points = [CurvePoint(far, frr, threshold) for far, frr, threshold in stored]
    for measured in entry.result.metrics.tar:
        if measured.tar is not None and measured.far is not None:
            points.append(CurvePoint(measured.far, 1.0 - measured.tar, measured.threshold))
    return sorted(points, key=lambda point: (point.far, -point.frr))


def det_scales(panel: Panel) -> tuple[Scale, Scale]:
    """Axes that show everything from one false accept to beyond the equal error rate."""
    largest = max(entry.result.protocol.num_impostors for entry in panel.entries)
    eer = max(entry.result.metrics.eer.value for entry in panel.entries)
    low = max(min(1.0 / largest, 0.005), RATES[0])
    high = next(rate for rate in RATES if rate >= min(max(2.0 * eer, 0.05), 0.6))
    frrs = [
        point.frr
        for entry in panel.entries
        for point in curve_points(entry)
        if low <= point.far <= high and 0.0 < point.frr < 1.0
    ]
    bottom = max((r for r in RATES if r <= min(frrs, default=0.01)), default=RATES[0])
    top = min((r for r in RATES if r >= max(frrs, default=0.4)), default=RATES[-1])
    if bottom == top:
        bottom = bottom / 10.0
    return Scale(low, high, LEFT, RIGHT, probit), Scale(bottom, top, BOTTOM, TOP, probit)


def readout_fars(panel: Panel) -> list[float]:
    """The FARs that the read-out stops at: the targets and round numbers between the ends."""
    across, _ = det_scales(panel)
    rounds = [m * 10.0**e for e in range(-9, 0) for m in MANTISSAS]
    inside = [far for far in rounds if across.low <= far <= across.high]
    targets = [far for far in panel.fars if across.low <= far <= across.high]
    known = {f"{far:.3g}": far for far in [*inside, *targets]}  # a target wins over its rounding
    return sorted(known.values())


def start_index(panel: Panel) -> int:
    """Where the read-out begins: at the FAR of the verdict."""
    fars = readout_fars(panel)
    headline = panel.headline_far()
    wanted = fars[len(fars) // 2] if headline is None else headline
    return min(range(len(fars)), key=lambda index: abs(probit(fars[index]) - probit(wanted)))


def point_below(points: list[CurvePoint], far: float) -> CurvePoint | None:
    """The last of the sorted points whose FAR is not above ``far``."""
    place = bisect_right(points, far, key=lambda point: point.far)
    return points[place - 1] if place else None


def readout(entry: Entry, point: CurvePoint | None, far: float) -> list[str]:
    """TAR, its interval, false accepts and threshold at the last stored point not above a FAR."""
    if point is None or far * entry.result.protocol.num_impostors < 1.0 - 1e-9:
        return [NOT_MEASURABLE, "", "", ""]
    accepts = round(point.far * entry.result.protocol.num_impostors)
    return [
        percent(1.0 - point.frr),
        percent_interval(_interval_at(entry, far)),
        f"{count(accepts)} FA",
        f"≥ {number(point.threshold)}",
    ]


def det_data(panel: Panel) -> dict[str, Any]:
    """All read-outs of a panel, as text, with the places of the guide and its dots."""
    across, up = det_scales(panel)
    fars = readout_fars(panel)
    systems = []
    for entry in panel.entries:
        points = curve_points(entry)
        found = [(point_below(points, far), far) for far in fars]
        systems.append(
            {
                "cells": [readout(entry, point, far) for point, far in found],
                "y": [_height_of(point, up) for point, _ in found],
            }
        )
    return {
        "start": start_index(panel),
        "labels": [power(far) for far in fars],
        "x": [round(across(far), 1) for far in fars],
        "systems": systems,
    }


def det_figure(panel: Panel) -> Html:
    """Plot, legend and read-out of one panel."""
    plot = _plot(panel)
    fars = readout_fars(panel)
    slider = tag(
        "label",
        tag("span", "Read-out at FAR", class_="unseen"),
        tag(
            "input",
            type="range",
            min="0",
            max=len(fars) - 1,
            step="1",
            value=start_index(panel),
            class_="det-slider",
        ),
        class_="slider unseen needs-script",
    )
    body = tag("div", slider, plot, class_="det-plot")
    return tag(
        "figure",
        _legend(panel),
        tag("div", body, _readout_card(panel), class_="det-body"),
        class_="det" if len(panel.entries) <= 3 else "det many",
        data_panel=panel.index,
    )


def marker(colour: int, x: float, y: float, class_: str = "") -> Html:
    """The sign of a system at a place in a drawing."""
    shape = MARKERS[colour % len(MARKERS)]
    classes = f"marker c{colour % NUM_COLOURS} {class_}".strip()
    return tag("path", d=shape, transform=f"translate({x:.1f} {y:.1f})", class_=classes)


def swatch(colour: int) -> Html:
    """Line and sign of a system, beside its name."""
    line = tag("path", d="M1 8H31", class_=f"curve {curve_class(colour)}")
    drawn = joined([line, marker(colour, 16, 8)])
    return tag("svg", drawn, viewBox="0 0 32 16", class_="swatch", aria_hidden="true")


def curve_class(colour: int) -> str:
    """Classes of a system's line; beyond the colours, dashes tell systems apart."""
    dash = f" dash{colour // NUM_COLOURS % 3}" if colour >= NUM_COLOURS else ""
    return f"c{colour % NUM_COLOURS}{dash}"


def _plot(panel: Panel) -> Html:
    across, up = det_scales(panel)
    names = ", ".join(entry.label for entry in panel.entries)
    clip = f"clip{panel.index}"
    frame = {"x": LEFT, "y": TOP, "width": RIGHT - LEFT, "height": BOTTOM - TOP}
    defs = tag(
        "defs",
        tag("clipPath", tag("rect", **frame), id=clip),
        tag(
            "pattern",
            tag("path", d="M0 8L8 0", class_="hatch"),
            id=f"hatch{panel.index}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        ),
    )
    bands = joined(_band(entry, across, up) for entry in panel.entries)
    curves = joined(_curve(entry, across, up) for entry in panel.entries)
    diagonal = _diagonal(across, up)
    guide = _guide(panel, across, up)
    return tag(
        "svg",
        tag("title", f"DET curves on {panel.title}"),
        tag("desc", f"False reject rate over false accept rate, probit axes, of {names}"),
        defs,
        _axes(across, up),
        tag("g", _shade(panel, across), diagonal, bands, curves, clip_path=f"url(#{clip})"),
        tag("rect", class_="frame", **frame),
        guide,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        class_="plot",
        role="img",
    )


def _axes(across: Scale, up: Scale) -> Html:
    bottom = [
        (rate, power(rate)) for rate in across.ticks(RATES) if rate not in (0.002, 0.005, 0.02)
    ]
    left = [(rate, f"{100 * rate:.3g} %") for rate in up.ticks(RATES)]
    return joined(
        [
            bottom_axis(across, BOTTOM, bottom, TOP),
            left_axis(up, LEFT, left, RIGHT),
            text_at(LEFT - 62, TOP - 14, "False reject rate", class_="axis"),
            text_at(
                RIGHT, BOTTOM + 46, "False accept rate", class_="axis bottom", text_anchor="end"
            ),
        ]
    )


def _shade(panel: Panel, across: Scale) -> Html:
    """Mark where rates rest on too few false accepts, for each number of impostors."""
    parts = []
    sizes = sorted({entry.result.protocol.num_impostors for entry in panel.entries})
    for size in sizes:
        end = across.clamped(ENOUGH_FALSE_ACCEPTS / size)
        box = {"x": LEFT, "y": TOP, "width": f"{end - LEFT:.1f}", "height": BOTTOM - TOP}
        parts.append(tag("rect", class_="few", **box))
        parts.append(tag("rect", fill=f"url(#hatch{panel.index})", **box))
    parts.append(text_at(LEFT + 10, BOTTOM - 32, "fewer than 30", class_="few-label"))
    parts.append(text_at(LEFT + 10, BOTTOM - 12, "false accepts", class_="few-label"))
    return joined(parts)


def _diagonal(across: Scale, up: Scale) -> Html:
    low, high = max(across.low, up.low), min(across.high, up.high)
    if low >= high:
        return Html("")
    return line_at(across(low), up(low), across(high), up(high), "diagonal")


def _band(entry: Entry, across: Scale, up: Scale) -> Html:
    band = entry.result.det.band
    if band is None:
        return Html("")
    rows = [row for row in zip(band.far, band.low, band.high, strict=True) if 0.0 < row[0] < 1.0]
    upper = [(across(far), up.clamped(high)) for far, _, high in rows]
    lower = [(across(far), up.clamped(low)) for far, low, _ in reversed(rows)]
    shape = tag("path", d=path_data([*upper, *lower]), class_=f"band c{entry.colour % NUM_COLOURS}")
    return tag("g", shape, data_series=entry.colour)


def _curve(entry: Entry, across: Scale, up: Scale) -> Html:
    drawn = [p for p in curve_points(entry) if 0.0 < p.far < 1.0 and 0.0 < p.frr < 1.0]
    line = path_data([(across(point.far), up(point.frr)) for point in drawn])
    parts = [tag("path", d=line, class_=f"curve {curve_class(entry.colour)}")]
    for point in entry.result.metrics.tar:
        if point.tar is not None and point.far and 0.0 < point.tar < 1.0:
            place = across(point.far), up(1.0 - point.tar)
            parts.append(marker(entry.colour, *place, "hollow" if point.status != "ok" else ""))
    return tag("g", *parts, data_series=entry.colour)


def _guide(panel: Panel, across: Scale, up: Scale) -> Html:
    far = readout_fars(panel)[start_index(panel)]
    dots = []
    for entry in panel.entries:
        height = _height_of(point_below(curve_points(entry), far), up)
        dots.append(
            tag(
                "circle",
                cx="0",
                cy=-99 if height is None else height,
                r=4.5,
                class_=f"dot c{entry.colour % NUM_COLOURS}",
                data_series=entry.colour,
            )
        )
    line = line_at(0, TOP, 0, BOTTOM, "guide-line")
    return tag("g", line, *dots, class_="guide", transform=f"translate({across(far):.1f} 0)")


def _height_of(point: CurvePoint | None, up: Scale) -> float | None:
    if point is None or not 0.0 < point.frr < 1.0:
        return None
    return round(up.clamped(point.frr), 1)


def _interval_at(entry: Entry, far: float) -> tuple[float, float] | None:
    measured = entry.point_at(far)
    if measured is not None:
        return measured.interval
    band = entry.result.det.band
    if band is None:
        return None
    inside = [i for i, value in enumerate(band.far) if value <= far]
    return (1.0 - band.high[inside[-1]], 1.0 - band.low[inside[-1]]) if inside else None


def _legend(panel: Panel) -> Html:
    buttons = [
        tag(
            "button",
            swatch(entry.colour),
            name_of(entry.label),
            type="button",
            aria_pressed="true",
            data_toggle=entry.colour,
        )
        for entry in panel.entries
    ]
    return tag("div", *buttons, class_="legend", role="group", aria_label="Systems shown")


def _readout_card(panel: Panel) -> Html:
    far = readout_fars(panel)[start_index(panel)]
    rows = []
    for entry in panel.entries:
        point = point_below(curve_points(entry), far)
        tar, interval, accepts, threshold = readout(entry, point, far)
        name = tag("span", swatch(entry.colour), name_of(entry.label), class_="who")
        value = tag("span", tag("b", tar, class_="tar"), class_="value")
        details = tag(
            "span",
            tag("span", interval, class_="interval"),
            tag("span", accepts, class_="accepts"),
            tag("span", threshold, class_="threshold"),
            class_="details",
        )
        rows.append(tag("li", name, value, details, data_series=entry.colour))
    return tag(
        "div",
        tag("p", "TAR % at FAR ≤ ", tag("b", power(far), class_="at"), class_="readout-title"),
        tag("ul", *rows),
        tag("p", "Below each TAR: interval, false accepts (FA), threshold.", class_="hint"),
        class_="readout",
        aria_live="polite",
    )
