"""Error rates of groups at one common threshold: a table that is its own figure."""

from __future__ import annotations

import math

from qmargin.evaluation.result import GroupAudit, GroupRow, GroupSpread
from qmargin.metrics.sufficiency import rule_of_three
from qmargin.report.det import swatch
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, cleaned, joined, name_of, tag, text_of
from qmargin.report.numbers import NOT_MEASURABLE, count, number, power
from qmargin.report.systems import NUM_COLOURS, Entry, Panel

HEAD = ("Group", "FMR", "", "FNMR", "", "Impostor", "Genuine", "<Enough data")


def groups_block(panel: Panel) -> Html:
    """The audit of each system that has one."""
    audits = [(entry, entry.result.groups) for entry in panel.entries]
    return joined(_audit(entry, audit) for entry, audit in audits if audit is not None)


def _audit(entry: Entry, audit: GroupAudit) -> Html:
    title = tag("h4", swatch(entry.colour), name_of(entry.label), class_="who")
    caption = (
        f"At the common threshold {number(audit.threshold)}, set for FAR {power(audit.far_target)}"
    )
    match_rates = [_rate(row.fmr, row.num_impostors) for row in audit.rows]
    miss_rates = [_rate(row.fnmr, row.num_genuine) for row in audit.rows]
    spans = _span([*match_rates, audit.far_target]), _span(miss_rates)
    rows = [_row(row, spans, audit.far_target, entry.colour) for row in audit.rows]
    notes = [_spreads(audit)]
    if audit.note:
        notes.append(tag("p", text_of(audit.note), class_="hint"))
    return joined([title, data_table(HEAD, rows, caption), *notes])


def _rate(rate: float | None, trials: int) -> float | None:
    if rate is None or trials < 1:
        return None
    return rate if rate > 0.0 else rule_of_three(trials)


def _span(rates: list[float | None]) -> tuple[float, float]:
    known = [rate for rate in rates if rate is not None and rate > 0.0] or [0.01]
    low, high = math.log10(min(known)) - 0.15, math.log10(max(known)) + 0.15
    return low, high


def _row(
    row: GroupRow,
    spans: tuple[tuple[float, float], tuple[float, float]],
    target: float,
    colour: int,
) -> Html:
    fmr, fnmr = spans
    kind = {"ok": "ok", "few": "warn"}.get(row.status, "bad")
    words = {"ok": "enough", "few": "few errors", NOT_MEASURABLE: NOT_MEASURABLE}
    badge = tag("span", words.get(row.status, cleaned(row.status)), class_=f"badge {kind}")
    return tag(
        "tr",
        tag("th", name_of(row.group), scope="row"),
        tag("td", _shown(row.fmr)),
        tag("td", _dot(row.fmr, row.num_impostors, fmr, target, colour), class_="wide"),
        tag("td", _shown(row.fnmr)),
        tag("td", _dot(row.fnmr, row.num_genuine, fnmr, None, colour), class_="wide"),
        tag("td", count(row.num_impostors)),
        tag("td", count(row.num_genuine)),
        tag("td", badge, class_="left"),
    )


def _shown(rate: float | None) -> str:
    return "-" if rate is None else power(rate)


def _dot(
    rate: float | None, trials: int, span: tuple[float, float], target: float | None, colour: int
) -> Html:
    def place(value: float) -> float:
        return 8.0 + 144.0 * (math.log10(value) - span[0]) / (span[1] - span[0])

    parts = [tag("path", d="M8 9H152", class_="track")]
    if target is not None:
        parts.append(tag("path", d=f"M{place(target):.1f} 1V17", class_="gauge-mark"))
    drawn = _rate(rate, trials)
    if drawn is not None:
        kind = f"marker c{colour % NUM_COLOURS}" + (" hollow" if rate == 0.0 else "")
        parts.append(tag("circle", cx=f"{place(drawn):.1f}", cy=9, r=4.5, class_=kind))
    return tag("svg", *parts, viewBox="0 0 160 18", class_="gauge-drawing", aria_hidden="true")


def _spreads(audit: GroupAudit) -> Html:
    head = ("Spread between groups", "Largest over geometric mean", "INEQ", "GARBE")
    rows = [_spread("FMR", audit.fmr)]
    if audit.fnmr is not None:
        rows.append(_spread("FNMR", audit.fnmr))
    if audit.ineq is not None or audit.garbe is not None:
        both = GroupSpread(None, audit.ineq, audit.garbe)
        rows.append(_spread("Both, weighed evenly", both, missing="-"))
    return data_table(head, rows)


def _spread(name: str, spread: GroupSpread, missing: str = "not defined") -> Html:
    values = (spread.max_over_geomean, spread.ineq, spread.garbe)
    shown = [missing if value is None else number(value, 3) for value in values]
    return tag("tr", tag("th", name, scope="row"), *[tag("td", text) for text in shown])
