"""The whole trade-off between the two errors: every threshold that makes a difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from qmargin.errors import ConfigError
from qmargin.metrics.checks import Scores, checked_scores, common_dtype


class Staircase(NamedTuple):
    """Errors of accepting the scores at or above each distinct score, lowest first."""

    values: Scores
    false_accepts: NDArray[np.int64]
    false_rejects: NDArray[np.int64]


def staircase(genuine: Scores, impostor: Scores) -> Staircase:
    """Numbers of errors at every distinct score of checked scores.

    Examples:
        >>> steps = staircase(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
        >>> steps.values, steps.false_accepts, steps.false_rejects
        (array([1., 2., 3.]), array([2, 1, 0]), array([0, 0, 1]))
    """
    genuine, impostor = np.sort(genuine), np.sort(impostor)
    values = np.concatenate([genuine, impostor])  # in the wider precision of the two
    values.sort(kind="stable")  # which merges two runs that are sorted
    is_new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    values = values[is_new]
    return Staircase(
        values,
        len(impostor) - np.searchsorted(impostor, values),
        np.searchsorted(genuine, values),
    )


def rejecting_threshold(*scores: Scores) -> float:
    """Threshold of the end where nothing is accepted: +inf, or NaN if some score is +inf.

    Examples:
        >>> rejecting_threshold(np.array([1.0]))
        inf
    """
    largest = max((array.max() for array in scores if len(array)), default=0.0)
    return float("nan") if np.isposinf(largest) else float("inf")


@dataclass(frozen=True, eq=False)
class DetCurve:
    """Error rates at every threshold that makes a difference, the lowest threshold first.

    The first point accepts everything and the last nothing.

    Attributes:
        thresholds: Distinct scores, ascending, then +inf (NaN, which accepts nothing, if +inf is
            itself a score).
        far: False acceptance rates, from 1 to 0.
        frr: False rejection rates, from 0 to 1.
        num_genuine: Number of genuine scores.
        num_impostors: Number of impostor scores.
    """

    thresholds: NDArray[Any]
    far: NDArray[np.float64]
    frr: NDArray[np.float64]
    num_genuine: int
    num_impostors: int

    def __len__(self) -> int:
        return len(self.far)

    @property
    def tar(self) -> NDArray[np.float64]:
        """True acceptance rates: ``(far, tar)`` is the ROC curve."""
        return 1.0 - self.frr

    def thin(self, num_points: int) -> DetCurve:
        """At most ``num_points`` of the points, for drawing.

        They are about equally far apart on probit axes, both ends are among them, and every one of
        them is a point of the exact curve.

        Examples:
            >>> curve = det_curve(np.arange(50.0, 150.0), np.arange(100.0))
            >>> len(curve), len(curve.thin(20)) <= 20
            (151, True)
        """
        if num_points < 2:
            raise ConfigError(f"num_points={num_points} is too few: both ends make 2")
        if len(self) <= num_points:
            return self
        across = _probit(self.far, self.num_impostors)
        up = _probit(self.frr, self.num_genuine)
        length = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(across), np.diff(up)))])
        wanted = np.linspace(0.0, length[-1], num_points)
        index = np.unique([0, *np.searchsorted(length, wanted[1:-1]), len(self) - 1])
        return DetCurve(
            self.thresholds[index],
            self.far[index],
            self.frr[index],
            self.num_genuine,
            self.num_impostors,
        )


def _probit(rates: NDArray[np.float64], num_trials: int) -> NDArray[np.float64]:
    """Normal quantiles; rates of 0 and 1 are drawn half a trial inside."""
    margin = 0.5 / num_trials
    quantiles: NDArray[np.float64] = ndtri(np.clip(rates, margin, 1.0 - margin))
    return quantiles


def det_curve(genuine: ArrayLike, impostor: ArrayLike) -> DetCurve:
    """The exact curve over the distinct scores and both ends.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.

    Raises:
        ProtocolError: If there are no genuine or no impostor scores.
        DataError: If a score is NaN.

    Examples:
        >>> curve = det_curve([2.0, 3.0], [1.0, 2.0])
        >>> curve.thresholds, curve.far, curve.frr
        (array([ 1.,  2.,  3., inf]), array([1. , 0.5, 0. , 0. ]), array([0. , 0. , 0.5, 1. ]))
    """
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    return det_curve_of(staircase(genuine, impostor), genuine, impostor)


def det_curve_of(steps: Staircase, genuine: Scores, impostor: Scores) -> DetCurve:
    """The curve of checked scores whose staircase is known."""
    end = np.asarray(rejecting_threshold(genuine, impostor), common_dtype(genuine, impostor))
    return DetCurve(
        np.append(steps.values, end),
        np.append(steps.false_accepts, 0) / len(impostor),
        np.append(steps.false_rejects, len(genuine)) / len(genuine),
        len(genuine),
        len(impostor),
    )
