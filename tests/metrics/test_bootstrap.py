"""Replicates of the subject bootstrap against trials that are really repeated."""

import dataclasses

import numpy as np
import pytest

from helpers.rates import plain_eer, plain_min_dcf, plain_tar_at_far
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.bootstrap import (
    SortedTrials,
    SubjectWeights,
    Tail,
    Trials,
    Wanted,
    bootstrap,
    compare,
    interval,
    make_trials,
    paired_difference,
    weighted_point,
)
from qmargin.metrics.eer_dcf import eer, min_dcf
from qmargin.metrics.operating import tar_at_far

FARS = (0.004, 0.03, 0.3, 1.0)
PRIORS = (0.01, 0.5, 0.9)


def random_trials(kind, seed, *, dtype=np.float64, num_trials=400, num_subjects=9):
    rng = np.random.default_rng(seed)
    enrol = rng.integers(num_subjects, size=num_trials).astype(np.int32)
    test = rng.integers(num_subjects, size=num_trials).astype(np.int32)
    is_genuine = enrol == test
    noise = rng.normal(size=num_trials)
    scores = {
        "smooth": noise + 2 * is_genuine,
        "ties": np.round(noise + is_genuine),
        "equal": np.zeros(num_trials),
        "separate": noise + 100 * is_genuine,
        "reversed": noise - 100 * is_genuine,
        "infinite": np.where(rng.random(num_trials) < 0.4, np.inf, noise) * np.sign(noise),
    }[kind]
    names = tuple(f"{index:02d}" for index in range(num_subjects))
    return Trials(scores.astype(dtype), is_genuine, enrol, test, names)


def rows_of(trials, rows):
    columns = ("scores", "is_genuine", "enrol_subject", "test_subject")
    return Trials(*(getattr(trials, name)[rows] for name in columns), trials.subject_names)


def repeated(trials, weights):
    """Every trial as often as its subjects were drawn, in a plain loop."""
    genuine, impostor = [], []
    for row, score in enumerate(trials.scores):
        first, second = trials.enrol_subject[row], trials.test_subject[row]
        times = weights[first] if first == second else weights[first] * weights[second]
        (genuine if trials.is_genuine[row] else impostor).extend([score] * int(times))
    return np.array(genuine), np.array(impostor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "separate", "reversed", "infinite"])
def test_replicates_are_the_metrics_of_repeated_trials(kind, dtype):
    trials = random_trials(kind, seed=len(kind), dtype=dtype)
    found = bootstrap(
        trials, FARS, p_targets=PRIORS, grid_fars=[0.1, 0.6], num_replicates=12, seed=5
    )
    weights = SubjectWeights(trials.subject_names, num_replicates=12, seed=5).rows(0, 12)
    for row, drawn in enumerate(weights):
        genuine, impostor = repeated(trials, drawn)
        expected = [plain_tar_at_far(genuine, impostor, far)[0] for far in (*FARS, 0.1, 0.6)]
        np.testing.assert_array_equal(found.tar[row], expected[:4])
        np.testing.assert_array_equal(found.frr_at_grid[row], 1 - np.array(expected[4:]))
        assert found.eer[row] == plain_eer(genuine, impostor)
        expected = [plain_min_dcf(genuine, impostor, prior) for prior in PRIORS]
        np.testing.assert_allclose(found.min_dcf[row], expected, rtol=1e-13)


@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "separate", "infinite"])
def test_observed_values_are_those_of_the_plain_metrics(kind):
    trials = random_trials(kind, seed=1, num_trials=5000)
    found = bootstrap(trials, FARS, p_targets=PRIORS, num_replicates=1)
    genuine, impostor = trials.scores[trials.is_genuine], trials.scores[~trials.is_genuine]
    assert found.observed_tar.tolist() == [tar_at_far(genuine, impostor, far).tar for far in FARS]
    assert found.observed_eer == eer(genuine, impostor).eer
    expected = [min_dcf(genuine, impostor, prior).min_dcf for prior in PRIORS]
    assert found.observed_min_dcf.tolist() == expected


@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "separate", "reversed", "infinite"])
def test_a_short_tail_knows_when_it_does_not_know(kind):
    """Whatever the length of the tail, it gives no answer or the answer of the whole."""
    trials = SortedTrials(random_trials(kind, seed=2))
    weights = np.append(np.random.default_rng(0).multinomial(9, [1 / 9] * 9), 1)
    totals = trials.totals(weights[None])[:, 0]
    num_answers = 0
    for wanted in (Wanted((0.01,), (), False), Wanted((), (0.05,), False), Wanted((), (), True)):
        whole = weighted_point(Tail(trials, 10**6), weights, totals, wanted)
        for length in (1, 2, 3, 7, 40, 100, 200, 300, 10**6):
            point = weighted_point(Tail(trials, length), weights, totals, wanted)
            if point is not None:
                num_answers += 1
                np.testing.assert_array_equal(np.hstack(point), np.hstack(whole))
    assert num_answers >= 3


def test_genuine_pairs_of_two_files_count_both():
    """Where files stand for subjects, a genuine pair has two of them."""
    trials = Trials([3.0, 1.0, 2.0], [True, True, False], [0, 0, 1], [1, 2, 2], ("a", "b", "c"))
    found = bootstrap(trials, [0.5], p_targets=(), num_replicates=60)
    for row, (a, b, c) in enumerate(SubjectWeights(("a", "b", "c"), 60).rows(0, 60)):
        if b * c == 0 or a * b + a * c == 0:
            assert np.isnan(found.tar[row, 0])
            assert np.isnan(found.eer[row])
        else:
            assert found.tar[row, 0] == a * b / (a * b + a * c)


def test_order_of_trials_changes_nothing_and_replicates_are_counted():
    trials, seen = random_trials("ties", seed=3), []
    order = np.random.default_rng(1).permutation(len(trials))
    first = bootstrap(trials, FARS, num_replicates=37, progress=lambda *pair: seen.append(pair))
    second = bootstrap(rows_of(trials, order), FARS, num_replicates=37)
    for name in ("tar", "eer", "min_dcf"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.trials_sha256 == second.trials_sha256
    assert seen == [(16, 37), (32, 37), (37, 37)]


def test_what_is_not_asked_for_is_not_there():
    found = bootstrap(random_trials("smooth", seed=5), [0.01], p_targets=(), has_eer=False)
    assert (found.tar.shape, found.min_dcf.shape) == ((1000, 1), (1000, 0))
    assert np.isnan(found.eer).all()
    trials = random_trials("smooth", seed=6)
    for label, missing in ((True, "impostor"), (False, "genuine")):
        with pytest.raises(ProtocolError, match=f"0 {missing} trials"):
            bootstrap(rows_of(trials, trials.is_genuine == label), [0.01])


def test_interval_is_the_percentile_interval_unless_too_many_replicates_are_empty():
    values = np.random.default_rng(0).permutation(np.arange(1001.0))
    assert interval(values, 0.9) == pytest.approx((50.0, 950.0), rel=1e-12)
    values = np.arange(100.0)
    values[:5] = np.nan
    assert interval(values, 0.5) == (28.5, 75.5)
    values[5] = np.nan
    with pytest.raises(ProtocolError, match="6 of 100 replicates"):
        interval(values)


def trials(**changes):
    fields = {
        "scores": [0.9, 0.2, 0.1],
        "is_genuine": [True, False, False],
        "enrol_subject": [0, 0, 1],
        "test_subject": [0, 1, 2],
        "subject_names": ("al", "bo", "cy"),
    }
    return Trials(**{**fields, **changes})


def test_draws_are_multinomial():
    rows = SubjectWeights(tuple(f"{i:03d}" for i in range(50)), num_replicates=4000).rows(0, 4000)
    assert (rows.sum(axis=1) == 50).all() and (rows >= 0).all()
    np.testing.assert_allclose(rows.mean(axis=0), 1.0, atol=0.08)
    assert rows.var() == pytest.approx(1 - 1 / 50, abs=0.02)
    assert np.cov(rows[:, 0], rows[:, 1])[0, 1] == pytest.approx(-1 / 50, abs=0.06)


def test_any_part_of_the_draws_can_be_made_alone():
    weights = SubjectWeights(tuple("abcde"), num_replicates=20, seed=3)
    whole = weights.rows(0, 20)
    np.testing.assert_array_equal(weights.rows(7, 13), whole[7:13])
    other = SubjectWeights(tuple("abcde"), num_replicates=20, seed=4).rows(0, 20)
    assert not np.array_equal(other, whole)


def test_hashes_are_of_names_and_pairs():
    assert SubjectWeights(("ab", "c")).sha256 != SubjectWeights(("a", "bc")).sha256
    assert SubjectWeights(("ab", "c")).sha256 == SubjectWeights(("ab", "c"), seed=5).sha256
    base = trials()
    turned = dataclasses.replace(rows_of(base, [2, 0, 1]), scores=np.array([5.0, 6.0, 7.0]))
    assert turned.sha256 == base.sha256
    assert trials(enrol_subject=[0, 0, 0]).sha256 != base.sha256


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_names_become_sorted_indices_and_scores_keep_their_precision(dtype):
    sides = {"enrol_subjects": ["al", "al", "bo"], "test_subjects": ["al", "bo", "cy"]}
    made = make_trials(np.array([0.9, 0.2, 0.1], dtype), [1, 0, 0], **sides)
    assert made.subject_names == ("al", "bo", "cy")
    assert (made.is_genuine.dtype, made.scores.dtype) == (bool, dtype)
    assert made.sha256 == trials().sha256


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": [0.1, np.nan, 0.2]}, DataError, "1 is NaN"),
        ({"is_genuine": [True, False]}, ShapeError, r"is_genuine has shape \(2,\)"),
        ({"is_genuine": [2, 0, 0]}, DataError, r"is_genuine\[0\]"),
        ({"test_subject": [0, 1, 3]}, DataError, r"test_subject\[2\] is 3"),
        ({"test_subject": [0, 1, -1]}, DataError, r"test_subject\[2\] is -1"),
        ({"test_subject": [0, 0, 2]}, DataError, "trial 1 is labelled impostor .* 'al'"),
        ({"subject_names": ("al", "cy", "bo")}, DataError, "'bo' follows 'cy'"),
        ({"subject_names": ("al", "al", "cy")}, DataError, "'al' follows 'al'"),
        ({"subject_names": ("al",)}, ProtocolError, "1 subjects"),
    ],
)
def test_impossible_trials_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        trials(**changes)


def replicates(gain, *, fars=(0.01, 0.1), seed=0, noise_seed=1, **options):
    """Of trials that depend on ``seed`` alone, with scores that are better by ``gain``."""
    rng = np.random.default_rng(seed)
    enrol = rng.integers(30, size=3000)
    test = np.where(rng.random(3000) < 0.3, enrol, rng.integers(30, size=3000))
    is_genuine = enrol == test
    noise = np.random.default_rng(noise_seed).normal(size=3000)
    names = tuple(f"{index:02d}" for index in range(30))
    trials = Trials(noise + (2 + gain) * is_genuine, is_genuine, enrol, test, names)
    return bootstrap(trials, fars, **{"num_replicates": 200, **options})


def test_a_better_system_is_better_in_every_measure_and_none_than_itself():
    better, worse = replicates(1.5), replicates(0.0, noise_seed=2)
    comparison, same = compare(better, worse), compare(better, better)
    for difference in comparison.tar:
        assert 0 < difference.low < difference.difference < difference.high
    for difference in (comparison.eer, *comparison.min_dcf):
        assert difference.low < difference.difference < difference.high < 0
    for difference in (*comparison.tar, comparison.eer, *comparison.min_dcf):
        assert difference.p_value == 2 / 201
    for difference in (*same.tar, same.eer, *same.min_dcf):
        assert dataclasses.astuple(difference) == (0.0, 0.0, 0.0, 1.0, 200)


def test_exchange_of_systems_changes_signs_only():
    first, second = replicates(0.1), replicates(0.0, noise_seed=3)
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
    values, holes = np.ones(100), np.ones(100)
    holes[:3] = np.nan
    assert paired_difference(1.0, 0.0, holes, values).num_replicates == 97
    holes[:10] = np.nan
    with pytest.raises(ProtocolError, match="10 of 100 replicates"):
        paired_difference(1.0, 0.0, values, holes)


def test_only_measures_of_both_are_compared():
    first = replicates(0.1, fars=[0.1, 0.02], p_targets=[0.05, 0.2])
    second = replicates(0.0, fars=[0.02, 0.3, 0.1], p_targets=[0.2], has_eer=False)
    found = compare(first, second)
    assert (found.fars, found.p_targets, found.eer) == ((0.1, 0.02), (0.2,), None)
    tars = first.observed_tar - second.observed_tar[[2, 0]]
    assert [made.difference for made in found.tar] == tars.tolist()
    assert found.min_dcf[0].difference == first.observed_min_dcf[1] - second.observed_min_dcf[0]


def test_unpaired_replicates_are_refused():
    base = replicates(0.0)
    others = {
        "trials": replicates(0.0, seed=9),
        "seed": dataclasses.replace(base, seed=1),
        "subjects": dataclasses.replace(base, subjects_sha256="0" * 64),
        "num_replicates": replicates(0.0, num_replicates=50),
    }
    for name, other in others.items():
        with pytest.raises(ProtocolError, match=f"same {name}"):
            compare(base, other)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bootstrap(trials(), [0.0]), ConfigError, "far=0"),
        (lambda: bootstrap(trials(), [0.1], p_targets=[1.0]), ConfigError, "p_target=1"),
        (lambda: SubjectWeights(("a", "b"), num_replicates=0), ConfigError, "num_replicates=0"),
        (lambda: SubjectWeights(("a", "b"), seed=-1), ConfigError, "seed=-1"),
        (lambda: interval([1.0], 1.0), ConfigError, "level=1"),
        (lambda: paired_difference(0, 0, [1, 2], [1, 2, 3]), ShapeError, r"\(2,\) and \(3,\)"),
        (lambda: paired_difference(0, 0, [1], [1], level=2.0), ConfigError, "level=2"),
    ],
)
def test_impossible_values_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
