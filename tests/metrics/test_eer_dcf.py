import math
from functools import partial

import numpy as np
import pytest

from helpers.rates import plain_eer, plain_min_dcf, plain_points, score_sets
from qmargin.errors import ConfigError
from qmargin.metrics import eer_dcf
from qmargin.metrics.curve import det_curve
from qmargin.metrics.eer_dcf import HEAVY, ScoreBins, eer, min_dcf
from qmargin.metrics.operating import rates_at

SETS = score_sets()
BINS = [1, 2, 3, 16, 1 << 10]


def cast(name: str, dtypes: str) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    return genuine, impostor


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
def test_eer_is_the_crossing_of_the_polyline(
    name: str, dtypes: str, monkeypatch: pytest.MonkeyPatch
):
    genuine, impostor = cast(name, dtypes)
    expected = plain_eer(genuine, impostor)
    assert eer(genuine, impostor).eer == expected
    for num_bins in BINS:
        monkeypatch.setattr(eer_dcf, "default_num_bins", lambda _, number=num_bins: number)
        assert eer(genuine, impostor).eer == expected


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
def test_min_dcf_is_the_least_cost(name: str, dtypes: str, monkeypatch: pytest.MonkeyPatch):
    genuine, impostor = cast(name, dtypes)
    for p_target in (0.01, 0.05, 0.5, 0.9):
        found = min_dcf(genuine, impostor, p_target)
        least = plain_min_dcf(genuine, impostor, p_target)
        assert found.min_dcf == pytest.approx(least, rel=1e-14)
        assert found.min_dcf <= 1.0
        rates = rates_at(genuine, impostor, found.threshold)
        assert (rates.far, rates.frr) == (found.far, found.frr)
        for num_bins in BINS:
            with monkeypatch.context() as patch:
                patch.setattr(eer_dcf, "default_num_bins", lambda _, number=num_bins: number)
                assert repr(min_dcf(genuine, impostor, p_target)) == repr(found)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
def test_bins_within_bins_change_nothing(name: str, dtypes: str, monkeypatch: pytest.MonkeyPatch):
    genuine, impostor = cast(name, dtypes)

    usual = eer_dcf.default_num_bins
    for metric in (eer, min_dcf, partial(min_dcf, p_target=0.5)):
        expected = repr(metric(genuine, impostor))
        for num_bins in (2, 3, 1 << 12):  # at first, then as many as usual in each of them
            first = iter([num_bins])
            with monkeypatch.context() as patch:
                patch.setattr(eer_dcf, "FEW_SCORES", 2)
                patch.setattr(eer_dcf, "HEAVY", 2)
                patch.setattr(
                    eer_dcf,
                    "default_num_bins",
                    lambda size, first=first: next(first, None) or usual(size),
                )
                assert repr(metric(genuine, impostor)) == expected


@pytest.mark.parametrize("name", SETS)
def test_the_eer_threshold_is_the_nearer_end_of_the_crossing_step(name: str):
    genuine, impostor = SETS[name]
    found = eer(genuine, impostor)
    rates = rates_at(genuine, impostor, found.threshold)
    gaps = [
        abs(accepts / len(impostor) - rejects / len(genuine))
        for _, accepts, rejects in plain_points(genuine, impostor)
    ]
    assert abs(rates.far - rates.frr) == pytest.approx(min(gaps), abs=1e-15)


@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
@pytest.mark.parametrize("kind", ["normal", "ties", "outlier", "exponential", "infinite"])
def test_long_inputs_agree_with_sorting_everything(
    kind: str, dtypes: str, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(3)
    genuine, impostor = rng.normal(2.0, 1.0, 40_000), rng.normal(0.0, 1.0, 300_000)
    if kind == "ties":
        genuine, impostor = np.round(genuine, 2), np.round(impostor, 2)
    elif kind == "outlier":
        impostor[17] = -1e30
    elif kind == "exponential":
        genuine, impostor = np.exp(8 * genuine), np.exp(8 * impostor)
    elif kind == "infinite":
        genuine[:50], impostor[:70] = -np.inf, np.inf
    genuine, impostor = genuine.astype(dtypes[0]), impostor.astype(dtypes[1])
    bins = ScoreBins(genuine, impostor)
    assert bins.num_bins > 1
    assert (bins.sizes.max() > HEAVY) == (kind in ("outlier", "exponential"))

    def metrics(*sides: np.ndarray) -> list[object]:
        return [eer(*sides), *(min_dcf(*sides, p_target) for p_target in (0.01, 0.05, 0.5))]

    found = metrics(genuine, impostor)
    assert metrics(rng.permutation(genuine), rng.permutation(impostor)) == found
    monkeypatch.setattr(eer_dcf, "default_num_bins", lambda size: 1)
    assert metrics(genuine, impostor) == found


def test_the_order_of_ties_changes_nothing():
    """Tools that step through tied scores one by one answer differently for each order."""
    scores = np.array([0.0, 0.5, 0.5, 0.5, 1.0])
    expected = eer(scores, scores)
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(5)
        assert eer(scores[order], scores[order[::-1]]) == expected
    assert expected.eer == 0.5
    # FAR is 1/3 between the two largest impostors, where FRR, in steps of 1/200000, passes it.
    genuine, impostor = np.arange(200_000.0), np.array([50_000.5, 99_999.5, 0.5])
    assert eer(genuine, impostor).eer == 1 / 3


def test_costs_move_the_prior():
    genuine, impostor = SETS["normal 0"]
    weighted = min_dcf(genuine, impostor, 0.01, c_miss=10.0)
    prior = 10 * 0.01 / (10 * 0.01 + 0.99)
    assert weighted.min_dcf == pytest.approx(min_dcf(genuine, impostor, prior).min_dcf, rel=1e-12)


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
@pytest.mark.parametrize("option", ["p_target", "c_miss", "c_fa"])
def test_impossible_priors_and_costs_are_refused(option: str, value: float):
    with pytest.raises(ConfigError, match=f"{option}="):
        min_dcf([1.0], [0.0], **{option: value})


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
def test_every_point_is_the_definition(name: str, dtypes: str):
    genuine, impostor = cast(name, dtypes)
    curve = det_curve(genuine, impostor)
    thresholds, accepts, rejects = zip(*plain_points(genuine, impostor), strict=True)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    np.testing.assert_array_equal(curve.far, np.array(accepts) / len(impostor))
    np.testing.assert_array_equal(curve.frr, np.array(rejects) / len(genuine))
    assert (curve.far[0], curve.frr[0]) == (1.0, 0.0)
    assert (curve.far[-1], curve.frr[-1]) == (0.0, 1.0)
    np.testing.assert_array_equal(curve.tar, 1.0 - curve.frr)


@pytest.mark.parametrize("num_points", [2, 3, 50, 400])
def test_thinning_keeps_points_and_ends(num_points: int):
    rng = np.random.default_rng(1)
    curve = det_curve(rng.normal(2, 1, 3_000), rng.normal(0, 1, 30_000))
    thin = curve.thin(num_points)
    assert 2 <= len(thin) <= num_points
    exact = set(zip(curve.thresholds, curve.far, curve.frr, strict=True))
    assert set(zip(thin.thresholds, thin.far, thin.frr, strict=True)) <= exact
    assert (thin.far[0], thin.far[-1], thin.thresholds[-1]) == (1.0, 0.0, math.inf)
    assert (np.diff(thin.thresholds) > 0).all()
    if num_points == 400:  # both tails are drawn as finely as the middle
        assert len(thin) > 300
        assert np.count_nonzero(thin.far < 1e-2) > 50
        assert np.count_nonzero(thin.frr < 1e-2) > 20


def test_short_curves_are_not_thinned_and_end_in_nan_if_a_score_is_infinite():
    assert math.isnan(det_curve([math.inf], [0.0]).thresholds[-1])
    curve = det_curve([2.0, 3.0], [1.0, 2.0])
    assert curve.thin(4) is curve
    with pytest.raises(ConfigError, match="num_points=1 is too few"):
        curve.thin(1)
