"""``run_experiment``: search settings, train, test, report; what is there is not done again.

A folder has ``experiment.yaml`` (what it is the experiment of), ``search/`` and ``runs/`` with a
folder per run, tables and figures of the search, and ``report/``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.experiments.experiment import Experiment
from qmargin.experiments.measure import (
    EER,
    check_pairs,
    check_trials,
    choose_measure,
    num_pairs,
    recordings_in,
)
from qmargin.experiments.run import FINAL, SEARCH, Outcome, Run, Task, folder_name, read_outcome
from qmargin.experiments.search import (
    Listed,
    Sampled,
    Source,
    Tried,
    finalists_of,
    gather,
    ranked,
)
from qmargin.experiments.slots import Slots, open_slots
from qmargin.experiments.space import Point, described
from qmargin.experiments.storage import JOURNAL, RunBook, check_optuna, open_storage
from qmargin.experiments.tables import check_outputs, write_final, write_search
from qmargin.experiments.worlds import Stored
from qmargin.files import write_atomically
from qmargin.schema import dump_yaml, load_yaml, read_text
from qmargin.training.checkpoint import check_writable
from qmargin.training.distributed import choose_device
from qmargin.training.recipe import FREE, flatten, is_under
from qmargin.training.recipe_files import apply_settings
from qmargin.training.reporting import duration
from qmargin.training.schedules import unreached
from qmargin.training.signals import StopRequest
from qmargin.training.start import RunLock

RECORD = "experiment.yaml"
FORMAT = "qmargin-experiment"
VERSION = 1
DATA, PICTURES = "data", "pictures"
POLL_S = 1.0  # between looks at what other processes do
MOST_NAMED = 6  # settings that differ, in a message
MEASURE = "search.measure"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Finished:
    """What an experiment found.

    Attributes:
        experiment: That was run.
        out: Its folder.
        rounds: Points that each round of the search tried.
        chosen: Settings of every arm.
        measure: By which they were chosen; None without a search.
        paths: Result files of the runs that were tested, by their names.
    """

    experiment: Experiment
    out: Path
    rounds: tuple[tuple[Tried, ...], ...]
    chosen: Mapping[str, Point]
    measure: str | None
    paths: Mapping[str, tuple[Path, ...]]

    @property
    def results(self) -> list[Result]:
        """By cosines, in the order of seeds and arms."""
        return [read_result(path) for path in self.paths.get("result.json", ())]

    @property
    def page(self) -> Path:
        """The report."""
        return self.out / "report" / "index.html"


@dataclass(frozen=True)
class RunOptions:
    """How an experiment is run.

    Args:
        devices: Such as ``("cuda:0", "cuda:1")``.
        jobs: Runs at once, spread over the devices; None for one on each.
        storage: URL of an Optuna storage that processes and machines share.
        search_only: Only choose settings.
        overwrite: Replace files that no experiment wrote.
        show: Show the progress of trainings; otherwise it is logged in their folders.
        command: For the record.
        say: Gets lines for the user; standard output by default.
    """

    devices: Sequence[str] = ("auto",)
    jobs: int | None = None
    storage: str | None = None
    search_only: bool = False
    overwrite: bool = False
    show: bool = False
    command: str = "qmargin compare"
    say: Callable[[str], object] = field(default=_print)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("devices is empty; name at least one, such as cpu")
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; it must be at least 1")


def run_experiment(experiment: Experiment, out: str | Path, **options: Any) -> list[Result]:
    """Do what is missing of an experiment; returns the results of the runs that were tested.

    Args:
        experiment: What to run.
        out: Its folder; one that holds a part of it is completed.
        **options: Fields of ``RunOptions``: ``devices``, ``jobs``, ``storage`` and others.

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
    return complete(experiment, out, RunOptions(**options)).results


def complete(
    experiment: Experiment, out: str | Path, options: RunOptions | None = None
) -> Finished:
    """As ``run_experiment``; returns all that was found."""
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
        self.measure = self._check_data()
        search = experiment.search
        self.needs_optuna = bool(experiment.searched) and (search.method != "grid" or search.prune)
        if self.needs_optuna:
            check_optuna("pruning" if search.method == "grid" else f"search.method {search.method}")
        self.record = _record(self.experiment, self.measure)
        digest = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()
        self.name = f"qmargin {experiment.name} {digest[:12]}"
        if options.storage is not None:
            open_storage(options.storage)
        self.request = StopRequest()
        self.book: RunBook | None = None

    def _check_data(self) -> str | None:
        """Look at all data before anything is trained; the measure of the search."""
        experiment, measure = self.experiment, None
        name = next(iter(experiment.searched or experiment.arms))
        arm = experiment.arms[name]
        point = dict(arm.points[0]) if arm.points else {}
        if experiment.searched:
            seed = experiment.search.seeds[0]
            recipe = experiment.run_recipe(name, point, seed=seed, is_search=True)
            labels = experiment.world.measured(recipe, is_search=True).labels
            if labels is None:
                raise ConfigError("the validation data do not list their labels")
            check_pairs(labels, ())
            measure = choose_measure(experiment.search.measure, num_pairs(labels)[1])
        for seed in experiment.seeds[:1]:
            recipe = experiment.run_recipe(name, point, seed=seed, is_search=False)
            if unchecked := experiment.world.check(recipe):
                self.say(f"warning: {unchecked}")
            tested = experiment.world.measured(recipe, is_search=False)
            if isinstance(experiment.world, Stored) and experiment.world.trials is not None:
                check_trials(Path(experiment.world.trials), experiment.protocol.fars or ())
                continue
            if recipe.data.kind == "audio":
                recordings_in(tested)
            if tested.labels is not None:
                check_pairs(tested.labels, experiment.protocol.fars or ())
        return measure

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the folder, hear signals, and share runs."""
        url = self.options.storage
        with ExitStack() as stack:
            # processes that share a storage may share the folder, too: they share out the runs
            stack.enter_context(RunLock(self.out) if url is None else nullcontext())
            stack.enter_context(self.request)
            check_writable(self.out)
            check_outputs(self.out, RECORD, overwrite=self.options.overwrite)
            keep_record(self.out, self.record, self.experiment, self.options.command)
            if url is not None or self.needs_optuna:
                book = RunBook(
                    url or f"{JOURNAL}{self.out.resolve() / 'optuna.log'}",
                    self.name,
                    measure=self.measure or EER,
                    prune=self.experiment.search.prune,
                    is_shared=url is not None,
                )
                self.book = stack.enter_context(book)
            yield

    def conduct(self) -> Finished:
        """The search, the runs that are tested, and what is written about them."""
        experiment = self.experiment
        if experiment.world.note:
            self.say(experiment.world.note)
        rounds = self._search() if experiment.searched else ()
        chosen = self._chosen(rounds)
        if rounds:
            for path in write_search(self.out, experiment, rounds, chosen, self.measure or EER):
                self.say(f"wrote {path}")
            self._tell_search(rounds)
        finished = Finished(experiment, self.out, rounds, chosen, self.measure, {})
        if not experiment.seeds:
            self._check_failed([o for one in rounds[-1] for o in one.outcomes], rounds[-1])
            return finished
        runs = [
            self._run(name, chosen[name], seed, is_search=False)
            for seed in experiment.seeds
            for name in experiment.arms
        ]
        outcomes = self._work(Listed(runs), runs, is_search=False)
        failed = {run.name: one.error for run, one in outcomes.items() if one.state == "failed"}
        if failed:
            name, error = next(iter(failed.items()))
            raise DataError(
                f"{len(failed)} of {len(runs)} runs failed, the first of them {name}: {error}; run "
                "again to retry"
            )
        task = self._task(is_search=False)
        here = [run for run in runs if read_outcome(run, task) is not None]
        for run in runs:
            if run not in here:
                self.say(f"{run.name} was trained in another folder: copy it to {run.folder}")
        names = task.result_names(runs[0])[::-1]
        paths = {name: tuple(run.folder / name for run in here) for name in names}
        finished = replace(finished, paths=paths)
        if here:
            write_final(self.out, experiment, here, names, overwrite=self.options.overwrite)
        return finished

    # -- the search -------------------------------------------------------------------------------

    def _search(self) -> tuple[tuple[Tried, ...], ...]:
        experiment, search = self.experiment, self.experiment.search
        assert self.measure is not None  # there are arms to search
        listed = {
            name: arm
            for name, arm in experiment.searched.items()
            if search.method == "grid" or arm.points or not arm.axes
        }
        points = {name: list(arm.candidates) for name, arm in listed.items()}
        tried = self._round(points, search.settings)
        sampled = {n: arm for n, arm in experiment.searched.items() if n not in listed}
        if sampled:
            tried += self._sampled_round(sampled)
        rounds = [tuple(tried)]
        if search.finalists:
            best = finalists_of(tried, self.measure, search.finalists)
            rounds.append(tuple(self._round(best, ())))
        return tuple(rounds)

    def _round(self, points: Mapping[str, Sequence[Point]], settings: Sequence[str]) -> list[Tried]:
        runs = [
            self._run(name, point, seed, is_search=True, settings=settings)
            for seed in self.experiment.search.seeds
            for name, own in points.items()
            for point in own
        ]
        if not runs:
            return []
        return gather(runs, self._work(Listed(runs), runs, is_search=True))

    def _sampled_round(self, arms: Mapping[str, Any]) -> list[Tried]:
        experiment, search = self.experiment, self.experiment.search
        assert self.book is not None

        def make_runs(name: str, point: Point) -> list[Run]:
            return [
                self._run(name, point, seed, is_search=True, settings=search.settings)
                for seed in search.seeds
            ]

        recipes = {name: experiment.arm_recipe(name) for name in arms}
        source = Sampled(arms, search, recipes, make_runs, self.book)
        samples = [make_runs(name, {})[0] for name in arms]
        outcomes = self._work(source, samples, is_search=True)
        return gather(source.runs, outcomes)

    def _chosen(self, rounds: Sequence[Sequence[Tried]]) -> dict[str, Point]:
        experiment = self.experiment
        chosen: dict[str, Point] = {
            name: dict(arm.points[0]) if arm.points else {} for name, arm in experiment.arms.items()
        }
        if rounds and (experiment.seeds or len(rounds) > 1):
            assert self.measure is not None
            best = ranked(rounds[-1], self.measure)
            chosen |= {name: points[0].point for name, points in best.items()}
        for name, arm in experiment.arms.items():
            if arm.like is not None:
                chosen[name] = chosen[arm.like]
        return chosen

    def _tell_search(self, rounds: Sequence[Sequence[Tried]]) -> None:
        measure = self.measure or EER
        complete = [one for one in rounds[-1] if one.is_complete]
        for name in dict.fromkeys(one.arm for one in complete):
            own = [one for one in complete if one.arm == name]
            best = ranked(own, measure)[name][0]
            title = self.experiment.arms[name].title
            self.say(
                f"{title}: best by {measure} is {described(best.point)}, "
                f"{100 * best.mean(measure):.2f} %"
            )

    def _check_failed(self, outcomes: Sequence[Outcome], tried: Sequence[Tried]) -> None:
        failed = [one for one in tried if any(o.state == "failed" for o in one.outcomes)]
        if failed:
            number = sum(one.state == "failed" for one in outcomes)
            error = next(o.error for o in failed[0].outcomes if o.state == "failed")
            raise DataError(
                f"{number} of {len(outcomes)} runs failed, the first of them with "
                f"{described(failed[0].point)}: {error}; run again to retry"
            )

    # -- runs -------------------------------------------------------------------------------------

    def _run(
        self, name: str, point: Point, seed: int, *, is_search: bool, settings: Sequence[str] = ()
    ) -> Run:
        experiment = self.experiment
        recipe = experiment.run_recipe(name, point, seed=seed, is_search=is_search)
        if settings:
            recipe = apply_settings(recipe, settings)
        folder = self.out / (SEARCH if is_search else FINAL) / folder_name(name, recipe)
        return Run(name, experiment.arms[name].title, point, recipe, folder, is_search)

    def _task(self, *, is_search: bool) -> Task:
        experiment = self.experiment
        return Task(
            experiment.world,
            experiment.protocol,
            experiment.title or experiment.name,
            self.options.command,
            self.out / PICTURES,
            show=self.options.show and self.jobs == 1 and not is_search,
        )

    def _work(self, source: Source, runs: Sequence[Run], *, is_search: bool) -> dict[Run, Outcome]:
        """Outcomes of all runs of a source; ``runs`` are some of them."""
        task = self._task(is_search=is_search)
        missing = [run for run in runs if read_outcome(run, task) is None]
        known = source.runs if isinstance(source, Sampled) else runs
        num_complete = sum(
            run not in missing and read_outcome(run, task) is not None for run in known
        )
        self.say(f"{source.num_runs} runs, {num_complete} of them complete")
        if missing:
            self._warn(missing)
            recipes = [run.recipe for run in missing]
            world = task.world.prepare(
                self.out / DATA, recipes, is_search=is_search, request=self.request
            )
            task = replace(task, world=world)
        jobs = self.jobs if missing else 1  # nothing to train needs no processes
        with open_slots(task, devices=self.devices, jobs=jobs, request=self.request) as slots:
            return _Queue(source, slots, task, self.book, self.request, self.say).outcomes()

    def _warn(self, runs: Sequence[Run]) -> None:
        """Say once what runs of this length schedule and never reach."""
        said: set[str] = set()
        for run in runs:
            for sentence in unreached(run.recipe, run.recipe.run.epochs):
                what = sentence.partition(" and never")[0]  # not with the margin of every point
                if what not in said:
                    said.add(what)
                    self.say(f"warning: {sentence}")


class _Queue:
    """Keeps slots busy with the runs of a source."""

    def __init__(
        self,
        source: Source,
        slots: Slots,
        task: Task,
        book: RunBook | None,
        request: StopRequest,
        say: Callable[[str], object],
    ) -> None:
        self.source, self.slots, self.task, self.book = source, slots, task, book
        self.request, self.say = request, say
        self.found: dict[Run, Outcome] = {}
        self.elsewhere: list[Run] = []  # other processes train them
        self.num_trained, self.began = 0, time.monotonic()

    def outcomes(self) -> dict[Run, Outcome]:
        """Work until nothing is left."""
        self._fill()
        while True:
            if self.slots.num_free < self.slots.num_slots:
                self._end(*self.slots.wait())
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
            else:
                self._start(run)

    def _start(self, run: Run) -> bool:
        if self.book is not None:
            trial = self.book.take(run)
            if trial is None:
                if run not in self.elsewhere:
                    self.elsewhere.append(run)
                return False
            run = replace(run, trial=trial)
        if self.task.show:
            self.say(f"[{len(self.found) + 1}/{self.source.num_runs}] {run.name}{self._left()}")
        self.slots.start(run)
        return True

    def _look_elsewhere(self) -> None:
        """Take what other processes have finished; train what they gave up."""
        assert self.book is not None or not self.elsewhere
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

    def _end(self, run: Run, outcome: Outcome) -> None:
        if self.book is not None:
            self.book.finish(run, outcome)
        self.num_trained += 1
        self._keep(run, outcome)
        self._tell(run, outcome)

    def _keep(self, run: Run, outcome: Outcome) -> None:
        self.found[run] = outcome
        self.source.tell(run, outcome)

    def _tell(self, run: Run, outcome: Outcome, where: str = "") -> None:
        shown = ", ".join(f"{name} {100 * value:.2f} %" for name, value in outcome.measures.items())
        reason = {"failed": "failed", "pruned": "stopped early"}.get(outcome.state, "")
        texts = [f"{reason}: {outcome.error}" if reason else "", shown]
        number = f"[{len(self.found)}/{self.source.num_runs}]"
        self.say(
            f"{number} {run.name}: {where}{'; '.join(filter(None, texts))} in "
            f"{duration(outcome.seconds)}{self._left()}"
        )

    def _left(self) -> str:
        left = self.source.num_runs - len(self.found)
        if not left or not self.num_trained:
            return ""
        seconds = (time.monotonic() - self.began) / self.num_trained * left
        return f"; about {duration(seconds)} left"


# -- the record of a folder -----------------------------------------------------------------------


def _record(experiment: Experiment, measure: str | None) -> dict[str, Any]:
    """What decides whether a folder holds an experiment; arms, seeds and points may be added."""
    search = experiment.search
    found = {
        "name": experiment.name,
        "recipe": {k: v for k, v in flatten(experiment.recipe).items() if not is_under(k, FREE)},
        "data": experiment.world.record,
        "protocol": asdict(experiment.protocol),
        "search": {
            "method": search.method,
            "settings": search.settings,
            "finalists": search.finalists,
            "measure": measure or search.measure,
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def keep_record(out: Path, record: Mapping[str, Any], experiment: Experiment, command: str) -> None:
    """Write the record of an experiment, after a comparison with the one that is there.

    Raises:
        ConfigError: The folder holds another experiment; with what differs.
        DataError: The record cannot be read.
    """
    known = read_record(out)
    if known is not None:
        there, here = (_flat(one) for one in (known["record"], record))
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
                f"{out} holds another experiment: {', '.join(words)}; choose another --out"
            )
    content = {
        "format": FORMAT,
        "version": VERSION,
        "title": experiment.title,
        "command": command,
        "details": dict(experiment.details),
        "seeds": list(experiment.seeds),
        "arms": {name: list(arm.settings) for name, arm in experiment.arms.items()},
        "record": dict(record),
    }
    write_atomically(out / RECORD, dump_yaml(content).encode())


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of all sections by dotted keys."""
    found: dict[str, Any] = {}
    for section, values in record.items():
        inner = values if isinstance(values, Mapping) else {"": values}
        found |= {f"{section}.{key}".rstrip("."): value for key, value in inner.items()}
    return found


def read_record(out: Path) -> dict[str, Any] | None:
    """The record of a folder; None without one.

    Raises:
        DataError: It cannot be read.
    """
    path = out / RECORD
    if not path.exists():
        return None

    try:
        content = load_yaml(read_text(path))
        if not isinstance(content, dict) or not isinstance(content.get("record"), dict):
            raise ConfigError("it has no record")
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(f"format {content.get('format')!r}, {content.get('version')!r}")
        return content
    except ConfigError as error:
        raise DataError(
            f"{path} is not the record of an experiment ({error}); remove it, or choose another "
            "--out"
        ) from error
