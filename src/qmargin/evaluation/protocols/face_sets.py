"""Sets of image pairs in folds: LFW, CFP-FP, AgeDB-30, CALFW, CPLFW and others stored like them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.embed import IMAGE_SIZE
from qmargin.evaluation.evaluate import (
    EvaluationOptions,
    StageProgress,
    default_name,
    evaluate_scores,
)
from qmargin.evaluation.result import Hardest, Measure, Result, Source
from qmargin.evaluation.scores import ScoreSet
from qmargin.evaluation.trials import TrialKeys
from qmargin.files import Guard, sha256_of
from qmargin.metrics.folds import kfold_accuracy

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NUM_FOLDS = 10
SET_FARS = (1e-3, 1e-2, 1e-1)
COMPATIBLE_FAR = 1e-3


@dataclass(frozen=True)
class VerificationSet:
    """Pairs of encoded images, in the order of their folds.

    Attributes:
        pictures: Distinct encoded images.
        rows: Pictures of every pair, ``[p, 2]``.
        numbers: Place in the file of each picture's first copy, which names it.
        is_genuine: ``[p]``.
        source: The file.
    """

    pictures: tuple[bytes, ...] = field(repr=False)
    rows: NDArray[np.int32]
    numbers: tuple[int, ...] = field(repr=False)
    is_genuine: NDArray[np.bool_]
    source: Source

    def __len__(self) -> int:
        return len(self.is_genuine)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the pictures."""
        return tuple(f"{number:06d}" for number in self.numbers)

    def images(self, size: int = IMAGE_SIZE) -> EncodedImages:
        """The pictures as a model takes them."""
        return EncodedImages(self.pictures, size)


@dataclass(frozen=True)
class EncodedImages:
    """Encoded images by number, decoded to RGB ``size x size`` when asked for; labels are -1."""

    encoded: tuple[bytes, ...] = field(repr=False)
    size: int = IMAGE_SIZE

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        from qmargin.data.images import decode_image, resize_image

        return resize_image(decode_image(self.encoded[index]), self.size), -1


def read_verification_set(path: str | Path) -> VerificationSet:
    """Read a ``.bin`` file, without running what may be hidden in it, or one converted from it.

    Images that occur in several pairs are kept once.
    """
    from qmargin.data.readers.verification_bin import read_bin

    images, is_genuine = read_bin(path)
    place: dict[bytes, int] = {}
    rows = np.empty(len(images), np.int32)
    numbers: list[int] = []
    pictures: list[bytes] = []
    for number, image in enumerate(images):
        digest = hashlib.sha256(image).digest()
        if digest not in place:
            place[digest] = len(pictures)
            numbers.append(number)
            pictures.append(image)
        rows[number] = place[digest]
    source = Source(str(path), sha256_of(path), "trials")
    return VerificationSet(
        tuple(pictures), rows.reshape(-1, 2), tuple(numbers), np.asarray(is_genuine), source
    )


@dataclass(frozen=True)
class PairFeatures:
    """What a set is scored with.

    Attributes:
        unit: Features of the pictures, each of length 1, ``[n, d]``.
        norms: Mean length of a picture's raw embeddings, ``[n]``.
        has_flip: Whether mirror images are in the features.
    """

    unit: Floats
    norms: Floats
    has_flip: bool


def flip_features(embeddings: NDArray[np.floating], *, has_flip: bool = True) -> PairFeatures:
    """Features of pictures from raw embeddings, in float64.

    Args:
        embeddings: Of the picture and of its mirror image side by side, ``[n, 2 d]``, whose sum is
            the feature; or ``[n, d]`` without the flip test.
        has_flip: Which of the two.

    Examples:
        >>> flip_features(np.array([[3.0, 0.0, 0.0, 3.0]])).unit.round(3)
        array([[0.707, 0.707]])
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
            "finite, so it has no direction: embed it again"
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

    Args:
        pairs: The set.
        features: What ``flip_features`` made of its pictures' embeddings.
        options: What to measure.
        compatible: Also measure as InsightFace does: thresholds from a grid of squared distances,
            and a TAR whose FAR is that of the other folds.
        sources: Files that the features came from.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.
    """
    options = options or EvaluationOptions(fars=SET_FARS, protocol=default_name(pairs.source.path))
    if len(features.unit) != len(pairs.pictures):
        raise ShapeError(
            f"there are features of {len(features.unit):,} pictures, but {pairs.source.path} has "
            f"{len(pairs.pictures):,}: were they made from another set?"
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
    options = replace(options, kind="lfw", scoring="cosine")
    options = replace(options, flip="sum" if features.has_flip else "none")
    options = replace(options, subjects="none") if options.subject_of is None else options
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    found = kfold_accuracy(scores, pairs.is_genuine, num_folds=NUM_FOLDS)
    flip = "with flip test" if features.has_flip else "without flip test"
    note = f"{flip}, thresholds of the other folds"
    extra = {f"{NUM_FOLDS}-fold accuracy": Measure(found.mean, found.std, note)}
    if compatible:
        extra |= _compatible(left - right, pairs.is_genuine)
    mean_norm = float(features.norms[pairs.rows].mean())
    extra["mean norm"] = Measure(mean_norm, note="of raw embeddings")
    return result.with_extra(extra)


def _compatible(differences: Floats, is_genuine: NDArray[np.bool_]) -> dict[str, Measure]:
    distances = np.einsum("ij,ij->i", differences, differences)
    accuracy = fold_accuracy(distances, is_genuine, num_folds=NUM_FOLDS)
    rates = fold_tar(distances, is_genuine, COMPATIBLE_FAR, num_folds=NUM_FOLDS)
    far = f"{COMPATIBLE_FAR:g}"
    return {
        f"{NUM_FOLDS}-fold accuracy, InsightFace": Measure(
            accuracy.mean,
            accuracy.std,
            "thresholds 0, 0.01, .. 3.99 of squared distances; population deviation",
        ),
        f"TAR at FAR {far}, InsightFace": Measure(
            rates.tar,
            rates.tar_std,
            f"mean over folds at thresholds of the others; the realised FAR is {rates.far:.2g}",
        ),
    }


def write_pictures(
    folder: str | Path,
    pairs: VerificationSet,
    hardest: Hardest | None,
    *,
    guard: Guard | None = None,
) -> int:
    """Write the pictures of the hardest pairs under the names that the result has for them.

    ``qmargin report --media FOLDER`` then shows them. Nothing is written unless this is called.

    Returns:
        Number of files.
    """
    picture_of = dict(zip(pairs.keys, pairs.pictures, strict=True))
    return write_hardest(folder, hardest, picture_of.get, guard=guard)


@dataclass(frozen=True)
class FoldAccuracy:
    """Mean over the folds and their standard deviation, ``num_folds`` in the denominator."""

    mean: float
    std: float
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class FoldTar:
    """Means over the folds."""

    tar: float
    tar_std: float
    far: float
    thresholds: tuple[float, ...]


def fold_accuracy(distances: Floats, is_genuine: Bools, *, num_folds: int = 10) -> FoldAccuracy:
    """Accuracy of each fold at the first of the thresholds 0, 0.01, .. 3.99 best on the others.

    Examples:
        >>> distances = np.array([0.5, 1.5, 0.5, 1.5])
        >>> fold_accuracy(distances, np.array([1, 0, 1, 0], bool), num_folds=2)
        FoldAccuracy(mean=1.0, std=0.0, thresholds=(0.51, 0.51))
    """
    grid = np.arange(0, 4, 0.01)
    accuracies, thresholds = [], []
    for is_test in _folds(distances, is_genuine, num_folds):
        genuine, impostor = _accepted(distances, is_genuine, ~is_test, grid)
        best = float(grid[int(np.argmax(genuine - impostor))])  # right answers, up to a constant
        is_right = (distances[is_test] < best) == is_genuine[is_test]
        accuracies.append(float(is_right.mean()))
        thresholds.append(best)
    return FoldAccuracy(float(np.mean(accuracies)), float(np.std(accuracies)), tuple(thresholds))


def fold_tar(
    distances: Floats, is_genuine: Bools, far: float = 1e-3, *, num_folds: int = 10
) -> FoldTar:
    """TAR of each fold where the others have the FAR: thresholds 0, 0.001, .. 3.999, interpolated.

    Examples:
        >>> distances = np.array([0.5, 1.5, 0.5, 1.5])
        >>> found = fold_tar(distances, np.array([1, 0, 1, 0], bool), 0.5, num_folds=2)
        >>> found.tar, found.far
        (1.0, 0.0)
    """
    grid = np.arange(0, 4, 0.001)
    tars, fars, thresholds = [], [], []
    for is_test in _folds(distances, is_genuine, num_folds):
        _, accepted = _accepted(distances, is_genuine, ~is_test, grid)
        rates = accepted / np.count_nonzero(~is_test & ~is_genuine)
        threshold = 0.0
        if rates.max() >= far:
            distinct, first = np.unique(rates, return_index=True)
            threshold = float(np.interp(far, distinct, grid[first]))
        is_accepted = distances < threshold
        tars.append(float(is_accepted[is_test & is_genuine].mean()))
        fars.append(float(is_accepted[is_test & ~is_genuine].mean()))
        thresholds.append(threshold)
    return FoldTar(
        float(np.mean(tars)), float(np.std(tars)), float(np.mean(fars)), tuple(thresholds)
    )


def _folds(distances: Floats, is_genuine: Bools, num_folds: int) -> Iterator[Bools]:
    """Which trials are in each fold: in order, the first folds one longer where they differ."""
    if distances.shape != is_genuine.shape or distances.ndim != 1:
        raise ShapeError(
            f"distances have the shape {distances.shape} and labels {is_genuine.shape}: "
            "give one of each per pair"
        )
    if not 2 <= num_folds <= len(distances):
        raise ProtocolError(f"{len(distances)} pairs do not make {num_folds} folds of at least 2")
    for rows in np.array_split(np.arange(len(distances)), num_folds):
        is_test = np.zeros(len(distances), np.bool_)
        is_test[rows] = True
        for name, chosen in (("genuine", is_genuine), ("impostor", ~is_genuine)):
            if not (chosen & is_test).any() or not (chosen & ~is_test).any():
                raise ProtocolError(
                    f"pairs {rows[0]} to {rows[-1]}, a fold, or the other folds have 0 {name} "
                    "pairs: every fold needs both kinds"
                )
        yield is_test


def _accepted(
    distances: Floats, is_genuine: Bools, chosen: Bools, grid: Floats
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Chosen genuine and impostor pairs whose distance is below each threshold."""
    sides = [np.sort(distances[chosen & kind]) for kind in (is_genuine, ~is_genuine)]
    genuine, impostor = (np.searchsorted(side, grid, side="left") for side in sides)
    return genuine, impostor


def write_hardest(
    folder: str | Path,
    hardest: Hardest | None,
    picture_of: Callable[[str], bytes | None],
    *,
    guard: Guard | None = None,
) -> int:
    """Write pictures of the hardest pairs, named as the result names them.

    ``qmargin report --media FOLDER`` shows them.

    Args:
        folder: Where they go.
        hardest: Of a result.
        picture_of: Encoded picture of a name, PNG or JPEG; None to leave it out.
        guard: Decides whether existing files are replaced; None for always.

    Returns:
        Number of files.
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
