"""The tables of a report, for the page, Markdown, LaTeX and CSV alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from qmargin.evaluation.result import GroupAudit, GroupSpread, Measure, RunInfo, TarPoint
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS, rule_of_three, sufficiency
from qmargin.report.comparison import (
    PairedDifference,
    Repeats,
    difference_of_means,
    find_repeats,
    reading,
)
from qmargin.report.numbers import (
    MISSING,
    NOT_MEASURABLE,
    cleaned,
    count,
    number,
    power,
    probability,
    signed,
)
from qmargin.report.systems import Entry, Panel, margin_of
from qmargin.report.table import CellValue, Column, Number, Row, Table, markdown_text

CSV_COLUMNS = (
    *("protocol", "kind", "scoring", "system", "arm", "seed", "alpha", "scale", "margin_kind"),
    *("margin", "metric", "target", "value", "std", "low", "high", "far", "false_accepts"),
    *("allowed", "threshold", "status", "rule", "num_genuine", "num_impostors"),
)
FEW = f"few: fewer than {ENOUGH_FALSE_ACCEPTS} false accepts allowed."


def _percent(
    rate: float | None,
    interval: tuple[float, float] | None = None,
    digits: int = 2,
    flag: str = "",
) -> Number:
    """A rate in per cent."""
    ends = None if interval is None else (100.0 * interval[0], 100.0 * interval[1])
    return Number(None if rate is None else 100.0 * rate, digits, interval=ends, flag=flag)


def _tar(point: TarPoint | None, flag: str) -> CellValue:
    if point is None or point.tar is None:
        return None if point is None else NOT_MEASURABLE
    return _percent(point.tar, point.interval, flag=flag if point.status == "few" else "")


def tar_table(panel: Panel) -> Table:
    """TAR at each FAR."""
    columns = [Column(power(far), best="max", group=("TAR % at FAR",)) for far in panel.fars]
    rows = [
        (
            entry.label,
            *(
                _tar(point, "" if point is None else f"only {count(point.allowed)}")
                for point in map(entry.point_at, panel.fars)
            ),
        )
        for entry in panel.entries
    ]
    few = [p for e in panel.entries for p in e.result.measures.tar if p.status == "few"]
    flags = (f"Flags: the FAR allows so few false accepts, {ENOUGH_FALSE_ACCEPTS} are needed.",)
    return Table(
        "True accept rate (TAR) at each false accept rate (FAR)",
        (Column("System", "left"), *columns),
        tuple(rows),
        (rule_sentence(panel), *(flags if few else ())),
    )


def rule_sentence(panel: Panel) -> str:
    """Which rule chose the thresholds, and what the intervals are."""
    rules = " and ".join(cleaned(rule) for rule in panel.rules)
    words = f"Thresholds by the {rules} rule; best in bold"
    if len(panel.rules) > 1:
        words = f"Thresholds by the rules {rules}, which are not comparable; best in bold"
    interval = panel.first.protocol.interval
    if interval.method == "none":
        return f"{words}."
    return f"{words}; {100 * interval.level:g} % intervals by {cleaned(interval.method)}."


def other_table(panel: Panel) -> Table:
    """Measures without a target FAR: EER, costs, and what the protocol or a metric adds."""
    found = [entry.result.measures for entry in panel.entries]
    columns = [Column("EER %", best="min")]
    cells: list[list[CellValue]] = [[_percent(m.eer.value, m.eer.interval, 3) for m in found]]
    for prior in sorted({cost.p_target for m in found for cost in m.min_dcf}):
        costs = [next((c for c in m.min_dcf if c.p_target == prior), None) for m in found]
        columns.append(Column(f"minDCF, p = {prior:g}", best="min"))
        cells.append(
            [
                None if cost is None else Number(cost.value, 4, interval=cost.interval)
                for cost in costs
            ]
        )
    for title, values in (
        ("Cllr", [m.cllr.value for m in found]),
        ("minCllr", [m.min_cllr.value for m in found]),
    ):
        if any(value is not None for value in values):
            columns.append(Column(title, best="min"))
            cells.append([Number(value, 4) for value in values])
    extras = list(dict.fromkeys(name for m in found for name in m.extra))
    for name in extras:
        columns.append(Column(cleaned(name)))
        cells.append([_extra(m.extra.get(name)) for m in found])
    notes = {
        f"{cleaned(name)}: {cleaned(measure.note).rstrip('.')}."
        for m in found
        for name, measure in m.extra.items()
        if measure.note
    }
    return Table(
        "Measures without a target",
        (Column("System", "left"), *columns),
        tuple(
            (e.label, *row) for e, row in zip(panel.entries, zip(*cells, strict=True), strict=True)
        ),
        tuple(sorted(notes)),
    )


def _extra(measure: Measure | None) -> CellValue:
    if measure is None:
        return None
    return Number(measure.value, 5, deviation=measure.std, interval=measure.interval)


def threshold_table(panel: Panel) -> Table:
    """Every threshold with the FAR and the false accepts that it has."""
    heads = ("Target FAR", "Achieved FAR", "False accepts", "Threshold")
    rows: list[Row] = []
    for entry in panel.entries:
        for point in entry.result.measures.tar:
            achieved, accepts = NOT_MEASURABLE, MISSING
            if point.tar is not None and point.far is not None:
                achieved = power(point.far)
                accepts = f"{count(point.false_accepts)} of {count(point.allowed)}"
            cells = (power(point.far_target), achieved, accepts, number(point.threshold, 6))
            rows.append((entry.label, *cells, status_words(point.status, point.allowed)))
    columns = (Column("System", "left"), *map(Column, heads), Column("Enough data", "left"))
    return Table("", columns, tuple(rows))


def status_words(status: str, allowed: int) -> str:
    """How far a number can be trusted."""
    if status == "few":
        return f"only {count(allowed)} of {ENOUGH_FALSE_ACCEPTS}"
    return "enough" if status == "ok" else status


def sufficiency_table(panel: Panel) -> tuple[Table, list[int]]:
    """How many false accepts the impostors allow at each FAR, against the thirty needed."""
    sizes = sorted({entry.result.protocol.num_impostors for entry in panel.entries})
    found = [sufficiency(far, size) for size in sizes for far in panel.fars]
    fars = [far for _ in sizes for far in panel.fars]
    smallest = min(sizes)
    return Table(
        f"{' or '.join(map(count, sizes))} impostor trials: what each FAR can rest on",
        (Column("Target FAR", "left"), Column("False accepts allowed"), Column("Verdict", "left")),
        tuple(
            (power(far), one.allowed, status_words(one.status, one.allowed))
            for far, one in zip(fars, found, strict=True)
        ),
        (
            f"The smallest FAR that can be measured is {power(1.0 / smallest)}. If no impostor at "
            f"all is accepted, the FAR is below {power(rule_of_three(smallest))} with 95 % "
            "confidence, not zero.",
        ),
    ), [one.allowed for one in found]


# -- comparisons ----------------------------------------------------------------------------------


def difference_table(found: Sequence[PairedDifference], title: str, *, level: float) -> Table:
    """Paired differences in percentage points, with a column for the measure if they have several.

    Args:
        found: What to show.
        title: Of the table.
        level: Of the intervals.
    """
    has_measures = len({made.far for made in found}) > 1
    rows: list[Row] = []
    for made in found:
        low, high = (signed(100 * end) for end in made.interval)
        measure = "EER" if made.far is None else f"TAR at {power(made.far)}"
        rows.append(
            (
                *([measure] if has_measures else []),
                made.first,
                made.second,
                Number(100 * made.difference, signed=True),
                f"{low} to {high}",
                probability(made.adjusted),
                reading(made),
            )
        )
    columns = (
        *([Column("Measure", "left")] if has_measures else []),
        Column("First", "left"),
        Column("Second", "left"),
        *map(Column, ("Difference", "Interval", "p")),
        Column("Reading", "left"),
    )
    note = (
        f"Paired bootstrap over subjects, {100 * level:g} % intervals; p-values are two-sided and "
        "corrected for the number of pairs (Holm). The same subjects are drawn for both systems, "
        "so what they have in common cancels."
    )
    return Table(title, columns, tuple(rows), (note,))


def repeats_table(repeats: Repeats) -> Table:
    """Mean and standard deviation over the runs of each system."""
    columns = (
        Column("System", "left"),
        Column("Runs"),
        *(Column(power(far), best="max", group=("TAR % at FAR",)) for far in repeats.fars),
        Column("EER %", best="min"),
    )
    rows: list[Row] = [
        (name, len(entries), *(mean_cell(repeats.values(name, far)) for far in repeats.measures))
        for name, entries in repeats.systems.items()
    ]
    title = f"{repeats.title}: mean and standard deviation over runs"
    return Table(title, columns, tuple(rows), ("Best mean in bold.",))


def mean_cell(values: Sequence[float]) -> Number:
    """Mean and standard deviation in per cent."""
    if not values:
        return Number(None)
    deviation = 100.0 * statistics.stdev(values) if len(values) > 1 else None
    return Number(100.0 * statistics.fmean(values), deviation=deviation)


def mean_difference_table(repeats: Repeats, level: float) -> Table:
    """The best mean at each FAR minus the others."""
    rows: list[Row] = []
    for far in repeats.fars:
        best, *rivals = repeats.ranked(far) or [""]
        for rival in rivals:
            made = difference_of_means(repeats, best, rival, far, level=level)
            if made is not None:
                ends = f"{signed(100 * made.low)} to {signed(100 * made.high)}"
                difference = Number(100 * made.difference, signed=True)
                p_value = probability(made.p_value)
                rows.append((f"TAR at {power(far)}", best, rival, difference, ends, p_value))
    columns = (
        *(Column(title, "left") for title in ("Measure", "Best", "Other")),
        *map(Column, ("Difference", "Interval", "p")),
    )
    note = (
        f"Paired bootstrap over subjects of the means, {100 * level:g} % intervals; p-values are "
        "two-sided and not corrected for their number. Intervals cover subjects; the standard "
        "deviation covers seeds."
    )
    return Table("Best mean minus the others, in percentage points", columns, tuple(rows), (note,))


# -- groups ---------------------------------------------------------------------------------------


def group_table(audit: GroupAudit) -> Table:
    """Error rates of every group at the common threshold."""
    words = {"ok": "enough", "few": "few errors"}
    heads = ("FMR", "FNMR", "Impostor", "Genuine")
    return Table(
        f"At the common threshold {number(audit.threshold)}, set for FAR {power(audit.far_target)}",
        (Column("Group", "left"), *map(Column, heads), Column("Enough data", "left")),
        tuple(
            (
                row.group,
                *(MISSING if rate is None else power(rate) for rate in (row.fmr, row.fnmr)),
                row.num_impostors,
                row.num_genuine,
                words.get(row.status, row.status),
            )
            for row in audit.rows
        ),
    )


def spread_table(audit: GroupAudit) -> Table:
    """How far the rates differ between groups."""
    rows = [("FMR", audit.fmr, "not defined")]
    if audit.fnmr is not None:
        rows.append(("FNMR", audit.fnmr, "not defined"))
    if audit.ineq is not None or audit.garbe is not None:
        both = GroupSpread(None, audit.ineq, audit.garbe)
        rows.append(("Both, weighed evenly", both, MISSING))
    heads = ("Largest over geometric mean", "INEQ", "GARBE")
    return Table(
        "",
        (Column("Spread between groups", "left"), *map(Column, heads)),
        tuple(
            (
                name,
                *(
                    missing if value is None else number(value, 3)
                    for value in (spread.max_over_geomean, spread.ineq, spread.garbe)
                ),
            )
            for name, spread, missing in rows
        ),
        () if audit.note is None else (audit.note,),
    )


# -- files ----------------------------------------------------------------------------------------


def markdown_tables(panels: Sequence[Panel]) -> str:
    """Tables of each panel, and means over runs."""
    parts = []
    for panel in panels:
        parts.append(f"## {markdown_text(panel.title)}\n")
        parts += [table.to_markdown(level=3) for table in (tar_table(panel), other_table(panel))]
    parts += [repeats_table(found).to_markdown() for found in find_repeats(panels)]
    return "\n".join(parts)


def latex_tables(panels: Sequence[Panel]) -> str:
    """One table in the layout of the paper, and means over runs."""
    tables = [paper_layout(panels), *map(repeats_table, find_repeats(panels))]
    return "\n".join(table.to_latex() for table in tables)


def paper_layout(panels: Sequence[Panel]) -> Table:
    """A row for each system, its parameters, and a group of columns for each protocol."""
    names = list(dict.fromkeys(entry.label for panel in panels for entry in panel.entries))
    entries = {name: [_entry(panel, name) for panel in panels] for name in names}
    runs = {name: _run(found) for name, found in entries.items()}
    columns = [Column("Loss" if any(runs.values()) else "Method", "left")]
    if any(runs.values()):
        group = ("Parameters",)
        columns += [
            Column("\u03b1", group=group),
            Column("s", group=group, latex="$s$"),
            Column("m", group=group, latex="$m$"),
        ]
    columns += [
        Column(power(far), best="max", group=(cleaned(panel.title),))
        for panel in panels
        for far in panel.fars
    ]
    rows: list[Row] = []
    for name in names:
        tars = (
            _tar(None if entry is None else entry.point_at(far), "few")
            for panel, entry in zip(panels, entries[name], strict=True)
            for far in panel.fars
        )
        cells = ("n.m." if cell == NOT_MEASURABLE else _bare(cell) for cell in tars)
        rows.append((name, *(_parameters(runs[name]) if any(runs.values()) else ()), *cells))
    points = [p for panel in panels for e in panel.entries for p in e.result.measures.tar]
    rules = sorted({cleaned(rule) for panel in panels for rule in panel.rules})
    notes = [f"Thresholds by the {' and '.join(rules)} rule; best in bold."]
    if any(point.status == "few" for point in points):
        notes.append(FEW)
    if any(point.tar is None for point in points):
        notes.append("n.m.: not measurable with these trials.")
    title, label = "TAR (%) at each FAR", "qmargin-report"
    return Table(title, tuple(columns), tuple(rows), tuple(notes), label)


def _bare(cell: CellValue) -> CellValue:
    """A number without its interval, which a table of a paper has no room for."""
    if isinstance(cell, Number):
        return Number(cell.value, cell.digits, flag=cell.flag)
    return cell


def _entry(panel: Panel, name: str) -> Entry | None:
    return next((entry for entry in panel.entries if entry.label == name), None)


def _run(entries: Iterable[Entry | None]) -> RunInfo | None:
    """The run of a system, where all of its results have the same loss."""
    runs = [entry.result.run for entry in entries if entry is not None]
    losses = {(run.alpha, run.scale, run.margins) for run in runs if run is not None}
    return runs[0] if len(losses) == 1 else None


def _parameters(run: RunInfo | None) -> tuple[CellValue, ...]:
    if run is None:
        return (None, None, None)
    numbers = (None if value is None else f"{value:g}" for value in (run.alpha, run.scale))
    return (*numbers, margin_of(run)[1] or None)


def csv_table(panels: Sequence[Panel]) -> str:
    """Every number in a line of its own, unrounded."""
    rows = [row for panel in panels for entry in panel.entries for row in _csv_rows(panel, entry)]
    return Table("", tuple(map(Column, CSV_COLUMNS)), tuple(rows)).to_csv()


def _csv_rows(panel: Panel, entry: Entry) -> Iterable[Row]:
    protocol, run, measures = entry.result.protocol, entry.result.run, entry.result.measures
    settings: tuple[CellValue, ...] = ("", None, None, None, "", "")
    if run is not None:
        numbers = (Number(run.seed), Number(run.alpha), Number(run.scale))
        settings = (run.arm, *numbers, *margin_of(run))
    start = (panel.title, protocol.kind or "", protocol.scoring or "", entry.label, *settings)
    end = (protocol.rule, Number(protocol.num_genuine), Number(protocol.num_impostors))

    def row(
        name: str,
        value: float | None,
        interval: tuple[float, float] | None = None,
        *,
        target: float | None = None,
        std: float | None = None,
        point: TarPoint | None = None,
        threshold: float | None = None,
    ) -> Row:
        low, high = interval or (None, None)
        counts: tuple[CellValue, ...] = (None, None, None)
        if point is not None:
            accepts = None if point.tar is None else point.false_accepts
            counts = (Number(point.far), Number(accepts), Number(point.allowed))
        values = map(Number, (target, value, std, low, high))
        status = "" if point is None else point.status
        return (*start, name, *values, *counts, Number(threshold), status, *end)

    for point in measures.tar:
        limit, target = point.threshold, point.far_target
        yield row("tar", point.tar, point.interval, target=target, point=point, threshold=limit)
    eer = measures.eer
    yield row("eer", eer.value, eer.interval, threshold=eer.threshold)
    for cost in measures.min_dcf:
        limit = cost.threshold
        yield row("min_dcf", cost.value, cost.interval, target=cost.p_target, threshold=limit)
    yield row("cllr", measures.cllr.value)
    yield row("min_cllr", measures.min_cllr.value)
    for name, extra in measures.extra.items():
        yield row(name, extra.value, extra.interval, std=extra.std)
