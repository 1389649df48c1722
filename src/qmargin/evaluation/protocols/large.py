"""Millions of trials: the same result as ``evaluate_scores``, with intervals found beside it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from qmargin.errors import QMarginError
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.intervals import Intervals, StageProgress, find_intervals
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import Result, TarPoint
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.subjects import find_subjects
from qmargin.metrics.operating import num_allowed, tars_at_fars


def evaluate_large(
    score_set: ScoreSet,
    options: EvaluationOptions,
    *,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """``evaluate_scores`` on two processors: one measures while the other draws replicates.

    The replicates take about as long as everything else together, and both spend their time in
    NumPy, which lets threads run.
    """
    if options.num_replicates == 0 or score_set.keys is None:
        return evaluate_scores(score_set, options, command=command, progress=progress)
    plain = replace(options, num_replicates=0)
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(evaluate_scores, score_set, plain, command=command)
        try:
            intervals = _intervals(score_set, options, progress)
        except QMarginError:
            measured.result()  # the same fault, said by the function that callers know
            raise
        return _joined(measured.result(), intervals)


def _intervals(
    score_set: ScoreSet, options: EvaluationOptions, progress: StageProgress | None
) -> Intervals:
    subjects = find_subjects(score_set, options.subjects, options.subject_of)
    return find_intervals(score_set, subjects, _points(score_set, options), options, progress)


def _points(score_set: ScoreSet, options: EvaluationOptions) -> Sequence[TarPoint]:
    """The operating points that the trials can measure."""
    genuine = score_set.scores[score_set.is_genuine]
    impostor = score_set.scores[~score_set.is_genuine]
    fars = [far for far in options.fars if num_allowed(far, len(impostor)) > 0]
    return [
        TarPoint(
            far_target=point.far_target,
            tar=point.tar,
            interval=None,
            far=point.far,
            false_accepts=point.false_accepts,
            threshold=point.threshold,
            status="ok",
            allowed=num_allowed(point.far_target, len(impostor)),
        )
        for point in tars_at_fars(genuine, impostor, fars, rule=options.rule)
    ]


def _joined(result: Result, intervals: Intervals) -> Result:
    """A result without intervals, and its intervals."""
    metrics = result.metrics
    metrics = replace(
        metrics,
        tar=tuple(
            replace(point, interval=intervals.tar.get(point.far_target)) for point in metrics.tar
        ),
        eer=replace(metrics.eer, interval=intervals.eer),
        min_dcf=tuple(
            replace(cost, interval=intervals.min_dcf.get(cost.p_target)) for cost in metrics.min_dcf
        ),
    )
    return replace(
        result,
        protocol=replace(result.protocol, interval=intervals.method),
        metrics=metrics,
        det=replace(result.det, band=intervals.band),
        replicates=intervals.replicates,
    )
