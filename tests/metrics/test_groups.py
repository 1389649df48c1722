"""Rates per group at one threshold, and how far apart they are."""

import math

import numpy as np
import pytest

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.bootstrap import Trials, make_trials
from qmargin.metrics.groups import GroupRate, group_rates, spread

GROUP_OF = {f"s{index}": "xyz"[index % 3] for index in range(11)}  # s11 has no group


def random_trials(seed=0, num_trials=4000, dtype=np.float64):
    rng = np.random.default_rng(seed)
    enrol = rng.integers(12, size=num_trials).astype(np.int32)
    test = np.where(rng.random(num_trials) < 0.3, enrol, rng.integers(12, size=num_trials))
    is_genuine = enrol == test
    names = tuple(sorted(f"s{index}" for index in range(12)))
    scores = (rng.normal(size=num_trials) + is_genuine).round(2).astype(dtype)
    return Trials(scores, is_genuine, enrol, test.astype(np.int32), names)


def plain_counts(trials, threshold):
    """Errors and trials by group and label, in a plain loop."""
    counts = {}
    num_cross = num_ungrouped = 0
    for row, score in enumerate(trials.scores):
        sides = (trials.enrol_subject[row], trials.test_subject[row])
        first, second = (GROUP_OF.get(trials.subject_names[side]) for side in sides)
        if first is None or second is None:
            num_ungrouped += 1
        elif first != second:
            num_cross += 1
        else:
            is_genuine = bool(trials.is_genuine[row])
            is_error = (float(score) >= threshold) != is_genuine
            errors, total = counts.get((first, is_genuine), (0, 0))
            counts[first, is_genuine] = errors + is_error, total + 1
    return counts, num_cross, num_ungrouped


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threshold", [0.7, 1.1, -math.inf, math.inf, math.nan])
def test_rates_are_the_counts_of_each_group(threshold, dtype):
    trials = random_trials(dtype=dtype)
    found = group_rates(trials, GROUP_OF, threshold)
    counts, num_cross, num_ungrouped = plain_counts(trials, threshold)
    assert [group.name for group in found.groups] == ["x", "y", "z"]
    assert [group.num_subjects for group in found.groups] == [4, 4, 3]
    for group in found.groups:
        for rate, is_genuine in ((group.fmr, False), (group.fnmr, True)):
            assert (rate.errors, rate.trials) == counts[group.name, is_genuine]
            assert rate.rate == rate.errors / rate.trials
    assert (found.num_cross_impostors, found.num_ungrouped_trials) == (num_cross, num_ungrouped)


def rates_of(values):
    return [GroupRate(value, 50, 1000, "ok", "") for value in values]


def test_spread_follows_its_definitions():
    values = [0.001, 0.002, 0.008, 0.0005]
    found = spread(rates_of(values))
    assert found.max_over_geometric_mean == pytest.approx(0.008 / math.prod(values) ** 0.25)
    assert found.max_over_min == pytest.approx(16.0)
    differences = sum(abs(a - b) for a in values for b in values)
    assert found.gini == pytest.approx(4 / 3 * differences / (2 * 16 * np.mean(values)))
    assert found.note is None


def test_equal_rates_have_no_spread():
    found = spread(rates_of([0.25] * 3))
    assert (found.max_over_geometric_mean, found.max_over_min, found.gini) == (1.0, 1.0, 0.0)


def test_one_group_with_all_the_errors_has_gini_one():
    assert spread(rates_of([0.0, 0.0, 0.3])).gini == pytest.approx(1.0)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 0.5), (0.25, 0.75), (1.0, 1.0), (0.0, 0.0)])
def test_ineq_and_garbe_weigh_both_rates(beta, alpha):
    trials = random_trials()
    found = group_rates(trials, GROUP_OF, 1.1, beta=beta, alpha=alpha)
    fmr = [group.fmr.rate for group in found.groups]
    fnmr = [group.fnmr.rate for group in found.groups]
    ineq = (max(fmr) / min(fmr)) ** beta * (max(fnmr) / min(fnmr)) ** (1 - beta)
    assert found.ineq == pytest.approx(ineq)
    assert found.garbe == pytest.approx(alpha * found.fmr.gini + (1 - alpha) * found.fnmr.gini)


def test_a_group_without_errors_is_named_and_never_dropped():
    found = group_rates(random_trials(), GROUP_OF, math.inf)  # nobody is accepted
    assert all(group.fmr.rate == 0.0 and group.fmr.status == "few" for group in found.groups)
    assert "no errors in" in found.groups[0].fmr.message
    assert found.fmr.note == "3 of 3 groups without errors"
    assert found.fmr.max_over_geometric_mean is found.fmr.gini is found.ineq is found.garbe is None
    assert (found.fnmr.max_over_min, found.fnmr.gini) == (1.0, 0.0)


def test_some_groups_without_errors():
    found = spread(rates_of([0.0, 0.1]))
    assert found.max_over_geometric_mean is None
    assert found.max_over_min == math.inf
    assert found.gini == pytest.approx(1.0)
    assert found.note == "1 of 2 groups without errors"


def test_infinite_inequity_counts_only_where_it_has_weight():
    trials = make_trials(
        [0.9, 0.1, 0.8, 0.2, 0.7, 0.6, 0.1],
        [True, True, True, True, False, False, False],
        enrol_subjects=["a", "a", "c", "c", "a", "c", "c"],
        test_subjects=["a", "a", "c", "c", "b", "d", "d"],
    )
    groups = {"a": "x", "b": "x", "c": "y", "d": "y"}
    assert group_rates(trials, groups, 0.65).ineq == math.inf
    assert group_rates(trials, groups, 0.65, beta=0.0).ineq == 1.0


def test_groups_without_trials_are_not_measurable():
    trials = make_trials(
        [0.9, 0.1, 0.5],
        [True, False, False],
        enrol_subjects=["a", "a", "a"],
        test_subjects=["a", "b", "c"],
    )
    found = group_rates(trials, {"a": "x", "b": "x", "c": "y"}, 0.3)
    lonely = found.groups[1]
    assert (lonely.fmr.rate, lonely.fmr.status, lonely.fmr.message) == (
        None,
        "not measurable",
        "no trials",
    )
    assert found.fmr.num_groups == 1
    assert (
        found.fmr.note
        == "one group; 1 of 2 groups without trials, left out; 1 of 2 groups without errors"
    )
    assert found.ineq is None


def test_few_errors_are_flagged():
    errors = group_rates(random_trials(num_trials=600), GROUP_OF, 1.1).groups[0].fmr
    assert 0 < errors.errors < 30
    assert errors.status == "few"
    assert group_rates(random_trials(), GROUP_OF, 0.0).groups[0].fmr.status == "ok"


def test_impossible_input_is_refused():
    trials = random_trials()
    with pytest.raises(ProtocolError, match="none of the 12 subjects"):
        group_rates(trials, {"other": "x"}, 0.0)
    with pytest.raises(ConfigError, match="beta=2"):
        group_rates(trials, GROUP_OF, 0.0, beta=2.0)
    files = make_trials(
        [1.0, 0.0], [True, False], enrol_subjects=["a", "a"], test_subjects=["b", "c"]
    )
    with pytest.raises(DataError, match=r"trial 0 is genuine .* 'x' and 'y'"):
        group_rates(files, {"a": "x", "b": "y", "c": "x"}, 0.5)
