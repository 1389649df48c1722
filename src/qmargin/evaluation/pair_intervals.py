"""Intervals over all pairs of samples: every replicate draws subjects, as a report expects.

All pairs are tested, so the weight of a replicate is known without counting, and only the largest
impostors have to be looked at. Where even these are too many to hold, rates that need more of them
come from a random sample of the impostor pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.evaluation.all_pairs import (
    AllPairs,
    PairScores,
    all_genuine,
    largest_impostors,
    num_impostor_pairs,
    random_impostors,
)
from qmargin.evaluation.pair_scores import PairNorm, unit_rows
from qmargin.files import Progress
from qmargin.metrics.bootstrap import interval
from qmargin.metrics.normalise import Moments
from qmargin.metrics.resampling import Point, SortedTrials, Tail, Wanted, weighted_point
from qmargin.metrics.subjects import SubjectWeights, Trials

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST_TAIL = 1.5  # times the largest rate that is asked for: longer tails are rarely needed
LEAST_TAIL = 1e-4  # of the impostors
MAX_ROWS = 10_240  # embeddings whose pairs are all held at once, in about two gigabytes
MAX_TAIL = 1 << 23  # largest impostors that are held of more embeddings
NUM_SAMPLED = 1 << 22  # impostor pairs that are drawn for rates above those of the tail


@dataclass(frozen=True, eq=False)
class PairReplicates:
    """What ``R`` replicates found.

    Attributes:
        tar: ``[R, F]``; NaN where a replicate drew one identity only, as below.
        frr_at_grid: ``[R, G]``.
        eer: ``[R]``.
        subjects_sha256: Of the names.
        note: What was done where not all pairs could be held, else None.
    """

    tar: Floats
    frr_at_grid: Floats
    eer: Floats
    subjects_sha256: str
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
    return PairReplicates(
        tar=tar[:, : len(fars)],
        frr_at_grid=1.0 - tar[:, len(fars) :],
        eer=np.array([point.eer for point in points]),
        subjects_sha256=weights.sha256,
    )


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
    return PairReplicates(
        tar=tar[:, : len(fars)],
        frr_at_grid=1.0 - tar[:, len(fars) :],
        eer=np.array([point.eer for point in (points if near.has_eer else others)]),
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
