"""One run of an experiment: a training run in its own folder, with its evaluation.

The folder is named by arm, seed and recipe hash. The run is complete when its results name that
hash; they are written last.
"""

from __future__ import annotations

import errno
import hashlib
import io
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qmargin.data.drawings import Drawings
from qmargin.data.samples import Dataset
from qmargin.data.synthetic import DrawnIdentities
from qmargin.data.voices import VoiceChunks, Voices
from qmargin.errors import CheckpointError, ConfigError, DataError, MarginWarning, QMarginError
from qmargin.evaluation.all_pairs import unit_rows
from qmargin.evaluation.embed import Recordings, write_embeddings
from qmargin.evaluation.embeddings import Embeddings, read_embeddings
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.model import load_model
from qmargin.evaluation.protocols.all_pairs import evaluate_identities, measure_pairs
from qmargin.evaluation.protocols.speakers import evaluate_speakers
from qmargin.evaluation.result import Result, RunInfo, Source, read_result, run_info, write_result
from qmargin.evaluation.scoring import nearest_moments
from qmargin.evaluation.trials import read_trials
from qmargin.experiments.experiment import HEADLINE, TestProtocol
from qmargin.experiments.measure import (
    PeakMemory,
    ProgressHook,
    ValidationHook,
    embed_dataset,
    load_backbone,
    measures_of,
    num_pairs,
    pair_samples,
    recordings_in,
)
from qmargin.experiments.space import Point, described
from qmargin.experiments.storage import Pruned, PruningReport, TrialRef
from qmargin.experiments.worlds import Stored, World
from qmargin.files import write_atomically
from qmargin.metrics.normalise import Moments
from qmargin.metrics.operating import sufficiency
from qmargin.training.build import build_dataset
from qmargin.training.checkpoint import (
    CHECKPOINTS,
    is_damaged,
    list_steps,
    open_checkpoint,
    read_backbone,
    read_prototypes,
)
from qmargin.training.loop import Hook, open_run
from qmargin.training.recipe import Recipe
from qmargin.training.signals import Interrupted

RESULT = "result.json"
NORMALISED = "result-as-norm.json"
LOG = "train.log"
SEARCH, FINAL = "search", "runs"  # folders of runs
VALIDATIONS = 10  # of a run that may be pruned, if its recipe does not say when
NUM_HARDEST = 12
TEST_BATCH = 500
TEST_FARS = (1e-2, 1e-3, 1e-4, 1e-5)
ENLARGED = 4  # a pixel of a drawing in the report
NEAREST = 50  # prototypes of AS-norm: on strokes 10 are too few, and 300 are no better
MAX_COHORT = 10_000  # prototypes
BY_PROTOTYPES = "scores normalised by prototypes"
STOPPED = "stopped early"  # key of the card of a run that was pruned


@dataclass(frozen=True)
class Run:
    """A run: its recipe, point, folder and device."""

    arm: str
    title: str
    point: Point = field(hash=False)
    recipe: Recipe
    folder: Path
    is_search: bool  # measured on validation identities, see ``World``
    trial: TrialRef | None = field(default=None, compare=False)  # in an Optuna storage

    @property
    def name(self) -> str:
        """For messages."""
        settings = f", {described(self.point)}" if self.point else ""
        return f"{self.title}{settings}, seed {self.recipe.seed}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: measures such as ``eer`` and ``tar@0.001``, or the reason for none."""

    state: Literal["finished", "pruned", "failed"]
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # that the run took in this call
    error: str = ""  # reason of a failure or of pruning


@dataclass(frozen=True)
class Task:
    """Settings that all runs of an experiment share."""

    world: World
    protocol: TestProtocol
    title: str  # of the protocol
    command: str  # for the record
    pictures: Path  # folder of drawings of the hardest pairs
    show: bool = False  # whether training progress is shown, not logged

    def result_names(self, run: Run) -> tuple[str, ...]:
        """Files of a complete run, in the order of writing."""
        is_plain = run.is_search or run.recipe.data.kind == "audio"
        return (NORMALISED, RESULT) if self.protocol.normalise and not is_plain else (RESULT,)


def read_outcome(run: Run, task: Task) -> Outcome | None:
    """Outcome of a run that is complete; None for any other.

    An unreadable result counts as missing: the run resumes from its checkpoint, usually the last
    one. A result of a different recipe is refused.
    """
    outcome = None
    for name in task.result_names(run):
        path = run.folder / name
        if not path.exists():
            return None
        try:
            result = read_result(path)
        except DataError:
            return None
        if result.run is None or result.run.recipe_sha256 != run.recipe.sha256:
            raise ConfigError(
                f"{path} is of a different recipe; choose another --out, or remove {run.folder}"
            )
        outcome = _outcome(result)
    return outcome


def _outcome(result: Result) -> Outcome:
    stopped = (result.system.model_card or {}).get(STOPPED, "")
    return Outcome("pruned" if stopped else "finished", measures_of(result), error=stopped)


def execute(run: Run, task: Task, *, device: str = "auto") -> Outcome:
    """Train or resume, measure, and write the results.

    Raises:
        Interrupted: By a signal, after saving.
    """
    began = time.monotonic()
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / LOG).open("a", encoding="utf-8") as log, warnings.catch_warnings():
            warnings.simplefilter("ignore", MarginWarning)  # tables show every effective margin
            try:
                with nullcontext() if task.show else redirect_stderr(log):
                    outcome = _executed(run, task, device)
            except Exception as error:
                if not isinstance(error, QMarginError):  # which is foreseen
                    traceback.print_exc(file=log)
                raise
    except Exception as error:  # it diverged, or ran out of memory: other runs may succeed
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            words = f"{run.folder} has no space left; free some and run the same command again"
        outcome = Outcome("failed", error=words)
    return replace(outcome, seconds=round(time.monotonic() - began, 3))


def _executed(run: Run, task: Task, device: str) -> Outcome:
    world, recipe, every = task.world, run.recipe, task.protocol.every_epochs
    hook: ValidationHook | None = None
    progress: ProgressHook | None = None
    train = world.train(recipe, is_search=run.is_search)

    def steps_per_epoch() -> int:
        samples = len(build_dataset(recipe) if train is None else train)
        return max(1, samples // recipe.data.batch_size)

    if run.is_search:
        hook = ValidationHook(world.measured(recipe, is_search=True), views=task.protocol.views)
        if run.trial is not None and run.trial.prune:
            total = recipe.run.epochs * steps_per_epoch()
            total = min(total, recipe.run.max_steps or total)
            validate = recipe.run.validate_every or max(1, total // VALIDATIONS)
            recipe = _validated_every(recipe, validate)
            hook.report = PruningReport(run.trial, total)
    elif every is not None:
        tested = world.measured(recipe, is_search=False)
        assert tested.labels is not None  # checked before
        pairs = num_pairs(tested.labels)[1]
        fars = [f for f in _test_fars(task.protocol, pairs) if sufficiency(f, pairs).allowed]
        progress = ProgressHook(tested, views=task.protocol.views, fars=fars)
        recipe = _validated_every(recipe, every * steps_per_epoch())
    began, checkpoints, stopped = time.monotonic(), run.folder / CHECKPOINTS, ""
    is_new = not checkpoints.exists()
    try:
        with PeakMemory(device) as peak:
            checkpoint = _trained(recipe, run.folder, hook or progress, train, device)
    except Pruned as stop:
        stopped = str(stop)
        checkpoint = next(iter(list_steps(checkpoints).values()), None)
    measured: dict[str, Any] = {}  # a resumed run has no total time
    if is_new:
        spent = 0.0 if progress is None else progress.seconds
        measured["train_seconds"] = round(time.monotonic() - began - spent, 3)
        measured["progress"] = () if progress is None else tuple(progress.points)
    gap = recipe.loss.effective_margin
    seed = f", seed {recipe.seed}" if world.differs(recipe) else ""
    options = EvaluationOptions(
        name=run.title,
        protocol=f"{task.title}{', validation' * run.is_search}{seed}",
        num_replicates=task.protocol.num_replicates,
        num_hardest=NUM_HARDEST,
        model_card={
            "effective margin": "varies" if gap is None else f"{gap:.3f}",
            "backbone": recipe.model.backbone,
            **({STOPPED: stopped} if stopped else {}),
        },
        run=_describe(run, checkpoint, **measured, peak_bytes=peak.bytes, device=peak.device),
    )
    if hook is not None:
        results = [hook.result(options, task.command)]
    else:
        assert checkpoint is not None  # a finished run has a checkpoint
        results = evaluate_run(run, task, checkpoint, options, device=device)
    for name, result in zip(task.result_names(run), reversed(results), strict=True):
        write_result(run.folder / name, result)
    return _outcome(results[0])


def _validated_every(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with validation hooks, which do not change training."""
    return replace(recipe, run=replace(recipe.run, validate_every=steps))


def _test_fars(protocol: TestProtocol, num_impostors: int) -> tuple[float, ...]:
    """FARs of the test: the requested ones, or those that the pairs allow."""
    allowed = tuple(far for far in TEST_FARS if sufficiency(far, num_impostors).allowed > 0)
    return protocol.fars or allowed or TEST_FARS


def _describe(run: Run, checkpoint: Path | None, **measured: Any) -> RunInfo:
    """Facts about a run and its last checkpoint, with what was measured in training."""
    from safetensors.torch import save

    known = dict(measured)
    if checkpoint is not None:
        opened = open_checkpoint(checkpoint, check=False)
        known |= {"steps": opened.manifest.step, "num_classes": opened.manifest.num_classes}
        weights = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in read_backbone(opened).items()
        }
        content = save(weights, metadata={"format": "pt"})  # as in an exported model
        known["checkpoint_sha256"] = hashlib.sha256(content).hexdigest()
    return run_info(run.recipe, arm=run.arm, title=run.title, **known)


def _trained(
    recipe: Recipe, folder: Path, hook: Hook | None, dataset: Dataset | None, device: str
) -> Path | None:
    """Train from the newest checkpoint; return the last checkpoint."""
    checkpoints = folder / CHECKPOINTS
    opened = open_run(
        recipe,
        folder,
        resume=checkpoints.exists(),
        hooks=[] if hook is None else [hook],
        dataset=dataset,
        device=device,
    )
    try:
        with opened as training:
            if training.step == training.session.total_steps:
                training.validated_step = None  # validate again
            if isinstance(hook, ProgressHook):
                hook.start()
            outcome = training.go()
    except CheckpointError as error:
        if not is_damaged(checkpoints):
            raise
        sys.stderr.write(f"{error}\n")  # the log has the reason for each of them
        raise CheckpointError(
            f"{checkpoints} has no complete checkpoint; remove {folder} to train again"
        ) from error
    if outcome.signal:
        raise Interrupted(outcome.signal)
    return outcome.checkpoint


# -- test -----------------------------------------------------------------------------------------


def evaluate_run(
    run: Run, task: Task, checkpoint: Path, options: EvaluationOptions, *, device: str
) -> list[Result]:
    """Measure a model on test identities: by cosines, and on request by normalised scores."""
    world, protocol, recipe = task.world, task.protocol, run.recipe
    if isinstance(world, Stored) and recipe.data.kind == "audio":
        fars = protocol.fars or TEST_FARS[:3]
        options = replace(options, kind=protocol.kind, scoring="cosine", fars=fars)
        return [_recordings_result(run, task, world, options, device)]
    dataset = world.measured(recipe, is_search=False)
    backbone = load_backbone(recipe, checkpoint, device=device)
    embedded = embed_dataset(
        backbone, dataset, views=protocol.views, batch=TEST_BATCH, device=device
    )
    prefix = f"seed-{recipe.seed}/" if world.differs(recipe) else ""
    samples = pair_samples(embedded, dataset, options.protocol, prefix)
    impostors = num_pairs(samples.labels)[1]
    fars = _test_fars(protocol, impostors)
    has_headline = HEADLINE in fars and sufficiency(HEADLINE, impostors).allowed > 0
    corrupt = f"{embedded.num_corrupt} samples cannot be read and are left out"
    options = replace(
        options,
        fars=fars,
        group_far=HEADLINE if has_headline else None,
        notes=(corrupt,) if embedded.num_corrupt else (),
        sources=(Source("all pairs of the test identities", samples.sha256, "trials"),),
    )
    measure = partial(measure_pairs, samples, device=device, command=task.command)
    results = [measure(options)]
    if protocol.normalise:
        moments = _prototype_moments(embedded.matrix, checkpoint, protocol.views)
        options = replace(options, protocol=f"{options.protocol}, {BY_PROTOTYPES}")
        results.append(measure(options, moments=moments))
    if isinstance(dataset, DrawnIdentities | Drawings):
        is_ink = dataset.is_ink if isinstance(dataset, DrawnIdentities) else world.is_ink
        for result in results:
            write_pictures(task.pictures, dataset, result, prefix=prefix, is_ink=is_ink)
    elif isinstance(dataset, VoiceChunks):
        for result in results:
            write_voices(task.pictures, dataset.recordings, result, prefix=prefix)
    return results


def _prototype_moments(embeddings: NDArray[np.float32], checkpoint: Path, views: int) -> Moments:
    """Moments of AS-norm whose cohort are the prototypes of the head."""
    checked = open_checkpoint(checkpoint, check=False)  # the embeddings are from this checkpoint
    cohort = unit_rows(read_prototypes(checked, at_most=MAX_COHORT).numpy())
    nearest = min(NEAREST, len(cohort))
    moments = [
        nearest_moments(unit_rows(view), cohort, nearest, "prototypes")
        for view in np.split(embeddings, views, axis=1)
    ]
    return Moments(*(np.mean(parts, axis=0) for parts in zip(*moments, strict=True)))


def _recordings_result(
    run: Run, task: Task, world: Stored, options: EvaluationOptions, device: str
) -> Result:
    """Test on whole recordings, all pairs of them or a list of trials."""
    path, model = run.folder / "embeddings.safetensors", load_model(run.folder, device=device)

    def embedded(root: Path, names: Sequence[str]) -> Embeddings:
        recordings = Recordings(root, names)
        write_embeddings(model, recordings, path, model_id=model.card.weights_sha256)
        return read_embeddings(path)

    if world.trials is not None:
        trials = read_trials(world.trials)
        found = embedded(Path(world.trials).parent, trials.keys.names)
        return evaluate_speakers(found, trials, options, command=task.command)
    root, names, identities = recordings_in(world.measured(run.recipe, is_search=False))
    found = embedded(root, names)
    return evaluate_identities(found, identities, options, device=device, command=task.command)


def write_pictures(
    folder: Path,
    dataset: DrawnIdentities | Drawings,
    result: Result,
    *,
    prefix: str = "",
    is_ink: bool = True,
) -> None:
    """Draw the samples of the hardest and of some easy pairs, for the report."""
    from PIL import Image

    missing = _missing(folder, dataset, result, prefix, "png")
    flip = np.uint8(255 if is_ink else 0)  # ink is black on white paper
    for path, index in missing.items():
        picture = dataset.images(np.array([index]))[0] ^ flip
        buffer = io.BytesIO()
        enlarged = picture.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
        Image.fromarray(enlarged).save(buffer, format="PNG")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())


def write_voices(folder: Path, voices: Voices, result: Result, *, prefix: str = "") -> None:
    """Synthesise the samples of the hardest pairs, for the report."""
    for path, index in _missing(folder, voices, result, prefix, "wav").items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, voices.encoded(index))


def _missing(
    folder: Path,
    dataset: DrawnIdentities | Drawings | Voices,
    result: Result,
    prefix: str,
    suffix: str,
) -> dict[Path, int]:
    """Missing files of the samples of hardest and easy pairs, and their numbers."""
    hardest = result.hardest
    pairs = () if hardest is None else chain(*hardest.kinds)
    keys = {key for pair in pairs for key in (pair.enrol, pair.test)}
    missing = {key for key in keys if not (folder / f"{key}.{suffix}").exists()}
    if not missing:
        return {}
    indices = {prefix + dataset.sample_id(index): index for index in range(len(dataset))}
    return {folder / f"{key}.{suffix}": indices[key] for key in sorted(missing)}
