"""Enough trials, and intervals of a proportion."""

import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from helpers.rates import plain_points, plain_tar_at_far, score_sets
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.operating import (
    ImpostorTail,
    Largest,
    largest_below,
    largest_scores,
    num_allowed,
    rates_at,
    rule_of_three,
    sufficiency,
    tar_at_far,
    tars_at_fars,
    wilson,
)

SETS = score_sets()


def cast(name: str, dtypes: str) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    return genuine, impostor


def measurable(impostor: np.ndarray) -> list[float]:
    return [far for far in (0.02, 0.1, 0.25, 0.5, 0.99, 1.0) if far * len(impostor) >= 1]


@given(far=st.floats(1e-9, 1.0), num_impostors=st.integers(1, 10**12))
@settings(max_examples=300, deadline=None)
def test_the_number_allowed_is_the_largest_by_division(far: float, num_impostors: int):
    allowed = num_allowed(far, num_impostors)
    assert allowed / num_impostors <= far
    assert allowed == num_impostors or (allowed + 1) / num_impostors > far


@given(k=st.integers(1, 1000), num_impostors=st.integers(1000, 10**7))
@settings(max_examples=300, deadline=None)
def test_a_far_that_is_a_ratio_of_counts_allows_its_count(k: int, num_impostors: int):
    assert num_allowed(k / num_impostors, num_impostors) == k


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
def test_tar_at_far_is_the_definition(name, dtypes):
    """Of all scores at once, and of a stream of them."""
    genuine, impostor = cast(name, dtypes)
    tail = ImpostorTail(max_far=1.0, num_impostors=len(impostor))
    for piece in np.array_split(impostor, 5):
        tail.update(piece)
    for far in measurable(impostor):
        point = tar_at_far(genuine, impostor, far)
        assert (point.tar, point.far) == plain_tar_at_far(genuine, impostor, far)
        assert point.far == point.false_accepts / len(impostor)
        assert (point.num_genuine, point.num_impostors) == (len(genuine), len(impostor))
        assert repr(tail.tar_at_far(genuine, far)) == repr(point)  # NaN is the same threshold


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df", "fd"])
@pytest.mark.parametrize("rule", ["conservative", "nearest"])
def test_the_threshold_accepts_exactly_what_is_counted(name, dtypes, rule):
    """Also where the boundary is +inf, and when a caller compares float32 scores with it."""
    genuine, impostor = cast(name, dtypes)
    for far in measurable(impostor):
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
def test_nearest_reads_the_nearest_point_of_the_curve(name):
    genuine, impostor = SETS[name]
    points = plain_points(genuine, impostor)
    for far in measurable(impostor):
        point = tar_at_far(genuine, impostor, far, rule="nearest")
        best = min(abs(accepts / len(impostor) - far) for _, accepts, _ in points)
        assert abs(point.far - far) == best
        rejects = min(r for _, accepts, r in points if accepts == point.false_accepts)
        assert point.tar == (len(genuine) - rejects) / len(genuine)


@pytest.mark.parametrize("name", SETS)
def test_interpolated_is_numpy_interpolation_of_the_curve(name):
    genuine, impostor = SETS[name]
    points = plain_points(genuine, impostor)[::-1]
    far_axis = [accepts / len(impostor) for _, accepts, _ in points]
    tar_axis = [1 - rejects / len(genuine) for _, _, rejects in points]
    for far in measurable(impostor):
        point = tar_at_far(genuine, impostor, far, rule="interpolated")
        assert point.tar == pytest.approx(float(np.interp(far, far_axis, tar_axis)), abs=1e-12)


def test_float32_scores_are_compared_exactly():
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


def test_integers_are_scores_and_impossible_rates_are_refused():
    assert tar_at_far([3, 2], np.array([1, 0], np.int8), 0.5).tar == 1.0
    for far in (0.0, -1e-3, 1.5, math.nan):
        with pytest.raises(ConfigError, match="far="):
            tar_at_far([1.0], [0.0], far)
    for rule in ("conservative", "nearest", "interpolated"):
        with pytest.raises(ProtocolError, match=r"FAR=1e-05 is not measurable with 3,000 impostor"):
            tar_at_far(np.ones(3), np.zeros(3_000), 1e-5, rule=rule)


@pytest.mark.parametrize(
    ("far", "num_impostors", "status", "allowed"),
    [
        (1e-4, 275_488, "few", 27),  # VoxCeleb1-H
        (1e-5, 15_658_489, "ok", 156),  # IJB-C
        (1e-6, 15_658_489, "few", 15),
        (1e-3, 3_000, "few", 3),  # LFW
        (1e-4, 3_000, "not measurable", 0),
        (3e-4, 10_000, "few", 3),  # the product rounds down to 2
        (1e-3, 30_000, "ok", 30),
        (1e-3, 29_999, "few", 29),
        (1.0, 1, "few", 1),
        (1 / 3, 3, "few", 1),
    ],
)
def test_status_of_known_protocols(far, num_impostors, status, allowed):
    found = sufficiency(far, num_impostors)
    assert (found.status, found.allowed) == (status, allowed)
    assert found.message.startswith("not measurable") == (status == "not measurable")


@pytest.mark.parametrize("num_trials", [10, 300, 10**6])
def test_rule_of_three_is_the_exact_bound_to_a_few_percent(num_trials):
    assert rule_of_three(1) == 1.0
    exact = 1 - 0.05 ** (1 / num_trials)  # the rate at which no error is seen with chance 5 %
    assert rule_of_three(num_trials) == pytest.approx(exact, rel=0.17 if num_trials < 20 else 0.01)


@pytest.mark.parametrize("successes", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_wilson_ends_solve_the_score_equation(successes, level):
    """At an end ``p``, the observed share is exactly ``z`` standard errors of ``p`` away."""
    z = norm.ppf(0.5 + level / 2)
    for end in wilson(successes, 20, level):
        distance = abs(successes / 20 - end)
        assert distance == pytest.approx(z * (end * (1 - end) / 20) ** 0.5, abs=1e-12)


def test_wilson_covers_independent_trials():
    rate, num_trials = 0.9, 200
    counts = range(num_trials + 1)
    covered = [low <= rate <= high for low, high in (wilson(k, num_trials) for k in counts)]
    coverage = sum(binom.pmf(k, num_trials, rate) for k in counts if covered[k])
    assert 0.93 < coverage < 0.97


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sufficiency(1e-3, 0), ProtocolError, "0 impostor"),
        (lambda: rule_of_three(0), ProtocolError, "0 trials"),
        (lambda: wilson(5, 4), DataError, "5 successes in 4"),
        (lambda: wilson(0, 0), ProtocolError, "0 trials"),
        (lambda: wilson(1, 4, level=95), ConfigError, "level=95"),
        (lambda: tar_at_far([1.0], [0.0], 1.0, rule="closest"), ConfigError, "'closest'"),
        (lambda: tar_at_far([[1.0]], [0.0], 1.0), ShapeError, r"genuine .* \(1, 1\)"),
        (lambda: tar_at_far([1.0], ["0.5"], 1.0), DataError, "impostor scores are of type"),
        (lambda: ImpostorTail(0.5, 4).merge(ImpostorTail(0.25, 4)), ConfigError, "max_far=0.25"),
        (lambda: ImpostorTail(0.5, 4).merge(ImpostorTail(0.5, 5)), ConfigError, "impostors=5"),
        (lambda: ImpostorTail.from_state_dict({}), DataError, "scores"),
    ],
)
def test_impossible_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "tied"])
@pytest.mark.parametrize("dtypes", ["d", "f", "fd"])
def test_long_inputs_and_streams_are_exact_in_any_order_and_split(order, dtypes):
    """Longer than the buffer, which is filled and shrunk many times."""
    rng = np.random.default_rng(5)
    genuine, impostor = rng.normal(3.0, 1.0, 2_000), rng.normal(size=300_000)
    impostor = np.round(impostor, 1) if order == "tied" else np.round(impostor, 4)
    ascending = impostor.astype(dtypes[0]).astype(dtypes[-1])
    ascending.sort()
    impostor = {"ascending": ascending, "descending": ascending[::-1]}.get(
        order, rng.permutation(ascending)
    )
    fars = (1e-2, 1e-5, 1e-3, 3e-4)
    points = tars_at_fars(genuine, impostor, fars)
    tails = [ImpostorTail(1e-2, len(impostor)) for _ in range(3)]
    for index, piece in enumerate(np.array_split(impostor, 30)):
        tails[index % 3].update(piece.astype(dtypes[index % len(dtypes)]))
    for other in tails[1:]:
        tails[0].merge(other)
    assert tails[0].num_seen == len(impostor)
    for point, far in zip(points, fars, strict=True):
        boundary = ascending[-1 - num_allowed(far, len(impostor))]
        assert (point.far_target, point.tar) == (far, np.mean(genuine > boundary))
        assert point.false_accepts == np.count_nonzero(impostor > boundary)
        assert tails[0].tar_at_far(genuine, far) == point


def test_the_threshold_of_a_float32_stream_is_a_float32():
    tail = ImpostorTail(0.5, 2)
    tail.update(np.array([0.1, 0.2], np.float32))
    assert np.float32(tail.threshold(0.5)) == tail.threshold(0.5)
    assert tail.tar_at_far(np.array([0.1], np.float32), 0.5).tar == 0.0


def test_tails_are_saved_and_merged_over_files():
    rng = np.random.default_rng(8)
    impostor, genuine = rng.normal(size=50_000).astype(np.float32), rng.normal(2, 1, 500)
    loaded = []
    for part in (impostor[:20_000], impostor[20_000:], impostor[:0]):
        tail = ImpostorTail(1e-2, len(impostor))
        tail.update(part)
        file = io.BytesIO()
        np.savez(file, **tail.state_dict())
        file.seek(0)
        loaded.append(ImpostorTail.from_state_dict(np.load(file)))
    for other in loaded[1:]:
        loaded[0].merge(other)
    assert loaded[0].tar_at_far(genuine, 1e-3) == tar_at_far(genuine, impostor, 1e-3)


def test_the_memory_is_that_of_the_tail():
    tail = ImpostorTail(1e-6, 10**9)
    assert sum(array.nbytes for array in tail.state_dict().values()) < 100
    tail.update(np.arange(500_000.0))
    assert len(tail.state_dict()["scores"]) == 1001


def test_streams_that_cannot_answer_are_refused():
    tail = ImpostorTail(0.5, 4)
    tail.update([1.0, 2.0])
    for ask in (lambda: tail.tar_at_far([1.0], 0.5), lambda: tail.threshold(0.5)):
        with pytest.raises(ProtocolError, match="2 of 4 impostor scores"):
            ask()
    with pytest.raises(ProtocolError, match=r"5 impostor scores .*=4"):
        tail.update(np.zeros(3))
    assert tail.num_seen == 2
    tail.update(np.zeros(2))
    with pytest.raises(ConfigError, match=r"far=0\.75 is above max_far=0\.5"):
        tail.threshold(0.75)
    for ask in (lambda: tail.threshold(0.2), lambda: ImpostorTail(1e-3, 999)):
        with pytest.raises(ProtocolError, match="not measurable"):
            ask()


@pytest.mark.parametrize("num_kept", [1, 2, 7, 100, 1000])
def test_the_largest_are_those_of_sorting(num_kept: int):
    scores = np.random.default_rng(num_kept).integers(0, 50, 300).astype(float)
    expected = np.sort(scores)[::-1][:num_kept]
    assert np.array_equal(largest_scores(scores, num_kept), expected)
    largest = Largest(num_kept, capacity=num_kept + 1)
    for score in scores:
        largest.update(np.array([score]))
    assert np.array_equal(largest.descending(), expected)


def test_the_largest_below_a_value():
    scores = np.array([3.0, -math.inf, 1.0, 2.0], np.float32)
    assert largest_below(scores, 3.0) == 2.0
    assert largest_below(scores, 2.0 + 1e-12) == 2.0
    assert largest_below(scores, 0.0) == -math.inf
    assert largest_below(scores, -math.inf) is None
