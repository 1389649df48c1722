"""Tables and progress: rich in a terminal that has it, plain Markdown everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from qmargin.terminal import printable, rich_console, start_live

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class ProgressBar(Protocol):
    """What the commands use of a progress bar."""

    def add_task(self, description: str, *, total: float | None = None) -> Any:
        """Begin a bar; returns what ``advance`` takes."""

    def advance(self, task_id: Any) -> None:
        """One more is done."""


class _NoProgress:
    """Shows nothing."""

    def add_task(self, description: str, *, total: float | None = None) -> None:
        """Do nothing."""

    def advance(self, task_id: Any) -> None:
        """Do nothing."""


def output_console() -> Console | None:
    """A rich console on standard output; None outside a terminal, or without the rich package."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return None
    return rich_console(sys.stdout)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can also be read as it is: the first column holds text.

    Examples:
        >>> print(markdown_table(["loss", "ms"], [["ours", "1.5"], ["theirs", "12"]]))
        | loss   |  ms |
        |--------|-----|
        | ours   | 1.5 |
        | theirs |  12 |
    """
    columns, *rows = ([_cell(text) for text in row] for row in (columns, *rows))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *others]) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(columns), rule, *map(line, rows)])


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")


def print_table(
    console: Console | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print ``rows`` under ``columns``: the first holds text, the others numbers.

    Without a console the table is Markdown, so that it can be pasted into a page.

    Examples:
        >>> print_table(None, "Times", ["loss", "ms"], [["ours", "1.5"]])
        Times
        <BLANKLINE>
        | loss |  ms |
        |------|-----|
        | ours | 1.5 |
        <BLANKLINE>
    """
    if console is None:
        sys.stdout.write(f"{printable(title)}\n\n{markdown_table(columns, rows)}\n\n")
        sys.stdout.flush()
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # names may look like markup
    console.print(Text(printable(title)), style="bold", highlight=False)
    console.print(table)


def progress_bar() -> AbstractContextManager[ProgressBar]:
    """Progress with a bar, a count and the time left, on standard error, terminals only."""
    return rich_bars("{task.completed:.0f}/{task.total:.0f}") or nullcontext(_NoProgress())


def rich_bars(amount: str) -> Progress | None:
    """Bars on standard error that vanish at the end; None outside a terminal, or without rich.

    Args:
        amount: How much of a task is done, as a format of rich.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return None
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class Bars(Progress):
        def start(self) -> None:
            start_live(self.live)

    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(amount),
        TimeRemainingColumn(),
        console=rich_console(sys.stderr),
        transient=True,
    )
