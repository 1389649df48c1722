"""Paired comparison of two systems."""

import dataclasses

import numpy as np
import pytest

from qmargin.errors import ConfigError, ProtocolError, ShapeError
from qmargin.metrics.bootstrap import bootstrap
from qmargin.metrics.comparison import compare, paired_difference
from qmargin.metrics.subjects import Trials


def system(gain, *, seed=0, noise_seed=1, num_subjects=30, num_trials=3000):
    """Trials that depend on ``seed`` alone, with scores that are better by ``gain``."""
    rng = np.random.default_rng(seed)
    enrol = rng.integers(num_subjects, size=num_trials).astype(np.int32)
    test = np.where(
        rng.random(num_trials) < 0.3, enrol, rng.integers(num_subjects, size=num_trials)
    ).astype(np.int32)
    is_genuine = enrol == test
    noise = np.random.default_rng(noise_seed).normal(size=num_trials)
    names = tuple(f"{index:02d}" for index in range(num_subjects))
    return Trials(noise + (2 + gain) * is_genuine, is_genuine, enrol, test, names)


def replicates(trials, **options):
    return bootstrap(trials, options.pop("fars", [0.01, 0.1]), num_replicates=200, **options)


def test_a_system_does_not_differ_from_itself():
    found = replicates(system(0.0))
    comparison = compare(found, found)
    for difference in (*comparison.tar, comparison.eer, *comparison.min_dcf):
        assert (difference.difference, difference.low, difference.high) == (0.0, 0.0, 0.0)
        assert difference.p_value == 1.0
        assert difference.num_replicates == 200


def test_a_better_system_is_better_in_every_measure():
    comparison = compare(replicates(system(1.5)), replicates(system(0.0, noise_seed=2)))
    for difference in comparison.tar:
        assert 0 < difference.low < difference.difference < difference.high
        assert difference.p_value == 2 / 201
    for difference in (comparison.eer, *comparison.min_dcf):
        assert difference.low < difference.difference < difference.high < 0
        assert difference.p_value == 2 / 201


def test_exchange_of_systems_changes_signs_only():
    first, second = replicates(system(0.1)), replicates(system(0.0, noise_seed=3))
    there, back = compare(first, second), compare(second, first)
    for one, other in zip(there.tar, back.tar, strict=True):
        assert one.difference == -other.difference
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
        assert one.p_value == other.p_value


@pytest.mark.parametrize("num_below", [0, 1, 24, 26, 400, 500])
def test_p_value_and_interval_agree(num_below):
    """The interval of level 95 % holds zero exactly if the p-value is above 5 %."""
    values = np.linspace(1, 2, 999)
    values[:num_below] -= 3
    found = paired_difference(1.0, 0.0, values, np.zeros(999))
    assert found.p_value == min(1.0, 2 * (min(num_below, 999 - num_below) + 1) / 1000)
    assert (found.low <= 0 <= found.high) == (found.p_value > 0.05)


def test_replicates_where_either_system_is_undefined_are_left_out():
    values = np.ones(100)
    holes = values.copy()
    holes[:3] = np.nan
    assert paired_difference(1.0, 0.0, holes, values).num_replicates == 97
    holes[:10] = np.nan
    with pytest.raises(ProtocolError, match="10 of 100 replicates"):
        paired_difference(1.0, 0.0, values, holes)


def test_only_measures_of_both_are_compared():
    first = replicates(system(0.1), fars=[0.1, 0.02], p_targets=[0.05, 0.2])
    second = replicates(system(0.0), fars=[0.02, 0.3, 0.1], p_targets=[0.2], has_eer=False)
    comparison = compare(first, second)
    assert comparison.fars == (0.1, 0.02)
    assert comparison.p_targets == (0.2,)
    assert comparison.eer is None
    assert comparison.tar[0].difference == first.observed_tar[0] - second.observed_tar[2]
    assert comparison.tar[1].difference == first.observed_tar[1] - second.observed_tar[0]
    assert comparison.min_dcf[0].difference == (
        first.observed_min_dcf[1] - second.observed_min_dcf[0]
    )


def test_unpaired_replicates_are_refused():
    base = replicates(system(0.0))
    others = {
        "trials": replicates(system(0.0, seed=9)),
        "seed": replicates(system(0.0), seed=1),
        "subjects": dataclasses.replace(base, subjects_sha256="0" * 64),
        "num_replicates": bootstrap(system(0.0), [0.01], num_replicates=50),
    }
    for name, other in others.items():
        with pytest.raises(ProtocolError, match=f"same {name}"):
            compare(base, other)


def test_impossible_values_are_refused():
    with pytest.raises(ShapeError, match=r"\(2,\) and \(3,\)"):
        paired_difference(0.0, 0.0, [1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="level=2"):
        paired_difference(0.0, 0.0, [1.0], [1.0], level=2.0)
