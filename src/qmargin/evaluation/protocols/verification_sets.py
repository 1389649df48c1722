"""Sets of image pairs in folds: LFW, CFP-FP, AgeDB-30, CALFW, CPLFW and others stored like them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.evaluate import default_name, evaluate_scores
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.keys import TrialKeys
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.compatible import fold_accuracy, fold_tar
from qmargin.evaluation.protocols.ijb_release import IMAGE_SIZE
from qmargin.evaluation.protocols.measures import Measure, Measured, with_measures
from qmargin.evaluation.result import Hardest, Source
from qmargin.evaluation.score_files import ScoreSet
from qmargin.files import Guard, sha256_of
from qmargin.metrics.folds import kfold_accuracy

Floats = NDArray[np.float64]
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
    from qmargin.data.verification_bin import read_bin

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
) -> Measured:
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
    options = replace(options, subjects="none") if options.subject_of is None else options
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    measures = [_accuracy(scores, pairs.is_genuine, features.has_flip)]
    if compatible:
        measures += _compatible(left - right, pairs.is_genuine)
    mean_norm = float(features.norms[pairs.rows].mean())
    measures.append(Measure("mean norm", mean_norm, None, "of raw embeddings"))
    return with_measures(result, tuple(measures))


def _accuracy(scores: Floats, is_genuine: NDArray[np.bool_], has_flip: bool) -> Measure:
    found = kfold_accuracy(scores, is_genuine, num_folds=NUM_FOLDS)
    flip = "with flip test" if has_flip else "without flip test"
    note = f"{flip}, thresholds of the other folds"
    return Measure(f"{NUM_FOLDS}-fold accuracy", found.mean, found.std, note)


def _compatible(differences: Floats, is_genuine: NDArray[np.bool_]) -> list[Measure]:
    distances = np.einsum("ij,ij->i", differences, differences)
    accuracy = fold_accuracy(distances, is_genuine, num_folds=NUM_FOLDS)
    rates = fold_tar(distances, is_genuine, COMPATIBLE_FAR, num_folds=NUM_FOLDS)
    far = f"{COMPATIBLE_FAR:g}"
    return [
        Measure(
            f"{NUM_FOLDS}-fold accuracy, InsightFace",
            accuracy.mean,
            accuracy.std,
            "thresholds 0, 0.01, .. 3.99 of squared distances; population deviation",
        ),
        Measure(
            f"TAR at FAR {far}, InsightFace",
            rates.tar,
            rates.tar_std,
            f"mean over folds at thresholds of the others; the realised FAR is {rates.far:.2g}",
        ),
    ]


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
    folder, guard = Path(folder), guard or Guard(overwrite=True)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give one for the pictures")
    folder.mkdir(parents=True, exist_ok=True)
    trials = () if hardest is None else (*hardest.false_accepts, *hardest.false_rejects)
    wanted = {key for trial in trials for key in (trial.enrol, trial.test)}
    picture_of = dict(zip(pairs.keys, pairs.pictures, strict=True))
    for key in sorted(wanted):
        suffix = ".png" if picture_of[key].startswith(b"\x89PNG") else ".jpg"
        guard.write(folder / f"{key}{suffix}", picture_of[key])
    return len(wanted)
