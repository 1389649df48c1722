"""Everything a run tells: journal, status, display and trackers, from the first rank only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from qmargin.training.display import Display, NoDisplay, open_display
from qmargin.training.journal import Journal
from qmargin.training.process import Process
from qmargin.training.recipe import Recipe
from qmargin.training.signals import Interrupted
from qmargin.training.status import write_status
from qmargin.training.trackers import TRACKERS, Tracker, numbers_of

SPAN_S = 1.0  # steps are timed together for at least this long: loaders deliver in bursts
NUM_SPANS = 30  # of the recent ones, whose median is the speed


class Meter:
    """Samples per second since the last record, and the time left at recent speed.

    The time left leaves out the first step, which compiles kernels and waits for workers. It takes
    the median of recent spans, so that a pause counts for nothing.

    Args:
        step: At which the run starts or goes on.
        clock: Seconds.
    """

    def __init__(self, step: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step, self._began = step, clock()
        self._samples = 0
        self._spans: deque[float] = deque(maxlen=NUM_SPANS)  # seconds per step
        self._span_began: float | None = None
        self._span_steps = 0
        self._pace: float | None = None

    def add(self, samples: int) -> None:
        """Count a step and its samples."""
        self._samples += samples
        now = self._clock()
        if self._span_began is None:
            self._span_began = now
            return
        self._span_steps += 1
        seconds = now - self._span_began
        if seconds >= SPAN_S:
            self._spans.append(seconds / self._span_steps)
            self._pace = median(self._spans)
            self._span_began, self._span_steps = now, 0
        elif not self._spans:
            self._pace = seconds / self._span_steps

    def eta_s(self, step: int, total_steps: int) -> float | None:
        """Seconds that the steps that are left take; None before the second step."""
        return None if self._pace is None else self._pace * (total_steps - step)

    def read(self, step: int, total_steps: int) -> dict[str, float | None]:
        """Rates since the last call, and the time left."""
        now = self._clock()
        elapsed = max(now - self._began, 1e-9)
        rates = {
            "samples_per_s": self._samples / elapsed,
            "seconds": elapsed / max(step - self._step, 1),
            "eta_s": self.eta_s(step, total_steps),
        }
        self._step, self._began, self._samples = step, now, 0
        return rates


class Reporter:
    """Tells what happens; on ranks other than the first, and without a folder, nobody listens.

    Args:
        folder: The output folder; None to write nothing.
        process: This rank.
        recipe: Of the run.
        step: At which the run starts or goes on.
        total_steps: Of the run.
        journal_bytes: Of the journal that stay.
        trackers: Names of ``TRACKERS``.
    """

    def __init__(
        self,
        folder: Path | None,
        process: Process,
        recipe: Recipe,
        *,
        step: int,
        total_steps: int,
        journal_bytes: int = 0,
        trackers: Sequence[str] = (),
    ) -> None:
        self._folder = folder if process.is_first else None
        self._display: Display = NoDisplay()
        self._journal: Journal | None = None
        self._trackers: list[Tracker] = []
        self._status: dict[str, Any] = {
            "state": "running",
            "recipe": recipe.name,
            "recipe_sha256": recipe.sha256,
            "world": process.world,
            "step": step,
            "total_steps": total_steps,
        }
        if self._folder is not None:
            self._journal = Journal(self._folder, offset=journal_bytes)
            self._display = open_display(total_steps, start=step)
            self._trackers = [TRACKERS[name](recipe, self._folder, step) for name in trackers]

    def event(self, name: str, **values: Any) -> None:
        """Add an event to the journal."""
        if self._journal is not None:
            self._journal.write(name, values)

    def note(self, text: str) -> None:
        """Show a sentence."""
        self._display.note(text)

    def moved(self, step: int, eta_s: float | None) -> None:
        """Show that a step was taken, and the seconds left."""
        self._display.moved(step, eta_s)

    def step(self, record: Mapping[str, Any]) -> None:
        """Tell everyone about a step."""
        self.event("step", **record)
        self._display.step(record)
        self._track(record, record["step"])
        names = ("step", "epoch", "loss", "lr", "samples_per_s", "eta_s")
        self.status(**{name: record[name] for name in names})

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Tell everyone about the results of hooks."""
        self.event("validation", step=step, metrics=dict(metrics))
        texts = [f"{name} {value:.4g}" for name, value in metrics.items()]
        self.note(f"validation at step {step}: {', '.join(texts)}")
        self._track({f"validation/{name}": value for name, value in metrics.items()}, step)
        self.status(metrics=dict(metrics))

    def status(self, **values: Any) -> None:
        """Change values of the status."""
        self._status.update(values)
        if self._folder is not None:
            write_status(self._folder, self._status)

    def sync(self) -> int:
        """Bytes of the journal, all on the disk; 0 where there is none."""
        return 0 if self._journal is None else self._journal.sync()

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Around the run: what ends it is in the journal and in the status."""
        try:
            yield
        except Interrupted as stop:
            self.event("stopped", signal=stop.signal)
            self.status(state="stopped", signal=stop.signal)
            raise
        except BaseException as error:
            self.event("error", error=f"{type(error).__name__}: {error}")
            self.status(state="failed", error=f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Leave the terminal as it was, and write what is left."""
        self._display.close()
        for tracker in self._trackers:
            tracker.close()
        if self._journal is not None:
            self._journal.close()

    def _track(self, record: Mapping[str, Any], step: int) -> None:
        numbers = numbers_of(record)
        for tracker in self._trackers:
            tracker.log(numbers, step)
