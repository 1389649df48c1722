"""One trial of a sweep: a training in a folder of its own, and what came out of it."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from qmargin.data.samples import Dataset
from qmargin.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MarginWarning,
    QMarginError,
)
from qmargin.files import write_atomically
from qmargin.sweep.axes import Point
from qmargin.sweep.stopping import MedianRule, StoppedEarly, validations
from qmargin.sweep.validation import DataSource, PairsHook
from qmargin.training.build import build_dataset
from qmargin.training.checkpoint import is_damaged
from qmargin.training.hooks import Hook
from qmargin.training.loop import Outcome, Run, open_run
from qmargin.training.recipe import Recipe
from qmargin.training.signals import Interrupted
from qmargin.training.starting import CHECKPOINTS

RESULT = "result.json"
TRIAL = "trial.json"
LOG = "train.log"
FORMAT = "qmargin-sweep-trial"
VALIDATIONS = 10  # of a training whose recipe does not say when, with early stopping
GRACE = 3  # no trial is stopped in the first third of its steps: losses start differently
State = Literal["finished", "stopped early", "failed"]


@dataclass(frozen=True)
class Trial:
    """What to train, and where."""

    point: Point = field(hash=False)
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        """The values of the axes and the seed, for people."""
        values = [f"{key.rpartition('.')[2]} {text}" for key, text in self.point.items()]
        return ", ".join([*values, f"seed {self.recipe.seed}"])


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial.

    Attributes:
        point: One value of every axis.
        seed: Of the recipe.
        recipe_sha256: Of the recipe; it ties the result to the training.
        state: ``"finished"``, ``"stopped early"`` or ``"failed"``.
        step: Steps that were taken.
        metrics: Of the last validation.
        seconds: Of the process that ended it.
        error: Why it failed, or was stopped.
    """

    point: Point
    seed: int
    recipe_sha256: str
    state: State
    step: int
    metrics: dict[str, float]
    seconds: float
    error: str = ""


def run_trial(
    trial: Trial,
    data: DataSource,
    *,
    measure: str | None = None,
    stop_early: bool = False,
    device: str = "auto",
) -> TrialResult:
    """Train, or go on, and measure; the result is written last, and is the sign of completion.

    Args:
        trial: What to train.
        data: Of the trial.
        measure: That early stopping looks at.
        stop_early: Whether the median rule may end it.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        Interrupted: By a signal; everything is saved.
    """
    began = time.monotonic()
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(trial.folder / TRIAL, _text({"point": trial.point, "seed": trial.recipe.seed}))
    base = TrialResult(trial.point, trial.recipe.seed, trial.recipe.sha256, "finished", 0, {}, 0.0)
    try:
        with _logged(trial.folder / LOG):
            result = _trained(trial, base, data, measure if stop_early else None, device)
    except StoppedEarly as stop:
        step, metrics = stop.step, stop.metrics
        result = replace(base, state="stopped early", step=step, metrics=metrics, error=str(stop))
    except Exception as error:  # it diverged, or ran out of memory: the others may not
        result = replace(base, state="failed", error=f"{type(error).__name__}: {error}")
    result = replace(result, seconds=round(time.monotonic() - began, 3))
    write_atomically(trial.folder / RESULT, _text({"format": FORMAT, **asdict(result)}))
    return result


def read_trial_result(trial: Trial) -> TrialResult | None:
    """The result in a trial's folder; None where there is none, or it failed and may be retried.

    One that cannot be read counts as absent: the trial goes on from its checkpoint, which is
    usually that of its end.

    Raises:
        ConfigError: It is of another recipe.
    """
    path = trial.folder / RESULT
    if not path.exists():
        return None
    try:
        result = parse_result(path)
    except DataError:
        return None
    if result.recipe_sha256 != trial.recipe.sha256:
        raise ConfigError(
            f"{path} is of another recipe than this sweep has; choose another --out, or remove "
            "that folder"
        )
    return None if result.state == "failed" else result


def parse_result(path: Path) -> TrialResult:
    """A result as it was written."""
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        return TrialResult(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the result of a trial ({error}); remove it") from error


def _trained(
    trial: Trial, base: TrialResult, data: DataSource, measure: str | None, device: str
) -> TrialResult:
    found = data(trial.recipe)
    hook: Hook = PairsHook(found.validation, num_views=found.num_views)
    recipe = trial.recipe
    if measure is not None:
        dataset = build_dataset(recipe) if found.train is None else found.train
        steps = _num_steps(recipe, len(dataset))
        recipe = _validated_often(recipe, steps)
        hook = MedianRule(hook, measure, trial.folder, grace=steps // GRACE)
    outcome = _resumed(replace(trial, recipe=recipe), hook, found.train, device)
    if outcome.signal:
        raise Interrupted(outcome.signal)
    last = [event for event in validations(trial.folder) if event["step"] == outcome.step]
    if not last:
        raise DataError(f"{trial.folder} has no validation of step {outcome.step}; remove it")
    return replace(base, step=outcome.step, metrics=last[-1]["metrics"])


def _resumed(trial: Trial, hook: Hook, dataset: Dataset | None, device: str) -> Outcome:
    """Train from the newest checkpoint on; where none is whole, say what a sweep can do."""
    folder, resume = trial.folder, (trial.folder / CHECKPOINTS).exists()
    opened = open_run(
        trial.recipe, folder, resume=resume, hooks=[hook], dataset=dataset, device=device
    )
    try:
        with opened as run:
            _measure_end_again(run, folder)
            return run.go()
    except CheckpointError as error:
        if not is_damaged(folder / CHECKPOINTS):
            raise
        sys.stderr.write(f"{error}\n")  # what is wrong with each of them is for the log
        raise CheckpointError(
            f"{folder / CHECKPOINTS} has no whole checkpoint; remove {folder}, only this trial is "
            "trained anew"
        ) from error


def _measure_end_again(run: Run, folder: Path) -> None:
    """A training that was saved at its end may have lost what was measured there.

    Its last checkpoint may be older than the validation of the same step, which is cut off the
    journal then, and a complete run is not validated when it is resumed.
    """
    is_known = any(event["step"] == run.step for event in validations(folder))
    if run.step == run.session.total_steps and not is_known:
        run.validated_step = None


def _num_steps(recipe: Recipe, num_samples: int) -> int:
    steps = recipe.run.epochs * max(1, num_samples // recipe.data.batch_size)
    return min(steps, recipe.run.max_steps or steps)


def _validated_often(recipe: Recipe, steps: int) -> Recipe:
    """The same training, with looks at it; when they come does not change what is computed."""
    if recipe.run.validate_every is not None:
        return recipe
    every = max(1, steps // VALIDATIONS)
    return replace(recipe, run=replace(recipe.run, validate_every=every))


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What a training shows goes to a file; terminals belong to the sweep."""
    with (
        path.open("a", encoding="utf-8") as file,
        redirect_stderr(file),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", MarginWarning)  # the table shows every gap
        try:
            yield
        except (QMarginError, StoppedEarly):
            raise  # foreseen: no traceback is needed
        except Exception:
            traceback.print_exc(file=file)
            raise


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
