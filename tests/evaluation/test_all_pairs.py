"""All pairs in blocks against all pairs scored one by one."""

import dataclasses

import numpy as np
import pytest
import torch

from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation import all_pairs as pair_counts
from qmargin.evaluation.all_pairs import evaluate_all_pairs, largest_impostors, unit_rows
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols import all_pairs
from qmargin.evaluation.protocols.all_pairs import (
    all_trials,
    bootstrap_many_pairs,
    bootstrap_pairs,
    evaluate_identities,
    identities_of,
)
from qmargin.evaluation.result import Source, read_result, write_result
from qmargin.evaluation.scoring import CohortNorm
from qmargin.metrics.bootstrap import bootstrap
from qmargin.metrics.curve import det_curve
from qmargin.metrics.eer_dcf import eer, min_dcf
from qmargin.metrics.normalise import Moments, as_norm, cohort_moments
from qmargin.metrics.operating import tar_at_far

FARS = (0.001, 0.01, 0.3, 1.0)
PRIORS = (0.01, 0.5, 0.95)
KINDS = ["smooth", "duplicates", "equal", "separate", "opposite", "anisotropic"]


def case(kind, *, seed=0, num_subjects=40, num_samples=5, dim=24):
    rng = np.random.default_rng(seed)
    centres = np.repeat(rng.normal(size=(num_subjects, dim)), num_samples, axis=0)
    noise = rng.normal(size=centres.shape)
    rows = {
        "smooth": centres + 1.5 * noise,
        "duplicates": np.round(centres[:, :3] + 0.5 * noise[:, :3]) + np.array([0.5, 0, 0]),
        "equal": np.ones_like(centres),
        "separate": centres + 0.01 * noise,
        "opposite": centres * np.where(rng.random((len(centres), 1)) < 0.5, 1, -1),
        "anisotropic": 30 + centres + noise,
    }[kind]
    subjects = np.repeat([f"s{index}" for index in range(num_subjects)], num_samples)
    order = rng.permutation(len(rows))
    return rows[order], subjects[order]


def moments_of(rows, *, size=50, top_n=12):
    """Of random rows as a cohort."""
    others = np.random.default_rng(1).normal(size=(rows.shape[1], size))
    scores = rows / np.linalg.norm(rows, axis=1, keepdims=True) @ others
    return cohort_moments(scores / np.linalg.norm(others, axis=0), "cohort", top_n)


def scored_one_by_one(rows, subjects, moments=None):
    """The definition: float64 unit rows, a sum of products for every pair; AS-norm of it."""
    rows = np.asarray(rows, dtype=np.float64)
    rows = rows / np.abs(rows).max(axis=1, keepdims=True)
    unit = rows / np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    first, second = np.triu_indices(len(unit), k=1)
    pairs = zip(first, second, strict=True)
    scores = np.array([(unit[one] * unit[other]).sum() for one, other in pairs])
    if moments is not None:
        gain = 0.5 / moments.std
        shift = gain * moments.mean
        scores = scores * (gain[first] + gain[second]) - (shift[first] + shift[second])
    return first, second, scores, subjects[first] == subjects[second]


def assert_same(found, other):
    for field in dataclasses.fields(found):
        left, right = getattr(found, field.name), getattr(other, field.name)
        if field.name == "det":
            for name in ("thresholds", "far", "frr"):
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        elif field.name not in ("num_rescored", "products"):
            assert left == right


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_pairs_scored_one_by_one(kind, dtype, is_normalised):
    rows, subjects = case(kind)
    rows = rows.astype(dtype)
    moments = moments_of(rows) if is_normalised else None
    found = evaluate_all_pairs(
        rows, subjects, FARS, p_targets=PRIORS, num_hardest=15, block=64, moments=moments
    )
    first, second, scores, is_genuine = scored_one_by_one(rows, subjects, moments)
    genuine, impostor = scores[is_genuine], scores[~is_genuine]
    assert (found.num_genuine, found.num_impostors) == (len(genuine), len(impostor))
    assert found.tar == tuple(tar_at_far(genuine, impostor, far) for far in FARS)
    assert found.eer == eer(genuine, impostor)
    assert found.min_dcf == tuple(min_dcf(genuine, impostor, prior) for prior in PRIORS)
    for pairs, rows_of, sign in (
        (found.hardest_impostors, ~is_genuine, -1),
        (found.hardest_genuine, is_genuine, 1),
    ):
        chosen = np.flatnonzero(rows_of)
        chosen = chosen[np.lexsort([second[chosen], first[chosen], sign * scores[chosen]])][:15]
        expected = zip(first[chosen], second[chosen], scores[chosen], strict=True)
        assert list(map(tuple, pairs)) == list(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_points_of_the_det_curve_are_on_the_exact_one(kind):
    rows, subjects = case(kind)
    found = evaluate_all_pairs(rows, subjects, []).det
    _, _, scores, is_genuine = scored_one_by_one(rows, subjects)
    exact = det_curve(scores[is_genuine], scores[~is_genuine])
    points = {*zip(exact.far.tolist(), exact.frr.tolist(), strict=True)}
    assert {*zip(found.far.tolist(), found.frr.tolist(), strict=True)} <= points
    assert (found.far[0], found.frr[0], found.thresholds[0]) == (1.0, 0.0, exact.thresholds[0])
    assert (found.far[-1], found.frr[-1], found.thresholds[-1]) == (0.0, 1.0, np.inf)
    assert (np.diff(found.thresholds) > 0).all()
    for far, frr, threshold in zip(found.far, found.frr, found.thresholds, strict=True):
        assert far == (scores[~is_genuine] >= threshold).mean()
        assert frr == pytest.approx((scores[is_genuine] < threshold).mean(), abs=1e-15)


@pytest.mark.parametrize(
    ("kind", "top_n"),  # two of fifty: gains that differ by orders
    [*((kind, None) for kind in KINDS), ("anisotropic", 2), ("anisotropic", 50)],
)
def test_blocks_and_precision_change_nothing(kind, top_n):
    rows, subjects = case(kind, num_subjects=12)
    moments = moments_of(rows, top_n=top_n) if top_n else None
    base = evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, moments=moments)
    for options in ({"block": 7}, {"block": 74}, {"block": 20, "dtype": "float64"}):
        other = evaluate_all_pairs(
            rows, subjects, FARS, p_targets=PRIORS, moments=moments, **options
        )
        assert_same(other, base)


def test_few_of_many_pairs_are_scored_twice():
    rows, subjects = case("smooth", num_subjects=200, num_samples=6, dim=32)
    found = evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, block=512)
    assert found.num_impostors > 700_000
    assert found.num_rescored < 0.02 * found.num_impostors
    assert_same(evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, block=700), found)


def test_order_names_lengths_and_kind_of_array_do_not_matter():
    rows, subjects = case("smooth")
    base = evaluate_all_pairs(rows, subjects, FARS, num_hardest=0)
    generator = np.random.default_rng(1)
    order, numbers = generator.permutation(len(rows)), np.unique(subjects, return_inverse=True)[1]
    assert_same(evaluate_all_pairs(rows[order], numbers[order], FARS, num_hardest=0), base)
    powers = 2.0 ** generator.integers(-700, 700, size=(len(rows), 1))
    assert_same(evaluate_all_pairs(rows * powers, subjects, FARS, num_hardest=0), base)
    tensor = torch.from_numpy(rows).requires_grad_()
    assert_same(evaluate_all_pairs(tensor, subjects.tolist(), FARS, num_hardest=0), base)


def test_many_equal_scores_are_counted_together(monkeypatch):
    rows, subjects = case("duplicates", num_subjects=15)
    base = evaluate_all_pairs(rows, subjects, FARS)
    monkeypatch.setattr(pair_counts, "MAX_HELD", 50)
    assert_same(evaluate_all_pairs(rows, subjects, FARS, block=16), base)


def test_reduced_precision_elsewhere_is_not_used_and_not_changed():
    rows, subjects = case("smooth")
    base = evaluate_all_pairs(rows, subjects, FARS)
    torch.set_float32_matmul_precision("medium")
    try:
        assert_same(evaluate_all_pairs(rows, subjects, FARS), base)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("error", [1e-3, 3e-5])
def test_products_worse_than_their_precision_are_refused(monkeypatch, error):
    rows, subjects = case("equal")
    exact = torch.mm
    noise = iter([0.0, -error])

    def noisy(left, right, *, out):
        exact(left, right, out=out)
        out += next(noise)

    monkeypatch.setattr(torch, "mm", noisy)
    with pytest.raises(BackendError, match="use another device"):
        evaluate_all_pairs(rows, subjects, FARS)


def test_progress_counts_blocks_of_both_passes():
    rows, subjects = case("smooth", num_subjects=10)
    seen = []
    evaluate_all_pairs(rows, subjects, [0.1], block=20, progress=lambda *pair: seen.append(pair))
    assert seen == [(done, 12) for done in range(1, 13)]


@pytest.mark.gpu
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_agree_bit_by_bit(kind, is_normalised):
    rows, subjects = case(kind)
    moments = moments_of(rows) if is_normalised else None
    base = evaluate_all_pairs(rows, subjects, FARS, moments=moments)
    found = evaluate_all_pairs(rows, subjects, FARS, device="cuda", block=50, moments=moments)
    assert_same(found, base)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": np.nan}, DataError, "embedding 7 is not finite"),
        ({"rows": 0.0}, DataError, "embedding 7 is zero"),
        ({"embeddings": np.ones(24)}, ShapeError, r"shape \(24,\)"),
        ({"subjects": ["one"] * 199}, ShapeError, "there are 200 embeddings"),
        ({"subjects": ["one"] * 200}, ProtocolError, "0 pairs of embeddings are of different"),
        ({"subjects": np.arange(200)}, ProtocolError, "0 pairs of embeddings share"),
        ({"fars": [1e-6]}, ProtocolError, "FAR=1e-06 is not measurable"),
        ({"block": 0}, ConfigError, "block=0"),
        ({"dtype": "float16"}, ConfigError, "dtype='float16'"),
        ({"num_hardest": -1}, ConfigError, "num_hardest=-1"),
        ({"p_targets": [0.0]}, ConfigError, "p_target=0"),
    ],
)
def test_impossible_input_is_refused(change, error, message):
    rows, subjects = case("smooth")
    if "rows" in change:
        rows[7] = change.pop("rows")
    with pytest.raises(error, match=message):
        evaluate_all_pairs(**{"embeddings": rows, "subjects": subjects, "fars": FARS, **change})


@pytest.mark.parametrize(
    ("mean", "std", "error", "words"),
    [
        (np.zeros(3), np.ones(3), ShapeError, "one mean and one deviation"),
        (np.zeros(200), np.zeros(200), DataError, "embedding 0 have mean 0.0 and deviation 0.0"),
        (np.full(200, np.nan), np.ones(200), DataError, "mean nan"),
        (np.ones(200), np.full(200, 1e-310), DataError, "wider cohort"),
        (np.ones(200), np.full(200, 1e-38), DataError, "wider cohort"),
        (np.ones(200), np.r_[np.ones(199), -1.0], DataError, "embedding 199"),
        ([0.0] * 200, [np.inf] * 200, DataError, "deviation inf"),
    ],
)
def test_moments_that_are_none_are_refused(mean, std, error, words):
    rows, subjects = case("smooth")
    with pytest.raises(error, match=words):
        evaluate_all_pairs(rows, subjects, FARS, moments=Moments(mean, std))


QUICK = EvaluationOptions(fars=(0.3, 1e-2, 1e-3, 1e-7), num_replicates=40, num_hardest=5)


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
    return all_pairs.PairSamples(embeddings.matrix, labels, tuple(names.tolist()), str, "")


@pytest.mark.parametrize("ties", [False, True])
def test_a_result_is_that_of_every_pair(ties, tmp_path):
    embeddings = made(ties=ties)
    identities = identities_of(embeddings.keys)
    genuine, impostor = every_pair(embeddings, identities)
    result = evaluate_identities(embeddings, identities, QUICK)
    assert result.protocol.num_genuine == len(genuine)
    assert result.protocol.num_impostors == len(impostor)
    assert result.protocol.num_subjects == 30
    *measured, impossible = result.measures.tar
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
    assert result.measures.eer.value == pytest.approx(eer(genuine, impostor).eer, rel=1e-12)
    for cost in result.measures.min_dcf:
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
    cohort = Embeddings(tuple(map(str, range(50))), others, Source("cohort.npz", "cd", "cohort"))
    result = evaluate_identities(embeddings, identities, QUICK, norm=CohortNorm(cohort, 10))
    unit, far = unit_rows(embeddings.matrix), unit_rows(others)
    scores = as_norm(unit @ unit.T, unit @ far.T, unit @ far.T, top_n=10)
    is_impostor = np.triu(np.array(identities)[:, None] != np.array(identities))
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
    assert first.protocol.data_sha256 == second.protocol.data_sha256
    assert (first.measures, first.replicates) == (second.measures, second.replicates)
    renamed = ["other" if name == "id000" else name for name in identities_of(embeddings.keys)]
    third = evaluate_identities(embeddings, renamed, QUICK)
    assert third.protocol.data_sha256 != first.protocol.data_sha256


@pytest.mark.parametrize("first_tail", [all_pairs.FIRST_TAIL, 0.01])
def test_replicates_are_those_of_the_general_bootstrap(monkeypatch, first_tail):
    """Nothing is lost by counting the tail only; one that is too short is lengthened."""
    monkeypatch.setattr(all_pairs, "FIRST_TAIL", first_tail)
    samples = labelled(made(60, 5))
    trials, fars = all_trials(samples), (0.1, 1e-2, 1e-3)
    general = bootstrap(trials, fars, p_targets=(), grid_fars=(5e-3,), num_replicates=30)
    found = bootstrap_pairs(
        trials, samples.num_samples, fars, 0.05, grid_fars=(5e-3,), num_replicates=30
    )
    np.testing.assert_array_equal(found.tar, general.tar)
    np.testing.assert_array_equal(found.frr_at_grid, general.frr_at_grid)
    np.testing.assert_allclose(found.eer, general.eer, rtol=1e-12)
    assert found.subjects_sha256 == general.subjects_sha256


def test_the_largest_impostors_are_all_that_are_above_the_least_of_them():
    samples = labelled(made(60, 5))
    embeddings, labels = samples.embeddings, samples.labels
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
    samples = labelled(made(60, 5))
    found = evaluate_all_pairs(samples.embeddings, samples.labels, (1e-2, 1e-3))
    few = bootstrap(
        all_trials(samples), (1e-2, 1e-3), p_targets=(), grid_fars=(5e-3,), num_replicates=30
    )
    many, many_note = bootstrap_many_pairs(samples, found, grid_fars=(5e-3,), num_replicates=30)
    np.testing.assert_array_equal(many.tar, few.tar)
    np.testing.assert_array_equal(many.frr_at_grid, few.frr_at_grid)
    np.testing.assert_allclose(many.eer, few.eer, rtol=1e-12)
    assert many_note is None
    monkeypatch.setattr(all_pairs, "MAX_TAIL", 400)
    monkeypatch.setattr(all_pairs, "NUM_SAMPLED", 200_000)
    short, short_note = bootstrap_many_pairs(samples, found, grid_fars=(5e-3,), num_replicates=30)
    np.testing.assert_array_equal(short.tar[:, 1], few.tar[:, 1])  # 0.001 of 43,000 pairs
    np.testing.assert_allclose(short.tar[:, 0], few.tar[:, 0], atol=0.05)
    np.testing.assert_allclose(short.eer, few.eer, atol=0.01)
    assert "the EER" in short_note


@pytest.mark.parametrize("is_normalised", [False, True])
def test_a_large_set_has_the_result_of_a_small_one(monkeypatch, is_normalised):
    embeddings = made(60, 5)
    norm = CohortNorm(made(40, 2, seed=9), 12) if is_normalised else None
    identities = identities_of(embeddings.keys)
    small = evaluate_identities(embeddings, identities, QUICK, norm=norm)
    monkeypatch.setattr(all_pairs, "MAX_ROWS", 0)
    large = evaluate_identities(embeddings, identities, QUICK, norm=norm)
    for one, other in zip(small.measures.tar, large.measures.tar, strict=True):
        assert dataclasses.replace(one, interval=None) == dataclasses.replace(other, interval=None)
        if one.interval is not None:  # float32 and float64 order scores that are nearly equal
            np.testing.assert_allclose(one.interval, other.interval, atol=0.01)
    assert small.measures.eer.value == large.measures.eer.value
    assert sum(small.histogram.impostor) == sum(large.histogram.impostor)
    moved = np.abs(np.subtract(small.histogram.impostor, large.histogram.impostor)).sum()
    assert moved < 0.01 * sum(small.histogram.impostor)
    assert small.histogram.genuine == large.histogram.genuine or is_normalised
    np.testing.assert_allclose(small.histogram.edges, large.histogram.edges, atol=1e-4)


def test_no_error_has_an_interval_by_the_rule_of_three():
    embeddings = made(noise=0.001)
    result = evaluate_identities(embeddings, identities_of(embeddings.keys), QUICK)
    num_genuine = result.protocol.num_genuine
    assert result.measures.tar[0].interval == (1.0 - 3.0 / num_genuine, 1.0)
    assert result.measures.eer.interval == (0.0, 3.0 / num_genuine)


def test_intervals_and_hardest_pairs_can_be_left_out():
    embeddings = made()
    options = dataclasses.replace(QUICK, num_replicates=0, num_hardest=0)
    result = evaluate_identities(embeddings, identities_of(embeddings.keys), options)
    assert (result.replicates, result.hardest, result.det.band) == (None, None, None)
    assert result.protocol.interval.method == "none"
    assert result.measures.tar[0].interval is None


def test_too_few_identities_for_a_bootstrap_or_a_rate():
    keys = ["a/0", "a/1", "b/0", "b/1"]
    rows = np.random.default_rng(0).normal(size=(4, 3))
    result = evaluate_identities(named(keys, rows), identities_of(keys), QUICK)
    assert result.protocol.interval.method == "none"
    assert "replicates" in result.protocol.interval.note
    for far in (1e-3, 0.03):
        options = EvaluationOptions(fars=(far,), num_replicates=3)
        result = evaluate_identities(named(keys, rows), identities_of(keys), options)
        assert result.measures.tar[0].status == "not measurable"
        assert 0.0 <= result.measures.eer.value <= 1.0
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


@pytest.mark.parametrize(
    ("identities", "changes", "error", "message"),
    [
        (["one"] * 10, {}, ProtocolError, "'one'"),
        (list("abcdefghij"), {}, ProtocolError, "no genuine pair"),
        (["a"] * 3, {}, ShapeError, "3 identities for 10"),
        (["a"] * 10, {"rule": "nearest"}, ConfigError, "nearest"),
    ],
)
def test_identities_that_make_no_pair_are_refused(identities, changes, error, message):
    with pytest.raises(error, match=message):
        evaluate_identities(made(4, 3), identities, dataclasses.replace(QUICK, **changes))


def test_identities_are_first_folders_or_those_of_a_mapping():
    assert identities_of(["a/1/x.wav", "/b/2.wav", "c\\3.wav"]) == ("a", "b", "c")
    assert identities_of(["x", "y"], {"x": "a", "y": "b", "z": "c"}) == ("a", "b")
    for keys, mapping, message in (
        (["x", "y"], {"x": "a"}, "'y'"),
        (["a/1.jpg", "lone.jpg"], None, r"'lone\.jpg'.*--identities"),
        (["train/a/1.jpg", "test/b/1.jpg"], None, "train and test"),
    ):
        with pytest.raises(DataError, match=message):
            identities_of(keys, mapping)


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("kind", ["smooth", "duplicates", "separate"])
def test_lists_have_the_rates_of_their_pairs_at_the_common_threshold(
    kind, is_normalised, monkeypatch
):
    monkeypatch.setattr(all_pairs, "LIST_BLOCK", 7)
    rows, subjects = case(kind)
    labels = np.unique(subjects, return_inverse=True)[1]
    rng = np.random.default_rng(1)
    moments = None
    if is_normalised:
        moments = Moments(rng.normal(size=len(rows)) * 0.1, 0.1 + rng.random(len(rows)))
    numbers = labels // 3 - 1  # some are in no list
    names = tuple(f"{label:03d}" for label in range(labels.max() + 1))
    lists = {"near": numbers, "nobody": np.full(len(rows), -1)}
    samples = all_pairs.PairSamples(rows, labels, names, str, "", lists)
    options = EvaluationOptions(fars=(0.05,), num_replicates=0)
    result = all_pairs.measure_pairs(samples, options, moments=moments)
    near, nobody = result.groups.rows
    first, second = np.triu_indices(len(rows), k=1)
    norm = None if moments is None else pair_counts.PairNorm.of(moments)
    scores = pair_counts.exact_scores(unit_rows(rows), first, second, norm)
    is_in = (numbers[first] == numbers[second]) & (numbers[first] >= 0)
    is_same, accepted = labels[first] == labels[second], scores >= result.groups.threshold
    assert near.num_impostors == (is_in & ~is_same).sum() > 0
    assert near.fmr == accepted[is_in & ~is_same].mean()
    assert near.fnmr == (~accepted)[is_in & is_same].mean()
    assert (nobody.fmr, nobody.num_genuine, nobody.status) == (None, 0, "not measurable")
    whole = dataclasses.replace(samples, lists={"all": np.zeros(len(rows), np.int64)})
    row = all_pairs.measure_pairs(whole, options, moments=moments).groups.rows[0]
    assert row.fmr == result.measures.tar[0].far
    assert row.fnmr == pytest.approx(1.0 - result.measures.tar[0].tar, abs=1e-12)
