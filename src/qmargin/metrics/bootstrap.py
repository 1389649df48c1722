"""Confidence intervals and paired comparisons by drawing subjects, not trials, with replacement.

Trials that share a subject are correlated, so an interval that counts trials is too narrow. Here
whole subjects are drawn: a genuine pair counts as often as its subject is drawn, an impostor pair
as often as the product of its two subjects. Every replicate has its own thresholds.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.checks import Floats, check_rate, checked_scores
from qmargin.metrics.eer_dcf import Costs, polyline_crossing
from qmargin.metrics.operating import check_level, num_allowed

Ints = NDArray[np.int64]
Progress = Callable[[int, int], None]
FIRST_TAIL = 1024  # impostors in the first tail; it is doubled while a replicate needs more
BATCH = 16  # replicates whose weights are held at once
MAX_EMPTY = 0.05  # largest share of replicates without genuine or impostor trials


@dataclass(frozen=True, eq=False)
class Trials:
    """Scores of pairs, with the subject on each side.

    All are ``[n]`` arrays. The subjects are indices into ``subject_names``, which are distinct and
    sorted; where no subjects are known, they are the names of the files.
    """

    scores: NDArray[np.floating]
    is_genuine: NDArray[np.bool_]
    enrol_subject: NDArray[np.int32]
    test_subject: NDArray[np.int32]
    subject_names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", checked_scores(self.scores, "scores"))
        object.__setattr__(self, "subject_names", tuple(self.subject_names))
        _check_names(self.subject_names)
        width = len(self.subject_names)
        for name, dtype in (
            ("is_genuine", np.bool_),
            ("enrol_subject", np.int32),
            ("test_subject", np.int32),
        ):
            array = np.asarray(getattr(self, name))
            if array.shape != (len(self),):
                raise ShapeError(
                    f"{name} has shape {array.shape}: give one for each of {len(self)} scores"
                )
            cast: NDArray[Any] = array.astype(dtype, copy=False)
            is_wrong = np.zeros(len(cast), np.bool_) if cast is array else cast != array
            if dtype is np.int32:
                is_wrong |= (cast < 0) | (cast >= width)
            if (wrong := np.flatnonzero(is_wrong)).size:
                what = "an index into subject_names" if dtype is np.int32 else "a bool"
                raise DataError(f"{name}[{wrong[0]}] is {array[wrong[0]]}: give {what}")
            object.__setattr__(self, name, cast)
        alone = np.flatnonzero(~self.is_genuine & (self.enrol_subject == self.test_subject))
        if alone.size:
            subject = self.subject_names[self.enrol_subject[alone[0]]]
            raise DataError(
                f"trial {alone[0]} is labelled impostor but both sides are {subject!r}: correct it"
            )

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def sha256(self) -> str:
        """Hash of the pairs and labels, whatever their order and scores."""
        width = len(self.subject_names)
        pair = self.enrol_subject.astype(np.int64) * width + self.test_subject
        keys = np.sort(2 * pair + self.is_genuine)
        return hashlib.sha256(keys.astype("<i8").tobytes()).hexdigest()


def make_trials(
    scores: ArrayLike,
    is_genuine: ArrayLike,
    *,
    enrol_subjects: Sequence[str],
    test_subjects: Sequence[str],
) -> Trials:
    """Build trials from scores and the subject on each side.

    Examples:
        >>> trials = make_trials(
        ...     [0.9, 0.1], [True, False], enrol_subjects=["bo", "bo"], test_subjects=["bo", "al"]
        ... )
        >>> trials.subject_names, trials.enrol_subject, trials.test_subject
        (('al', 'bo'), array([1, 1], dtype=int32), array([1, 0], dtype=int32))
    """
    names = tuple(sorted({*enrol_subjects, *test_subjects}))
    index = {name: position for position, name in enumerate(names)}
    enrol, test = (
        np.fromiter(map(index.__getitem__, side), dtype=np.int32, count=len(side))
        for side in (enrol_subjects, test_subjects)
    )
    return Trials(np.asarray(scores), np.asarray(is_genuine), enrol, test, names)


@dataclass(frozen=True)
class SubjectWeights:
    """How often each subject is drawn in each replicate: as many draws as there are subjects.

    The draws follow from the sorted names and the seed alone, so two systems scored on the same
    trials get the same replicates.
    """

    subjects: tuple[str, ...] = field(repr=False)
    num_replicates: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "subjects", tuple(self.subjects))
        _check_names(self.subjects)
        if self.num_replicates < 1:
            raise ConfigError(f"num_replicates={self.num_replicates} is below 1: give at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative: give an integer from 0")

    @property
    def sha256(self) -> str:
        """Hash of the names."""
        names = (name.encode("utf-8", "surrogatepass") + b"\0" for name in self.subjects)
        return hashlib.sha256(b"".join(names)).hexdigest()

    def rows(self, start: int, stop: int) -> Ints:
        """Weights ``[stop - start, num_subjects]`` of some replicates."""
        size = len(self.subjects)
        rows = np.empty((stop - start, size), dtype=np.int64)
        for row, replicate in zip(rows, range(start, stop), strict=True):
            # a stream per replicate: any part of the weights can be made on its own
            draws = np.random.default_rng([self.seed, replicate]).integers(size, size=size)
            row[:] = np.bincount(draws, minlength=size)
        return rows


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that are not distinct and sorted, or fewer than two."""
    if len(names) < 2:
        raise ProtocolError(f"{len(names)} subjects cannot be resampled: give trials of 2 or more")
    for left, right in pairwise(names):
        if left >= right:
            raise DataError(f"subject {right!r} follows {left!r}, not sorted: use make_trials")


class Wanted(NamedTuple):
    """What to compute in every replicate."""

    fars: tuple[float, ...]
    p_targets: tuple[float, ...]
    has_eer: bool


class Point(NamedTuple):
    """The results of one replicate; NaN where it drew no genuine or no impostor trial."""

    tar: Floats  # [F]
    eer: float
    min_dcf: Floats  # [P]


class Side(NamedTuple):
    """Scores of one label in sorted order, and the rows of the weights that multiply."""

    scores: NDArray[np.floating]
    enrol: NDArray[np.intp]
    test: NDArray[np.intp]

    def first(self, length: int) -> Side:
        """The first trials in sorted order."""
        return Side(self.scores[:length], self.enrol[:length], self.test[:length])

    def total_counts(self, size: int) -> sparse.csr_array:
        """How many trials have each pair of subjects, ``[size, size]``."""
        low, high = np.minimum(self.enrol, self.test), np.maximum(self.enrol, self.test)
        codes = low * size + high
        if size * size <= 4 * len(codes):  # counting in place is faster than sorting
            every = np.bincount(codes, minlength=size * size)
            keys = np.flatnonzero(every)
            counts = every[keys]
        else:
            keys, counts = np.unique(codes, return_counts=True)
        places = (keys // size, keys % size)
        return sparse.csr_array((counts.astype(np.int64), places), shape=(size, size))

    def running(self, weights: Ints) -> Ints:
        """Weight of the first ``i`` trials, for every ``i`` from 0."""
        sums = np.zeros(len(self.enrol) + 1, dtype=np.int64)
        each = weights.take(self.enrol, mode="clip")
        each *= weights.take(self.test, mode="clip")
        np.cumsum(each, out=sums[1:])
        return sums


class SortedTrials:
    """Both labels sorted: impostors from the largest score, genuine from the smallest."""

    def __init__(self, trials: Trials) -> None:
        # One more subject, of weight 1: a pair of the same subject counts that subject once.
        self.size = len(trials.subject_names) + 1
        enrol = trials.enrol_subject.astype(np.intp)
        test = trials.test_subject.astype(np.intp)
        test[enrol == test] = self.size - 1

        def side(label: str, is_kept: NDArray[np.bool_], sign: int) -> Side:
            rows = np.flatnonzero(is_kept)
            if not len(rows):
                raise ProtocolError(f"0 {label} trials among {len(trials):,}: check the labels")
            rows = rows[np.argsort(sign * trials.scores[rows], kind="stable")]
            return Side(trials.scores[rows], enrol[rows], test[rows])

        self.impostors = side("impostor", ~trials.is_genuine, -1)
        self.genuine = side("genuine", trials.is_genuine, 1)
        self.counts = tuple(side.total_counts(self.size) for side in (self.genuine, self.impostors))

    def totals(self, weights: Ints) -> Ints:
        """Weight of all genuine and of all impostor trials, ``[2, R]`` from ``[R, size]``."""
        columns = np.ascontiguousarray(weights.T)
        return np.stack([(columns * (counts @ columns)).sum(axis=0) for counts in self.counts])


class Tail:
    """The largest impostors and the genuine scores not above all of them."""

    def __init__(self, trials: SortedTrials, length: int) -> None:
        scores = trials.impostors.scores
        if length < len(scores):  # all of a tie, so that the rates at its score are known
            length = len(scores) - int(np.searchsorted(scores[::-1], scores[length - 1]))
        self.is_whole = length >= len(scores)
        self.impostors = trials.impostors.first(length)
        above = np.searchsorted(trials.genuine.scores, scores[0], side="right")
        self.genuine = trials.genuine.first(int(above))
        kept = self.impostors.scores
        self.num_not_above = np.searchsorted(self.genuine.scores, kept, side="right")
        # Vertices of the curve, from the largest threshold: distinct scores inside the tail.
        inside = self.genuine.scores[np.searchsorted(self.genuine.scores, kept[-1]) :]
        self.vertices = self._counts(np.unique(np.concatenate([kept, inside]))[::-1])
        # A threshold between two genuine scores can be raised to the next at no cost, so the
        # genuine scores alone are candidates for the smallest cost.
        self.candidates = self._counts(np.unique(inside)[::-1])

    def __len__(self) -> int:
        return len(self.impostors.scores)

    def _counts(self, thresholds: NDArray[np.floating]) -> tuple[Ints, Ints]:
        """Impostors accepted and genuine rejected at each threshold, in sorted order."""
        accepted = len(self) - np.searchsorted(self.impostors.scores[::-1], thresholds)
        return accepted, np.searchsorted(self.genuine.scores, thresholds)


def weighted_point(tail: Tail, weights: Ints, totals: Ints, wanted: Wanted) -> Point | None:
    """Operating points of one replicate, or None where the tail is too short to know them.

    ``weights`` are those of each subject, and 1 at the end; ``totals`` those of all genuine and of
    all impostor trials.
    """
    num_genuine, num_impostors = (int(total) for total in totals)
    if num_genuine == 0 or num_impostors == 0:
        nothing = [np.full(len(each), np.nan) for each in (wanted.fars, wanted.p_targets)]
        return Point(nothing[0], np.nan, nothing[1])
    accepted = tail.impostors.running(weights)
    rejected = tail.genuine.running(weights)
    # TAR: genuine above the first impostor that is one too many; past the tail, all are allowed.
    allowed = np.array([num_allowed(far, num_impostors) for far in wanted.fars], dtype=np.int64)
    if not tail.is_whole and allowed.max(initial=-1) >= accepted[-1]:
        return None
    first = np.searchsorted(accepted[1:], allowed, side="right")
    inside = np.minimum(first, len(tail) - 1)
    below = np.where(first < len(tail), tail.num_not_above[inside], 0)
    tar = (num_genuine - rejected[below]) / num_genuine
    # EER: where the polyline over distinct scores crosses FAR = FRR.
    eer = np.nan
    if wanted.has_eer:
        ends, starts = tail.vertices

        def errors(vertex: int) -> tuple[int, int]:
            if vertex < 0:  # above all impostors
                return 0, int(rejected[-1])
            return int(accepted[ends[vertex]]), int(rejected[starts[vertex]])

        def is_past(vertex: int) -> bool:
            false_accepts, false_rejects = errors(vertex)
            return false_accepts * num_genuine >= false_rejects * num_impostors

        if not is_past(len(ends) - 1):
            return None
        eer = 0.0
        if not is_past(-1):
            after = bisect_left(range(len(ends) - 1), True, key=is_past)
            points = errors(after - 1), errors(after)
            eer, _ = polyline_crossing(*points, num_genuine, num_impostors)
    # minDCF, unless a threshold below the tail could cost less.
    ends, starts = tail.candidates
    far_at, frr_at = accepted[ends] / num_impostors, rejected[starts] / num_genuine
    largest_far, largest_frr = accepted[-1] / num_impostors, rejected[-1] / num_genuine
    costs = np.empty(len(wanted.p_targets))
    for index, p_target in enumerate(wanted.p_targets):
        price = Costs.of(p_target)
        # above all impostors; all rejected; all accepted
        ends_cost = min(price.total(largest_frr, 0.0), price.total(1.0, 0.0), price.total(0.0, 1.0))
        costs[index] = price.total(frr_at, far_at).min(initial=float(ends_cost))
        if not tail.is_whole and price.total(0.0, largest_far) < costs[index]:
            return None
    return Point(tar, eer, costs)


@dataclass(frozen=True, eq=False)
class DrawnPoints:
    """Operating points in ``R`` replicates; NaN where one drew no genuine or no impostor trial."""

    fars: tuple[float, ...]
    p_targets: tuple[float, ...]
    grid_fars: tuple[float, ...]
    tar: Floats
    eer: Floats
    min_dcf: Floats
    frr_at_grid: Floats
    seed: int
    subjects_sha256: str

    @property
    def num_replicates(self) -> int:
        """``R``."""
        return len(self.eer)


@dataclass(frozen=True, eq=False)
class Replicates(DrawnPoints):
    """Operating points in every replicate, and on the trials as they are (``observed_*``).

    A replicate that drew no genuine or no impostor trial is NaN.

    Attributes:
        fars: Targets of ``tar``, ``[R, F]``.
        p_targets: Priors of ``min_dcf``, ``[R, P]``.
        grid_fars: Targets of ``frr_at_grid``, ``[R, G]``: the band of a DET curve.
        eer: ``[R]``; NaN where it was not asked for.
    """

    observed_tar: Floats
    observed_eer: float
    observed_min_dcf: Floats
    observed_frr_at_grid: Floats
    trials_sha256: str


def bootstrap(
    trials: Trials,
    fars: Iterable[float],
    *,
    p_targets: Iterable[float] = (0.01, 0.05),
    grid_fars: Iterable[float] = (),
    has_eer: bool = True,
    num_replicates: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Replicates:
    """Compute operating points in a bootstrap over subjects.

    The threshold is chosen in every replicate, by the rule of `tar_at_far`. Replicates follow
    from the subjects' names and the seed, so two systems on the same trials can be compared pair
    by pair (`compare`).

    Args:
        trials: Scores, labels and subjects.
        fars: False acceptance rates at which to measure TAR.
        p_targets: Priors at which to measure minDCF; with none, and without EER, only the largest
            impostor scores are used.
        grid_fars: More rates, for the band of a DET curve. Large ones cost more time.
        has_eer: Whether to measure EER.
        num_replicates: Number of replicates.
        seed: Seed of the draws.
        progress: Called with the number of replicates done and their total.

    Examples:
        >>> names, others = ["al", "bo", "cy", "al", "bo"], ["al", "bo", "cy", "bo", "cy"]
        >>> is_genuine = [True, True, True, False, False]
        >>> scores = [0.9, 0.8, 0.3, 0.4, 0.1]
        >>> trials = make_trials(scores, is_genuine, enrol_subjects=names, test_subjects=others)
        >>> replicates = bootstrap(trials, [0.5], num_replicates=100)
        >>> replicates.observed_tar, replicates.tar.shape
        (array([1.]), (100, 1))
    """
    fars = tuple(check_rate(far, "far") for far in fars)
    grid_fars = tuple(check_rate(far, "far") for far in grid_fars)
    p_targets = tuple(float(p_target) for p_target in p_targets)
    wanted = Wanted(fars + grid_fars, p_targets, has_eer)
    weights = SubjectWeights(trials.subject_names, num_replicates=num_replicates, seed=seed)
    ordered = SortedTrials(trials)
    tail = Tail(ordered, FIRST_TAIL)
    points: list[Point] = []
    rows = np.ones((1, ordered.size), dtype=np.int64)  # the trials as they are, then replicates
    for start in range(0, num_replicates + BATCH, BATCH):
        for row, totals in zip(rows, ordered.totals(rows).T, strict=True):
            while (point := weighted_point(tail, row, totals, wanted)) is None:
                tail = Tail(ordered, 2 * len(tail))  # few of the later replicates need less
            points.append(point)
        if progress is not None and start > 0:
            progress(min(start, num_replicates), num_replicates)
        stop = min(start + BATCH, num_replicates)
        rows = np.ones((max(stop - start, 0), ordered.size), dtype=np.int64)
        if len(rows):
            rows[:, :-1] = weights.rows(start, stop)
    tar, eer, min_dcf = (np.array(values) for values in zip(*points, strict=True))
    split = len(fars)
    return Replicates(
        fars=fars,
        p_targets=p_targets,
        grid_fars=grid_fars,
        tar=tar[1:, :split],
        eer=eer[1:],
        min_dcf=min_dcf[1:],
        frr_at_grid=1.0 - tar[1:, split:],
        observed_tar=tar[0, :split],
        observed_eer=float(eer[0]),
        observed_min_dcf=min_dcf[0],
        observed_frr_at_grid=1.0 - tar[0, split:],
        seed=seed,
        subjects_sha256=weights.sha256,
        trials_sha256=trials.sha256,
    )


def interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Compute the percentile interval of bootstrap replicates, ``[R]``.

    Examples:
        >>> interval([0.1, 0.2, 0.3, 0.4, 0.5], level=0.5)
        (0.2, 0.4)
    """
    check_level(level)
    low, high = np.quantile(_defined(values), [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def _defined(values: ArrayLike) -> Floats:
    """Return the replicates that have a value; raise if too many have none."""
    array = np.asarray(values, dtype=np.float64)
    kept = array[~np.isnan(array)]
    if len(kept) < (1 - MAX_EMPTY) * len(array) or len(kept) == 0:
        raise ProtocolError(
            f"{len(array) - len(kept)} of {len(array)} replicates drew no genuine or no impostor "
            f"trial, at most {MAX_EMPTY:.0%} may: use trials of more subjects"
        )
    return kept


@dataclass(frozen=True)
class Difference:
    """Difference of a measure, system A minus system B.

    Attributes:
        difference: On the trials as they are; ``low`` and ``high`` end its percentile interval.
        p_value: Two-sided: twice the share of replicates on the rarer side of zero.
        num_replicates: Replicates in which both systems could be measured.
    """

    difference: float
    low: float
    high: float
    p_value: float
    num_replicates: int


@dataclass(frozen=True)
class Comparison:
    """Differences of every measure that both systems have.

    Attributes:
        tar: Differences of TAR at ``fars``; above zero, system A is better.
        eer: Difference of EER, below zero where system A is better; None where not measured.
        min_dcf: Differences of minDCF at ``p_targets``; below zero, system A is better.
    """

    fars: tuple[float, ...]
    p_targets: tuple[float, ...]
    tar: tuple[Difference, ...]
    eer: Difference | None
    min_dcf: tuple[Difference, ...]


def compare(replicates_a: Replicates, replicates_b: Replicates, level: float = 0.95) -> Comparison:
    """Compare two systems over the same bootstrap draws.

    Both systems are measured in every replicate, so trials that are hard for both cancel.
    Replicates of other trials, subjects or seeds are a ``ProtocolError``.
    """
    both = (replicates_a, replicates_b)
    for name in ("subjects_sha256", "trials_sha256", "seed", "num_replicates"):
        left, right = (getattr(each, name) for each in both)
        if left != right:
            what = name.removesuffix("_sha256")
            raise ProtocolError(f"compare systems on the same {what}, not {left} and {right}")

    def differences(name: str, keys: str) -> dict[float, Difference]:
        """Of a measure that has a column for each key, where both systems have the key."""
        found = {}
        for key in getattr(replicates_a, keys):
            if key in getattr(replicates_b, keys):
                columns = [(each, getattr(each, keys).index(key)) for each in both]
                observed = [float(getattr(each, f"observed_{name}")[at]) for each, at in columns]
                values = [getattr(each, name)[:, at] for each, at in columns]
                found[key] = paired_difference(*observed, *values, level=level)
        return found

    tar, min_dcf = differences("tar", "fars"), differences("min_dcf", "p_targets")
    eer, observed_a, observed_b = None, replicates_a.observed_eer, replicates_b.observed_eer
    if not np.isnan([observed_a, observed_b]).any():
        values = replicates_a.eer, replicates_b.eer
        eer = paired_difference(observed_a, observed_b, *values, level=level)
    return Comparison(tuple(tar), tuple(min_dcf), tuple(tar.values()), eer, tuple(min_dcf.values()))


def paired_difference(
    observed_a: float,
    observed_b: float,
    values_a: ArrayLike,
    values_b: ArrayLike,
    *,
    level: float = 0.95,
) -> Difference:
    """Compute the paired difference of one measure between two systems.

    Replicates ``[R]`` are from the same draws. The p-value is the smallest ``1 - level`` whose
    percentile interval leaves zero out, up to the one replicate that is added to both sides so that
    no p-value is zero.

    Examples:
        >>> paired_difference(0.9, 0.8, [0.91, 0.9, 0.89], [0.8, 0.82, 0.78]).p_value
        0.5
    """
    values_a, values_b = np.asarray(values_a, dtype=float), np.asarray(values_b, dtype=float)
    if values_a.shape != values_b.shape or values_a.ndim != 1:
        shapes = f"{values_a.shape} and {values_b.shape}"
        raise ShapeError(f"replicates have shapes {shapes}: use the same num_replicates")
    ends = interval(values_a - values_b, level)
    values = _defined(values_a - values_b)
    rarer = min(np.count_nonzero(values <= 0.0), np.count_nonzero(values >= 0.0))
    p_value = min(1.0, 2 * (int(rarer) + 1) / (len(values) + 1))
    return Difference(observed_a - observed_b, *ends, p_value, len(values))
