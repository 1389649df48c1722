"""Operating points: rates at a threshold, and true acceptance at a limited false acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.checks import (
    PIECE,
    Scores,
    check_open,
    check_rate,
    checked_pair,
    checked_scores,
    count_above,
    count_accepted,
    just_above,
    pieces,
    round_down,
    round_up,
)

Status = Literal["ok", "few", "not measurable"]
ENOUGH_FALSE_ACCEPTS = 30  # below this a rate is uncertain by more than a third
RULES = ("conservative", "nearest", "interpolated")


def _check_some(num_trials: int, name: str) -> None:
    if num_trials < 1:
        raise ProtocolError(f"there are {num_trials} {name}, at least 1 is needed: add trials")


def check_level(level: float) -> None:
    """Refuse a confidence level outside (0, 1)."""
    check_open(level, "level", 0.95)


def num_allowed(far: float, num_impostors: int) -> int:
    """The largest number of false accepts whose rate does not exceed ``far``.

    Rates are compared as they are computed, by division: ``far * num_impostors`` may round to the
    wrong side of a whole number.

    Examples:
        >>> num_allowed(3e-4, 10_000), int(3e-4 * 10_000)
        (3, 2)
    """
    check_rate(far, "far")
    _check_some(num_impostors, "impostor scores")
    allowed = min(num_impostors, int(far * num_impostors) + 1)
    while allowed / num_impostors > far:
        allowed -= 1
    return allowed


def check_measurable(far: float, num_impostors: int) -> int:
    """Number of false accepts that ``far`` allows; ``ProtocolError`` if it allows none."""
    allowed = num_allowed(far, num_impostors)
    if allowed == 0:
        raise ProtocolError(
            f"FAR={far:g} is not measurable with {num_impostors:,} impostor scores: "
            f"ask for at least {1 / num_impostors:.1e} or add impostor trials"
        )
    return allowed


@dataclass(frozen=True)
class Sufficiency:
    """Result of ``sufficiency``: whether a FAR can be measured, and how well.

    ``status`` is ``"ok"``, ``"few"`` (fewer than 30 false accepts are allowed) or
    ``"not measurable"``, and ``message`` says so in words.
    """

    status: Status
    allowed: int
    message: str


def sufficiency(far: float, num_impostors: int) -> Sufficiency:
    """Check whether ``num_impostors`` trials can resolve a FAR.

    Examples:
        >>> sufficiency(1e-5, 15_658_489)
        Sufficiency(status='ok', allowed=156, message='156 false accepts are allowed')
        >>> sufficiency(1e-6, 3_000).message
        'not measurable: 3,000 impostor trials resolve no FAR below 3.3e-04'
    """
    allowed = num_allowed(far, num_impostors)
    if allowed == 0:
        limit = f"{num_impostors:,} impostor trials resolve no FAR below {1 / num_impostors:.1e}"
        return Sufficiency("not measurable", 0, f"not measurable: {limit}")
    noun = "false accept is" if allowed == 1 else "false accepts are"
    if allowed < ENOUGH_FALSE_ACCEPTS:
        message = f"only {allowed} {noun} allowed, fewer than {ENOUGH_FALSE_ACCEPTS}"
        return Sufficiency("few", allowed, message)
    return Sufficiency("ok", allowed, f"{allowed:,} {noun} allowed")


def rule_of_three(num_trials: int) -> float:
    """Upper end of the 95 % interval of a rate when no error was seen: ``3 / n``, at most 1."""
    _check_some(num_trials, "trials")
    return min(1.0, 3.0 / num_trials)


def wilson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion of independent trials.

    Trials that share a subject are not independent: this interval is then too narrow, see
    `bootstrap`.

    Examples:
        >>> low, high = wilson(8, 10)
        >>> round(low, 4), round(high, 4)
        (0.4902, 0.9433)
    """
    check_level(level)
    _check_some(trials, "trials")
    if not 0 <= successes <= trials:
        raise DataError(f"{successes} successes in {trials} trials: give from 0 to {trials}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half  # rounding must not leave the exact ends
    high = 1.0 if successes == trials else centre + half
    return low, high


@dataclass(frozen=True)
class TarAtFar:
    """True acceptance rate where the false acceptance rate is limited.

    Attributes:
        far_target: The requested false acceptance rate.
        tar: Share of the genuine scores that are accepted.
        far: The achieved false acceptance rate.
        false_accepts: Number of impostor scores that are accepted; of the rule ``interpolated``,
            which belongs to no threshold, the number that may be.
        threshold: Accept if and only if ``score >= threshold``. NaN, which accepts nothing, if
            impostors at +inf must be rejected; NaN as well for the rule ``interpolated``.
    """

    far_target: float
    tar: float
    far: float
    false_accepts: int
    threshold: float
    rule: str
    num_genuine: int
    num_impostors: int


@dataclass(frozen=True)
class Rates:
    """Error rates of accepting the scores at or above a threshold."""

    threshold: float
    far: float
    frr: float
    false_accepts: int
    false_rejects: int
    num_genuine: int
    num_impostors: int

    @property
    def tar(self) -> float:
        """Share of the genuine scores that are accepted."""
        return (self.num_genuine - self.false_rejects) / self.num_genuine


def tar_at_far(
    genuine: ArrayLike, impostor: ArrayLike, far: float, rule: str = "conservative"
) -> TarAtFar:
    """True acceptance rate at a false acceptance rate.

    With ``k`` the largest number of false accepts for which ``k / N <= far``, exactly the scores
    above the impostor score number ``k + 1``, counted from the largest, are accepted. Ties at that
    score are all rejected, so the achieved rate never exceeds ``far``.

    Two other rules exist to compare with published tables. ``nearest`` takes the
    point of the ROC curve whose FAR is nearest to ``far``, below or above it (the larger of two
    that are equally near). ``interpolated`` draws a straight line between the points on both sides,
    which no threshold attains.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.
        far: Limit of the false acceptance rate, in (0, 1].
        rule: ``conservative``, ``nearest`` or ``interpolated``.

    Raises:
        ProtocolError: If there are too few impostors for ``far``.

    Examples:
        >>> point = tar_at_far([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], far=0.25)
        >>> round(point.tar, 3), point.far, point.false_accepts, point.threshold
        (1.0, 0.25, 1, 0.30000000000000004)
    """
    return tars_at_fars(genuine, impostor, [far], rule=rule)[0]


def tars_at_fars(
    genuine: ArrayLike, impostor: ArrayLike, fars: Sequence[float], *, rule: str = "conservative"
) -> list[TarAtFar]:
    """Compute ``tar_at_far`` for several rates at once."""
    if rule not in RULES:
        raise ConfigError(f"rule {rule!r} is unknown: choose one of {', '.join(RULES)}")
    genuine, impostor = checked_pair(genuine, impostor)
    num_impostors = len(impostor)
    allowed = [check_measurable(far, num_impostors) for far in fars]
    tail = largest_scores(impostor, max(allowed, default=0) + 1)
    dtype = np.result_type(genuine, impostor)
    points = []
    for far, k in zip(fars, allowed, strict=True):
        point = _tail_point(genuine, tail, far, num_impostors, dtype)
        if rule != "conservative" and k < num_impostors:  # the next point accepts the ties too
            boundary = float(tail[k])
            more = count_accepted(impostor, boundary)
            next_far = more / num_impostors
            if rule == "interpolated":
                next_tar = count_accepted(genuine, boundary) / len(genuine)
                share = (far - point.far) / (next_far - point.far)
                tar = point.tar + share * (next_tar - point.tar)
                point = replace(point, tar=tar, far=far, false_accepts=k, threshold=float("nan"))
            elif abs(next_far - far) <= abs(point.far - far):
                below = largest_below(impostor, boundary)
                point = _point(genuine, far, below, more, num_impostors, dtype)
        points.append(replace(point, rule=rule))
    return points


def _tail_point(
    genuine: Scores, tail: Scores, far: float, num_impostors: int, dtype: np.dtype[Any]
) -> TarAtFar:
    """The conservative operating point.

    ``tail`` has the largest impostor scores, largest first: at least one more than ``far`` allows,
    or all. The threshold is the next number in the precision ``dtype``.
    """
    allowed = check_measurable(far, num_impostors)
    if allowed == num_impostors:
        return _point(genuine, far, None, num_impostors, num_impostors, dtype)
    boundary = float(tail[allowed])
    false_accepts = count_above(tail[:allowed], boundary)
    return _point(genuine, far, boundary, false_accepts, num_impostors, dtype)


def _point(
    genuine: Scores,
    far: float,
    boundary: float | None,
    false_accepts: int,
    num_impostors: int,
    dtype: np.dtype[Any],
) -> TarAtFar:
    """The point that accepts what is above ``boundary``, or everything if that is None."""
    num_accepted = len(genuine) if boundary is None else count_above(genuine, boundary)
    threshold = -np.inf if boundary is None else just_above(boundary, dtype)
    rates = (num_accepted / len(genuine), false_accepts / num_impostors)
    sizes = (len(genuine), num_impostors)
    return TarAtFar(far, *rates, false_accepts, threshold, "conservative", *sizes)


def rates_at(genuine: ArrayLike, impostor: ArrayLike, threshold: float) -> Rates:
    """Error rates at a threshold; scores at or above it are accepted.

    Examples:
        >>> rates = rates_at([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], threshold=0.5)
        >>> rates.far, round(rates.frr, 3)
        (0.25, 0.333)
    """
    genuine, impostor = checked_pair(genuine, impostor)
    threshold = float(threshold)
    accepts = count_accepted(impostor, threshold)
    rejects = len(genuine) - count_accepted(genuine, threshold)
    rates = (accepts / len(impostor), rejects / len(genuine))
    return Rates(threshold, *rates, accepts, rejects, len(genuine), len(impostor))


class Largest:
    """Keeps the ``num_kept`` largest scores of a stream, whatever its order.

    Scores are kept in float64, which holds every float32; ``dtype`` is the narrowest precision that
    would have been enough. When a buffer of ``capacity`` is full, all but the largest are dropped.
    """

    def __init__(self, num_kept: int, *, capacity: int | None = None) -> None:
        self.num_kept = num_kept
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        usual = max(2 * num_kept, num_kept + PIECE)
        self._buffer = np.empty(usual if capacity is None else min(capacity, usual))
        self._size = 0
        self._floor: float | None = None  # ``num_kept`` scores are known to be at or above it

    def update(self, scores: Scores) -> None:
        """Add checked scores."""
        self.dtype = np.result_type(self.dtype, scores.dtype)
        for rest in pieces(scores):
            while len(rest):
                if self._floor is not None:
                    # A tie with the floor may go: enough scores at or above it are kept already.
                    rest = rest[rest > round_down(self._floor, rest.dtype)]
                taken = rest[: len(self._buffer) - self._size]
                self._buffer[self._size : self._size + len(taken)] = taken
                self._size += len(taken)
                rest = rest[len(taken) :]
                if self._size == len(self._buffer):
                    self._shrink()

    def _shrink(self) -> None:
        if self._size <= self.num_kept:
            return
        first = self._size - self.num_kept
        filled = self._buffer[: self._size]
        filled.partition(first)
        self._buffer[: self.num_kept] = filled[first:].copy()
        self._size = self.num_kept
        self._floor = float(self._buffer[0])

    def descending(self) -> Scores:
        """The largest of all scores in ``dtype``, largest first; all of them if they are fewer."""
        self._shrink()
        self._buffer[: self._size].sort()
        return self._buffer[: self._size][::-1].astype(self.dtype)


def largest_scores(scores: Scores, num_kept: int) -> Scores:
    """The ``num_kept`` largest of checked scores, largest first."""
    largest = Largest(min(num_kept, len(scores)), capacity=len(scores))
    largest.update(scores)
    return largest.descending()


def largest_below(scores: Scores, value: float) -> float | None:
    """The largest score strictly below ``value``; None if there is none."""
    limit = round_up(value, scores.dtype)
    found = [float(below.max()) for piece in pieces(scores) if len(below := piece[piece < limit])]
    return max(found, default=None)


class ImpostorTail:
    """The largest impostor scores, which are enough for TAR at FAR.

    Scores come in any order and in any chunks; tails of several processes or files are merged. The
    result is exactly that of :func:`qmargin.metrics.tar_at_far` on all the scores at once, in
    memory for about twice the number of false accepts that ``max_far`` allows.

    Args:
        max_far: The largest false acceptance rate that will be requested.
        num_impostors: Number of all impostor scores, over all processes and files.

    Examples:
        >>> tail, other = ImpostorTail(0.5, num_impostors=4), ImpostorTail(0.5, num_impostors=4)
        >>> tail.update([0.1, 0.5])
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
        """Add impostor scores; ``ProtocolError`` if more come than were announced."""
        scores = checked_scores(scores, "impostor", may_be_empty=True)
        self._count(len(scores))
        if len(scores):
            self._largest.update(scores)

    def merge(self, other: ImpostorTail) -> None:
        """Add all scores of another tail with the same rates and sizes."""
        if (other.max_far, other.num_impostors) != (self.max_far, self.num_impostors):
            raise ConfigError(
                f"a tail of max_far={other.max_far:g} and num_impostors={other.num_impostors} "
                f"cannot join one of {self.max_far:g} and {self.num_impostors}: make them alike"
            )
        self._count(other.num_seen)
        self._largest.update(other._largest.descending())

    def _count(self, num_more: int) -> None:
        if (seen := self.num_seen + num_more) > self.num_impostors:
            raise ProtocolError(
                f"{seen:,} impostor scores came but num_impostors={self.num_impostors}: raise it"
            )
        self.num_seen = seen

    def threshold(self, far: float) -> float:
        """The least threshold whose false acceptance rate does not exceed ``far``."""
        allowed = self._check_complete(far)
        if allowed == self.num_impostors:
            return -np.inf
        return just_above(float(self._largest.descending()[allowed]), self._largest.dtype)

    def tar_at_far(self, genuine: ArrayLike, far: float) -> TarAtFar:
        """True acceptance rate of genuine scores at ``far``, by the conservative rule.

        A ``far`` above ``max_far`` is a ``ConfigError``, a missing score a ``ProtocolError``.
        """
        self._check_complete(far)
        genuine = checked_scores(genuine, "genuine")
        dtype = np.result_type(genuine, self._largest.dtype)
        return _tail_point(genuine, self._largest.descending(), far, self.num_impostors, dtype)

    def _check_complete(self, far: float) -> int:
        """Number of false accepts that ``far`` allows; raise if the tail is too short for it."""
        if far > self.max_far:
            raise ConfigError(
                f"far={far:g} is above max_far={self.max_far:g} of the tail: raise max_far"
            )
        if (seen := self.num_seen) != self.num_impostors:
            raise ProtocolError(
                f"{seen:,} of {self.num_impostors:,} impostor scores: pass the rest"
            )
        return check_measurable(far, self.num_impostors)

    def state_dict(self) -> dict[str, NDArray[np.generic]]:
        """Everything to save or send, as arrays; ``from_state_dict`` restores the tail."""
        numbers = {name: getattr(self, name) for name in ("max_far", "num_impostors", "num_seen")}
        arrays = {name: np.array(value) for name, value in numbers.items()}
        return {**arrays, "scores": self._largest.descending()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, NDArray[np.generic]]) -> ImpostorTail:
        """Restore a tail from ``state_dict``."""
        if missing := {"max_far", "num_impostors", "num_seen", "scores"} - set(state):
            raise DataError(f"the state of a tail lacks {sorted(missing)}: pass a whole state_dict")
        tail = cls(float(state["max_far"]), int(state["num_impostors"]))
        tail._largest.update(checked_scores(state["scores"], "impostor", may_be_empty=True))
        tail._count(int(state["num_seen"]))
        return tail
