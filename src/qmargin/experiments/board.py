"""Progress of the runs of an experiment while several run at once."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from qmargin.experiments.run import Run
from qmargin.terminal import rich_console, start_live
from qmargin.training.reporting import duration, read_status

SECONDS_BETWEEN_LINES = 20.0  # without a terminal
SHARE_OF_TRAINING = 0.93  # of a run if nothing better is known; the test is the rest
LEAST_SHARE = 0.03  # of a run that tells how long it takes


def seconds_left(
    finished: Iterable[float], running: Sequence[tuple[float, float]], waiting: int, slots: int
) -> float | None:
    """Seconds until all runs are over, each started as soon as a slot is free; None if unknown.

    Args:
        finished: Seconds of the runs that are over.
        running: Seconds since the start of those that run, and the share that is done.
        waiting: Runs that have not started.
        slots: Runs at once.

    Examples:
        >>> seconds_left([100.0, 100.0], [(50.0, 0.5), (50.0, 0.5)], waiting=1, slots=2)
        150.0
    """
    known = [*((seconds, 1.0) for seconds in finished), *running]
    known = [(seconds, share) for seconds, share in known if share >= LEAST_SHARE]
    if not known:
        return None
    each = sum(seconds for seconds, _ in known) / sum(share for _, share in known)
    ends = [each * (1.0 - share) for _, share in running] + [0.0] * (slots - len(running))
    heapq.heapify(ends)
    for _ in range(waiting):
        heapq.heappush(ends, heapq.heappop(ends) + each)
    return max(ends, default=0.0)


class Board:
    """Progress of running runs: bars on a terminal, otherwise a line from time to time."""

    def __init__(
        self, stream: TextIO | None = None, *, share_of_training: float = SHARE_OF_TRAINING
    ) -> None:
        self._share_of_training = share_of_training
        self._stream = sys.stderr if stream is None else stream
        self._began: dict[Run, float] = {}
        self._said = time.monotonic()
        self._bars = _Bars(self._stream) if self._stream.isatty() else None

    def start(self, run: Run) -> None:
        """Note that a run has started."""
        self._began[run] = time.monotonic()

    def end(self, run: Run) -> None:
        """Note that a run has ended."""
        self._began.pop(run, None)

    def running(self) -> list[tuple[float, float]]:
        """Seconds and share of every running run."""
        now = time.monotonic()
        return [(now - began, self._share(run)) for run, began in self._began.items()]

    def look(self, left: float | None) -> None:
        """Show the progress of the runs, and the seconds left."""
        now = time.monotonic()
        if self._bars is None and now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = now
        shares = {run.name: self._share(run) for run in self._began}
        about = "" if left is None else f"about {duration(left)} left"
        if self._bars is not None:
            self._bars.show(shares, about)
            return
        text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        self._stream.write(f"{'; '.join(filter(None, (text, about)))}\n")
        self._stream.flush()

    def _share(self, run: Run) -> float:
        """Share of a run that is done, by its ``status.json``."""
        status = read_status(run.folder)
        step, total = status.get("step"), status.get("total_steps")
        if not isinstance(step, int) or not isinstance(total, int) or total < 1:
            return 0.0
        return self._share_of_training * min(1.0, step / total)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.close()


class _Bars:
    """A bar for every run."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.text import Text

        self._columns = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        )
        self._line = Text("")
        shown = Group(self._columns, self._line)
        self._live = Live(shown, console=rich_console(stream), refresh_per_second=4, transient=True)
        start_live(self._live)

    def show(self, shares: dict[str, float], about: str) -> None:
        """Draw the bars of the running runs."""
        known = {task.description: task.id for task in self._columns.tasks}
        for name in known.keys() - shares.keys():
            self._columns.remove_task(known[name])
        for name, share in shares.items():
            if name not in known:
                known[name] = self._columns.add_task(name, total=1.0)
            self._columns.update(known[name], completed=share)
        self._line.plain = about

    def close(self) -> None:
        """Remove the bars."""
        self._live.stop()
