"""Figures of a sweep: how a measure depends on the axes, and what the effective margin explains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qmargin.report.figures import LinePoint, has_matplotlib, write_lines
from qmargin.report.numbers import power
from qmargin.sweep.axes import EFFECTIVE
from qmargin.sweep.summary import PointSummary, Summary
from qmargin.sweep.validation import far_of

STEMS = ("sensitivity", "effective-margin")
SIGNS = {"loss.alpha": "\u03b1", "loss.scale": "s", "loss.margin": "m", EFFECTIVE: "m_eff"}
LABELS = {"loss.scale": "Scale", "loss.margin": "Margin", "loss.alpha": "\u03b1"}
MARGIN, GAP = "Margin m", "Effective margin"
REACHABLE = 2.0  # cosines differ by at most this
FIRST = ("loss.scale", "loss.margin", EFFECTIVE, "loss.alpha")  # what a figure is drawn over


def write_figures(summary: Summary, folder: Path) -> list[Path]:
    """``sensitivity`` and ``effective-margin`` as SVG and PDF, where there is enough to draw."""
    if not has_matplotlib():
        return []
    written: list[Path] = []
    height = axis_name(summary.measure)
    key = main_axis(summary)
    if key is not None:
        lines = _lines(summary, lambda row: _float(row.point[key]), _others(summary, {key}))
        name = GAP if key == EFFECTIVE else LABELS.get(key, key)
        written += write_lines(folder / STEMS[0], {name: lines}, height)
    panels = margin_panels(summary)
    if panels:
        limits = {GAP: REACHABLE}
        written += write_lines(folder / STEMS[1], panels, height, beyond=limits)
    return written


def margin_panels(summary: Summary) -> dict[str, dict[str, list[LinePoint]]]:
    """The measure over m and over m_eff, a line for each alpha and scale.

    Where the effective margin is what matters, the lines of the second panel lie on each other. It
    takes two lines and two gaps to see that; with fewer there is nothing to draw.
    """
    rows = [row for row in summary.rows if row.gap is not None]
    known = Summary(tuple(rows), summary.measure)
    keys = {"loss.margin", EFFECTIVE}
    names = {"loss.alpha", "loss.scale", *_others(summary, keys)}

    def label(row: PointSummary) -> str:
        others = [f"{key} {row.point[key]}" for key in sorted(names) if key not in SIGNS]
        return ", ".join(
            [f"\u03b1 = {row.recipe.loss.alpha:g}, s = {row.recipe.loss.scale:g}", *others]
        )

    by_margin = _grouped(known, lambda row: row.recipe.loss.margin, label)
    by_gap = _grouped(known, lambda row: row.gap, label)
    gaps = {f"{row.gap:.6g}" for row in rows}
    if min(len(by_margin), len(gaps)) < 2:
        return {}
    return {MARGIN: by_margin, GAP: by_gap}


def main_axis(summary: Summary) -> str | None:
    """The axis to draw over: one with several numbers, of scale, margin and alpha the first."""
    keys = list(summary.rows[0].point) if summary.rows else []
    wanted = [key for key in FIRST if key in keys] + [key for key in keys if key not in FIRST]
    for key in wanted:
        values = {_float(row.point[key]) for row in summary.rows}
        if None not in values and len(values) > 1:
            return key
    return None


def axis_name(measure: str) -> str:
    """A measure as the title of an axis."""
    far = far_of(measure)
    return "EER %" if far is None else f"TAR % at FAR {power(far)}"


def _others(summary: Summary, keys: set[str]) -> list[str]:
    """The other axes that have more than one value."""
    found = list(summary.rows[0].point) if summary.rows else []
    return [
        key
        for key in found
        if key not in keys and len({row.point[key] for row in summary.rows}) > 1
    ]


def _lines(
    summary: Summary, place: Callable[[PointSummary], float | None], keys: list[str]
) -> dict[str, list[LinePoint]]:
    def label(row: PointSummary) -> str:
        texts = [f"{SIGNS.get(key, key)} = {row.point[key]}" for key in keys]
        return ", ".join(texts) or summary.measure

    return _grouped(summary, place, label)


def _grouped(
    summary: Summary,
    place: Callable[[PointSummary], float | None],
    label: Callable[[PointSummary], str],
) -> dict[str, list[LinePoint]]:
    lines: dict[str, list[LinePoint]] = {}
    for row in summary.rows:
        spread, across = row.spread(summary.measure), place(row)
        if spread is None or across is None:
            continue
        deviation = None if spread.deviation is None else 100.0 * spread.deviation
        lines.setdefault(label(row), []).append((across, 100.0 * spread.mean, deviation))
    return lines


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
