import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.rates import plain_points, plain_tar_at_far, score_sets
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.operating import num_allowed, rates_at, tar_at_far, tars_at_fars

SETS = score_sets()
FARS = (0.02, 0.1, 0.25, 0.5, 0.99, 1.0)


@pytest.mark.parametrize(
    ("far", "num_impostors", "allowed"),
    [
        (3e-4, 10_000, 3),  # 3e-4 * 10_000 is 2.9999999999999996
        (1e-4, 275_488, 27),
        (1e-5, 15_658_489, 156),
        (1e-6, 15_658_489, 15),
        (1e-3, 3_000, 3),
        (1e-3, 999, 0),
        (1.0, 7, 7),
        (1e-6, 10**9, 1000),
    ],
)
def test_number_allowed(far: float, num_impostors: int, allowed: int) -> None:
    assert num_allowed(far, num_impostors) == allowed


@given(far=st.floats(1e-9, 1.0), num_impostors=st.integers(1, 10**12))
@settings(max_examples=300, deadline=None)
def test_the_number_allowed_is_the_largest_by_division(far: float, num_impostors: int) -> None:
    allowed = num_allowed(far, num_impostors)
    assert allowed / num_impostors <= far
    assert allowed == num_impostors or (allowed + 1) / num_impostors > far


@given(k=st.integers(1, 1000), num_impostors=st.integers(1000, 10**7))
@settings(max_examples=300, deadline=None)
def test_a_far_that_is_a_ratio_of_counts_allows_its_count(k: int, num_impostors: int) -> None:
    assert num_allowed(k / num_impostors, num_impostors) == k


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
def test_tar_at_far_is_the_definition(name: str, dtypes: str) -> None:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    for far in FARS:
        if far * len(impostor) < 1:
            continue
        point = tar_at_far(genuine, impostor, far)
        assert (point.tar, point.far) == plain_tar_at_far(genuine, impostor, far)
        assert point.far == point.false_accepts / len(impostor)
        assert (point.num_genuine, point.num_impostors) == (len(genuine), len(impostor))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
@pytest.mark.parametrize("rule", ["conservative", "nearest"])
def test_the_threshold_accepts_exactly_what_is_counted(name: str, dtypes: str, rule: str) -> None:
    """Also where the boundary is +inf, and when a caller compares float32 scores with it."""
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    for far in FARS:
        if far * len(impostor) < 1:
            continue
        point = tar_at_far(genuine, impostor, far, rule=rule)
        rates = rates_at(genuine, impostor, point.threshold)
        assert (rates.tar, rates.false_accepts) == (point.tar, point.false_accepts)
        wide_genuine, wide_impostor = genuine.astype(float), impostor.astype(float)
        assert np.count_nonzero(wide_impostor >= point.threshold) == point.false_accepts
        assert np.mean(wide_genuine >= point.threshold) == point.tar
        if dtypes == "ff":
            assert np.count_nonzero(impostor >= point.threshold) == point.false_accepts
            assert np.mean(genuine >= point.threshold) == point.tar


@pytest.mark.parametrize("name", SETS)
def test_nearest_reads_the_nearest_point_of_the_curve(name: str) -> None:
    genuine, impostor = SETS[name]
    points = plain_points(genuine, impostor)
    for far in FARS:
        if far * len(impostor) < 1:
            continue
        point = tar_at_far(genuine, impostor, far, rule="nearest")
        best = min(abs(accepts / len(impostor) - far) for _, accepts, _ in points)
        assert abs(point.far - far) == best
        rejects = min(r for _, accepts, r in points if accepts == point.false_accepts)
        assert point.tar == (len(genuine) - rejects) / len(genuine)


@pytest.mark.parametrize("name", SETS)
def test_interpolated_is_numpy_interpolation_of_the_curve(name: str) -> None:
    genuine, impostor = SETS[name]
    points = plain_points(genuine, impostor)[::-1]
    far_axis = [accepts / len(impostor) for _, accepts, _ in points]
    tar_axis = [1 - rejects / len(genuine) for _, _, rejects in points]
    for far in FARS:
        if far * len(impostor) < 1:
            continue
        point = tar_at_far(genuine, impostor, far, rule="interpolated")
        assert point.tar == pytest.approx(float(np.interp(far, far_axis, tar_axis)), abs=1e-12)


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_inputs_in_any_order(order: str, dtype: type) -> None:
    """Longer than the buffer, which is filled and shrunk many times."""
    rng = np.random.default_rng(0)
    genuine = rng.normal(2.0, 1.0, 5_000).astype(dtype)
    impostor = np.sort(np.round(rng.normal(size=400_000), 4)).astype(dtype)
    given_order = {"ascending": impostor, "descending": impostor[::-1]}
    points = tars_at_fars(
        genuine, given_order.get(order, rng.permutation(impostor)), [1e-2, 1e-4, 1e-1, 3e-4]
    )
    for point, far in zip(points, [1e-2, 1e-4, 1e-1, 3e-4], strict=True):
        assert point.far_target == far
        boundary = impostor[-1 - num_allowed(far, len(impostor))]
        assert point.tar == np.mean(genuine > boundary)
        assert point.false_accepts == np.count_nonzero(impostor > boundary)


def test_float32_scores_are_compared_exactly() -> None:
    """The double 0.1 lies between two float32 numbers; rounding it to nearest accepts too few."""
    low, high = np.nextafter(np.float32(0.1), np.float32(0)), np.float32(0.1)
    scores = np.array([low, high], np.float32)
    rates = rates_at(scores, scores, 0.1)
    assert (rates.false_accepts, rates.false_rejects) == (1, 1)
    above = np.nextafter(float(high), 1.0)  # rounds to high in float32, but is above it
    assert rates_at(scores, scores, above).false_accepts == 0
    point = tar_at_far(scores, np.array([float(low) + 1e-12, 0.0]), 0.5)
    assert point.tar == 1.0
    wide = tar_at_far(np.array([float(high) + 1e-12]), scores, 0.5)
    assert wide.tar == 1.0


def test_integers_and_lists_are_scores() -> None:
    assert tar_at_far([3, 2], np.array([1, 0], np.int8), 0.5).tar == 1.0


@pytest.mark.parametrize("far", [0.0, -1e-3, 1.5, math.nan])
def test_impossible_rates_are_refused(far: float) -> None:
    with pytest.raises(ConfigError, match="far="):
        tar_at_far([1.0], [0.0], far)


@pytest.mark.parametrize("rule", ["conservative", "nearest", "interpolated"])
def test_a_rate_below_one_impostor_is_not_measurable(rule: str) -> None:
    with pytest.raises(ProtocolError, match=r"FAR=1e-05 is not measurable with 3,000 impostor"):
        tar_at_far(np.ones(3), np.zeros(3_000), 1e-5, rule=rule)


def test_unknown_rules_and_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="rule 'closest' is unknown"):
        tar_at_far([1.0], [0.0], 1.0, rule="closest")
    with pytest.raises(ShapeError, match=r"genuine scores have shape \(1, 1\)"):
        tar_at_far([[1.0]], [0.0], 1.0)
    with pytest.raises(DataError, match="impostor scores are of type"):
        tar_at_far([1.0], ["0.5"], 1.0)
