"""Error rates per group of subjects at one common threshold, and how far apart they are.

The vocabulary is that of ISO/IEC 19795-10: a false match rate (FMR) and a false non-match rate
(FNMR) per demographic group. An impostor pair belongs to a group if both its subjects do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.bootstrap import Trials
from qmargin.metrics.checks import round_up
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS, Status, rule_of_three


@dataclass(frozen=True)
class GroupRate:
    """Errors of one kind in one group.

    ``rate`` is None without trials. ``status`` is ``"ok"``, ``"few"`` (fewer than 30 errors) or
    ``"not measurable"`` (no trials), and ``message`` says so in words.
    """

    rate: float | None
    errors: int
    trials: int
    status: Status
    message: str


@dataclass(frozen=True)
class Group:
    """One group at the common threshold."""

    name: str
    num_subjects: int
    fmr: GroupRate
    fnmr: GroupRate


@dataclass(frozen=True)
class Spread:
    """How far one rate differs between groups; None where it is not defined.

    Attributes:
        max_over_geometric_mean: NIST's ratio; not defined with a group at zero.
        max_over_min: The inequity of this rate alone; infinite with a group at zero and another
            above it.
        gini: Gini coefficient with the correction ``n / (n - 1)``, from 0 (equal) to 1.
        num_groups: Groups that have the rate.
        note: Groups that were left out, have no errors or have few.
    """

    max_over_geometric_mean: float | None
    max_over_min: float | None
    gini: float | None
    num_groups: int
    note: str | None


@dataclass(frozen=True)
class GroupRates:
    """Rates per group and their spread.

    Attributes:
        groups: Sorted by name.
        fmr: Spread of the false match rate.
        fnmr: Spread of the false non-match rate.
        ineq: ``(max FMR / min FMR)^beta * (max FNMR / min FNMR)^(1 - beta)``.
        garbe: ``alpha * Gini(FMR) + (1 - alpha) * Gini(FNMR)``.
        num_cross_impostors: Impostor pairs of two groups, which belong to no group.
        num_ungrouped_trials: Trials with a subject that has no group.
    """

    threshold: float
    groups: tuple[Group, ...]
    fmr: Spread
    fnmr: Spread
    ineq: float | None
    garbe: float | None
    num_cross_impostors: int
    num_ungrouped_trials: int


def group_rates(
    trials: Trials,
    groups: Mapping[str, str],
    threshold: float,
    *,
    beta: float = 0.5,
    alpha: float = 0.5,
) -> GroupRates:
    """Compute FMR and FNMR of every group at one threshold, with INEQ and GARBE.

    Args:
        trials: Scores, labels and subjects.
        groups: Group of each subject, by the subject's name. Trials of a subject without a group
            are counted, but not used.
        threshold: Accept if and only if ``score >= threshold``; NaN accepts nothing.
        beta: Weight of FMR in INEQ, in [0, 1].
        alpha: Weight of FMR in GARBE, in [0, 1].

    Raises:
        ProtocolError: If no subject of the trials has a group.
    """
    for name, weight in (("beta", beta), ("alpha", alpha)):
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"{name}={weight!r} is outside [0, 1]: give the share of FMR")
    known = [groups.get(name) for name in trials.subject_names]
    names = sorted({group for group in known if group is not None})
    if not names:
        example = trials.subject_names[0]
        raise ProtocolError(
            f"none of the {len(known)} subjects has a group: name them as the trials do, such as "
            f"{example!r}"
        )
    members = np.array([-1 if group is None else names.index(group) for group in known])
    enrol, test = members[trials.enrol_subject], members[trials.test_subject]
    is_grouped = (enrol >= 0) & (test >= 0)
    is_cross = is_grouped & (enrol != test)
    if (wrong := np.flatnonzero(is_cross & trials.is_genuine)).size:
        left, right = names[enrol[wrong[0]]], names[test[wrong[0]]]
        both = f"{left!r} and {right!r}"
        raise DataError(
            f"trial {wrong[0]} is genuine but of the groups {both}: correct one of them"
        )
    is_accepted = trials.scores >= round_up(threshold, trials.scores.dtype)
    is_wrong = is_accepted != trials.is_genuine
    is_inside = is_grouped & ~is_cross

    def count(groups: NDArray[np.intp]) -> list[int]:
        found: list[int] = np.bincount(groups, minlength=len(names)).tolist()
        return found

    def rates(is_kind: NDArray[np.bool_]) -> list[GroupRate]:
        return list(map(rate_of, count(enrol[is_kind & is_wrong]), count(enrol[is_kind])))

    fmrs, fnmrs = rates(is_inside & ~trials.is_genuine), rates(is_inside & trials.is_genuine)
    num_subjects = count(members[members >= 0])
    fmr, fnmr = spread(fmrs), spread(fnmrs)
    logs = [each.max_over_min and math.log(each.max_over_min) for each in (fmr, fnmr)]
    log_ineq = _weighted(logs[0], logs[1], beta)
    return GroupRates(
        threshold=float(threshold),
        groups=tuple(map(Group, names, num_subjects, fmrs, fnmrs)),
        fmr=fmr,
        fnmr=fnmr,
        ineq=None if log_ineq is None else math.exp(log_ineq),
        garbe=_weighted(fmr.gini, fnmr.gini, alpha),
        num_cross_impostors=int(is_cross.sum()),
        num_ungrouped_trials=int((~is_grouped).sum()),
    )


def spread(rates: Sequence[GroupRate]) -> Spread:
    """How far the rates of the groups differ; groups without trials are left out and noted."""
    values = np.array([each.rate for each in rates if each.rate is not None], dtype=np.float64)
    counts = {
        "without trials, left out": sum(each.rate is None for each in rates),
        "without errors": sum(each.rate == 0.0 for each in rates),
        f"with fewer than {ENOUGH_FALSE_ACCEPTS} errors": sum(
            each.status == "few" and each.rate != 0.0 for each in rates
        ),
    }
    notes = [f"{count} of {len(rates)} groups {what}" for what, count in counts.items() if count]
    num_groups, note = len(values), "; ".join(notes) or None
    if num_groups < 2:
        return Spread(None, None, None, num_groups, "; ".join(["one group", *notes]))
    largest, smallest = float(values.max()), float(values.min())
    if largest == 0.0:  # all are equal, but at an unknown rate
        return Spread(None, None, None, num_groups, note)
    ratio = None if smallest == 0.0 else largest / math.exp(np.log(values).mean())
    differences = np.abs(values[:, None] - values).sum()
    gini = differences / (2 * num_groups * (num_groups - 1) * values.mean())
    inequity = math.inf if smallest == 0.0 else largest / smallest
    return Spread(ratio, inequity, float(gini), num_groups, note)


def rate_of(num_errors: int, num_trials: int) -> GroupRate:
    """Errors among trials, and whether they are enough."""
    if num_trials == 0:
        return GroupRate(None, 0, 0, "not measurable", "no trials")
    if num_errors == 0:
        message = f"no errors in {num_trials:,} trials, below {rule_of_three(num_trials):.1e}"
        return GroupRate(0.0, 0, num_trials, "few", message)
    message = f"{num_errors:,} errors in {num_trials:,} trials"
    status: Status = "few" if num_errors < ENOUGH_FALSE_ACCEPTS else "ok"
    return GroupRate(num_errors / num_trials, num_errors, num_trials, status, message)


def _weighted(first: float | None, second: float | None, share: float) -> float | None:
    """Weighted mean; a part of weight zero may be unknown or infinite."""
    parts = [(value, part) for value, part in ((first, share), (second, 1.0 - share)) if part > 0]
    if any(value is None for value, _ in parts):
        return None
    return sum(value * part for value, part in parts if value is not None)
