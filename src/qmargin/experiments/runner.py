"""``run_experiment``: search settings, train, test, report; complete runs are kept.

A folder has ``experiment.yaml`` (the record of the experiment), ``search/`` and ``runs/`` with a
folder per run, tables and figures of the search, and ``report/``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.experiments.board import SHARE_OF_TRAINING, Board, seconds_left
from qmargin.experiments.experiment import Experiment
from qmargin.experiments.measure import (
    EER,
    check_pairs,
    check_trials,
    choose_measure,
    num_pairs,
    recordings_in,
)
from qmargin.experiments.run import (
    FINAL,
    RESULT,
    SEARCH,
    TEST_FARS,
    Outcome,
    Run,
    Task,
    read_outcome,
)
from qmargin.experiments.search import Sampled, Source, Tried, finalists_of, gather, ranked
from qmargin.experiments.slots import Slots, open_slots
from qmargin.experiments.space import REACH, Point, described
from qmargin.experiments.storage import JOURNAL, RunBook, check_optuna, open_storage
from qmargin.experiments.tables import (
    PICTURES,
    check_outputs,
    edge_notes,
    measure_text,
    write_final,
    write_search,
)
from qmargin.experiments.worlds import Stored
from qmargin.files import write_atomically
from qmargin.metrics.operating import sufficiency
from qmargin.schema import dump_yaml, flatten, load_yaml, read_text
from qmargin.training.checkpoint import check_writable
from qmargin.training.distributed import choose_device
from qmargin.training.recipe import FREE, is_under
from qmargin.training.recipe_files import apply_settings
from qmargin.training.reporting import duration
from qmargin.training.schedules import unreached
from qmargin.training.signals import StopRequest
from qmargin.training.start import RunLock

RECORD = "experiment.yaml"
FORMAT = {"format": "qmargin-experiment", "version": 1}
POLL_S = 1.0  # seconds between checks of other processes
MOST_NAMED = 6  # settings that differ, in a message
MEASURE = "search.measure"
SAY = partial(print, flush=True)


@dataclass(frozen=True)
class Finished:
    """Results of an experiment."""

    experiment: Experiment
    out: Path
    rounds: tuple[tuple[Tried, ...], ...]  # points that each round of the search tried
    chosen: Mapping[str, Point]  # settings of every arm
    measure: str | None  # by which they were chosen; None without a search
    paths: Mapping[str, tuple[Path, ...]]  # results of tested runs by the names of their files

    @property
    def results(self) -> list[Result]:
        """By cosines, in the order of seeds and arms."""
        return [read_result(path) for path in self.paths.get(RESULT, ())]

    @property
    def page(self) -> Path:
        """The report."""
        return self.out / "report" / "index.html"


@dataclass(frozen=True)
class RunOptions:
    """Options of running an experiment.

    Args:
        devices: Such as ``("cuda:0", "cuda:1")``.
        jobs: Parallel runs, spread over the devices; None for one on each.
        storage: URL of an Optuna storage that processes and machines share.
        search_only: Stop after the search for settings.
        overwrite: Replace files that no experiment wrote.
        show: Show training progress; otherwise it is logged in the folder of each run.
        command: Command line, for the record.
        say: Called with each line of output; standard output by default.
        share_of_training: Share of training in the time of a run, to estimate the time left.
    """

    devices: Sequence[str] = ("auto",)
    jobs: int | None = None
    storage: str | None = None
    search_only: bool = False
    overwrite: bool = False
    show: bool = False
    command: str = "qmargin compare"
    say: Callable[[str], object] = SAY
    share_of_training: float = SHARE_OF_TRAINING

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("devices is empty; name at least one, such as cpu")
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; it must be at least 1")


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    devices: Sequence[str] = ("auto",),
    jobs: int | None = None,
    storage: str | None = None,
    search_only: bool = False,
    overwrite: bool = False,
    show: bool = False,
    say: Callable[[str], object] | None = None,
) -> list[Result]:
    """Run or continue an experiment, and return the results of its tested runs.

    Args:
        experiment: What to run.
        out: Output folder. Runs that are complete there are not repeated.
        devices: Such as ``("cuda:0", "cuda:1")``.
        jobs: Number of parallel runs, spread over the devices; None for one per device.
        storage: URL of an Optuna storage that processes and machines share.
        search_only: Stop after the search for settings.
        overwrite: Replace files in ``out`` that no experiment wrote.
        show: Show training progress; by default it is logged in the folder of each run.
        say: Called with each line of output; None prints it.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM, after saving; run again to continue.
        ConfigError: The folder holds another experiment, or something does not fit.
        DataError: The data cannot be read or divided, or runs failed; the others are in the tables.

    Examples:
        >>> import tempfile
        >>> from qmargin.experiments.experiment import from_mapping
        >>> experiment = from_mapping({
        ...     "recipe": "debug", "set": {"run.max_steps": 2}, "seeds": 1,
        ...     "data": {"num_test": 20, "samples_test": 4}, "protocol": {"replicates": 0},
        ...     "arms": {"cosface": {"scale": 16}},
        ... })
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (result,) = run_experiment(experiment, folder, devices=["cpu"], say=lambda _: None)
        >>> result.system.name, result.protocol.num_genuine
        ('CosFace', 120)
    """
    options = RunOptions(
        devices=devices,
        jobs=jobs,
        storage=storage,
        search_only=search_only,
        overwrite=overwrite,
        show=show,
        say=say or SAY,
    )
    return complete(experiment, out, options).results


def complete(
    experiment: Experiment, out: str | Path, options: RunOptions | None = None
) -> Finished:
    """Like ``run_experiment``, but return all results."""
    options = options or RunOptions()
    if options.search_only:
        experiment = replace(experiment, seeds=())
    conductor = _Conductor(experiment, Path(out), options)
    with conductor.working():
        return conductor.conduct()


class _Conductor:
    """One call of ``complete``."""

    def __init__(self, experiment: Experiment, out: Path, options: RunOptions) -> None:
        self.out, self.options, self.say = out, options, options.say
        self.devices = [str(choose_device(0, name)) for name in options.devices]
        self.jobs = len(self.devices) if options.jobs is None else options.jobs
        self.experiment = replace(experiment, world=experiment.world.opened())
        self.task = Task(
            self.experiment.world,
            experiment.protocol,
            experiment.title or experiment.name,
            options.command,
            out / PICTURES,
            show=options.show and self.jobs == 1,  # several share a board
        )
        self.measure = self._check_data()
        search = experiment.search
        self.needs_optuna = bool(experiment.searched) and (search.method != "grid" or search.prune)
        if self.needs_optuna:
            check_optuna("pruning" if search.method == "grid" else f"search.method {search.method}")
        if options.storage is not None:
            open_storage(options.storage)
        self.request = StopRequest()
        self.book: RunBook | None = None

    def _check_data(self) -> str | None:
        """Check all data before training; return the measure of the search."""
        experiment, measure = self.experiment, None
        world, fars = experiment.world, experiment.protocol.fars or ()
        if experiment.primary is not None and not fars:
            fars = (experiment.primary.far,)
            if fars[0] not in TEST_FARS[:3]:  # that every test has
                raise ConfigError(f"primary.far is {fars[0]:g}; name it in protocol.far as well")
        name = next(iter(experiment.searched or experiment.arms))
        arm = experiment.arms[name]
        point = dict(arm.points[0]) if arm.points else {}
        if experiment.searched:
            seed = experiment.search.seeds[0]
            recipe = experiment.run_recipe(name, point, seed=seed, is_search=True)
            labels = world.measured(recipe, is_search=True).labels
            if labels is None:
                raise ConfigError("the validation data do not list their labels")
            check_pairs(labels)
            sizes = len(np.unique(np.asarray(labels))), len(labels)
            measure = choose_measure(experiment.search.measure, num_pairs(labels)[1], sizes)
        for seed in experiment.seeds_of(name)[:1]:
            recipe = experiment.run_recipe(name, point, seed=seed, is_search=False)
            if unchecked := world.check(recipe):
                self.say(f"warning: {unchecked}")
            tested = world.measured(recipe, is_search=False)
            if isinstance(world, Stored) and world.trials is not None:
                check_trials(Path(world.trials), fars)
                continue
            if recipe.data.kind == "audio":
                recordings_in(tested)
                if experiment.protocol.every_epochs is not None:
                    raise ConfigError("protocol.every_epochs is not for recordings; leave it out")
            if tested.labels is not None:
                check_pairs(tested.labels, fars)
                self._warn_of_few(num_pairs(tested.labels)[1])
        return measure

    def _warn_of_few(self, num_impostors: int) -> None:
        """Warn if the primary comparison rests on few false accepts."""
        primary = self.experiment.primary
        if primary is not None:
            enough = sufficiency(primary.far, num_impostors)
            if enough.status == "few":
                self.say(f"warning: at primary.far {primary.far:g} {enough.message}")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lock the folder, handle signals, and share runs."""
        url, experiment = self.options.storage, self.experiment
        record = _record(experiment, self.measure)
        with ExitStack() as stack:
            if url is None:  # processes that share a storage may share the folder, too
                stack.enter_context(RunLock(self.out))
            stack.enter_context(self.request)
            check_writable(self.out)
            check_outputs(self.out, RECORD, overwrite=self.options.overwrite)
            keep_record(self.out, record, experiment, self.options.command)
            if url is not None or self.needs_optuna:
                digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
                book = RunBook(
                    url or f"{JOURNAL}{self.out.resolve() / 'optuna.log'}",
                    f"qmargin {experiment.name} {digest[:12]}",
                    measure=self.measure or EER,
                    prune=experiment.search.prune,
                    is_shared=url is not None,
                )
                self.book = stack.enter_context(book)
            yield

    def conduct(self) -> Finished:
        """Run the search and the tested runs, and write the results."""
        experiment = self.experiment
        if experiment.world.note:
            self.say(experiment.world.note)
        for name, arm in experiment.arms.items():
            if arm.left_out:
                total = len(arm.left_out) + len(arm.points)
                self.say(
                    f"{name}: {len(arm.left_out)} of {total} settings are left out, because their "
                    f"reach is below that of no margin: {'; '.join(map(described, arm.left_out))}"
                )
        rounds = self._search() if experiment.searched else ()
        chosen = self._chosen(rounds)
        notes: list[str] = []
        if rounds:
            for path in write_search(self.out, experiment, rounds, chosen, self.measure or EER):
                self.say(f"wrote {path}")
            self._tell_search(rounds[-1])
            notes = edge_notes(experiment, rounds, self.measure or EER)
            for note in notes:
                self.say(note)
        finished = Finished(experiment, self.out, rounds, chosen, self.measure, {})
        if not experiment.seeds:
            _check_failed([(described(t.point), o) for t in rounds[-1] for o in t.outcomes])
            return finished
        runs = [
            self._run(name, chosen[name], seed, is_search=False)
            for seed in dict.fromkeys(chain(*map(experiment.seeds_of, experiment.arms)))
            for name in experiment.arms
            if seed in experiment.seeds_of(name)
        ]
        outcomes = self._work(Source(runs), runs, is_search=False)
        _check_failed([(run.name, outcomes[run]) for run in runs])
        here = [run for run in runs if read_outcome(run, self.task) is not None]
        for run in runs:
            if run not in here:
                self.say(f"{run.name} was trained in another folder: copy it to {run.folder}")
        names = self.task.result_names(runs[0])[::-1]
        paths = {name: tuple(run.folder / name for run in here) for name in names}
        if here:
            write_final(self.out, experiment, here, names, notes, overwrite=self.options.overwrite)
        return replace(finished, paths=paths)

    # -- the search -------------------------------------------------------------------------------

    def _search(self) -> tuple[tuple[Tried, ...], ...]:
        experiment, search = self.experiment, self.experiment.search
        assert self.measure is not None  # there are arms to search
        listed = {
            name: list(arm.candidates)
            for name, arm in experiment.searched.items()
            if search.method == "grid" or arm.points or not arm.axes
        }
        tried = self._round(listed, search.settings, search.seeds)
        sampled = {name: arm for name, arm in experiment.searched.items() if name not in listed}
        if sampled:
            assert self.book is not None

            def make_runs(name: str, point: Point) -> list[Run]:
                return self._search_runs(name, point, search.settings, search.seeds)

            recipes = {name: experiment.arm_recipe(name) for name in sampled}
            source = Sampled(sampled, search, recipes, make_runs, self.book)
            samples = [make_runs(name, {})[0] for name in sampled]
            outcomes = self._work(source, samples, is_search=True)
            found = gather(source.runs, outcomes)
            for name, arm in sampled.items():
                count = sum(one.arm == name for one in found)
                if count < search.num_points and any(axis.key == REACH for axis in arm.axes):
                    self.say(
                        f"{name}: {count} of {search.num_points} settings were tried; the reach of "
                        "others is below that of no margin, narrow the ranges"
                    )
            tried += found
        rounds = [tuple(tried)]
        if search.finalists:
            best = finalists_of(tried, self.measure, search.finalists)
            rounds.append(tuple(self._round(best, (), search.finalist_seeds or search.seeds)))
        return tuple(rounds)

    def _search_runs(
        self, name: str, point: Point, settings: Sequence[str], seeds: Sequence[int]
    ) -> list[Run]:
        return [self._run(name, point, seed, is_search=True, settings=settings) for seed in seeds]

    def _round(
        self, points: Mapping[str, Sequence[Point]], settings: Sequence[str], seeds: Sequence[int]
    ) -> list[Tried]:
        by_point = [
            self._search_runs(name, point, settings, seeds)
            for name, own in points.items()
            for point in own
        ]
        runs = [run for seed in zip(*by_point, strict=True) for run in seed]
        return gather(runs, self._work(Source(runs), runs, is_search=True)) if runs else []

    def _chosen(self, rounds: Sequence[Sequence[Tried]]) -> dict[str, Point]:
        experiment = self.experiment
        chosen: dict[str, Point] = {
            name: dict(arm.points[0]) if arm.points else {} for name, arm in experiment.arms.items()
        }
        if rounds and (experiment.seeds or len(rounds) > 1):
            best = ranked(rounds[-1], self.measure or EER)
            chosen |= {name: points[0].point for name, points in best.items()}
        for name, arm in experiment.arms.items():
            if arm.like is not None:
                chosen[name] = chosen[arm.like]
        return chosen

    def _tell_search(self, tried: Sequence[Tried]) -> None:
        measure = self.measure or EER
        for name, points in ranked([one for one in tried if one.is_complete], measure).items():
            self.say(
                f"{self.experiment.arms[name].title}: best is {described(points[0].point)}, "
                f"{measure_text(measure, points[0].mean(measure))}"
            )

    # -- runs -------------------------------------------------------------------------------------

    def _run(
        self, name: str, point: Point, seed: int, *, is_search: bool, settings: Sequence[str] = ()
    ) -> Run:
        experiment = self.experiment
        recipe = experiment.run_recipe(name, point, seed=seed, is_search=is_search)
        if settings:
            recipe = apply_settings(recipe, settings)
        folder = self.out / (SEARCH if is_search else FINAL)
        folder /= f"{name}-seed{seed}-{recipe.sha256[:8]}"
        return Run(name, experiment.arms[name].title, point, recipe, folder, is_search)

    def _work(self, source: Source, runs: Sequence[Run], *, is_search: bool) -> dict[Run, Outcome]:
        """Outcomes of all runs of a source; ``runs`` are some of them."""
        task = replace(self.task, show=self.task.show and not is_search)
        missing = [run for run in runs if read_outcome(run, task) is None]
        known = [r for r in source.runs if r not in missing and read_outcome(r, task) is not None]
        self.say(f"{source.num_runs} runs, {len(known)} of them complete")
        if missing:
            self._warn(missing)
            world = task.world.prepare(
                self.out / "data",
                [run.recipe for run in missing],
                is_search=is_search,
                request=self.request,
                say=self.say,
            )
            task = replace(task, world=world)
        jobs = self.jobs if missing else 1  # nothing to train needs no processes
        with open_slots(task, devices=self.devices, jobs=jobs, request=self.request) as slots:
            board = None
            if self.options.show and jobs > 1 and not is_search:
                board = Board(share_of_training=self.options.share_of_training)
            return _Queue(source, slots, task, self.book, self.request, self.say, board).outcomes()

    def _warn(self, runs: Sequence[Run]) -> None:
        """Warn once about schedules that runs of this length never reach."""
        said: dict[str, str] = {}
        for run in runs:
            for text in unreached(run.recipe, run.recipe.run.epochs):
                said.setdefault(text.partition(" and never")[0], text)  # once for all margins
        for text in said.values():
            self.say(f"warning: {text}")


def _check_failed(outcomes: Sequence[tuple[str, Outcome]]) -> None:
    failed = [(name, one.error) for name, one in outcomes if one.state == "failed"]
    if failed:
        name, error = failed[0]
        raise DataError(
            f"{len(failed)} of {len(outcomes)} runs failed, the first of them with {name}: "
            f"{error}; run again to retry"
        )


@dataclass
class _Queue:
    """Executes the runs of a source in all slots."""

    source: Source
    slots: Slots
    task: Task
    book: RunBook | None
    request: StopRequest
    say: Callable[[str], object]
    board: Board | None = None
    found: dict[Run, Outcome] = field(default_factory=dict)
    elsewhere: list[Run] = field(default_factory=list)  # other processes train them
    seconds: list[float] = field(default_factory=list)  # of the runs that were trained here
    started: dict[Run, float] = field(default_factory=dict)

    def outcomes(self) -> dict[Run, Outcome]:
        """Work until no run is left."""
        board = self.board
        if board is None:
            return self._outcomes()
        self.slots.look = lambda: board.look(self._seconds_left())
        try:
            return self._outcomes()
        finally:
            board.close()

    def _outcomes(self) -> dict[Run, Outcome]:
        self._fill()
        while True:
            if self.slots.num_free < self.slots.num_slots:
                run, outcome = self.slots.wait()
                if self.book is not None:
                    self.book.finish(run, outcome)
                self.seconds.append(outcome.seconds)
                self.started.pop(run)
                if self.board is not None:
                    self.board.end(run)
                self._keep(run, outcome)
                self._tell(run, outcome)
            elif self.elsewhere or self.source.waits():
                self.request.obey()
                time.sleep(POLL_S)
                self._look_elsewhere()
            else:
                return self.found
            self.request.obey()
            self._fill()

    def _fill(self) -> None:
        """Start runs in all free slots; take the outcomes of complete ones."""
        while self.slots.num_free and (run := self.source.next_run()) is not None:
            outcome = read_outcome(run, self.task)
            if outcome is not None:
                self._keep(run, outcome)
            elif not self._start(run) and run not in self.elsewhere:
                self.elsewhere.append(run)

    def _start(self, run: Run) -> bool:
        """Start a run, unless another process has it."""
        if self.book is not None:
            trial = self.book.take(run)
            if trial is None:
                return False
            run = replace(run, trial=trial)
        if self.task.show:
            self.say(f"[{len(self.found) + 1}/{self.source.num_runs}] {run.name}{self._left()}")
        self.slots.start(run)
        self.started[run] = time.monotonic()
        if self.board is not None:
            self.board.start(run)
        return True

    def _look_elsewhere(self) -> None:
        """Collect runs that other processes finished; train those that they gave up."""
        for run in list(self.elsewhere):
            outcome = read_outcome(run, self.task)
            if outcome is None and self.book is not None:
                outcome = self.book.outcome(run)
            if outcome is not None:
                self.elsewhere.remove(run)
                self._keep(run, outcome)
                self._tell(run, outcome, "elsewhere: ")
            elif self.slots.num_free and self._start(run):
                self.elsewhere.remove(run)

    def _keep(self, run: Run, outcome: Outcome) -> None:
        self.found[run] = outcome
        self.source.tell(run, outcome)

    def _tell(self, run: Run, outcome: Outcome, where: str = "") -> None:
        shown = ", ".join(measure_text(name, value) for name, value in outcome.measures.items())
        reason = {"failed": "failed", "pruned": "stopped early"}.get(outcome.state, "")
        texts = [f"{reason}: {outcome.error}" if reason else "", shown]
        self.say(
            f"[{len(self.found)}/{self.source.num_runs}] {run.name}: {where}"
            f"{'; '.join(filter(None, texts))} in {duration(outcome.seconds)}{self._left()}"
        )

    def _left(self) -> str:
        seconds = self._seconds_left()
        return f"; about {duration(seconds)} left" if seconds else ""

    def _seconds_left(self) -> float | None:
        """Seconds left, by the runs that ended here and, with a board, by running ones."""
        if self.board is not None:
            running = self.board.running()
        elif self.seconds:  # running ones take as long as the others did
            each, now = sum(self.seconds) / len(self.seconds), time.monotonic()
            since = [now - began for began in self.started.values()]
            running = [(one, min(1.0, one / each)) for one in since]
        else:
            return None
        waiting = self.source.num_runs - len(self.found) - len(running)
        return seconds_left(self.seconds, running, waiting, self.slots.num_slots)


# -- the record of a folder -----------------------------------------------------------------------


def _record(experiment: Experiment, measure: str | None) -> dict[str, Any]:
    """Facts that identify the experiment of a folder; arms, seeds and points may be added."""
    search, recipe = experiment.search, flatten(experiment.recipe)
    found = {
        "name": experiment.name,
        "recipe": {key: value for key, value in recipe.items() if not is_under(key, FREE)},
        "data": experiment.world.record,
        "protocol": asdict(experiment.protocol),
        "search": {
            "method": search.method,
            "settings": search.settings,
            "finalists": search.finalists,
            "measure": measure or search.measure,
        },
    }
    if experiment.primary is not None:  # fixed before the test, so it cannot change
        rivals = experiment.primary.rivals[:1]  # others are corrected as all comparisons are
        found["primary"] = asdict(replace(experiment.primary, rivals=rivals))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def keep_record(out: Path, record: Mapping[str, Any], experiment: Experiment, command: str) -> None:
    """Write the record of an experiment, unless the folder holds a different one."""
    known = read_record(out)
    if known is not None:
        there, here = flatten(known["record"]), flatten(record)
        if None in (there.get(MEASURE), here[MEASURE]):  # a search may be added
            there[MEASURE] = here[MEASURE]
        differ = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        if differ:
            words = [
                f"{k} is {there.get(k)} there, {here.get(k)} here" for k in differ[:MOST_NAMED]
            ]
            more = len(differ) - MOST_NAMED
            words += [f"and {more} more"] if more > 0 else []
            raise ConfigError(
                f"{out} holds a different experiment: {', '.join(words)}; choose another --out"
            )
    content = {
        **FORMAT,
        "title": experiment.title,
        "command": command,
        "details": dict(experiment.details),
        "seeds": list(experiment.seeds),
        "arms": {name: list(arm.settings) for name, arm in experiment.arms.items()},
        "arm_seeds": {n: list(arm.seeds) for n, arm in experiment.arms.items() if arm.seeds},
        "record": dict(record),
    }
    write_atomically(out / RECORD, dump_yaml(content).encode())


def read_record(out: Path) -> dict[str, Any] | None:
    """The record of a folder; None without one."""
    path = out / RECORD
    if not path.exists():
        return None
    try:
        content = load_yaml(read_text(path))
        if not isinstance(content, dict) or not isinstance(content.get("record"), dict):
            raise ConfigError("it has no record")
        if {key: content.get(key) for key in FORMAT} != FORMAT:
            raise ConfigError(f"format {content.get('format')!r}, {content.get('version')!r}")
        return content
    except ConfigError as error:
        raise DataError(
            f"{path} is not the record of an experiment ({error}); remove it"
        ) from error
