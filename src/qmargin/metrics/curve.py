"""The whole trade-off between the two errors: every threshold that makes a difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from qmargin.errors import ConfigError
from qmargin.metrics.checks import Scores, checked_scores, common_dtype, pieces

PART = 1 << 22  # scores whose staircase is held at once
SAMPLE = 1 << 16  # scores that decide where parts end


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


class StaircaseParts:
    """The staircase of any number of scores, in consecutive parts, lowest first.

    Each part takes memory for about ``size`` scores, however many there are in all. The scores are
    looked at once for every part, so a few large parts are faster than many small ones.

    Args:
        genuine: Checked genuine scores.
        impostor: Checked impostor scores.
        size: Scores of a part, ``PART`` by default; a value that many share takes no memory.

    Examples:
        >>> parts = StaircaseParts(np.array([2.0, 3.0]), np.array([1.0, 2.0]), size=1)
        >>> [part.values.tolist() for part in parts if len(part.values)]
        [[1.0], [2.0], [3.0]]
    """

    def __init__(self, genuine: Scores, impostor: Scores, *, size: int | None = None) -> None:
        self.genuine, self.impostor = genuine, impostor
        self._splits = _splits(genuine, impostor, PART if size is None else size)
        self._whole: Staircase | None = None  # kept where it is the only part

    @property
    def is_whole(self) -> bool:
        """Whether there is one part only."""
        return not len(self._splits)

    def __iter__(self) -> Iterator[Staircase]:
        if self.is_whole:
            if self._whole is None:
                self._whole = staircase(self.genuine, self.impostor)
            yield self._whole
            return
        rejects, accepts = 0, len(self.impostor)
        bounds = [None, *self._splits, None]
        for low, high in pairwise(bounds):
            sides = [_between(scores, low, high) for scores in (self.genuine, self.impostor)]
            if low is not None:  # how often the lower bound itself occurs
                yield Staircase(np.array([low]), np.array([accepts]), np.array([rejects]))
                rejects, accepts = rejects + sides[0].num_low, accepts - sides[1].num_low
            part = staircase(sides[0].inside, sides[1].inside)
            left = accepts - len(sides[1].inside)
            yield Staircase(part.values, part.false_accepts + left, part.false_rejects + rejects)
            rejects, accepts = rejects + len(sides[0].inside), left


class _Between(NamedTuple):
    """Scores strictly between two bounds, and the number of those at the lower one."""

    inside: Scores
    num_low: int


def _between(scores: Scores, low: Any, high: Any) -> _Between:
    found, num_low = [], 0
    for piece in pieces(scores):
        is_inside = np.ones(len(piece), np.bool_) if low is None else piece > low
        if high is not None:
            is_inside &= piece < high
        found.append(piece[is_inside])
        if low is not None:
            num_low += int(np.count_nonzero(piece == low))
    return _Between(np.concatenate(found) if found else scores, num_low)


def _splits(genuine: Scores, impostor: Scores, size: int) -> Scores:
    """Values between parts, by a sample of the scores; each part has half of ``size`` or so."""
    total = len(genuine) + len(impostor)
    if total <= size:
        return np.empty(0)
    step = max(1, total // SAMPLE)
    sample = np.concatenate([genuine[::step], impostor[::step]])
    sample.sort()
    width = max(1, len(sample) * size // (2 * total))
    splits: Scores = np.unique(sample[width // 2 :: width])
    return splits


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
    steps = staircase(genuine, impostor)
    end = np.asarray(rejecting_threshold(genuine, impostor), common_dtype(genuine, impostor))
    return DetCurve(
        np.append(steps.values, end),
        np.append(steps.false_accepts, 0) / len(impostor),
        np.append(steps.false_rejects, len(genuine)) / len(genuine),
        len(genuine),
        len(impostor),
    )


def thin_curve(parts: StaircaseParts, num_points: int) -> DetCurve:
    """What ``DetCurve.thin`` gives for the whole curve, which is never held.

    Examples:
        >>> genuine, impostor = np.arange(50.0, 150.0), np.arange(100.0)
        >>> thin = thin_curve(StaircaseParts(genuine, impostor, size=16), 20)
        >>> bool((thin.far == det_curve(genuine, impostor).thin(20).far).all())
        True
    """
    walked = list(_walk(parts)) if parts.is_whole else None
    ends = [(len(piece.length), float(piece.length[-1])) for piece in walked or _walk(parts)]
    total = sum(count for count, _ in ends)
    wanted = np.linspace(0.0, ends[-1][1], num_points)[1:-1]
    found, first, before = [], 0, 0.0
    for piece, (count, length) in zip(walked or _walk(parts), ends, strict=True):
        if total <= num_points:
            index = np.arange(count)
        else:
            own = wanted[(wanted > before) & (wanted <= length)]
            both = [end - first for end in (0, total - 1) if first <= end < first + count]
            index = np.unique(np.array([*both, *np.searchsorted(piece.length, own)], np.int64))
        found.append([column[index] for column in piece])
        first, before = first + count, length
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    thresholds, far, frr, _ = columns
    return DetCurve(thresholds, far, frr, len(parts.genuine), len(parts.impostor))


class _Piece(NamedTuple):
    """Consecutive points of the curve, and how far along it on probit axes each lies."""

    thresholds: NDArray[Any]
    far: NDArray[np.float64]
    frr: NDArray[np.float64]
    length: NDArray[np.float64]


def _walk(parts: StaircaseParts) -> Iterator[_Piece]:
    """The whole curve; a sum goes on from one piece to the next as if there were one."""
    genuine, impostor = parts.genuine, parts.impostor
    end = np.asarray(rejecting_threshold(genuine, impostor), common_dtype(genuine, impostor))
    last = Staircase(np.atleast_1d(end), np.array([0]), np.array([len(genuine)]))
    across, up, length = np.empty(0), np.empty(0), np.zeros(1)
    for steps in chain(parts, [last]):
        if not len(steps.values):
            continue
        far, frr = steps.false_accepts / len(impostor), steps.false_rejects / len(genuine)
        across = np.append(across[-1:], _probit(far, len(impostor)))
        up = np.append(up[-1:], _probit(frr, len(genuine)))
        moves = np.hypot(np.diff(across), np.diff(up))
        length = np.cumsum(np.append(length[-1:], moves))[-len(far) :]
        yield _Piece(steps.values, far, frr, length)
