"""Folds as InsightFace measures them, to compare with its tables.

Both thresholds come from a grid of squared distances between unit features, and a pair is accepted
when its distance is below. The FAR of the second measure is met on the other folds, by
interpolation, and not on the pairs that are counted: the realised one differs and is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ProtocolError, ShapeError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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
