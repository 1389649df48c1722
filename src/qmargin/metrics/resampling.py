"""Weighted operating points of sorted trials: what one bootstrap replicate computes.

A trial that is drawn ``w`` times counts as ``w`` equal trials. All sums are of integers, hence
exact. Only the largest impostors are looked at: as many as it takes to be certain of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from qmargin.metrics.crossing import Costs
from qmargin.metrics.operating import num_allowed
from qmargin.metrics.subjects import Trials

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST_TAIL = 1024  # impostors looked at before more are found to be needed


@dataclass(frozen=True)
class Wanted:
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
        return sparse.csr_array(
            (counts.astype(np.int64), (keys // size, keys % size)), shape=(size, size)
        )

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
        rows = np.flatnonzero(~trials.is_genuine)
        rows = rows[np.argsort(-trials.scores[rows], kind="stable")]
        self.impostors = Side(trials.scores[rows], enrol[rows], test[rows])
        rows = np.flatnonzero(trials.is_genuine)
        rows = rows[np.argsort(trials.scores[rows], kind="stable")]
        self.genuine = Side(trials.scores[rows], enrol[rows], test[rows])
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
        ascending = self.impostors.scores[::-1]
        accepted = len(ascending) - np.searchsorted(ascending, thresholds, side="left")
        return accepted, np.searchsorted(self.genuine.scores, thresholds, side="left")


def weighted_point(tail: Tail, weights: Ints, totals: Ints, wanted: Wanted) -> Point | None:
    """Operating points of one replicate, or None where the tail is too short to know them.

    Args:
        tail: The largest impostors.
        weights: Of each subject, and 1 at the end.
        totals: Weight of all genuine and of all impostor trials.
        wanted: What to compute.
    """
    num_genuine, num_impostors = (int(total) for total in totals)
    if num_genuine == 0 or num_impostors == 0:
        nothing = np.full(len(wanted.fars) + len(wanted.p_targets), np.nan)
        return Point(nothing[: len(wanted.fars)], np.nan, nothing[len(wanted.fars) :])
    accepted = tail.impostors.running(weights)
    rejected = tail.genuine.running(weights)
    allowed = np.array([num_allowed(far, num_impostors) for far in wanted.fars], dtype=np.int64)
    if not tail.is_whole and allowed.max(initial=-1) >= accepted[-1]:
        return None
    tar = _tar(tail, accepted, rejected, allowed, num_genuine)
    eer = np.nan
    if wanted.has_eer:
        crossing = _eer(tail, accepted, rejected, num_genuine, num_impostors)
        if crossing is None:
            return None
        eer = crossing
    costs = _min_dcf(tail, accepted, rejected, totals, wanted.p_targets)
    return None if costs is None else Point(tar, eer, costs)


def _tar(tail: Tail, accepted: Ints, rejected: Ints, allowed: Ints, num_genuine: int) -> Floats:
    """The k+1 rule: genuine above the first impostor that is one too many."""
    first = np.searchsorted(accepted[1:], allowed, side="right")
    inside = np.minimum(first, len(tail) - 1)
    below = np.where(first < len(tail), tail.num_not_above[inside], 0)  # past it: all are allowed
    tar: Floats = (num_genuine - rejected[below]) / num_genuine
    return tar


def _eer(
    tail: Tail, accepted: Ints, rejected: Ints, num_genuine: int, num_impostors: int
) -> float | None:
    """Where the polyline over distinct scores crosses FAR = FRR."""

    def rates(vertex: int) -> tuple[int, int]:
        if vertex < 0:  # above all impostors
            return 0, int(rejected[-1])
        return int(accepted[ends[vertex]]), int(rejected[starts[vertex]])

    def is_past(vertex: int) -> bool:
        false_accepts, false_rejects = rates(vertex)
        return false_accepts * num_genuine >= false_rejects * num_impostors

    ends, starts = tail.vertices
    low, high = -1, len(ends) - 1
    if not is_past(high):
        return None
    if is_past(low):
        return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_past(middle) else (middle, high)
    (false_accepts, false_rejects), (next_accepts, next_rejects) = rates(low), rates(high)
    short = false_rejects * num_impostors - false_accepts * num_genuine
    over = next_accepts * num_genuine - next_rejects * num_impostors
    crossing = false_rejects * over + next_rejects * short
    return float(Fraction(crossing, (over + short) * num_genuine))


def _min_dcf(
    tail: Tail, accepted: Ints, rejected: Ints, totals: Ints, p_targets: tuple[float, ...]
) -> Floats | None:
    """Smallest normalised cost; None where a threshold below the tail could cost less."""
    num_genuine, num_impostors = totals
    ends, starts = tail.candidates
    costs = np.empty(len(p_targets))
    far_at, frr_at = accepted[ends] / num_impostors, rejected[starts] / num_genuine
    largest_far, largest_frr = accepted[-1] / num_impostors, rejected[-1] / num_genuine
    for index, p_target in enumerate(p_targets):
        price = Costs.of(p_target)
        # above all impostors; nobody accepted; everybody accepted
        ends_cost = min(price.total(largest_frr, 0.0), price.total(1.0, 0.0), price.total(0.0, 1.0))
        costs[index] = price.total(frr_at, far_at).min(initial=float(ends_cost))
        if not tail.is_whole and price.total(0.0, largest_far) < costs[index]:
            return None
    return costs
