"""How many impostor pairs score above a threshold: from counts of bins, exact where bins are open.

Pairs in open bins are scored exactly. A product lies at most ``slack`` bins from its exact score,
so at a threshold with open bins on both sides as far as that, pairs in closed bins are certainly
above or certainly below it.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from qmargin.evaluation.pair_blocks import NUM_BINS, Bins, Ints
from qmargin.evaluation.pair_scores import Floats

MAX_HELD = 1 << 23  # exact scores held before equal ones are counted together


class ImpostorCounts:
    """Impostor pairs by bin, and by exact score in the bins that were opened.

    Args:
        counts: Pairs in every bin, ``[NUM_BINS]``.
        bins: The bins.
    """

    def __init__(self, counts: Ints, bins: Bins) -> None:
        self.counts, self.bins = counts, bins
        self.in_or_above = _from_the_end(counts)  # [NUM_BINS + 1]
        self.is_open = np.zeros(NUM_BINS, dtype=np.bool_)
        self._new: list[Floats] = []
        self._num_new = 0
        self._max_held = MAX_HELD
        self._values: Floats = np.empty(0)
        self._times: Ints = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.in_or_above[0])

    def open_bins(self, low: NDArray[np.int64] | int, high: NDArray[np.int64] | int) -> None:
        """Open bins from ``low`` up to, but not including, ``high``, and the slack around them."""
        steps = np.zeros(NUM_BINS + 1, dtype=np.int64)
        np.add.at(steps, np.clip(np.subtract(low, self.bins.slack), 0, NUM_BINS), 1)
        np.add.at(steps, np.clip(np.add(high, self.bins.slack), 0, NUM_BINS), -1)
        self.is_open |= np.cumsum(steps)[:-1] > 0

    def open_rank(self, rank: int) -> int:
        """Open what it takes to know the score of this rank, 1 for the largest.

        Returns:
            A bin below which no score of this rank or a smaller one has its product.
        """
        place, slack = self._place(rank), self.bins.slack
        self.open_bins(place - slack, place + 1 + slack)  # where the exact score of the rank is
        return place - 2 * slack

    def _place(self, rank: int) -> int:
        """Bin of the product of this rank."""
        return NUM_BINS - int(np.searchsorted(self.in_or_above[::-1], rank))

    def update(self, scores: Floats) -> None:
        """Take in exact scores of pairs in open bins."""
        self._new.append(scores)
        self._num_new += len(scores)
        if self._num_new >= self._max_held:
            self.settle()
            self._max_held = max(MAX_HELD, len(self._values))  # not too often if all differ

    def settle(self) -> None:
        """Count equal scores together; to be called before the first question."""
        values = np.concatenate([self._values, *self._new])
        times = np.concatenate([self._times, np.ones(self._num_new, dtype=np.int64)])
        order = np.argsort(values)
        values, times = values[order], times[order]
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        self._values = values[starts]
        self._times = np.add.reduceat(times, starts) if len(starts) else times
        self._new, self._num_new = [], 0
        self._at_or_above = _from_the_end(self._times)
        self._closed_above = _from_the_end(np.where(self.is_open, 0, self.counts))

    def score_at(self, rank: int) -> float:
        """The exact score of a rank that was opened."""
        rank -= int(self._closed_above[self._place(rank)])
        position = len(self._values) - int(np.searchsorted(self._at_or_above[::-1], rank))
        return float(self._values[position])

    def scores_between(self, low: int, high: int) -> Floats:
        """Distinct exact scores in open bins from ``low`` up to, but not including, ``high``."""
        places = self.bins.of_scores(self._values)
        return self._values[bisect_left(places, low) : bisect_left(places, high)]

    def num_at_least(self, thresholds: Floats) -> Ints:
        """Pairs that score at least each threshold; the bins around it are open."""
        return self._num_from(thresholds, np.searchsorted(self._values, thresholds, side="left"))

    def num_above(self, thresholds: Floats) -> Ints:
        """Pairs that score more than each threshold; the bins around it are open."""
        return self._num_from(thresholds, np.searchsorted(self._values, thresholds, side="right"))

    def _num_from(self, thresholds: Floats, positions: NDArray[np.intp]) -> Ints:
        places, slack = self.bins.of_scores(thresholds), self.bins.slack
        first = self._closed_above[np.clip(places - slack, 0, NUM_BINS)]
        last = self._closed_above[np.clip(places + 1 + slack, 0, NUM_BINS)]
        assert np.array_equal(first, last), "a threshold has pairs in closed bins around it"
        return self._at_or_above[positions] + last


def _from_the_end(counts: Ints) -> Ints:
    """Sum from each place to the end, and zero."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts[::-1], out=sums[1:])
    return sums[::-1].copy()
