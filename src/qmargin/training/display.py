"""What a run shows while it goes on: a bar in a terminal, one plain line per interval elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from qmargin.terminal import rich_console, start_live

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import Task


class Display(Protocol):
    """Shows steps, their records and notes."""

    def moved(self, step: int, eta_s: float | None) -> None:
        """Show how many steps have been taken, and the seconds left."""
        ...

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a record of the journal."""
        ...

    def note(self, text: str) -> None:
        """Show a sentence."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def describe(record: Mapping[str, Any]) -> str:
    """A step record in one line.

    Examples:
        >>> record = {"step": 20, "total_steps": 300, "epoch": 0, "loss": 1.5, "lr": 0.1}
        >>> record |= {"margin": 0.2, "effective_margin": 0.5, "path": "sparse", "eta_s": 65.4}
        >>> describe(record | {"support_mean": 12.25, "support_max": 40, "samples_per_s": 5120.0})
        'step 20/300, epoch 0, loss 1.5, lr 0.1, margin 0.2 (0.5), support 12.25 (max 40), sparse, \
5,120 samples/s, 0:01:05 left'
    """
    parts = [
        f"step {record['step']}/{record['total_steps']}",
        f"epoch {record['epoch']}",
        f"loss {_number(record['loss'])}",
        *_settings(record),
        f"{record['samples_per_s']:,.0f} samples/s",
        f"{duration(record['eta_s'])} left",
    ]
    return ", ".join(parts)


def open_display(total_steps: int, *, start: int = 0, stream: TextIO | None = None) -> Display:
    """A bar if the stream is a terminal and rich is installed, otherwise plain lines.

    Args:
        total_steps: Of the run.
        start: Steps that were taken before.
        stream: Standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty() or find_spec("rich") is None:
        return PlainDisplay(stream)
    return BarDisplay(stream, total_steps, start)


class PlainDisplay:
    """A line per record, for files and job managers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def moved(self, step: int, eta_s: float | None) -> None:
        """Nothing: a line per record is enough."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Write the record."""
        self.note(describe(record))

    def note(self, text: str) -> None:
        """Write a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to clear."""


class BarDisplay:
    """A bar, and the numbers of the last record in a line below it."""

    def __init__(self, stream: TextIO, total_steps: int, start: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._line = Text("waiting for the first record")
        self._bars: Bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        self._bars.add_task("", total=total_steps, completed=start, speed="")
        self.task: Task = self._bars.tasks[0]
        self._rate = ""
        shown = Group(self._bars, self._line)
        self._live = Live(shown, console=rich_console(stream), refresh_per_second=4)
        start_live(self._live)

    def moved(self, step: int, eta_s: float | None) -> None:
        """Move the bar; it is drawn a few times a second, so this costs next to nothing."""
        self.task.completed = step
        self.task.fields["speed"] = f"{self._rate}{duration(eta_s)} left"

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar and change the numbers."""
        self._rate = f"{record['samples_per_s']:,.0f} samples/s, "
        self.task.description = f"epoch {record['epoch']}"
        self.moved(record["step"], record["eta_s"])
        self._line.plain = ", ".join([f"loss {_number(record['loss'])}", *_settings(record)])

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._live.stop()


class NoDisplay:
    """Shows nothing: for every rank but the first."""

    def moved(self, step: int, eta_s: float | None) -> None:
        """Do nothing."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _settings(record: Mapping[str, Any]) -> list[str]:
    effective = record.get("effective_margin")
    gap = "" if effective is None else f" ({_number(effective)})"
    return [
        f"lr {_number(record['lr'])}",
        f"margin {_number(record['margin'])}{gap}",
        f"support {_number(record['support_mean'])} (max {_number(record['support_max'])})",
        str(record["path"]),
    ]


def _number(value: float | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def duration(seconds: float | None) -> str:
    """Seconds for people.

    Examples:
        >>> duration(3725.2)
        '1:02:05'
    """
    return "unknown time" if seconds is None else str(timedelta(seconds=round(seconds)))
