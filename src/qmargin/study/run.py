"""A study from end to end: choose settings, train with several seeds, test, write the report.

Everything is in one folder: ``search/``, ``finalists/`` and ``final/`` with a folder per training,
``chosen.json``, the evaluations of each final training, and ``report/``. What is there is not done
again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from qmargin.demo.evaluate import Facts
from qmargin.demo.losses import DemoLoss
from qmargin.demo.run import find_device, say
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, read_result, write_result
from qmargin.files import write_atomically
from qmargin.report.write import ReportOptions, write_report
from qmargin.study.pictures import PictureMaterial
from qmargin.study.pool import in_processes
from qmargin.study.search import (
    CHOSEN,
    Grid,
    Settings,
    choose,
    find_rounds,
    grid_of,
    point_of,
    read_chosen,
)
from qmargin.study.speech import SpeechMaterial
from qmargin.study.studies import SYSTEMS, Round, Study, with_setting
from qmargin.sweep.slots import Slots, TrialOptions, open_slots
from qmargin.sweep.trial import Trial, TrialResult, read_trial_result
from qmargin.sweep.validation import TrialData
from qmargin.training.checkpoint import open_checkpoint
from qmargin.training.display import duration
from qmargin.training.fields import check_known
from qmargin.training.folders import check_writable, list_steps
from qmargin.training.lock import RunLock
from qmargin.training.process import choose_device
from qmargin.training.recipe import Recipe
from qmargin.training.signals import StopRequest
from qmargin.training.starting import CHECKPOINTS

FINAL = "final"
RESULT = "evaluation.json"
NORMALISED = "normalised.json"
CLASSES = "classes"  # in the model card


class Material(Protocol):
    """Data of a study, for its search or for its final trainings; can be sent to processes."""

    @property
    def training_path(self) -> str | None:
        """That recipes have; None for stroke identities."""
        ...

    def __call__(self, recipe: Recipe) -> TrialData:
        """Data of a trial: to train on, and of other identities to measure."""
        ...

    def prepare(self, seeds: Sequence[int], request: StopRequest | None = None) -> None:
        """Make what trials with these seeds share; ``request`` may end it."""
        ...

    def evaluate(self, trial: Trial, facts: Facts, device: str) -> tuple[Result, ...]:
        """Test a final training, with intervals: by cosines, and maybe by normalised scores."""
        ...


@dataclass(frozen=True)
class StudyOptions:
    """What to run; the fields are options of ``qmargin study``.

    Attributes:
        study: What is studied.
        out: Folder; one that holds a part of the study is completed.
        data: Path of pictures, for studies that need one.
        seeds: Final trainings of each loss.
        losses: Of the study; all of them by default.
        jobs: Trainings at a time.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        command: For the record.
        overwrite: Replace files in the report's folder that no report wrote.
    """

    study: Study
    out: Path
    data: Path | None = None
    seeds: int = 3
    losses: tuple[str, ...] = ()
    jobs: int = 1
    device: str = "auto"
    command: str = "qmargin study"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.jobs < 1:
            raise ConfigError(
                f"seeds is {self.seeds} and jobs {self.jobs}; give at least 1 of both"
            )
        if (self.data is None) != (self.study.kind == "strokes"):
            verb = "needs a path: give" if self.data is None else "makes its own data: leave out"
            raise ConfigError(f"the study {self.study.name} {verb} --data")
        for key in self.losses:
            check_known(key, self.study.losses, "a loss")
        if len(set(self.losses)) < len(self.losses):
            raise ConfigError(f"losses are {', '.join(self.losses)}; name each one once")
        if "sampled" in self.losses and "arcface" not in self.losses:
            raise ConfigError("sampled takes the settings that arcface chose; add arcface")

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the losses that are compared."""
        return self.losses or self.study.losses

    def material(self, *, is_search: bool) -> Material:
        """Where trials have their data from."""
        folder = self.out / "data"
        if self.study.kind == "speech":
            assert self.data is not None  # checked above
            return SpeechMaterial(self.study, self.data, folder, is_search)
        return PictureMaterial(self.study, self.data, folder, is_search)


def run_study(options: StudyOptions) -> Path:
    """Train and test what is missing; returns the page of the report.

    Raises:
        Interrupted: By a signal, after saving; run again, it goes on.
        DataError: Trainings failed.
    """
    with _working(options) as request:
        final = list(_final_trials(options, _chosen(options, request)))
        _run(options, final, request, is_search=False)
        _test(options, final, request)
    paths = [trial.folder / name for name in _result_names(options) for trial in final]
    named = ReportOptions(title=options.study.title, overwrite=options.overwrite)
    return write_report(paths, options.out / "report", named)[0]


def run_search(options: StudyOptions) -> Settings:
    """Only let losses choose their settings; raises as ``run_study`` does."""
    with _working(options) as request:
        return _chosen(options, request)


@contextmanager
def _working(options: StudyOptions) -> Iterator[StopRequest]:
    choose_device(0, find_device(options.device))  # one that is not there is refused at once
    with RunLock(options.out), StopRequest() as request:
        check_writable(options.out)
        yield request


def _chosen(options: StudyOptions, request: StopRequest) -> Settings:
    """Settings of all losses; what was chosen before stays."""
    study, path = options.study, options.out / CHOSEN
    chosen = read_chosen(path)
    _check_chosen(options, chosen)
    missing = [key for key in options.keys if key not in chosen]
    if missing:

        def results_of(grid: Grid, part: Round) -> list[TrialResult]:
            trials = list(_search_trials(options, grid, part))
            return _run(options, trials, request, is_search=True)

        chosen |= choose(find_rounds(study, missing, results_of)[-1], study.measure)
        if "sampled" in missing:
            chosen["sampled"] = chosen["arcface"]
        write_atomically(path, (json.dumps(chosen, indent=1) + "\n").encode())
    return chosen


def _check_chosen(options: StudyOptions, chosen: Settings) -> None:
    """Refuse what was chosen by another recipe, or before there were finalists."""
    study = options.study
    grid = grid_of(study, [key for key in options.keys if key in chosen])
    for part in study.rounds:
        for trial in _search_trials(options, grid, part):
            read_trial_result(trial)  # raises where the recipe is another
    if not study.finalists:
        return
    kept = {key: (chosen[key],) for key in grid}
    for trial in _search_trials(options, kept, study.rounds[-1]):
        if read_trial_result(trial) is None:
            raise DataError(
                f"{options.out / CHOSEN} has settings of {trial.point['loss']} that were never "
                f"trained as long as {study.name} asks for; remove it to choose again"
            )


def _search_trials(options: StudyOptions, grid: Grid, part: Round) -> Iterator[Trial]:
    for seed in options.study.seeds_of_search:
        for key, settings in grid.items():
            for setting in settings:
                loss = with_setting(key, setting)
                name = f"{key}-{loss.alpha:g}-{loss.scale:g}-{loss.margin:g}-{seed}"
                folder = options.out / part.name / name
                yield _trial(options, loss, seed, folder, epochs=part.epochs, is_search=True)


def _final_trials(options: StudyOptions, chosen: Settings) -> Iterator[Trial]:
    for seed in range(options.seeds):
        for key in options.keys:
            folder = options.out / FINAL / f"{key}-{seed}"
            loss, epochs = with_setting(key, chosen[key]), options.study.size.epochs
            yield _trial(options, loss, seed, folder, epochs=epochs, is_search=False)


def _trial(
    options: StudyOptions, loss: DemoLoss, seed: int, folder: Path, *, epochs: int, is_search: bool
) -> Trial:
    path = options.material(is_search=is_search).training_path
    recipe = options.study.recipe(loss, seed=seed, epochs=epochs, path=path)
    return Trial(point_of(loss.key, (loss.alpha, loss.scale, loss.margin)), recipe, folder)


def _run(
    options: StudyOptions, trials: Sequence[Trial], request: StopRequest, *, is_search: bool
) -> list[TrialResult]:
    """Results of all trials, those that are there included."""
    results = {trial.folder: read_trial_result(trial) for trial in trials}
    waiting = [trial for trial in trials if results[trial.folder] is None]
    material = options.material(is_search=is_search)
    material.prepare(sorted({trial.recipe.seed for trial in waiting}), request)
    say(f"{len(trials)} trainings, {len(trials) - len(waiting)} of them there already")
    if waiting:
        shared = TrialOptions(material, options.study.measure)
        slots = open_slots(
            shared, devices=(options.device,), parallel=options.jobs, request=request
        )
        with slots:
            for trial, result in _follow(slots, waiting):
                results[trial.folder] = result
    found = [result for result in results.values() if result is not None]
    failed = [result for result in found if result.state == "failed"]
    if failed and not is_search:
        raise DataError(f"{len(failed)} trainings failed, the first: {failed[0].error}")
    return found


def _follow(slots: Slots, waiting: Sequence[Trial]) -> Iterator[tuple[Trial, TrialResult]]:
    """Keep the slots busy; trials and results as they end."""
    began, left = time.monotonic(), list(reversed(waiting))
    for number in range(1, len(waiting) + 1):
        while left and slots.num_free:
            slots.start(left.pop())
        trial, result = slots.wait()
        rest = (time.monotonic() - began) / number * (len(waiting) - number)
        shown = ", ".join(f"{name} {100 * value:.2f} %" for name, value in result.metrics.items())
        told = shown if result.state == "finished" else f"{result.state}: {result.error}"
        say(f"[{number}/{len(waiting)}] {_name(trial)}: {told}; {duration(rest)} left")
        yield trial, result


def _name(trial: Trial) -> str:
    point = trial.point
    numbers = f"alpha {point['alpha']}, scale {point['scale']}, margin {point['margin']}"
    return f"{SYSTEMS[point['loss']].title}, {numbers}, seed {trial.recipe.seed}"


def _test(options: StudyOptions, trials: Sequence[Trial], request: StopRequest) -> None:
    """Measure final trainings with intervals, several at a time."""
    missing = [trial for trial in trials if not _is_tested(options, trial)]
    list(in_processes(partial(_tested, options), missing, jobs=options.jobs, request=request))


def _result_names(options: StudyOptions) -> tuple[str, ...]:
    """Files of a final training; recordings are tested by cosines alone."""
    return (RESULT,) if options.study.kind == "speech" else (RESULT, NORMALISED)


def _is_tested(options: StudyOptions, trial: Trial) -> bool:
    paths = [trial.folder / name for name in _result_names(options)]
    if not all(path.exists() for path in paths):
        return False
    cards = [read_result(path).system.model_card or {} for path in paths]
    return all(card.get("recipe_sha256") == trial.recipe.sha256 for card in cards)


def _tested(options: StudyOptions, trial: Trial) -> None:
    loss = trial.recipe.loss
    newest = next(iter(list_steps(trial.folder / CHECKPOINTS).values()))
    checkpoint = open_checkpoint(newest, check=False)
    card = {
        "loss": f"alpha {loss.alpha:g}, {loss.margin_kind} margin {loss.margin:g}, scale "
        f"{loss.scale:g}",
        "alpha": f"{loss.alpha:g}",
        "scale": f"{loss.scale:g}",
        "margin": f"{loss.margin:g}",
        CLASSES: str(checkpoint.manifest.num_classes),
        "training": f"{trial.recipe.run.epochs} epochs, seed {trial.recipe.seed}",
        "recipe_sha256": trial.recipe.sha256,
    }
    facts = Facts(SYSTEMS[trial.point["loss"]].title, card, options.study.title, options.command)
    material = options.material(is_search=False)
    found = material.evaluate(trial, facts, find_device(options.device))
    for name, result in zip(_result_names(options), found, strict=True):
        write_result(trial.folder / name, result)
