"""Reports of a run, from rank 0: ``journal.jsonl``, ``status.json``, terminal and trackers."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, TextIO

from qmargin.errors import ConfigError
from qmargin.files import check_regular, open_regular, replacing
from qmargin.schema import check_known
from qmargin.terminal import rich_console, start_live
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import to_dict
from qmargin.training.session import Session
from qmargin.training.signals import Interrupted

JOURNAL = "journal.jsonl"
ABANDONED = "journal-abandoned.jsonl"
STATUS = "status.json"
SPAN_S = 1.0  # steps are timed together for at least this long: loaders deliver in bursts
NUM_SPANS = 30  # of the recent ones, whose median is the speed


def read_status(folder: str | Path) -> dict[str, Any]:
    """The status of the last run in a folder; empty if it cannot be read."""
    try:
        with open_regular(Path(folder) / STATUS) as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: numbers that are not finite become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Display:
    """Write a line per record and note, for files and job managers; nothing without a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def moved(self, step: int, eta_s: float | None) -> None:
        """Show how many steps have been taken, and the seconds left."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a record of the journal."""
        self.note(describe(record))

    def note(self, text: str) -> None:
        """Show a sentence."""
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Restore the terminal."""


class BarDisplay(Display):
    """A bar, and the numbers of the last record in a line below it."""

    def __init__(self, stream: TextIO, total_steps: int, start: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._line = Text("waiting for the first record")
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        bars = Progress(TextColumn("{task.description}"), *columns)
        bars.add_task("", total=total_steps, completed=start, speed="")
        self.task = bars.tasks[0]
        self._rate = ""
        shown = Group(bars, self._line)
        self._live = Live(shown, console=rich_console(stream), refresh_per_second=4)
        start_live(self._live)

    def moved(self, step: int, eta_s: float | None) -> None:
        """Move the bar; it is drawn a few times a second, so this is cheap."""
        self.task.completed = step
        self.task.fields["speed"] = f"{self._rate}{duration(eta_s)} left"

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar and change the numbers."""
        self._rate = f"{record['samples_per_s']:,.0f} samples/s, "
        self.task.description = f"epoch {record['epoch']}"
        self.moved(record["step"], record["eta_s"])
        self._line.plain = _settings(record)

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar."""
        self._live.stop()


def open_display(total_steps: int, *, start: int = 0, stream: TextIO | None = None) -> Display:
    """A bar if the stream, standard error by default, is a terminal, otherwise plain lines."""
    stream = sys.stderr if stream is None else stream
    return BarDisplay(stream, total_steps, start) if stream.isatty() else Display(stream)


def describe(record: Mapping[str, Any]) -> str:
    """A step record in one line."""
    return (
        f"step {record['step']}/{record['total_steps']}, epoch {record['epoch']}, "
        f"{_settings(record)}, {record['samples_per_s']:,.0f} samples/s, "
        f"{duration(record['eta_s'])} left"
    )


def _settings(record: Mapping[str, Any]) -> str:
    def number(name: str) -> str:
        value = record[name]
        return f"{value:.4g}" if isinstance(value, int | float) else str(value)

    gap = "" if record.get("effective_margin") is None else f" ({number('effective_margin')})"
    return (
        f"loss {number('loss')}, lr {number('lr')}, margin {number('margin')}{gap}, "
        f"support {number('support_mean')} (max {number('support_max')}), {record['path']}"
    )


def duration(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds, such as ``1:02:05``."""
    return "unknown time" if seconds is None else str(timedelta(seconds=round(seconds)))


class Meter:
    """Samples per second since the last record, and time left by the median of recent spans."""

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
        if self._span_began is None:  # the first step, which compiles kernels, is left out
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
        """Seconds for the remaining steps; None before the second step."""
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


class _TensorBoard:
    """Scalars in ``DIR/tensorboard``."""

    def __init__(self, recipe: Recipe, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # numbers from a step on replace what an abandoned attempt wrote
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        self.close = self._writer.close

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)


class _Wandb:
    """A run of Weights & Biases, which a resumed training run continues."""

    def __init__(self, recipe: Recipe, folder: Path, step: int) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        marker = folder / "wandb-run.txt"
        name = marker.read_text(encoding="ascii").strip() if marker.exists() else None
        options = {"id": name, "resume": "allow", "dir": str(folder)}
        run: Any = wandb.init(name=recipe.name, config=to_dict(recipe), **options)
        marker.write_text(f"{run.id}\n", encoding="ascii")
        self.log, self.close = run.log, run.finish


TRACKERS: dict[str, type[_TensorBoard] | type[_Wandb]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before anything else is done."""
    for name in names:
        check_known(name, TRACKERS, "a tracker")
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; pip install 'qmargin[{name}]', or drop it")


class Reporter:
    """Report a run's events; no-op on ranks other than 0.

    A resumed run continues the journal at its checkpoint. Later entries, whose steps are repeated,
    move to ``journal-abandoned.jsonl``: no step is listed twice, and nothing is lost.
    """

    def __init__(self, folder: Path, session: Session, trackers: Sequence[str] = ()) -> None:
        recipe, step, total_steps = session.recipe, session.progress.step, session.total_steps
        self._folder = folder
        self._display = Display()
        self._journal: BinaryIO | None = None
        self._trackers: list[_TensorBoard | _Wandb] = []
        self._status: dict[str, Any] = {
            "state": "running",
            "recipe": recipe.name,
            "recipe_sha256": recipe.sha256,
            "world": session.process.world,
            "step": step,
            "total_steps": total_steps,
        }
        if session.process.is_first:
            self._journal = _open_journal(folder / JOURNAL, session.journal_bytes)
            self._display = open_display(total_steps, start=step)
            self._trackers = [TRACKERS[name](recipe, folder, step) for name in trackers]
        self.note, self.moved = self._display.note, self._display.moved

    def event(self, name: str, **values: Any) -> None:
        """Append to the journal; each line is flushed at once, so that a kill loses none."""
        if self._journal is not None:
            record = {"event": name, "time": round(time.time(), 3), **values}
            self._journal.write(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
            self._journal.flush()

    def step(self, record: Mapping[str, Any]) -> None:
        """Report a step to the journal, the terminal, the trackers and the status."""
        self.event("step", **record)
        self._display.step(record)
        self._track(record, record["step"])
        names = ("step", "epoch", "loss", "lr", "samples_per_s", "eta_s")
        self.status(**{name: record[name] for name in names})

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Report the results of hooks, as ``step`` does."""
        self.event("validation", step=step, metrics=dict(metrics))
        texts = [f"{name} {value:.4g}" for name, value in metrics.items()]
        self.note(f"validation at step {step}: {', '.join(texts)}")
        self._track({f"validation/{name}": value for name, value in metrics.items()}, step)
        self.status(metrics=dict(metrics))

    def status(self, **values: Any) -> None:
        """Change values of the status atomically."""
        self._status.update(values)
        if self._journal is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        where = {"updated": now, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps(plain({**self._status, **where}), indent=1, allow_nan=False)
        with replacing(self._folder / STATUS, sync=False) as temporary:  # the journal has the facts
            temporary.write_text(text + "\n", encoding="utf-8")

    def sync(self) -> int:
        """Bytes of the journal, all on the disk; 0 where there is none."""
        if self._journal is None:
            return 0
        os.fsync(self._journal.fileno())
        return self._journal.tell()

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Context of the run; record how it ends in journal and status."""
        try:
            yield
        except Interrupted as stop:
            self.event("stopped", signal=stop.signal)
            self.status(state="stopped", signal=stop.signal)
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.event("error", error=text)
            self.status(state="failed", error=text)
            raise

    def close(self) -> None:
        """Restore the terminal, and write pending output."""
        self._display.close()
        for tracker in self._trackers:
            tracker.close()
        if self._journal is not None:
            self._journal.close()

    def _track(self, record: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a record, without texts, truth values and None."""
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }
        for tracker in self._trackers:
            tracker.log(numbers, step=step)


def _open_journal(path: Path, num_bytes: int) -> BinaryIO:
    """Open a journal to append to what is kept of it."""
    if path.exists():
        check_regular(path)  # a pipe would be waited for
        content = path.read_bytes()
        num_kept = content[:num_bytes].rfind(b"\n") + 1  # whole lines
        if rest := content[num_kept:]:
            with path.with_name(ABANDONED).open("ab") as file:
                file.write(rest if rest.endswith(b"\n") else rest + b"\n")
            os.truncate(path, num_kept)
    return path.open("ab")
