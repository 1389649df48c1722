"""Tables and progress: rich in a terminal that has it, plain Markdown everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from qmargin.terminal import printable, rich_console, start_live

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 5.0


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


class PlainProgress:
    """Writes a line when a stage has taken some seconds since the last one.

    Args:
        stream: Where the lines go.
        clock: Seconds that only grow.

    Examples:
        >>> import io
        >>> stream, seconds = io.StringIO(), iter([0.0, 1.0, 7.0])
        >>> progress = PlainProgress(stream, clock=lambda: next(seconds))
        >>> for done in (0, 20, 50):
        ...     progress("scoring", done, 100)
        >>> print(stream.getvalue(), end="")
        scoring: 50 of 100 (50 %)
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._last = stage, now
        elif now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            share = 100 * done // max(total, 1)
            self._stream.write(f"{stage}: {done:,} of {total:,} ({share} %)\n")
            self._stream.flush()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *details: object) -> None:
        """Nothing to clear."""


class BarProgress:
    """A bar per stage, cleared at the end."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def __enter__(self) -> BarProgress:
        self._bars.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.__exit__(kind, error, traceback)


StageProgress: TypeAlias = PlainProgress | BarProgress


def stage_progress() -> StageProgress:
    """What shows progress on standard error, to be used in a ``with`` statement."""
    bars = rich_bars("{task.percentage:>3.0f} %")
    return PlainProgress(sys.stderr) if bars is None else BarProgress(bars)
