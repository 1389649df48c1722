"""Checks of scores, and comparisons that are exact in any precision."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError

Scores: TypeAlias = NDArray[Any]  # one dimension, float32 or float64
Floats: TypeAlias = NDArray[np.float64]
PIECE = 1 << 16  # scores processed together: temporaries stay in the cache


def checked_scores(scores: ArrayLike, name: str, *, may_be_empty: bool = False) -> Scores:
    """Check scores and return them as a float array of one dimension, without NaN.

    Args:
        scores: Scores of trials; float32 and float64 stay as they are, others become float64.
        name: What the scores are, for the messages, such as ``"impostor"``.
        may_be_empty: Whether an empty array is accepted.

    Raises:
        ShapeError: If there is not exactly one dimension.
        DataError: If a score is NaN, or not a real number.
        ProtocolError: If there are no scores.

    Examples:
        >>> checked_scores([1, 2], "genuine")
        array([1., 2.])
    """
    array = np.asarray(scores)
    if array.dtype not in (np.float32, np.float64):
        if array.dtype.kind not in "buif" and array.size:
            raise DataError(f"{name} scores are of type {array.dtype}: pass real numbers")
        array = array.astype(np.float64)
    if array.ndim != 1:
        raise ShapeError(f"{name} scores have shape {array.shape}: pass one dimension")
    if array.size == 0:
        if may_be_empty:
            return array
        raise ProtocolError(f"there are 0 {name} scores: at least 1 is needed to measure a rate")
    if np.isnan(array.min()):  # one pass without a temporary: the minimum is NaN if any score is
        index = int(np.flatnonzero(np.isnan(array))[0])
        raise DataError(f"{name} score {index} is NaN: remove the trial or score it again")
    return array


def checked_pair(genuine: ArrayLike, impostor: ArrayLike) -> tuple[Scores, Scores]:
    """Checked genuine and impostor scores."""
    return checked_scores(genuine, "genuine"), checked_scores(impostor, "impostor")


def check_rate(rate: float, name: str) -> float:
    """The rate itself; ``ConfigError`` unless it is in (0, 1]."""
    if not 0.0 < rate <= 1.0:
        raise ConfigError(f"{name}={rate:g} is not in (0, 1]: pass a rate such as 0.001")
    return float(rate)


def check_open(value: float, name: str, example: float) -> None:
    """``ConfigError`` unless the value is inside (0, 1)."""
    if not 0.0 < value < 1.0:
        raise ConfigError(f"{name}={value:g} is not inside (0, 1): try {example:g}")


def pieces(scores: Scores) -> Iterator[Scores]:
    """The scores in slices of at most ``PIECE``, in order."""
    for start in range(0, len(scores), PIECE):
        yield scores[start : start + PIECE]


def mean_of(scores: Scores, function: Callable[[Scores], Floats]) -> float:
    """Mean of a function of the scores, rounded as ``function(scores).mean()``.

    The function is applied to a piece at a time. NumPy adds pairwise, halving the array; the same
    halves give the same sum.
    """

    def total(part: Scores) -> float:
        if len(part) <= PIECE:
            return float(function(part).sum())
        half = len(part) // 2
        half -= half % 8
        return total(part[:half]) + total(part[half:])

    return total(scores) / len(scores)


def just_above(value: float, dtype: np.dtype[Any]) -> float:
    """The next number of this precision: the least threshold that rejects ``value``.

    Nothing is above infinity; NaN is returned then, because ``score >= NaN`` never accepts.
    """
    if np.isposinf(value):
        return float("nan")
    with np.errstate(over="ignore"):  # the largest finite number is followed by infinity
        return float(np.nextafter(dtype.type(value), dtype.type(np.inf)))


def round_down(value: float, dtype: np.dtype[Any]) -> Any:
    """The largest number of this precision that is not above ``value``.

    A float32 score is above ``value`` exactly if it is above this number, so scores need no
    conversion. (A Python float compared with a float32 array is rounded to nearest.)
    """
    with np.errstate(over="ignore"):
        narrow = dtype.type(value)
        return np.nextafter(narrow, dtype.type(-np.inf)) if float(narrow) > value else narrow


def round_up(value: float, dtype: np.dtype[Any]) -> Any:
    """The least number of this precision that is not below ``value``."""
    return -round_down(-value, dtype)


def count_above(scores: Scores, value: float) -> int:
    """How many scores are strictly above ``value``."""
    limit = round_down(value, scores.dtype)
    return sum(int(np.count_nonzero(piece > limit)) for piece in pieces(scores))


def count_accepted(scores: Scores, threshold: float) -> int:
    """How many scores are at or above ``threshold``."""
    limit = round_up(threshold, scores.dtype)
    return sum(int(np.count_nonzero(piece >= limit)) for piece in pieces(scores))
