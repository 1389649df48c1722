"""Operating points: rates at a threshold, and true acceptance at a limited false acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, ProtocolError
from qmargin.metrics.checks import (
    Scores,
    check_rate,
    checked_scores,
    common_dtype,
    count_above,
    count_accepted,
    just_above,
)
from qmargin.metrics.selection import largest_below, largest_scores

RULES = ("conservative", "nearest", "interpolated")


@dataclass(frozen=True)
class TarAtFar:
    """True acceptance rate where the false acceptance rate is limited.

    Attributes:
        far_target: The false acceptance rate that was asked for.
        tar: Share of the genuine scores that are accepted.
        far: The false acceptance rate that is achieved.
        false_accepts: Number of impostor scores that are accepted; of the rule ``interpolated``,
            which belongs to no threshold, the number that may be.
        threshold: Accept if and only if ``score >= threshold``. NaN, which accepts nothing, if
            impostors at +inf must be rejected; NaN as well for the rule ``interpolated``.
        rule: ``conservative``, ``nearest`` or ``interpolated``.
        num_genuine: Number of genuine scores.
        num_impostors: Number of impostor scores.
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
    """Error rates at a given threshold.

    Attributes:
        threshold: Accept if and only if ``score >= threshold``.
        far: Share of the impostor scores that are accepted.
        frr: Share of the genuine scores that are rejected.
        false_accepts: Number of impostor scores that are accepted.
        false_rejects: Number of genuine scores that are rejected.
        num_genuine: Number of genuine scores.
        num_impostors: Number of impostor scores.
    """

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


def num_allowed(far: float, num_impostors: int) -> int:
    """The largest number of false accepts whose rate does not exceed ``far``.

    Rates are compared as they are computed, by division: ``far * num_impostors`` may round to the
    wrong side of a whole number.

    Examples:
        >>> num_allowed(3e-4, 10_000), int(3e-4 * 10_000)
        (3, 2)
    """
    check_rate(far, "far")
    if num_impostors < 1:
        raise ProtocolError(
            f"{num_impostors} impostor scores cannot resolve a rate: pass at least 1"
        )
    allowed = min(num_impostors, int(far * num_impostors) + 1)
    while allowed / num_impostors > far:
        allowed -= 1
    return allowed


def check_measurable(far: float, num_impostors: int) -> int:
    """Number of false accepts that ``far`` allows, at least one.

    Raises:
        ProtocolError: If it allows none, so that the rate cannot be measured.

    Examples:
        >>> check_measurable(1e-3, 3_000)
        3
    """
    allowed = num_allowed(far, num_impostors)
    if allowed == 0:
        raise ProtocolError(
            f"FAR={far:g} is not measurable with {num_impostors:,} impostor scores: "
            f"ask for at least {1 / num_impostors:.1e} or add impostor trials"
        )
    return allowed


def tar_at_far(
    genuine: ArrayLike, impostor: ArrayLike, far: float, rule: str = "conservative"
) -> TarAtFar:
    """True acceptance rate at a false acceptance rate.

    With ``k`` the largest number of false accepts for which ``k / N <= far``, exactly the scores
    above the impostor score number ``k + 1``, counted from the largest, are accepted. Ties at that
    score are all rejected, so the achieved rate never exceeds ``far``.

    Two other rules are there to compare with tables that were made by them. ``nearest`` takes the
    point of the ROC curve whose FAR is nearest to ``far``, below or above it (the larger of two
    that are equally near). ``interpolated`` draws a straight line between the points on both sides,
    which no threshold attains.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.
        far: Limit of the false acceptance rate, in (0, 1].
        rule: ``conservative``, ``nearest`` or ``interpolated``.

    Raises:
        ProtocolError: If there are no scores, or too few impostors for ``far``.
        DataError: If a score is NaN.

    Examples:
        >>> point = tar_at_far([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], far=0.25)
        >>> round(point.tar, 3), point.far, point.false_accepts, point.threshold
        (1.0, 0.25, 1, 0.30000000000000004)
    """
    return tars_at_fars(genuine, impostor, [far], rule=rule)[0]


def tars_at_fars(
    genuine: ArrayLike, impostor: ArrayLike, fars: Sequence[float], *, rule: str = "conservative"
) -> list[TarAtFar]:
    """:func:`tar_at_far` for several rates, which share one search for the largest impostors.

    Examples:
        >>> [point.tar for point in tars_at_fars([4.0, 2.0], [3.0, 1.0], [0.5, 1.0])]
        [1.0, 1.0]
    """
    if rule not in RULES:
        raise ConfigError(f"rule {rule!r} is unknown: choose one of {', '.join(RULES)}")
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    allowed = [check_measurable(far, len(impostor)) for far in fars]
    tail = largest_scores(impostor, max(allowed, default=0) + 1)
    dtype = common_dtype(genuine, impostor)
    points = []
    for far, k in zip(fars, allowed, strict=True):
        point = tail_point(genuine, tail, far, num_impostors=len(impostor), dtype=dtype)
        if rule != "conservative" and k < len(impostor):
            other = _nearest if rule == "nearest" else _interpolated
            point = other(point, genuine, impostor, float(tail[k]))
        points.append(replace(point, rule=rule))
    return points


def tail_point(
    genuine: Scores,
    tail: NDArray[np.float64],
    far: float,
    *,
    num_impostors: int,
    dtype: np.dtype[Any],
) -> TarAtFar:
    """The conservative operating point, from the largest impostors.

    Args:
        genuine: Checked genuine scores.
        tail: The largest impostor scores, largest first: at least one more than ``far`` allows, or
            all.
        far: Limit of the false acceptance rate.
        num_impostors: Number of all impostor scores.
        dtype: Precision of the scores, in which the threshold is the next number.

    Examples:
        >>> tail = np.array([3.0, 2.0])
        >>> point = tail_point(
        ...     np.array([4.0, 2.5]), tail, 0.25, num_impostors=4, dtype=np.dtype(np.float64)
        ... )
        >>> point.tar, point.far
        (1.0, 0.25)
    """
    allowed = check_measurable(far, num_impostors)
    if allowed == num_impostors:
        return _point(genuine, far, None, num_impostors, num_impostors, -np.inf)
    boundary = float(tail[allowed])
    false_accepts = count_above(tail[:allowed], boundary)
    threshold = just_above(boundary, dtype)
    return _point(genuine, far, boundary, false_accepts, num_impostors, threshold)


def _point(
    genuine: Scores,
    far: float,
    boundary: float | None,
    false_accepts: int,
    num_impostors: int,
    threshold: float,
) -> TarAtFar:
    """The point that accepts what is above ``boundary``, or everything if that is None."""
    num_accepted = len(genuine) if boundary is None else count_above(genuine, boundary)
    return TarAtFar(
        far_target=far,
        tar=num_accepted / len(genuine),
        far=false_accepts / num_impostors,
        false_accepts=false_accepts,
        threshold=threshold,
        rule="conservative",
        num_genuine=len(genuine),
        num_impostors=num_impostors,
    )


def _nearest(point: TarAtFar, genuine: Scores, impostor: Scores, boundary: float) -> TarAtFar:
    """The given point, or the next one with more false accepts if its FAR is as near or nearer."""
    more = count_accepted(impostor, boundary)
    far = point.far_target
    if abs(more / len(impostor) - far) > abs(point.far - far):
        return point
    below = largest_below(impostor, boundary)
    threshold = -np.inf if below is None else just_above(below, common_dtype(genuine, impostor))
    return _point(genuine, far, below, more, len(impostor), threshold)


def _interpolated(point: TarAtFar, genuine: Scores, impostor: Scores, boundary: float) -> TarAtFar:
    """The straight line from the given point to the one that accepts the ties with ``boundary``."""
    far = point.far_target
    next_far = count_accepted(impostor, boundary) / len(impostor)
    next_tar = count_accepted(genuine, boundary) / len(genuine)
    share = (far - point.far) / (next_far - point.far)
    return replace(
        point,
        tar=point.tar + share * (next_tar - point.tar),
        far=far,
        false_accepts=num_allowed(far, len(impostor)),
        threshold=float("nan"),
    )


def rates_at(genuine: ArrayLike, impostor: ArrayLike, threshold: float) -> Rates:
    """Error rates of accepting the scores at or above a threshold.

    Examples:
        >>> rates = rates_at([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], threshold=0.5)
        >>> rates.far, round(rates.frr, 3)
        (0.25, 0.333)
    """
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    threshold = float(threshold)
    false_accepts = count_accepted(impostor, threshold)
    false_rejects = len(genuine) - count_accepted(genuine, threshold)
    return Rates(
        threshold=threshold,
        far=false_accepts / len(impostor),
        frr=false_rejects / len(genuine),
        false_accepts=false_accepts,
        false_rejects=false_rejects,
        num_genuine=len(genuine),
        num_impostors=len(impostor),
    )
