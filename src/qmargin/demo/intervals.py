"""Intervals over all pairs of identities: every replicate draws identities, as a report expects.

All pairs are tested, so the weight of a replicate is known without counting, and only the largest
impostors have to be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qmargin.evaluation.all_pairs import num_impostor_pairs
from qmargin.metrics.bootstrap import interval
from qmargin.metrics.resampling import Point, SortedTrials, Tail, Wanted, weighted_point
from qmargin.metrics.subjects import SubjectWeights, Trials

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST_TAIL = 1.5  # times the largest rate that is asked for: longer tails are rarely needed


@dataclass(frozen=True, eq=False)
class PairReplicates:
    """What ``R`` replicates found.

    Attributes:
        tar: ``[R, F]``; NaN where a replicate drew one identity only, as below.
        frr_at_grid: ``[R, G]``.
        eer: ``[R]``.
        subjects_sha256: Of the names.
    """

    tar: Floats
    frr_at_grid: Floats
    eer: Floats
    subjects_sha256: str


def bootstrap_pairs(
    trials: Trials,
    num_samples: Ints,
    fars: tuple[float, ...],
    *,
    grid_fars: tuple[float, ...],
    rough_eer: float,
    num_replicates: int,
    seed: int = 0,
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
    """
    weights = SubjectWeights(trials.subject_names, num_replicates=num_replicates, seed=seed)
    rows = weights.rows(0, num_replicates)
    wanted = Wanted(fars + grid_fars, (), True)
    share = FIRST_TAIL * max(*wanted.fars, rough_eer)
    while (points := _points(_tail(trials, share), rows, num_samples, wanted)) is None:
        share *= 4.0
    tar = np.stack([point.tar for point in points])
    return PairReplicates(
        tar=tar[:, : len(fars)],
        frr_at_grid=1.0 - tar[:, len(fars) :],
        eer=np.array([point.eer for point in points]),
        subjects_sha256=weights.sha256,
    )


def column_intervals(columns: Floats, level: float) -> tuple[tuple[float, float], ...]:
    """Interval of every column of ``[R, n]``."""
    return tuple(interval(column, level) for column in columns.T)


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


def _points(tail: Tail, rows: Ints, num_samples: Ints, wanted: Wanted) -> list[Point] | None:
    """Every replicate, or None where the tail is too short for one of them."""
    points = []
    for row in rows:
        point = _point(tail, row, num_samples, wanted)
        if point is None:
            return None
        points.append(point)
    return points


def _point(tail: Tail, row: Ints, num_samples: Ints, wanted: Wanted) -> Point | None:
    """One replicate, or None where an answer may lie below the tail."""
    drawn = row * num_samples
    num_genuine = int((drawn * (num_samples - 1)).sum()) // 2
    num_impostors = num_impostor_pairs(drawn)
    padded = np.append(row, 1)  # the subject of weight 1, with which genuine pairs are counted
    num_seen = int(tail.impostors.running(padded)[-1])
    if num_seen < num_impostors and max(wanted.fars) * num_impostors >= num_seen:
        return None
    return weighted_point(tail, padded, np.array([num_genuine, num_impostors]), wanted)
