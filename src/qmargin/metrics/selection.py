"""The largest of many numbers, in memory for about twice as many as are kept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.metrics.checks import PIECE, Scores, pieces, round_down, round_up


class Largest:
    """Keeps the ``num_kept`` largest scores of a stream, whatever its order.

    Scores are kept in float64, which holds every float32; ``dtype`` is the narrowest precision that
    would have been enough.

    Args:
        num_kept: How many to keep.
        capacity: Of the buffer; when it is full, all but the largest are dropped.

    Examples:
        >>> largest = Largest(2)
        >>> largest.update(np.array([3.0, 1.0, 2.0]))
        >>> largest.descending()
        array([3., 2.])
    """

    def __init__(self, num_kept: int, *, capacity: int | None = None) -> None:
        self.num_kept = num_kept
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._buffer: NDArray[np.float64] = np.empty(
            max(2 * num_kept, num_kept + PIECE) if capacity is None else capacity
        )
        self._size = 0
        self._floor: float | None = None  # ``num_kept`` scores are known to be at or above it

    def update(self, scores: Scores) -> None:
        """Take in checked scores."""
        self.dtype = np.result_type(self.dtype, scores.dtype)
        for piece in pieces(scores):
            self._append(self._candidates(piece))

    def merge(self, other: "Largest") -> None:
        """Take in what another has kept."""
        self.dtype = np.result_type(self.dtype, other.dtype)
        self._append(self._candidates(other._buffer[: other._size].copy()))

    def _candidates(self, piece: Scores) -> Scores:
        if self._floor is None:
            return piece
        # A tie with the floor may go: enough scores of that value or above are kept already.
        candidates: Scores = piece[piece > round_down(self._floor, piece.dtype)]
        return candidates

    def _append(self, candidates: Scores) -> None:
        while len(candidates):
            taken = candidates[: len(self._buffer) - self._size]
            self._buffer[self._size : self._size + len(taken)] = taken
            self._size += len(taken)
            candidates = candidates[len(taken) :]
            if self._size == len(self._buffer):
                self._shrink()
                candidates = self._candidates(candidates)

    def _shrink(self) -> None:
        if self._size <= self.num_kept:
            return
        first = self._size - self.num_kept
        filled = self._buffer[: self._size]
        filled.partition(first)
        self._buffer[: self.num_kept] = filled[first:].copy()
        self._size = self.num_kept
        self._floor = float(self._buffer[0])

    def descending(self) -> NDArray[np.float64]:
        """The largest scores of all that came, largest first; all of them if fewer came."""
        self._shrink()
        self._buffer[: self._size].sort()
        return self._buffer[: self._size][::-1].copy()


def largest_scores(scores: Scores, num_kept: int) -> NDArray[np.float64]:
    """The ``num_kept`` largest of checked scores, largest first.

    Examples:
        >>> largest_scores(np.array([3.0, 1.0, 2.0]), 2)
        array([3., 2.])
    """
    capacity = min(max(2 * num_kept, num_kept + PIECE), len(scores))
    largest = Largest(min(num_kept, len(scores)), capacity=capacity)
    largest.update(scores)
    return largest.descending()


def largest_below(scores: Scores, value: float) -> float | None:
    """The largest score strictly below ``value``; None if there is none.

    Examples:
        >>> largest_below(np.array([3.0, 1.0, 2.0]), 3.0)
        2.0
    """
    limit = round_up(value, scores.dtype)
    found = [float(below.max()) for piece in pieces(scores) if len(below := piece[piece < limit])]
    return max(found, default=None)
