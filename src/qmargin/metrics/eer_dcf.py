"""Equal error rate and least detection cost: exact, from counts in bins and a few sorted scores."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError
from qmargin.metrics.checks import Floats, Scores, check_open, checked_pair, just_above, pieces
from qmargin.metrics.curve import Staircase, rejecting_threshold, staircase

FEW_SCORES = 1 << 12  # up to this many are sorted, not counted by bins
HEAVY = 1 << 16  # a bin with more scores is divided again, not sorted


@dataclass(frozen=True)
class Eer:
    """Equal error rate: the common value of FAR and FRR on the polyline over the distinct scores.

    The threshold is that of the end of the crossing step at which the two rates are nearer.
    """

    eer: float
    threshold: float


@dataclass(frozen=True)
class MinDcf:
    """Least normalised detection cost over all thresholds.

    Attributes:
        min_dcf: The cost, divided by that of the better of accepting or rejecting everything: at
            most 1.
        threshold: The lowest score at which it is attained; +inf for rejecting everything (NaN,
            which accepts nothing, if +inf is itself a score).
    """

    min_dcf: float
    threshold: float
    far: float
    frr: float
    p_target: float


@dataclass(frozen=True)
class Costs:
    """Weights of the two error rates in the normalised detection cost."""

    miss: float
    false_accept: float

    @classmethod
    def of(cls, p_target: float, c_miss: float = 1.0, c_fa: float = 1.0) -> Costs:
        """Weights of a prior and the costs of the two errors."""
        check_open(p_target, "p_target", 0.01)
        for name, cost in (("c_miss", c_miss), ("c_fa", c_fa)):
            if not 0.0 < cost < np.inf:
                raise ConfigError(f"{name}={cost:g} is not positive and finite: try 1")
        miss, false_accept = p_target * c_miss, (1.0 - p_target) * c_fa
        least = min(miss, false_accept)
        return cls(miss / least, false_accept / least)

    def total(self, frr: Floats | float, far: Floats | float) -> Floats:
        """Normalised cost; rounding never reverses the order of rates."""
        cost = np.multiply(frr, self.miss)
        cost += np.multiply(far, self.false_accept)
        return np.asarray(cost)


def polyline_crossing(
    before: tuple[int, int], after: tuple[int, int], num_genuine: int, num_impostors: int
) -> tuple[float, bool]:
    """Error rate where a line meets FAR = FRR, rounded once, and whether ``after`` is nearer to it.

    ``before`` and ``after`` are false accepts and false rejects on both sides of the crossing.
    """
    gaps = [
        abs(rejects * num_impostors - accepts * num_genuine) for accepts, rejects in (before, after)
    ]
    crossing = before[1] * gaps[1] + after[1] * gaps[0]
    return float(Fraction(crossing, sum(gaps) * num_genuine)), gaps[1] < gaps[0]


def crossing_point(
    below: tuple[int, int],
    above: tuple[int, int],
    num_genuine: int,
    num_impostors: int,
    value: np.floating[Any],
) -> Eer:
    """The equal error rate between two thresholds, and the threshold that is nearer to it.

    ``below`` and ``above`` are false accepts and false rejects where ``value`` is accepted and
    where it is rejected.
    """
    rate, is_above = polyline_crossing(below, above, num_genuine, num_impostors)
    return Eer(rate, just_above(float(value), value.dtype) if is_above else float(value))


def eer(genuine: ArrayLike, impostor: ArrayLike) -> Eer:
    """Compute the equal error rate, by linear interpolation between distinct scores.

    The value is the exact ratio of two whole numbers, rounded once.

    Examples:
        >>> eer([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1]).eer
        0.25
    """
    genuine, impostor = checked_pair(genuine, impostor)
    num_genuine, num_impostors = len(genuine), len(impostor)

    def first_crossed(rejects: NDArray[np.int64], accepts: NDArray[np.int64]) -> int:
        """First point where FRR reaches FAR, over the common denominator: exact, as it is whole."""

        def is_crossed(index: int) -> bool:
            return int(rejects[index]) * num_impostors >= int(accepts[index]) * num_genuine

        return bisect_left(range(len(rejects) - 1), True, key=is_crossed)

    bins = ScoreBins(genuine, impostor)
    index = first_crossed(bins.false_rejects, bins.false_accepts) - 1
    while bins.num_bins > 1 and bins.sizes[index] > HEAVY:
        bins = bins.zoom(index)
        index = first_crossed(bins.false_rejects, bins.false_accepts) - 1
    steps = bins.inside(np.array([index]))
    rejects = np.append(steps.false_rejects, bins.false_rejects[index + 1])
    accepts = np.append(steps.false_accepts, bins.false_accepts[index + 1])
    after = first_crossed(rejects, accepts)
    before = after - 1  # the step rejects exactly the scores of this value
    points = [(int(accepts[place]), int(rejects[place])) for place in (before, after)]
    return crossing_point(points[0], points[1], num_genuine, num_impostors, steps.values[before])


def min_dcf(
    genuine: ArrayLike,
    impostor: ArrayLike,
    p_target: float = 0.01,
    *,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
) -> MinDcf:
    """Compute minDCF over all thresholds, including those that accept all or nothing.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.
        p_target: Prior probability of a genuine trial, inside (0, 1).
        c_miss: Cost of a false rejection.
        c_fa: Cost of a false acceptance.

    Examples:
        >>> min_dcf([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], p_target=0.5).min_dcf
        0.25
    """
    genuine, impostor = checked_pair(genuine, impostor)
    costs = Costs.of(p_target, c_miss, c_fa)
    num_genuine, num_impostors = len(genuine), len(impostor)

    def candidates(bins: ScoreBins, known: float) -> Iterator[tuple[float, float, float, float]]:
        """Cost, threshold, FAR and FRR of points, the best among them unless ``known`` is less."""
        frr, far = bins.false_rejects / num_genuine, bins.false_accepts / num_impostors
        least = min(known, costs.total(frr, far).min())
        # No score inside a bin costs less than the lower FRR and the lower FAR of its two edges.
        is_open = (costs.total(frr[:-1], far[1:]) <= least) & (bins.sizes > 0)
        is_heavy = (bins.sizes > HEAVY) & (bins.num_bins > 1)
        for index in np.flatnonzero(is_open & is_heavy):
            yield from candidates(bins.zoom(int(index)), least)
        light = np.flatnonzero(is_open & ~is_heavy)
        if len(light):
            steps = bins.inside(light)
            frr, far = steps.false_rejects / num_genuine, steps.false_accepts / num_impostors
            cost = costs.total(frr, far)
            best = int(np.argmin(cost))
            values = steps.values
            yield float(cost[best]), float(values[best]), float(far[best]), float(frr[best])

    nothing = float(costs.total(1.0, 0.0))
    # Of equal costs, the lowest threshold comes first.
    best = min(candidates(ScoreBins(genuine, impostor), nothing), default=None)
    if best is None or nothing < best[0]:
        best = nothing, rejecting_threshold(genuine, impostor), 0.0, 1.0
    return MinDcf(*best, p_target)


def default_num_bins(num_scores: int) -> int:
    """Number of bins for a number of scores."""
    if num_scores <= FEW_SCORES:
        return 1
    return 1 << 12 if num_scores <= 1 << 17 else 1 << 16


class ScoreBins:
    """Numbers of errors at the edges of bins of equal width, and at every score inside some.

    Which bin a score falls into never decreases with the score, so an edge is a threshold between
    scores, whatever the rounding. Few scores, and scores whose range cannot be divided, share one
    bin. ``rejects_below`` genuine and ``accepts_above`` impostor scores lie outside of all bins.
    """

    def __init__(
        self, genuine: Scores, impostor: Scores, *, rejects_below: int = 0, accepts_above: int = 0
    ) -> None:
        self.genuine, self.impostor = genuine, impostor
        self._dtype = np.result_type(genuine, impostor)
        self._low, high = self._finite_range()
        self.num_bins = default_num_bins(len(genuine) + len(impostor))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            self._scale = self._dtype.type(self.num_bins - 1) / (high - self._low)
        if not 0.0 < self._scale < np.inf:
            self.num_bins = 1
        # at the edges of the bins, [num_bins + 1]
        self.false_rejects = rejects_below + self._below(genuine)
        self.false_accepts = accepts_above + len(impostor) - self._below(impostor)
        self._num_genuine = np.diff(self.false_rejects)
        self._num_impostors = -np.diff(self.false_accepts)
        self.sizes = self._num_genuine + self._num_impostors  # [num_bins]

    def _finite_range(self) -> tuple[Any, Any]:
        """The least and the largest finite score."""
        both = (self.genuine, self.impostor)
        low = min(self._dtype.type(scores.min()) for scores in both if len(scores))
        high = max(self._dtype.type(scores.max()) for scores in both if len(scores))
        self._has_infinite = not (np.isfinite(low) and np.isfinite(high))
        if self._has_infinite:
            low, high = self._dtype.type(np.inf), self._dtype.type(-np.inf)
            for piece in chain.from_iterable(map(pieces, both)):
                finite = piece[np.isfinite(piece)]
                low = min(low, finite.min(initial=np.inf))
                high = max(high, finite.max(initial=-np.inf))
        self._high = self._dtype.type(high)
        return self._dtype.type(low), self._high

    def _bins(self, piece: Scores) -> NDArray[np.intp]:
        if self.num_bins == 1:
            return np.zeros(len(piece), np.intp)
        piece = piece.astype(self._dtype, copy=False)
        if self._has_infinite:
            piece = np.clip(piece, self._low, self._high)
        offsets = piece - self._low
        offsets *= self._scale  # at most num_bins - 1 and a little rounding
        return np.asarray(offsets.astype(np.intp))

    def _below(self, scores: Scores) -> NDArray[np.int64]:
        """Number of scores below each bin, and of all."""
        below = np.zeros(self.num_bins + 1, np.int64)
        if self.num_bins == 1:
            below[1] = len(scores)
            return below
        for piece in pieces(scores):
            np.add.at(below[1:], self._bins(piece), 1)
        return np.cumsum(below, out=below)

    def zoom(self, index: int) -> ScoreBins:
        """Bins of the scores of one bin, which has some."""
        below, above = int(self.false_rejects[index]), int(self.false_accepts[index + 1])
        scores = self._gather(np.array([index]))
        return ScoreBins(*scores, rejects_below=below, accepts_above=above)

    def inside(self, bins: NDArray[np.intp]) -> Staircase:
        """Numbers of errors at every distinct score inside the given bins, ascending."""
        steps = staircase(*self._gather(bins))
        home = np.searchsorted(bins, self._bins(steps.values))
        # Replace counts of the other bins by those of everything outside this one.
        num_genuine, num_impostors = self._num_genuine[bins], self._num_impostors[bins]
        earlier = np.cumsum(num_genuine) - num_genuine
        later = num_impostors.sum() - np.cumsum(num_impostors)
        return Staircase(
            steps.values,
            steps.false_accepts + (self.false_accepts[bins + 1] - later)[home],
            steps.false_rejects + (self.false_rejects[bins] - earlier)[home],
        )

    def _gather(self, bins: NDArray[np.intp]) -> tuple[Scores, Scores]:
        """Genuine and impostor scores inside the given bins."""
        if self.num_bins == 1:
            return self.genuine, self.impostor
        wanted = np.zeros(self.num_bins, np.bool_)
        wanted[bins] = True

        def gather(scores: Scores, counts: NDArray[np.int64]) -> Scores:
            found, end = np.empty(counts[bins].sum(), scores.dtype), 0
            for piece in pieces(scores):
                inside = piece[wanted[self._bins(piece)]]
                found[end : end + len(inside)] = inside
                end += len(inside)
            return found

        genuine = gather(self.genuine, self._num_genuine)
        return genuine, gather(self.impostor, self._num_impostors)
