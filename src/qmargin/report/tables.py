"""The tables of a report, for the page, Markdown, LaTeX and CSV alike."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from qmargin.evaluation.result import GroupAudit, GroupSpread, Measures, RunInfo, TarPoint
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS, rule_of_three, sufficiency
from qmargin.report.numbers import (
    MISSING,
    NOT_MEASURABLE,
    cleaned,
    count,
    number,
    probability,
    rate_text,
    signed_interval,
    spread_digits,
)
from qmargin.report.systems import (
    POWER,
    Entry,
    PairedDifference,
    Panel,
    Repeats,
    margin_of,
    seconds_to,
)
from qmargin.report.table import CellValue, Column, Number, Row, Table, csv_text, markdown_text
from qmargin.report.verdicts import ONE_RUN

BOLD = "the best is bold if it is ahead of all others by more than chance"
CSV_COLUMNS = (
    *("protocol", "kind", "scoring", "system", "arm", "seed", "alpha", "scale", "margin_kind"),
    *("margin", "metric", "target", "value", "std", "low", "high", "far", "false_accepts"),
    *("allowed", "threshold", "status", "rule", "num_genuine", "num_impostors"),
)


def _columns(*titles: str, left: Sequence[str]) -> tuple[Column, ...]:
    """Columns of numbers, or of words where they are named in ``left``."""
    return tuple(Column(title, "left" if title in left else "right") for title in titles)


def _tar_columns(found: Panel | Repeats) -> list[Column]:
    group = ("TAR % at FAR",)
    return [Column(rate_text(far), best=_best(found, far), group=group) for far in found.fars]


def _best(found: Panel | Repeats, far: float | None) -> Literal["max", "min", ""]:
    """Which number of a column is bold: the best, unless its lead is within chance."""
    if not found.has_winner(far):
        return ""
    return "min" if far is None else "max"


def _percent(
    rate: float, interval: tuple[float, float] | None, digits: int = 2, flag: str = ""
) -> Number:
    ends = None if interval is None else (100.0 * interval[0], 100.0 * interval[1])
    return Number(100.0 * rate, digits, interval=ends, flag=flag)


def tar_table(panel: Panel) -> Table:
    """TAR at each FAR."""

    def cell(point: TarPoint | None) -> CellValue:
        if point is None or point.tar is None:
            return None if point is None else NOT_MEASURABLE
        flag = f"only {count(point.allowed)}" if point.status == "few" else ""
        return _percent(point.tar, point.interval, digits[point.far_target], flag)

    digits = {
        far: spread_digits(100.0 * tar for e in panel.entries if (tar := e.observed(far)))
        for far in panel.fars
    }

    rules, interval = " and ".join(panel.rules), panel.entries[0].result.protocol.interval
    note = f"Thresholds by the {rules} rule; {BOLD}"
    if len(panel.rules) > 1:
        note = f"Thresholds by the rules {rules}, which are not comparable; {BOLD}"
    if interval.method != "none":
        note += f"; {100 * interval.level:g} % intervals by {cleaned(interval.method)}"
    notes = [f"{note}."]
    if any(p.status == "few" for e in panel.entries for p in e.result.measures.tar):
        notes.append(
            f"Flags: false accepts that the FAR allows; {ENOUGH_FALSE_ACCEPTS} are needed."
        )
    return Table(
        "True accept rate (TAR) at each false accept rate (FAR)",
        (Column("System", "left"), *_tar_columns(panel)),
        tuple((e.label, *map(cell, map(e.point_at, panel.fars))) for e in panel.entries),
        tuple(notes),
    )


def other_table(panel: Panel) -> Table:
    """Measures without a target FAR: EER, costs, and those of the protocol or of metrics."""
    found = [entry.result.measures for entry in panel.entries]
    digits = spread_digits(100.0 * m.eer.value for m in found)
    eers: list[CellValue] = [_percent(m.eer.value, m.eer.interval, digits) for m in found]
    columns = [(Column("EER %", best=_best(panel, None)), eers)]
    for prior in sorted({cost.p_target for m in found for cost in m.min_dcf}):
        costs = [{cost.p_target: cost for cost in m.min_dcf}.get(prior) for m in found]
        cells: list[CellValue] = [
            None if c is None else Number(c.value, 4, interval=c.interval) for c in costs
        ]
        columns.append((Column(f"minDCF, p = {prior:g}"), cells))
    for title, values in (
        ("Cllr", [m.cllr.value for m in found]),
        ("minCllr", [m.min_cllr.value for m in found]),
    ):
        if any(value is not None for value in values):
            columns.append((Column(title), [Number(value, 4) for value in values]))
    notes = set()
    for name in dict.fromkeys(name for m in found for name in m.extra):
        extras = [m.extra.get(name) for m in found]
        cells = [None if e is None else Number(e.value, 5, e.std, e.interval) for e in extras]
        columns.append((Column(cleaned(name)), cells))
        texts = {cleaned(one.note).rstrip(".") for one in extras if one is not None and one.note}
        notes |= {f"{cleaned(name)}: {text}." for text in texts}
    rows = zip(panel.entries, zip(*(cells for _, cells in columns), strict=True), strict=True)
    return Table(
        "Measures without a target",
        (Column("System", "left"), *(column for column, _ in columns)),
        tuple((entry.label, *row) for entry, row in rows),
        tuple(sorted(notes)),
    )


def threshold_table(panel: Panel) -> Table:
    """Every threshold with the FAR and the false accepts that it has."""
    rows: list[Row] = []
    for entry in panel.entries:
        for point in entry.result.measures.tar:
            achieved, accepts = NOT_MEASURABLE, MISSING
            if point.tar is not None and point.far is not None:
                achieved = rate_text(point.far)
                accepts = f"{count(point.false_accepts)} of {count(point.allowed)}"
            cells = (
                rate_text(point.far_target),
                achieved,
                accepts,
                entry.score_text(point.threshold),
            )
            rows.append((entry.label, *cells, _status_words(point.status, point.allowed)))
    heads = ("System", "Target FAR", "Achieved FAR", "False accepts", "Threshold", "Enough data")
    return Table("", _columns(*heads, left=("System", "Enough data")), tuple(rows))


def _status_words(status: str, allowed: int) -> str:
    """Status of a number: whether it rests on enough false accepts."""
    if status == "few":
        return f"only {count(allowed)} of {ENOUGH_FALSE_ACCEPTS}"
    return "enough" if status == "ok" else status


def sufficiency_table(panel: Panel) -> tuple[Table, list[int]]:
    """How many false accepts the impostors allow at each FAR, against the thirty needed."""
    sizes = sorted({entry.result.protocol.num_impostors for entry in panel.entries})
    found = [(far, sufficiency(far, size)) for size in sizes for far in panel.fars]
    note = (
        f"The smallest FAR that can be measured is {rate_text(1.0 / sizes[0])}. If no impostor "
        f"is accepted, the FAR is below {rate_text(rule_of_three(sizes[0]))} with 95 % "
        "confidence, not zero."
    )
    table = Table(
        f"{' or '.join(map(count, sizes))} impostor trials: false accepts that each FAR allows",
        _columns("Target FAR", "False accepts allowed", "Verdict", left=("Target FAR", "Verdict")),
        tuple((rate_text(far), s.allowed, _status_words(s.status, s.allowed)) for far, s in found),
        (note,),
    )
    return table, [enough.allowed for _, enough in found]


# -- comparisons ----------------------------------------------------------------------------------


def difference_table(found: Sequence[PairedDifference], title: str, *, level: float) -> Table:
    """Differences in percentage points, with a column for the measure if it differs."""
    has_measures = len({made.far for made in found}) > 1
    rows: list[Row] = []
    for made in found:
        measure = "EER" if made.far is None else f"TAR at {rate_text(made.far)}"
        difference = Number(100 * made.difference, signed=True)
        p_value = probability(made.adjusted) + " (alone)" * made.is_primary
        shown = (Number(100 * made.detectable, 2), p_value, made.reading)
        ends = signed_interval(*made.interval)
        rows.append((*[measure] * has_measures, made.first, made.second, difference, ends, *shown))
    words = (*["Measure"] * has_measures, "First", "Second")
    heads = (*words, "Difference", "Interval", "Detectable", "p", "Reading")
    return Table(
        title, _columns(*heads, left=(*words, "Reading")), tuple(rows), (_how(found, level),)
    )


def _how(found: Sequence[PairedDifference], level: float) -> str:
    """How differences were tested."""
    count = max((made.num_compared for made in found), default=1)
    corrected = f" and corrected for all {count} comparisons (Holm)" if count > 1 else ""
    covered = {made.num_runs > 1 for made in found}
    covers = "training seeds and test identities" if covered == {True} else "test identities"
    if covered == {False}:
        covers += f"; {ONE_RUN}"
    elif len(covered) > 1:
        covers += ", and training seeds where both have several"
    alone = ", except the one that was fixed beforehand" if any(m.is_primary for m in found) else ""
    return (
        f"{100 * level:g} % intervals of differences of mean logits, written as points, cover "
        f"{covers}. p-values are two-sided{corrected}"
        f"{alone}. Detectable is the difference that would have been shown with {100 * POWER:g} % "
        "power."
    )


def repeats_table(repeats: Repeats) -> Table:
    """Mean and standard deviation over the runs of each system."""

    def cell(name: str, far: float | None) -> Number:
        values = [100.0 * value for value in repeats.values(name, far)]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Number(statistics.fmean(values) if values else None, digits[far], deviation)

    digits = {
        far: spread_digits(100.0 * v for name in repeats.systems for v in repeats.values(name, far))
        for far in repeats.measures
    }

    def seconds(runs: Sequence[Entry]) -> Number:
        known = [run.train_seconds for e in runs if (run := e.result.run) and run.train_seconds]
        mean = statistics.fmean(known) if known else None
        return Number(mean, 1 if mean is not None and mean < 100.0 else 0)

    times = {name: seconds(runs) for name, runs in repeats.systems.items()}
    has_times = any(time.value is not None for time in times.values())
    columns = (
        *(Column("System", "left"), Column("Runs")),
        *(*_tar_columns(repeats), Column("EER %", best=_best(repeats, None))),
        *[Column("Training, s")] * has_times,
    )
    rows: list[Row] = [
        (
            name,
            len(runs),
            *(cell(name, far) for far in repeats.measures),
            *[times[name]] * has_times,
        )
        for name, runs in repeats.systems.items()
    ]
    title = f"{repeats.title}: mean and standard deviation over runs"
    return Table(title, columns, tuple(rows), (f"{BOLD.capitalize()}.",))


def mean_difference_table(repeats: Repeats) -> Table:
    """The best mean by each measure minus the others."""
    found = []
    for far in repeats.measures:
        best, *rivals = repeats.ranked(far) or [""]
        found += [made for name in rivals if (made := repeats.difference(best, name, far))]
    title = "Best mean minus the others, in percentage points"
    return difference_table(found, title, level=repeats.level)


def cost_table(entries: Sequence[Entry]) -> Table | None:
    """Time and memory of training runs; None where no run knows either."""
    runs = [(entry.label, entry.result.run) for entry in entries if entry.result.run is not None]
    if not any(run.train_seconds or run.peak_bytes for _, run in runs):
        return None
    rows: list[Row] = []
    for label, run in runs:
        seconds, peak = run.train_seconds, run.peak_bytes
        step = 1000.0 * seconds / run.steps if seconds and run.steps else None
        gib = Number(None if peak is None else peak / 2**30)
        rows.append((label, Number(seconds, 1), Number(step, 1), gib, run.device))
    heads = ("System", "Training, s", "Per step, ms", "Peak memory, GiB", "Device")
    note = (
        "Time includes reading data, saving, and waiting for other programs on the "
        "machine: the runs of an experiment run side by side. Peak memory is what the training "
        "allocated on a GPU; on a CPU it is that of the whole process. Resumed runs have no time."
    )
    return Table("", _columns(*heads, left=("System", "Device")), tuple(rows), (note,))


def time_table(systems: Mapping[str, Sequence[Entry]], far: float) -> Table | None:
    """Training seconds to the largest TAR that every run reached; None without measured runs."""
    found = {
        name: [points for entry in entries if (points := entry.progress(far))]
        for name, entries in systems.items()
    }
    found = {name: runs for name, runs in found.items() if runs}
    if not found:
        return None
    common = min(max(tar for _, tar in points) for runs in found.values() for points in runs)
    rows: list[Row] = []
    for name, runs in found.items():
        seconds = [s for points in runs if (s := seconds_to(points, common)) is not None]
        deviation = statistics.stdev(seconds) if len(seconds) > 1 else None
        last = statistics.fmean(points[-1][0] for points in runs)
        rows.append(
            (name, len(runs), Number(statistics.fmean(seconds), 1, deviation), Number(last, 1))
        )
    heads = ("System", "Runs", f"To TAR {100 * common:.2f} %, s", "Whole training, s")
    note = (
        f"Training time until TAR at FAR {rate_text(far)} reached the largest value that every run "
        "reached, interpolated between the measured epochs: mean and standard deviation over "
        "runs. Start and evaluation are not counted. Runs that share a device slow each other."
    )
    return Table("", _columns(*heads, left=("System",)), tuple(rows), (note,))


# -- groups ---------------------------------------------------------------------------------------


def group_table(audit: GroupAudit) -> Table:
    """Error rates of every group at the common threshold."""
    words = {"ok": "enough", "few": "few errors"}
    rows: list[Row] = []
    for row in audit.rows:
        rates = [MISSING if rate is None else rate_text(rate) for rate in (row.fmr, row.fnmr)]
        status = words.get(row.status, row.status)
        rows.append((row.group, *rates, row.num_impostors, row.num_genuine, status))
    heads = ("Group", "FMR", "FNMR", "Impostor", "Genuine", "Enough data")
    return Table(
        f"At the common threshold {number(audit.threshold)}, set for FAR "
        f"{rate_text(audit.far_target)}",
        _columns(*heads, left=("Group", "Enough data")),
        tuple(rows),
    )


def spread_table(audit: GroupAudit) -> Table | None:
    """How far the rates differ between groups; None where no such number is defined."""
    spreads = (audit.fmr, audit.fnmr or GroupSpread(None, None, None))
    numbers = (value for one in spreads for value in vars(one).values())
    if all(value is None for value in (audit.ineq, audit.garbe, *numbers)):
        return None
    rows = [("FMR", audit.fmr, "not defined")]
    if audit.fnmr is not None:
        rows.append(("FNMR", audit.fnmr, "not defined"))
    if audit.ineq is not None or audit.garbe is not None:
        rows.append(("Both, weighed evenly", GroupSpread(None, audit.ineq, audit.garbe), MISSING))
    first = "Spread between groups"
    cells: list[Row] = []
    for name, spread, missing in rows:
        values = (spread.max_over_geomean, spread.ineq, spread.garbe)
        cells.append((name, *(missing if v is None else number(v, 3) for v in values)))
    columns = _columns(first, "Largest over geometric mean", "INEQ", "GARBE", left=(first,))
    return Table("", columns, tuple(cells), () if audit.note is None else (audit.note,))


# -- files ----------------------------------------------------------------------------------------


def markdown_tables(panels: Sequence[Panel], repeats: Sequence[Repeats] = ()) -> str:
    """Tables of each panel, and means over runs with their differences."""
    parts = []
    for panel in panels:
        parts.append(f"## {markdown_text(panel.title)}\n")
        parts += [table.to_markdown(level=3) for table in (tar_table(panel), other_table(panel))]
    for found in (each for each in repeats if each.has_seeds):
        parts += [repeats_table(found).to_markdown()]
        if found.differences:
            parts += [mean_difference_table(found).to_markdown(level=3)]
    return "\n".join(parts)


def latex_tables(panels: Sequence[Panel], repeats: Sequence[Repeats] = ()) -> str:
    """One table in the layout of the paper, and means over runs."""
    tables = [paper_layout(panels), *(repeats_table(each) for each in repeats if each.has_seeds)]
    return "\n".join(table.to_latex() for table in tables)


def paper_layout(panels: Sequence[Panel]) -> Table:
    """A row for each system, its parameters, and a group of columns for each protocol."""
    names = dict.fromkeys(entry.label for panel in panels for entry in panel.entries)
    systems = {
        name: [next((e for e in panel.entries if e.label == name), None) for panel in panels]
        for name in names
    }
    runs = {name: _common_run(entries) for name, entries in systems.items()}
    has_runs = any(runs.values())
    columns = [Column("Loss" if has_runs else "Method", "left")]
    if has_runs:
        columns += parameter_columns("Parameters")
    rows: list[Row] = []
    for panel in panels:
        group = (cleaned(panel.title),)
        for far in panel.fars:
            columns.append(Column(rate_text(far), best=_best(panel, far), group=group))
    for name, entries in systems.items():
        points = [
            None if entry is None else entry.point_at(far)
            for panel, entry in zip(panels, entries, strict=True)
            for far in panel.fars
        ]
        parameters: Row = (None, None, None)
        if (run := runs[name]) is not None:
            numbers = (None if value is None else f"{value:g}" for value in (run.alpha, run.scale))
            parameters = (*numbers, margin_of(run)[1] or None)
        rows.append((name, *(parameters if has_runs else ()), *map(_bare, points)))
    found = [p for panel in panels for e in panel.entries for p in e.result.measures.tar]
    rules = sorted({rule for panel in panels for rule in panel.rules})
    notes = [f"Thresholds by the {' and '.join(rules)} rule; {BOLD}."]
    if any(point.status == "few" for point in found):
        notes.append(f"few: fewer than {ENOUGH_FALSE_ACCEPTS} false accepts allowed.")
    if any(point.tar is None for point in found):
        notes.append("n.m.: not measurable with these trials.")
    title, label = "TAR (%) at each FAR", "qmargin-report"
    return Table(title, tuple(columns), tuple(rows), tuple(notes), label)


def parameter_columns(*group: str) -> list[Column]:
    """Columns of the order, the scale and the margin of a loss."""
    columns = {"\u03b1": "", "s": "$s$", "m": "$m$"}
    return [Column(title, group=group, latex=latex) for title, latex in columns.items()]


def _bare(point: TarPoint | None) -> CellValue:
    """A TAR without its interval, which is too wide for a table of a paper."""
    if point is None or point.tar is None:
        return None if point is None else "n.m."
    return Number(100.0 * point.tar, flag="few" if point.status == "few" else "")


def _common_run(entries: Sequence[Entry | None]) -> RunInfo | None:
    """The run of a system, where all of its results have the same loss."""
    runs = [entry.result.run for entry in entries if entry is not None]
    losses = {(run.alpha, run.scale, run.margins) for run in runs if run is not None}
    return runs[0] if len(losses) == 1 else None


def csv_table(panels: Sequence[Panel]) -> str:
    """One line per number, unrounded."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for entry, title in ((entry, panel.title) for panel in panels for entry in panel.entries):
        common = {**vars(entry.result.protocol), "protocol": title, "system": entry.label}
        if (run := entry.result.run) is not None:
            kinds, margins = margin_of(run)
            common |= {**vars(run), "margin_kind": kinds, "margin": margins}
        for measure in _csv_measures(entry.result.measures):
            low, high = measure.get("interval") or (None, None)
            row = {**common, **measure, "low": low, "high": high}
            texts = {key: csv_text(value) for key, value in row.items() if isinstance(value, str)}
            writer.writerow(row | texts)
    return buffer.getvalue()


def _csv_measures(measures: Measures) -> Iterator[dict[str, Any]]:
    """Values by the names of their columns."""
    for point in measures.tar:
        accepts = None if point.tar is None else point.false_accepts
        target = {"target": point.far_target, "value": point.tar, "false_accepts": accepts}
        yield {"metric": "tar", **vars(point), **target}
    yield {"metric": "eer", **vars(measures.eer)}
    for cost in measures.min_dcf:
        yield {"metric": "min_dcf", "target": cost.p_target, **vars(cost)}
    single = [("cllr", measures.cllr), ("min_cllr", measures.min_cllr), *measures.extra.items()]
    for name, measure in single:
        yield {"metric": name, **vars(measure)}
