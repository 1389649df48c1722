"""Calibration of many scores: the start that bins give changes nothing."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from helpers.rates import plain_min_cllr, score_sets
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics import calibration as module
from qmargin.metrics.calibration import Calibration, actual_dcf, calibrate, cllr, min_cllr
from qmargin.metrics.eer_dcf import min_dcf
from qmargin.metrics.operating import rates_at

SETS = score_sets()


def overlapping(seed: int = 0, size: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(1.5, 1.0, size), rng.normal(-0.5, 1.0, 3 * size)


def test_cllr_by_hand():
    genuine, impostor = [1.0, -2.0], [0.5]
    bits = (math.log2(1 + math.exp(-1)) + math.log2(1 + math.exp(2))) / 2
    assert cllr(genuine, impostor) == pytest.approx((bits + math.log2(1 + math.exp(0.5))) / 2)


def test_cllr_of_certain_answers():
    assert cllr([math.inf], [-math.inf]) == 0.0
    assert cllr([-math.inf], [0.0]) == math.inf
    assert cllr([1000.0], [1000.0]) == pytest.approx(500.0 / math.log(2.0))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_min_cllr_is_that_of_the_isotonic_posterior(name: str, dtype: type):
    with np.errstate(over="ignore"):
        genuine, impostor = (scores[:25].astype(dtype) for scores in SETS[name])
    expected = plain_min_cllr(genuine, impostor)
    assert min_cllr(genuine, impostor) == pytest.approx(expected, abs=1e-12)


def test_min_cllr_ignores_increasing_maps_and_order():
    genuine, impostor = overlapping()
    expected = min_cllr(genuine, impostor)
    assert min_cllr(np.exp(genuine), np.exp(impostor)) == pytest.approx(expected, abs=1e-12)
    assert min_cllr(genuine[::-1], np.sort(impostor)) == expected
    assert expected < cllr(*(calibrate(genuine, impostor).apply(s) for s in (genuine, impostor)))


@pytest.mark.parametrize("prior", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_calibration_is_the_best_affine_map(prior: float, shift: float):
    genuine, impostor = (scores * 0.05 + shift for scores in overlapping(1))
    found = calibrate(genuine, impostor, prior=prior)

    def loss(parameters: np.ndarray) -> float:
        scale, offset = parameters
        odds = math.log(prior / (1 - prior))
        misses = np.logaddexp(0, -(scale * (genuine - shift) + offset + odds)).mean()
        alarms = np.logaddexp(0, scale * (impostor - shift) + offset + odds).mean()
        return float(prior * misses + (1 - prior) * alarms)

    best = minimize(loss, [1.0, 0.0], method="Nelder-Mead", options={"fatol": 1e-15, "xatol": 1e-9})
    here = np.array([found.scale, found.offset + found.scale * shift])
    assert loss(here) <= best.fun + 1e-12
    np.testing.assert_allclose(here, best.x, rtol=1e-3, atol=1e-3)


def test_calibration_finds_the_true_ratio():
    """Scores of unit normals at +-1 have the log-likelihood ratio 2 * score."""
    rng = np.random.default_rng(4)
    found = calibrate(rng.normal(1, 1, 200_000), rng.normal(-1, 1, 200_000))
    assert found.scale == pytest.approx(2.0, rel=0.02)
    assert found.offset == pytest.approx(0.0, abs=0.02)


def test_calibration_undoes_an_affine_change():
    genuine, impostor = overlapping(2)
    plain = calibrate(genuine, impostor)
    moved = calibrate(3 * genuine + 7, 3 * impostor + 7)
    np.testing.assert_allclose(moved.apply(3 * genuine + 7), plain.apply(genuine), rtol=1e-9)
    assert Calibration(2.0, 1.0).apply(np.ones(2, np.float32)).dtype == np.float64


@pytest.mark.parametrize(
    ("genuine", "impostor"),
    [([2.0, 3.0], [0.0, 1.0]), ([1.0, 2.0], [0.0, 1.0]), ([0.0], [1.0]), ([1.0], [1.0])],
)
def test_separated_scores_have_no_calibration(genuine: list, impostor: list):
    with pytest.raises(ProtocolError, match="separates genuine and impostor scores"):
        calibrate(genuine, impostor)


def test_calibration_refuses_what_it_cannot_use():
    with pytest.raises(DataError, match="impostor score 1 is infinite"):
        calibrate([1.0, 0.0], [0.5, -math.inf])
    with pytest.raises(ConfigError, match="prior=1"):
        calibrate([1.0, 0.0], [0.5, 0.7], prior=1.0)


@pytest.mark.parametrize("p_target", [0.01, 0.05, 0.5])
def test_actual_cost_is_that_at_the_bayes_threshold(p_target: float):
    genuine, impostor = (2 * scores for scores in overlapping(3))
    rates = rates_at(genuine, impostor, math.log((1 - p_target) / p_target))
    cost = (p_target * rates.frr + (1 - p_target) * rates.far) / min(p_target, 1 - p_target)
    actual = actual_dcf(genuine, impostor, p_target)
    assert actual == pytest.approx(cost, rel=1e-12)
    assert actual >= min_dcf(genuine, impostor, p_target).min_dcf


def calibrations(genuine: np.ndarray, impostor: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    """With the coarse start, and from zero."""
    found = calibrate(genuine, impostor)
    monkeypatch.setattr(module, "_coarse_solution", lambda sides, prior: np.zeros(2))
    return found, calibrate(genuine, impostor)


@pytest.mark.parametrize("gap", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("kind", ["normal", "heavy", "rounded", "constant"])
def test_the_coarse_start_does_not_change_the_solution(
    gap: float, kind: str, monkeypatch: pytest.MonkeyPatch
):
    draw = np.random.default_rng(0)
    genuine, impostor = draw.standard_normal(900) + gap, draw.standard_normal(100_000)
    if kind == "heavy":
        genuine, impostor = genuine**3, draw.standard_t(2, 100_000)
    if kind == "rounded":
        genuine, impostor = genuine.round(1), impostor.round(1)
    if kind == "constant":
        genuine = np.append(np.full(900, gap), [-3.0, 3.0])
    found, plain = calibrations(genuine, impostor, monkeypatch)
    assert found.scale == pytest.approx(plain.scale, rel=1e-9)
    assert found.offset == pytest.approx(plain.offset, rel=1e-9, abs=1e-9)


def test_an_overlap_inside_one_bin_is_still_calibrated(monkeypatch: pytest.MonkeyPatch):
    """Means of bins are separated where the scores just are not."""
    impostor = np.append(np.linspace(0.0, 1.0, 100_000), 1.0 + 2e-6)
    genuine = np.append(np.linspace(1.0 + 3e-6, 2.0, 500), 1.0 + 1e-6)
    found, plain = calibrations(genuine, impostor, monkeypatch)
    assert found.scale == pytest.approx(plain.scale, rel=1e-6)
    assert found.offset == pytest.approx(plain.offset, rel=1e-6)
