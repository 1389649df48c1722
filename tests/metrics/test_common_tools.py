"""Where common tools go wrong, with the exact values."""

import math

import numpy as np
import pytest

from qmargin.errors import DataError, ProtocolError
from qmargin.metrics.calibration import cllr, min_cllr
from qmargin.metrics.curve import det_curve
from qmargin.metrics.eer_dcf import eer, min_dcf
from qmargin.metrics.operating import ImpostorTail, rates_at, tar_at_far


def shuffled(scores: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(scores)


def few_impostors() -> tuple[np.ndarray, np.ndarray]:
    """15,000 impostors; 4990 genuine scores above the second largest of them, 784 below it."""
    impostor = np.concatenate([[0.9, 0.8, 0.7], np.linspace(-1.0, 0.6, 14_997)])
    genuine = np.repeat([0.95, 0.85, 0.75, 0.65], [3000, 1990, 784, 4226])
    return shuffled(genuine, 0), shuffled(impostor, 1)


def tied_at_the_threshold() -> tuple[np.ndarray, np.ndarray]:
    """Half of the genuine scores tie with 5 of 1000 impostors."""
    genuine = np.repeat([0.9, 0.5], 100)
    impostor = np.concatenate([np.full(5, 0.5), np.linspace(0.0, 0.4, 995)])
    return genuine, impostor


def diagonal_of_ties() -> tuple[np.ndarray, np.ndarray]:
    """400 values, each of one genuine and one impostor score, above all other impostors."""
    values = np.arange(1.0, 401.0)
    return values, np.concatenate([values, np.linspace(-1.0, 0.0, 99_600)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fifteen_thousand_impostors(dtype: type):
    genuine, impostor = (scores.astype(dtype) for scores in few_impostors())
    exact = tar_at_far(genuine, impostor, 1e-4)
    assert (exact.tar, exact.false_accepts, exact.far) == (0.4990, 1, 1 / 15_000)
    nearest = tar_at_far(genuine, impostor, 1e-4, rule="nearest")
    assert (nearest.tar, nearest.false_accepts) == (0.5774, 2)
    assert f"{nearest.far:.2e}" == "1.33e-04"
    assert nearest.rule == "nearest"


@pytest.mark.parametrize("seed", range(5))
def test_ties_at_the_threshold(seed: int):
    genuine, impostor = (shuffled(scores, seed) for scores in tied_at_the_threshold())
    exact = tar_at_far(genuine, impostor, 1e-3)
    assert (exact.tar, exact.far, exact.false_accepts) == (0.50, 0.0, 0)
    assert min_dcf(genuine, impostor, p_target=0.01).min_dcf == 0.495
    interpolated = tar_at_far(genuine, impostor, 1e-3, rule="interpolated")
    assert interpolated.tar == pytest.approx(0.60, abs=1e-15)
    assert math.isnan(interpolated.threshold)  # no threshold attains it


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, math.inf, -math.inf])
@pytest.mark.parametrize("sizes", [(1, 1), (10, 30), (3, 200_000)])
def test_all_scores_equal(value: float, sizes: tuple[int, int]):
    genuine, impostor = np.full(sizes[0], value), np.full(sizes[1], value)
    assert eer(genuine, impostor).eer == 0.5
    assert min_dcf(genuine, impostor).min_dcf == 1.0
    assert min_dcf(genuine, impostor, p_target=0.05).min_dcf == 1.0
    if sizes[1] > 1:
        assert tar_at_far(genuine, impostor, 0.5).tar == 0.0
        assert tar_at_far(genuine, impostor, 0.5).far == 0.0


def test_scores_on_a_diagonal_of_ties():
    genuine, impostor = diagonal_of_ties()
    assert tar_at_far(genuine, impostor, 1e-3).tar == 0.25
    assert tar_at_far(genuine, impostor, 1e-3).far == 1e-3
    metrics = pytest.importorskip("sklearn.metrics", reason="comes with the dev extra")
    labels = np.concatenate([np.ones(400), np.zeros(100_000)])
    far, tar, _ = metrics.roc_curve(labels, np.concatenate([genuine, impostor]))
    assert tar[np.searchsorted(far, 1e-3, side="right") - 1] == 0.0025


@pytest.mark.parametrize(
    "metric",
    [
        lambda genuine, impostor: tar_at_far(genuine, impostor, 0.5),
        lambda genuine, impostor: rates_at(genuine, impostor, 0.5),
        eer,
        min_dcf,
        det_curve,
        cllr,
        min_cllr,
    ],
)
def test_nan_and_empty_scores_are_refused(metric):
    with pytest.raises(DataError, match="genuine score 1 is NaN"):
        metric([0.5, math.nan, math.nan], [0.1, 0.2])
    with pytest.raises(DataError, match="impostor score 2 is NaN"):
        metric(np.ones(3, np.float32), np.array([0.1, 0.2, math.nan], np.float32))
    with pytest.raises(ProtocolError, match="0 impostor scores"):
        metric([0.5], [])
    with pytest.raises(ProtocolError, match="0 genuine scores"):
        metric([], [0.5])


def test_the_stream_refuses_nan_and_no_impostors():
    with pytest.raises(DataError, match="impostor score 1 is NaN"):
        ImpostorTail(max_far=0.5, num_impostors=4).update([0.0, math.nan])
    with pytest.raises(ProtocolError, match="0 impostor scores"):
        ImpostorTail(max_far=0.5, num_impostors=0)
