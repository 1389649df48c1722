"""Folds as InsightFace counts them, against a loop that follows its words."""

import numpy as np
import pytest

from qmargin.errors import ProtocolError, ShapeError
from qmargin.evaluation.protocols.compatible import fold_accuracy, fold_tar


def folds_of(number: int, num_folds: int) -> list[np.ndarray]:
    """Contiguous folds, the first ones longer."""
    sizes = [number // num_folds + (fold < number % num_folds) for fold in range(num_folds)]
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def plain_accuracy(distances: np.ndarray, labels: np.ndarray, num_folds: int) -> list[float]:
    found = []
    for test in folds_of(len(distances), num_folds):
        train = np.setdiff1d(np.arange(len(distances)), test)
        best, best_accuracy = 0.0, -1.0
        for threshold in np.arange(0, 4, 0.01):
            accuracy = np.mean((distances[train] < threshold) == labels[train])
            if accuracy > best_accuracy:
                best, best_accuracy = threshold, accuracy
        found.append(np.mean((distances[test] < best) == labels[test]))
    return found


def plain_tar(
    distances: np.ndarray, labels: np.ndarray, far: float, num_folds: int
) -> tuple[list[float], list[float]]:
    tars, fars = [], []
    grid = np.arange(0, 4, 0.001)
    for test in folds_of(len(distances), num_folds):
        train = np.setdiff1d(np.arange(len(distances)), test)
        impostors = distances[train][~labels[train]]
        rates = [np.mean(impostors < threshold) for threshold in grid]
        if max(rates) < far:
            threshold = 0.0
        else:
            above = next(i for i, rate in enumerate(rates) if rate >= far)
            lower = max((rate for rate in rates if rate < far), default=None)
            if lower is None:
                threshold = grid[above]
            else:
                below = rates.index(lower)
                share = (far - lower) / (rates[above] - lower)
                threshold = grid[below] + share * (grid[above] - grid[below])
        chosen = distances[test]
        tars.append(np.mean(chosen[labels[test]] < threshold))
        fars.append(np.mean(chosen[~labels[test]] < threshold))
    return tars, fars


@pytest.mark.parametrize("number", [200, 207])
@pytest.mark.parametrize("digits", [1, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_both_measures_follow_the_loop(number: int, digits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(number) % 20 < 10
    distances = np.where(labels, rng.normal(1.0, 0.4, number), rng.normal(1.8, 0.4, number))
    distances = distances.clip(0, 4).round(digits)
    accuracies = plain_accuracy(distances, labels, 10)
    found = fold_accuracy(distances, labels)
    assert found.mean == pytest.approx(np.mean(accuracies), abs=1e-15)
    assert found.std == pytest.approx(np.std(accuracies), abs=1e-15)
    for far in (0.001, 0.03, 0.2):
        tars, fars = plain_tar(distances, labels, far, 10)
        rates = fold_tar(distances, labels, far)
        assert rates.tar == pytest.approx(np.mean(tars), abs=1e-15)
        assert rates.tar_std == pytest.approx(np.std(tars), abs=1e-15)
        assert rates.far == pytest.approx(np.mean(fars), abs=1e-15)


def test_a_far_that_no_threshold_reaches_accepts_nothing() -> None:
    distances = np.tile([0.5, 4.0], 20)  # impostors beyond the grid
    found = fold_tar(distances, np.tile([True, False], 20), 0.1)
    assert (found.tar, found.far) == (0.0, 0.0)
    assert found.thresholds == (0.0,) * 10


def test_what_has_no_folds() -> None:
    with pytest.raises(ProtocolError, match="3 pairs do not make 10 folds"):
        fold_accuracy(np.zeros(3), np.array([True, False, True]))
    with pytest.raises(ProtocolError, match="0 impostor pairs"):
        fold_accuracy(np.zeros(20), np.arange(20) < 10)
    with pytest.raises(ShapeError, match=r"labels \(2,\)"):
        fold_tar(np.zeros(3), np.array([True, False]))
