"""The numbers as Markdown, as LaTeX in the layout of the paper, and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from qmargin.evaluation.result import Result, TarPoint
from qmargin.files import escape_formula
from qmargin.report.markup import cleaned
from qmargin.report.model_card import LossSettings, loss_settings
from qmargin.report.numbers import MISSING, NOT_MEASURABLE, latex_power, percent, power
from qmargin.report.operating import Cell, other_columns, rule_sentence, tar_columns
from qmargin.report.repeats import Repeats, find_repeats
from qmargin.report.systems import Entry, Panel

CSV_COLUMNS = (
    *("protocol", "system", "alpha", "scale", "margin", "metric", "target", "value", "low"),
    *("high", "far", "false_accepts", "allowed", "threshold", "status", "rule", "num_genuine"),
    "num_impostors",
)
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_LATEX_SIGNS = {"\u03b1": r"$\alpha$", "β": r"$\beta$", "τ": r"$\tau$", "≤": r"$\leq$"}


def latex_text(text: str) -> str:
    r"""A name that LaTeX prints as it is.

    Examples:
        >>> latex_text("50% of {x_1}")
        '50\\% of \\{x\\_1\\}'
    """
    return "".join(_LATEX.get(sign) or _LATEX_SIGNS.get(sign, sign) for sign in cleaned(text))


def markdown_text(text: str) -> str:
    r"""A name that Markdown prints as it is, inside a table too.

    Examples:
        >>> markdown_text("a|b *c*")
        'a\\|b \\*c\\*'
    """
    return re.sub(r"([\\`*_\[\]|<>~$&])", r"\\\1", cleaned(text))


def csv_text(text: str) -> str:
    """A name that a spreadsheet takes for text, never for a formula.

    Examples:
        >>> csv_text("=1+1"), csv_text("ArcFace")
        ("'=1+1", 'ArcFace')
    """
    return escape_formula(cleaned(text))


def markdown_tables(panels: Sequence[Panel]) -> str:
    """A table for each panel, with intervals, flags and the rule."""
    parts = []
    for panel in panels:
        columns = [
            *((f"TAR % at {column.heading}", column.cells) for column in tar_columns(panel)),
            *((column.heading, column.cells) for column in other_columns(panel)),
        ]
        rows = [
            [markdown_text(entry.label), *[_markdown_cell(cells[i]) for _, cells in columns]]
            for i, entry in enumerate(panel.entries)
        ]
        head = ["System", *[heading for heading, _ in columns]]
        lines = [head, ["---", *["---:"] * len(columns)], *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        words = markdown_text(rule_sentence(panel, "in brackets"))
        parts.append(f"## {markdown_text(panel.title)}\n\n{table}\n\n{words}\n")
    parts += [markdown_repeats(repeats) for repeats in find_repeats(panels)]
    return "\n".join(parts)


def markdown_repeats(repeats: Repeats) -> str:
    """Means and deviations over trainings, the best mean in bold."""
    head = ["System", "Trainings", *(f"TAR % at {power(far)}" for far in repeats.fars), "EER %"]
    rows = [
        [markdown_text(name), str(len(entries)), *map(_markdown_cell, repeats.cells(name))]
        for name, entries in repeats.systems.items()
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    title = f"## {markdown_text(repeats.title)}: means over trainings"
    return f"{title}\n\n{table}\n\nMean and deviation over trainings; best mean in bold.\n"


def latex_repeats(repeats: Repeats) -> str:
    """The same for LaTeX; empty columns of a paper's layout are left to its author."""
    head = ["Loss", "EER", *(latex_power(far) for far in repeats.fars)]
    rows = []
    for name in repeats.systems:
        *tars, eer = repeats.cells(name, sign=r"\pm")
        shown = [
            f"\\boldmath{{${cell.text}$}}" if cell.is_best else f"${cell.text}$"
            for cell in (eer, *tars)
        ]
        rows.append(f"        {' & '.join([latex_text(name), *shown])} \\\\")
    body = "\n".join(rows)
    return (
        "\\begin{table}[t]\n"
        "    \\centering\n"
        f"    \\caption{{{latex_text(repeats.title)}: mean and deviation over "
        f"{repeats.num_repeats} trainings (\\%).}}\n"
        f"    \\begin{{tabular}}{{l{'c' * len(repeats.measures)}}}\n"
        "        \\toprule\n"
        f"        {' & '.join(head)} \\\\\n"
        "        \\midrule\n"
        f"{body}\n"
        "        \\bottomrule\n"
        "    \\end{tabular}\n"
        "\\end{table}\n"
    )


def latex_tables(panels: Sequence[Panel]) -> str:
    """All tables for LaTeX."""
    repeats = [latex_repeats(found) for found in find_repeats(panels)]
    return "\n".join([latex_table(panels), *repeats])


def latex_table(panels: Sequence[Panel]) -> str:
    """One table with a column group for each protocol, best in bold, as in the paper."""
    names = _names(panels)
    settings = {name: _settings_of(panels, name) for name in names}
    has_settings = any(found.is_known for found in settings.values())
    widths = ([3] if has_settings else []) + [len(panel.fars) for panel in panels]
    groups = ["Parameters"] if has_settings else []
    groups += [latex_text(panel.title) for panel in panels]
    head = ["Loss", r"$\alpha$", "$s$", "$m$"] if has_settings else ["Method"]
    head += [latex_power(far) for panel in panels for far in panel.fars]
    rows = [_latex_row(name, settings[name] if has_settings else None, panels) for name in names]
    body = "\n".join(f"        {row} \\\\" for row in rows)
    spec = "l" + "".join(f" @{{\\hskip 1em}} {'c' * width}" for width in widths)
    spans = [f"\\multicolumn{{{w}}}{{c}}{{{g}}}" for w, g in zip(widths, groups, strict=True)]
    return (
        "% Needs \\usepackage{booktabs}\n"
        "\\begin{table*}[t]\n"
        "    \\centering\n"
        f"    \\caption{{{_latex_caption(panels)}}}\n"
        "    \\label{tab:qmargin-report}\n"
        f"    \\begin{{tabular}}{{{spec}}}\n"
        "        \\toprule\n"
        f"         & {' & '.join(spans)} \\\\\n"
        f"        {' '.join(_rules(widths))}\n"
        f"        {' & '.join(head)} \\\\\n"
        "        \\midrule\n"
        f"{body}\n"
        "        \\bottomrule\n"
        "    \\end{tabular}\n"
        "\\end{table*}\n"
    )


def csv_table(panels: Sequence[Panel]) -> str:
    """Every number in a line of its own, unrounded."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for panel in panels:
        for entry in panel.entries:
            writer.writerows(_csv_rows(panel, entry))
    return buffer.getvalue()


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.is_best else cell.text
    text += f" ({cell.interval})" if cell.interval else ""
    return text + (f" [{cell.flag}]" if cell.flag else "")


def _names(panels: Iterable[Panel]) -> list[str]:
    return list(dict.fromkeys(entry.label for panel in panels for entry in panel.entries))


def _settings_of(panels: Iterable[Panel], name: str) -> LossSettings:
    entries = (entry for panel in panels for entry in panel.entries if entry.label == name)
    found = (loss_settings(entry.result.system.model_card) for entry in entries)
    return next((settings for settings in found if settings.is_known), LossSettings())


def _latex_row(name: str, settings: LossSettings | None, panels: Sequence[Panel]) -> str:
    cells = [latex_text(name)]
    if settings is not None:
        values = (settings.alpha, settings.scale, settings.margin)
        cells += [MISSING if value is None else f"{value:g}" for value in values]
    for panel in panels:
        entry = next((e for e in panel.entries if e.label == name), None)
        cells += [_latex_cell(panel, entry, far) for far in panel.fars]
    return " & ".join(cells)


def _latex_cell(panel: Panel, entry: Entry | None, far: float) -> str:
    point = None if entry is None else entry.point_at(far)
    if point is None:
        return MISSING
    if point.tar is None:
        return "n.m."
    best = panel.best_tar(far)
    is_best = len(panel.entries) > 1 and best is not None and percent(best) == percent(point.tar)
    text = f"\\textbf{{{percent(point.tar)}}}" if is_best else percent(point.tar)
    return text + ("$^{\\ast}$" if point.status == "few" else "")


def _latex_caption(panels: Sequence[Panel]) -> str:
    rules = sorted({rule for panel in panels for rule in panel.rules})
    points = [point for panel in panels for e in panel.entries for point in e.result.metrics.tar]
    words = f"TAR (\\%) at each FAR, thresholds by the {latex_text(' and '.join(rules))} rule"
    words += "; best in bold."
    if any(point.status == "few" for point in points):
        words += " $^{\\ast}$Fewer than 30 false accepts allowed."
    if any(point.status == NOT_MEASURABLE for point in points):
        words += " n.m.: not measurable with these trials."
    return words


def _rules(widths: Sequence[int]) -> list[str]:
    rules, start = [], 2
    for width in widths:
        rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return rules


def _csv_rows(panel: Panel, entry: Entry) -> list[list[str]]:
    metrics = entry.result.metrics
    eer = metrics.eer
    rows = [_csv_point(point) for point in metrics.tar]
    rows.append(["eer", "", *_values(eer.value, eer.interval), "", "", "", repr(eer.threshold), ""])
    for cost in metrics.min_dcf:
        values = _values(cost.value, cost.interval)
        target = repr(cost.p_target)
        rows.append(["min_dcf", target, *values, "", "", "", repr(cost.threshold), ""])
    for name, found in (("cllr", metrics.cllr), ("min_cllr", metrics.min_cllr)):
        rows.append([name, "", *_values(found.value, None), "", "", "", "", ""])
    start = _csv_start(panel, entry)
    return [[*start, *row, *_csv_end(entry.result)] for row in rows]


def _csv_point(point: TarPoint) -> list[str]:
    return [
        "tar",
        repr(point.far_target),
        *_values(point.tar, point.interval),
        _shown(point.far),
        str(point.false_accepts) if point.tar is not None else "",
        str(point.allowed),
        _shown(point.threshold),
        point.status,
    ]


def _csv_start(panel: Panel, entry: Entry) -> list[str]:
    found = loss_settings(entry.result.system.model_card)
    numbers = [_shown(value) for value in (found.alpha, found.scale, found.margin)]
    return [csv_text(panel.title), csv_text(entry.label), *numbers]


def _csv_end(result: Result) -> list[str]:
    protocol = result.protocol
    return [csv_text(protocol.rule), str(protocol.num_genuine), str(protocol.num_impostors)]


def _values(value: float | None, interval: tuple[float, float] | None) -> list[str]:
    low, high = interval or (None, None)
    return [_shown(value), _shown(low), _shown(high)]


def _shown(value: float | None) -> str:
    return "" if value is None else repr(value)
