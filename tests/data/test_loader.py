"""Batches: the same for any number of workers and ranks, and from any step on."""

import gc
import os
import signal
import time
import traceback
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from qmargin.data.loader import Batch, BufferPool, Layout, WorkerBuffers, build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.samples import CorruptBudget
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import ConfigError, CorruptSample, DataError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one or two cores

ORDER = GlobalOrder(60, seed=3, batch_size=16)


class Flawed(SyntheticIdentities):
    """Every seventh sample is corrupt."""

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        if index % 7 == 0:
            raise CorruptSample(f"sample {index} is HTML")
        return super().read(index, seed)


class Failing(SyntheticIdentities):
    """One sample cannot be read for a reason that nobody foresaw."""

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        if index == ORDER.batch(2)[5]:
            self.unpack()
        return super().read(index, seed)

    def unpack(self) -> None:
        raise ZeroDivisionError("no pixels")


class Uneven(SyntheticIdentities):
    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        inputs, label = super().read(index, seed)
        return inputs[: 2 + index % 2], label


class Deadly(SyntheticIdentities):
    """The process that reads one sample is killed, as by a lack of memory; another takes long."""

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        if index == ORDER.batch(1)[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == ORDER.batch(0)[0]:
            time.sleep(1.5)
        return super().read(index, seed)


def dataset(kind: type[SyntheticIdentities] = Flawed) -> SyntheticIdentities:
    return kind(12, 5, shape=(4,))


def joined(parts: Sequence[Batch]) -> Batch:
    """The global batch of ranks' parts."""
    return Batch(
        inputs=torch.cat([part.inputs for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        ids=sum((part.ids for part in parts), ()),
        step=parts[0].step,
        epoch=parts[0].epoch,
        replaced=sum((part.replaced for part in parts), ()),
    )


def read(start: int, stop: int, *, world: int = 1, num_workers: int = 0) -> list[Batch]:
    ranks = []
    for rank in range(world):
        options = {"rank": rank, "world": world, "num_workers": num_workers}
        with build_loader(dataset(), ORDER, start_step=start, stop_step=stop, **options) as stream:
            ranks.append(list(stream))
    return [joined(parts) for parts in zip(*ranks, strict=True)]


def assert_equal(first: Sequence[Batch], second: Sequence[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)
        assert one.labels.dtype == torch.int64
        for name in ("ids", "step", "epoch", "replaced"):
            assert getattr(one, name) == getattr(other, name)


@pytest.mark.parametrize(
    ("world", "num_workers"), [(1, 1), (1, 3), (2, 0), (3, 0), (3, 2), (5, 0), (8, 0)]
)
def test_ranks_and_workers_do_not_change_what_is_read(world: int, num_workers: int) -> None:
    """Samples, augmentations and replacements, over the end of an epoch."""
    assert_equal(read(0, 7), read(0, 7, world=world, num_workers=num_workers))


@pytest.mark.parametrize(("start", "num_workers"), [(1, 0), (2, 2), (4, 1)])
def test_a_restart_reads_on_with_another_number_of_workers(start: int, num_workers: int) -> None:
    assert_equal(read(0, 6)[start:], read(start, 6, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_without_samples_gets_rows_of_the_right_shape(num_workers: int) -> None:
    order = GlobalOrder(60, seed=3, batch_size=2)
    options = {"rank": 2, "world": 3, "stop_step": 2, "num_workers": num_workers}
    with build_loader(dataset(), order, **options) as stream:
        batches = list(stream)
    assert [tuple(batch.inputs.shape) for batch in batches] == [(0, 4), (0, 4)]
    assert [tuple(batch.labels.shape) for batch in batches] == [(0,), (0,)]
    assert [batch.ids + batch.replaced for batch in batches] == [(), ()]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    read(0, 2)
    read(0, 2, num_workers=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_raised_at_its_step_with_the_first_traceback_first(num_workers: int) -> None:
    with build_loader(dataset(Failing), ORDER, num_workers=num_workers) as stream:
        assert [next(stream).step, next(stream).step] == [0, 1]
        with pytest.raises(DataError) as caught:
            next(stream)
    sample = dataset().sample_id(int(ORDER.batch(2)[5]))
    expected = f"cannot read step 2, sample {sample!r}: ZeroDivisionError: no pixels"
    assert str(caught.value) == expected
    told = "".join(traceback.format_exception(caught.value))
    assert told.index("in unpack") < told.index("DataError: cannot read step 2")


def test_inputs_of_two_shapes_are_refused_by_name() -> None:
    stream = build_loader(dataset(Uneven), ORDER)
    with pytest.raises(DataError, match=r"\[\d\] and 'identity-.*\[\d\]"):
        next(stream)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_with_too_many_corrupt_samples_stops(num_workers: int) -> None:
    counts = [len(batch.replaced) for batch in read(0, 3)]
    assert min(counts) > 0
    budget = CorruptBudget(limit=counts[0] + counts[1])
    with build_loader(dataset(), ORDER, num_workers=num_workers, budget=budget) as stream:
        next(stream)
        next(stream)
        assert budget.count == counts[0] + counts[1]
        with pytest.raises(DataError, match="max_corrupt allows"):
            next(stream)


@pytest.mark.parametrize(
    ("start", "timeout_s", "message"),
    [(1, 0.0, "(killed by signal|exited unexpectedly)"), (0, 0.5, "timed out")],
)
def test_workers_that_die_or_hang_are_reported(start: int, timeout_s: float, message: str) -> None:
    options = {"num_workers": 1, "start_step": start, "prefetch": 1, "timeout_s": timeout_s}
    stream = build_loader(dataset(Deadly), ORDER, stop_step=start + 1, **options)
    with pytest.raises(DataError, match=f"workers that read data stopped: .*{message}"):
        next(stream)
    stream.close()


def test_a_closed_stream_ends() -> None:
    stream = build_loader(dataset(), ORDER, num_workers=1)
    next(stream)
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_step": -1}, "step is -1"),
        ({"rank": 2, "world": 2}, "rank is 2 of 2"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 1, "prefetch": 0}, "prefetch is 0"),
        ({"order": GlobalOrder(61, seed=0, batch_size=4)}, "of 61 samples and the dataset has 60"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        build_loader(dataset(), **{"order": ORDER, **options})


# Batch buffers: filled again once they are free, and never before.

PICTURE = np.zeros((4, 5, 3), dtype=np.uint8).transpose(2, 0, 1)


def test_rows_are_laid_out_as_inputs_are() -> None:
    layout = Layout.of(7, PICTURE)
    memory = layout.on(torch.empty(layout.num_bytes, dtype=torch.uint8))
    assert memory.shape == (7, 3, 4, 5)
    assert memory.dtype == torch.uint8
    assert memory.is_contiguous(memory_format=torch.channels_last)
    floats = Layout.of(3, np.zeros((2, 5)))
    memory = floats.on(torch.empty(floats.num_bytes, dtype=torch.uint8))
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((3, 2, 5), torch.float64, True)


def test_a_buffer_is_used_again_when_the_last_tensor_on_it_is_gone() -> None:
    pool = BufferPool(1, 2)
    buffers = WorkerBuffers(pool.in_use, pool=pool.number, worker=0)
    layout = Layout.of(2, PICTURE)
    memory, inputs = buffers.reserve(layout)
    memory.fill_(7)
    assert inputs is not None
    assert inputs.memory is not None  # sent once
    view = pool.tensor(inputs)[1, :, 2:]
    other = buffers.reserve(layout)[1]
    assert other is not None
    assert other.buffer != inputs.buffer
    assert buffers.reserve(layout)[1] is None  # all are in use
    assert (view == 7).all()
    del view
    gc.collect()
    again = buffers.reserve(layout)[1]
    assert again is not None
    assert (again.buffer, again.memory) == (inputs.buffer, None)


def test_a_larger_batch_gets_a_larger_buffer() -> None:
    pool = BufferPool(1, 1)
    buffers = WorkerBuffers(pool.in_use, pool=pool.number, worker=0)
    first = buffers.reserve(Layout.of(2, PICTURE))[1]
    assert first is not None
    pool.tensor(first)  # and let go of at once
    memory, second = buffers.reserve(Layout.of(20, PICTURE))
    assert second is not None
    assert second.memory is not None
    memory.fill_(9)
    assert (pool.tensor(second) == 9).all()


@pytest.mark.parametrize("num_kept", [1, 3, 20])
def test_batches_that_are_kept_do_not_change(num_kept: int) -> None:
    """Kept ones would be overwritten if a worker filled their buffer again."""
    dataset, order = SyntheticIdentities(40, 5, shape=(6,)), GlobalOrder(200, seed=1, batch_size=10)
    with build_loader(dataset, order, stop_step=20) as stream:
        expected = [batch.inputs for batch in stream]
    kept: list[torch.Tensor] = []
    with build_loader(dataset, order, stop_step=20, num_workers=2) as stream:
        for step, batch in enumerate(stream):
            kept = [*kept, batch.inputs][-num_kept:]
            for inputs, right in zip(kept, expected[: step + 1][-num_kept:], strict=True):
                assert torch.equal(inputs, right)


def test_an_epoch_needs_no_more_memory_than_a_few_batches() -> None:
    """Buffers that were sent are named, not sent again: no file is opened for them."""
    dataset, order = SyntheticIdentities(40, 5, shape=(6,)), GlobalOrder(200, seed=1, batch_size=2)
    places = set()
    with build_loader(dataset, order, stop_step=100, num_workers=2, prefetch=2) as stream:
        for batch in stream:
            places.add(batch.inputs.data_ptr())
    assert len(places) <= 2 * (2 + 2)
