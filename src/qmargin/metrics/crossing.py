"""Equal error rate and least detection cost: exact, from one count and one look at a few scores."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError
from qmargin.metrics.bins import HEAVY, ScoreBins
from qmargin.metrics.checks import checked_scores, common_dtype, just_above
from qmargin.metrics.curve import rejecting_threshold


@dataclass(frozen=True)
class Eer:
    """Equal error rate.

    Attributes:
        eer: The common value of FAR and FRR on the polyline over the distinct scores and both ends.
        threshold: Of the end of the crossing step at which the two rates are nearer to each other.
    """

    eer: float
    threshold: float


@dataclass(frozen=True)
class MinDcf:
    """Least normalised detection cost over all thresholds.

    Attributes:
        min_dcf: The cost, divided by that of the better of accepting or rejecting everything: at
            most 1.
        threshold: The lowest score at which it is attained; +inf for rejecting everything (NaN,
            which accepts nothing, if +inf is itself a score).
        far: False acceptance rate there.
        frr: False rejection rate there.
        p_target: Prior probability of a genuine trial.
    """

    min_dcf: float
    threshold: float
    far: float
    frr: float
    p_target: float


@dataclass(frozen=True)
class Costs:
    """Weights of the two error rates in the normalised detection cost.

    Examples:
        >>> Costs.of(p_target=0.01)
        Costs(miss=1.0, false_accept=99.0)
    """

    miss: float
    false_accept: float

    @classmethod
    def of(cls, p_target: float, c_miss: float = 1.0, c_fa: float = 1.0) -> "Costs":
        """Weights of a prior and the costs of the two errors.

        Raises:
            ConfigError: If the prior is not inside (0, 1) or a cost is not positive and finite.
        """
        if not 0.0 < p_target < 1.0:
            raise ConfigError(f"p_target={p_target:g} is not inside (0, 1): pass such as 0.01")
        for name, cost in (("c_miss", c_miss), ("c_fa", c_fa)):
            if not 0.0 < cost < np.inf:
                raise ConfigError(f"{name}={cost:g} is not positive and finite: pass such as 1")
        miss, false_accept = p_target * c_miss, (1.0 - p_target) * c_fa
        least = min(miss, false_accept)
        return cls(miss / least, false_accept / least)

    def total(
        self, frr: NDArray[np.float64] | float, far: NDArray[np.float64] | float
    ) -> NDArray[np.float64]:
        """Normalised cost; rounding never reverses the order of rates."""
        cost = np.multiply(frr, self.miss)
        cost += np.multiply(far, self.false_accept)
        return np.asarray(cost)


def eer(genuine: ArrayLike, impostor: ArrayLike) -> Eer:
    """Equal error rate: where the polyline of FAR and FRR over distinct scores meets the diagonal.

    The value is the exact ratio of two whole numbers, rounded once.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.

    Raises:
        ProtocolError: If there are no genuine or no impostor scores.
        DataError: If a score is NaN.

    Examples:
        >>> eer([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1]).eer
        0.25
        >>> eer([1.0, 1.0], [1.0]).eer
        0.5
    """
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    return eer_of_bins(ScoreBins(genuine, impostor))


def eer_of_bins(bins: ScoreBins) -> Eer:
    """:func:`eer` of scores that are counted already."""
    num_genuine, num_impostors = len(bins.genuine), len(bins.impostor)
    dtype = common_dtype(bins.genuine, bins.impostor)

    def excess(rejects: Any, accepts: Any) -> int:
        """FRR - FAR over the common denominator: whole, so that the crossing is never missed."""
        return int(rejects) * num_impostors - int(accepts) * num_genuine

    def first_crossed(rejects: NDArray[np.int64], accepts: NDArray[np.int64]) -> int:
        return _first(len(rejects), lambda index: excess(rejects[index], accepts[index]) >= 0)

    index = first_crossed(bins.false_rejects, bins.false_accepts) - 1
    while bins.num_bins > 1 and bins.sizes()[index] > HEAVY:
        bins = bins.zoom(index)
        index = first_crossed(bins.false_rejects, bins.false_accepts) - 1
    steps = bins.inside(np.array([index]))
    rejects = np.append(steps.false_rejects, bins.false_rejects[index + 1])
    accepts = np.append(steps.false_accepts, bins.false_accepts[index + 1])
    after = first_crossed(rejects, accepts)
    before = after - 1  # the step rejects exactly the scores of this value
    short = -excess(rejects[before], accepts[before])
    over = excess(rejects[after], accepts[after])
    crossing = int(rejects[before]) * over + int(rejects[after]) * short
    value = float(steps.values[before])
    return Eer(
        float(Fraction(crossing, (over + short) * num_genuine)),
        just_above(value, dtype) if over < short else value,
    )


def _first(length: int, is_true: Callable[[int], bool]) -> int:
    """Least index at which a condition, false first and true from there on, is true."""
    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def min_dcf(
    genuine: ArrayLike,
    impostor: ArrayLike,
    p_target: float = 0.01,
    *,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
) -> MinDcf:
    """Least detection cost over all thresholds, including those that accept all and nothing.

    Args:
        genuine: Scores of trials of one subject.
        impostor: Scores of trials of two subjects.
        p_target: Prior probability of a genuine trial.
        c_miss: Cost of a false rejection.
        c_fa: Cost of a false acceptance.

    Raises:
        ConfigError: If the prior is not inside (0, 1) or a cost is not positive.
        ProtocolError: If there are no genuine or no impostor scores.
        DataError: If a score is NaN.

    Examples:
        >>> min_dcf([0.9, 0.8, 0.4], [0.5, 0.3, 0.2, 0.1], p_target=0.5).min_dcf
        0.25
        >>> min_dcf([1.0, 1.0], [1.0]).min_dcf
        1.0
    """
    genuine = checked_scores(genuine, "genuine")
    impostor = checked_scores(impostor, "impostor")
    costs = Costs.of(p_target, c_miss, c_fa)
    return min_dcf_of_bins(ScoreBins(genuine, impostor), costs, p_target=p_target)


def min_dcf_of_bins(bins: ScoreBins, costs: Costs, *, p_target: float) -> MinDcf:
    """:func:`min_dcf` of scores that are counted already."""
    sizes = (len(bins.genuine), len(bins.impostor))
    nothing = float(costs.total(1.0, 0.0))
    best = min(_least_costs(bins, costs, sizes, nothing), default=None)
    if best is None or nothing < best.cost:
        end = rejecting_threshold(bins.genuine, bins.impostor)
        return MinDcf(nothing, end, 0.0, 1.0, p_target)
    return MinDcf(best.cost, best.threshold, best.far, best.frr, p_target)


class _Cost(NamedTuple):
    """A point of the curve; the least cost comes first, of equal ones the lowest threshold."""

    cost: float
    threshold: float
    far: float
    frr: float


def _least_costs(
    bins: ScoreBins, costs: Costs, sizes: tuple[int, int], known: float
) -> Iterator[_Cost]:
    """Candidates for the least cost, the least one among them unless ``known`` is less."""
    num_genuine, num_impostors = sizes
    frr, far = bins.false_rejects / num_genuine, bins.false_accepts / num_impostors
    least = min(known, costs.total(frr, far).min())
    # No score inside a bin costs less than the lower FRR and the lower FAR of its two edges.
    num_scores = bins.sizes()
    is_open = (costs.total(frr[:-1], far[1:]) <= least) & (num_scores > 0)
    is_heavy = (num_scores > HEAVY) & (bins.num_bins > 1)
    for index in np.flatnonzero(is_open & is_heavy):
        yield from _least_costs(bins.zoom(int(index)), costs, sizes, least)
    light = np.flatnonzero(is_open & ~is_heavy)
    if len(light):
        steps = bins.inside(light)
        frr, far = steps.false_rejects / num_genuine, steps.false_accepts / num_impostors
        cost = costs.total(frr, far)
        best = int(np.argmin(cost))
        yield _Cost(
            float(cost[best]), float(steps.values[best]), float(far[best]), float(frr[best])
        )
