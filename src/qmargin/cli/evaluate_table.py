"""The table that ``qmargin evaluate`` prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.tables import output_console, print_table
from qmargin.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from qmargin.evaluation.result import GroupAudit, Result, TarPoint

_COLUMNS = ("measure", "value", "interval", "FAR", "false accepts", "threshold", "enough data")


def print_result(result: Result, path: Path) -> None:
    """Print what was measured, how sure it is, and where it was written."""
    console = output_console()
    protocol, method = result.protocol, result.protocol.interval
    title = (
        f"{result.system.name} on {protocol.name}: {protocol.num_genuine:,} genuine and "
        f"{protocol.num_impostors:,} impostor trials, rule {protocol.rule}"
    )
    print_table(console, title, _COLUMNS, _rows(result))
    if result.groups is not None:
        _print_groups(console, result.groups)
    intervals = f"intervals: {method.method}"
    if method.num_replicates:
        intervals += f", {method.level:.0%}, {method.num_replicates:,} replicates"
    if method.note:
        intervals += f" ({method.note})"
    notes = "".join(f"note: {printable(note)}\n" for note in result.notes)
    sys.stdout.write(f"{printable(intervals)}\n{notes}{path}\n")


def _rows(result: Result) -> list[Sequence[str]]:
    from qmargin.report.numbers import digits_to_differ

    metrics, equal = result.metrics, result.metrics.eer
    limits = [point.threshold for point in metrics.tar] + [equal.threshold]
    limits += [cost.threshold for cost in metrics.min_dcf]
    digits = digits_to_differ(limits, 5)
    rows: list[Sequence[str]] = [_tar_row(point, digits) for point in metrics.tar]
    limit = _number(equal.threshold, digits)
    rows.append(["EER", _percent(equal.value), _ends(equal.interval), "", "", limit, ""])
    for cost in metrics.min_dcf:
        limit = _number(cost.threshold, digits)
        cells = [f"{cost.value:.4f}", _costs(cost.interval), "", "", limit, ""]
        rows.append([f"minDCF, p = {cost.p_target:g}", *cells])
    if metrics.min_cllr.value is None:  # it is finite wherever it is measured
        return rows
    for name, value in (("Cllr", metrics.cllr), ("min Cllr", metrics.min_cllr)):
        shown = "infinite" if value.value is None else f"{value.value:.4f}"
        rows.append([name, shown, "", "", "", "", ""])
    return rows


def _tar_row(point: TarPoint, digits: int) -> Sequence[str]:
    name = f"TAR at FAR {point.far_target:g}"
    if point.tar is None or point.far is None:
        return [name, "not measurable", "", "", "", "", "0 allowed"]
    allowed = f"{point.allowed:,} allowed"
    return [
        name,
        _percent(point.tar),
        _ends(point.interval),
        f"{point.far:.3g}",
        f"{point.false_accepts:,}",
        _number(point.threshold, digits),
        f"{point.status}: {allowed}",
    ]


def _print_groups(console: Console | None, groups: GroupAudit) -> None:
    rows = [
        [
            row.group,
            "-" if row.fmr is None else f"{row.fmr:.3g}",
            "-" if row.fnmr is None else f"{row.fnmr:.3g}",
            f"{row.num_impostors:,}",
            f"{row.num_genuine:,}",
            row.status,
        ]
        for row in groups.rows
    ]
    title = f"groups at the threshold of FAR {groups.far_target:g}"
    columns = ("group", "FMR", "FNMR", "impostor trials", "genuine trials", "enough data")
    print_table(console, title, columns, rows)
    spreads = [
        f"INEQ {_number(groups.ineq)}",
        f"GARBE {_number(groups.garbe)}",
        f"FMR largest over geometric mean {_number(groups.fmr.max_over_geomean)}",
    ]
    note = f"; {groups.note}" if groups.note else ""
    sys.stdout.write(printable(", ".join(spreads) + note) + "\n\n")


def _percent(rate: float) -> str:
    return f"{100 * rate:.3f} %"


def _ends(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{100 * ends[0]:.2f} to {100 * ends[1]:.2f}"


def _costs(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def _number(value: float | None, digits: int = 5) -> str:
    return "none" if value is None else f"{value:.{digits}g}"
