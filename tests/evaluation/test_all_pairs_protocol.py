"""All pairs as a protocol, against every pair enumerated and the general tools on them."""

import dataclasses

import numpy as np
import pytest

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation import pair_intervals
from qmargin.evaluation.all_pairs import evaluate_all_pairs, largest_impostors
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.pair_intervals import all_trials, bootstrap_many_pairs, bootstrap_pairs
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.protocols import all_pairs
from qmargin.evaluation.protocols.all_pairs import evaluate_identities, identities_of
from qmargin.evaluation.result import Source, read_result, write_result
from qmargin.evaluation.scoring import CohortNorm
from qmargin.metrics import eer, min_dcf, tar_at_far
from qmargin.metrics.bootstrap import bootstrap
from qmargin.metrics.normalise import as_norm

FARS = (0.3, 1e-2, 1e-3, 1e-7)
QUICK = EvaluationOptions(fars=FARS, num_replicates=40, num_hardest=5)


def made(num_identities=30, per_identity=4, dim=8, *, noise=1.0, seed=0, ties=False):
    """Embeddings with names, and their identities; the last identity has one sample."""
    draws = np.random.default_rng(seed)
    centres = np.repeat(draws.normal(size=(num_identities, dim)), per_identity, axis=0)
    rows = centres + noise * draws.normal(size=centres.shape)
    if ties:
        rows = np.round(rows[:, :3]) + np.array([0.5, 0.0, 0.0])
    keys = [f"id{i // per_identity:03d}/{i % per_identity}.jpg" for i in range(len(rows))]
    order = draws.permutation(len(rows) - per_identity + 1)
    return named([keys[i] for i in order], rows[order].astype(np.float32))


def named(keys, rows):
    return Embeddings(tuple(keys), np.asarray(rows), Source("made.npz", "ab", "embeddings"))


def every_pair(embeddings, identities):
    """The definition: a float64 cosine for every pair."""
    unit = unit_rows(embeddings.matrix)
    first, second = np.triu_indices(len(unit), k=1)
    scores = (unit[first] * unit[second]).sum(axis=1)
    names = np.array(identities)
    is_genuine = names[first] == names[second]
    return scores[is_genuine], scores[~is_genuine]


def labelled(embeddings):
    names, labels = np.unique(identities_of(embeddings.keys), return_inverse=True)
    return embeddings.matrix, labels, tuple(names.tolist())


@pytest.mark.parametrize("ties", [False, True])
def test_a_result_is_that_of_every_pair(ties, tmp_path):
    embeddings = made(ties=ties)
    identities = identities_of(embeddings.keys)
    genuine, impostor = every_pair(embeddings, identities)
    result = evaluate_identities(embeddings, identities, QUICK)
    assert result.protocol.num_genuine == len(genuine)
    assert result.protocol.num_impostors == len(impostor)
    assert result.protocol.num_subjects == 30
    *measured, impossible = result.metrics.tar
    for point in measured:
        expected = tar_at_far(genuine, impostor, point.far_target)
        assert (point.tar, point.far) == (expected.tar, expected.far)
        assert point.threshold == expected.threshold
        assert point.false_accepts == expected.false_accepts
        assert point.interval[0] <= point.tar <= point.interval[1]
    assert (impossible.status, impossible.tar, impossible.interval) == (
        "not measurable",
        None,
        None,
    )
    assert result.metrics.eer.value == pytest.approx(eer(genuine, impostor).eer, rel=1e-12)
    for cost in result.metrics.min_dcf:
        assert cost.value == pytest.approx(min_dcf(genuine, impostor, cost.p_target).min_dcf)
    assert sum(result.histogram.genuine) == len(genuine)
    assert sum(result.histogram.impostor) == len(impostor)
    assert result.hardest.false_accepts[0].score == impostor.max()
    assert result.hardest.false_rejects[0].score == genuine.min()
    write_result(tmp_path / "r.json", result)
    assert read_result(tmp_path / "r.json") == result


def test_normalised_scores_are_those_of_as_norm():
    embeddings = made()
    identities = identities_of(embeddings.keys)
    others = np.random.default_rng(5).normal(size=(50, 8))
    cohort = dataclasses.replace(
        named(map(str, range(50)), others), source=Source("cohort.npz", "cd", "cohort")
    )
    result = evaluate_identities(embeddings, identities, QUICK, norm=CohortNorm(cohort, 10))
    unit, far = unit_rows(embeddings.matrix), unit_rows(others)
    scores = as_norm(unit @ unit.T, unit @ far.T, unit @ far.T, top_n=10)
    names = np.array(identities)
    is_impostor = np.triu(names[:, None] != names)
    worst = result.hardest.false_accepts[0]
    assert worst.score == pytest.approx(scores[is_impostor].max(), abs=1e-9)
    assert [source.role for source in result.sources] == ["embeddings", "cohort"]
    with pytest.raises(ConfigError, match="top_n=51"):
        evaluate_identities(embeddings, identities, QUICK, norm=CohortNorm(cohort, 51))


def test_order_does_not_matter_and_systems_can_be_paired():
    embeddings = made()
    order = np.random.default_rng(1).permutation(len(embeddings))
    shuffled = named([embeddings.keys[i] for i in order], embeddings.matrix[order])
    first, second = (
        evaluate_identities(each, identities_of(each.keys), QUICK)
        for each in (embeddings, shuffled)
    )
    assert first.trials_sha256 == second.trials_sha256
    assert first.metrics == second.metrics
    assert first.replicates == second.replicates
    renamed = ["other" if name == "id000" else name for name in identities_of(embeddings.keys)]
    assert evaluate_identities(embeddings, renamed, QUICK).trials_sha256 != first.trials_sha256


def test_replicates_are_those_of_the_general_bootstrap():
    """The weight of all pairs follows from the draws: nothing is lost by counting the tail only."""
    embeddings, labels, names = labelled(made(60, 5))
    trials, fars = all_trials(embeddings, labels, names), (1e-2, 1e-3)
    general = bootstrap(trials, fars, p_targets=(), grid_fars=(5e-3,), num_replicates=50)
    found = bootstrap_pairs(
        trials, np.bincount(labels), fars, grid_fars=(5e-3,), rough_eer=0.05, num_replicates=50
    )
    np.testing.assert_array_equal(found.tar, general.tar)
    np.testing.assert_array_equal(found.frr_at_grid, general.frr_at_grid)
    np.testing.assert_allclose(found.eer, general.eer, rtol=1e-12)
    assert found.subjects_sha256 == general.subjects_sha256


def test_a_tail_that_is_too_short_is_lengthened(monkeypatch):
    embeddings, labels, names = labelled(made(60, 5))
    trials = all_trials(embeddings, labels, names)
    general = bootstrap(trials, (0.1,), p_targets=(), num_replicates=10)
    monkeypatch.setattr(pair_intervals, "FIRST_TAIL", 0.01)
    found = bootstrap_pairs(
        trials, np.bincount(labels), (0.1,), grid_fars=(1e-3,), rough_eer=0.0, num_replicates=10
    )
    np.testing.assert_array_equal(found.tar, general.tar)
    np.testing.assert_allclose(found.eer, general.eer, rtol=1e-12)


def test_the_largest_impostors_are_all_that_are_above_the_least_of_them():
    embeddings, labels, _ = labelled(made(60, 5))
    products = evaluate_all_pairs(embeddings, labels, []).products
    unit = unit_rows(embeddings)
    first, second = np.triu_indices(len(unit), k=1)
    kept = labels[first] != labels[second]
    scores = (unit[first] * unit[second]).sum(axis=1)[kept]
    for number in (500, 10**9):
        found = largest_impostors(embeddings, labels, products, number)
        least = found.scores.min()
        assert 0.9 * min(number, len(scores)) < len(found.scores) <= min(number, len(scores))
        np.testing.assert_array_equal(np.sort(found.scores), np.sort(scores[scores >= least]))
        assert (labels[found.first] != labels[found.second]).all()
    equal = evaluate_all_pairs(np.ones((10, 3)), np.arange(10) // 2, [])  # one bin has all of them
    none = largest_impostors(np.ones((10, 3)), np.arange(10) // 2, equal.products, 5)
    assert len(none.scores) == 0


def test_many_pairs_have_the_replicates_of_few(monkeypatch):
    """Nothing is lost where the tail holds what the rates need."""
    embeddings, labels, names = labelled(made(60, 5))
    found = evaluate_all_pairs(embeddings, labels, (1e-2, 1e-3))
    few = bootstrap(
        all_trials(embeddings, labels, names),
        (1e-2, 1e-3),
        p_targets=(),
        grid_fars=(5e-3,),
        num_replicates=30,
    )
    many = bootstrap_many_pairs(
        embeddings, labels, names, found, grid_fars=(5e-3,), num_replicates=30
    )
    np.testing.assert_array_equal(many.tar, few.tar)
    np.testing.assert_array_equal(many.frr_at_grid, few.frr_at_grid)
    np.testing.assert_allclose(many.eer, few.eer, rtol=1e-12)
    assert many.note is None
    monkeypatch.setattr(pair_intervals, "MAX_TAIL", 400)
    monkeypatch.setattr(pair_intervals, "NUM_SAMPLED", 200_000)
    short = bootstrap_many_pairs(
        embeddings, labels, names, found, grid_fars=(5e-3,), num_replicates=30
    )
    np.testing.assert_array_equal(short.tar[:, 1], few.tar[:, 1])  # 0.001 of 43,000 pairs
    np.testing.assert_allclose(short.tar[:, 0], few.tar[:, 0], atol=0.05)
    np.testing.assert_allclose(short.eer, few.eer, atol=0.01)
    assert "the EER" in short.note


@pytest.mark.parametrize("is_normalised", [False, True])
def test_a_large_set_has_the_result_of_a_small_one(monkeypatch, is_normalised):
    embeddings = made(60, 5)
    norm = CohortNorm(made(40, 2, seed=9), 12) if is_normalised else None
    identities = identities_of(embeddings.keys)
    small = evaluate_identities(embeddings, identities, QUICK, norm=norm)
    monkeypatch.setattr(all_pairs, "MAX_ROWS", 0)
    large = evaluate_identities(embeddings, identities, QUICK, norm=norm)
    for one, other in zip(small.metrics.tar, large.metrics.tar, strict=True):
        assert dataclasses.replace(one, interval=None) == dataclasses.replace(other, interval=None)
        if one.interval is not None:  # float32 and float64 order scores that are nearly equal
            np.testing.assert_allclose(one.interval, other.interval, atol=0.01)
    assert small.metrics.eer.value == large.metrics.eer.value
    assert sum(small.histogram.impostor) == sum(large.histogram.impostor)
    moved = np.abs(np.subtract(small.histogram.impostor, large.histogram.impostor)).sum()
    assert moved < 0.01 * sum(small.histogram.impostor)
    assert small.histogram.genuine == large.histogram.genuine or is_normalised
    np.testing.assert_allclose(small.histogram.edges, large.histogram.edges, atol=1e-4)


def test_no_error_has_an_interval_by_the_rule_of_three():
    embeddings = made(noise=0.001)
    result = evaluate_identities(embeddings, identities_of(embeddings.keys), QUICK)
    num_genuine = result.protocol.num_genuine
    assert result.metrics.tar[0].interval == (1.0 - 3.0 / num_genuine, 1.0)
    assert result.metrics.eer.interval == (0.0, 3.0 / num_genuine)


def test_intervals_and_hardest_pairs_can_be_left_out():
    embeddings = made()
    options = dataclasses.replace(QUICK, num_replicates=0, num_hardest=0)
    result = evaluate_identities(embeddings, identities_of(embeddings.keys), options)
    assert (result.replicates, result.hardest, result.det.band) == (None, None, None)
    assert result.protocol.interval.method == "none"
    assert result.metrics.tar[0].interval is None


def test_too_few_identities_for_a_bootstrap_have_no_interval():
    keys = ["a/0", "a/1", "b/0", "b/1"]
    rows = np.random.default_rng(0).normal(size=(4, 3))
    result = evaluate_identities(named(keys, rows), identities_of(keys), QUICK)
    assert result.protocol.interval.method == "none"
    assert "replicates" in result.protocol.interval.note
    assert result.metrics.tar[1].status == "not measurable"


@pytest.mark.parametrize("far", [1e-2, 0.3])
def test_pairs_that_answer_no_rate_still_have_an_eer(far):
    keys = [f"{name}/{i}" for name in "abc" for i in range(2)][:4]
    rows = np.random.default_rng(0).normal(size=(4, 3))
    options = EvaluationOptions(fars=(far / 10,), num_replicates=3)
    result = evaluate_identities(named(keys, rows), identities_of(keys), options)
    assert result.metrics.tar[0].status == "not measurable"
    assert 0.0 <= result.metrics.eer.value <= 1.0
    assert result.det.band is None


def test_collapsed_embeddings_are_noted():
    rows = np.ones((8, 4)) + 1e-7 * np.random.default_rng(0).normal(size=(8, 4))
    keys = [f"id{i // 2}/{i}" for i in range(8)]
    result = evaluate_identities(named(keys, rows), identities_of(keys), QUICK)
    assert "collapsed" in result.notes[0]


@pytest.mark.parametrize(("value", "words"), [(np.nan, "not finite"), (0.0, "zero")])
def test_an_embedding_without_a_direction_is_named(value, words):
    embeddings = made()
    embeddings.matrix[7] = value
    with pytest.raises(DataError, match=f"{embeddings.keys[7]}.*{words}"):
        evaluate_identities(embeddings, identities_of(embeddings.keys), QUICK)


def test_identities_that_make_no_pair_are_refused():
    embeddings = made(4, 3)
    with pytest.raises(ProtocolError, match="'one'"):
        evaluate_identities(embeddings, ["one"] * len(embeddings), QUICK)
    with pytest.raises(ProtocolError, match="no genuine pair"):
        evaluate_identities(embeddings, embeddings.keys, QUICK)
    with pytest.raises(ShapeError, match="3 identities for 10"):
        evaluate_identities(embeddings, ["a"] * 3, QUICK)
    with pytest.raises(ConfigError, match="nearest"):
        evaluate_identities(embeddings, embeddings.keys, dataclasses.replace(QUICK, rule="nearest"))


def test_identities_are_first_folders_or_those_of_a_mapping():
    assert identities_of(["a/1/x.wav", "/b/2.wav", "c\\3.wav"]) == ("a", "b", "c")
    assert identities_of(["x", "y"], {"x": "a", "y": "b", "z": "c"}) == ("a", "b")
    with pytest.raises(DataError, match="'y'"):
        identities_of(["x", "y"], {"x": "a"})
    with pytest.raises(DataError, match=r"'lone\.jpg'.*--identities"):
        identities_of(["a/1.jpg", "lone.jpg"])
    with pytest.raises(DataError, match="train and test"):
        identities_of(["train/a/1.jpg", "test/b/1.jpg"])
