"""A table with groups of columns, as Markdown and as LaTeX in the paper's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qmargin.report.tables import latex_text, markdown_text

MISSING = "-"


@dataclass(frozen=True)
class Group:
    """Columns under one heading; ``has_best`` where the largest number of each is in bold."""

    title: str
    columns: tuple[str, ...]
    has_best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under groups of columns; None is a rule between rows.

    Attributes:
        name: Its key in ``qmargin paper``, and its label in LaTeX.
        caption: What it shows, and at which scale.
        groups: From the left.
        rows: As many cells as there are columns.
    """

    name: str
    caption: str
    groups: tuple[Group, ...]
    rows: tuple[tuple[str, ...] | None, ...]

    def __post_init__(self) -> None:
        width = sum(len(group.columns) for group in self.groups)
        assert all(row is None or len(row) == width for row in self.rows)


def number(value: float | None, digits: int = 2) -> str:
    """A number, or the paper's dash.

    Examples:
        >>> number(96.4), number(None)
        ('96.40', '-')
    """
    return MISSING if value is None else f"{value:.{digits}f}"


def markdown(table: Table) -> str:
    """The table with its caption below; groups are named in the headings of their columns."""
    heads = [
        markdown_text(f"{group.title}: {column}" if group.title else column)
        for group in table.groups
        for column in group.columns
    ]
    best = _best_cells(table)
    lines = [heads, ["---"] * len(heads)]
    for number_, row in enumerate(table.rows):
        if row is not None:
            cells = [markdown_text(cell) for cell in row]
            lines.append(
                [f"**{cell}**" if (number_, i) in best else cell for i, cell in enumerate(cells)]
            )
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{body}\n\n{_escaped(table.caption, markdown_text)}\n"


def latex(table: Table) -> str:
    """The table with booktabs."""
    best = _best_cells(table)
    lines = []
    for number_, row in enumerate(table.rows):
        if row is None:
            lines.append("\\midrule")
            continue
        cells = [
            f"\\textbf{{{_latex_cell(cell)}}}" if (number_, i) in best else _latex_cell(cell)
            for i, cell in enumerate(row)
        ]
        lines.append(" & ".join(cells) + " \\\\")
    spec = " @{\\hskip 1em} ".join("c" * len(group.columns) for group in table.groups)
    spec = "l" + spec[1:]
    heads = [_latex_cell(column) for group in table.groups for column in group.columns]
    titles = [
        f"\\multicolumn{{{len(group.columns)}}}{{c}}{{{latex_text(group.title)}}}"
        for group in table.groups
    ]
    parts = [
        "% Needs \\usepackage{booktabs}",
        "\\begin{table*}[t]",
        "\\centering",
        f"\\caption{{{_escaped(table.caption, latex_text)}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{{spec}}}",
        "\\toprule",
        f"{' & '.join(titles)} \\\\",
        _rules(table.groups),
        f"{' & '.join(heads)} \\\\",
        "\\midrule",
        *lines,
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table*}",
    ]
    return "\n".join(parts) + "\n"


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    """A long text of ours, word by word: names that are too long are cut."""
    return " ".join(map(escape, text.split(" ")))


def _latex_cell(cell: str) -> str:
    signs = {"alpha": "$\\alpha$", "scale": "$s$", "margin": "$m$"}
    text = latex_text(cell).replace("+-", "$\\pm$").replace("alpha=", "$\\alpha$=")
    return signs.get(cell) or text


def _rules(groups: Sequence[Group]) -> str:
    rules, start = [], 1
    for group in groups:
        end = start + len(group.columns) - 1
        if group.title:
            rules.append(f"\\cmidrule(lr){{{start}-{end}}}")
        start = end + 1
    return " ".join(rules)


def _best_cells(table: Table) -> set[tuple[int, int]]:
    """Row and column of the largest number of every column that has one."""
    found: set[tuple[int, int]] = set()
    column = 0
    for group in table.groups:
        for _ in group.columns:
            if group.has_best:
                values = {
                    number_: value
                    for number_, row in enumerate(table.rows)
                    if row is not None and (value := _value(row[column])) is not None
                }
                top = max(values.values(), default=None)
                found |= {(number_, column) for number_, value in values.items() if value == top}
            column += 1
    return found


def _value(cell: str) -> float | None:
    try:
        return float(cell.split(" ")[0])
    except ValueError:
        return None
