"""Exact operating points from a stream of impostors too long to keep."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.checks import checked_scores, just_above
from qmargin.metrics.operating import TarAtFar, check_measurable, tail_point
from qmargin.metrics.selection import Largest


class ImpostorTail:
    """The largest impostor scores: all that TAR at FAR needs to know of them.

    Scores come in any order and in any chunks; tails of several processes or files are merged. The
    result is exactly that of :func:`qmargin.metrics.tar_at_far` on all the scores at once, in
    memory for about twice the number of false accepts that ``max_far`` allows.

    Args:
        max_far: The largest false acceptance rate that will be asked for.
        num_impostors: Number of all impostor scores, over all processes and files.

    Raises:
        ProtocolError: If ``max_far`` allows no false accept.

    Examples:
        >>> tail = ImpostorTail(max_far=0.5, num_impostors=4)
        >>> tail.update([0.1, 0.5])
        >>> other = ImpostorTail(max_far=0.5, num_impostors=4)
        >>> other.update([0.3, 0.2])
        >>> tail.merge(other)
        >>> tail.tar_at_far([0.9, 0.4], far=0.25).tar
        1.0
    """

    def __init__(self, max_far: float, num_impostors: int) -> None:
        self.max_far = float(max_far)
        self.num_impostors = int(num_impostors)
        self.num_seen = 0
        allowed = check_measurable(self.max_far, self.num_impostors)
        self._largest = Largest(min(allowed + 1, self.num_impostors))

    def update(self, scores: ArrayLike) -> None:
        """Take in more impostor scores.

        Raises:
            DataError: If a score is NaN; its index is that in this call.
            ProtocolError: If more scores come than were announced.
        """
        scores = checked_scores(scores, "impostor", may_be_empty=True)
        self._count(len(scores))
        if len(scores):
            self._largest.update(scores)

    def merge(self, other: ImpostorTail) -> None:
        """Take in all that another tail, of the same rates and sizes, has seen.

        Raises:
            ConfigError: If the tails were made for different ``max_far`` or ``num_impostors``.
            ProtocolError: If together they have seen more scores than were announced.
        """
        if (other.max_far, other.num_impostors) != (self.max_far, self.num_impostors):
            raise ConfigError(
                f"a tail of max_far={other.max_far:g} and num_impostors={other.num_impostors} "
                f"cannot join one of {self.max_far:g} and {self.num_impostors}: make them alike"
            )
        self._count(other.num_seen)
        self._largest.merge(other._largest)

    def _count(self, num_more: int) -> None:
        if self.num_seen + num_more > self.num_impostors:
            raise ProtocolError(
                f"{self.num_seen + num_more:,} impostor scores came but num_impostors is "
                f"{self.num_impostors:,}: pass the number of all of them"
            )
        self.num_seen += num_more

    def threshold(self, far: float) -> float:
        """The least threshold whose false acceptance rate does not exceed ``far``."""
        allowed = self._check_complete(far)
        if allowed == self.num_impostors:
            return -np.inf
        return just_above(float(self._largest.descending()[allowed]), self._largest.dtype)

    def tar_at_far(self, genuine: ArrayLike, far: float) -> TarAtFar:
        """True acceptance rate of genuine scores at ``far``, by the conservative rule.

        Raises:
            ConfigError: If ``far`` is above ``max_far``.
            ProtocolError: If not all impostor scores have come yet, or ``far`` is not measurable.
        """
        self._check_complete(far)
        genuine = checked_scores(genuine, "genuine")
        return tail_point(
            genuine,
            self._largest.descending(),
            far,
            num_impostors=self.num_impostors,
            dtype=np.result_type(genuine, self._largest.dtype),
        )

    def _check_complete(self, far: float) -> int:
        """Number of false accepts that ``far`` allows, if it can be answered."""
        if far > self.max_far:
            raise ConfigError(
                f"far={far:g} is above max_far={self.max_far:g}: make the tail with a larger one"
            )
        if self.num_seen != self.num_impostors:
            raise ProtocolError(
                f"{self.num_seen:,} of {self.num_impostors:,} impostor scores came: pass the rest"
            )
        return check_measurable(far, self.num_impostors)

    def state_dict(self) -> dict[str, NDArray[np.generic]]:
        """Everything to save or send, as arrays; :meth:`from_state_dict` makes the tail again."""
        return {
            "max_far": np.array(self.max_far),
            "num_impostors": np.array(self.num_impostors),
            "num_seen": np.array(self.num_seen),
            "scores": self._largest.descending().astype(self._largest.dtype),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, NDArray[np.generic]]) -> ImpostorTail:
        """The tail that :meth:`state_dict` described.

        Examples:
            >>> tail = ImpostorTail(max_far=0.5, num_impostors=2)
            >>> tail.update([2.0, 1.0])
            >>> ImpostorTail.from_state_dict(tail.state_dict()).threshold(0.5)
            1.0000000000000002
        """
        if missing := {"max_far", "num_impostors", "num_seen", "scores"} - set(state):
            raise DataError(f"the state of a tail lacks {sorted(missing)}: pass a whole state_dict")
        tail = cls(float(state["max_far"]), int(state["num_impostors"]))
        tail._largest.update(checked_scores(state["scores"], "impostor", may_be_empty=True))
        tail._count(int(state["num_seen"]))
        return tail
