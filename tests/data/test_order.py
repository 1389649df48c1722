"""The order of samples: a permutation per epoch, the same for any number of ranks."""

import math
import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.data.order import GlobalOrder, KeyedPermutation, derived_seed
from qmargin.errors import ConfigError

WEBFACE42M = 42_474_557


def whole(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return KeyedPermutation(n, seed, epoch)[np.arange(n)].tolist()


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 1000, 4096, 4097, 100_003])
def test_every_sample_comes_once(n: int) -> None:
    for epoch in range(3):
        assert sorted(whole(n, 7, epoch)) == list(range(n))


def test_no_sample_of_the_largest_set_comes_twice() -> None:
    """Of every hundredth position, from the first to the last."""
    positions = np.arange(0, WEBFACE42M, 100)
    found = KeyedPermutation(WEBFACE42M, 0, 0)[positions]
    assert len(np.unique(found)) == len(positions)
    assert 0 <= found.min() < 1000
    assert WEBFACE42M - 1000 < found.max() < WEBFACE42M


def test_batches_of_the_largest_set_need_no_list_of_it() -> None:
    tracemalloc.start()
    GlobalOrder(WEBFACE42M, seed=0, batch_size=1024).batch(30_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_few_samples_are_equally_likely(n: int) -> None:
    turns, num_orders = max(1000, 6 * math.factorial(n)), math.factorial(n)
    counts = Counter(tuple(whole(n, 1, epoch)) for epoch in range(turns))
    expected = turns / num_orders
    excess = sum((count - expected) ** 2 for count in counts.values()) / expected
    excess += (num_orders - len(counts)) * expected
    degrees = num_orders - 1
    assert excess < degrees + 4 * math.sqrt(2 * degrees)


def test_neighbours_and_epochs_are_unrelated() -> None:
    """Lists are sorted by identity: a batch must not be made of neighbours."""
    n = 200_000
    first, second, other = (np.array(whole(n, *key)) for key in [(0, 0), (0, 1), (1, 0)])
    noise = 4 / math.sqrt(n)
    for pair in [(first[:-1], first[1:]), (first, second), (first, other), (first, np.arange(n))]:
        assert abs(np.corrcoef(*pair)[0, 1]) < noise
    assert (first == second).sum() < 10  # one is expected
    assert (np.abs(np.diff(first)) == 1).sum() < 15  # two are expected


def test_known_values() -> None:
    """Orders are part of what a checkpoint means: a change of them is a change of every run."""
    assert derived_seed(0, 1, 2) == 4529435921577843265
    assert whole(10, seed=42, epoch=3) == [7, 3, 5, 2, 8, 6, 0, 1, 9, 4]
    assert KeyedPermutation(WEBFACE42M, 42, 3)[np.arange(4)].tolist() == [
        11316731,
        34925781,
        19765675,
        36500347,
    ]


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 300),
    batch_size=st.integers(1, 64),
    world=st.integers(1, 9),
    step=st.integers(0, 200),
    drop_last=st.booleans(),
)
def test_parts_of_the_ranks_join_to_the_batch(n, batch_size, world, step, drop_last):
    order = GlobalOrder(n, seed=2, batch_size=min(n, batch_size), drop_last=drop_last)
    parts = [order.part(step, rank=rank, world=world).tolist() for rank in range(world)]
    assert list(chain.from_iterable(parts)) == order.batch(step).tolist()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 7), (False, 8)])
def test_an_epoch_is_one_pass(drop_last: bool, steps: int) -> None:
    order = GlobalOrder(31, seed=0, batch_size=4, drop_last=drop_last)
    assert order.steps_per_epoch == steps
    for epoch in range(3):
        batches = [order.batch(epoch * steps + turn).tolist() for turn in range(steps)]
        assert {order.epoch_of(epoch * steps + turn) for turn in range(steps)} == {epoch}
        read = list(chain.from_iterable(batches))
        assert len(set(read)) == len(read) == (28 if drop_last else 31)
        assert len(batches[-1]) == (4 if drop_last else 3)
    assert order.batch(0).tolist() != order.batch(steps).tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KeyedPermutation(0, 0, 0), "number of samples is 0"),
        (lambda: KeyedPermutation(2**63, 0, 0), "at most"),
        (lambda: KeyedPermutation(3, 0, 0)[np.array([0.5])], "float64"),
        (lambda: GlobalOrder(10, seed=0, batch_size=0), "batch_size is 0"),
        (lambda: GlobalOrder(10, seed=0, batch_size=True), "batch_size is True"),
        (lambda: GlobalOrder(10, seed=0, batch_size=11), r"set data\.batch_size to at most 10"),
        (lambda: GlobalOrder(10, seed=0, batch_size=2).batch(-1), "step is -1"),
        (lambda: GlobalOrder(10, seed=0, batch_size=2).part(0, rank=3, world=3), "rank is 3 of 3"),
    ],
)
def test_bad_settings_are_refused(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("position", [-1, 3])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"outside \[0, 3\)"):
        KeyedPermutation(3, 0, 0)[position]
