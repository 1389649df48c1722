"""All pairs of a set of samples: from embeddings with identities to a ``Result``.

Every sample is compared with every other. Operating points are exact at any number of samples, see
``evaluate_all_pairs``; intervals come from drawing identities with replacement.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qmargin
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.all_pairs import (
    AllPairs,
    all_genuine,
    evaluate_all_pairs,
    num_impostor_pairs,
)
from qmargin.evaluation.embeddings import Embeddings, collapse_note
from qmargin.evaluation.evaluate import known_threshold, tar_point
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.pair_intervals import (
    MAX_ROWS,
    PairReplicates,
    all_trials,
    bootstrap_many_pairs,
    bootstrap_pairs,
    column_intervals,
)
from qmargin.evaluation.pair_scores import ScoredPair, unit_rows
from qmargin.evaluation.pictures import counted_histogram, score_histogram
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
    System,
    Value,
    far_key,
)
from qmargin.evaluation.scoring import CohortNorm, norm_moments
from qmargin.metrics.normalise import Moments
from qmargin.metrics.subjects import Trials
from qmargin.metrics.sufficiency import rule_of_three, sufficiency

GRID_POINTS = 12
SPLITS = ("train", "test")  # folders of a divided dataset, not of two identities
_FIRST = 3  # names in a message


@dataclass(frozen=True, eq=False)
class PairSamples:
    """Samples whose pairs are all compared.

    Attributes:
        embeddings: ``[n, d]``.
        labels: Identity of each sample, ``[n]``, as a position in ``identities``.
        identities: Distinct and sorted.
        name_of: Name of a sample, for the hardest pairs.
        sha256: Of what is compared; results of systems with the same one can be paired.
    """

    embeddings: NDArray[Any]
    labels: NDArray[np.integer[Any]]
    identities: tuple[str, ...]
    name_of: Callable[[int], str]
    sha256: str

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """Of every identity."""
        return np.bincount(self.labels, minlength=len(self.identities))


def evaluate_identities(
    embeddings: Embeddings,
    identities: Sequence[str],
    options: EvaluationOptions | None = None,
    *,
    norm: CohortNorm | None = None,
    device: str = "cpu",
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Compare every embedding with every other.

    A FAR that the pairs cannot resolve is "not measurable", not an error.

    Args:
        embeddings: From ``read_embeddings``.
        identities: Of each embedding, from ``identities_of`` or elsewhere.
        options: What to measure; ``rule`` has to be conservative, subjects are the identities.
        norm: AS-norm by a cohort; plain cosines without it.
        device: Where products are computed; it does not change an operating point.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        ProtocolError: There is no pair of one identity, or none of two.
        DataError: An embedding is zero or not finite; the message names it.

    Examples:
        >>> from qmargin.evaluation.result import Source
        >>> rows = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> keys = ("al/0", "al/1", "bo/0", "bo/1")
        >>> embeddings = Embeddings(keys, rows, Source("made.npz", "", "embeddings"))
        >>> result = evaluate_identities(embeddings, identities_of(keys))
        >>> result.protocol.num_genuine, result.protocol.num_impostors, result.metrics.eer.value
        (2, 4, 0.0)
        >>> result.metrics.tar[0].status
        'not measurable'
    """
    options = options or EvaluationOptions()
    if options.rule != "conservative":
        raise ConfigError(f"rule={options.rule!r} is not measured over all pairs: use conservative")
    _check_rows(embeddings)
    samples = _samples(embeddings, identities)
    check_identities(identities)
    moments = None if norm is None else norm_moments(unit_rows(embeddings.matrix), norm)
    note = collapse_note(embeddings.matrix)
    cohort = () if norm is None else (norm.cohort.source,)
    options = replace(
        options,
        sources=(embeddings.source, *cohort, *options.sources),
        notes=(*options.notes, *(() if note is None else (note,))),
    )
    return measure_pairs(
        samples, options, moments=moments, device=device, command=command, progress=progress
    )


def identities_of(keys: Sequence[str], mapping: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Identity of each name: by a mapping, or its first folder.

    Raises:
        DataError: A name has no identity; or the folders are those of a divided dataset.

    Examples:
        >>> identities_of(["ann/0.jpg", "bob/2019/1.jpg"])
        ('ann', 'bob')
    """
    if mapping is not None:
        missing = [key for key in keys if key not in mapping]
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(keys):,} embeddings have no identity, such as "
                f"{missing[0]!r}: add lines `key identity` to the file of identities"
            )
        return tuple(mapping[key] for key in keys)
    parts = [key.replace("\\", "/").lstrip("/").split("/") for key in keys]
    alone = next((key for key, part in zip(keys, parts, strict=True) if len(part) < 2), None)
    if alone is not None:
        raise DataError(
            f"the name {alone!r} has no folder, so its identity is not known: name samples as "
            "identity/sample, or give a file of lines `key identity` with --identities"
        )
    folders = {part[0] for part in parts}
    if folders.issuperset(SPLITS):
        raise DataError(
            f"{' and '.join(SPLITS)} are among the {len(folders)} first folders and would be taken "
            "for identities: use the samples of one of them, or give --identities FILE"
        )
    return tuple(part[0] for part in parts)


def check_identities(identities: Sequence[str]) -> None:
    """Refuse identities of samples that make no genuine or no impostor pair.

    Raises:
        ProtocolError: There is one identity, or none has two samples.
    """
    names = sorted(set(identities))
    if len(names) < 2:
        raise ProtocolError(
            f"all {len(identities):,} samples are of the identity {names[0]!r}, so there is no "
            "impostor pair: give at least 2 identities; those of a folder are its sub-folders"
        )
    if len(names) == len(identities):
        shown = ", ".join(map(repr, names[:_FIRST]))
        raise ProtocolError(
            f"each of {len(names):,} identities ({shown}, ...) has 1 sample, so there is no "
            "genuine pair: give at least 2 of one of them, or check the identities"
        )


def measure_pairs(
    samples: PairSamples,
    options: EvaluationOptions,
    *,
    moments: Moments | None = None,
    device: str = "cpu",
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Measure all pairs of samples.

    Args:
        samples: What to compare.
        options: What to measure.
        moments: Of each sample's scores against a cohort, for AS-norm; None for cosines.
        device: Where products are computed.
        command: What was run, for the record.
        progress: As in ``evaluate_identities``.
    """
    num_impostors = num_impostor_pairs(samples.num_samples)
    fars = tuple(far for far in options.fars if sufficiency(far, num_impostors).allowed > 0)
    found = evaluate_all_pairs(
        samples.embeddings,
        samples.labels,
        fars,
        p_targets=options.p_targets,
        num_hardest=options.num_hardest,
        device=device,
        moments=moments,
        progress=_stage(progress, "comparing"),
    )
    trials = None
    if len(samples.labels) <= MAX_ROWS:
        trials = all_trials(samples.embeddings, samples.labels, samples.identities, moments)
    grid: tuple[float, ...] = ()
    if fars:
        grid = tuple(np.geomspace(1.0 / num_impostors, max(fars), GRID_POINTS).tolist())
    replicates, intervals = None, _Intervals(_no_intervals(options, "not asked for"))
    if options.num_replicates:
        try:
            replicates = _replicates(
                samples, trials, found, options, grid, moments, device, progress
            )
            intervals = _intervals(found, replicates, options, grid)
        except ProtocolError as error:
            replicates, intervals = None, _Intervals(_no_intervals(options, str(error)))
    return _result(
        found,
        intervals,
        options,
        samples,
        histogram=_histogram(samples, trials, found, moments),
        replicates=None if replicates is None else _values(found, replicates, options.seed),
        command=command,
    )


def _check_rows(embeddings: Embeddings) -> None:
    """Name the sample whose embedding has no direction."""
    with np.errstate(invalid="ignore"):
        is_bad = ~np.isfinite(embeddings.matrix).all(axis=1)
    is_zero = ~embeddings.matrix.any(axis=1)
    for rows, what in ((is_bad, "is not finite"), (is_zero, "is zero and has no direction")):
        if rows.any():
            key = embeddings.keys[int(np.argmax(rows))]
            raise DataError(
                f"{embeddings.source.path}: the embedding of {key!r} {what}: leave the sample out "
                "or embed it again"
            )


def _samples(embeddings: Embeddings, identities: Sequence[str]) -> PairSamples:
    if len(identities) != len(embeddings):
        raise ShapeError(
            f"there are {len(identities)} identities for {len(embeddings)} embeddings: give one "
            "for each"
        )
    names = tuple(sorted(set(identities)))
    position = {name: place for place, name in enumerate(names)}
    labels = np.array([position[identity] for identity in identities], dtype=np.int64)
    pairs = sorted(zip(embeddings.keys, identities, strict=True))
    digest = hashlib.sha256(b"all pairs\0")
    for pair in pairs:
        digest.update("\0".join((*pair, "")).encode("utf-8", "surrogatepass"))
    return PairSamples(
        embeddings.matrix, labels, names, embeddings.keys.__getitem__, digest.hexdigest()
    )


def _stage(progress: StageProgress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else partial(progress, name)


@dataclass(frozen=True)
class _Intervals:
    """Of every measure, where there are any."""

    method: IntervalMethod
    tar: tuple[tuple[float, float], ...] | None = None
    eer: tuple[float, float] | None = None
    band: Band | None = None


def _no_intervals(options: EvaluationOptions, why: str) -> IntervalMethod:
    return IntervalMethod("none", options.level, 0, options.seed, why)


def _replicates(
    samples: PairSamples,
    trials: Trials | None,
    found: AllPairs,
    options: EvaluationOptions,
    grid: tuple[float, ...],
    moments: Moments | None,
    device: str,
    progress: StageProgress | None,
) -> PairReplicates:
    if trials is None:
        return bootstrap_many_pairs(
            samples.embeddings,
            samples.labels,
            samples.identities,
            found,
            grid_fars=grid,
            num_replicates=options.num_replicates,
            seed=options.seed,
            device=device,
            moments=moments,
            progress=_stage(progress, "bootstrap"),
        )
    return bootstrap_pairs(
        trials,
        samples.num_samples,
        tuple(point.far_target for point in found.tar),
        grid_fars=grid,
        rough_eer=found.eer.eer,
        num_replicates=options.num_replicates,
        seed=options.seed,
        progress=_stage(progress, "bootstrap"),
    )


def _intervals(
    found: AllPairs,
    replicates: PairReplicates,
    options: EvaluationOptions,
    grid: tuple[float, ...],
) -> _Intervals:
    """Where no replicate has an error, the rule of three bounds what is left."""
    least = 1.0 - rule_of_three(found.num_genuine)
    tars = column_intervals(replicates.tar, options.level)
    ((low, high),) = column_intervals(replicates.eer[:, None], options.level)
    most = rule_of_three(min(found.num_genuine, found.num_impostors))
    band = None
    if grid:
        lows, highs = zip(*column_intervals(replicates.frr_at_grid, options.level), strict=True)
        band = Band(grid, lows, highs)
    note = "identities are drawn with replacement"
    if replicates.note is not None:
        note += f"; {replicates.note}"
    return _Intervals(
        IntervalMethod(
            "subject bootstrap", options.level, options.num_replicates, options.seed, note
        ),
        tar=tuple((least, 1.0) if ends == (1.0, 1.0) else ends for ends in tars),
        eer=(low, most) if high == 0.0 else (low, high),
        band=band,
    )


def _histogram(
    samples: PairSamples, trials: Trials | None, found: AllPairs, moments: Moments | None
) -> Histogram:
    if trials is None:
        genuine = all_genuine(samples.embeddings, samples.labels, moments).scores
        return counted_histogram(genuine, found.products.scores, found.products.counts)
    scores, is_genuine = trials.scores, trials.is_genuine
    return score_histogram(
        scores[is_genuine].astype(np.float64), scores[~is_genuine].astype(np.float64)
    )


def _result(
    found: AllPairs,
    intervals: _Intervals,
    options: EvaluationOptions,
    samples: PairSamples,
    *,
    histogram: Histogram,
    replicates: ReplicateValues | None,
    command: str,
) -> Result:
    hardest = None
    if options.num_hardest:
        hardest = Hardest(
            _named(found.hardest_impostors, samples), _named(found.hardest_genuine, samples)
        )
    return Result(
        system=System(options.name, options.model_card),
        protocol=Protocol(
            name=options.protocol,
            rule="conservative",
            num_trials=found.num_genuine + found.num_impostors,
            num_genuine=found.num_genuine,
            num_impostors=found.num_impostors,
            num_subjects=len(samples.identities),
            interval=intervals.method,
        ),
        sources=options.sources,
        trials_sha256=samples.sha256,
        metrics=_metrics(found, intervals, options),
        det=_det(found, intervals.band),
        histogram=histogram,
        calibration=None,
        replicates=replicates,
        groups=None,
        hardest=hardest,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        qmargin=qmargin.__version__,
        notes=options.notes,
    )


def _metrics(found: AllPairs, intervals: _Intervals, options: EvaluationOptions) -> Metrics:
    measured = {point.far_target: place for place, point in enumerate(found.tar)}
    points = []
    for far in options.fars:
        state, place = sufficiency(far, found.num_impostors), measured.get(far)
        point = None if place is None else found.tar[place]
        ends = None if intervals.tar is None or place is None else intervals.tar[place]
        points.append(tar_point(far, state, point, ends))
    return Metrics(
        tar=tuple(points),
        eer=EerPoint(found.eer.eer, intervals.eer, known_threshold(found.eer.threshold)),
        min_dcf=tuple(
            DcfPoint(cost.p_target, cost.min_dcf, None, known_threshold(cost.threshold))
            for cost in found.min_dcf
        ),
        cllr=Value(None),
        min_cllr=Value(None),
    )


def _det(found: AllPairs, band: Band | None) -> Det:
    curve = found.det
    thresholds = tuple(map(known_threshold, curve.thresholds.tolist()))
    return Det(tuple(curve.far.tolist()), tuple(curve.frr.tolist()), thresholds, band)


def _values(found: AllPairs, replicates: PairReplicates, seed: int) -> ReplicateValues:
    def optional(column: NDArray[np.float64]) -> tuple[float | None, ...]:
        return tuple(None if value != value else value for value in column.tolist())

    tar = {
        far_key(point.far_target): optional(column)
        for point, column in zip(found.tar, replicates.tar.T, strict=True)
    }
    return ReplicateValues(replicates.subjects_sha256, seed, tar, optional(replicates.eer))


def _named(pairs: tuple[ScoredPair, ...], samples: PairSamples) -> tuple[HardPair, ...]:
    name = samples.name_of
    return tuple(HardPair(name(pair.first), name(pair.second), pair.score) for pair in pairs)
