r"""Tables of text and numbers as Markdown, LaTeX and CSV.

A ``Table`` holds values, not formatted text: the renderers round, align, escape and mark the best
value of a column. Text is plain Unicode; ``latex_text`` translates signs such as ±, ≤ and 10⁻⁴.

Examples:
    >>> table = Table(
    ...     title="TAR (%) at each FAR",
    ...     columns=(
    ...         Column("Loss", align="left"),
    ...         Column("10⁻³", best="max", group=("IJB-B",)),
    ...         Column("10⁻⁴", best="max", group=("IJB-B",)),
    ...     ),
    ...     rows=(
    ...         ("ArcFace", Number(95.75), Number(91.69)),
    ...         ("Q-Margin", Number(96.38, deviation=0.07), None),
    ...     ),
    ... )
    >>> print(table.to_markdown(level=None))
    | Loss | IJB-B: 10⁻³ | IJB-B: 10⁻⁴ |
    | --- | ---: | ---: |
    | ArcFace | 95.75 | 91.69 |
    | Q-Margin | **96.38 ± 0.07** | - |
    <BLANKLINE>
    TAR (%) at each FAR.
    <BLANKLINE>
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeAlias

from qmargin.files import escape_formula
from qmargin.report.numbers import LONGEST_TEXT, cleaned

MISSING = "-"
NUM_NARROW = 7  # columns that fit into one column of a two-column page
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\u2013": "--",
    "…": r"\ldots{}",
    "±": r"$\pm$",
    "\u2212": "$-$",
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
    """A number in a cell.

    Attributes:
        value: None and NaN are shown as a dash. Thousands of integers are separated.
        digits: After the decimal point, of floating-point numbers.
        deviation: Standard deviation, shown as ``value ± deviation``.
        interval: Shown in parentheses.
        signed: Write the plus of positive numbers, for differences.
        flag: A remark of one word, such as ``few``; the table's notes explain it.
    """

    value: float | None
    digits: int = 2
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    signed: bool = False
    flag: str = ""

    @property
    def known(self) -> float | None:
        """The value, None if it is NaN."""
        return None if self.value is None or math.isnan(self.value) else self.value

    @property
    def text(self) -> str:
        r"""The value and its deviation.

        Examples:
            >>> Number(1234).text, Number(0.5, 1, deviation=0.04).text, Number(None).text
            ('1,234', '0.5 ± 0.0', '-')
            >>> Number(0.5, signed=True).text, ascii(Number(-0.5).text)
            ('+0.50', "'\\u22120.50'")
        """
        value = self.known
        if value is None:
            return MISSING
        if math.isinf(value):
            shown = "∞" if value > 0 else "-∞"
        elif isinstance(value, int):
            shown = f"{value:{'+' * self.signed},}"
        else:
            shown = f"{value:{'+' * self.signed}.{self.digits}f}"
        if self.deviation is not None:
            shown += f" ± {self.deviation:.{self.digits}f}"
        return shown.replace("-", "\u2212")

    @property
    def interval_text(self) -> str:
        r"""Both ends of the interval, with a dash that is not a minus; empty without one.

        Examples:
            >>> ascii(Number(0.5, interval=(0.25, 0.75)).interval_text)
            "'0.25\\u20130.75'"
        """
        if self.interval is None or self.known is None:
            return ""
        low, high = (f"{end:.{self.digits}f}".replace("-", "\u2212") for end in self.interval)
        return f"{low} to {high}" if "\u2212" in low + high else f"{low}\u2013{high}"


CellValue: TypeAlias = str | int | Number | None
Align: TypeAlias = Literal["left", "right", "center"]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        align: ``"left"``, ``"right"`` or ``"center"``.
        best: Which of its numbers is set in bold: ``"max"``, ``"min"`` or none.
        group: Headings above it, the outermost first; neighbours with equal ones share them.
        latex: The heading as LaTeX, where it is more than the escaped title.
    """

    title: str
    align: Align = "right"
    best: Literal["max", "min", ""] = ""
    group: tuple[str, ...] = ()
    latex: str = ""

    @property
    def full_title(self) -> str:
        """The heading with those above it in one line.

        Examples:
            >>> Column("10⁻⁴", group=("paper", "IJB-B")).full_title
            'paper, IJB-B: 10⁻⁴'
        """
        above = ", ".join(filter(None, self.group))
        return f"{above}: {self.title}" if above and self.title else above or self.title


@dataclass(frozen=True)
class Section:
    """Starts a part of a table, with a rule above it.

    Attributes:
        title: Of the rows that follow; empty for a rule alone.
        competes: Whether its numbers can be the best of their column.
    """

    title: str = ""
    competes: bool = True


Row: TypeAlias = tuple[CellValue, ...]


@dataclass(frozen=True)
class Cell:
    """A cell as it is shown, for templates; nothing is escaped yet."""

    text: str
    interval: str = ""
    flag: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under (groups of) columns, with a title and notes.

    Attributes:
        title: What the table shows; a caption without a full stop.
        columns: From the left.
        rows: As many cells as there are columns, or a ``Section``.
        notes: Sentences below the table, and at the end of the caption in LaTeX.
        label: LaTeX label, ``tab:label``.

    Raises:
        ValueError: A row has another number of cells than there are columns.
    """

    title: str
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
                continue
            found.append(
                tuple(
                    _shown(value, best[index] if section.competes else None)
                    for index, value in enumerate(row)
                )
            )
        return tuple(found)

    def header_groups(self) -> list[list[tuple[str, int]]]:
        """Rows of headings above the columns: text and width, the outermost row first."""
        depth = max((len(column.group) for column in self.columns), default=0)
        rows = []
        for level in range(depth):
            paths = ((*column.group, *[""] * depth)[: level + 1] for column in self.columns)
            rows.append([(path[-1], len(list(same))) for path, same in groupby(paths)])
        return rows

    def to_markdown(self, *, level: int | None = 2) -> str:
        """Render a pipe table; groups are named in the headings of their columns.

        Args:
            level: Of the heading with the title above the table; None puts the title below it.
        """
        rules = {"left": "---", "right": "---:", "center": ":---:"}
        lines = [
            [markdown_text(column.full_title) for column in self.columns],
            [rules[column.align] for column in self.columns],
        ]
        for row in self.body:
            if not isinstance(row, Section):
                lines.append([_markdown_cell(cell) for cell in row])
            elif row.title:
                lines.append([f"*{markdown_text(row.title)}*", *[""] * (len(self.columns) - 1)])
        parts = ["\n".join("| " + " | ".join(line) + " |" for line in lines)]
        if level is not None and self.title:
            parts.insert(0, f"{'#' * level} {markdown_text(self.title)}")
        text = " ".join(self.notes if level is not None else self._sentences())
        return "\n\n".join([*parts, *filter(None, [markdown_text(text)])]) + "\n"

    def to_latex(self) -> str:
        """Render a booktabs table, as wide as the page if it has many columns."""
        is_wide = len(self.columns) > NUM_NARROW
        kind = "table*" if is_wide else "table"
        caption = latex_text(" ".join(self._sentences()))
        lines = [
            "% Needs \\usepackage{booktabs}" + " and \\usepackage{graphicx}" * is_wide,
            f"\\begin{{{kind}}}[t]",
            "\\centering",
            *([f"\\caption{{{caption}}}"] if caption else []),
            *([f"\\label{{tab:{self.label}}}"] if self.label else []),
            *["\\resizebox{\\textwidth}{!}{%"] * is_wide,
            f"\\begin{{tabular}}{{{self._latex_columns()}}}",
            "\\toprule",
            *(line for level in self.header_groups() for line in _latex_groups(level)),
            _latex_line(column.latex or latex_text(column.title) for column in self.columns),
            "\\midrule",
            *self._latex_rows(),
            "\\bottomrule",
            "\\end{tabular}" + "%" * is_wide,
            *["}"] * is_wide,
            f"\\end{{{kind}}}",
        ]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Render unrounded numbers; deviations and intervals have columns of their own."""
        has_sections = any(isinstance(row, Section) and row.title for row in self.rows)
        extras = [self._extras(index) for index in range(len(self.columns))]
        head = ["section"] * has_sections
        for column, extra in zip(self.columns, extras, strict=True):
            head += [column.full_title, *(f"{column.full_title} {name}" for name in extra)]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(map(csv_text, head))
        section = ""
        for row in self.rows:
            if isinstance(row, Section):
                section = row.title
                continue
            cells = [csv_text(section)] * has_sections
            for value, extra in zip(row, extras, strict=True):
                cells += [_csv_cell(value), *(_EXTRAS[name](value) for name in extra)]
            writer.writerow(cells)
        return buffer.getvalue()

    def files(self, stem: str, *, level: int | None = None) -> dict[str, bytes]:
        """All three renderings by file name, for ``Guard.write_all``."""
        texts = {"md": self.to_markdown(level=level), "tex": self.to_latex(), "csv": self.to_csv()}
        return {f"{stem}.{kind}": text.encode() for kind, text in texts.items()}

    def _sentences(self) -> Iterator[str]:
        if self.title:
            yield self.title if self.title.endswith((".", "!", "?")) else f"{self.title}."
        yield from self.notes

    def _best_text(self, index: int) -> str | None:
        """Best number of a column as it is shown; None if fewer than two compete."""
        if not self.columns[index].best:
            return None
        found: list[tuple[float, str]] = []
        competes = True
        for row in self.rows:
            if isinstance(row, Section):
                competes = row.competes
            elif competes and (number := _as_number(row[index])) and number.known is not None:
                found.append((number.known, _mean_text(number)))
        choose = max if self.columns[index].best == "max" else min
        return choose(found)[1] if len(found) > 1 else None

    def _extras(self, index: int) -> list[str]:
        cells = [row[index] for row in self.rows if not isinstance(row, Section)]
        return [name for name, cell in _EXTRAS.items() if any(map(cell, cells))]

    def _latex_columns(self) -> str:
        """Column specification, with a wider gap between groups."""
        same = groupby(self.columns, key=lambda column: column.group)
        parts = ["".join(column.align[0] for column in columns) for _, columns in same]
        return r" @{\hskip 1em} ".join(parts)

    def _latex_rows(self) -> Iterator[str]:
        for place, row in enumerate(self.body):
            if not isinstance(row, Section):
                yield _latex_line(map(_latex_cell, row))
                continue
            if place:
                yield "\\midrule"
            if row.title:
                title = f"\\textit{{{latex_text(row.title)}}}"
                yield f"\\multicolumn{{{len(self.columns)}}}{{l}}{{{title}}} \\\\"


def latex_text(text: str) -> str:
    r"""Escape text so that LaTeX prints it as it is.

    Examples:
        >>> print(latex_text("50% of {x_1}"), latex_text("FAR ≤ 10⁻⁴"))
        50\% of \{x\_1\} FAR $\leq$ 10$^{-4}$
    """
    signs = (_LATEX.get(sign, sign) for sign in cleaned(text, LONGEST_TEXT))
    return _RAISED.sub(
        lambda found: f"$^{{{found.group().translate(_SUPERSCRIPTS)}}}$", "".join(signs)
    )


def markdown_text(text: str) -> str:
    r"""Escape text so that Markdown prints it as it is, also inside a table.

    Examples:
        >>> print(markdown_text("a|b *c*"), markdown_text("small_conv"), markdown_text("_a_"))
        a\|b \*c\* small_conv \_a\_
    """
    return _MARKDOWN.sub(lambda found: f"\\{found.group()}", cleaned(text, LONGEST_TEXT))


def csv_text(text: str) -> str:
    """Escape text so that a spreadsheet does not take it for a formula.

    Examples:
        >>> csv_text("=1+1"), csv_text("ArcFace")
        ("'=1+1", 'ArcFace')
    """
    return escape_formula(cleaned(text, LONGEST_TEXT))


def _as_number(value: CellValue) -> Number | None:
    if isinstance(value, int):
        return Number(value)
    return value if isinstance(value, Number) else None


def _mean_text(number: Number) -> str:
    """The value as it is shown, without its deviation: equal texts are equally good."""
    return number.text.partition(" ± ")[0]


def _shown(value: CellValue, best: str | None) -> Cell:
    number = _as_number(value)
    if number is None:
        return Cell(MISSING if value is None else cleaned(str(value)))
    is_best = best is not None and number.known is not None and _mean_text(number) == best
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


def _latex_line(cells: Iterator[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _latex_groups(groups: Sequence[tuple[str, int]]) -> list[str]:
    """A row of headings that span their columns, and the rules below it."""
    cells, rules, start = [], [], 1
    for text, width in groups:
        if text:
            cells.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_text(text)}}}")
            rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
        else:
            cells += [""] * width
        start += width
    return [_latex_line(iter(cells)), " ".join(rules)] if rules else []


def _csv_cell(value: CellValue) -> str:
    number = _as_number(value)
    if number is not None:
        return "" if number.known is None else repr(number.known)
    return "" if value is None else csv_text(str(value))


def _csv_end(value: CellValue, end: int) -> str:
    is_known = isinstance(value, Number) and value.interval is not None
    return repr(value.interval[end]) if is_known else ""  # type: ignore[union-attr, index]


_EXTRAS: dict[str, Callable[[CellValue], str]] = {
    "deviation": lambda value: (
        "" if not isinstance(value, Number) or value.deviation is None else repr(value.deviation)
    ),
    "low": lambda value: _csv_end(value, 0),
    "high": lambda value: _csv_end(value, 1),
    "flag": lambda value: csv_text(value.flag) if isinstance(value, Number) else "",
}
