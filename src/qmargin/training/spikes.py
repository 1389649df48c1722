"""Loss spikes: when a run has to go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

MOST_ROLLBACKS = 3
"""Roll-backs to one checkpoint; a loss that rises again after so many is no accident of the data"""


class SpikeWatch:
    """Compares each loss with the median of those before it.

    Args:
        factor: A loss above this multiple of the median is a spike; None to see none.
        window: Losses that make the median; until there are as many, nothing is a spike.
        losses: Those before, for a run that goes on.

    Examples:
        >>> watch = SpikeWatch(2.0, window=3)
        >>> [watch.is_spike(loss) for loss in (9.0, 1.0, 1.1, 0.9, 2.5, 1.0)]
        [False, False, False, False, True, False]
    """

    def __init__(self, factor: float | None, window: int, losses: Iterable[float] = ()) -> None:
        self.factor = factor
        self._losses = deque(losses, maxlen=window)

    @property
    def losses(self) -> list[float]:
        """What a checkpoint needs to keep."""
        return list(self._losses)

    def is_spike(self, loss: float) -> bool:
        """Whether the loss of a step is a spike; if it is not, it counts from now on."""
        if self.factor is None:
            return False
        is_full = len(self._losses) == self._losses.maxlen
        if is_full and loss > self.factor * median(self._losses):
            return True
        self._losses.append(loss)
        return False

    def forget(self) -> None:
        """Start over, after a roll-back."""
        self._losses.clear()
