"""Scores read as natural log-likelihood ratios: their cost, and an affine calibration."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.checks import Scores, checked_scores
from qmargin.metrics.crossing import Costs
from qmargin.metrics.curve import staircase
from qmargin.metrics.operating import rates_at

MOST_STEPS = 200
ENOUGH = 1e-24  # square of the last Newton step, in standard deviations of the scores


@dataclass(frozen=True)
class Calibration:
    """An affine map from scores to log-likelihood ratios.

    Attributes:
        scale: What scores are multiplied by.
        offset: What is added.
    """

    scale: float
    offset: float

    def apply(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Log-likelihood ratios of scores, in float64.

        Examples:
            >>> Calibration(scale=10.0, offset=-3.0).apply([0.3, 0.5])
            array([0., 2.])
        """
        return np.asarray(scores, np.float64) * self.scale + self.offset


def cllr(genuine: ArrayLike, impostor: ArrayLike) -> float:
    """Cost of log-likelihood ratios in bits: 0 at best, 1 for ratios that say nothing.

    Args:
        genuine: Log-likelihood ratios of trials of one subject.
        impostor: Log-likelihood ratios of trials of two subjects.

    Examples:
        >>> cllr([0.0, 0.0], [0.0])
        1.0
    """
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    misses = np.logaddexp(0.0, -genuine, dtype=np.float64).mean()
    false_alarms = np.logaddexp(0.0, impostor, dtype=np.float64).mean()
    return float((misses + false_alarms) / (2.0 * math.log(2.0)))


def min_cllr(genuine: ArrayLike, impostor: ArrayLike) -> float:
    """Cost in bits after the best map that never decreases: what calibration cannot mend.

    Pool adjacent violators finds that map; equal scores stay together.

    Examples:
        >>> min_cllr([3.0, 4.0], [1.0, 2.0])
        0.0
        >>> min_cllr([1.0, 1.0], [1.0])
        1.0
    """
    from scipy.optimize import isotonic_regression  # slow to import, and only needed here

    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    steps = staircase(genuine, impostor)
    num_genuine = np.diff(steps.false_rejects, append=len(genuine)).astype(np.float64)
    num_impostors = -np.diff(steps.false_accepts, append=0).astype(np.float64)
    totals = num_genuine + num_impostors
    starts = isotonic_regression(num_genuine / totals, weights=totals).blocks[:-1]
    num_genuine = np.add.reduceat(num_genuine, starts)
    num_impostors = np.add.reduceat(num_impostors, starts)
    # A pool's ratio is that of the shares of the genuine and the impostor scores in it.
    is_mixed = (num_genuine > 0.0) & (num_impostors > 0.0)
    genuine_share = num_genuine[is_mixed] / len(genuine)
    impostor_share = num_impostors[is_mixed] / len(impostor)
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
    """Normalised detection cost of log-likelihood ratios at the threshold that theory gives.

    Examples:
        >>> actual_dcf([5.0, 6.0], [-7.0, 1.0], p_target=0.5)
        0.5
    """
    costs = Costs.of(p_target, c_miss, c_fa)
    rates = rates_at(genuine, impostor, math.log(costs.false_accept / costs.miss))
    return float(costs.total(rates.frr, rates.far))


def calibrate(genuine: ArrayLike, impostor: ArrayLike, *, prior: float = 0.5) -> Calibration:
    """The affine map to log-likelihood ratios that logistic regression finds.

    Genuine scores together weigh ``prior`` and impostor scores the rest, however many there are.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.
        prior: Probability of a genuine trial at which the ratios shall be good.

    Raises:
        ProtocolError: If one threshold separates all scores, so that no finite scale is best.
        DataError: If a score is not finite.

    Examples:
        >>> calibration = calibrate([-1.0, 1.0, 2.0], [-2.0, -1.0, 1.0])
        >>> abs(calibration.offset) < 1e-12, calibration.scale > 0.0
        (True, True)
    """
    if not 0.0 < prior < 1.0:
        raise ConfigError(f"prior={prior:g} is not inside (0, 1): pass such as 0.5")
    genuine = _finite_scores(genuine, "genuine")
    impostor = _finite_scores(impostor, "impostor")
    if genuine.min() >= impostor.max() or genuine.max() <= impostor.min():
        raise ProtocolError(
            f"the threshold {max(genuine.min(), impostor.min()):g} separates genuine and impostor "
            "scores, so no finite scale is best: calibrate on trials whose scores overlap"
        )
    center = float(genuine.mean() + impostor.mean()) / 2.0
    spread = math.sqrt(((genuine - center) ** 2).mean() + ((impostor - center) ** 2).mean())
    scale, offset = _logistic_regression(
        (genuine - center) / spread, (impostor - center) / spread, prior
    )
    return Calibration(scale / spread, offset - scale * center / spread)


def _finite_scores(scores: ArrayLike, name: str) -> Scores:
    checked = checked_scores(scores, name).astype(np.float64)
    if not np.isfinite(checked).all():
        index = int(np.flatnonzero(~np.isfinite(checked))[0])
        raise DataError(f"{name} score {index} is infinite: calibrate on finite scores only")
    return checked


class _Fit(NamedTuple):
    loss: float
    gradient: NDArray[np.float64]
    curvature: NDArray[np.float64]


def _logistic_regression(genuine: Scores, impostor: Scores, prior: float) -> tuple[float, float]:
    """Newton's method with steps that are halved until the loss falls."""
    point: NDArray[Any] = np.zeros(2)
    fit = _logistic_fit(point, genuine, impostor, prior)
    for _ in range(MOST_STEPS):
        step = np.linalg.solve(fit.curvature, fit.gradient)
        if step @ step <= ENOUGH * (1.0 + point @ point):
            break
        trial = _logistic_fit(point - step, genuine, impostor, prior)
        while trial.loss > fit.loss and step @ step > ENOUGH * (1.0 + point @ point):
            step = step / 2.0
            trial = _logistic_fit(point - step, genuine, impostor, prior)
        if trial.loss > fit.loss:  # only rounding is left
            break
        point, fit = point - step, trial
    return float(point[0]), float(point[1])


def _logistic_fit(point: NDArray[Any], genuine: Scores, impostor: Scores, prior: float) -> _Fit:
    """Weighted loss of the posteriors, its gradient and its matrix of second derivatives."""
    shift = math.log(prior / (1.0 - prior))
    loss, gradient, curvature = 0.0, np.zeros(2), np.zeros((2, 2))
    for scores, weight, sign in ((genuine, prior, -1.0), (impostor, 1.0 - prior, 1.0)):
        errors = sign * (point[0] * scores + point[1] + shift)
        wrong = expit(errors)  # probability given to the wrong answer
        loss += weight * float(np.logaddexp(0.0, errors).mean())
        gradient += weight * sign * np.array([(wrong * scores).mean(), wrong.mean()])
        bend = wrong * (1.0 - wrong)
        across = (bend * scores).mean()
        curvature += weight * np.array([[(bend * scores**2).mean(), across], [across, bend.mean()]])
    return _Fit(loss, gradient, curvature)
