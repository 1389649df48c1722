"""A table with groups of columns, as Markdown and as LaTeX in the paper's layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from qmargin.report.tables import latex_text, markdown_text

MISSING = "-"
NUM_NARROW = 7  # columns that fit on a page
_SIGNS = {"alpha": r"$\alpha$", "scale": "$s$", "margin": "$m$"}
_RAISED = {"†": r"$^{\dagger}$", "²": "$^2$"}


@dataclass(frozen=True)
class Group:
    """Columns under one heading.

    Attributes:
        title: Above them; empty for none.
        columns: From the left.
        has_best: Whether the largest number of each is in bold.
        source: Above the title: whether numbers are the paper's or ours.
    """

    title: str
    columns: tuple[str, ...]
    has_best: bool = False
    source: str = ""


@dataclass(frozen=True)
class Heading:
    """A row that names those below it."""

    text: str


TableRow: TypeAlias = tuple[str, ...] | Heading | None


@dataclass(frozen=True)
class Table:
    """Rows of text under groups of columns; None is a rule between rows.

    Attributes:
        name: Its key in ``qmargin paper``, and its label in LaTeX.
        caption: What it shows, and at which scale.
        groups: From the left.
        rows: As many cells as there are columns.
        best_from: The first row that takes part where the best is in bold.
    """

    name: str
    caption: str
    groups: tuple[Group, ...]
    rows: tuple[TableRow, ...]
    best_from: int = 0

    def __post_init__(self) -> None:
        assert all(len(row) == self.width for row in self.rows if isinstance(row, tuple))

    @property
    def width(self) -> int:
        """Number of columns."""
        return sum(len(group.columns) for group in self.groups)


def number(value: float | None, digits: int = 2) -> str:
    """A number, or the paper's dash.

    Examples:
        >>> number(96.4), number(None)
        ('96.40', '-')
    """
    return MISSING if value is None else f"{value:.{digits}f}"


def markdown_words(text: str) -> str:
    r"""A text that Markdown prints as it is; inside a word an underscore needs no escape.

    Examples:
        >>> print(markdown_words("small_conv, a|b"), markdown_words("_a_"))
        small_conv, a\|b \_a\_
    """
    return re.sub(r"(?<=\w)\\_(?=\w)", "_", markdown_text(text))


def markdown(table: Table) -> str:
    """The table with its caption below; groups are named in the headings of their columns."""
    heads = [
        markdown_words(": ".join(filter(None, (_named(group), column))))
        for group in table.groups
        for column in group.columns
    ]
    best = _best_cells(table)
    lines = [heads, ["---"] * len(heads)]
    for place, row in enumerate(table.rows):
        if isinstance(row, Heading):
            lines.append([f"*{markdown_words(row.text)}*", *[""] * (table.width - 1)])
        elif row is not None:
            cells = [markdown_words(cell) for cell in row]
            lines.append(
                [f"**{cell}**" if (place, i) in best else cell for i, cell in enumerate(cells)]
            )
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{body}\n\n{escaped(table.caption, markdown_words)}\n"


def _named(group: Group) -> str:
    return ", ".join(filter(None, (group.source, group.title)))


def latex(table: Table) -> str:
    """The table with booktabs, as wide as the page where it has many columns."""
    is_wide = table.width > NUM_NARROW
    kind = "table*" if is_wide else "table"
    spec = r" @{\hskip 1em} ".join("c" * len(group.columns) for group in table.groups)
    parts = [
        "% Needs \\usepackage{booktabs}" + " and \\usepackage{graphicx}" * is_wide,
        f"\\begin{{{kind}}}[t]",
        "\\centering",
        f"\\caption{{{latex_caption(table.caption)}}}",
        f"\\label{{tab:{table.name}}}",
        *["\\resizebox{\\textwidth}{!}{%"] * is_wide,
        f"\\begin{{tabular}}{{l{spec[1:]}}}",
        "\\toprule",
        *_spanning(table.groups, lambda group: group.source.capitalize()),
        *_spanning(table.groups, lambda group: group.title),
        _line(_latex_cell(column) for group in table.groups for column in group.columns),
        "\\midrule",
        *_latex_rows(table),
        "\\bottomrule",
        "\\end{tabular}" + "%" * is_wide,
        *["}"] * is_wide,
        f"\\end{{{kind}}}",
    ]
    return "\n".join(parts) + "\n"


def latex_caption(text: str) -> str:
    """A caption of ours that LaTeX prints as it is."""
    return _raised(escaped(text, latex_text))


def escaped(text: str, escape: Callable[[str], str]) -> str:
    """A long text of ours, word by word: names that are too long are cut."""
    return " ".join(map(escape, text.split(" ")))


def _latex_rows(table: Table) -> Iterator[str]:
    best = _best_cells(table)
    for place, row in enumerate(table.rows):
        if row is None:
            yield "\\midrule"
        elif isinstance(row, Heading):
            yield f"\\multicolumn{{{table.width}}}{{l}}{{\\textit{{{latex_text(row.text)}}}}} \\\\"
        else:
            yield _line(_latex_cell(cell, (place, i) in best) for i, cell in enumerate(row))


def _line(cells: Iterator[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _spanning(groups: tuple[Group, ...], name: Callable[[Group], str]) -> list[str]:
    """A row of names above columns with rules below it; nothing where no group has a name."""
    cells, rules, start = [], [], 1
    for (_, text), found in groupby(groups, lambda group: (group.source, name(group))):
        width = sum(len(group.columns) for group in found)
        if text:
            cells.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_text(text)}}}")
            rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
        else:
            cells += [""] * width
        start += width
    return [_line(iter(cells)), " ".join(rules)] if rules else []


def _latex_cell(cell: str, is_best: bool = False) -> str:
    r"""A cell with its signs: powers of ten, deviations, names of parameters.

    Examples:
        >>> print(_latex_cell("1e-4"), _latex_cell("96.38 +- 0.07"), _latex_cell("2.50", True))
        $10^{-4}$ $96.38 \pm 0.07$ \textbf{2.50}
    """
    if cell in _SIGNS:
        return _SIGNS[cell]
    text = _raised(latex_text(cell))
    text = re.sub(r"^1e-(\d+)$", r"$10^{-\1}$", text)
    text = re.sub(r"\balpha=([\d.]+)", r"$\\alpha=\1$", text)
    text = re.sub(r"\b([sm])=([\d.]+)", r"$\1=\2$", text)
    if " +- " in text:
        text = f"${text.replace('+-', chr(92) + 'pm')}$"
        return f"{{\\boldmath{text}}}" if is_best else text
    return f"\\textbf{{{text}}}" if is_best else text


def _raised(text: str) -> str:
    for sign, shown in _RAISED.items():
        text = text.replace(sign, shown)
    return text


def _best_cells(table: Table) -> set[tuple[int, int]]:
    """Row and column of the largest number of every column in which several compete."""
    found: set[tuple[int, int]] = set()
    column = 0
    for group in table.groups:
        for _ in group.columns:
            if group.has_best:
                found |= {(place, column) for place in _best_places(table, column)}
            column += 1
    return found


def _best_places(table: Table, column: int) -> list[int]:
    values = {
        place: value
        for place, row in enumerate(table.rows)
        if place >= table.best_from
        and isinstance(row, tuple)
        and (value := _value(row[column])) is not None
    }
    if len(values) < 2:
        return []
    return [place for place, value in values.items() if value == max(values.values())]


def _value(cell: str) -> float | None:
    try:
        return float(cell.split(" ")[0])
    except ValueError:
        return None
