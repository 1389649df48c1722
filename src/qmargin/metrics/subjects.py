"""Trials with their subjects, and how often each subject is drawn in a bootstrap replicate."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.checks import checked_scores


@dataclass(frozen=True, eq=False)
class Trials:
    """Scores of pairs, with the subject on each side.

    Attributes:
        scores: ``[n]`` float32 or float64.
        is_genuine: ``[n]`` bool.
        enrol_subject: ``[n]`` int32, index into ``subject_names``.
        test_subject: ``[n]`` int32, index into ``subject_names``.
        subject_names: Distinct and sorted. Where no subjects are known, the names of the files.
    """

    scores: NDArray[np.floating]
    is_genuine: NDArray[np.bool_]
    enrol_subject: NDArray[np.int32]
    test_subject: NDArray[np.int32]
    subject_names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", checked_scores(self.scores, "scores"))
        object.__setattr__(self, "subject_names", tuple(self.subject_names))
        for name in ("is_genuine", "enrol_subject", "test_subject"):
            dtype = np.bool_ if name == "is_genuine" else np.int32
            object.__setattr__(self, name, _column(getattr(self, name), name, dtype, len(self)))
        _check_subjects(self)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def sha256(self) -> str:
        """Hash of the pairs and labels, whatever their order and scores."""
        width = len(self.subject_names)
        pair = self.enrol_subject.astype(np.int64) * width + self.test_subject
        keys = np.sort(2 * pair + self.is_genuine)
        return hashlib.sha256(keys.astype("<i8").tobytes()).hexdigest()


def make_trials(
    scores: ArrayLike,
    is_genuine: ArrayLike,
    *,
    enrol_subjects: Sequence[str],
    test_subjects: Sequence[str],
) -> Trials:
    """Trials from the name of the subject on each side.

    Examples:
        >>> trials = make_trials(
        ...     [0.9, 0.1], [True, False], enrol_subjects=["bo", "bo"], test_subjects=["bo", "al"]
        ... )
        >>> trials.subject_names, trials.enrol_subject, trials.test_subject
        (('al', 'bo'), array([1, 1], dtype=int32), array([1, 0], dtype=int32))
    """
    names = tuple(sorted({*enrol_subjects, *test_subjects}))
    index = {name: position for position, name in enumerate(names)}
    sides = [
        np.fromiter(map(index.__getitem__, side), dtype=np.int32, count=len(side))
        for side in (enrol_subjects, test_subjects)
    ]
    return Trials(np.asarray(scores), np.asarray(is_genuine), sides[0], sides[1], names)


@dataclass(frozen=True)
class SubjectWeights:
    """How often each subject is drawn in each replicate: as many draws as there are subjects.

    The draws follow from the sorted names and the seed alone, so two systems scored on the same
    trials get the same replicates.

    Attributes:
        subjects: Distinct names, sorted.
        num_replicates: Number of replicates.
        seed: Any integer from 0.

    Examples:
        >>> weights = SubjectWeights(("al", "bo", "cy"), num_replicates=2)
        >>> weights.rows(0, 2).sum(axis=1)
        array([3, 3])
    """

    subjects: tuple[str, ...] = field(repr=False)
    num_replicates: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "subjects", tuple(self.subjects))
        check_names(self.subjects)
        if self.num_replicates < 1:
            raise ConfigError(f"num_replicates={self.num_replicates} is below 1: give at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative: give an integer from 0")

    @property
    def sha256(self) -> str:
        """Hash of the names."""
        digest = hashlib.sha256()
        for name in self.subjects:
            digest.update(name.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Weights ``[stop - start, num_subjects]`` of some replicates."""
        size = len(self.subjects)
        rows = np.empty((stop - start, size), dtype=np.int64)
        for row, replicate in zip(rows, range(start, stop), strict=True):
            # a stream per replicate: any part of the weights can be made on its own
            draws = np.random.default_rng([self.seed, replicate]).integers(size, size=size)
            row[:] = np.bincount(draws, minlength=size)
        return rows


def check_names(names: Sequence[str]) -> None:
    """Refuse names that are not distinct and sorted, or fewer than two."""
    if len(names) < 2:
        raise ProtocolError(
            f"{len(names)} subjects cannot be resampled, at least 2 are needed: "
            f"give the subject of each trial"
        )
    for left, right in pairwise(names):
        if left >= right:
            raise DataError(
                f"subject {right!r} follows {left!r}, names are distinct and sorted: "
                f"use make_trials"
            )


def _column(values: ArrayLike, name: str, dtype: type, length: int) -> NDArray[np.generic]:
    array = np.asarray(values)
    if array.shape != (length,):
        raise ShapeError(
            f"{name} has shape {array.shape}, the scores have ({length},): give one per trial"
        )
    if array.dtype == dtype:
        return array
    cast: NDArray[np.generic] = array.astype(dtype)
    if not np.array_equal(cast, array):
        row = int(np.flatnonzero(cast != array)[0])
        raise DataError(f"{name}[{row}] is {array[row]!r}, it must be {dtype.__name__}: convert it")
    return cast


def _check_subjects(trials: Trials) -> None:
    check_names(trials.subject_names)
    width = len(trials.subject_names)
    for name in ("enrol_subject", "test_subject"):
        wrong = np.flatnonzero((getattr(trials, name) < 0) | (getattr(trials, name) >= width))
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"{name}[{row}] is {getattr(trials, name)[row]}, it must be from 0 to {width - 1}: "
                f"index subject_names"
            )
    alone = ~trials.is_genuine & (trials.enrol_subject == trials.test_subject)
    if alone.any():
        row = int(np.flatnonzero(alone)[0])
        raise DataError(
            f"trial {row} is labelled impostor but both sides are subject "
            f"{trials.subject_names[trials.enrol_subject[row]]!r}: correct the label or the subject"
        )
