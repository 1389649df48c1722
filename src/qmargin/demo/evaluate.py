"""From the embeddings of test identities to a ``Result`` over all of their pairs."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Shape

import numpy as np
from numpy.typing import NDArray

import qmargin
from qmargin.demo.intervals import PairReplicates, bootstrap_pairs, column_intervals
from qmargin.evaluation.all_pairs import AllPairs, evaluate_all_pairs, num_impostor_pairs
from qmargin.evaluation.pair_scores import PairNorm, ScoredPair, unit_rows
from qmargin.evaluation.pictures import score_histogram
from qmargin.evaluation.result import (
    Band,
    DcfPoint,
    Det,
    EerPoint,
    Hardest,
    HardPair,
    Histogram,
    IntervalMethod,
    Metrics,
    Protocol,
    ReplicateValues,
    Result,
    Source,
    System,
    TarPoint,
    Value,
    far_key,
)
from qmargin.metrics.normalise import Moments
from qmargin.metrics.subjects import Trials
from qmargin.metrics.sufficiency import sufficiency

FARS = (1e-2, 1e-3, 1e-4, 1e-5)
GRID_POINTS = 12
NUM_REPLICATES = 1000  # fewer could not show a difference among ten pairs
NUM_HARDEST = 12
LEVEL = 0.95
ENLARGED = 4  # a pixel of a picture in the report


class Pictures(Shape):
    """Drawings of test identities, such as ``StrokeIdentities``."""

    @property
    def num_classes(self) -> int:
        """Number of identities."""
        ...

    @property
    def labels(self) -> NDArray[np.int64]:
        """Identity of each sample."""
        ...

    def __len__(self) -> int: ...

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Some samples, ``[n, size, size]``."""
        ...

    def sample_id(self, index: int) -> str:
        """Name of a sample."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a result is of: the system, its facts, the trials and what was run."""

    name: str
    card: dict[str, str]
    protocol: str
    command: str
    prefix: str = ""  # of the samples' names: the folder of their pictures


def evaluate_pictures(
    embeddings: NDArray[np.float32],
    dataset: Pictures,
    facts: Facts,
    *,
    moments: Moments | None = None,
    num_replicates: int = NUM_REPLICATES,
    device: str = "cpu",
) -> Result:
    """Measure all pairs of a dataset's samples.

    Args:
        embeddings: ``[n, d]`` of all samples, in order.
        dataset: Of test or validation identities.
        facts: For the record.
        moments: Of each sample's scores against a cohort, for AS-norm; None for cosines.
        num_replicates: Of the bootstrap over identities.
        device: Where products are computed.

    Raises:
        ProtocolError: There are too few pairs for a rate, or none of a kind.
    """
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    num_impostors = num_impostor_pairs(counts)
    fars = tuple(far for far in FARS if sufficiency(far, num_impostors).allowed > 0)
    found = evaluate_all_pairs(
        embeddings, dataset.labels, fars, num_hardest=NUM_HARDEST, device=device, moments=moments
    )
    trials = all_trials(embeddings, dataset, moments)
    grid = tuple(np.geomspace(1.0 / found.num_impostors, max(fars), GRID_POINTS).tolist())
    replicates = bootstrap_pairs(
        trials,
        counts,
        fars,
        grid_fars=grid,
        rough_eer=found.eer.eer,
        num_replicates=num_replicates,
    )
    is_genuine = trials.is_genuine
    histogram = score_histogram(
        trials.scores[is_genuine].astype(np.float64), trials.scores[~is_genuine].astype(np.float64)
    )
    return _result(found, replicates, histogram, dataset, facts, grid)


def all_trials(
    embeddings: NDArray[np.float32], dataset: Pictures, moments: Moments | None = None
) -> Trials:
    """Scores of all pairs in float32, with the identities on both sides."""
    unit = unit_rows(embeddings).astype(np.float32)
    labels = dataset.labels.astype(np.int32)
    matrix = unit @ unit.T  # [n, n], a hundred megabytes at most in the demo
    if moments is not None:
        rows = np.arange(len(matrix))
        norm = PairNorm(*(column.astype(np.float32) for column in PairNorm.of(moments)))
        norm.apply(matrix, rows[:, None], rows)
    is_kept = np.triu(np.ones(matrix.shape, dtype=bool), k=1)
    enrol = np.broadcast_to(labels[:, None], matrix.shape)[is_kept]
    test = np.broadcast_to(labels, matrix.shape)[is_kept]
    digits = len(str(dataset.num_classes))
    names = tuple(f"identity-{label:0{digits}d}" for label in range(dataset.num_classes))
    return Trials(matrix[is_kept], enrol == test, enrol, test, names)


def picture_keys(result: Result) -> set[str]:
    """Names of the samples in the hardest pairs."""
    if result.hardest is None:
        return set()
    pairs = (*result.hardest.false_accepts, *result.hardest.false_rejects)
    return {key for pair in pairs for key in (pair.enrol, pair.test)}


def has_pictures(folder: Path, result: Result) -> bool:
    """Whether the samples of the hardest pairs are drawn in a folder."""
    paths = (folder / f"{key}.png" for key in picture_keys(result))
    return folder.is_dir() and all(path.exists() for path in paths)


def write_pictures(
    folder: Path, dataset: Pictures, result: Result, *, prefix: str = "", is_ink: bool = True
) -> None:
    """Draw the samples of the hardest pairs, where a report looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    from PIL import Image

    flip = np.uint8(255 if is_ink else 0)  # ink is black on white paper
    indices = {prefix + dataset.sample_id(index): index for index in range(len(dataset))}
    for key in sorted(picture_keys(result)):
        picture = dataset.images(np.array([indices[key]]))[0] ^ flip
        path = folder / f"{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)).save(path)


def _result(
    found: AllPairs,
    replicates: PairReplicates,
    histogram: Histogram,
    dataset: Pictures,
    facts: Facts,
    grid: tuple[float, ...],
) -> Result:
    source, sha256 = _source(dataset, facts)
    note = "identities are drawn with replacement"
    method = IntervalMethod("subject bootstrap", LEVEL, len(replicates.eer), 0, note)
    return Result(
        system=System(facts.name, facts.card),
        protocol=Protocol(
            name=facts.protocol,
            rule="conservative",
            num_trials=found.num_genuine + found.num_impostors,
            num_genuine=found.num_genuine,
            num_impostors=found.num_impostors,
            num_subjects=dataset.num_classes,
            interval=method,
        ),
        sources=(source,),
        trials_sha256=sha256,
        metrics=_metrics(found, replicates),
        det=_det(found, replicates, grid),
        histogram=histogram,
        calibration=None,
        replicates=_values(found, replicates),
        groups=None,
        hardest=Hardest(
            _named(found.hardest_impostors, dataset, facts.prefix),
            _named(found.hardest_genuine, dataset, facts.prefix),
        ),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=facts.command,
        qmargin=qmargin.__version__,
    )


def _source(dataset: Pictures, facts: Facts) -> tuple[Source, str]:
    """All pairs have no file: what they are made from stands for it."""
    text = f"{facts.protocol}, {dataset!r}, {len(dataset)} samples"
    sha256 = hashlib.sha256(text.encode("utf-8") + dataset.labels.tobytes()).hexdigest()
    return Source(f"{dataset!r}, all pairs", sha256, "trials"), sha256


def _metrics(found: AllPairs, replicates: PairReplicates) -> Metrics:
    tars = column_intervals(replicates.tar, LEVEL)
    (eer,) = column_intervals(replicates.eer[:, None], LEVEL)
    points = []
    for point, ends in zip(found.tar, tars, strict=True):
        state = sufficiency(point.far_target, found.num_impostors)
        points.append(
            TarPoint(
                far_target=point.far_target,
                tar=point.tar,
                interval=ends,
                far=point.far,
                false_accepts=point.false_accepts,
                threshold=point.threshold,
                status=state.status,
                allowed=state.allowed,
                note=state.message,
            )
        )
    return Metrics(
        tar=tuple(points),
        eer=EerPoint(found.eer.eer, eer, found.eer.threshold),
        min_dcf=tuple(
            DcfPoint(cost.p_target, cost.min_dcf, None, cost.threshold) for cost in found.min_dcf
        ),
        cllr=Value(None),
        min_cllr=Value(None),
    )


def _det(found: AllPairs, replicates: PairReplicates, grid: tuple[float, ...]) -> Det:
    low, high = zip(*column_intervals(replicates.frr_at_grid, LEVEL), strict=True)
    curve = found.det
    thresholds = tuple(
        None if np.isnan(threshold) else threshold for threshold in curve.thresholds.tolist()
    )
    far, frr = tuple(curve.far.tolist()), tuple(curve.frr.tolist())
    return Det(far, frr, thresholds, Band(grid, low, high))


def _values(found: AllPairs, replicates: PairReplicates) -> ReplicateValues:
    def optional(column: NDArray[np.float64]) -> tuple[float | None, ...]:
        return tuple(None if value != value else value for value in column.tolist())

    tar = {
        far_key(point.far_target): optional(column)
        for point, column in zip(found.tar, replicates.tar.T, strict=True)
    }
    return ReplicateValues(replicates.subjects_sha256, 0, tar, optional(replicates.eer))


def _named(pairs: tuple[ScoredPair, ...], dataset: Pictures, prefix: str) -> tuple[HardPair, ...]:
    def name(row: int) -> str:
        return prefix + dataset.sample_id(row)

    return tuple(HardPair(name(pair.first), name(pair.second), pair.score) for pair in pairs)
