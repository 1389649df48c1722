"""Replicates of the subject bootstrap against trials that are really repeated."""

from fractions import Fraction

import numpy as np
import pytest

from qmargin.errors import ConfigError, ProtocolError
from qmargin.metrics.bootstrap import bootstrap, interval
from qmargin.metrics.crossing import eer, min_dcf
from qmargin.metrics.operating import tar_at_far
from qmargin.metrics.resampling import SortedTrials, Tail, Wanted, weighted_point
from qmargin.metrics.subjects import SubjectWeights, Trials

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


def repeated(trials, weights):
    """Every trial as often as its subjects were drawn, in a plain loop."""
    genuine, impostor = [], []
    for row, score in enumerate(trials.scores):
        first, second = trials.enrol_subject[row], trials.test_subject[row]
        times = weights[first] if first == second else weights[first] * weights[second]
        (genuine if trials.is_genuine[row] else impostor).extend([score] * int(times))
    return np.array(genuine), np.array(impostor)


def plain_tar(genuine, impostor, far):
    """The k+1 rule, word for word."""
    descending = sorted(impostor, reverse=True)
    k = max(k for k in range(len(impostor) + 1) if k / len(impostor) <= far)
    if k == len(impostor):
        return 1.0
    return sum(score > descending[k] for score in genuine) / len(genuine)


def plain_curve(genuine, impostor):
    """Exact rates at both ends and at every distinct score, from the largest threshold."""
    yield Fraction(0), Fraction(1)
    for threshold in sorted({*genuine, *impostor}, reverse=True):
        yield (
            Fraction(int((impostor >= threshold).sum()), len(impostor)),
            Fraction(int((genuine < threshold).sum()), len(genuine)),
        )


def plain_eer(genuine, impostor):
    previous = None
    for far, frr in plain_curve(genuine, impostor):
        if far >= frr:
            share = (previous[1] - previous[0]) / ((previous[1] - previous[0]) + (far - frr))
            return float(previous[0] + share * (far - previous[0]))
        previous = far, frr
    raise AssertionError("the curve ends at FAR 1")


def plain_min_dcf(genuine, impostor, p_target):
    prior = Fraction(p_target)
    scale = min(prior, 1 - prior)
    curve = plain_curve(genuine, impostor)
    return float(min(prior * frr + (1 - prior) * far for far, frr in curve) / scale)


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
        expected = [plain_tar(genuine, impostor, far) for far in (*FARS, 0.1, 0.6)]
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
    trials = Trials(
        np.array([3.0, 1.0, 2.0]),
        np.array([True, True, False]),
        np.array([0, 0, 1], dtype=np.int32),
        np.array([1, 2, 2], dtype=np.int32),
        ("a", "b", "c"),
    )
    found = bootstrap(trials, [0.5], p_targets=(), num_replicates=60)
    for row, (a, b, c) in enumerate(SubjectWeights(("a", "b", "c"), 60).rows(0, 60)):
        if b * c == 0 or a * b + a * c == 0:
            assert np.isnan(found.tar[row, 0])
            assert np.isnan(found.eer[row])
        else:
            assert found.tar[row, 0] == a * b / (a * b + a * c)


def test_order_of_trials_changes_nothing():
    trials = random_trials("ties", seed=3)
    order = np.random.default_rng(1).permutation(len(trials))
    columns = [
        getattr(trials, name)[order]
        for name in ("scores", "is_genuine", "enrol_subject", "test_subject")
    ]
    first = bootstrap(trials, FARS, num_replicates=30)
    second = bootstrap(Trials(*columns, trials.subject_names), FARS, num_replicates=30)
    for name in ("tar", "eer", "min_dcf"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.trials_sha256 == second.trials_sha256


def test_progress_counts_replicates():
    seen = []
    trials = random_trials("smooth", seed=4)
    bootstrap(trials, FARS, num_replicates=37, progress=lambda *pair: seen.append(pair))
    assert seen == [(16, 37), (32, 37), (37, 37)]


def test_what_is_not_asked_for_is_not_there():
    found = bootstrap(random_trials("smooth", seed=5), [0.01], p_targets=(), has_eer=False)
    assert found.tar.shape == (1000, 1)
    assert found.min_dcf.shape == (1000, 0)
    assert np.isnan(found.eer).all()


def test_trials_of_one_label_are_refused():
    trials = random_trials("smooth", seed=6)
    for label, missing in ((True, "impostor"), (False, "genuine")):
        rows = trials.is_genuine == label
        part = Trials(
            trials.scores[rows],
            trials.is_genuine[rows],
            trials.enrol_subject[rows],
            trials.test_subject[rows],
            trials.subject_names,
        )
        with pytest.raises(ProtocolError, match=f"0 {missing} trials"):
            bootstrap(part, [0.01])


def test_impossible_settings_are_refused():
    trials = random_trials("smooth", seed=7)
    with pytest.raises(ConfigError, match="far=0"):
        bootstrap(trials, [0.0])
    with pytest.raises(ConfigError, match="p_target=1"):
        bootstrap(trials, [0.1], p_targets=[1.0])


def test_interval_is_the_percentile_interval():
    values = np.random.default_rng(0).permutation(np.arange(1001.0))
    assert interval(values, 0.9) == pytest.approx((50.0, 950.0), rel=1e-12)
    with pytest.raises(ConfigError, match="level=1"):
        interval(values, 1.0)


def test_interval_refuses_when_too_many_replicates_are_empty():
    values = np.arange(100.0)
    values[:5] = np.nan
    assert interval(values, 0.5) == (28.5, 75.5)
    values[5] = np.nan
    with pytest.raises(ProtocolError, match="6 of 100 replicates"):
        interval(values)
