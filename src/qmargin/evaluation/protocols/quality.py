r"""Quality-aware calibration: log-likelihood ratios from scores and what is known of both sides.

Duration, length of the embedding and mean of the cohort scores enter as the smaller and the larger
of the two sides, positive ones also as their ratio in (0, 1], so that enrol and test may be
swapped. The difference of the two, which some recipes add, is a sum of what is there already. The
model is linear; its weights minimise

.. math:: \tfrac12 \operatorname{mean}_{\text{genuine}} \log(1 + e^{-\ell})
          + \tfrac12 \operatorname{mean}_{\text{impostor}} \log(1 + e^{\ell})

the cost Cllr, however many trials of each kind there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from qmargin.errors import DataError, ProtocolError, ShapeError

Floats = NDArray[np.float64]
LONGEST = 20.0  # seconds beyond which a recording tells no more
_RIDGE = 1e-8  # keeps weights finite where trials can be separated or a quality never changes
_MOST_STEPS = 100
_ENOUGH = 1e-20  # square of the last Newton step


class Qualities(NamedTuple):
    """What is known of every recording besides its direction; None for what is not.

    Attributes:
        seconds: Durations ``[n]``.
        lengths: Of the centred embeddings ``[n]``.
        cohort_means: Of the highest cohort scores ``[n]``.
    """

    seconds: Floats | None = None
    lengths: Floats | None = None
    cohort_means: Floats | None = None

    def columns(self, enrol: NDArray[Any], test: NDArray[Any]) -> tuple[tuple[str, ...], Floats]:
        """Names and values ``[trials, columns]`` of the sides of trials.

        Examples:
            >>> known = Qualities(seconds=np.array([4.0, 30.0]))
            >>> known.columns(np.array([1]), np.array([0]))
            (('seconds, smaller', 'seconds, larger', 'seconds, ratio'), array([[ 4. , 20. ,  0.2]]))
        """
        names: list[str] = []
        values: list[Floats] = []
        for name, quality in zip(self._fields, self, strict=True):
            if quality is None:
                continue
            quality = np.minimum(quality, LONGEST) if name == "seconds" else quality
            low = np.minimum(quality[enrol], quality[test])
            high = np.maximum(quality[enrol], quality[test])
            names += [f"{name}, smaller", f"{name}, larger"]
            values += [low, high]
            if name != "cohort_means":  # these may be negative
                names.append(f"{name}, ratio")
                values.append(low / high)
        return tuple(names), np.stack(values, axis=1) if values else np.empty((len(enrol), 0))


@dataclass(frozen=True)
class QualityCalibration:
    """A linear map from a score and qualities to a log-likelihood ratio.

    Attributes:
        names: Of the columns besides the score.
        weights: Of the score and of the columns, ``[1 + columns]``.
        offset: What is added.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    offset: float

    def apply(self, scores: Floats, names: tuple[str, ...], columns: Floats) -> Floats:
        """Log-likelihood ratios ``[n]``; the columns have to be those of the fit."""
        if names != self.names:
            raise ShapeError(
                f"the calibration was fitted with {', '.join(self.names) or 'no qualities'} and "
                f"is applied to {', '.join(names) or 'none'}: give the same qualities"
            )
        ratios: Floats = self.offset + _table(scores, columns) @ np.array(self.weights)
        return ratios


def fit_quality(
    scores: Floats, is_genuine: NDArray[np.bool_], names: tuple[str, ...], columns: Floats
) -> QualityCalibration:
    """The calibration with the smallest Cllr on labelled trials.

    Args:
        scores: Of the trials, ``[n]``.
        is_genuine: Labels ``[n]``.
        names: Of the columns.
        columns: Qualities of the trials, ``[n, columns]``.

    Raises:
        ProtocolError: There are no genuine or no impostor trials.
        DataError: A value is not finite.
    """
    num_genuine = int(is_genuine.sum())
    if num_genuine in (0, len(is_genuine)):
        raise ProtocolError(
            f"the calibration has {num_genuine:,} genuine trials of {len(is_genuine):,}: it needs "
            "trials of both kinds"
        )
    table = _table(scores, columns)
    if not np.isfinite(table).all():
        row, column = (int(place[0]) for place in np.nonzero(~np.isfinite(table)))
        what = ("score", *names)[column]
        raise DataError(f"the {what} of calibration trial {row} is not finite: leave it out")
    center, spread = table.mean(axis=0), table.std(axis=0)
    spread[spread == 0.0] = 1.0
    standard = np.column_stack([(table - center) / spread, np.ones(len(table))])
    point = _minimum(standard, is_genuine)
    weights = point[:-1] / spread
    return QualityCalibration(names, tuple(weights.tolist()), float(point[-1] - weights @ center))


def _table(scores: Floats, columns: Floats) -> Floats:
    return np.column_stack([scores, columns])


def _minimum(table: Floats, is_genuine: NDArray[np.bool_]) -> Floats:
    """Newton's method with steps that are halved until the cost falls."""
    signs = np.where(is_genuine, -1.0, 1.0)
    shares = np.where(is_genuine, 0.5 / is_genuine.sum(), 0.5 / (~is_genuine).sum())
    point = np.zeros(table.shape[1])

    def cost(at: Floats) -> float:
        return float(shares @ np.logaddexp(0.0, signs * (table @ at)) + 0.5 * _RIDGE * (at @ at))

    value = cost(point)
    for _ in range(_MOST_STEPS):
        wrong = expit(signs * (table @ point))
        gradient = table.T @ (shares * signs * wrong) + _RIDGE * point
        curvature = (table.T * (shares * wrong * (1.0 - wrong))) @ table
        step = np.linalg.solve(curvature + _RIDGE * np.eye(len(point)), gradient)
        while (trial := cost(point - step)) > value and step @ step > _ENOUGH:
            step = step / 2.0
        if trial > value or step @ step <= _ENOUGH * (1.0 + point @ point):
            break
        point, value = point - step, trial
    return point
