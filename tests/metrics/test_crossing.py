import math

import numpy as np
import pytest

from helpers.rates import plain_eer, plain_min_dcf, plain_points, score_sets
from qmargin.errors import ConfigError
from qmargin.metrics import bins as bins_module
from qmargin.metrics import crossing
from qmargin.metrics.bins import HEAVY, ScoreBins
from qmargin.metrics.crossing import Costs, eer, eer_of_bins, min_dcf, min_dcf_of_bins
from qmargin.metrics.operating import rates_at

SETS = score_sets()
BINS = [1, 2, 3, 16, 1 << 10]


def cast(name: str, dtypes: str) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    return genuine, impostor


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
@pytest.mark.parametrize("num_bins", BINS)
def test_eer_is_the_crossing_of_the_polyline(name: str, dtypes: str, num_bins: int) -> None:
    genuine, impostor = cast(name, dtypes)
    assert eer_of_bins(ScoreBins(genuine, impostor, num_bins)).eer == plain_eer(genuine, impostor)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
@pytest.mark.parametrize("num_bins", BINS)
def test_min_dcf_is_the_least_cost(name: str, dtypes: str, num_bins: int) -> None:
    genuine, impostor = cast(name, dtypes)
    bins = ScoreBins(genuine, impostor, num_bins)
    for p_target in (0.01, 0.05, 0.5, 0.9):
        found = min_dcf_of_bins(bins, Costs.of(p_target), p_target=p_target)
        least = plain_min_dcf(genuine, impostor, p_target)
        assert found.min_dcf == pytest.approx(least, rel=1e-14)
        assert found.min_dcf <= 1.0
        assert repr(found) == repr(min_dcf(genuine, impostor, p_target))
        rates = rates_at(genuine, impostor, found.threshold)
        assert (rates.far, rates.frr) == (found.far, found.frr)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
def test_bins_within_bins_change_nothing(
    name: str, dtypes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, impostor = cast(name, dtypes)
    expected = eer(genuine, impostor), min_dcf(genuine, impostor), min_dcf(genuine, impostor, 0.5)
    monkeypatch.setattr(bins_module, "FEW_SCORES", 2)
    monkeypatch.setattr(crossing, "HEAVY", 2)
    for num_bins in (2, 3, None):
        bins = ScoreBins(genuine, impostor, num_bins)
        found = (
            eer_of_bins(bins),
            min_dcf_of_bins(bins, Costs.of(0.01), p_target=0.01),
            min_dcf_of_bins(bins, Costs.of(0.5), p_target=0.5),
        )
        assert repr(found) == repr(expected)


@pytest.mark.parametrize("name", SETS)
def test_the_eer_threshold_is_the_nearer_end_of_the_crossing_step(name: str) -> None:
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
def test_long_inputs_agree_with_sorting_everything(kind: str, dtypes: str) -> None:
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
    plain = ScoreBins(genuine, impostor, 1)
    bins = ScoreBins(genuine, impostor)
    assert bins.num_bins > 1
    assert (bins.sizes().max() > HEAVY) == (kind in ("outlier", "exponential"))
    assert eer(genuine, impostor) == eer_of_bins(plain)
    for p_target in (0.01, 0.05, 0.5):
        sorted_all = min_dcf_of_bins(plain, Costs.of(p_target), p_target=p_target)
        assert min_dcf(genuine, impostor, p_target) == sorted_all
    shuffled = rng.permutation(genuine), rng.permutation(impostor)
    assert eer(*shuffled) == eer(genuine, impostor)
    assert min_dcf(*shuffled) == min_dcf(genuine, impostor)


def test_the_order_of_ties_changes_nothing() -> None:
    """Tools that step through tied scores one by one answer differently for each order."""
    scores = np.array([0.0, 0.5, 0.5, 0.5, 1.0])
    expected = eer(scores, scores)
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(5)
        assert eer(scores[order], scores[order[::-1]]) == expected
    assert expected.eer == 0.5


def test_the_crossing_of_unequal_numbers_is_rounded_once() -> None:
    """FAR is 1/3 between the two largest impostors, where FRR, in steps of 1/200000, passes it."""
    genuine, impostor = np.arange(200_000.0), np.array([50_000.5, 99_999.5, 0.5])
    assert eer(genuine, impostor).eer == 1 / 3


def test_costs_move_the_prior() -> None:
    genuine, impostor = SETS["normal 0"]
    weighted = min_dcf(genuine, impostor, 0.01, c_miss=10.0)
    prior = 10 * 0.01 / (10 * 0.01 + 0.99)
    assert weighted.min_dcf == pytest.approx(min_dcf(genuine, impostor, prior).min_dcf, rel=1e-12)


@pytest.mark.parametrize("p_target", [0.0, 1.0, -0.1, math.nan])
def test_impossible_priors_are_refused(p_target: float) -> None:
    with pytest.raises(ConfigError, match="p_target="):
        min_dcf([1.0], [0.0], p_target)


@pytest.mark.parametrize("cost", [0.0, -1.0, math.inf, math.nan])
def test_impossible_costs_are_refused(cost: float) -> None:
    with pytest.raises(ConfigError, match="c_miss="):
        min_dcf([1.0], [0.0], c_miss=cost)
    with pytest.raises(ConfigError, match="c_fa="):
        min_dcf([1.0], [0.0], c_fa=cost)
