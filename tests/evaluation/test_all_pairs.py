"""All pairs in blocks against all pairs scored one by one."""

import dataclasses

import numpy as np
import pytest
import torch

from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation import pair_counts
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.metrics.crossing import eer, min_dcf
from qmargin.metrics.curve import det_curve
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


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_precision_change_nothing(kind):
    rows, subjects = case(kind, num_subjects=15)
    base = evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS)
    for block in (7, 32, 74):
        assert_same(evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, block=block), base)
    other = evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, dtype="float64", block=20)
    assert_same(other, base)


def test_a_block_can_be_one_pair():
    rows, subjects = case("smooth", num_subjects=5, num_samples=3)
    base = evaluate_all_pairs(rows, subjects, [0.1])
    assert_same(evaluate_all_pairs(rows, subjects, [0.1], block=1), base)


def test_order_of_rows_and_names_of_subjects_change_nothing():
    rows, subjects = case("smooth")
    base = evaluate_all_pairs(rows, subjects, FARS, num_hardest=0)
    order = np.random.default_rng(1).permutation(len(rows))
    numbers = np.unique(subjects, return_inverse=True)[1]
    assert_same(evaluate_all_pairs(rows[order], numbers[order], FARS, num_hardest=0), base)


def test_few_of_many_pairs_are_scored_twice():
    rows, subjects = case("smooth", num_subjects=300, num_samples=6, dim=32)
    found = evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, block=512)
    assert found.num_impostors > 1_600_000
    assert found.num_rescored < 0.02 * found.num_impostors
    for block in (700, 5000):
        assert_same(evaluate_all_pairs(rows, subjects, FARS, p_targets=PRIORS, block=block), found)


def test_tensors_give_what_arrays_give():
    rows, subjects = case("smooth")
    base = evaluate_all_pairs(rows.astype(np.float32), subjects, FARS)
    tensor = torch.from_numpy(rows).float().requires_grad_()
    assert_same(evaluate_all_pairs(tensor, subjects.tolist(), FARS), base)


def test_length_of_rows_does_not_matter():
    rows, subjects = case("smooth")
    powers = 2.0 ** np.random.default_rng(2).integers(-700, 700, size=(len(rows), 1))
    assert_same(
        evaluate_all_pairs(rows * powers, subjects, FARS), evaluate_all_pairs(rows, subjects, FARS)
    )


def test_many_equal_scores_are_counted_together(monkeypatch):
    rows, subjects = case("duplicates")
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


def test_impossible_input_is_refused():
    rows, subjects = case("smooth")
    wrong = rows.copy()
    wrong[7, 3] = np.nan
    with pytest.raises(DataError, match="embedding 7 is not finite"):
        evaluate_all_pairs(wrong, subjects, FARS)
    wrong[7] = 0.0
    with pytest.raises(DataError, match="embedding 7 is zero"):
        evaluate_all_pairs(wrong, subjects, FARS)
    with pytest.raises(ShapeError, match=r"shape \(24,\)"):
        evaluate_all_pairs(rows[0], subjects, FARS)
    with pytest.raises(ShapeError, match="there are 200 embeddings"):
        evaluate_all_pairs(rows, subjects[1:], FARS)
    with pytest.raises(ProtocolError, match="0 pairs of embeddings are of different"):
        evaluate_all_pairs(rows, ["one"] * 200, FARS)
    with pytest.raises(ProtocolError, match="0 pairs of embeddings share"):
        evaluate_all_pairs(rows, np.arange(200), FARS)
    with pytest.raises(ProtocolError, match="FAR=1e-06 is not measurable"):
        evaluate_all_pairs(rows, subjects, [1e-6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block=0"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"num_hardest": -1}, "num_hardest=-1"),
        ({"p_targets": [0.0]}, "p_target=0"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    rows, subjects = case("smooth", num_subjects=5)
    with pytest.raises(ConfigError, match=message):
        evaluate_all_pairs(rows, subjects, [0.1], **options)


def test_a_normalised_score_is_that_of_as_norm():
    rows, subjects = case("smooth")
    others = np.random.default_rng(2).normal(size=(24, 60))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cohort = unit @ (others / np.linalg.norm(others, axis=0))
    expected = as_norm(unit @ unit.T, cohort, cohort, top_n=20)
    found = evaluate_all_pairs(
        rows, subjects, FARS, num_hardest=50, moments=cohort_moments(cohort, "cohort", 20)
    )
    for pair in found.hardest_impostors + found.hardest_genuine:
        np.testing.assert_allclose(pair.score, expected[pair.first, pair.second], atol=1e-12)
    impostors = expected[np.triu(subjects[:, None] != subjects)]
    assert found.hardest_impostors[0].score == pytest.approx(impostors.max(), abs=1e-12)


@pytest.mark.parametrize("top_n", [2, 50])
def test_blocks_and_precision_do_not_change_normalised_results(top_n):
    rows, subjects = case("anisotropic")
    moments = moments_of(rows, top_n=top_n)  # two of fifty: gains that differ by orders
    first = evaluate_all_pairs(rows, subjects, FARS, moments=moments)
    for options in ({"block": 7}, {"dtype": "float64"}, {"block": 33, "dtype": "float64"}):
        assert_same(evaluate_all_pairs(rows, subjects, FARS, moments=moments, **options), first)


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
