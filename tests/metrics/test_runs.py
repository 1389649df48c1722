"""Means over training runs and their differences, by their definitions and on simulated studies."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import POPULATIONS, TOGETHER, CoverageBenchmark, Population, measure
from qmargin.errors import ProtocolError, ShapeError
from qmargin.metrics.runs import (
    LEAST_PAIRS,
    Runs,
    difference_over_runs,
    logits,
    mean_over_runs,
    rate_difference,
)

SMALL = CoverageBenchmark(studies=1000, subjects=100, replicates=200)


def some_runs(seed, num_runs=3, num_replicates=50):
    rng = np.random.default_rng(seed)
    observed = rng.normal(size=num_runs)
    return Runs(observed, observed[:, None] + 0.3 * rng.normal(size=(num_runs, num_replicates)))


def test_variances_add_up_as_they_are_defined():
    first, second = some_runs(0, 3), some_runs(1, 4)
    made = difference_over_runs(first, second, num_subjects=80)
    variances, shares = [], []
    for observed, draws in (first, second):
        count = len(observed)
        variances.append(np.var(observed, ddof=1) / count)
        centred = draws - draws.mean(axis=1, keepdims=True)
        apart = [np.var(centred[:, r], ddof=1) for r in range(draws.shape[1])]
        shares.append(np.mean(apart) / count)
    means = first.draws.mean(axis=0) - second.draws.mean(axis=0)
    common = max(0.0, np.var(means, ddof=1) - sum(shares))
    variance = sum(variances) + common
    degrees = 1 / (1 / 79 + 1 / 49)
    weight = variances[0] ** 2 / 2 + variances[1] ** 2 / 3 + common**2 / degrees
    assert made.value == pytest.approx(first.observed.mean() - second.observed.mean())
    assert made.standard_error == pytest.approx(math.sqrt(variance))
    assert made.degrees == pytest.approx(variance**2 / weight)
    assert made.num_runs == 3
    assert made.run_share == pytest.approx(sum(variances) / variance)


def test_without_identities_it_is_welchs_test():
    """Replicates that do not differ leave the runs alone."""
    first, second = (some_runs(seed, count) for seed, count in ((2, 3), (3, 5)))
    sides = [Runs(one.observed, np.repeat(one.observed[:, None], 9, 1)) for one in (first, second)]
    made = difference_over_runs(*sides, num_subjects=100)
    wanted = stats.ttest_ind(first.observed, second.observed, equal_var=False)
    assert (made.p_value, made.degrees) == pytest.approx((wanted.pvalue, wanted.df))
    assert made.interval(0.9) == pytest.approx(tuple(wanted.confidence_interval(0.9)))
    assert made.run_share == 1.0


def test_seeds_with_their_own_identities_are_the_paired_t_test():
    first, second = some_runs(4, 5), some_runs(5, 5)
    made = difference_over_runs(first, second, num_subjects=100, shares_subjects=False)
    wanted = stats.ttest_rel(first.observed, second.observed)
    assert made.p_value == pytest.approx(wanted.pvalue)
    assert made.interval() == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    assert made.run_share is None  # identities and trainings differ together
    one = mean_over_runs(first, num_subjects=100, shares_subjects=False)
    ends = stats.ttest_1samp(first.observed, 0.0).confidence_interval(0.95)
    assert one.interval() == pytest.approx(tuple(ends))
    with pytest.raises(ShapeError, match="5 and 3 runs cannot be paired"):
        difference_over_runs(first, some_runs(0, 3), num_subjects=9, shares_subjects=False)


def test_runs_with_the_same_seeds_are_compared_in_pairs():
    first, second = some_runs(4, 5), some_runs(5, 5)
    made = difference_over_runs(first, second, num_subjects=90, are_paired=True)
    apart = Runs(first.observed - second.observed, first.draws - second.draws)
    assert made == mean_over_runs(apart, num_subjects=90)
    centred = apart.draws - apart.draws.mean(axis=1, keepdims=True)
    common = apart.draws.mean(axis=0).var(ddof=1) - centred.var(axis=0, ddof=1).mean() / 5
    variance = apart.observed.var(ddof=1) / 5 + max(0.0, common)
    assert made.standard_error == pytest.approx(math.sqrt(variance))
    with pytest.raises(ShapeError, match="5 and 3 runs"):
        difference_over_runs(first, some_runs(0, 3), num_subjects=9, are_paired=True)


def test_one_run_covers_identities_alone_and_says_so():
    first, second = some_runs(6, 1, 200), some_runs(7, 3, 200)
    for sides in ((first, second), (second, first), (first, some_runs(8, 1, 200))):
        made = difference_over_runs(*sides, num_subjects=10_000)
        spread = np.std(sides[0].draws.mean(axis=0) - sides[1].draws.mean(axis=0), ddof=1)
        assert (made.num_runs, made.run_share) == (1, None)
        assert made.standard_error == pytest.approx(spread, abs=1e-12)


def test_signs_and_levels():
    made, other = (
        difference_over_runs(*sides, num_subjects=50)
        for sides in ((some_runs(0), some_runs(1)), (some_runs(1), some_runs(0)))
    )
    low, high = made.interval()
    assert other.interval() == pytest.approx((-high, -low)) and other.value == -made.value
    assert made.p_value == pytest.approx(other.p_value)
    edge = made.interval(1 - made.p_value)  # the p-value is where an interval just holds zero
    assert min(map(abs, edge)) == pytest.approx(0.0, abs=1e-9)
    # the definition of power: of noncentral t
    critical = stats.t.ppf(0.995, made.degrees)
    power = 1 - stats.nct.cdf(critical, made.degrees, made.detectable(0.99) / made.standard_error)
    assert power == pytest.approx(0.8, abs=1e-4)


def test_what_has_no_value_or_no_spread():
    first, second = some_runs(0, 3, 100), some_runs(1, 3, 100)
    kept = difference_over_runs(first, second, num_subjects=50)
    holes = np.concatenate([first.draws, np.full((3, 2), np.nan)], axis=1)
    more = np.concatenate([second.draws, np.zeros((3, 2))], axis=1)
    sides = (Runs(first.observed, holes), Runs(second.observed, more))
    assert difference_over_runs(*sides, num_subjects=50) == kept
    with pytest.raises(ProtocolError, match="60 of 100 replicates"):
        holes = first.draws.copy()
        holes[1, :60] = np.nan
        mean_over_runs(Runs(first.observed, holes), num_subjects=50)
    with pytest.raises(ProtocolError, match="2 are needed"):
        mean_over_runs(Runs([1.0], [[1.0]]), num_subjects=50)
    flat = Runs([0.5, 0.5], np.full((2, 9), 0.5))
    same = difference_over_runs(flat, flat, num_subjects=50)
    assert (same.value, same.p_value, same.interval(), same.detectable()) == (0, 1, (0, 0), 0)
    with pytest.raises(ProtocolError, match="all runs and replicates are equal"):
        difference_over_runs(flat, Runs([0.4, 0.4], np.full((2, 9), 0.4)), num_subjects=50)
    for bad in (Runs([], np.zeros((0, 5))), Runs([0.5], [0.5, 0.6]), Runs([0.5, 0.6], [[0.5]])):
        with pytest.raises(ShapeError, match=r"give \[n\] and \[n, R\]"):
            mean_over_runs(bad, num_subjects=50)
    with pytest.raises(ShapeError, match="same num_replicates"):
        difference_over_runs(first, some_runs(1, 3, 99), num_subjects=50)


def test_logits_and_back():
    rates = np.array([0.0, 0.2, 0.7, 1.0])
    found = logits(rates, 50)
    assert found[1:3] == pytest.approx(np.log(rates[1:3] / (1 - rates[1:3])))
    assert (found[0], -found[3]) == pytest.approx((math.log(0.01 / 0.99),) * 2)
    middle = float(found[1] + found[2]) / 2
    assert rate_difference(float(found[2] - found[1]), middle) == pytest.approx(0.5)
    assert rate_difference(-0.3, middle) == -rate_difference(0.3, middle)
    assert rate_difference(0.0, middle) == 0.0


@pytest.mark.parametrize("population", POPULATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("count", [3, 6])
def test_intervals_hold_the_truth_as_often_as_they_say(population: Population, count: int):
    """Two equally good losses, with small and large differences between seeds."""
    found = measure(population, (count, count), SMALL)
    most = 1.0 if population == TOGETHER and count < LEAST_PAIRS else 0.98
    assert 0.93 <= found["used"] <= most, found
    assert 0.65 <= found["power"] <= 0.85, found


def test_runs_that_are_good_or_bad_together():
    """Whoever takes them for independent has intervals that are too wide, and shows less."""
    together, alone = (measure(one, (6, 6), SMALL) for one in (TOGETHER, POPULATIONS[2]))
    assert together["apart"] > 0.99 and together["width_by_seed"] < 0.6 * together["width_apart"]
    assert 0.93 <= alone["apart"] <= 0.97  # where they are independent both hold
    assert alone["width_by_seed"] < 1.25 * alone["width_apart"]


def test_drawing_few_seeds_with_replacement_holds_it_too_rarely():
    """Why the interval is no percentile bootstrap over seeds, and none over identities alone."""
    found = measure(POPULATIONS[2], (3, 3), SMALL)
    assert found["drawn_twice"] < 0.91 and found["identities_alone"] < 0.7, found


def test_two_pairs_of_runs_are_too_few():
    """Why runs are paired from four seeds on."""
    found = measure(POPULATIONS[2], (2, 2), SMALL)
    assert found["by_seed"] < 0.92 < found["used"] == found["apart"], found


def test_unequal_numbers_of_seeds():
    found = measure(POPULATIONS[1], (6, 3), SMALL)
    assert 0.93 <= found["apart"] <= 0.98, found
