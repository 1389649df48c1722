"""Measurement of runs: on validation identities during training, on test identities afterwards."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qmargin.data.faces import normalised
from qmargin.data.order import sample_seeds
from qmargin.data.people import People
from qmargin.data.samples import Dataset, reads_many
from qmargin.data.voices import VoiceChunks
from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.evaluation.embed import Recordings, embed_turned
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols.all_pairs import PairSamples, measure_pairs
from qmargin.evaluation.result import Result, TrainingPoint, far_key
from qmargin.evaluation.trials import read_trials
from qmargin.experiments.worlds import names_in, stored_in
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS, sufficiency
from qmargin.training.build import build_backbone
from qmargin.training.checkpoint import open_checkpoint, read_backbone
from qmargin.training.distributed import choose_device
from qmargin.training.loop import HookState
from qmargin.training.recipe import Recipe

EER = "eer"
VALIDATION_FARS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
BATCH = 256
Labels = Sequence[int] | NDArray[np.integer]


def num_pairs(labels: Labels) -> tuple[int, int]:
    """Pairs of one identity, and of two."""
    counts = np.bincount(np.asarray(labels, dtype=np.int64))
    genuine = int((counts * (counts - 1)).sum()) // 2
    return genuine, len(labels) * (len(labels) - 1) // 2 - genuine


def tar_name(far: float) -> str:
    """Name of the TAR at a FAR, such as ``tar@0.001``."""
    return f"tar@{far:g}"


def far_of(measure: str) -> float | None:
    """The FAR of a TAR's name; None for other measures."""
    kind, _, text = measure.partition("@")
    try:
        return float(text) if kind == "tar" else None
    except ValueError:
        return None


def fars_for(num_impostors: int) -> list[float]:
    """FARs that ``num_impostors`` pairs measure well."""
    return [far for far in VALIDATION_FARS if sufficiency(far, num_impostors).status == "ok"]


def choose_measure(
    asked: str | None, num_impostors: int, sizes: tuple[int, int] | None = None
) -> str:
    """Return a measure by its name, or the strictest TAR that is measured well.

    ``sizes`` are the numbers of identities and of samples, for the error message.

    Examples:
        >>> choose_measure("tar@1e-3", 2_000_000), choose_measure(None, 2_000_000)
        ('tar@0.001', 'tar@0.0001')
        >>> choose_measure(None, 100)
        'eer'
    """
    names = [EER, *map(tar_name, fars_for(num_impostors))]
    if asked is None:
        return names[-1]
    far = far_of(asked)
    name = asked if far is None else tar_name(far)
    if name not in names:
        least = ""
        if far in VALIDATION_FARS and sizes is not None:
            each = sizes[1] / sizes[0]
            least = (
                f", and it needs about {identities_for(far, each, ENOUGH_FALSE_ACCEPTS):,} "
                f"identities of {each:.3g} samples (now {sizes[0]:,})"
            )
        raise ConfigError(
            f"the measure is {asked!r}; the validation pairs allow {', '.join(names)}{least}"
        )
    return name


def measures_of(result: Result) -> dict[str, float]:
    """EER and the TARs that are measured well, by name."""
    tars = {tar_name(p.far_target): p.tar for p in result.measures.tar if p.status == "ok"}
    return {EER: result.measures.eer.value, **{k: v for k, v in tars.items() if v is not None}}


def check_pairs(labels: Labels, fars: Sequence[float] = ()) -> None:
    """Refuse data without pairs of a kind, or with too few for a FAR."""
    found = np.unique(np.asarray(labels))
    _check_counts("the data to measure", *num_pairs(labels), fars, (len(found), len(labels)))


def check_trials(path: Path, fars: Sequence[float]) -> None:
    """Refuse a list of trials that lacks labels, recordings, or trials of a kind."""
    trials = read_trials(path)
    if trials.is_genuine is None:
        raise DataError(f"{path} has no labels; say which trials are genuine")
    genuine = int(np.count_nonzero(trials.is_genuine))
    _check_counts(str(path), genuine, len(trials.keys) - genuine, fars)
    Recordings(path.parent, trials.keys.names).check()


def _check_counts(
    where: str,
    genuine: int,
    impostors: int,
    fars: Sequence[float],
    sizes: tuple[int, int] | None = None,
) -> None:
    """``sizes`` are the numbers of identities and of samples, where all pairs are measured."""
    if not genuine or not impostors:
        raise DataError(
            f"{where} has {genuine:,} pairs of one identity and {impostors:,} of two; give both"
        )
    for far in fars:
        if sufficiency(far, impostors).allowed:
            continue
        has, least, enough = "", "", ""
        if sizes is not None:
            each = sizes[1] / sizes[0]
            has = f" of {sizes[0]:,} identities"
            least, enough = (
                f"{identities_for(far, each, accepts):,} identities of {each:.3g} samples"
                for accepts in (1, ENOUGH_FALSE_ACCEPTS)
            )
        else:
            least, enough = (
                f"{math.ceil(accepts / far):,} impostor pairs"
                for accepts in (1, ENOUGH_FALSE_ACCEPTS)
            )
        raise DataError(
            f"FAR {far:g} is requested and the test has {impostors:,} impostor pairs{has}, too few "
            f"for it: one false accept needs about {least}, and the {ENOUGH_FALSE_ACCEPTS} of a "
            f"reliable number {enough}; give more, or choose a larger FAR"
        )


def identities_for(far: float, samples_each: float, false_accepts: int = 1) -> int:
    """Number of identities whose impostor pairs allow a number of false accepts.

    Examples:
        >>> identities_for(1e-4, 10.0)  # 15 * 14 / 2 * 100 pairs are 10,500
        15
    """
    pairs = 2.0 * false_accepts / far / samples_each**2  # at most count * (count - 1)
    return max(2, math.ceil(0.5 + math.sqrt(0.25 + pairs)))


def recordings_in(dataset: Dataset) -> tuple[Path, list[str], list[str]]:
    """Folder of recordings, their names in it, and the speaker of each.

    Raises:
        DataError: They are not separate files inside one folder.
    """
    stored = stored_in(dataset)
    names, root = names_in(stored), stored.index.folder
    try:
        paths = [str(stored.path(row).relative_to(root)) for row in range(len(stored))]
    except ValueError as error:
        raise DataError(
            f"recordings of {root} lie outside it; give a folder with one folder per speaker"
        ) from error
    if len(set(paths)) < len(paths):
        raise DataError(
            f"{stored.index.root} has several recordings in a file; give one file for each"
        )
    return root, paths, [names[label] for label in stored.labels.tolist()]


# -- embeddings -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embeddings of the samples of a dataset that can be read."""

    matrix: NDArray[np.float32]  # [n, views * d]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]  # number of each sample in the dataset
    num_corrupt: int


@torch.no_grad()
def embed_dataset(
    backbone: nn.Module,
    dataset: Dataset,
    *,
    views: int = 1,
    batch: int = BATCH,
    device: torch.device | str = "cpu",
) -> Embedded:
    """Embed all samples of a dataset, with quarter turns as ``embed_turned`` has them."""
    matrices, labels, rows = [], [], []
    for start in range(0, len(dataset), batch):
        indices = np.arange(start, min(start + batch, len(dataset)))
        inputs, found, kept = _read(dataset, indices)
        if not len(kept):
            continue
        images = torch.from_numpy(inputs).to(device)
        if images.dtype == torch.uint8:  # pictures travel as bytes, as in training
            images = normalised(images)
        matrices.append(embed_turned(backbone, images, views).cpu())
        labels.append(found)
        rows.append(kept)
    if not matrices:
        raise DataError(f"none of {len(dataset)} samples to measure can be read; check the data")
    matrix = torch.cat(matrices).numpy()
    return Embedded(
        matrix, np.concatenate(labels), np.concatenate(rows), len(dataset) - len(matrix)
    )


def _read(
    dataset: Dataset, indices: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Inputs, labels and numbers of the samples that can be read."""
    seeds = sample_seeds(0, 0, indices)
    if reads_many(dataset):
        inputs, labels = dataset.read_many(indices, seeds)
        return inputs, np.asarray(labels, dtype=np.int64), indices
    found, kept = [], []
    for index, seed in zip(indices.tolist(), seeds, strict=True):
        try:
            found.append(dataset.read(index, seed))
        except CorruptSample:
            continue
        kept.append(index)
    stacked = np.stack([np.asarray(one) for one, _ in found]) if found else np.zeros(0)
    return stacked, np.array([label for _, label in found], dtype=np.int64), np.array(kept)


def load_backbone(recipe: Recipe, checkpoint: Path, *, device: str = "cpu") -> nn.Module:
    """The backbone of a checkpoint, in evaluation mode."""
    backbone = build_backbone(recipe, device=device)
    backbone.load_state_dict(read_backbone(open_checkpoint(checkpoint)))
    return backbone.eval()


def pair_samples(
    embedded: Embedded, dataset: Dataset, protocol: str, prefix: str = ""
) -> PairSamples:
    """Source of all pairs, which have no file: a hash of names and identities of the samples."""
    found = hashlib.sha256(protocol.encode() + embedded.labels.tobytes())
    for row in embedded.rows.tolist():
        found.update(dataset.sample_id(row).encode())
    digits = len(str(dataset.num_classes))
    return PairSamples(
        embedded.matrix,
        embedded.labels,
        tuple(f"identity-{label:0{digits}d}" for label in range(dataset.num_classes)),
        lambda row: prefix + dataset.sample_id(int(embedded.rows[row])),
        found.hexdigest(),
        dataset.pair_lists(embedded.rows) if isinstance(dataset, People | VoiceChunks) else {},
    )


class ValidationHook:
    """Measures all pairs of validation samples, as a hook of ``train``.

    ``report`` is called with the step and the measures; it may raise to stop the run.
    """

    def __init__(
        self, dataset: Dataset, *, views: int = 1, fars: Sequence[float] | None = None
    ) -> None:
        self.dataset, self.views, self.fars = dataset, views, fars
        self.report: Callable[[int, dict[str, float]], None] | None = None
        self._embedded: Embedded | None = None  # samples of the last call

    def __call__(self, state: HookState) -> dict[str, float]:
        """Measures by name: ``eer``, ``tar@0.001`` and the like."""
        device = state.process.device
        found = embed_dataset(state.backbone, self.dataset, views=self.views, device=device)
        self._embedded = found
        check_pairs(found.labels)
        fars = fars_for(num_pairs(found.labels)[1]) if self.fars is None else self.fars
        pairs = evaluate_all_pairs(
            found.matrix, found.labels, fars, num_hardest=0, device=device.type
        )
        measures = {EER: pairs.eer.eer, **{tar_name(at.far_target): at.tar for at in pairs.tar}}
        if self.report is not None:
            self.report(state.step, measures)
        return measures

    def result(self, options: EvaluationOptions, command: str) -> Result:
        """Measures of the last call, as a result without intervals."""
        assert self._embedded is not None  # it was called
        fars = tuple(fars_for(num_pairs(self._embedded.labels)[1])) or VALIDATION_FARS[:1]
        samples = pair_samples(self._embedded, self.dataset, options.protocol)
        options = replace(options, fars=fars, num_replicates=0, num_hardest=0)
        return measure_pairs(samples, options, command=command)


class ProgressHook:
    """Measures all pairs of test samples during training, and the time of the steps."""

    def __init__(self, dataset: Dataset, *, views: int, fars: Sequence[float]) -> None:
        self._measure = ValidationHook(dataset, views=views, fars=fars)
        self.points: list[TrainingPoint] = []
        self.start()

    def start(self) -> None:
        """Start the clock, right before the first step."""
        self._began, self.seconds = time.monotonic(), 0.0  # seconds of measuring

    def __call__(self, state: HookState) -> dict[str, float]:
        """Measures by name: ``eer``, ``tar@0.001`` and the like."""
        if state.process.device.type == "cuda":
            torch.cuda.synchronize(state.process.device)
        began = time.monotonic()
        trained = began - self._began - self.seconds
        found = self._measure(state)
        tar = {far_key(far): found[tar_name(far)] for far in self._measure.fars or ()}
        self.points.append(TrainingPoint(state.step, round(trained, 3), found[EER], tar))
        self.seconds += time.monotonic() - began
        return found


class PeakMemory:
    """Peak memory inside a ``with`` block: of the GPU, or on Linux of the process."""

    def __init__(self, device: str) -> None:
        self._device = choose_device(0, device)
        self.device = self._device.type
        self.bytes: int | None = None
        self._can_reset = False
        if self._device.type == "cuda":
            self.device = torch.cuda.get_device_name(self._device)

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            self._can_reset = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._can_reset:
            with suppress(OSError, StopIteration, ValueError):
                lines = Path("/proc/self/status").read_text().splitlines()
                line = next(line for line in lines if line.startswith("VmHWM:"))
                self.bytes = 1024 * int(line.split()[1])
