"""All pairs of a set of samples: from embeddings with identities to a ``Result``.

Operating points are exact at any number of samples, see ``evaluate_all_pairs``. Intervals come from
drawing identities with replacement: the weight of a replicate is known without counting, and only
the largest impostor scores are needed. If these do not fit into memory, rates that need more of
them come from a random sample of the impostor pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    all_genuine,
    evaluate_all_pairs,
    exact_scores,
    largest_impostors,
    num_impostor_pairs,
    random_impostors,
    unit_rows,
)
from qmargin.evaluation.columns import first_row
from qmargin.evaluation.embeddings import Embeddings, collapse_note
from qmargin.evaluation.evaluate import (
    EvaluationOptions,
    Intervals,
    Measured,
    StageProgress,
    common_point,
    counted_histogram,
    group_row,
    intervals_of,
    measurable,
    new_result,
    no_intervals,
    registered_measures,
    score_histogram,
    tar_points,
)
from qmargin.evaluation.result import (
    NUM_EASY,
    GroupAudit,
    GroupSpread,
    Hardest,
    HardPair,
    Measure,
    Result,
    TarPoint,
)
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
from qmargin.metrics.groups import rate_of
from qmargin.metrics.normalise import Moments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GRID_POINTS = 12
EASY_IDENTITIES, EASY_ROWS = 64, 640  # among which easy pairs are searched
SPLITS = ("train", "test")  # folders of a divided dataset, not of two identities
FIRST_TAIL = 1.5  # times the largest requested rate: longer tails are rarely needed
LEAST_TAIL = 1e-4  # of the impostors
MAX_ROWS = 10_240  # embeddings whose pairs are all held at once, in about two gigabytes
MAX_TAIL = 1 << 23  # largest impostors that are held of more embeddings
NUM_SAMPLED = 1 << 22  # impostor pairs that are drawn for rates above those of the tail
_FIRST = 3  # names in a message
LIST_BLOCK = 1024  # rows of a list that are compared at a time
NEAR = 1e-9  # relative distance from a threshold at which a product is scored exactly


@dataclass(frozen=True, eq=False)
class PairSamples:
    """Samples whose pairs are all compared."""

    embeddings: NDArray[Any]  # [n, d]
    labels: NDArray[np.integer[Any]]  # [n], positions in identities
    identities: tuple[str, ...]  # distinct and sorted
    name_of: Callable[[int], str]  # name of a sample, for the hardest pairs
    sha256: str  # of what is compared; results of systems with the same one can be paired
    lists: Mapping[str, Ints] = field(default_factory=dict)  # see ``measure_lists``

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """Number of samples of every identity."""
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
    """Compare every embedding with every other, by cosines or by AS-norm with a cohort.

    ``identities`` of the embeddings come from ``identities_of`` or elsewhere. A FAR that the pairs
    cannot resolve is "not measurable", not an error. ``device`` computes products and does not
    change an operating point.

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
    for name, is_wrong in (
        ("is not finite", ~np.isfinite(embeddings.matrix).all(axis=1)),
        ("is zero and has no direction", ~embeddings.matrix.any(axis=1)),
    ):
        row = first_row(is_wrong)
        if row is not None:
            raise DataError(
                f"{embeddings.source.path}: the embedding of {embeddings.keys[row]!r} {name}: "
                "leave the sample out or embed it again"
            )
    if len(identities) != len(embeddings):
        raise ShapeError(
            f"there are {len(identities)} identities for {len(embeddings)} embeddings: give as many"
        )
    check_identities(identities)
    names = tuple(sorted(set(identities)))
    position = {name: place for place, name in enumerate(names)}
    labels = np.array([position[identity] for identity in identities], dtype=np.int64)
    digest = hashlib.sha256(b"all pairs\0")
    for pair in sorted(zip(embeddings.keys, identities, strict=True)):
        digest.update("\0".join((*pair, "")).encode("utf-8", "surrogatepass"))
    matrix, name_of = embeddings.matrix, embeddings.keys.__getitem__
    note = collapse_note(matrix)
    sources = [embeddings.source] if norm is None else [embeddings.source, norm.cohort.source]
    return measure_pairs(
        PairSamples(matrix, labels, names, name_of, digest.hexdigest()),
        replace(
            options,
            sources=(*sources, *options.sources),
            notes=options.notes if note is None else (*options.notes, note),
        ),
        moments=None if norm is None else norm_moments(unit_rows(matrix), norm),
        device=device,
        command=command,
        progress=progress,
    )


def identities_of(keys: Sequence[str], mapping: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Identity of each name: by a mapping, or its first folder."""
    if mapping is not None:
        missing = [key for key in keys if key not in mapping]
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(keys):,} embeddings have no identity, such as "
                f"{missing[0]!r}: add lines `key identity` to the file of identities"
            )
        return tuple(mapping[key] for key in keys)
    parts = [key.replace("\\", "/").lstrip("/").split("/") for key in keys]
    for key, part in zip(keys, parts, strict=True):
        if len(part) < 2:
            raise DataError(
                f"the name {key!r} has no folder, so its identity is not known: name samples as "
                "identity/sample, or give a file of lines `key identity` with --identities"
            )
    folders = {part[0] for part in parts}
    if folders.issuperset(SPLITS):
        raise DataError(
            f"{' and '.join(SPLITS)} are among the {len(folders)} first folders and would count as "
            "identities: use the samples of one of them, or give --identities FILE"
        )
    return tuple(part[0] for part in parts)


def check_identities(identities: Sequence[str]) -> None:
    """Refuse identities of samples that make no genuine or no impostor pair."""
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
    """Measure all pairs of samples, by cosines, or by AS-norm with ``moments`` of cohort scores."""
    num_impostors = num_impostor_pairs(samples.num_samples)
    found = evaluate_all_pairs(
        samples.embeddings,
        samples.labels,
        measurable(options.fars, num_impostors),
        p_targets=options.p_targets,
        num_hardest=options.num_hardest,
        device=device,
        moments=moments,
        progress=None if progress is None else partial(progress, "comparing"),
    )
    if len(samples.labels) <= MAX_ROWS:
        trials = all_trials(samples, moments)
        sides = trials.scores[trials.is_genuine], trials.scores[~trials.is_genuine]
        histogram = score_histogram(*(side.astype(np.float64) for side in sides))
        extra = registered_measures(*sides, names=options.metrics)
        del sides  # hundreds of megabytes
    else:
        trials, products = None, found.products
        alike = all_genuine(samples.embeddings, samples.labels, moments).scores
        histogram = counted_histogram(alike, products.scores, products.counts)
        names = registry.metrics.names() if options.metrics is None else options.metrics
        note = f"not measured: the scores of more than {MAX_ROWS:,} samples are not held"
        extra = {name: Measure(None, note=note) for name in names}
    intervals = no_intervals(options, "not asked for")
    if options.num_replicates:
        try:
            intervals = _intervals(samples, trials, found, options, moments, device, progress)
        except ProtocolError as error:
            intervals = no_intervals(options, str(error))
    hardest = None
    if options.num_hardest:
        kinds = (
            tuple(HardPair(samples.name_of(a), samples.name_of(b), score) for a, b, score in pairs)
            for pairs in (found.hardest_impostors, found.hardest_genuine)
        )
        hardest = Hardest(*kinds, *_easy_pairs(samples, moments))
    scoring = "cosine" if moments is None else "as-norm"
    points = tar_points(options.fars, found.tar, num_impostors)
    return new_result(
        Measured(found.eer, found.min_dcf, found.det, histogram, extra=extra),
        points,
        intervals,
        replace(options, kind="all-pairs", scoring=scoring, pooling=None),
        num_genuine=found.num_genuine,
        num_impostors=num_impostors,
        num_subjects=len(samples.identities),
        data_sha256=samples.sha256,
        groups=measure_lists(samples, points, options, moments),
        hardest=hardest,
        command=command,
    )


def measure_lists(
    samples: PairSamples,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
    moments: Moments | None = None,
) -> GroupAudit | None:
    """FMR and FNMR of some lists of pairs at the threshold of all pairs; None without lists.

    A list has a number for every sample, and contains the pairs of samples with the same number
    that is not negative: with numbers of families, the pairs within a family.
    """
    point = common_point(points, options)
    if not samples.lists or point is None or point.threshold is None:
        return None
    unit = unit_rows(samples.embeddings)
    norm = None if moments is None else PairNorm.of(moments)
    rows = []
    for name, numbers in samples.lists.items():
        total = np.zeros(4, np.int64)
        for number in np.unique(numbers[numbers >= 0]).tolist():
            members = np.flatnonzero(numbers == number)
            total += _errors(unit, samples.labels, members, point.threshold, norm)
        false_accepts, impostors, false_rejects, genuine = total.tolist()
        rates = rate_of(false_accepts, impostors), rate_of(false_rejects, genuine)
        rows.append(group_row(name, *rates))
    nothing = GroupSpread(None, None, None)
    note = "lists of pairs overlap: a difference of their rates is not a bias"
    return GroupAudit(point.threshold, point.far_target, tuple(rows), nothing, note)


def _errors(
    unit: Floats,
    labels: NDArray[np.integer[Any]],
    members: NDArray[np.intp],
    threshold: float,
    norm: PairNorm | None,
) -> Ints:
    """False accepts, impostor pairs, false rejects and genuine pairs among some rows."""
    total, slack = np.zeros(4, np.int64), NEAR * (1.0 + abs(threshold))
    for start in range(0, len(members), LIST_BLOCK):
        first, second = members[start : start + LIST_BLOCK], members[start:]
        scores = unit[first] @ unit[second].T
        if norm is not None:
            norm.apply(scores, first[:, None], second)
        is_pair = np.arange(len(second)) > np.arange(len(first))[:, None]
        near = np.nonzero(is_pair & (np.abs(scores - threshold) < slack))
        scores[near] = exact_scores(unit, first[near[0]], second[near[1]], norm)
        is_same, is_accepted = labels[first][:, None] == labels[second], scores >= threshold
        kinds = (is_pair & ~is_same, is_accepted), (is_pair & is_same, ~is_accepted)
        total += [n for kind, wrong in kinds for n in ((kind & wrong).sum(), kind.sum())]
    return total


def _easy_pairs(samples: PairSamples, moments: Moments | None) -> list[tuple[HardPair, ...]]:
    """The lowest impostors and the highest genuine pairs of a few identities, one of each."""
    rows = np.flatnonzero(samples.labels < EASY_IDENTITIES)[:EASY_ROWS]
    few = replace(samples, embeddings=samples.embeddings[rows], labels=samples.labels[rows])
    part = None if moments is None else Moments(moments.mean[rows], moments.std[rows])
    trials, (first, second) = all_trials(few, part), np.triu_indices(len(rows), k=1)
    kinds = []
    for is_kind, sign in ((~trials.is_genuine, 1.0), (trials.is_genuine, -1.0)):
        found: list[HardPair] = []
        seen: set[int] = set()  # identities: pairs of one look alike
        for place in np.argsort(np.where(is_kind, sign * trials.scores, np.inf), kind="stable"):
            if len(found) == NUM_EASY or not is_kind[place]:
                break
            sides = {int(trials.enrol_subject[place]), int(trials.test_subject[place])}
            if not sides & seen:
                enrol, test = (samples.name_of(int(rows[side[place]])) for side in (first, second))
                found.append(HardPair(enrol, test, float(trials.scores[place])))
                seen |= sides
        kinds.append(tuple(found))
    return kinds


def _intervals(
    samples: PairSamples,
    trials: Trials | None,
    found: AllPairs,
    options: EvaluationOptions,
    moments: Moments | None,
    device: str,
    progress: StageProgress | None,
) -> Intervals:
    fars, grid = tuple(point.far_target for point in found.tar), ()
    if fars:
        grid = tuple(np.geomspace(1.0 / found.num_impostors, max(fars), GRID_POINTS).tolist())
    drawing: dict[str, Any] = {
        "grid_fars": grid,
        "num_replicates": options.num_replicates,
        "seed": options.seed,
        "progress": None if progress is None else partial(progress, "bootstrap"),
    }
    note = None
    if trials is None:
        drawn, note = bootstrap_many_pairs(samples, found, moments, device, **drawing)
    else:
        drawn = bootstrap_pairs(trials, samples.num_samples, fars, found.eer.eer, **drawing)
    note = "; ".join(filter(None, ("identities are drawn with replacement", note)))
    return intervals_of(
        drawn, found.num_genuine, found.num_impostors, options, "subject bootstrap", note
    )


def all_trials(samples: PairSamples, moments: Moments | None = None) -> Trials:
    """Scores of all pairs of at most about ``MAX_ROWS`` samples, in float32."""
    unit = unit_rows(samples.embeddings).astype(np.float32)
    labels = samples.labels.astype(np.int32)
    matrix = unit @ unit.T  # [n, n]
    if moments is not None:
        rows = np.arange(len(matrix))
        norm = PairNorm(*(column.astype(np.float32) for column in PairNorm.of(moments)))
        norm.apply(matrix, rows[:, None], rows)
    is_kept = np.triu(np.ones(matrix.shape, dtype=bool), k=1)
    enrol = np.broadcast_to(labels[:, None], matrix.shape)[is_kept]
    test = np.broadcast_to(labels, matrix.shape)[is_kept]
    return Trials(matrix[is_kept], enrol == test, enrol, test, samples.identities)


def bootstrap_pairs(
    trials: Trials,
    num_samples: Ints,
    fars: tuple[float, ...],
    rough_eer: float,
    *,
    grid_fars: tuple[float, ...],
    num_replicates: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> DrawnPoints:
    """Operating points in replicates that draw subjects with replacement.

    ``trials`` are all pairs of all samples, and ``rough_eer`` is their EER. TAR is measured at
    ``fars``, and FRR at ``grid_fars`` for the band of a DET curve.
    """
    weights = SubjectWeights(trials.subject_names, num_replicates=num_replicates, seed=seed)
    rows = weights.rows(0, num_replicates)
    wanted = Wanted(fars + grid_fars, (), True)
    share = FIRST_TAIL * max((*wanted.fars, rough_eer, LEAST_TAIL))
    while (points := _points(_tail(trials, share), rows, num_samples, wanted, progress)) is None:
        share *= 4.0
    tar = np.stack([point.tar for point in points])
    return _drawn(tar, [point.eer for point in points], fars, grid_fars, weights)


def bootstrap_many_pairs(
    samples: PairSamples,
    found: AllPairs,
    moments: Moments | None = None,
    device: str = "cpu",
    *,
    grid_fars: tuple[float, ...],
    num_replicates: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[DrawnPoints, str | None]:
    """The same for samples whose pairs cannot be held, and a note where pairs were drawn.

    The largest impostors are found as ``evaluate_all_pairs`` finds them, with exact scores. Rates
    that need more of them are measured in the same replicates on impostor pairs drawn at random.
    """
    embeddings, labels = samples.embeddings, samples.labels
    weights = SubjectWeights(samples.identities, num_replicates=num_replicates, seed=seed)
    rows, num_samples = weights.rows(0, num_replicates), samples.num_samples
    genuine = all_genuine(embeddings, labels, moments)
    fars = tuple(point.far_target for point in found.tar)
    place = np.argsort((*fars, *grid_fars), kind="stable")
    rates = tuple(np.array((*fars, *grid_fars))[place].tolist())

    needed = 2 * FIRST_TAIL * max((*rates, found.eer.eer, LEAST_TAIL)) * found.num_impostors
    number = min(MAX_TAIL, int(needed) + 1024)
    largest = largest_impostors(
        embeddings, labels, found.products, number, device=device, moments=moments
    )
    reach = len(largest.scores) / (FIRST_TAIL * found.num_impostors)  # the largest rate it answers
    near = Wanted(tuple(rate for rate in rates if rate <= reach), (), found.eer.eer <= reach)
    points = None
    tail = _tail_of(genuine, largest, samples) if len(largest.scores) else None
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
        what = [f"FARs from {far.fars[0]:.1e} on"] if far.fars else []
        what += ["the EER"] if far.has_eer else []
        note = (
            f"intervals at {' and '.join(what)} come from {len(drawn.scores):,} of "
            f"{found.num_impostors:,} impostor pairs, drawn at random"
        )
        tail = _tail_of(genuine, drawn, samples)
        sampled = _points(tail, rows, num_samples, far, is_sample=True)
        assert sampled is not None  # the tail has all impostors
        others = sampled
    tar = np.empty((num_replicates, len(rates)))
    tar[:, place[: len(near.fars)]] = np.stack([point.tar for point in points])
    if far.fars:
        tar[:, place[len(near.fars) :]] = np.stack([point.tar for point in others])
    eers = [point.eer for point in (points if near.has_eer else others)]
    return _drawn(tar, eers, fars, grid_fars, weights), note


def _drawn(
    tar: Floats,
    eers: Sequence[float],
    fars: tuple[float, ...],
    grid_fars: tuple[float, ...],
    weights: SubjectWeights,
) -> DrawnPoints:
    """From TAR at all rates, ``[R, F + G]``."""
    return DrawnPoints(
        fars=fars,
        p_targets=(),
        grid_fars=grid_fars,
        tar=tar[:, : len(fars)],
        eer=np.array(eers),
        min_dcf=np.empty((len(tar), 0)),
        frr_at_grid=1.0 - tar[:, len(fars) :],
        seed=weights.seed,
        subjects_sha256=weights.sha256,
    )


def _tail_of(genuine: PairScores, impostors: PairScores, samples: PairSamples) -> Tail:
    """Genuine and impostor pairs together."""
    codes = samples.labels.astype(np.int32)
    scores = np.concatenate((genuine.scores, impostors.scores))
    first = codes[np.concatenate((genuine.first, impostors.first))]
    second = codes[np.concatenate((genuine.second, impostors.second))]
    trials = Trials(scores, first == second, first, second, samples.identities)
    return Tail(SortedTrials(trials), len(scores))


def _tail(trials: Trials, share: float) -> Tail:
    """All genuine pairs and the largest impostors."""
    scores = trials.scores[~trials.is_genuine]
    num_kept = min(len(scores), int(np.ceil(share * len(scores))) + 1024)
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
    tail: Tail,
    rows: Ints,
    num_samples: Ints,
    wanted: Wanted,
    progress: Progress | None = None,
    *,
    is_sample: bool = False,
) -> list[Point] | None:
    """Every replicate, or None if a threshold may lie below the tail.

    If the impostors of the tail are a sample, they represent all of them.
    """
    points: list[Point] = []
    for row in rows:
        drawn, padded = row * num_samples, np.append(row, 1)  # genuine pairs have the weight 1
        num_seen = int(tail.impostors.running(padded)[-1])
        num_genuine = int((drawn * (num_samples - 1)).sum()) // 2
        num_impostors = num_seen if is_sample else num_impostor_pairs(drawn)
        largest = max(wanted.fars, default=0.0)
        if num_seen < num_impostors and largest * num_impostors >= num_seen:
            return None
        point = weighted_point(tail, padded, np.array([num_genuine, num_impostors]), wanted)
        if point is None:
            return None
        points.append(point)
        if progress is not None:
            progress(len(points), len(rows))
    return points
