"""From scored trials to a ``Result``: every metric, with its interval and what it is worth."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import qmargin
from qmargin.errors import ProtocolError
from qmargin.evaluation.audit import audit_groups
from qmargin.evaluation.intervals import Intervals, StageProgress, find_intervals
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.pictures import calibration_curve, hardest_trials, score_histogram
from qmargin.evaluation.result import (
    DcfPoint,
    Det,
    EerPoint,
    Metrics,
    Protocol,
    Result,
    System,
    TarPoint,
    Value,
)
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.subjects import Subjects, find_subjects
from qmargin.metrics.crossing import eer, min_dcf
from qmargin.metrics.curve import StaircaseParts, thin_curve
from qmargin.metrics.llr import cllr, min_cllr_of
from qmargin.metrics.operating import TarAtFar, tars_at_fars
from qmargin.metrics.sufficiency import Sufficiency, sufficiency

Floats = NDArray[np.float64]
DET_POINTS = 400
NARROW = 1e-4  # of the largest score: scores that differ by less are of a system that collapsed


def evaluate_scores(
    score_set: ScoreSet,
    options: EvaluationOptions | None = None,
    *,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Measure everything that the trials can answer.

    A FAR that they cannot resolve is "not measurable", not an error.

    Args:
        score_set: Scored trials.
        options: What to measure.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        ProtocolError: There are no genuine or no impostor trials.
        DataError: Subjects contradict labels; the message names the line.
    """
    options = options or EvaluationOptions()
    genuine, impostor = _sides(score_set)
    subjects = find_subjects(score_set, options.subjects, options.subject_of)
    points = _tar_points(genuine, impostor, options)
    intervals = find_intervals(score_set, subjects, points, options, progress)
    steps = StaircaseParts(genuine, impostor)
    metrics = _metrics(genuine, impostor, steps, points, intervals, options)
    return Result(
        system=System(options.name, options.model_card),
        protocol=_protocol(score_set, subjects, intervals, options),
        sources=(*score_set.sources, *options.sources),
        trials_sha256=score_set.trials_sha256(),
        metrics=metrics,
        det=_det(steps, intervals),
        histogram=score_histogram(genuine, impostor),
        calibration=calibration_curve(genuine, impostor),
        replicates=intervals.replicates,
        groups=audit_groups(score_set, subjects, metrics.tar, options),
        hardest=hardest_trials(score_set, options.num_hardest),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        qmargin=qmargin.__version__,
        notes=(*options.notes, *_notes(score_set)),
    )


def _notes(score_set: ScoreSet) -> Iterator[str]:
    """What is odd about the trials, though they can be measured."""
    counts = score_set.pair_counts
    low, high = float(score_set.scores.min()), float(score_set.scores.max())
    if high - low <= NARROW * max(abs(low), abs(high)) or low == high:
        span = f"are {low!r}" if low == high else f"lie from {low!r} to {high!r}"
        yield (
            f"all {len(score_set):,} scores {span}: such a system does not tell subjects apart; "
            "look at its embeddings"
        )
    if counts.num_mirrored:
        yield (
            f"{counts.num_mirrored:,} pairs occur in both orders and count twice: remove one order"
        )
    if counts.num_self:
        yield (
            f"{counts.num_self:,} trials compare a sample with itself, which says nothing about "
            "others: remove them"
        )


def _sides(score_set: ScoreSet) -> tuple[Floats, Floats]:
    num_genuine = int(score_set.is_genuine.sum())
    for kind, number in (("genuine", num_genuine), ("impostor", len(score_set) - num_genuine)):
        if number == 0:
            raise ProtocolError(
                f"{score_set.sources[-1].path}: there are 0 {kind} trials among "
                f"{len(score_set):,}, at least 1 is needed: check the labels"
            )
    if score_set.is_genuine[:num_genuine].all():  # as readers arrange scores without names
        return score_set.scores[:num_genuine], score_set.scores[num_genuine:]
    return score_set.scores[score_set.is_genuine], score_set.scores[~score_set.is_genuine]


def _tar_points(
    genuine: Floats, impostor: Floats, options: EvaluationOptions
) -> tuple[TarPoint, ...]:
    """An entry for every FAR, measured or not, without intervals."""
    enough = {far: sufficiency(far, len(impostor)) for far in options.fars}
    fars = [far for far in options.fars if enough[far].allowed > 0]
    found = dict(zip(fars, tars_at_fars(genuine, impostor, fars, rule=options.rule), strict=True))
    return tuple(tar_point(far, enough[far], found.get(far)) for far in options.fars)


def tar_point(
    far: float,
    state: Sufficiency,
    point: TarAtFar | None,
    interval: tuple[float, float] | None = None,
) -> TarPoint:
    """The entry of a FAR; ``point`` is None where it could not be measured."""
    return TarPoint(
        far_target=far,
        tar=None if point is None else point.tar,
        interval=interval,
        far=None if point is None else point.far,
        false_accepts=0 if point is None else point.false_accepts,
        threshold=None if point is None else known_threshold(point.threshold),
        status=state.status,
        allowed=state.allowed,
        note=state.message,
    )


def known_threshold(threshold: float) -> float | None:
    """None for the threshold that accepts nothing, not even +inf."""
    return None if np.isnan(threshold) else float(threshold)


def _metrics(
    genuine: Floats,
    impostor: Floats,
    steps: StaircaseParts,
    points: tuple[TarPoint, ...],
    intervals: Intervals,
    options: EvaluationOptions,
) -> Metrics:
    equal = eer(genuine, impostor)
    costs = [min_dcf(genuine, impostor, p_target) for p_target in options.p_targets]
    return Metrics(
        tar=tuple(replace(point, interval=intervals.tar.get(point.far_target)) for point in points),
        eer=EerPoint(equal.eer, intervals.eer, known_threshold(equal.threshold)),
        min_dcf=tuple(
            DcfPoint(
                cost.p_target,
                cost.min_dcf,
                intervals.min_dcf.get(cost.p_target),
                known_threshold(cost.threshold),
            )
            for cost in costs
        ),
        cllr=Value(_finite(cllr(genuine, impostor))),
        min_cllr=Value(_finite(min_cllr_of(steps))),
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _det(steps: StaircaseParts, intervals: Intervals) -> Det:
    curve = thin_curve(steps, DET_POINTS)
    return Det(
        tuple(curve.far.tolist()),
        tuple(curve.frr.tolist()),
        tuple(known_threshold(threshold) for threshold in curve.thresholds.tolist()),
        intervals.band,
    )


def _protocol(
    score_set: ScoreSet,
    subjects: Subjects | None,
    intervals: Intervals,
    options: EvaluationOptions,
) -> Protocol:
    num_genuine = int(score_set.is_genuine.sum())
    are_known = subjects is not None and not subjects.are_files
    return Protocol(
        name=options.protocol,
        rule=options.rule,
        num_trials=len(score_set),
        num_genuine=num_genuine,
        num_impostors=len(score_set) - num_genuine,
        num_subjects=len(subjects.names) if subjects and are_known else None,
        interval=intervals.method,
    )


def default_name(path: str | Path) -> str:
    """Name of a system or protocol after its file.

    Examples:
        >>> default_name("runs/resnet34.scores.tsv")
        'resnet34'
    """
    return Path(path).name.split(".")[0] or "system"
