"""Tables and progress that look right in a terminal and stay plain text in a file."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_WIDTH = 120  # a pipe has no width of its own, and wrapped cells are hard to search


def output_console() -> Console:
    """Console on standard output: colours in a terminal, plain text elsewhere."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=PLAIN_WIDTH, no_color=True)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print ``rows`` under ``columns``: the first holds text, the others numbers.

    Outside a terminal the table is Markdown, so that it can be pasted into a page.

    Example:
        >>> console = Console(width=40, no_color=True, force_terminal=False)
        >>> print_table(console, "Times", ["loss", "ms"], [["ours", "1.5"]])
        Times
        <BLANKLINE>
        | loss |  ms |
        |------|-----|
        | ours | 1.5 |
        <BLANKLINE>
    """
    style = box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN
    table = Table(box=style, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", highlight=False)
    console.print(table)


def progress_bar() -> Progress:
    """Progress with a bar, a count and the time left, on standard error, terminals only."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
