"""Accuracy over folds, identification, score normalisation and rates per group, by plain loops."""

import math

import numpy as np
import pytest

from helpers.rates import plain_tar_at_far
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics import (
    Trials,
    as_norm,
    group_rates,
    identify,
    kfold_accuracy,
    make_trials,
    s_norm,
    t_norm,
    z_norm,
)
from qmargin.metrics.groups import GroupRate, spread

INF, NAN = math.inf, math.nan


# -- folds ----------------------------------------------------------------------------------------


def labelled(seed=0, size=600):
    rng = np.random.default_rng(seed)
    is_genuine = rng.random(size) < 0.5
    return np.round(rng.normal(is_genuine * 1.5, 1.0), 2), is_genuine


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_thresholds_are_best_on_the_other_folds(dtype):
    scores, is_genuine = labelled()
    scores = scores.astype(dtype)
    folds = np.arange(600) * 7 % 5
    result = kfold_accuracy(scores, is_genuine, folds=folds)
    wide, results = scores.astype(float), zip(result.thresholds, result.accuracies, strict=True)
    for fold, (threshold, accuracy) in enumerate(results):
        rest, test = folds != fold, folds == fold
        wrong = np.sum((wide[rest] >= threshold) != is_genuine[rest])
        choices = [np.sum((wide[rest] >= t) != is_genuine[rest]) for t in (*wide[rest], INF)]
        assert wrong == min(choices)
        assert accuracy == np.mean((wide[test] >= threshold) == is_genuine[test])
    assert len(result.thresholds) == 5
    assert result.mean == pytest.approx(np.mean(result.accuracies))
    assert result.std == pytest.approx(np.std(result.accuracies, ddof=1))
    assert result.standard_error == pytest.approx(result.std / math.sqrt(5))


def test_ten_folds_follow_the_order_of_the_trials_but_not_within_a_fold():
    scores, is_genuine = labelled()
    folds = np.repeat(np.arange(10), 60)
    order = np.random.default_rng(1).permutation(600)
    plain = kfold_accuracy(scores, is_genuine)
    mixed = kfold_accuracy(scores[order], is_genuine[order], folds=folds[order])
    np.testing.assert_array_equal(plain.thresholds, mixed.thresholds)
    np.testing.assert_array_equal(plain.accuracies, mixed.accuracies)


@pytest.mark.parametrize(
    ("pair", "mean"), [([INF, -INF], 1.0), ([0.5] * 2, 0.5), ([-INF, INF], 0.5)]
)
def test_folds_of_infinite_and_equal_scores(pair, mean):
    assert kfold_accuracy(pair * 4, [1, 0] * 4, num_folds=2).mean == mean


# -- identification -------------------------------------------------------------------------------


def plain_identify(scores, probes, gallery, rank, fpir):
    """Rank rate and FNIR, one search at a time."""
    mates, best, hits = [], [], []
    for row, probe in zip(scores.tolist(), probes, strict=True):
        by_subject = {}
        for score, subject in zip(row, gallery, strict=True):
            by_subject[subject] = max(score, by_subject.get(subject, -INF))
        if probe in by_subject:
            mate = by_subject.pop(probe)
            mates.append(mate)
            hits.append(1 + sum(score >= mate for score in by_subject.values()) <= rank)
        else:
            best.append(max(by_subject.values()))
    tar, far = plain_tar_at_far(mates, best, fpir)
    return np.mean(hits), 1 - tar, far


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_searches_are_counted_as_defined(seed, dtype):
    rng = np.random.default_rng(seed)
    gallery = np.array([f"s{i}" for i in rng.integers(0, 12, 15)])
    probes = np.array([f"s{i}" for i in rng.integers(0, 24, 600)])
    scores = np.round(rng.normal(size=(600, 15)), 1) + (probes[:, None] == gallery) * 1.5
    scores = scores.astype(dtype)
    result = identify(scores, probes, gallery, [0.01, 0.1, 1.0], ranks=[3])
    assert result.ranks == (1, 3)
    assert result.num_mated + result.num_nonmated == 600
    for record in result.fnirs:
        first, fnir, fpir = plain_identify(scores, probes, gallery, 1, record.fpir_target)
        third, _, _ = plain_identify(scores, probes, gallery, 3, record.fpir_target)
        assert (result.rank1, result.rank_rates[1]) == (first, third)
        assert record.fnir == pytest.approx(fnir, abs=1e-15)
        assert record.fpir == fpir == record.false_positives / result.num_nonmated


def test_ties_do_not_favour_the_mate_and_its_entries_do_not_push_it_back():
    result = identify(np.ones((3, 4)), [0, 1, 2], [0, 1, 2, 3], ranks=[1, 3, 4])
    assert result.rank_rates == (0.0, 0.0, 1.0)
    assert identify([[0.9, 0.8, 0.1]], ["a"], ["a", "a", "b"]).rank1 == 1.0
    scores = [[INF, -INF], [-INF, -INF], [INF, 0.0]]
    result = identify(scores, ["a", "a", "z"], ["a", "b"], [1.0])
    assert (result.rank1, result.fnirs[0].fnir) == (0.5, 0.0)


# -- normalisation --------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
ENROL, TEST = RNG.normal(size=(4, 30)), RNG.normal(1.0, 2.0, size=(5, 30))
MATRIX = RNG.normal(size=(4, 5))
ENROL_INDEX, TEST_INDEX = RNG.integers(0, 4, 50), RNG.integers(0, 5, 50)


def plain_norm(score, row, top_n):
    kept = sorted(row.tolist())[-top_n:]
    mean = sum(kept) / top_n
    return (score - mean) / math.sqrt(sum((value - mean) ** 2 for value in kept) / top_n)


@pytest.mark.parametrize("top_n", [2, 7, 30])
def test_every_normalised_score_is_the_definition(top_n):
    found = as_norm(MATRIX, ENROL, TEST, top_n=top_n)
    for (e, t), score in np.ndenumerate(MATRIX):
        z, by_test = plain_norm(score, ENROL[e], top_n), plain_norm(score, TEST[t], top_n)
        assert found[e, t] == pytest.approx((z + by_test) / 2, rel=1e-12)
        if top_n == 30:
            assert z_norm(MATRIX, ENROL)[e, t] == pytest.approx(z, rel=1e-12)
            assert t_norm(MATRIX, TEST)[e, t] == pytest.approx(by_test, rel=1e-12)
            assert s_norm(MATRIX, ENROL, TEST)[e, t] == pytest.approx((z + by_test) / 2, rel=1e-12)


def test_normalised_trials_are_entries_of_the_matrix():
    scores = MATRIX[ENROL_INDEX, TEST_INDEX]
    index = {"enrol_index": ENROL_INDEX, "test_index": TEST_INDEX}
    for whole, trials in [
        (z_norm(MATRIX, ENROL), z_norm(scores, ENROL, enrol_index=ENROL_INDEX)),
        (t_norm(MATRIX, TEST), t_norm(scores, TEST, test_index=TEST_INDEX)),
        (s_norm(MATRIX, ENROL, TEST), s_norm(scores, ENROL, TEST, **index)),
        (as_norm(MATRIX, ENROL, TEST, top_n=9), as_norm(scores, ENROL, TEST, top_n=9, **index)),
    ]:
        np.testing.assert_array_equal(whole[ENROL_INDEX, TEST_INDEX], trials)
    infinite = z_norm([INF, -INF], ENROL, enrol_index=[0, 1])
    assert infinite.tolist() == [INF, -INF]
    narrow = [matrix.astype("f") for matrix in (MATRIX, ENROL, TEST)]
    wide = as_norm(*(matrix.astype("d") for matrix in narrow), top_n=9)
    np.testing.assert_array_equal(as_norm(*narrow, top_n=9), wide)


# -- groups ---------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("threshold", [0.7, 1.1, -INF, INF, NAN])
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


def spread_of(*values):
    return spread([GroupRate(value, 50, 1000, "ok", "") for value in values])


def test_spread_follows_its_definitions():
    values = [0.001, 0.002, 0.008, 0.0005]
    found = spread_of(*values)
    assert found.max_over_geometric_mean == pytest.approx(0.008 / math.prod(values) ** 0.25)
    assert found.max_over_min == pytest.approx(16.0)
    differences = sum(abs(a - b) for a in values for b in values)
    assert found.gini == pytest.approx(4 / 3 * differences / (2 * 16 * np.mean(values)))
    assert found.note is None
    equal = spread_of(*[0.25] * 3)
    assert (equal.max_over_geometric_mean, equal.max_over_min, equal.gini) == (1.0, 1.0, 0.0)
    assert spread_of(0.0, 0.0, 0.3).gini == pytest.approx(1.0)
    some = spread_of(0.0, 0.1)
    assert (some.max_over_geometric_mean, some.max_over_min) == (None, INF)
    assert some.note == "1 of 2 groups without errors"


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 0.5), (0.25, 0.75), (1.0, 1.0), (0.0, 0.0)])
def test_ineq_and_garbe_weigh_both_rates(beta, alpha):
    found = group_rates(random_trials(), GROUP_OF, 1.1, beta=beta, alpha=alpha)
    fmr = [group.fmr.rate for group in found.groups]
    fnmr = [group.fnmr.rate for group in found.groups]
    ineq = (max(fmr) / min(fmr)) ** beta * (max(fnmr) / min(fnmr)) ** (1 - beta)
    assert found.ineq == pytest.approx(ineq)
    assert found.garbe == pytest.approx(alpha * found.fmr.gini + (1 - alpha) * found.fnmr.gini)


def test_groups_without_errors_are_named_and_never_dropped():
    found = group_rates(random_trials(), GROUP_OF, INF)  # nobody is accepted
    assert all(group.fmr.rate == 0.0 and group.fmr.status == "few" for group in found.groups)
    assert found.fmr.note == "3 of 3 groups without errors"
    assert found.fmr.max_over_geometric_mean is found.fmr.gini is found.ineq is found.garbe is None
    assert (found.fnmr.max_over_min, found.fnmr.gini) == (1.0, 0.0)
    few = group_rates(random_trials(num_trials=600), GROUP_OF, 1.1).groups[0].fmr
    assert 0 < few.errors < 30 and few.status == "few"
    assert group_rates(random_trials(), GROUP_OF, 0.0).groups[0].fmr.status == "ok"


def trials_of(scores, genuine, enrol, test):
    return make_trials(scores, genuine, enrol_subjects=list(enrol), test_subjects=list(test))


def test_infinite_inequity_counts_only_where_it_has_weight():
    scores = [0.9, 0.1, 0.8, 0.2, 0.7, 0.6, 0.1]
    trials = trials_of(scores, [1, 1, 1, 1, 0, 0, 0], "aaccacc", "aaccbdd")
    groups = {"a": "x", "b": "x", "c": "y", "d": "y"}
    assert group_rates(trials, groups, 0.65).ineq == INF
    assert group_rates(trials, groups, 0.65, beta=0.0).ineq == 1.0


def test_groups_without_trials_are_not_measurable():
    trials = trials_of([0.9, 0.1, 0.5], [1, 0, 0], "aaa", "abc")
    found = group_rates(trials, {"a": "x", "b": "x", "c": "y"}, 0.3)
    lonely = found.groups[1].fmr
    assert (lonely.rate, lonely.status) == (None, "not measurable")
    assert (found.fmr.num_groups, found.ineq) == (1, None)
    assert "1 of 2 groups without trials" in found.fmr.note


# -- refusals -------------------------------------------------------------------------------------

FILES, TORN = trials_of([1.0, 0.0], [1, 0], "aa", "bc"), {"a": "x", "b": "y", "c": "x"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kfold_accuracy([1.0, 0.0], [1, 0], num_folds=1), ConfigError, "num_folds=1"),
        (lambda: kfold_accuracy([1.0, 0.0, 0.5], [1, 0, 1]), ProtocolError, "3 trials .* 10"),
        (lambda: kfold_accuracy([1.0, 0.0], [1, 0], folds=[3, 3]), ProtocolError, "1 fold"),
        (lambda: kfold_accuracy([1, 0, 1], [1, 0, 1], folds=[0, 1, 0]), ProtocolError, "0 genuine"),
        (lambda: kfold_accuracy([1.0, 0.0], [1]), ShapeError, "labels"),
        (lambda: kfold_accuracy([1.0, 0.0], [1, 0], folds=[0]), ShapeError, "folds"),
        (lambda: kfold_accuracy([1.0, 0.0], [1, 2]), DataError, "label 1 is 2"),
        (lambda: kfold_accuracy([NAN, 0.0], [1, 0]), DataError, "trial score 0"),
        (lambda: identify([[1.0, 2.0]], ["a"], ["a"]), ShapeError, r"\(1, 2\) .* 1 probes"),
        (lambda: identify([[1.0], [NAN]], ["a", "a"], ["a"]), DataError, "probe 1 .* entry 0"),
        (lambda: identify([[1.0]], ["b"], ["a"]), ProtocolError, "none of 1 probes"),
        (lambda: identify([[1.0]], ["a"], ["a"], [0.5]), ProtocolError, "0 non-mated scores"),
        (lambda: identify([[1], [0]], ["a", "b"], ["a"], [0.5]), ProtocolError, "not measurable"),
        (lambda: identify([[1], [0]], ["a", "b"], ["a"], [0.0]), ConfigError, "fpir=0"),
        (lambda: identify([[1.0]], ["a"], ["a"], ranks=[0]), ConfigError, "rank 0"),
        (lambda: identify(np.empty((0, 1)), [], ["a"]), ProtocolError, "at least one search"),
        (lambda: as_norm(MATRIX, ENROL, TEST), ConfigError, "top 300 of 30 .* enrol_cohort"),
        (lambda: as_norm(MATRIX, ENROL, TEST, top_n=1), ConfigError, "top 1 of 30"),
        (lambda: z_norm(np.ones((2, 1)), [[0, 1], [2, 2]]), DataError, "row 1 of enrol_cohort"),
        (lambda: t_norm(np.ones((1, 1)), [[0.0, NAN]]), DataError, r"test_cohort\[0, 1\] is nan"),
        (lambda: z_norm([0.0, NAN], ENROL, enrol_index=[0, 0]), DataError, r"score \(1,\)"),
        (lambda: z_norm([0.0, 1.0], ENROL, enrol_index=[0, 4]), DataError, "trial 1 .* row 4"),
        (lambda: s_norm([0.0], ENROL, TEST, enrol_index=[0]), ShapeError, "only one of"),
        (lambda: z_norm(np.ones((3, 5)), ENROL), ShapeError, "4 rows of enrol_cohort"),
        (lambda: z_norm([0.0, 1.0], ENROL), ShapeError, r"shape \(2,\)"),
        (lambda: z_norm([0.0, 1.0], ENROL, enrol_index=[0]), ShapeError, "index has shape"),
        (lambda: z_norm([0.0], ENROL[0], enrol_index=[0]), ShapeError, "enrol_cohort has shape"),
        (lambda: group_rates(random_trials(), {"o": "x"}, 0.0), ProtocolError, "none of the 12"),
        (lambda: group_rates(FILES, GROUP_OF, 0.0, beta=2.0), ConfigError, "beta=2"),
        (lambda: group_rates(FILES, TORN, 0.5), DataError, "0 .* 'x' and 'y'"),
    ],
)
def test_impossible_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
