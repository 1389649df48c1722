"""Progress of a command in stages: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from qmargin.cli.tables import rich_bars

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 5.0


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


def stage_progress() -> PlainProgress | BarProgress:
    """What shows progress on standard error, to be used in a ``with`` statement."""
    bars = rich_bars("{task.percentage:>3.0f} %")
    return PlainProgress(sys.stderr) if bars is None else BarProgress(bars)
