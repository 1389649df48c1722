"""All pairs of a set of samples: from embeddings with identities to a ``Result``.

Every sample is compared with every other. Operating points are exact at any number of samples, see
``evaluate_all_pairs``; intervals come from drawing identities with replacement. All pairs are
tested, so the weight of a replicate is known without counting, and only the largest impostors have
to be looked at. Where even these are too many to hold, rates that need more of them come from a
random sample of the impostor pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin import registry
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.all_pairs import (
    AllPairs,
    PairNorm,
    PairScores,
    ScoredPair,
    all_genuine,
    evaluate_all_pairs,
    largest_impostors,
    num_impostor_pairs,
    random_impostors,
    unit_rows,
)
from qmargin.evaluation.embeddings import Embeddings, collapse_note
from qmargin.evaluation.evaluate import (
    EvaluationOptions,
    Intervals,
    Measured,
    StageProgress,
    counted_histogram,
    intervals_of,
    measurable,
    new_result,
    no_intervals,
    registered_measures,
    score_histogram,
    tar_points,
)
from qmargin.evaluation.result import Hardest, HardPair, Histogram, Measure, Result
from qmargin.evaluation.scoring import CohortNorm, norm_moments
from qmargin.files import Progress
from qmargin.metrics.bootstrap import (
    DrawnPoints,
    Point,
    SortedTrials,
    SubjectWeights,
    Tail,
    Trials,
    Wanted,
    weighted_point,
)
from qmargin.metrics.normalise import Moments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GRID_POINTS = 12
SPLITS = ("train", "test")  # folders of a divided dataset, not of two identities
FIRST_TAIL = 1.5  # times the largest rate that is asked for: longer tails are rarely needed
LEAST_TAIL = 1e-4  # of the impostors
MAX_ROWS = 10_240  # embeddings whose pairs are all held at once, in about two gigabytes
MAX_TAIL = 1 << 23  # largest impostors that are held of more embeddings
NUM_SAMPLED = 1 << 22  # impostor pairs that are drawn for rates above those of the tail
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
        >>> result.protocol.num_genuine, result.protocol.num_impostors, result.measures.eer.value
        (2, 4, 0.0)
        >>> result.measures.tar[0].status
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
    fars = measurable(options.fars, num_impostors)
    found = evaluate_all_pairs(
        samples.embeddings,
        samples.labels,
        fars,
        p_targets=options.p_targets,
        num_hardest=options.num_hardest,
        device=device,
        moments=moments,
        progress=None if progress is None else partial(progress, "comparing"),
    )
    trials = None
    if len(samples.labels) <= MAX_ROWS:
        trials = all_trials(samples.embeddings, samples.labels, samples.identities, moments)
    intervals = no_intervals(options, "not asked for")
    if options.num_replicates:
        try:
            intervals = _intervals(samples, trials, found, options, moments, device, progress)
        except ProtocolError as error:
            intervals = no_intervals(options, str(error))
    measured = Measured(
        eer=found.eer,
        min_dcf=found.min_dcf,
        curve=found.det,
        histogram=_histogram(samples, trials, found, moments),
        extra=_extra(trials, options),
    )
    hardest = None
    if options.num_hardest:
        kinds = (found.hardest_impostors, found.hardest_genuine)
        hardest = Hardest(*(_named(pairs, samples.name_of) for pairs in kinds))
    scoring = "cosine" if moments is None else "as-norm"
    return new_result(
        measured,
        tar_points(options.fars, found.tar, num_impostors),
        intervals,
        replace(options, kind="all-pairs", scoring=scoring, pooling=None),
        num_genuine=found.num_genuine,
        num_impostors=num_impostors,
        num_subjects=len(samples.identities),
        data_sha256=samples.sha256,
        hardest=hardest,
        sources=options.sources,
        notes=options.notes,
        command=command,
    )


def _intervals(
    samples: PairSamples,
    trials: Trials | None,
    found: AllPairs,
    options: EvaluationOptions,
    moments: Moments | None,
    device: str,
    progress: StageProgress | None,
) -> Intervals:
    grid: tuple[float, ...] = ()
    if found.tar:
        largest = max(point.far_target for point in found.tar)
        grid = tuple(np.geomspace(1.0 / found.num_impostors, largest, GRID_POINTS).tolist())
    drawing: dict[str, Any] = {
        "grid_fars": grid,
        "num_replicates": options.num_replicates,
        "seed": options.seed,
        "progress": None if progress is None else partial(progress, "bootstrap"),
    }
    if trials is None:
        drawn = bootstrap_many_pairs(
            samples.embeddings,
            samples.labels,
            samples.identities,
            found,
            device=device,
            moments=moments,
            **drawing,
        )
    else:
        fars = tuple(point.far_target for point in found.tar)
        drawn = bootstrap_pairs(
            trials, samples.num_samples, fars, rough_eer=found.eer.eer, **drawing
        )
    note = "; ".join(filter(None, ("identities are drawn with replacement", drawn.note)))
    return intervals_of(
        drawn, found.num_genuine, found.num_impostors, options, "subject bootstrap", note
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


def _extra(trials: Trials | None, options: EvaluationOptions) -> dict[str, Measure]:
    """Registered metrics, where all scores can be held at once."""
    if trials is not None:
        scores, is_genuine = trials.scores, trials.is_genuine
        return registered_measures(scores[is_genuine], scores[~is_genuine], options.metrics)
    names = registry.metrics.names() if options.metrics is None else options.metrics
    note = f"not measured: the scores of more than {MAX_ROWS:,} samples are not held"
    return {name: Measure(None, note=note) for name in names}


def _named(pairs: tuple[ScoredPair, ...], name: Callable[[int], str]) -> tuple[HardPair, ...]:
    return tuple(HardPair(name(pair.first), name(pair.second), pair.score) for pair in pairs)


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


@dataclass(frozen=True, eq=False)
class PairReplicates(DrawnPoints):
    """Operating points in replicates; ``note`` says what was done where pairs were not all held."""

    note: str | None = None


def all_trials(
    embeddings: NDArray[Any],
    labels: NDArray[np.integer[Any]],
    subject_names: tuple[str, ...],
    moments: Moments | None = None,
) -> Trials:
    """Scores of all pairs in float32, with the subjects on both sides.

    Args:
        embeddings: ``[n, d]``, at most ``MAX_ROWS`` unless there is memory for ``[n, n]``.
        labels: Subject of each row, a position in ``subject_names``.
        subject_names: Distinct and sorted.
        moments: For AS-norm.
    """
    unit = unit_rows(embeddings).astype(np.float32)
    labels = labels.astype(np.int32)
    matrix = unit @ unit.T  # [n, n]
    if moments is not None:
        rows = np.arange(len(matrix))
        norm = PairNorm(*(column.astype(np.float32) for column in PairNorm.of(moments)))
        norm.apply(matrix, rows[:, None], rows)
    is_kept = np.triu(np.ones(matrix.shape, dtype=bool), k=1)
    enrol = np.broadcast_to(labels[:, None], matrix.shape)[is_kept]
    test = np.broadcast_to(labels, matrix.shape)[is_kept]
    return Trials(matrix[is_kept], enrol == test, enrol, test, subject_names)


def bootstrap_pairs(
    trials: Trials,
    num_samples: Ints,
    fars: tuple[float, ...],
    *,
    grid_fars: tuple[float, ...],
    rough_eer: float,
    num_replicates: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> PairReplicates:
    """Operating points in replicates that draw subjects with replacement.

    Args:
        trials: All pairs of all samples.
        num_samples: Of every subject, ``[S]``.
        fars: At which to measure TAR.
        grid_fars: At which to measure FRR, for the band of a DET curve.
        rough_eer: Of the trials as they are; replicates are near it.
        num_replicates: ``R``.
        seed: Of the draws.
        progress: Called with the replicates done and their number.
    """
    weights = SubjectWeights(trials.subject_names, num_replicates=num_replicates, seed=seed)
    rows = weights.rows(0, num_replicates)
    wanted = Wanted(fars + grid_fars, (), True)
    share = FIRST_TAIL * max((*wanted.fars, rough_eer, LEAST_TAIL))
    while (points := _points(_tail(trials, share), rows, num_samples, wanted, progress)) is None:
        share *= 4.0
    tar = np.stack([point.tar for point in points])
    return _replicates(tar, [point.eer for point in points], fars, grid_fars, weights)


def bootstrap_many_pairs(
    embeddings: NDArray[Any],
    labels: NDArray[np.integer[Any]],
    subject_names: tuple[str, ...],
    found: AllPairs,
    *,
    grid_fars: tuple[float, ...],
    num_replicates: int,
    seed: int = 0,
    device: str = "cpu",
    moments: Moments | None = None,
    progress: Progress | None = None,
) -> PairReplicates:
    """The same for embeddings whose pairs cannot be held.

    The largest impostors are found as ``evaluate_all_pairs`` finds them, with exact scores. Rates
    that need more of them are measured in the same replicates on impostor pairs drawn at random.

    Args:
        embeddings: ``[n, d]``.
        labels: Subject of each row, a position in ``subject_names``.
        subject_names: Distinct and sorted.
        found: What ``evaluate_all_pairs`` found, on the same device.
        grid_fars: At which to measure FRR.
        num_replicates: ``R``.
        seed: Of the draws.
        device: Where products are computed.
        moments: For AS-norm.
        progress: Called with the replicates done and their number.
    """
    weights = SubjectWeights(subject_names, num_replicates=num_replicates, seed=seed)
    rows = weights.rows(0, num_replicates)
    num_samples = np.bincount(labels, minlength=len(subject_names))
    genuine = all_genuine(embeddings, labels, moments)
    fars = tuple(point.far_target for point in found.tar)
    place = np.argsort((*fars, *grid_fars), kind="stable")
    rates = tuple(np.array((*fars, *grid_fars))[place].tolist())

    needed = 2 * FIRST_TAIL * max((*rates, found.eer.eer, LEAST_TAIL)) * found.num_impostors
    largest = largest_impostors(
        embeddings,
        labels,
        found.products,
        min(MAX_TAIL, int(needed) + 1024),
        device=device,
        moments=moments,
    )
    reach = len(largest.scores) / (FIRST_TAIL * found.num_impostors)  # the largest rate it answers
    near = Wanted(tuple(rate for rate in rates if rate <= reach), (), found.eer.eer <= reach)
    tail, points = _tail_of(genuine, largest, labels, subject_names), None
    while tail is not None and (near.fars or near.has_eer):
        points = _points(tail, rows, num_samples, near, progress)
        if points is not None:
            break
        near = Wanted(near.fars[:-1], (), False)  # a replicate drew the subjects of the tail
    if points is None:
        near = Wanted((), (), False)
        points = [Point(np.empty(0), np.nan, np.empty(0))] * num_replicates

    far = Wanted(rates[len(near.fars) :], (), not near.has_eer)
    note, others = None, points
    if far.fars or far.has_eer:
        drawn = random_impostors(embeddings, labels, NUM_SAMPLED, moments=moments, seed=seed)
        note = _note(far, len(drawn.scores), found.num_impostors)
        tail = _tail_of(genuine, drawn, labels, subject_names)
        assert tail is not None
        others = [_sampled_point(tail, row, num_samples, far) for row in rows]
    tar = np.empty((num_replicates, len(rates)))
    tar[:, place[: len(near.fars)]] = np.stack([point.tar for point in points])
    if far.fars:
        tar[:, place[len(near.fars) :]] = np.stack([point.tar for point in others])
    eers = [point.eer for point in (points if near.has_eer else others)]
    return _replicates(tar, eers, fars, grid_fars, weights, note)


def _replicates(
    tar: Floats,
    eers: Sequence[float],
    fars: tuple[float, ...],
    grid_fars: tuple[float, ...],
    weights: SubjectWeights,
    note: str | None = None,
) -> PairReplicates:
    """From TAR at all rates, ``[R, F + G]``."""
    return PairReplicates(
        fars=fars,
        p_targets=(),
        grid_fars=grid_fars,
        tar=tar[:, : len(fars)],
        eer=np.array(eers),
        min_dcf=np.empty((len(tar), 0)),
        frr_at_grid=1.0 - tar[:, len(fars) :],
        seed=weights.seed,
        subjects_sha256=weights.sha256,
        note=note,
    )


def _note(far: Wanted, num_drawn: int, num_impostors: int) -> str:
    what = [f"FARs from {far.fars[0]:.1e} on"] if far.fars else []
    what += ["the EER"] if far.has_eer else []
    return (
        f"intervals at {' and '.join(what)} come from {num_drawn:,} of {num_impostors:,} impostor "
        "pairs, drawn at random"
    )


def _tail_of(
    genuine: PairScores,
    impostors: PairScores,
    labels: NDArray[np.integer[Any]],
    subject_names: tuple[str, ...],
) -> Tail | None:
    """Genuine and impostor pairs together; None without impostors."""
    if not len(impostors.scores):
        return None
    codes = labels.astype(np.int32)
    scores = np.concatenate((genuine.scores, impostors.scores))
    first = codes[np.concatenate((genuine.first, impostors.first))]
    second = codes[np.concatenate((genuine.second, impostors.second))]
    trials = Trials(scores, first == second, first, second, subject_names)
    return Tail(SortedTrials(trials), len(scores))


def _tail(trials: Trials, share: float) -> Tail:
    """All genuine pairs and the largest impostors."""
    impostors = np.flatnonzero(~trials.is_genuine)
    num_kept = min(len(impostors), int(np.ceil(share * len(impostors))) + 1024)
    scores = trials.scores[impostors]
    floor = np.partition(scores, len(scores) - num_kept)[len(scores) - num_kept]
    rows = np.flatnonzero(trials.is_genuine | (trials.scores >= floor))
    kept = Trials(
        trials.scores[rows],
        trials.is_genuine[rows],
        trials.enrol_subject[rows],
        trials.test_subject[rows],
        trials.subject_names,
    )
    return Tail(SortedTrials(kept), len(rows))


def _points(
    tail: Tail, rows: Ints, num_samples: Ints, wanted: Wanted, progress: Progress | None
) -> list[Point] | None:
    """Every replicate, or None where the tail is too short for one of them."""
    points = []
    for row in rows:
        point = _point(tail, row, num_samples, wanted)
        if point is None:
            return None
        points.append(point)
        if progress is not None:
            progress(len(points), len(rows))
    return points


def _point(tail: Tail, row: Ints, num_samples: Ints, wanted: Wanted) -> Point | None:
    """One replicate, or None where an answer may lie below the tail."""
    num_genuine, num_impostors = _num_pairs(row, num_samples)
    padded = np.append(row, 1)  # the subject of weight 1, with which genuine pairs are counted
    num_seen = int(tail.impostors.running(padded)[-1])
    largest = max(wanted.fars, default=0.0)
    if num_seen < num_impostors and largest * num_impostors >= num_seen:
        return None
    return weighted_point(tail, padded, np.array([num_genuine, num_impostors]), wanted)


def _sampled_point(tail: Tail, row: Ints, num_samples: Ints, wanted: Wanted) -> Point:
    """One replicate where a sample stands for all impostors."""
    padded = np.append(row, 1)
    num_impostors = int(tail.impostors.running(padded)[-1])
    totals = np.array([_num_pairs(row, num_samples)[0], num_impostors])
    point = weighted_point(tail, padded, totals, wanted)
    assert point is not None  # the tail is all there is
    return point


def _num_pairs(row: Ints, num_samples: Ints) -> tuple[int, int]:
    """Genuine and impostor pairs of a replicate."""
    drawn = row * num_samples
    return int((drawn * (num_samples - 1)).sum()) // 2, num_impostor_pairs(drawn)
