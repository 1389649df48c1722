"""Scores of single pairs in float64, which all-pairs results are made of: cosines, or AS-norm.

A pair's score depends on its two rows alone: not on the order of the two, on which pairs are scored
together, or on the device that found the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError, ShapeError
from qmargin.metrics.normalise import Moments

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
CHUNK_VALUES = 1 << 15  # numbers of one side that are multiplied at a time: they stay in the cache


class ScoredPair(NamedTuple):
    """Two rows of the embeddings, the smaller first, and their score."""

    first: int
    second: int
    score: float


class PairNorm(NamedTuple):
    """What takes a pair's cosine to its AS-norm: ``c (gain_i + gain_j) - (shift_i + shift_j)``.

    Attributes:
        gain: Of each row, ``[n]``: half of one over the deviation of its cohort scores.
        shift: Their mean times that.
    """

    gain: NDArray[np.floating[Any]]
    shift: NDArray[np.floating[Any]]

    @classmethod
    def of(cls, moments: Moments) -> PairNorm:
        """From mean and deviation of each row's cohort scores."""
        gain = 0.5 / moments.std
        return cls(gain, gain * moments.mean)

    def apply(self, cosines: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> None:
        """Make cosines of rows their AS-norm, in place; rows are any two arrays that broadcast."""
        cosines *= self.gain[first] + self.gain[second]
        cosines -= self.shift[first] + self.shift[second]


def unit_rows(embeddings: Any) -> Floats:
    """Rows of length one in float64, ``[n, d]``, from an array or a tensor on any device."""
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().double().cpu().numpy()
    rows = np.array(embeddings, dtype=np.float64, order="C")
    if rows.ndim != 2 or rows.shape[0] < 2 or rows.shape[1] < 1:
        raise ShapeError(
            f"embeddings have shape {rows.shape}, they must be [n, d] with n >= 2 and d >= 1: "
            f"give one row per sample"
        )
    _refuse(np.logical_not(np.isfinite(rows).all(axis=1)), "is not finite")
    peaks = np.abs(rows).max(axis=1, keepdims=True)
    _refuse(peaks[:, 0] == 0.0, "is zero and has no direction")
    rows /= peaks  # squares of the result neither overflow nor vanish
    rows /= np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return rows


def _refuse(is_wrong: NDArray[np.bool_], what: str) -> None:
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        raise DataError(f"embedding {row} {what}: leave the sample out or embed it again")


def exact_scores(unit: Floats, first: Rows, second: Rows, norm: PairNorm | None = None) -> Floats:
    """Cosines of pairs of rows, or their AS-norm, in float64 and in a fixed order of summation.

    Examples:
        >>> unit = unit_rows([[3.0, 4.0], [4.0, 3.0]])
        >>> exact_scores(unit, np.array([0]), np.array([1]))
        array([0.96])
    """
    scores = np.empty(len(first))
    step = max(1, CHUNK_VALUES // unit.shape[1])
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        # a sum along rows is pairwise in each row; a matrix product may sum in any order
        scores[part] = (unit[first[part]] * unit[second[part]]).sum(axis=1)
    if norm is not None:
        norm.apply(scores, first, second)
    return scores


def genuine_pairs(
    groups: NDArray[np.intp], max_pairs: int = 1 << 20
) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of rows of the same group, in portions; ``groups`` is sorted.

    Examples:
        >>> for first, second in genuine_pairs(np.array([0, 0, 0, 1, 2, 2])):
        ...     print(first, second)
        [0 1 4 0] [1 2 5 2]
    """
    firsts, seconds, num_held = [], [], 0
    first = np.arange(len(groups))
    for distance in range(1, len(groups)):
        first = first[: np.searchsorted(first, len(groups) - distance)]
        first = first[groups[first] == groups[first + distance]]
        if not len(first):
            break
        firsts.append(first)
        seconds.append(first + distance)
        num_held += len(first)
        if num_held >= max_pairs:
            yield np.concatenate(firsts), np.concatenate(seconds)
            firsts, seconds, num_held = [], [], 0
    if firsts:
        yield np.concatenate(firsts), np.concatenate(seconds)


class Hardest:
    """The pairs of a stream with the largest keys; ties go to the smaller rows.

    Args:
        num_kept: How many to keep.
        sign: 1 to keep the largest scores, -1 the smallest.
    """

    def __init__(self, num_kept: int, *, sign: int) -> None:
        self.num_kept = num_kept
        self.sign = sign
        self._scores: Floats = np.empty(0)
        self._rows: NDArray[np.intp] = np.empty((2, 0), dtype=np.intp)

    def update(self, first: Rows, second: Rows, scores: Floats) -> None:
        """Take in pairs of rows as the caller numbers them."""
        if len(self._scores) == self.num_kept:  # most pairs of a portion are far from hard
            worst = self._scores[-1] if self.num_kept else np.inf * self.sign
            near = np.flatnonzero(self.sign * scores >= self.sign * worst)
            first, second, scores = first[near], second[near], scores[near]
        pairs = np.stack([np.minimum(first, second), np.maximum(first, second)])
        scores = np.concatenate([self._scores, scores])
        rows = np.concatenate([self._rows, pairs], axis=1)
        order = np.lexsort([rows[1], rows[0], -self.sign * scores])[: self.num_kept]
        self._scores, self._rows = scores[order], rows[:, order]

    def pairs(self) -> tuple[ScoredPair, ...]:
        """Hardest first."""
        columns = (*self._rows.tolist(), self._scores.tolist())
        return tuple(ScoredPair(*pair) for pair in zip(*columns, strict=True))
