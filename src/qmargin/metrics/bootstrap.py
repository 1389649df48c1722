"""Confidence intervals by drawing subjects, not trials, with replacement.

Trials that share a subject rise and fall together, so an interval that counts trials is too
narrow. Here whole subjects are drawn: a genuine pair counts as often as its subject was drawn, an
impostor pair as often as the product of its two. Every replicate chooses its own thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ProtocolError
from qmargin.metrics.checks import check_rate
from qmargin.metrics.resampling import FIRST_TAIL, Point, SortedTrials, Tail, Wanted, weighted_point
from qmargin.metrics.subjects import SubjectWeights, Trials
from qmargin.metrics.sufficiency import check_level

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]
BATCH = 16  # replicates whose weights are held at once
MAX_EMPTY = 0.05  # share of replicates without genuine or impostor trials that is still bearable


@dataclass(frozen=True, eq=False)
class Replicates:
    """Operating points in every replicate, ``R`` of them, and on the trials as they are.

    A replicate that drew no genuine or no impostor trial is NaN.

    Attributes:
        fars: Targets of ``tar``.
        p_targets: Priors of ``min_dcf``.
        grid_fars: Targets of ``frr_at_grid``.
        tar: ``[R, F]``.
        eer: ``[R]``; NaN where it was not asked for.
        min_dcf: ``[R, P]``.
        frr_at_grid: ``[R, G]``, one minus the TAR at ``grid_fars``: the band of a DET curve.
        observed_tar: ``[F]``.
        observed_eer: On the trials as they are.
        observed_min_dcf: ``[P]``.
        observed_frr_at_grid: ``[G]``.
        seed: Of the draws.
        subjects_sha256: Of the subjects' names.
        trials_sha256: Of the pairs and their labels, whatever their order.
    """

    fars: tuple[float, ...]
    p_targets: tuple[float, ...]
    grid_fars: tuple[float, ...]
    tar: Floats
    eer: Floats
    min_dcf: Floats
    frr_at_grid: Floats
    observed_tar: Floats
    observed_eer: float
    observed_min_dcf: Floats
    observed_frr_at_grid: Floats
    seed: int
    subjects_sha256: str
    trials_sha256: str

    @property
    def num_replicates(self) -> int:
        """``R``."""
        return len(self.eer)


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
    """Operating points in replicates that draw subjects with replacement.

    The threshold is chosen anew in every replicate, by the rule of `tar_at_far`: the first
    impostor that is one too many. Replicates follow from the subjects' names and the seed, so two
    systems on the same trials can be compared pair by pair (`compare`).

    Args:
        trials: Scores, labels and subjects.
        fars: False acceptance rates at which to measure TAR.
        p_targets: Priors at which to measure minDCF; with none, and without EER, only the tail of
            the impostors is looked at.
        grid_fars: More rates, for the band of a DET curve. Large ones cost more time.
        has_eer: Whether to measure EER.
        num_replicates: Number of replicates.
        seed: Of the draws.
        progress: Called with the number of replicates done and their total.

    Examples:
        >>> from qmargin.metrics.subjects import make_trials
        >>> names = ["al", "bo", "cy", "al", "bo"]
        >>> others = ["al", "bo", "cy", "bo", "cy"]
        >>> trials = make_trials(
        ...     [0.9, 0.8, 0.3, 0.4, 0.1],
        ...     [True, True, True, False, False],
        ...     enrol_subjects=names,
        ...     test_subjects=others,
        ... )
        >>> replicates = bootstrap(trials, [0.5], num_replicates=100)
        >>> replicates.observed_tar, replicates.tar.shape
        (array([1.]), (100, 1))
    """
    fars = tuple(check_rate(far, "far") for far in fars)
    grid_fars = tuple(check_rate(far, "far") for far in grid_fars)
    p_targets = tuple(float(p_target) for p_target in p_targets)
    wanted = Wanted(fars + grid_fars, p_targets, has_eer)
    weights = SubjectWeights(trials.subject_names, num_replicates=num_replicates, seed=seed)
    points = _points(_sorted(trials), weights, wanted, progress)
    tar = np.stack([point.tar for point in points])
    eer = np.array([point.eer for point in points])
    min_dcf = np.stack([point.min_dcf for point in points])
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
    """Percentile interval of replicates, ``[R]``.

    Examples:
        >>> interval([0.1, 0.2, 0.3, 0.4, 0.5], level=0.5)
        (0.2, 0.4)
    """
    check_level(level)
    low, high = np.quantile(defined(values), [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def defined(values: ArrayLike) -> Floats:
    """The replicates that have a value; an error where too many have none."""
    array = np.asarray(values, dtype=np.float64)
    kept = array[~np.isnan(array)]
    if len(kept) < (1 - MAX_EMPTY) * len(array) or len(kept) == 0:
        raise ProtocolError(
            f"{len(array) - len(kept)} of {len(array)} replicates drew no genuine or no impostor "
            f"trial, at most {MAX_EMPTY:.0%} may: an interval needs more subjects"
        )
    return kept


def _sorted(trials: Trials) -> SortedTrials:
    num_genuine = int(trials.is_genuine.sum())
    if num_genuine in (0, len(trials)):
        missing = "genuine" if num_genuine == 0 else "impostor"
        raise ProtocolError(
            f"there are 0 {missing} trials among {len(trials):,}, at least 1 is needed: "
            f"check the labels"
        )
    return SortedTrials(trials)


def _points(
    trials: SortedTrials, weights: SubjectWeights, wanted: Wanted, progress: Progress | None
) -> list[Point]:
    """The trials as they are, then every replicate."""
    total = weights.num_replicates
    tail = Tail(trials, FIRST_TAIL)
    rows = np.ones((1, trials.size), dtype=np.int64)
    points: list[Point] = []
    for start in range(0, total + BATCH, BATCH):
        for row, totals in zip(rows, trials.totals(rows).T, strict=True):
            point = weighted_point(tail, row, totals, wanted)
            while point is None:  # no replicate after this one will need a shorter tail often
                tail = Tail(trials, 2 * len(tail))
                point = weighted_point(tail, row, totals, wanted)
            points.append(point)
        if progress is not None and start > 0:
            progress(min(start, total), total)
        stop = min(start + BATCH, total)
        rows = np.ones((max(stop - start, 0), trials.size), dtype=np.int64)
        if len(rows):
            rows[:, :-1] = weights.rows(start, stop)
    return points
