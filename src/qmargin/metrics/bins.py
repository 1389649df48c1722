"""Counts of scores in fine bins, and the exact errors inside a few of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.metrics.checks import Scores, common_dtype, pieces
from qmargin.metrics.curve import Staircase, staircase

FEW_SCORES = 1 << 12  # so many are sorted sooner than bins are filled
HEAVY = 1 << 16  # a bin with so many scores is divided again rather than sorted


def _usual_number(num_scores: int) -> int:
    if num_scores <= FEW_SCORES:
        return 1
    return 1 << 12 if num_scores <= 1 << 17 else 1 << 16


class ScoreBins:
    """Numbers of errors at the edges of bins of equal width, and at every score inside some.

    Which bin a score falls into never decreases with the score, so an edge is a threshold between
    scores, whatever the rounding. Few scores, and scores whose range cannot be divided, share one
    bin.

    Args:
        genuine: Checked genuine scores.
        impostor: Checked impostor scores.
        num_bins: Number of bins; chosen by the number of scores when None.
        rejects_below: Genuine scores that lie below all of these.
        accepts_above: Impostor scores that lie above all of these.

    Attributes:
        false_rejects: Genuine scores below each bin, and below the end, ``[num_bins + 1]``.
        false_accepts: Impostor scores in or above each bin, and above the end, ``[num_bins + 1]``.
    """

    def __init__(
        self,
        genuine: Scores,
        impostor: Scores,
        num_bins: int | None = None,
        *,
        rejects_below: int = 0,
        accepts_above: int = 0,
    ) -> None:
        if num_bins is None:
            num_bins = _usual_number(len(genuine) + len(impostor))
        self.genuine, self.impostor = genuine, impostor
        self._dtype = common_dtype(genuine, impostor)
        self._low, self._high, self._has_infinite = self._finite_range()
        self._scale = self._dtype.type(0.0)
        self.num_bins = 1
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scale = self._dtype.type(num_bins - 1) / (self._high - self._low)
        if 0.0 < scale < np.inf:
            self.num_bins, self._scale = num_bins, scale
        self.false_rejects = rejects_below + self._below(genuine)
        self.false_accepts = accepts_above + len(impostor) - self._below(impostor)

    def _finite_range(self) -> tuple[Any, Any, bool]:
        """Least and largest finite score, and whether there are infinite ones."""
        both = (self.genuine, self.impostor)
        low = min(self._dtype.type(scores.min()) for scores in both if len(scores))
        high = max(self._dtype.type(scores.max()) for scores in both if len(scores))
        if np.isfinite(low) and np.isfinite(high):
            return low, high, False
        low, high = self._dtype.type(np.inf), self._dtype.type(-np.inf)
        for scores in both:
            for piece in pieces(scores):
                finite = piece[np.isfinite(piece)]
                low = min(low, finite.min(initial=np.inf))
                high = max(high, finite.max(initial=-np.inf))
        return self._dtype.type(low), self._dtype.type(high), True

    def _bins(self, piece: Scores) -> NDArray[np.intp]:
        if self.num_bins == 1:
            return np.zeros(len(piece), np.intp)
        piece = piece.astype(self._dtype, copy=False)
        if self._has_infinite:
            piece = np.clip(piece, self._low, self._high)
        offsets = piece - self._low
        offsets *= self._scale  # at most num_bins - 1 and a little rounding
        bins: NDArray[np.intp] = offsets.astype(np.intp)
        return bins

    def _below(self, scores: Scores) -> NDArray[np.int64]:
        """Number of scores below each bin, and of all."""
        below = np.zeros(self.num_bins + 1, np.int64)
        if self.num_bins == 1:
            below[1] = len(scores)
            return below
        for piece in pieces(scores):
            np.add.at(below[1:], self._bins(piece), 1)
        return np.cumsum(below, out=below)

    def sizes(self) -> NDArray[np.int64]:
        """Number of scores of both kinds in each bin."""
        return np.diff(self.false_rejects) - np.diff(self.false_accepts)

    def _num_genuine(self, bins: NDArray[np.intp]) -> NDArray[np.int64]:
        return self.false_rejects[bins + 1] - self.false_rejects[bins]

    def _num_impostors(self, bins: NDArray[np.intp]) -> NDArray[np.int64]:
        return self.false_accepts[bins] - self.false_accepts[bins + 1]

    def zoom(self, index: int) -> "ScoreBins":
        """Bins of the scores of one bin, which has some."""
        wanted = np.array([index])
        return ScoreBins(
            self._gather(self.genuine, wanted, self._num_genuine(wanted).sum()),
            self._gather(self.impostor, wanted, self._num_impostors(wanted).sum()),
            rejects_below=int(self.false_rejects[index]),
            accepts_above=int(self.false_accepts[index + 1]),
        )

    def inside(self, bins: NDArray[np.intp]) -> Staircase:
        """Numbers of errors at every distinct score inside the given bins, ascending."""
        num_genuine, num_impostors = self._num_genuine(bins), self._num_impostors(bins)
        genuine = self._gather(self.genuine, bins, num_genuine.sum())
        impostor = self._gather(self.impostor, bins, num_impostors.sum())
        steps = staircase(genuine, impostor)
        home = np.searchsorted(bins, self._bins(steps.values))
        rejects, accepts = self.false_rejects, self.false_accepts
        # What the staircase counts of the other bins gives way to all that lies outside this one.
        earlier = np.cumsum(num_genuine) - num_genuine
        later = num_impostors.sum() - np.cumsum(num_impostors)
        return Staircase(
            steps.values,
            steps.false_accepts + (accepts[bins + 1] - later)[home],
            steps.false_rejects + (rejects[bins] - earlier)[home],
        )

    def _gather(self, scores: Scores, bins: NDArray[np.intp], num_scores: int) -> Scores:
        if self.num_bins == 1:
            return scores
        wanted = np.zeros(self.num_bins, np.bool_)
        wanted[bins] = True
        found, end = np.empty(num_scores, scores.dtype), 0
        for piece in pieces(scores):
            inside = piece[wanted[self._bins(piece)]]
            found[end : end + len(inside)] = inside
            end += len(inside)
        return found
