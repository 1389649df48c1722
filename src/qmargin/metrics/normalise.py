"""Scores relative to those of a cohort: Z-norm, T-norm, S-norm and adaptive S-norm."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.metrics.checks import Floats


class Moments(NamedTuple):
    """Mean and standard deviation of each row's cohort scores."""

    mean: Floats
    std: Floats

    def apply(self, scores: Floats, rows: NDArray[Any]) -> Floats:
        """Scores in standard deviations above the mean of the row that each belongs to."""
        return np.asarray((scores - self.mean[rows]) / self.std[rows])


def z_norm(
    scores: ArrayLike, enrol_cohort: ArrayLike, *, enrol_index: ArrayLike | None = None
) -> Floats:
    """Compute Z-norm: normalise by the enrolment sample's scores against a cohort.

    The arguments are those of :func:`as_norm`.

    Examples:
        >>> z_norm([3.0], [[0.0, 2.0]], enrol_index=[0])
        array([2.])
    """
    return _normalised(scores, enrol_cohort, "enrol_cohort", enrol_index)


def t_norm(
    scores: ArrayLike, test_cohort: ArrayLike, *, test_index: ArrayLike | None = None
) -> Floats:
    """Compute T-norm: normalise by the cohort's scores against the test sample.

    The arguments are those of :func:`as_norm`.

    Examples:
        >>> t_norm([[3.0, 5.0]], [[0.0, 2.0], [4.0, 8.0]])
        array([[ 2. , -0.5]])
    """
    return _normalised(scores, test_cohort, "test_cohort", test_index)


def s_norm(
    scores: ArrayLike,
    enrol_cohort: ArrayLike,
    test_cohort: ArrayLike,
    *,
    enrol_index: ArrayLike | None = None,
    test_index: ArrayLike | None = None,
) -> Floats:
    """Compute S-norm, the mean of Z-norm and T-norm with the whole cohort."""
    index = {"enrol_index": enrol_index, "test_index": test_index}
    return as_norm(scores, enrol_cohort, test_cohort, top_n=None, **index)


def as_norm(
    scores: ArrayLike,
    enrol_cohort: ArrayLike,
    test_cohort: ArrayLike,
    *,
    top_n: int | None = 300,
    enrol_index: ArrayLike | None = None,
    test_index: ArrayLike | None = None,
) -> Floats:
    """Compute AS-norm: S-norm with the nearest cohort members of each side.

    Args:
        scores: Scores of trials ``[n]`` with both indices, or of all pairs ``[E, T]`` without.
        enrol_cohort: Scores of each enrolled model against the cohort, ``[E, C]``.
        test_cohort: Scores of each test against the cohort, ``[T, C]``.
        top_n: How many of the largest cohort scores of each row count; None for all.
        enrol_index: Row of ``enrol_cohort`` of each trial, ``[n]``.
        test_index: Row of ``test_cohort`` of each trial, ``[n]``.

    Returns:
        An array like ``scores``, in float64.

    Raises:
        ConfigError: If the cohort has fewer than ``top_n`` members.
        DataError: If a score is not finite, or the cohort scores of a row are all equal.

    Examples:
        >>> as_norm([[3.0]], [[0.0, 2.0, -9.0]], [[1.0, 3.0, -9.0]], top_n=2)
        array([[1.5]])
    """
    if (enrol_index is None) != (test_index is None):
        raise ShapeError("only one of enrol_index and test_index is given: pass both or none")
    normalised = _normalised(scores, enrol_cohort, "enrol_cohort", enrol_index, top_n)
    normalised += _normalised(scores, test_cohort, "test_cohort", test_index, top_n)
    normalised *= 0.5
    return normalised


def cohort_moments(cohort: ArrayLike, name: str, top_n: int | None = None) -> Moments:
    """Mean and standard deviation of each row of cohort scores, or of its ``top_n`` largest."""
    matrix: NDArray[Any] = np.asarray(cohort, np.float64)
    if matrix.ndim != 2:
        raise ShapeError(f"{name} has shape {matrix.shape}: pass [rows, cohort members]")
    size = matrix.shape[1]
    least = 2 if top_n is None else top_n
    if least < 2 or size < least:
        raise ConfigError(f"top {least} of {size} cohort scores in {name}: use 2 to {size}")
    if not np.isfinite(matrix).all():
        row, column = (int(i[0]) for i in np.nonzero(~np.isfinite(matrix)))
        raise DataError(f"{name}[{row}, {column}] is {matrix[row, column]}: score it again")
    if top_n is not None and top_n < size:
        matrix = np.partition(matrix, size - top_n, axis=1)[:, size - top_n :]
    if (flat := np.flatnonzero(matrix.max(axis=1) == matrix.min(axis=1))).size:
        raise DataError(f"row {flat[0]} of {name} has equal scores only: use a wider cohort")
    return Moments(matrix.mean(axis=1), matrix.std(axis=1))


def _normalised(
    scores: ArrayLike,
    cohort: ArrayLike,
    name: str,
    index: ArrayLike | None,
    top_n: int | None = None,
) -> Floats:
    """Scores in standard deviations above the mean of the cohort scores of their row."""
    trials: Floats = np.asarray(scores, np.float64)
    wanted = 2 if index is None else 1
    if trials.ndim != wanted:
        form = "[enrolled, tests] without indices" if wanted == 2 else "[trials] with an index"
        raise ShapeError(f"scores have shape {trials.shape}: pass {form}")
    if np.isnan(trials).any():
        place = tuple(int(i[0]) for i in np.nonzero(np.isnan(trials)))
        raise DataError(f"score {place} is NaN: remove the trial or score it again")
    moments = cohort_moments(cohort, name, top_n)
    num_rows, axis = len(moments.mean), 0 if name == "enrol_cohort" else 1
    if index is None:
        if trials.shape[axis] != num_rows:
            raise ShapeError(
                f"axis {axis} of scores {trials.shape} has to have the {num_rows} rows of {name}"
            )
        all_rows = np.arange(num_rows)
        return moments.apply(trials, all_rows[:, None] if axis == 0 else all_rows[None])
    rows = np.asarray(index)
    if rows.shape != trials.shape:
        raise ShapeError(f"the index has shape {rows.shape} but there are {len(trials)} scores")
    if (wrong := np.flatnonzero((rows < 0) | (rows >= num_rows))).size:
        row = rows[wrong[0]]
        raise DataError(f"trial {wrong[0]} points to row {row} but the cohort has {num_rows} rows")
    return moments.apply(trials, rows)
