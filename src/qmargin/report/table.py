"""Tables of text and numbers as Markdown, LaTeX and CSV.

A ``Table`` holds values, not formatted text: the renderers round, align, escape and mark the best
value of a column. Text is plain Unicode; ``latex_text`` translates signs such as ±, ≤ and 10⁻⁴.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeAlias

from qmargin.files import escape_formula
from qmargin.report.numbers import DASH, LONGEST_TEXT, MINUS, MISSING, cleaned

NUM_NARROW = 7  # columns that fit into one column of a two-column page
_RULES = {"left": "---", "right": "---:", "center": ":---:"}
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "…": r"\ldots{}",
    DASH: "--",
    MINUS: "$-$",
    "±": r"$\pm$",
    "\u00d7": r"$\times$",
    "∞": r"$\infty$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\to$",
    "†": r"$^{\dagger}$",
    "\u03b1": r"$\alpha$",
    "β": r"$\beta$",
    "τ": r"$\tau$",
}
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_RAISED = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_MARKDOWN = re.compile(r"[\\`*\[\]|<>~$&]|(?<!\w)_|_(?!\w)")


@dataclass(frozen=True)
class Number:
    """A number in a cell: ``value ± deviation (interval) flag``."""

    value: float | None  # None and NaN are shown as a dash, integers with separated thousands
    digits: int = 2  # after the decimal point, of floating-point numbers
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    signed: bool = False  # write the plus of positive numbers, for differences
    flag: str = ""  # a remark of one word, such as ``few``; the table's notes explain it

    @property
    def known(self) -> float | None:
        """The value, None if it is NaN."""
        return None if self.value is None or math.isnan(self.value) else self.value

    @property
    def mean_text(self) -> str:
        """The value without its deviation: equal texts are equally good.

        Examples:
            >>> Number(1234).mean_text, Number(0.5, signed=True).mean_text, Number(None).mean_text
            ('1,234', '+0.50', '-')
        """
        value = self.known
        if value is None:
            return MISSING
        if math.isinf(value):
            return "∞" if value > 0 else f"{MINUS}∞"
        form = "," if isinstance(value, int) else f".{self.digits}f"
        return f"{value:{'+' * self.signed}{form}}".replace("-", MINUS)

    @property
    def text(self) -> str:
        """The value and its deviation."""
        if self.deviation is None or self.known is None:
            return self.mean_text
        return f"{self.mean_text} ± {self.deviation:.{self.digits}f}"

    @property
    def interval_text(self) -> str:
        """Both ends of the interval, with a dash that is not a minus; empty without one."""
        if self.interval is None or self.known is None:
            return ""
        low, high = (f"{end:.{self.digits}f}".replace("-", MINUS) for end in self.interval)
        return f"{low} to {high}" if MINUS in low + high else f"{low}{DASH}{high}"


CellValue: TypeAlias = str | int | Number | None
Row: TypeAlias = tuple[CellValue, ...]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    align: Literal["left", "right", "center"] = "right"
    best: Literal["max", "min", ""] = ""  # which of its numbers is set in bold
    group: tuple[str, ...] = ()  # headings above it, the outermost first; neighbours share them
    latex: str = ""  # the heading as LaTeX, where it is more than the escaped title

    @property
    def full_title(self) -> str:
        """The heading with those above it in one line, such as ``paper, IJB-B: 10⁻⁴``."""
        above = ", ".join(filter(None, self.group))
        return f"{above}: {self.title}" if above and self.title else above or self.title


@dataclass(frozen=True)
class Section:
    """Starts a part of a table, with a rule above it and perhaps a title."""

    title: str = ""
    competes: bool = True  # whether its numbers can be the best of their column


@dataclass(frozen=True)
class Cell:
    """A cell as it is shown, for templates; nothing is escaped yet."""

    text: str
    interval: str = ""
    flag: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under (groups of) columns; the notes follow the title in a LaTeX caption."""

    title: str  # without a full stop
    columns: tuple[Column, ...]
    rows: tuple[Row | Section, ...]
    notes: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if not isinstance(row, Section) and len(row) != len(self.columns):
                raise ValueError(
                    f"a row of the table {self.title!r} has {len(row)} cells, but there are "
                    f"{len(self.columns)} columns: {row}"
                )

    @cached_property
    def body(self) -> tuple[Section | tuple[Cell, ...], ...]:
        """Rows as they are shown, the best numbers marked."""
        best = [self._best_text(index) for index in range(len(self.columns))]
        found: list[Section | tuple[Cell, ...]] = []
        section = Section()
        for row in self.rows:
            if isinstance(row, Section):
                section = row
                found.append(row)
            else:
                wanted = best if section.competes else [None] * len(best)
                found.append(tuple(map(_shown, row, wanted)))
        return tuple(found)

    def _sectioned(self) -> Iterator[tuple[Section, Row]]:
        """Rows of cells, each with its section."""
        section = Section()
        for row in self.rows:
            if isinstance(row, Section):
                section = row
            else:
                yield section, row

    def _best_text(self, index: int) -> str | None:
        """Best number of a column as it is shown; None if fewer than two compete."""
        if not self.columns[index].best:
            return None
        numbers = [_as_number(row[index]) for section, row in self._sectioned() if section.competes]
        known = [(n.known, n.mean_text) for n in numbers if n is not None and n.known is not None]
        choose = max if self.columns[index].best == "max" else min
        return choose(known)[1] if len(known) > 1 else None

    def header_groups(self) -> list[list[tuple[str, int]]]:
        """Rows of headings above the columns: text and width, the outermost row first."""
        depth = max((len(column.group) for column in self.columns), default=0)
        rows = []
        for level in range(depth):
            paths = ((*column.group, *[""] * depth)[: level + 1] for column in self.columns)
            rows.append([(path[-1], len(list(same))) for path, same in groupby(paths)])
        return rows

    def to_markdown(self, *, level: int | None = 2) -> str:
        """Render a pipe table under a heading of this level; None puts the title below it."""
        lines = [
            [markdown_text(column.full_title) for column in self.columns],
            [_RULES[column.align] for column in self.columns],
        ]
        for row in self.body:
            if not isinstance(row, Section):
                lines.append(list(map(_markdown_cell, row)))
            elif row.title:
                lines.append([f"*{markdown_text(row.title)}*", *[""] * (len(self.columns) - 1)])
        parts = ["\n".join("| " + " | ".join(line) + " |" for line in lines)]
        if level is not None and self.title:
            parts.insert(0, f"{'#' * level} {markdown_text(self.title)}")
        text = self._caption() if level is None else " ".join(self.notes)
        return "\n\n".join([*parts, *filter(None, [markdown_text(text)])]) + "\n"

    def to_latex(self) -> str:
        """Render a booktabs table, as wide as the page if it has many columns."""
        is_wide = len(self.columns) > NUM_NARROW
        kind = "table*" if is_wide else "table"
        caption = latex_text(self._caption())
        same = groupby(self.columns, key=lambda column: column.group)  # wider gaps between groups
        aligns = ["".join(column.align[0] for column in columns) for _, columns in same]
        form = r" @{\hskip 1em} ".join(aligns)
        lines = [
            "% Needs \\usepackage{booktabs}" + " and \\usepackage{graphicx}" * is_wide,
            f"\\begin{{{kind}}}[t]",
            "\\centering",
            *[f"\\caption{{{caption}}}"] * bool(caption),
            *[f"\\label{{tab:{self.label}}}"] * bool(self.label),
            *["\\resizebox{\\textwidth}{!}{%"] * is_wide,
            f"\\begin{{tabular}}{{{form}}}",
            "\\toprule",
            *(line for level in self.header_groups() for line in _latex_groups(level)),
            _latex_line(column.latex or latex_text(column.title) for column in self.columns),
            "\\midrule",
        ]
        for place, row in enumerate(self.body):
            if not isinstance(row, Section):
                lines.append(_latex_line(map(_latex_cell, row)))
                continue
            lines += ["\\midrule"] * bool(place)
            if row.title:
                title = f"\\textit{{{latex_text(row.title)}}}"
                lines.append(f"\\multicolumn{{{len(self.columns)}}}{{l}}{{{title}}} \\\\")
        end = ["\\bottomrule", "\\end{tabular}" + "%" * is_wide, *["}"] * is_wide]
        return "\n".join([*lines, *end, f"\\end{{{kind}}}"]) + "\n"

    def to_csv(self) -> str:
        """Render unrounded numbers; deviations, intervals and flags have columns of their own."""
        rows = [(section.title, list(map(_csv_cells, row))) for section, row in self._sectioned()]
        has_sections = any(title for title, _ in rows)
        names = [  # endings of the columns that a cell is divided into
            [end for end in _CSV_ENDS if not end or any(cells[index].get(end) for _, cells in rows)]
            for index in range(len(self.columns))
        ]
        heads = (
            column.full_title + end
            for column, ends in zip(self.columns, names, strict=True)
            for end in ends
        )
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([*["section"] * has_sections, *map(csv_text, heads)])
        for title, cells in rows:
            texts = (c.get(end, "") for c, ends in zip(cells, names, strict=True) for end in ends)
            writer.writerow([*[csv_text(title)] * has_sections, *texts])
        return buffer.getvalue()

    def files(self, stem: str, *, level: int | None = None) -> dict[str, bytes]:
        """All three renderings by file name, for ``Guard.write_all``."""
        texts = {"md": self.to_markdown(level=level), "tex": self.to_latex(), "csv": self.to_csv()}
        return {f"{stem}.{kind}": text.encode() for kind, text in texts.items()}

    def _caption(self) -> str:
        """The title as a sentence, and the notes."""
        stop = "" if self.title.endswith((".", "!", "?")) or not self.title else "."
        return " ".join(filter(None, [self.title + stop, *self.notes]))


def latex_text(text: str) -> str:
    r"""Escape text so that LaTeX prints it as it is.

    Examples:
        >>> print(latex_text("50% of {x_1}"), latex_text("FAR ≤ 10⁻⁴"))
        50\% of \{x\_1\} FAR $\leq$ 10$^{-4}$
    """
    escaped = "".join(_LATEX.get(sign, sign) for sign in cleaned(text, LONGEST_TEXT))
    return _RAISED.sub(lambda found: f"$^{{{found[0].translate(_SUPERSCRIPTS)}}}$", escaped)


def markdown_text(text: str) -> str:
    r"""Escape text so that Markdown prints it as it is, also inside a table.

    Examples:
        >>> print(markdown_text("a|b *c*"), markdown_text("small_conv"), markdown_text("_a_"))
        a\|b \*c\* small_conv \_a\_
    """
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", cleaned(text, LONGEST_TEXT))


def csv_text(text: str) -> str:
    """Escape text so that a spreadsheet does not take it for a formula."""
    return escape_formula(cleaned(text, LONGEST_TEXT))


def _as_number(value: CellValue) -> Number | None:
    if isinstance(value, int):
        return Number(value)
    return value if isinstance(value, Number) else None


def _shown(value: CellValue, best: str | None) -> Cell:
    number = _as_number(value)
    if number is None:
        return Cell(MISSING if value is None else cleaned(str(value)))
    is_best = best is not None and number.known is not None and number.mean_text == best
    return Cell(number.text, number.interval_text, number.flag, is_best)


def _markdown_cell(cell: Cell) -> str:
    text = markdown_text(cell.text)
    text = f"**{text}**" if cell.is_best else text
    text += f" ({cell.interval})" if cell.interval else ""
    return text + (f" \\[{markdown_text(cell.flag)}\\]" if cell.flag else "")


def _latex_cell(cell: Cell) -> str:
    text = latex_text(cell.text)
    if cell.is_best:
        text = f"{{\\boldmath\\textbf{{{text}}}}}" if "$" in text else f"\\textbf{{{text}}}"
    if cell.interval:
        text += f" {{\\scriptsize({latex_text(cell.interval)})}}"
    return text + (f"\\textsuperscript{{{latex_text(cell.flag)}}}" if cell.flag else "")


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _latex_groups(groups: Iterable[tuple[str, int]]) -> list[str]:
    """A row of headings that span their columns, and the rules below it."""
    cells, rules, start = [], [], 1
    for text, width in groups:
        if text:
            cells.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_text(text)}}}")
            rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
        else:
            cells += [""] * width
        start += width
    return [_latex_line(cells), " ".join(rules)] if rules else []


_CSV_ENDS = ("", " deviation", " low", " high", " flag")


def _csv_cells(value: CellValue) -> dict[str, str]:
    """Unrounded texts of a cell, by the ending of the column's name."""
    number = _as_number(value)
    if number is None:
        return {} if value is None else {"": csv_text(str(value))}
    parts = (number.known, number.deviation, *(number.interval or (None, None)))
    texts = ("" if part is None else repr(part) for part in parts)
    return dict(zip(_CSV_ENDS, (*texts, csv_text(number.flag)), strict=True))
