import io
import math

import numpy as np
import pytest

from helpers.rates import score_sets
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.operating import tar_at_far
from qmargin.metrics.selection import Largest, largest_below, largest_scores
from qmargin.metrics.tail import ImpostorTail

SETS = score_sets()


def same(left: object, right: object) -> bool:
    return repr(left) == repr(right)  # NaN thresholds are the same threshold


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "fd", "df"])
def test_a_stream_answers_like_the_whole(name: str, dtypes: str) -> None:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    tail = ImpostorTail(max_far=1.0, num_impostors=len(impostor))
    for piece in np.array_split(impostor, 5):
        tail.update(piece)
    for far in (0.25, 0.5, 1.0):
        if far * len(impostor) >= 1:
            assert same(tail.tar_at_far(genuine, far), tar_at_far(genuine, impostor, far))


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "tied"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_long_streams_are_exact_in_any_order_and_split(order: str, num_ranks: int) -> None:
    rng = np.random.default_rng(5)
    genuine = rng.normal(3.0, 1.0, 2_000)
    impostor = rng.normal(size=300_000)
    impostor = {
        "ascending": np.sort(impostor),
        "descending": np.sort(impostor)[::-1],
        "shuffled": impostor,
        "tied": np.round(impostor, 1),
    }[order]
    tails = [ImpostorTail(1e-2, len(impostor)) for _ in range(num_ranks)]
    for index, piece in enumerate(np.array_split(impostor, 30)):
        tails[index % num_ranks].update(piece)
    for other in tails[1:]:
        tails[0].merge(other)
    assert tails[0].num_seen == len(impostor)
    for far in (1e-2, 1e-3, 1e-4, 1e-5):
        expected = tar_at_far(genuine, impostor, far)
        assert tails[0].tar_at_far(genuine, far) == expected
        assert tails[0].threshold(far) == expected.threshold


def test_float32_and_float64_chunks_mix() -> None:
    rng = np.random.default_rng(6)
    narrow, wide = rng.normal(size=100_000).astype(np.float32), rng.normal(size=100_000)
    whole = np.concatenate([narrow.astype(float), wide])
    for chunks in ([narrow, wide], [wide, narrow]):
        tail = ImpostorTail(1e-3, len(whole))
        for chunk in chunks:
            tail.update(chunk)
        assert tail.tar_at_far(wide, 1e-3) == tar_at_far(wide, whole, 1e-3)


def test_the_threshold_of_a_float32_stream_is_a_float32() -> None:
    tail = ImpostorTail(0.5, 2)
    tail.update(np.array([0.1, 0.2], np.float32))
    assert np.float32(tail.threshold(0.5)) == tail.threshold(0.5)
    assert tail.tar_at_far(np.array([0.1], np.float32), 0.5).tar == 0.0


def test_tails_are_saved_and_merged_over_files() -> None:
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


def test_the_memory_is_that_of_the_tail() -> None:
    tail = ImpostorTail(1e-6, 10**9)
    assert sum(array.nbytes for array in tail.state_dict().values()) < 100
    tail.update(np.arange(500_000.0))
    assert len(tail.state_dict()["scores"]) == 1001


def test_incomplete_streams_do_not_answer() -> None:
    tail = ImpostorTail(0.5, 3)
    tail.update([1.0, 2.0])
    with pytest.raises(ProtocolError, match="2 of 3 impostor scores came"):
        tail.tar_at_far([1.0], 0.5)
    with pytest.raises(ProtocolError, match="2 of 3 impostor scores came"):
        tail.threshold(0.5)


def test_more_scores_than_announced_are_refused() -> None:
    tail = ImpostorTail(0.5, 3)
    with pytest.raises(ProtocolError, match="4 impostor scores came but num_impostors is 3"):
        tail.update(np.zeros(4))
    assert tail.num_seen == 0


def test_rates_out_of_reach_are_refused() -> None:
    tail = ImpostorTail(0.5, 4)
    tail.update(np.zeros(4))
    with pytest.raises(ConfigError, match=r"far=0\.75 is above max_far=0\.5"):
        tail.threshold(0.75)
    with pytest.raises(ProtocolError, match=r"FAR=0\.2 is not measurable"):
        tail.threshold(0.2)
    with pytest.raises(ProtocolError, match="not measurable"):
        ImpostorTail(1e-3, 999)


def test_tails_of_other_rates_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="cannot join"):
        ImpostorTail(0.5, 4).merge(ImpostorTail(0.25, 4))
    with pytest.raises(ConfigError, match="cannot join"):
        ImpostorTail(0.5, 4).merge(ImpostorTail(0.5, 5))


def test_a_state_with_something_missing_is_refused() -> None:
    state = ImpostorTail(0.5, 4).state_dict()
    del state["scores"]
    with pytest.raises(DataError, match=r"lacks \['scores'\]"):
        ImpostorTail.from_state_dict(state)


@pytest.mark.parametrize("num_kept", [1, 2, 7, 100, 1000])
def test_the_largest_are_those_of_sorting(num_kept: int) -> None:
    scores = np.random.default_rng(num_kept).integers(0, 50, 300).astype(float)
    expected = np.sort(scores)[::-1][:num_kept]
    assert np.array_equal(largest_scores(scores, num_kept), expected)
    largest = Largest(num_kept, capacity=num_kept + 1)
    for score in scores:
        largest.update(np.array([score]))
    assert np.array_equal(largest.descending(), expected)


def test_the_largest_below_a_value() -> None:
    scores = np.array([3.0, -math.inf, 1.0, 2.0], np.float32)
    assert largest_below(scores, 3.0) == 2.0
    assert largest_below(scores, 2.0 + 1e-12) == 2.0
    assert largest_below(scores, 0.0) == -math.inf
    assert largest_below(scores, -math.inf) is None
