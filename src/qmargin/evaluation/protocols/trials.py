"""Speaker trials: mean subtraction, cosine, AS-norm and quality-aware calibration, to a result."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError, ShapeError
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.keys import TrialKeys
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.pair_scores import exact_scores, unit_rows
from qmargin.evaluation.protocols.cohorts import nearest_moments, speakers_of
from qmargin.evaluation.protocols.quality import Qualities, QualityCalibration, fit_quality
from qmargin.evaluation.result import Result, Source
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.scoring import CohortNorm, name_cells, score_header, score_lines
from qmargin.evaluation.trials import TrialList
from qmargin.files import Guard, replacing, sha256_of
from qmargin.metrics.normalise import Moments

Floats = NDArray[np.float64]
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Scoring:
    """How scores are made from embeddings.

    Attributes:
        center: Its mean is subtracted from every embedding, the cohort's too.
        norm: AS-norm by a cohort; plain cosines without it.
        seconds: Duration of every utterance by name, for the calibration.
    """

    center: Embeddings | None = None
    norm: CohortNorm | None = None
    seconds: dict[str, float] | None = None


class Scored(NamedTuple):
    """Scores of trials and the qualities of their sides."""

    scores: Floats  # [n]
    names: tuple[str, ...]
    columns: Floats  # [n, columns]


def score_speakers(
    embeddings: Embeddings,
    trials: TrialList,
    scoring: Scoring | None = None,
    *,
    progress: StageProgress | None = None,
) -> Scored:
    """Score every trial in memory, in float64.

    Args:
        embeddings: One for every name in ``trials``.
        trials: What to compare.
        scoring: Mean, cohort and durations.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        DataError: A name has no embedding, no duration, or an embedding that equals the mean; the
            message names the line.
    """
    scoring = scoring or Scoring()
    keys = trials.keys
    centred = _centred(embeddings, _rows(embeddings, trials), scoring.center)
    lengths = np.sqrt(np.sum(centred * centred, axis=1))
    if (lengths == 0.0).any():
        name = keys.names[int(np.argmin(lengths))]
        raise DataError(
            f"{embeddings.source.path}: the embedding of {name!r} less the mean is zero, so it has "
            "no direction"
        )
    unit = unit_rows(centred)
    scores = exact_scores(unit, keys.enrol.astype(np.intp), keys.test.astype(np.intp))
    moments = None if scoring.norm is None else _moments(unit, scoring, progress)
    if moments is not None:
        scores = 0.5 * (moments.apply(scores, keys.enrol) + moments.apply(scores, keys.test))
    known = Qualities(
        seconds=None if scoring.seconds is None else _seconds(scoring.seconds, trials),
        lengths=lengths,
        cohort_means=None if moments is None else moments.mean,
    )
    return Scored(scores, *known.columns(keys.enrol, keys.test))


def _rows(embeddings: Embeddings, trials: TrialList) -> NDArray[np.int64]:
    """Row of the embedding of every name of the trials."""
    position = {key: row for row, key in enumerate(embeddings.keys)}
    rows = np.array([position.get(name, -1) for name in trials.keys.names], dtype=np.int64)
    _refuse_missing(trials, rows < 0, f"embedding in {embeddings.source.path}")
    return rows


def _seconds(seconds: dict[str, float], trials: TrialList) -> Floats:
    found = np.array([seconds.get(name, np.nan) for name in trials.keys.names])
    _refuse_missing(trials, np.isnan(found), "duration")
    return found


def _refuse_missing(trials: TrialList, is_missing: NDArray[np.bool_], what: str) -> None:
    if is_missing.any():
        keys = trials.keys
        first = int(np.argmax(is_missing[keys.enrol] | is_missing[keys.test]))
        sides = (int(keys.enrol[first]), int(keys.test[first]))
        name = keys.names[next(side for side in sides if is_missing[side])]
        raise DataError(
            f"{trials.where(first)}: {name!r} has no {what} "
            f"({int(is_missing.sum()):,} of {len(keys.names):,} names have none)"
        )


def _centred(embeddings: Embeddings, rows: NDArray[np.int64], center: Embeddings | None) -> Floats:
    matrix = embeddings.matrix[rows].astype(np.float64)
    if center is not None:
        if center.embedding_dim != matrix.shape[1]:
            raise ShapeError(
                f"{center.source.path} has embeddings of width {center.embedding_dim}, but "
                f"{embeddings.source.path} has {matrix.shape[1]}: use those of the same model"
            )
        matrix -= center.matrix.mean(axis=0, dtype=np.float64)
    return matrix


def _moments(unit: Floats, scoring: Scoring, progress: StageProgress | None) -> Moments:
    assert scoring.norm is not None
    cohort, top_n = scoring.norm.cohort, scoring.norm.top_n
    others = unit_rows(_centred(cohort, np.arange(len(cohort)), scoring.center))
    if others.shape[1] != unit.shape[1]:
        raise ShapeError(
            f"{cohort.source.path} has embeddings of width {others.shape[1]}, but the trials' have "
            f"{unit.shape[1]}: use those of the same model"
        )
    if progress is not None:
        progress("comparing with the cohort", 0, 1)
    found = nearest_moments(unit, others, top_n=top_n, name=f"the cohort {cohort.source.path}")
    if progress is not None:
        progress("comparing with the cohort", 1, 1)
    return found


def calibrate_speakers(
    embeddings: Embeddings, trials: TrialList, scoring: Scoring
) -> QualityCalibration:
    """Fit the calibration on trials of other speakers, such as those of ``draw_trials``.

    Speakers of these trials that are in the cohort as well meet themselves there: keep ``top_n``
    large, so that one among the nearest changes little.
    """
    if trials.is_genuine is None:
        raise DataError(f"{trials.source.path} has no labels: calibrate on trials that have them")
    scored = score_speakers(embeddings, trials, scoring)
    return fit_quality(scored.scores, trials.is_genuine, scored.names, scored.columns)


def evaluate_speakers(
    embeddings: Embeddings,
    trials: TrialList,
    options: EvaluationOptions | None = None,
    *,
    scoring: Scoring | None = None,
    calibration: QualityCalibration | None = None,
    scores: str | Path | None = None,
    guard: Guard | None = None,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Score a list of trials and measure.

    Args:
        embeddings: Of whole utterances, one for every name in the list.
        trials: The list, with labels.
        options: What to measure.
        scoring: Mean, cohort and durations.
        calibration: Turns scores and qualities into log-likelihood ratios, which are evaluated.
        scores: Where a table of the final scores is written; None for nowhere.
        guard: Decides whether an existing table is replaced; None for always.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.
    """
    if trials.is_genuine is None:
        raise DataError(f"{trials.source.path} has no labels: give a trial list that has them")
    scoring = scoring or Scoring()
    scored = score_speakers(embeddings, trials, scoring, progress=progress)
    final = scored.scores
    if calibration is not None:
        final = calibration.apply(final, scored.names, scored.columns)
    tables: tuple[Source, ...] = ()
    if scores is not None:
        write_scores(scores, trials, final, guard=guard)
        tables = (Source(str(scores), sha256_of(scores), "scores"),)
    others = [scoring.center, None if scoring.norm is None else scoring.norm.cohort]
    sources = (embeddings.source, *(other.source for other in others if other is not None))
    score_set = ScoreSet(
        scores=final,
        is_genuine=trials.is_genuine,
        keys=trials.keys,
        sources=(trials.source, *dict.fromkeys(sources), *tables),
        subjects=trials.subjects,
        where=trials.where,
        pair_counts=trials.pair_counts,
    )
    return evaluate_scores(score_set, options, command=command, progress=progress)


def write_scores(
    path: str | Path, trials: TrialList, scores: Floats, *, guard: Guard | None = None
) -> None:
    """Write a table with the columns enrol, test, score and label, in full precision."""
    with replacing(Path(path)) as temporary:
        _write_table(temporary, trials, scores)
        if guard is not None:
            guard.check_content(Path(path), sha256_of(temporary))


def _write_table(path: Path, trials: TrialList, scores: Floats) -> None:
    cells = name_cells(trials.keys.names)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(score_header(trials))
        for start in range(0, len(scores), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            file.write(score_lines(trials, cells, scores[rows], rows))


def draw_trials(
    embeddings: Embeddings,
    num_trials: int = 20_000,
    *,
    speakers: Sequence[str] | None = None,
    seed: int = 0,
) -> TrialList:
    """Trials of a training set to calibrate on, half of them genuine, each pair at most once.

    Args:
        embeddings: Names the utterances.
        num_trials: How many to draw; pairs that are drawn twice are left out.
        speakers: Of the utterances; without them the first folders in which names differ.
        seed: Of the draws.

    Raises:
        DataError: No speaker has two utterances, or there is one speaker only.
    """
    found = speakers_of(embeddings.keys) if speakers is None else list(speakers)
    if len(found) != len(embeddings):
        raise ShapeError(f"there are {len(found)} speakers for {len(embeddings)} utterances")
    _, places, counts = np.unique(found, return_inverse=True, return_counts=True)
    if len(counts) < 2 or counts.max() < 2:
        raise DataError(
            f"{embeddings.source.path} has {len(counts)} speakers with at most {counts.max()} "
            "utterances: trials need two speakers, one of them with two utterances"
        )
    generator = np.random.default_rng(seed)
    order = np.argsort(places, kind="stable")
    starts = np.cumsum(counts) - counts
    enrol = generator.choice(np.flatnonzero(counts[places] > 1), num_trials // 2)
    same = starts[places[enrol]] + generator.integers(counts[places[enrol]])
    sides = [np.stack([enrol, order[same]])]
    sides.append(generator.integers(len(found), size=(2, num_trials - num_trials // 2)))
    pairs = np.sort(np.concatenate(sides, axis=1), axis=0)
    pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1).astype(np.int32)
    keys = TrialKeys.from_codes(embeddings.keys, pairs[0], pairs[1])
    is_genuine = places[pairs[0]] == places[pairs[1]]
    digest = hashlib.sha256(f"{embeddings.source.sha256} {num_trials} {seed}".encode()).hexdigest()
    source = Source(f"trials drawn from {embeddings.source.path}", digest, "trials")
    return TrialList(keys, is_genuine, source, where=lambda row: f"{source.path}, number {row}")
