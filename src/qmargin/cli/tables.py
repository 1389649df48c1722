"""Tables and progress: rich in a terminal that has it, plain Markdown everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from qmargin.terminal import printable, rich_console, start_live

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0
StageProgress: TypeAlias = Callable[[str, int, int], None]  # stage, amount done, total


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
    lines = [[printable(text).replace("|", "\\|") for text in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [cell.rjust(width) if place else cell.ljust(width) for place, cell, width in cells]
        for cells in (zip(range(len(line)), line, widths, strict=True) for line in lines)
    ]
    first, *others = [f"| {' | '.join(line)} |" for line in aligned]
    return "\n".join([first, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *others])


def print_table(
    console: Console | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print ``rows`` under ``columns``: the first holds text, the others numbers.

    Without a console the table is Markdown, so that it can be pasted into a page.
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


@contextmanager
def stage_progress() -> Iterator[StageProgress]:
    """Show the progress of stages on standard error: bars in a terminal, lines elsewhere."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield line_progress(sys.stderr)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class Bars(Progress):
        def start(self) -> None:
            start_live(self.live)

    tasks: dict[str, Any] = {}
    name, percent = TextColumn("{task.description}", markup=False), "{task.percentage:>3.0f} %"
    columns = (name, BarColumn(), TextColumn(percent), TimeRemainingColumn())
    with Bars(*columns, console=rich_console(sys.stderr), transient=True) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def line_progress(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> StageProgress:
    """Write a line when a stage has taken some seconds since the last one."""
    current, last = "", 0.0

    def show(stage: str, done: int, total: int) -> None:
        nonlocal current, last
        now = clock()
        if stage != current:
            current, last = stage, now
        elif now - last >= SECONDS_BETWEEN_LINES:
            last = now
            stream.write(f"{stage}: {done:,} of {total:,} ({100 * done // max(total, 1)} %)\n")
            stream.flush()

    return show
