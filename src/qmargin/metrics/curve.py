"""DET curves: both error rates at every distinct threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from qmargin.errors import ConfigError
from qmargin.metrics.checks import Floats, Scores, checked_pair, pieces

Points = tuple[NDArray[Any], Floats, Floats]  # thresholds, FAR and FRR
Walk = Iterable[tuple[Points, Floats]]  # points, and how far along the curve each lies
PART = 1 << 22  # scores whose staircase is held at once
SAMPLE = 1 << 16  # scores that decide where parts end


class Staircase(NamedTuple):
    """Errors of accepting the scores at or above each distinct score, lowest first."""

    values: Scores
    false_accepts: NDArray[np.int64]
    false_rejects: NDArray[np.int64]


def staircase(genuine: Scores, impostor: Scores) -> Staircase:
    """Numbers of errors at every distinct score of checked scores."""
    genuine, impostor = np.sort(genuine), np.sort(impostor)
    values = np.concatenate([genuine, impostor])  # in the wider precision of the two
    values.sort(kind="stable")  # which merges two runs that are sorted
    is_new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    values = values[is_new]
    accepts = len(impostor) - np.searchsorted(impostor, values)
    return Staircase(values, accepts, np.searchsorted(genuine, values))


class StaircaseParts:
    """The staircase of any number of scores, in consecutive parts, lowest first.

    Each part takes memory for about ``size`` scores (``PART`` by default), however many there are
    in all; equal scores take no extra memory. All scores are read once for every part, so a few
    large parts are faster than many small ones.
    """

    def __init__(self, genuine: Scores, impostor: Scores, *, size: int | None = None) -> None:
        self.genuine, self.impostor = genuine, impostor
        self._whole: Staircase | None = None  # kept where it is the only part
        size, total = PART if size is None else size, len(genuine) + len(impostor)
        self.is_whole = total <= size
        if not self.is_whole:  # values between parts of half of ``size`` or so, by a sample
            step = max(1, total // SAMPLE)
            sample = np.concatenate([genuine[::step], impostor[::step]])
            sample.sort()
            width = max(1, len(sample) * size // (2 * total))
            self._splits = np.unique(sample[width // 2 :: width])

    def __iter__(self) -> Iterator[Staircase]:
        if self.is_whole:
            if self._whole is None:
                self._whole = staircase(self.genuine, self.impostor)
            yield self._whole
            return
        rejects, accepts = 0, len(self.impostor)
        for low, high in pairwise([None, *self._splits, None]):
            genuine, genuine_low = _between(self.genuine, low, high)
            impostor, impostor_low = _between(self.impostor, low, high)
            if low is not None:
                yield Staircase(np.array([low]), np.array([accepts]), np.array([rejects]))
                rejects, accepts = rejects + genuine_low, accepts - impostor_low
            part = staircase(genuine, impostor)
            left = accepts - len(impostor)
            yield Staircase(part.values, part.false_accepts + left, part.false_rejects + rejects)
            rejects, accepts = rejects + len(genuine), left


def _between(scores: Scores, low: Any, high: Any) -> tuple[Scores, int]:
    """Scores strictly between two bounds, and the number of those at the lower one."""
    found, num_low = [], 0
    for piece in pieces(scores):
        is_inside = np.ones(len(piece), np.bool_) if low is None else piece > low
        if high is not None:
            is_inside &= piece < high
        found.append(piece[is_inside])
        if low is not None:
            num_low += int(np.count_nonzero(piece == low))
    return np.concatenate(found) if found else scores, num_low


def rejecting_threshold(*scores: Scores) -> float:
    """Threshold of the end where nothing is accepted: +inf, or NaN if some score is +inf."""
    largest = max((array.max() for array in scores if len(array)), default=0.0)
    return float("nan") if np.isposinf(largest) else float("inf")


@dataclass(frozen=True, eq=False)
class DetCurve:
    """DET curve: error rates at every distinct threshold, in ascending order.

    The first point accepts everything and the last nothing.

    Attributes:
        thresholds: Distinct scores, ascending, then +inf (NaN, which accepts nothing, if +inf is
            itself a score).
        far: False acceptance rates, from 1 to 0.
        frr: False rejection rates, from 0 to 1.
    """

    thresholds: NDArray[Any]
    far: Floats
    frr: Floats
    num_genuine: int
    num_impostors: int

    def __len__(self) -> int:
        return len(self.far)

    @property
    def tar(self) -> Floats:
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
        sizes = self.num_genuine, self.num_impostors
        walk = list(_walk([(self.thresholds, self.far, self.frr)], *sizes))
        return DetCurve(*_thinned(lambda: walk, num_points), *sizes)


def det_curve(genuine: ArrayLike, impostor: ArrayLike) -> DetCurve:
    """Compute the exact DET curve over all distinct scores.

    Examples:
        >>> curve = det_curve([2.0, 3.0], [1.0, 2.0])
        >>> curve.thresholds, curve.far, curve.frr
        (array([ 1.,  2.,  3., inf]), array([1. , 0.5, 0. , 0. ]), array([0. , 0. , 0.5, 1. ]))
    """
    genuine, impostor = checked_pair(genuine, impostor)
    parts = StaircaseParts(genuine, impostor, size=len(genuine) + len(impostor))
    return DetCurve(*_joined(_points(parts)), len(genuine), len(impostor))


def thin_curve(parts: StaircaseParts, num_points: int) -> DetCurve:
    """``DetCurve.thin`` of a curve that is never held in memory as a whole."""
    sizes = len(parts.genuine), len(parts.impostor)
    kept = list(_walk(_points(parts), *sizes)) if parts.is_whole else None
    return DetCurve(*_thinned(lambda: kept or _walk(_points(parts), *sizes), num_points), *sizes)


def _joined(points: Iterable[Points]) -> Points:
    thresholds, far, frr = map(np.concatenate, zip(*points, strict=True))
    return thresholds, far, frr


def _points(parts: StaircaseParts) -> Iterator[Points]:
    """The points of the staircase, then the one that accepts nothing."""
    genuine, impostor = parts.genuine, parts.impostor
    end = np.asarray(rejecting_threshold(genuine, impostor), np.result_type(genuine, impostor))
    last = Staircase(np.atleast_1d(end), np.array([0]), np.array([len(genuine)]))
    for values, accepts, rejects in chain(parts, [last]):
        if len(values):
            yield values, accepts / len(impostor), rejects / len(genuine)


def _walk(points: Iterable[Points], num_genuine: int, num_impostors: int) -> Walk:
    """Walk along the curve on probit axes, over all pieces."""

    def probit(rates: Floats, num_trials: int) -> Floats:
        margin = 0.5 / num_trials  # rates of 0 and 1 are drawn half a trial inside
        return np.asarray(ndtri(np.clip(rates, margin, 1.0 - margin)))

    across, up, length = np.empty(0), np.empty(0), np.zeros(1)
    for piece in points:
        across = np.append(across[-1:], probit(piece[1], num_impostors))
        up = np.append(up[-1:], probit(piece[2], num_genuine))
        moves = np.hypot(np.diff(across), np.diff(up))
        length = np.cumsum(np.append(length[-1:], moves))[-len(piece[1]) :]
        yield piece, length


def _thinned(walk: Callable[[], Walk], num_points: int) -> Points:
    """At most ``num_points`` points; ``walk`` is called twice."""
    ends = [(len(length), float(length[-1])) for _, length in walk()]
    total = sum(count for count, _ in ends)
    wanted = np.linspace(0.0, ends[-1][1], num_points)[1:-1]
    found, first, before = [], 0, 0.0
    for ((thresholds, far, frr), along), (count, length) in zip(walk(), ends, strict=True):
        index = np.arange(count)
        if total > num_points:
            own = wanted[(wanted > before) & (wanted <= length)]
            both = [end - first for end in (0, total - 1) if first <= end < first + count]
            index = np.unique(np.array([*both, *np.searchsorted(along, own)], np.int64))
        found.append((thresholds[index], far[index], frr[index]))
        first, before = first + count, length
    return _joined(found)
