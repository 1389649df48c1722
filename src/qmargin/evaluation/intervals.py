"""Intervals of every measure: by drawing subjects, by drawing files, or by counting trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ProtocolError
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import (
    Band,
    IntervalMethod,
    ReplicateValues,
    TarPoint,
    far_key,
)
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.subjects import Subjects
from qmargin.metrics.bootstrap import Replicates, bootstrap, interval
from qmargin.metrics.subjects import Trials
from qmargin.metrics.sufficiency import rule_of_three, wilson

Ends = tuple[float, float]
StageProgress = Callable[[str, int, int], None]
_BAND_POINTS = 25
_LARGEST_BAND_FAR = 0.5


@dataclass(frozen=True)
class Intervals:
    """What is uncertain, and how that was found out."""

    method: IntervalMethod
    tar: dict[float, Ends] = field(default_factory=dict)
    eer: Ends | None = None
    min_dcf: dict[float, Ends] = field(default_factory=dict)
    band: Band | None = None
    replicates: ReplicateValues | None = None


def find_intervals(
    score_set: ScoreSet,
    subjects: Subjects | None,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
    progress: StageProgress | None = None,
) -> Intervals:
    """The best intervals that the trials allow.

    Subjects are drawn where they are known, files where only those are; without names the trials
    are taken for independent (Wilson), which makes intervals too narrow.
    """
    if options.num_replicates == 0:
        return Intervals(IntervalMethod("none", options.level, 0, options.seed, "not asked for"))
    if subjects is None:
        return _wilson(score_set, points, options)
    try:
        return _bootstrap(score_set, subjects, points, options, progress)
    except ProtocolError as error:
        return Intervals(IntervalMethod("none", options.level, 0, options.seed, str(error)))


def _wilson(
    score_set: ScoreSet, points: Sequence[TarPoint], options: EvaluationOptions
) -> Intervals:
    note = "trials have no names, so they are taken for independent: intervals are too narrow"
    method = IntervalMethod("wilson", options.level, 0, options.seed, note)
    num_genuine = int(score_set.is_genuine.sum())
    tar = {
        point.far_target: wilson(round(point.tar * num_genuine), num_genuine, options.level)
        for point in points
        if point.tar is not None and options.rule != "interpolated"  # no threshold has that TAR
    }
    return Intervals(method, tar=tar)


def _bootstrap(
    score_set: ScoreSet,
    subjects: Subjects,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
    progress: StageProgress | None,
) -> Intervals:
    trials = as_trials(score_set, subjects)
    fars = [point.far_target for point in points if point.tar is not None]
    replicates = bootstrap(
        trials,
        fars,
        p_targets=options.p_targets,
        grid_fars=_grid(int((~score_set.is_genuine).sum())),
        num_replicates=options.num_replicates,
        seed=options.seed,
        progress=None
        if progress is None
        else lambda done, total: progress("bootstrap", done, total),
    )
    return _measured(replicates, score_set, subjects, options)


def _measured(
    replicates: Replicates, score_set: ScoreSet, subjects: Subjects, options: EvaluationOptions
) -> Intervals:
    level, note = options.level, subjects.note
    fars = replicates.fars
    if options.rule != "conservative":
        note += f"; TAR by the rule {options.rule} has no interval"
        fars = ()
    kind = "file bootstrap" if subjects.are_files else "subject bootstrap"
    num_genuine = int(score_set.is_genuine.sum())
    bound = rule_of_three(min(num_genuine, len(score_set) - num_genuine))
    low, high = interval(replicates.eer, level)
    return Intervals(
        IntervalMethod(kind, level, options.num_replicates, options.seed, note),
        tar={
            far: _at_most(interval(replicates.tar[:, i], level), 1.0 - rule_of_three(num_genuine))
            for i, far in enumerate(fars)
        },
        eer=(low, bound) if high == 0.0 else (low, high),
        min_dcf={
            p_target: interval(replicates.min_dcf[:, i], level)
            for i, p_target in enumerate(options.p_targets)
        },
        band=_band(replicates, level),
        replicates=_values(replicates),
    )


def _at_most(ends: Ends, bound: float) -> Ends:
    """Ends of a TAR; where no replicate has an error, the lower one is what 3 / n leaves."""
    return (bound, 1.0) if ends == (1.0, 1.0) else ends


def as_trials(score_set: ScoreSet, subjects: Subjects) -> Trials:
    """The trials as the bootstrap and the audit of groups take them."""
    return Trials(
        score_set.scores, score_set.is_genuine, subjects.enrol, subjects.test, subjects.names
    )


def _grid(num_impostors: int) -> tuple[float, ...]:
    """FARs of the band: evenly spaced on a logarithmic axis, none below one false accept."""
    if num_impostors < 2:
        return ()
    grid = np.geomspace(1.0 / num_impostors, _LARGEST_BAND_FAR, _BAND_POINTS)
    return tuple(np.unique(grid).tolist())


def _band(replicates: Replicates, level: float) -> Band | None:
    if not replicates.grid_fars:
        return None
    ends = [interval(column, level) for column in replicates.frr_at_grid.T]
    lows, highs = zip(*ends, strict=True)
    return Band(replicates.grid_fars, lows, highs)


def _values(replicates: Replicates) -> ReplicateValues:
    return ReplicateValues(
        replicates.subjects_sha256,
        replicates.seed,
        _columns(replicates.fars, replicates.tar),
        _optional(replicates.eer),
        _columns(replicates.p_targets, replicates.min_dcf),
    )


def _columns(
    names: Sequence[float], values: NDArray[np.float64]
) -> dict[str, tuple[float | None, ...]]:
    return {far_key(name): _optional(values[:, i]) for i, name in enumerate(names)}


def _optional(values: NDArray[np.float64]) -> tuple[float | None, ...]:
    return tuple(None if value != value else value for value in values.tolist())
