"""The table of operating points: best in bold, flags where the trials are too few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qmargin.report.det import swatch
from qmargin.report.layout import data_table, scrolling
from qmargin.report.markup import Html, cleaned, joined, name_of, tag
from qmargin.report.numbers import (
    MISSING,
    NOT_MEASURABLE,
    between,
    count,
    number,
    percent,
    percent_interval,
    power,
)
from qmargin.report.systems import Panel
from qmargin.report.verdict import status_badge


@dataclass(frozen=True)
class Cell:
    """A number as text, its interval, and what there is to say about it."""

    text: str
    interval: str = ""
    is_best: bool = False
    flag: str = ""


@dataclass(frozen=True)
class Column:
    """A heading and a cell for each system."""

    heading: str
    cells: tuple[Cell, ...]


def tar_columns(panel: Panel) -> list[Column]:
    """TAR in per cent at each target FAR."""
    return [Column(power(far), _tar_cells(panel, far)) for far in panel.fars]


def other_columns(panel: Panel) -> list[Column]:
    """The measures that need no target."""
    columns = [Column("EER %", _eer_cells(panel))]
    priors = sorted({c.p_target for e in panel.entries for c in e.result.metrics.min_dcf})
    columns += [Column(f"minDCF, p = {prior:g}", _dcf_cells(panel, prior)) for prior in priors]
    metrics = [entry.result.metrics for entry in panel.entries]
    costs = {
        "Cllr": [found.cllr.value for found in metrics],
        "minCllr": [found.min_cllr.value for found in metrics],
    }
    for heading, values in costs.items():
        if any(value is not None for value in values):
            columns.append(Column(heading, _lowest(values)))
    return columns


def operating_block(panel: Panel) -> Html:
    """The table itself, its rule, and every threshold with its counts below."""
    targets = _table(panel, tar_columns(panel), rule_sentence(panel), "TAR % at FAR")
    others = _table(panel, other_columns(panel), "Measures without a target; best in bold", "")
    return joined([targets, _details(panel), others])


def _table(panel: Panel, columns: list[Column], caption: str, above: str) -> Html:
    head = [tag("th", "System", scope="col"), *[tag("th", c.heading, scope="col") for c in columns]]
    rows = []
    for index, entry in enumerate(panel.entries):
        name = tag("span", swatch(entry.colour), name_of(entry.label), class_="who")
        cells = [_cell(column.cells[index]) for column in columns]
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    titles = tag("thead", _spanning(above, len(columns)), tag("tr", *head))
    return scrolling(tag("table", titles, tag("tbody", *rows), class_="points"), caption)


def _spanning(text: str, width: int) -> Html:
    if not text:
        return Html("")
    over = tag("th", text, scope="colgroup", colspan=width, class_="over")
    return tag("tr", tag("td"), over)


def rule_sentence(panel: Panel, where: str = "below each number") -> str:
    """Which rule chose the thresholds, and what the small print under a number is."""
    rules = " and ".join(cleaned(rule) for rule in panel.rules)
    interval = panel.first.protocol.interval
    words = f"Thresholds by the {rules} rule; best in bold"
    if len(panel.rules) > 1:
        words = f"Thresholds by the rules {rules}, which are not comparable; best in bold"
    method = cleaned(interval.method)
    if method == "none":
        return f"{words}."
    return f"{words}; {where} its {100 * interval.level:g} % interval ({method})."


def _details(panel: Panel) -> Html:
    head = ("System", "Target FAR", "Achieved FAR", "False accepts", "Threshold", "<Enough data")
    rows = []
    for entry in panel.entries:
        for point in entry.result.metrics.tar:
            measured = point.tar is not None and point.far is not None
            cells = [
                power(point.far_target),
                power(point.far) if measured and point.far is not None else NOT_MEASURABLE,
                f"{count(point.false_accepts)} of {count(point.allowed)}" if measured else "-",
                number(point.threshold, 6),
            ]
            badge = tag("td", status_badge(point.status, point.allowed), class_="left")
            name = tag("th", name_of(entry.label), scope="row")
            rows.append(tag("tr", name, *[tag("td", cell) for cell in cells], badge))
    summary = tag("summary", "Thresholds, achieved FARs and false accepts")
    return tag("details", summary, data_table(head, rows))


def _cell(cell: Cell) -> Html:
    value = tag("b", cell.text) if cell.is_best else tag("span", cell.text)
    parts = [value]
    if cell.flag:
        parts.append(tag("span", cell.flag, class_="flag"))
    if cell.interval:
        parts.append(tag("small", cell.interval))
    kind = "none" if cell.text == NOT_MEASURABLE else "best" if cell.is_best else None
    return tag("td", *parts, class_=kind)


def _tar_cells(panel: Panel, far: float) -> tuple[Cell, ...]:
    best = panel.best_tar(far) if len(panel.entries) > 1 else None
    cells = []
    for entry in panel.entries:
        point = entry.point_at(far)
        if point is None:
            cells.append(Cell("-"))
        elif point.tar is None:
            cells.append(Cell(NOT_MEASURABLE))
        else:
            is_best = best is not None and percent(point.tar) == percent(best)
            flag = f"only {count(point.allowed)}" if point.status == "few" else ""
            cells.append(Cell(percent(point.tar), percent_interval(point.interval), is_best, flag))
    return tuple(cells)


def _eer_cells(panel: Panel) -> tuple[Cell, ...]:
    points = [entry.result.metrics.eer for entry in panel.entries]
    shown = [percent(point.value, 3) for point in points]
    intervals = [_percent3(point.interval) for point in points]
    return _marked([point.value for point in points], shown, intervals)


def _dcf_cells(panel: Panel, prior: float) -> tuple[Cell, ...]:
    found = [
        next((c for c in entry.result.metrics.min_dcf if c.p_target == prior), None)
        for entry in panel.entries
    ]
    values = [None if cost is None else cost.value for cost in found]
    intervals = [
        "" if cost is None or cost.interval is None else between(cost.interval, "{:.4f}")
        for cost in found
    ]
    return _marked(values, ["-" if v is None else f"{v:.4f}" for v in values], intervals)


def _lowest(values: Sequence[float | None]) -> tuple[Cell, ...]:
    return _marked(
        values,
        [MISSING if value is None else f"{value:.4f}" for value in values],
        [""] * len(values),
    )


def _marked(
    values: Sequence[float | None], texts: Sequence[str], intervals: Sequence[str]
) -> tuple[Cell, ...]:
    """Cells where the smallest value is best; equal texts are equally good."""
    known = [(value, text) for value, text in zip(values, texts, strict=True) if value is not None]
    best = min(known)[1] if len(known) > 1 else None
    return tuple(
        Cell(text, interval, text == best) for text, interval in zip(texts, intervals, strict=True)
    )


def _percent3(interval: tuple[float, float] | None) -> str:
    return between(interval, "{:.3f}", 100.0)
