"""Pairs of images: LFW, CFP-FP, AgeDB-30, CALFW, CPLFW and others in folds, and any list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.columns import numbered_lines
from qmargin.evaluation.embed import IMAGE_SIZE, Images, decoded_images
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import (
    EvaluationOptions,
    StageProgress,
    default_name,
    evaluate_scores,
)
from qmargin.evaluation.result import Hardest, Measure, Result, Source
from qmargin.evaluation.scores import ScoreSet, read_scores
from qmargin.evaluation.scoring import score_trials
from qmargin.evaluation.trials import TrialKeys, TrialList, check_pairs, read_trials
from qmargin.files import Guard, sha256_of
from qmargin.metrics.folds import kfold_accuracy

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NUM_FOLDS = 10
SET_FARS = (1e-3, 1e-2, 1e-1)
COMPATIBLE_FAR = 1e-3


@dataclass(frozen=True)
class VerificationSet:
    """Pairs of encoded images, in the order of their folds."""

    pictures: tuple[bytes, ...] = field(repr=False)  # distinct
    rows: NDArray[np.int32]  # pictures of every pair, [p, 2]
    numbers: tuple[int, ...] = field(repr=False)  # place in the file of each picture's first copy
    is_genuine: NDArray[np.bool_]  # [p]
    source: Source

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the pictures."""
        return tuple(f"{number:06d}" for number in self.numbers)

    def images(self, size: int = IMAGE_SIZE) -> Images:
        """The pictures as inputs of a model."""
        return decoded_images(self.pictures.__getitem__, len(self.pictures), size)


def read_verification_set(path: str | Path) -> VerificationSet:
    """Read a ``.bin`` file, or one converted from it; an image of several pairs is kept once."""
    from qmargin.data.readers.verification_bin import read_bin

    images, is_genuine = read_bin(path)
    place: dict[bytes, int] = {}
    rows, numbers = np.empty(len(images), np.int32), list[int]()
    for number, image in enumerate(images):
        rows[number] = place.setdefault(hashlib.sha256(image).digest(), len(place))
        if rows[number] == len(numbers):
            numbers.append(number)
    pictures = tuple(images[number] for number in numbers)
    source = Source(str(path), sha256_of(path), "trials")
    labels = np.asarray(is_genuine)
    return VerificationSet(pictures, rows.reshape(-1, 2), tuple(numbers), labels, source)


@dataclass(frozen=True)
class PairFeatures:
    """Features with which a set is scored."""

    unit: Floats  # features of the pictures, each of length 1, [n, d]
    norms: Floats  # mean length of a picture's raw embeddings, [n]
    has_flip: bool  # whether mirror images are in the features


def flip_features(embeddings: NDArray[np.floating], *, has_flip: bool = True) -> PairFeatures:
    """Features of pictures from raw embeddings, in float64.

    With the flip test, embeddings of the picture and of its mirror image are side by side,
    ``[n, 2 d]``, and their sum is the feature.
    """
    matrix = np.asarray(embeddings, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[1] == 0 or (has_flip and matrix.shape[1] % 2):
        raise ShapeError(
            f"embeddings have the shape {matrix.shape}: (n, {'2 d' if has_flip else 'd'}) is needed"
        )
    parts = np.split(matrix, 2, axis=1) if has_flip else [matrix]
    norms = np.mean([np.linalg.norm(part, axis=1) for part in parts], axis=0)
    total = np.sum(parts, axis=0)
    lengths = np.linalg.norm(total, axis=1, keepdims=True)
    if not (lengths > 0.0).all():
        raise DataError(
            f"the feature of picture {int(np.argmin(lengths))} has the length zero or is not "
            "finite: embed it again"
        )
    return PairFeatures(total / lengths, norms, has_flip)


def evaluate_verification_set(
    pairs: VerificationSet,
    features: PairFeatures,
    options: EvaluationOptions | None = None,
    *,
    compatible: bool = False,
    sources: tuple[Source, ...] = (),
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Accuracy over ten folds, and TAR at FAR 1e-3, 1e-2 and 1e-1 over all pairs.

    The two are different numbers: published tables of these sets are accuracies. An accuracy's
    threshold is chosen on the other folds, exactly; the TAR's on all pairs, conservatively.
    ``compatible`` also measures as InsightFace does: thresholds from a grid of squared distances,
    and a TAR whose FAR is that of the other folds. ``sources`` are the files of the features.
    """
    options = options or EvaluationOptions(fars=SET_FARS, protocol=default_name(pairs.source.path))
    if len(features.unit) != len(pairs.pictures):
        raise ShapeError(
            f"{pairs.source.path} has {len(pairs.pictures):,} pictures, not "
            f"{len(features.unit):,}: give features of this set"
        )
    left, right = features.unit[pairs.rows[:, 0]], features.unit[pairs.rows[:, 1]]
    scores = np.einsum("ij,ij->i", left, right)
    score_set = ScoreSet(
        scores,
        pairs.is_genuine,
        TrialKeys.from_codes(pairs.keys, pairs.rows[:, 0], pairs.rows[:, 1]),
        (pairs.source, *sources),
        where=lambda row: f"{pairs.source.path}, pair {row}",
    )
    flip, subjects = "sum" if features.has_flip else "none", options.subjects
    if options.subject_of is None:
        subjects = "none"
    options = replace(options, kind="lfw", scoring="cosine", flip=flip, subjects=subjects)
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    found = kfold_accuracy(scores, pairs.is_genuine, num_folds=NUM_FOLDS)
    note = f"{'with' if features.has_flip else 'without'} flip test, thresholds of the other folds"
    extra = {f"{NUM_FOLDS}-fold accuracy": Measure(found.mean, found.std, note)}
    if compatible:
        distances = np.einsum("ij,ij->i", left - right, left - right)
        rates = fold_rates(distances, pairs.is_genuine, COMPATIBLE_FAR, num_folds=NUM_FOLDS)
        note = "thresholds 0, 0.01, .. 3.99 of squared distances; population deviation"
        name = f"{NUM_FOLDS}-fold accuracy, InsightFace"
        extra[name] = Measure(float(rates.accuracy.mean()), float(rates.accuracy.std()), note)
        far = f"the realised FAR is {float(rates.far.mean()):.2g}"
        note = f"mean over folds at thresholds of the others; {far}"
        name = f"TAR at FAR {COMPATIBLE_FAR:g}, InsightFace"
        extra[name] = Measure(float(rates.tar.mean()), float(rates.tar.std()), note)
    mean_norm = float(features.norms[pairs.rows].mean())
    extra["mean norm"] = Measure(mean_norm, note="of raw embeddings")
    return result.with_extra(extra)


def write_pictures(
    folder: str | Path,
    pairs: VerificationSet,
    hardest: Hardest | None,
    *,
    guard: Guard | None = None,
) -> int:
    """Write the pictures of the hardest pairs, see ``write_hardest``."""
    picture_of = dict(zip(pairs.keys, pairs.pictures, strict=True))
    return write_hardest(folder, hardest, picture_of.get, guard=guard)


class FoldRates(NamedTuple):
    """Rates of every fold, ``[folds]`` each."""

    accuracy: Floats
    tar: Floats
    far: Floats


def fold_rates(
    distances: Floats, is_genuine: Bools, far: float = 1e-3, *, num_folds: int = 10
) -> FoldRates:
    """Rates of each fold at thresholds of the others, as InsightFace measures them.

    An accuracy is at the first of the thresholds 0, 0.01, .. 3.99 that is best on the others; a TAR
    where the others have the FAR: thresholds 0, 0.001, .. 3.999, interpolated. The first folds are
    one longer where folds differ.
    """
    if distances.shape != is_genuine.shape or distances.ndim != 1:
        raise ShapeError(
            f"distances have shape {distances.shape} and labels {is_genuine.shape}: "
            "give one of each per pair"
        )
    if not 2 <= num_folds <= len(distances):
        raise ProtocolError(f"{len(distances)} pairs do not make {num_folds} folds of at least 2")
    coarse, fine = np.arange(0, 4, 0.01), np.arange(0, 4, 0.001)
    found = []
    for rows in np.array_split(np.arange(len(distances)), num_folds):
        is_test = np.zeros(len(distances), np.bool_)
        is_test[rows] = True
        for name, kind in (("genuine", is_genuine), ("impostor", ~is_genuine)):
            if not (kind & is_test).any() or not (kind & ~is_test).any():
                raise ProtocolError(
                    f"pairs {rows[0]} to {rows[-1]}, or all others, have 0 {name} pairs: "
                    "give both kinds"
                )
        sides = [np.sort(distances[~is_test & kind]) for kind in (is_genuine, ~is_genuine)]
        genuine, impostor = (np.searchsorted(side, coarse, side="left") for side in sides)
        best = float(coarse[int(np.argmax(genuine - impostor))])  # right answers, up to a constant
        rates = np.searchsorted(sides[1], fine, side="left") / len(sides[1])
        threshold = 0.0
        if rates.max() >= far:
            distinct, first = np.unique(rates, return_index=True)
            threshold = float(np.interp(far, distinct, fine[first]))
        is_right, is_accepted = (distances < best) == is_genuine, distances < threshold
        places = (is_right[is_test], is_accepted[is_test & is_genuine])
        found.append([each.mean() for each in (*places, is_accepted[is_test & ~is_genuine])])
    return FoldRates(*map(np.array, zip(*found, strict=True)))


def write_hardest(
    folder: str | Path,
    hardest: Hardest | None,
    picture_of: Callable[[str], bytes | None],
    *,
    guard: Guard | None = None,
) -> int:
    """Write pictures of the hardest pairs, named as the result names them; returns their number.

    ``picture_of`` gives the encoded picture of a name, or None to leave it out. ``qmargin report
    --media FOLDER`` shows them.
    """
    folder, guard = Path(folder), guard or Guard(overwrite=True)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give one for the pictures")
    folder.mkdir(parents=True, exist_ok=True)
    trials = () if hardest is None else (*hardest.false_accepts, *hardest.false_rejects)
    number = 0
    for key in sorted({key for trial in trials for key in (trial.enrol, trial.test)}):
        picture = picture_of(key)
        if picture is not None:
            suffix = ".png" if picture.startswith(b"\x89PNG") else ".jpg"
            guard.write(folder / f"{key}{suffix}", picture)
            number += 1
    return number


@dataclass(frozen=True)
class PairTrials:
    """A list of pairs, and the fold of every pair where the list has folds, ``[n]``."""

    trials: TrialList
    folds: NDArray[np.int64] | None


def read_pair_trials(path: str | Path, *, extension: str = "jpg") -> PairTrials:
    """Read LFW's ``pairs.txt``, a CSV file with the header ``a,b,label``, or any trial list.

    ``extension`` is that of the images that ``pairs.txt`` numbers.
    """
    from qmargin.data.readers.lists import FIRST, LABEL, SECOND, read_pairs

    path = Path(path)
    _, line = next(numbered_lines(path), (0, b""))
    if not line:
        raise DataError(f"{path} is empty: give lines of two images and a label")
    text = line.decode("utf-8", "replace").lower()
    if path.suffix.lower() in (".csv", ".tsv"):
        cells = {cell.strip() for cell in text.replace("\t", ",").split(",")}
        is_pair_list = all(cells & set(names) for names in (FIRST, SECOND, LABEL))
    else:  # pairs.txt begins with its counts
        words = text.split()
        is_pair_list = len(words) <= 2 and all(word.isdigit() for word in words)
    if not is_pair_list:
        return PairTrials(read_trials(path), None)
    pairs = read_pairs(path, extension=extension)
    keys = TrialKeys.from_names(pairs.first, pairs.second)

    def where(row: int) -> str:
        return f"{path}, pair {row + 1}"

    counts = check_pairs(keys, pairs.is_genuine, where)
    source = Source(str(path), sha256_of(path), "trials")
    trials = TrialList(keys, pairs.is_genuine, source, where=where, pair_counts=counts)
    return PairTrials(trials, pairs.folds)


def evaluate_pairs(
    embeddings: Embeddings,
    trials: TrialList,
    options: EvaluationOptions | None = None,
    *,
    scores: str | Path,
    folds: NDArray[np.int64] | None = None,
    restart: bool = False,
    guard: Guard | None = None,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Verification of labelled pairs by the cosine of their embeddings.

    The table of scores goes to ``scores``, as in ``score_trials``. ``folds`` of the pairs add the
    accuracy at thresholds of the other folds.
    """
    if trials.is_genuine is None:
        raise DataError(f"{trials.source.path} has no labels: give a list of pairs that has them")
    scored = None if progress is None else partial(progress, "scoring")
    path = score_trials(
        embeddings, trials, out=scores, restart=restart, guard=guard, progress=scored
    )
    score_set = read_scores(path, trials=trials)
    score_set = replace(score_set, sources=(*score_set.sources, embeddings.source))
    options = replace(options or EvaluationOptions(), kind="pairs", scoring="cosine")
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    if folds is None:
        return result
    found = kfold_accuracy(score_set.scores, score_set.is_genuine, folds=folds)
    measure = Measure(found.mean, found.std, "thresholds of the other folds")
    return result.with_extra({f"{len(found.accuracies)}-fold accuracy": measure})
