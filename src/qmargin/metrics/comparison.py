"""Two systems on the same trials: the difference, its interval and a p-value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from qmargin.errors import ProtocolError, ShapeError
from qmargin.metrics.bootstrap import Replicates, defined
from qmargin.metrics.sufficiency import check_level


@dataclass(frozen=True)
class Difference:
    """System A minus system B.

    Attributes:
        difference: On the trials as they are.
        low: Lower end of the percentile interval.
        high: Upper end.
        p_value: Two-sided: twice the share of replicates on the rarer side of zero.
        num_replicates: Replicates in which both systems could be measured.
    """

    difference: float
    low: float
    high: float
    p_value: float
    num_replicates: int


@dataclass(frozen=True)
class Comparison:
    """Differences of every measure that both systems have.

    Attributes:
        fars: Targets of ``tar``.
        p_targets: Priors of ``min_dcf``.
        tar: Differences of TAR; above zero, system A is better.
        eer: Difference of EER, below zero where system A is better; None where not measured.
        min_dcf: Differences of minDCF; below zero, system A is better.
    """

    fars: tuple[float, ...]
    p_targets: tuple[float, ...]
    tar: tuple[Difference, ...]
    eer: Difference | None
    min_dcf: tuple[Difference, ...]


def compare(replicates_a: Replicates, replicates_b: Replicates, level: float = 0.95) -> Comparison:
    """Paired comparison of two systems over the same draws of subjects.

    Both systems are measured in every replicate, so what is hard for both cancels. A test that
    counts trials (McNemar) takes trials that share a subject for independent ones, and finds
    differences where there are none.

    Raises:
        ProtocolError: If the replicates are not of the same trials, subjects and seed.
    """
    _check_paired(replicates_a, replicates_b)
    fars = tuple(far for far in replicates_a.fars if far in replicates_b.fars)
    priors = tuple(prior for prior in replicates_a.p_targets if prior in replicates_b.p_targets)

    def one(name: str, key: float, keys: str) -> Difference:
        columns = [getattr(each, keys).index(key) for each in (replicates_a, replicates_b)]
        pairs = list(zip((replicates_a, replicates_b), columns, strict=True))
        observed = [float(getattr(each, f"observed_{name}")[column]) for each, column in pairs]
        values = [getattr(each, name)[:, column] for each, column in pairs]
        return paired_difference(observed[0], observed[1], values[0], values[1], level=level)

    eer = None
    observed_a, observed_b = replicates_a.observed_eer, replicates_b.observed_eer
    if not np.isnan([observed_a, observed_b]).any():
        eer = paired_difference(
            observed_a, observed_b, replicates_a.eer, replicates_b.eer, level=level
        )
    return Comparison(
        fars=fars,
        p_targets=priors,
        tar=tuple(one("tar", far, "fars") for far in fars),
        eer=eer,
        min_dcf=tuple(one("min_dcf", prior, "p_targets") for prior in priors),
    )


def paired_difference(
    observed_a: float,
    observed_b: float,
    values_a: ArrayLike,
    values_b: ArrayLike,
    *,
    level: float = 0.95,
) -> Difference:
    """Difference of one measure, from its value and its replicates in both systems.

    The p-value is the smallest ``1 - level`` whose percentile interval leaves zero out, up to the
    one replicate that is added to both sides so that no p-value is zero.

    Args:
        observed_a: Measure of system A on the trials as they are.
        observed_b: Of system B.
        values_a: ``[R]`` replicates of system A.
        values_b: ``[R]`` of system B, from the same draws.
        level: Of the interval.

    Examples:
        >>> paired_difference(0.9, 0.8, [0.91, 0.9, 0.89], [0.8, 0.82, 0.78]).p_value
        0.5
    """
    check_level(level)
    values_a, values_b = np.asarray(values_a, dtype=float), np.asarray(values_b, dtype=float)
    if values_a.shape != values_b.shape or values_a.ndim != 1:
        raise ShapeError(
            f"replicates have shapes {values_a.shape} and {values_b.shape}, they must be equal "
            f"and of one dimension: use the same num_replicates"
        )
    values = defined(values_a - values_b)
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    rarer = min(np.count_nonzero(values <= 0.0), np.count_nonzero(values >= 0.0))
    return Difference(
        difference=observed_a - observed_b,
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (int(rarer) + 1) / (len(values) + 1)),
        num_replicates=len(values),
    )


def _check_paired(replicates_a: Replicates, replicates_b: Replicates) -> None:
    names = {
        "subjects_sha256": "subjects",
        "trials_sha256": "trials",
        "seed": "seed",
        "num_replicates": "num_replicates",
    }
    for attribute, name in names.items():
        left, right = getattr(replicates_a, attribute), getattr(replicates_b, attribute)
        if left != right:
            raise ProtocolError(
                f"two systems can be compared only with the same {name}, here {left} and {right}: "
                f"evaluate both on one list of trials with one seed"
            )
