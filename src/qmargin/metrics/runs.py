"""Means over training runs, and their differences, with intervals over runs and test identities.

Each seed gives a different system, and each draw of test identities a different rate. An interval
for the effect of a loss has to cover both. With a handful of seeds, drawing them with replacement
does not: the variance is too small by ``(n - 1) / n`` and its tails are too short. Here the two
variances are estimated separately, as for readers and cases in studies of diagnoses (Obuchowski and
Rockette 1995), and Student's t has Satterthwaite's degrees of freedom (as Hillis 2007).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit as _expit
from scipy.special import logit as _logit
from scipy.special import nctdtrinc, stdtr, stdtrit

from qmargin.errors import ProtocolError, ShapeError
from qmargin.metrics.bootstrap import MAX_EMPTY
from qmargin.metrics.checks import Floats
from qmargin.metrics.operating import check_level

LEAST_PAIRS = 4  # with fewer seeds, the variance of their differences is too uncertain


class Runs(NamedTuple):
    """One measure of the runs of a loss, which differ in their seed."""

    observed: Floats  # [n], on the trials as they are
    draws: Floats  # [n, R], in replicates that draw the test identities


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, or a difference of two.

    Attributes:
        value: On the trials as they are.
        standard_error: Of ``value``, over runs and test identities.
        degrees: Degrees of freedom of Student's t.
        num_runs: Runs on the side that has fewer; with one, the error covers identities alone.
        run_share: Share of the variance that more runs would lower; None where that is not known.
    """

    value: float
    standard_error: float
    degrees: float
    num_runs: int
    run_share: float | None

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Ends of the confidence interval."""
        check_level(level)
        half = float(stdtrit(self.degrees, 0.5 + level / 2)) * self.standard_error
        return self.value - half, self.value + half

    @property
    def p_value(self) -> float:
        """Two-sided: the smallest ``1 - level`` whose interval leaves zero out."""
        if self.standard_error == 0.0:
            return 1.0  # of a value of zero, see _estimate
        return 2.0 * float(stdtr(self.degrees, -abs(self.value) / self.standard_error))

    def detectable(self, level: float = 0.95, power: float = 0.8) -> float:
        """The true value whose interval would leave zero out with this power, by noncentral t."""
        check_level(level)
        check_level(power)
        edge = stdtrit(self.degrees, 0.5 + level / 2)
        return float(nctdtrinc(self.degrees, 1.0 - power, edge)) * self.standard_error


def mean_over_runs(runs: Runs, *, num_subjects: int, shares_subjects: bool = True) -> Estimate:
    """Mean of a measure over runs.

    Args:
        runs: The measure of every run.
        num_subjects: Test identities of a run.
        shares_subjects: Whether all runs have the same test identities, and the same draws of them.
    """
    return _estimate([runs], num_subjects, shares_subjects)


def difference_over_runs(
    first: Runs,
    second: Runs,
    *,
    num_subjects: int,
    shares_subjects: bool = True,
    are_paired: bool = False,
) -> Estimate:
    """Mean of a measure over the runs of one loss, minus that of another.

    With independent runs, ``Var = s1^2 / n1 + s2^2 / n2 + V``: the variances ``s^2`` over runs, and
    ``V``, the variance over identities that the runs of a loss share. A variance over runs already
    includes how identities differ from run to run, so ``V`` is the variance of the mean difference
    over replicates without that part. Runs that share a seed have the same first weights and order
    of samples, so their results are correlated: differences of pairs are independent, and ``Var =
    s^2 / n + V`` with their variance. Where each seed has its own test identities, ``V`` is zero.

    With one run of a loss, only identities are covered: ``num_runs`` is 1.

    Args:
        first: The measure of every run, on a scale on which it is roughly normal, see `logits`.
        second: Of the other loss; replicate ``r`` of all runs draws the same identities.
        num_subjects: Test identities of a run.
        shares_subjects: Whether all runs have the same test identities. Otherwise run ``i`` of both
            losses has the same, and they are paired.
        are_paired: Whether run ``i`` of both losses has the same seed.

    Raises:
        ProtocolError: Too many replicates have no value, or all are equal and the losses are not.

    Examples:
        >>> draws = np.array([[-0.01, 0.0, 0.01], [0.01, 0.0, -0.01]])
        >>> ahead, behind = Runs([0.9, 0.92], draws + 0.9), Runs([0.8, 0.82], draws + 0.8)
        >>> made = difference_over_runs(ahead, behind, num_subjects=100)
        >>> round(made.value, 3), round(made.standard_error, 3), round(made.degrees, 1)
        (0.1, 0.014, 2.0)
    """
    observed, draws = _checked([first, second])
    sides = list(map(Runs, observed, draws))
    if are_paired or not shares_subjects:
        if len(observed[0]) != len(observed[1]):
            counts = " and ".join(str(len(one)) for one in observed)
            raise ShapeError(f"{counts} runs cannot be paired: give as many, in one order of seeds")
        sides = [Runs(observed[0] - observed[1], draws[0] - draws[1])]
    return _estimate(sides, num_subjects, shares_subjects)


def _estimate(sides: Sequence[Runs], num_subjects: int, shares_subjects: bool) -> Estimate:
    """Estimate for one side, or for the first minus the second."""
    observed, draws = _checked(sides)
    signs = (1.0, -1.0)[: len(sides)]
    counts = [len(one) for one in observed]
    value = float(sum(sign * one.mean() for sign, one in zip(signs, observed, strict=True)))
    contrast = np.sum([s * one.mean(axis=0) for s, one in zip(signs, draws, strict=True)], axis=0)
    identities = float(contrast.var(ddof=1))  # of the mean, or of the difference of means
    # the variance over identities and that of its estimate from R replicates
    degrees = 1.0 / (1.0 / (num_subjects - 1) + 1.0 / (len(contrast) - 1))
    parts = [(identities, degrees)]
    if (num_runs := min(counts)) > 1:
        runs = [(float(one.var(ddof=1)) / len(one), len(one) - 1.0) for one in observed]
        common = 0.0  # no identities are common to runs with test identities of their own
        if shares_subjects:
            own = [(one - one.mean(axis=1, keepdims=True)).var(axis=0, ddof=1) for one in draws]
            apart = sum(float(v.mean()) / n for v, n in zip(own, counts, strict=True))
            common = max(0.0, identities - apart)
        parts = [*runs, (common, degrees)]
    variance = sum(part for part, _ in parts)
    if variance == 0.0:
        if value != 0.0:
            raise ProtocolError("all runs and replicates are equal: an interval needs more trials")
        return Estimate(0.0, 0.0, degrees, num_runs, None)
    weight = sum((part / variance) ** 2 / each for part, each in parts)
    is_apart = shares_subjects and num_runs > 1
    share = 1.0 - parts[-1][0] / variance if is_apart else None
    return Estimate(value, math.sqrt(variance), 1.0 / weight, num_runs, share)


def _checked(sides: Sequence[Runs]) -> tuple[list[Floats], list[Floats]]:
    """Values and replicates as arrays, without replicates in which a run has no value."""
    observed = [np.asarray(side.observed, dtype=np.float64) for side in sides]
    draws = [np.asarray(side.draws, dtype=np.float64) for side in sides]
    for one, drawn in zip(observed, draws, strict=True):
        if one.ndim != 1 or drawn.ndim != 2 or len(one) != len(drawn) or not len(one):
            raise ShapeError(f"runs have shapes {one.shape} and {drawn.shape}: give [n] and [n, R]")
    if len({drawn.shape[1] for drawn in draws}) > 1:
        shapes = " and ".join(str(drawn.shape) for drawn in draws)
        raise ShapeError(f"replicates have shapes {shapes}: use the same num_replicates")
    known = np.asarray(~np.isnan(np.concatenate(draws)).any(axis=0))
    if known.sum() < max(2, (1 - MAX_EMPTY) * len(known)):
        raise ProtocolError(
            f"{np.count_nonzero(~known)} of {len(known)} replicates have no value in some run, at "
            f"most {MAX_EMPTY:.0%} may and 2 are needed: an interval needs more subjects"
        )
    return observed, [drawn[:, known] for drawn in draws]


def logits(rates: ArrayLike, num_trials: int) -> Floats:
    """Logits of rates among trials; 0 and 1 count as half a trial away from it.

    Examples:
        >>> logits([0.5, 1.0], 100).round(3)
        array([0.   , 5.293])
    """
    least = 0.5 / num_trials
    return np.asarray(_logit(np.clip(np.asarray(rates, dtype=np.float64), least, 1.0 - least)))


def rate_of(logit: float) -> float:
    """The rate of a logit.

    Examples:
        >>> rate_of(0.0)
        0.5
    """
    return float(_expit(logit))


def rate_difference(difference: float, middle: float) -> float:
    """Difference of the rates whose logits lie ``difference`` apart around ``middle``.

    Examples:
        >>> round(rate_difference(0.2, 0.0), 4)
        0.05
    """
    return rate_of(middle + difference / 2) - rate_of(middle - difference / 2)
