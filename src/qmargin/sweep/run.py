"""A sweep from end to end: train what is missing, keep what is there, write tables and figures.

Everything is in one folder: ``sweep.json``, ``trials.jsonl``, a folder per trial with its training
and its ``result.json``, tables and figures. What is there is not done again.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from qmargin.errors import ConfigError, DataError
from qmargin.files import write_atomically
from qmargin.sweep.axes import (
    Axis,
    Point,
    check_axes,
    check_points,
    described,
    first_point,
    grid,
    with_point,
)
from qmargin.sweep.plan import TRIALS, find_measure, keep_plan, known_points, trial_folder
from qmargin.sweep.slots import Slots, TrialOptions, open_slots
from qmargin.sweep.sources import Grid, OptunaSearch, Source, check_package
from qmargin.sweep.summary import Summary, by_point
from qmargin.sweep.trial import Trial, TrialResult, read_trial_result
from qmargin.sweep.validation import EER, DataSource, RecipeData
from qmargin.sweep.write import check_outputs, write_outputs
from qmargin.training.display import duration
from qmargin.training.folders import check_writable
from qmargin.training.lock import RunLock
from qmargin.training.process import choose_device
from qmargin.training.recipe import Recipe
from qmargin.training.schedules import unreached
from qmargin.training.signals import StopRequest

NUM_POINTS = 40  # of a search that was not told how many


@dataclass(frozen=True)
class SweepOptions:
    """What to run; most fields are options of ``qmargin sweep``.

    Attributes:
        recipe: That every trial begins with.
        axes: What differs between trials.
        out: Folder of the sweep; one that holds a part of it is completed.
        seeds: Trials of each point; the recipe's seed and those after it.
        search: ``"grid"`` for every combination, or ``"optuna"``.
        num_points: That a search visits; None for 40. A grid visits all, and takes no number.
        measure: That a search and early stopping look at; None for the strictest TAR that the
            validation data measure well.
        stop_early: Whether the median rule may end trials.
        parallel: Trials at once; None for one on each device.
        devices: Such as ``("cuda:0", "cuda:1")``.
        data: Training and validation data of a trial.
        command: For the record.
        say: Gets a line for people now and then; standard output by default.
        overwrite: Replace tables in a folder that holds no sweep yet.
    """

    recipe: Recipe
    axes: tuple[Axis, ...]
    out: Path
    seeds: int = 1
    search: Literal["grid", "optuna"] = "grid"
    num_points: int | None = None
    measure: str | None = None
    stop_early: bool = False
    parallel: int | None = None
    devices: tuple[str, ...] = ("auto",)
    data: DataSource = field(default_factory=RecipeData)
    command: str = "qmargin sweep"
    say: Callable[[str], None] | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "num_points", "parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not self.axes and (self.seeds == 1 or self.search != "grid"):
            raise ConfigError("there is nothing to sweep; give --grid KEY=VALUE,VALUE or --seeds")
        if self.search == "grid" and self.num_points is not None:
            raise ConfigError(
                f"--trials is {self.num_points} and a grid visits every combination; add --search "
                "optuna, or leave --trials out"
            )
        if not self.devices:
            raise ConfigError("devices is empty; name at least one, such as cpu")
        check_axes(self.recipe, self.axes)
        if self.search == "grid":
            check_points(self.recipe, grid(self.axes))
        else:
            for axis in self.axes:  # is every key known?
                with_point(self.recipe, first_point(self.recipe, axis))

    @property
    def num_slots(self) -> int:
        """Trials at once."""
        return len(self.devices) if self.parallel is None else self.parallel


def run_sweep(options: SweepOptions) -> Summary:
    """Train and measure what is missing; returns all rows.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM, after saving; run again, it goes on.
        ConfigError: The folder holds another sweep, or the axes do not fit the recipe.
        DataError: Trials failed; the others are in the tables.
    """
    out = options.out
    measure = _checked_measure(options)
    with RunLock(out), StopRequest() as request:
        check_writable(out)
        check_outputs(out, overwrite=options.overwrite)
        keep_plan(
            out,
            recipe=options.recipe,
            axes=options.axes,
            seeds=options.seeds,
            search=options.search,
            measure=measure,
            command=options.command,
        )
        schedule = Schedule(options, _source(options, measure), measure)
        schedule.take_listed()
        shared = TrialOptions(options.data, measure, options.stop_early)
        slots = open_slots(
            shared, devices=options.devices, parallel=options.num_slots, request=request
        )
        with slots:
            _follow(schedule, slots, options)
        summary = schedule.summary()
        for path in write_outputs(summary, out):
            _say(options, f"wrote {path}")
        _tell_end(summary, options)
    return summary


def _checked_measure(options: SweepOptions) -> str:
    """The measure, after all that can be refused without a folder."""
    for name in options.devices:
        choose_device(0, name)
    if options.search == "optuna":
        check_package()
    return find_measure(options.recipe, options.data, options.measure)


class Schedule:
    """Points one after the other, a trial for each seed, and the results so far."""

    def __init__(self, options: SweepOptions, source: Source, measure: str) -> None:
        self._options, self._source, self.measure = options, source, measure
        self._waiting: deque[Trial] = deque()
        self._points: list[tuple[Point, Recipe]] = []
        self.results: dict[Path, TrialResult] = {}
        self._warned: set[str] = set()
        self.num_trials = source.num_points * options.seeds

    def take_listed(self) -> None:
        """Take from the disk what is there of points that are sure to come, to count it at once."""
        for point in self._source.listed:
            for trial in self._trials(point) or ():
                result = read_trial_result(trial)
                if result is not None:
                    self.results[trial.folder] = result

    def next_trial(self) -> Trial | None:
        """The next trial without a result; those with one are taken from the disk."""
        while not self._waiting:
            point = self._source.next_point()
            if point is None:
                return None
            if any(point == begun for begun, _ in self._points):
                self._repeat(point)
                continue
            trials = self._trials(point)
            if trials is None:
                self._source.tell(point, None)
                continue
            self._begin(point, trials)
        return self._waiting.popleft()

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Keep a result."""
        self.results[trial.folder] = result
        self._tell_source(trial.point)

    def summary(self) -> Summary:
        """All rows so far."""
        rows = by_point(self._points, list(self.results.values()), self._options.seeds)
        return Summary(rows, self.measure)

    def _begin(self, point: Point, trials: Sequence[Trial]) -> None:
        self._warn(trials[0].recipe)
        self._points.append((point, trials[0].recipe))
        for trial in trials:
            result = self.results.get(trial.folder) or read_trial_result(trial)
            if result is None:
                self._waiting.append(trial)
            else:
                self.results[trial.folder] = result
        self._tell_source(point)

    def _warn(self, recipe: Recipe) -> None:
        """Say once what trials of this length schedule and never do."""
        for sentence in unreached(recipe, recipe.run.epochs):
            what = sentence.partition(" and never")[0]  # not with the margin of every point
            if what not in self._warned:
                self._warned.add(what)
                _say(self._options, f"warning: {sentence}")

    def _repeat(self, point: Point) -> None:
        """A search may propose a point again: one training of each seed is enough."""
        self.num_trials -= self._options.seeds
        if not self._tell_source(point):
            self._source.tell(point, None)  # it runs just now; its value comes when it has ended

    def _trials(self, point: Point) -> list[Trial] | None:
        """A trial for each seed; None for values that do not go together, as in a search."""
        recipe, out = self._options.recipe, self._options.out
        seeds = range(recipe.seed, recipe.seed + self._options.seeds)
        try:
            recipes = [with_point(recipe, point, seed=seed) for seed in seeds]
        except ConfigError:
            return None
        return [Trial(point, own, trial_folder(out, point, own)) for own in recipes]

    def _tell_source(self, point: Point) -> bool:
        """Tell the mean once all seeds have ended; whether they have."""
        row = next(row for row in self.summary().rows if row.point == point)
        if len(row.results) < self._options.seeds:
            return False
        spread = row.spread(self.measure)
        has_failed = any(result.state == "failed" for result in row.results)
        self._source.tell(point, None if spread is None or has_failed else spread.mean)
        return True


def _source(options: SweepOptions, measure: str) -> Source:
    if options.search == "grid":
        return Grid(options.axes)
    return OptunaSearch(
        options.axes,
        options.recipe,
        num_points=NUM_POINTS if options.num_points is None else options.num_points,
        known=known_points(options.out),
        measure=measure,
    )


def _follow(schedule: Schedule, slots: Slots, options: SweepOptions) -> None:
    """Keep the slots busy until nothing is left."""
    began, num_kept = time.monotonic(), None
    while True:
        while slots.num_free and (trial := schedule.next_trial()) is not None:
            slots.start(trial)
        if num_kept is None:
            num_kept = len(schedule.results)
            _say(options, f"trials: {schedule.num_trials}, there already: {num_kept}")
        if slots.num_free == slots.num_slots:
            break
        ended, result = slots.wait()
        schedule.tell(ended, result)
        _write_trials(schedule, options.out)
        done = len(schedule.results)
        left = schedule.num_trials - done
        seconds = (time.monotonic() - began) / (done - num_kept) * left
        ending = f"; about {duration(seconds)} left" if left else ""
        told = _told(result, schedule.measure)
        _say(options, f"[{done}/{schedule.num_trials}] {ended.name}: {told}{ending}")
    _write_trials(schedule, options.out)


def _write_trials(schedule: Schedule, out: Path) -> None:
    lines = [json.dumps(_record(path, r, out)) for path, r in schedule.results.items()]
    write_atomically(out / TRIALS, "".join(f"{line}\n" for line in lines).encode())


def _record(folder: Path, result: TrialResult, out: Path) -> dict[str, Any]:
    return {**asdict(result), "folder": str(folder.relative_to(out))}


def _told(result: TrialResult, measure: str) -> str:
    shown = {name: result.metrics[name] for name in (measure, EER) if name in result.metrics}
    metrics = ", ".join(f"{name} {100 * value:.2f} %" for name, value in shown.items())
    reason = f"{result.state}: {result.error}" if result.error else ""
    return f"{'; '.join(filter(None, (reason, metrics)))} in {duration(result.seconds)}"


def _tell_end(summary: Summary, options: SweepOptions) -> None:
    best = summary.best()
    if best is not None:
        spread = best.spread(summary.measure)
        assert spread is not None  # or it could not be the best
        deviation = "" if spread.deviation is None else f" +- {100 * spread.deviation:.2f}"
        _say(
            options,
            f"best by {summary.measure}: {described(best.point)}, "
            f"{100 * spread.mean:.2f}{deviation} %",
        )
    failed = [r for row in summary.rows for r in row.results if r.state == "failed"]
    if failed:
        raise DataError(
            f"{len(failed)} of {sum(len(row.results) for row in summary.rows)} trials failed, the "
            f"first with {described(failed[0].point)}: {failed[0].error}; run again to retry"
        )


def _say(options: SweepOptions, text: str) -> None:
    if options.say is not None:
        options.say(text)
        return
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
