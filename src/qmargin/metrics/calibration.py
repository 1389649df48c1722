"""Scores read as natural log-likelihood ratios: their cost, and an affine calibration."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from qmargin.errors import DataError, ProtocolError
from qmargin.metrics.checks import PIECE, Floats, check_open, checked_pair, mean_of, pieces
from qmargin.metrics.curve import Staircase, StaircaseParts
from qmargin.metrics.eer_dcf import Costs
from qmargin.metrics.operating import rates_at

MOST_STEPS = 200
COARSE_BINS = 4096
LARGEST_START = 1e3  # in standard deviations: beyond it the bins are nearly separated
ENOUGH = 1e-24  # square of the last Newton step, in standard deviations of the scores


@dataclass(frozen=True)
class Calibration:
    """An affine map from scores to log-likelihood ratios: ``scale * score + offset``."""

    scale: float
    offset: float

    def apply(self, scores: ArrayLike) -> Floats:
        """Log-likelihood ratios of scores, in float64.

        Examples:
            >>> Calibration(scale=10.0, offset=-3.0).apply([0.3, 0.5])
            array([0., 2.])
        """
        return np.asarray(scores, np.float64) * self.scale + self.offset


def cllr(genuine: ArrayLike, impostor: ArrayLike) -> float:
    """Compute Cllr, the cost of log-likelihood ratios in bits: 0 is best, 1 is uninformative.

    Examples:
        >>> cllr([0.0, 0.0], [0.0])
        1.0
    """
    genuine, impostor = checked_pair(genuine, impostor)
    misses = mean_of(genuine, lambda piece: np.logaddexp(0.0, -piece, dtype=np.float64))
    false_alarms = mean_of(impostor, lambda piece: np.logaddexp(0.0, piece, dtype=np.float64))
    return float((misses + false_alarms) / (2.0 * math.log(2.0)))


def min_cllr(genuine: ArrayLike, impostor: ArrayLike) -> float:
    """Compute minCllr: Cllr after the best monotone calibration, in bits.

    Pool adjacent violators finds that map; equal scores stay together.

    Examples:
        >>> min_cllr([3.0, 4.0], [1.0, 2.0])
        0.0
    """
    return min_cllr_of(StaircaseParts(*checked_pair(genuine, impostor)))


def min_cllr_of(parts: StaircaseParts) -> float:
    """Compute minCllr from a staircase in parts, by merging the pools of the parts."""
    from scipy.optimize import isotonic_regression  # slow to import, and only needed here

    def pooled(num_genuine: Floats, num_impostors: Floats) -> tuple[Floats, Floats]:
        """Genuine and impostor counts in the pools of adjacent violators."""
        totals = num_genuine + num_impostors
        starts = isotonic_regression(num_genuine / totals, weights=totals).blocks[:-1]
        return np.add.reduceat(num_genuine, starts), np.add.reduceat(num_impostors, starts)

    total_genuine, total_impostors = len(parts.genuine), len(parts.impostor)
    pools = []
    before: Staircase | None = None
    last = Staircase(np.empty(1), np.array([0]), np.array([total_genuine]))
    for part in chain(parts, [last]):
        if not len(part.values):
            continue
        if before is not None:  # numbers at every distinct score of the part before
            num_genuine = np.diff(before.false_rejects, append=part.false_rejects[0])
            num_impostors = -np.diff(before.false_accepts, append=part.false_accepts[0])
            pools.append(pooled(num_genuine.astype(np.float64), num_impostors.astype(np.float64)))
        before = part
    num_genuine, num_impostors = map(np.concatenate, zip(*pools, strict=True))
    if len(pools) > 1:
        num_genuine, num_impostors = pooled(num_genuine, num_impostors)
    # A pool's ratio is that of the shares of the genuine and the impostor scores in it.
    is_mixed = (num_genuine > 0.0) & (num_impostors > 0.0)
    genuine_share = num_genuine[is_mixed] / total_genuine
    impostor_share = num_impostors[is_mixed] / total_impostors
    cost = genuine_share @ np.log1p(impostor_share / genuine_share)
    cost += impostor_share @ np.log1p(genuine_share / impostor_share)
    return float(cost) / (2.0 * math.log(2.0))


def actual_dcf(
    genuine: ArrayLike,
    impostor: ArrayLike,
    p_target: float = 0.01,
    *,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
) -> float:
    """Compute the normalised detection cost of log-likelihood ratios at the Bayes threshold.

    Examples:
        >>> actual_dcf([5.0, 6.0], [-7.0, 1.0], p_target=0.5)
        0.5
    """
    costs = Costs.of(p_target, c_miss, c_fa)
    rates = rates_at(genuine, impostor, math.log(costs.false_accept / costs.miss))
    return float(costs.total(rates.frr, rates.far))


def calibrate(genuine: ArrayLike, impostor: ArrayLike, *, prior: float = 0.5) -> Calibration:
    """Fit an affine map from scores to log-likelihood ratios by logistic regression.

    Genuine scores have a total weight of ``prior``, impostor scores the rest, whatever their
    numbers.

    Raises:
        ProtocolError: If one threshold separates all scores, so that no finite scale is best.
        DataError: If a score is not finite.

    Examples:
        >>> calibration = calibrate([-1.0, 1.0, 2.0], [-2.0, -1.0, 1.0])
        >>> abs(calibration.offset) < 1e-12, calibration.scale > 0.0
        (True, True)
    """
    check_open(prior, "prior", 0.5)
    genuine, impostor = checked_pair(genuine, impostor)
    for name, scores in (("genuine", genuine), ("impostor", impostor)):
        if not (np.isfinite(scores.min()) and np.isfinite(scores.max())):
            index = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise DataError(f"{name} score {index} is infinite: calibrate on finite scores only")
    genuine, impostor = (side.astype(np.float64, copy=False) for side in (genuine, impostor))
    if genuine.min() >= impostor.max() or genuine.max() <= impostor.min():
        raise ProtocolError(
            f"the threshold {max(genuine.min(), impostor.min()):g} separates genuine and impostor "
            "scores, so no finite scale is best: calibrate on trials whose scores overlap"
        )
    center = float(genuine.mean() + impostor.mean()) / 2.0
    squares = [mean_of(side, lambda piece: (piece - center) ** 2) for side in (genuine, impostor)]
    spread = math.sqrt(squares[0] + squares[1])
    sides = [_Side(side, None, center, spread) for side in (genuine, impostor)]
    scale, offset = _logistic_regression(sides, prior, _coarse_solution(sides, prior))
    return Calibration(scale / spread, offset - scale * center / spread)


class _Side(NamedTuple):
    """Scores of one label, scaled a piece at a time, and how often each is there; once if None."""

    scores: Floats
    counts: NDArray[np.int64] | None
    center: float = 0.0
    spread: float = 1.0

    def scaled(self, scores: Any) -> Any:
        """Some of the scores, in standard deviations from the centre."""
        return (scores - self.center) / self.spread


def _coarse_solution(sides: list[_Side], prior: float) -> Floats:
    """Starting point: the solution for bins of equal width, if there are many scores.

    Newton's method then needs two or three passes over all scores instead of ten. The start does
    not change the solution.
    """
    start = np.zeros(2)
    if all(len(side.scores) <= 16 * COARSE_BINS for side in sides):
        return start
    binned = []
    for side in sides:  # the mean of the scores in each bin, and their number
        low, high = side.scaled(side.scores.min()), side.scaled(side.scores.max())
        if low == high:
            binned.append(_Side(side.scaled(side.scores[:1]), np.array([len(side.scores)])))
            continue
        counts, sums = np.zeros(COARSE_BINS + 1, np.int64), np.zeros(COARSE_BINS + 1)
        for piece in pieces(side.scores):
            scores = side.scaled(piece)
            places = ((scores - low) * (COARSE_BINS / (high - low))).astype(np.int64)
            counts += np.bincount(places, minlength=len(counts))
            np.add.at(sums, places, scores)
        is_used = counts > 0
        binned.append(_Side(sums[is_used] / counts[is_used], counts[is_used]))
    try:
        found = np.array(_logistic_regression(binned, prior, start))
    except np.linalg.LinAlgError:  # a threshold separates the bins
        return start
    return found if np.abs(found).max() < LARGEST_START else start


def _logistic_regression(sides: list[_Side], prior: float, start: Floats) -> tuple[float, float]:
    """Newton's method with steps that are halved until the loss falls."""
    point: NDArray[Any] = start
    loss, gradient, curvature = _logistic_fit(point, sides, prior)
    for _ in range(MOST_STEPS):
        step = np.linalg.solve(curvature, gradient)
        if step @ step <= ENOUGH * (1.0 + point @ point):
            break
        trial = _logistic_fit(point - step, sides, prior)
        while trial[0] > loss and step @ step > ENOUGH * (1.0 + point @ point):
            step = step / 2.0
            trial = _logistic_fit(point - step, sides, prior)
        if trial[0] > loss:  # the rest is rounding
            break
        point, (loss, gradient, curvature) = point - step, trial
    return float(point[0]), float(point[1])


def _logistic_fit(
    point: NDArray[Any], sides: list[_Side], prior: float
) -> tuple[float, Floats, Floats]:
    """Weighted loss of the posteriors, its gradient and its matrix of second derivatives."""
    shift = math.log(prior / (1.0 - prior))
    loss, gradient, curvature = 0.0, np.zeros(2), np.zeros((2, 2))
    for side, weight, sign in zip(sides, (prior, 1.0 - prior), (-1.0, 1.0), strict=True):
        sums = np.zeros(6)
        for begin in range(0, len(side.scores), PIECE):
            piece = slice(begin, begin + PIECE)
            scores = side.scaled(side.scores[piece])
            errors = sign * (point[0] * scores + point[1] + shift)
            wrong = expit(errors)  # probability given to the wrong answer
            cost, bend = np.logaddexp(0.0, errors), wrong * (1.0 - wrong)
            if side.counts is not None:
                counts = side.counts[piece]
                cost, wrong, bend = cost * counts, wrong * counts, bend * counts
            across = bend * scores
            terms = (cost, wrong, wrong * scores, bend, across, across * scores)
            sums += np.array([term.sum() for term in terms])
        total = len(side.scores) if side.counts is None else side.counts.sum()
        cost, wrong, slant, bend, across, along = weight * sums / total
        loss += float(cost)
        gradient += sign * np.array([slant, wrong])
        curvature += np.array([[along, across], [across, bend]])
    return loss, gradient, curvature
