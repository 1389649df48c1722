"""Error rates of groups of subjects, as the result records them."""

from __future__ import annotations

from collections.abc import Sequence

from qmargin.errors import DataError, ProtocolError
from qmargin.evaluation.intervals import as_trials
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import STATUSES, GroupAudit, GroupRow, GroupSpread, TarPoint
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.subjects import Subjects
from qmargin.metrics.groups import Group, GroupRates, Spread, group_rates


def audit_groups(
    score_set: ScoreSet,
    subjects: Subjects | None,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
) -> GroupAudit | None:
    """FMR and FNMR per group at the threshold of one FAR; None when no groups were given."""
    if options.group_of is None:
        return None
    if subjects is None:
        raise DataError(f"{score_set.sources[0].path} has no names, so its trials have no groups")
    point = _point(points, options.group_far)
    threshold = float("nan") if point.threshold is None else point.threshold
    rates = group_rates(as_trials(score_set, subjects), options.group_of, threshold)
    return GroupAudit(
        threshold=point.threshold,
        far_target=point.far_target,
        rows=tuple(map(_row, rates.groups)),
        fmr=_spread(rates.fmr),
        note=_note(rates),
        fnmr=_spread(rates.fnmr),
        ineq=rates.ineq,
        garbe=rates.garbe,
    )


def _point(points: Sequence[TarPoint], far: float | None) -> TarPoint:
    """The point of the given FAR, or of the smallest one with enough trials."""
    measured = [point for point in points if point.tar is not None]
    if far is not None:
        measured = [point for point in measured if point.far_target == far]
    if not measured:
        what = "no FAR is" if far is None else f"FAR={far:g} is not"
        raise ProtocolError(f"{what} measurable on these trials, so groups have no threshold")
    return min(measured, key=lambda point: (STATUSES.index(point.status), point.far_target))


def _row(group: Group) -> GroupRow:
    parts = [group.fmr, group.fnmr]
    return GroupRow(
        group=group.name,
        fmr=group.fmr.rate,
        fnmr=group.fnmr.rate,
        num_genuine=group.fnmr.trials,
        num_impostors=group.fmr.trials,
        status=max((part.status for part in parts), key=STATUSES.index),
        note=f"FMR: {group.fmr.message}; FNMR: {group.fnmr.message}",
    )


def _spread(spread: Spread) -> GroupSpread:
    return GroupSpread(spread.max_over_geometric_mean, spread.max_over_min, spread.gini)


def _note(rates: GroupRates) -> str | None:
    parts = [
        f"FMR: {rates.fmr.note}" if rates.fmr.note else "",
        f"FNMR: {rates.fnmr.note}" if rates.fnmr.note else "",
        f"{rates.num_cross_impostors:,} impostor trials of two groups count in none"
        if rates.num_cross_impostors
        else "",
        f"{rates.num_ungrouped_trials:,} trials have a subject without a group"
        if rates.num_ungrouped_trials
        else "",
    ]
    return "; ".join(filter(None, parts)) or None
