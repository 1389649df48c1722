"""One run of an experiment: a training in a folder of its own, and what was measured.

The folder is named by arm, seed and recipe hash. The run is complete when its results name that
hash; they are written last.
"""

from __future__ import annotations

import errno
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from qmargin.data.samples import Dataset
from qmargin.errors import CheckpointError, ConfigError, DataError, MarginWarning, QMarginError
from qmargin.evaluation.result import Result, read_result, write_result
from qmargin.experiments.experiment import TestProtocol
from qmargin.experiments.measure import (
    STOPPED,
    Facts,
    ValidationHook,
    evaluate_run,
    measures_of,
)
from qmargin.experiments.space import Point, described
from qmargin.experiments.storage import Pruned, PruningReport, TrialRef
from qmargin.experiments.worlds import World
from qmargin.training.build import build_dataset
from qmargin.training.checkpoint import CHECKPOINTS, is_damaged, list_steps
from qmargin.training.loop import open_run
from qmargin.training.recipe import Recipe
from qmargin.training.signals import Interrupted

RESULT = "result.json"
NORMALISED = "result-as-norm.json"
LOG = "train.log"
SEARCH, FINAL = "search", "runs"  # folders of runs
VALIDATIONS = 10  # of a run that may be pruned, if its recipe does not say when


@dataclass(frozen=True)
class Run:
    """What to train, and where.

    Attributes:
        arm: Its name.
        title: Display name of the arm.
        point: Settings of the arm.
        recipe: Of the run.
        folder: Of the run alone.
        is_search: Measured on validation identities, see ``World``.
        trial: Its trial in an Optuna storage, if it has one.
    """

    arm: str
    title: str
    point: Point = field(hash=False)
    recipe: Recipe
    folder: Path
    is_search: bool
    trial: TrialRef | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """For messages."""
        settings = f", {described(self.point)}" if self.point else ""
        return f"{self.title}{settings}, seed {self.recipe.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        state: ``"finished"``, ``"pruned"`` or ``"failed"``.
        measures: ``eer`` and TARs such as ``tar@0.001``.
        seconds: That the run took in this call.
        error: Why it failed or was pruned.
    """

    state: Literal["finished", "pruned", "failed"]
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Task:
    """What all runs of an experiment share.

    Attributes:
        world: Their data.
        protocol: How models are tested.
        title: Of the protocol.
        command: For the record.
        pictures: Folder of drawings of the hardest pairs.
        show: Whether the progress of a training is shown, not logged.
    """

    world: World
    protocol: TestProtocol
    title: str
    command: str
    pictures: Path
    show: bool = False

    def result_names(self, run: Run) -> tuple[str, ...]:
        """Files of a complete run, the last to be written last."""
        normalised = (
            self.protocol.normalise and not run.is_search and run.recipe.data.kind != "audio"
        )
        return (NORMALISED, RESULT) if normalised else (RESULT,)


def folder_name(arm: str, recipe: Recipe) -> str:
    """Name of a run's folder: arm, seed and the first digits of the recipe's hash.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> folder_name("q_margin", debug()).rpartition("-")[0]
        'q_margin-seed0'
    """
    return f"{arm}-seed{recipe.seed}-{recipe.sha256[:8]}"


def recipe_of(result: Result) -> str | None:
    """Hash of the recipe behind a result."""
    return None if result.run is None else result.run.recipe_sha256


def read_outcome(run: Run, task: Task) -> Outcome | None:
    """Outcome of a run that is complete; None for any other.

    A result that cannot be read counts as absent: the run resumes from its checkpoint, which is
    usually that of its end.

    Raises:
        ConfigError: A result is of another recipe.
    """
    result = None
    for name in task.result_names(run):
        path = run.folder / name
        if not path.exists():
            return None
        try:
            result = read_result(path)
        except DataError:
            return None
        if recipe_of(result) != run.recipe.sha256:
            raise ConfigError(
                f"{path} is of another recipe than this experiment has; choose another --out, or "
                f"remove {run.folder} to train that run again"
            )
    assert result is not None  # there is at least one name
    stopped = (result.system.model_card or {}).get(STOPPED, "")
    return Outcome("pruned" if stopped else "finished", measures_of(result), error=stopped)


def execute(run: Run, task: Task, *, device: str = "auto") -> Outcome:
    """Train or resume, measure, and write the results.

    Args:
        run: What to train.
        task: Data and protocol.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        Interrupted: By a signal, after saving.
    """
    began = time.monotonic()
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with _logged(run.folder / LOG, show=task.show):
            outcome = _executed(run, task, device)
    except Exception as error:  # it diverged, or ran out of memory: the others may not
        outcome = Outcome("failed", error=_words(error, run))
    return replace(outcome, seconds=round(time.monotonic() - began, 3))


def _words(error: Exception, run: Run) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{run.folder} has no space left; free some and run the same command again"
    return f"{type(error).__name__}: {error}"


def _executed(run: Run, task: Task, device: str) -> Outcome:
    world, recipe = task.world, run.recipe
    train = world.train(recipe, is_search=run.is_search)
    facts = Facts(run.arm, run.title, _protocol_name(run, task), task.command)
    hook = None
    if run.is_search:
        hook = ValidationHook(world.measured(recipe, is_search=True), views=task.protocol.views)
        if run.trial is not None and run.trial.prune:
            total = _num_steps(recipe, len(build_dataset(recipe) if train is None else train))
            recipe = _validated_often(recipe, total)
            hook.report = PruningReport(run.trial, total)
    began = time.monotonic()
    is_new = not (run.folder / CHECKPOINTS).exists()
    try:
        checkpoint = _trained(replace(run, recipe=recipe), hook, train, device)
    except Pruned as stop:
        facts = replace(facts, stopped=str(stop))
        checkpoint = next(iter(list_steps(run.folder / CHECKPOINTS).values()), None)
    seconds = round(time.monotonic() - began, 3) if is_new else None
    facts = replace(facts, train_seconds=seconds)
    if hook is not None:
        results = [hook.result(recipe, checkpoint, facts)]
    else:
        assert checkpoint is not None  # a training that ended was saved
        results = evaluate_run(
            recipe,
            checkpoint,
            world,
            task.protocol,
            facts,
            pictures=task.pictures,
            device=device,
        )
    for name, result in zip(task.result_names(run), reversed(results), strict=True):
        write_result(run.folder / name, result)
    state: Literal["pruned", "finished"] = "pruned" if facts.stopped else "finished"
    return Outcome(state, measures_of(results[0]), error=facts.stopped)


def _protocol_name(run: Run, task: Task) -> str:
    name = f"{task.title}, validation" if run.is_search else task.title
    return f"{name}, seed {run.recipe.seed}" if task.world.differs(run.recipe) else name


def _trained(
    run: Run, hook: ValidationHook | None, dataset: Dataset | None, device: str
) -> Path | None:
    """Train from the newest checkpoint on; the last checkpoint."""
    folder = run.folder
    opened = open_run(
        run.recipe,
        folder,
        resume=(folder / CHECKPOINTS).exists(),
        hooks=[] if hook is None else [hook],
        dataset=dataset,
        device=device,
    )
    try:
        with opened as training:
            if training.step == training.session.total_steps:
                training.validated_step = None  # measure a training again that was saved at its end
            outcome = training.go()
    except CheckpointError as error:
        if not is_damaged(folder / CHECKPOINTS):
            raise
        sys.stderr.write(f"{error}\n")  # what is wrong with each of them is for the log
        raise CheckpointError(
            f"{folder / CHECKPOINTS} has no whole checkpoint; remove {folder} and run the same "
            "command again: only this run is trained anew"
        ) from error
    if outcome.signal:
        raise Interrupted(outcome.signal)
    return outcome.checkpoint


def _num_steps(recipe: Recipe, num_samples: int) -> int:
    steps = recipe.run.epochs * max(1, num_samples // recipe.data.batch_size)
    return min(steps, recipe.run.max_steps or steps)


def _validated_often(recipe: Recipe, steps: int) -> Recipe:
    """The same training with validations; when they come does not change what is computed."""
    if recipe.run.validate_every is not None:
        return recipe
    every = max(1, steps // VALIDATIONS)
    return replace(recipe, run=replace(recipe.run, validate_every=every))


@contextmanager
def _logged(path: Path, *, show: bool) -> Iterator[None]:
    """Send what a training shows to a file, unless it is asked for."""
    with path.open("a", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", MarginWarning)  # tables show every effective margin
        try:
            if show:
                yield
            else:
                with redirect_stderr(file):
                    yield
        except (QMarginError, Pruned):
            raise  # foreseen: no traceback is needed
        except Exception:
            traceback.print_exc(file=file)
            raise
