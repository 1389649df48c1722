"""Batches of one rank from any step on, read by any number of workers.

A worker gets only a step number: the order determines the samples of the step and their
augmentation. The number of workers therefore does not change what is read.
"""

from __future__ import annotations

import itertools
import signal
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from qmargin.data.order import GlobalOrder, check_count, sample_seeds
from qmargin.data.samples import (
    CorruptBudget,
    Dataset,
    Replacement,
    Sample,
    check_label,
    read_seeded,
    reads_many,
)
from qmargin.errors import ConfigError, DataError

_ALIGNMENT = 64  # bytes: a multiple of the size of any element


class Layout(NamedTuple):
    """Layout of a batch of inputs in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, num_rows: int, given: NDArray[Any]) -> Layout:
        """Layout of consecutive rows, each with the layout of one input."""
        like = torch.from_numpy(np.empty_like(given))
        return cls(like.dtype, (num_rows, *like.shape), (like.numel(), *like.stride()))

    @property
    def num_bytes(self) -> int:
        """Bytes to reserve."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def on(self, memory: Tensor) -> Tensor:
        """The inputs ``[num_rows, ...]`` on bytes of memory."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


class SharedInputs(NamedTuple):
    """Inputs in a shared buffer, as a worker sends them: by the buffer's number."""

    pool: int
    worker: int
    buffer: int
    layout: Layout
    memory: Tensor | None  # of the buffer, when it is sent for the first time


class WorkerBuffers:
    """Reusable batch buffers of one worker, in shared memory."""

    def __init__(self, in_use: Tensor, *, pool: int, worker: int) -> None:
        self._in_use = in_use  # bytes that say which buffers the main process still uses
        self._pool, self._worker = pool, worker  # numbers
        self._buffers: dict[int, Tensor] = {}

    def reserve(self, layout: Layout) -> tuple[Tensor, SharedInputs | None]:
        """A free buffer for inputs, and its form for sending.

        If the main process keeps more batches than there are buffers, new memory is used once and
        sent as a tensor.
        """
        for buffer, in_use in enumerate(self._in_use[self._worker].tolist()):
            if not in_use:
                self._in_use[self._worker, buffer] = 1
                memory = self._buffers.get(buffer)
                is_new = memory is None or len(memory) < layout.num_bytes
                if memory is None or is_new:
                    memory = self._buffers[buffer] = _shared(layout.num_bytes)
                sent = memory if is_new else None
                inputs = SharedInputs(self._pool, self._worker, buffer, layout, sent)
                return layout.on(memory), inputs
        return layout.on(_shared(layout.num_bytes)), None


def _shared(num_bytes: int) -> Tensor:
    memory: Tensor = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
    return memory


class BufferPool:
    """The buffers of all workers, in the main process; one is free when no tensor is on it."""

    def __init__(self, num_workers: int, num_buffers: int) -> None:
        self.in_use = torch.zeros(num_workers, num_buffers, dtype=torch.uint8).share_memory_()
        self.number = next(_NUMBERS)
        self._buffers: dict[tuple[int, int], Tensor] = {}
        _POOLS[self.number] = self

    def tensor(self, inputs: SharedInputs, *, is_pinned: bool = False) -> Tensor:
        """The inputs, in place or, if pinned, copied to page-locked memory."""
        place = (inputs.worker, inputs.buffer)
        if inputs.memory is not None:
            self._buffers[place] = inputs.memory
        if is_pinned:
            pinned = inputs.layout.on(self._buffers[place]).pin_memory()
            self._free(place)
            return pinned
        # PyTorch keeps the array exactly as long as a tensor uses its memory.
        array = self._buffers[place].numpy()
        weakref.finalize(array, self._free, place).atexit = False
        return inputs.layout.on(torch.from_numpy(array))

    def _free(self, place: tuple[int, int]) -> None:
        self.in_use[place] = 0


_NUMBERS = itertools.count()
_POOLS: weakref.WeakValueDictionary[int, BufferPool] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step."""

    inputs: Tensor  # [b, ...]; b may be zero where a batch has fewer samples than there are ranks
    labels: Tensor  # [b] int64
    ids: tuple[str, ...]
    step: int
    epoch: int
    replaced: tuple[Replacement, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; the copy from page-locked memory is asynchronous."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )


class WorkerTraceback(Exception):
    """Traceback of an exception in another process; it is printed before its consequence."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class _Failure:
    """Error while reading a batch, in a form that can be sent between processes."""

    summary: str
    trace: str


@dataclass(frozen=True)
class _Sent:
    """A batch in a form that is cheap to send: labels as numbers, inputs by buffer number."""

    inputs: Tensor | SharedInputs
    labels: list[int]
    ids: tuple[str, ...]
    step: int
    epoch: int
    replaced: tuple[Replacement, ...]

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by the loader's thread when asked to."""
        return self.received(is_pinned=True)

    def received(self, *, is_pinned: bool = False) -> Batch:
        """The batch, in the main process."""
        labels = torch.tensor(self.labels, dtype=torch.int64, pin_memory=is_pinned)
        if isinstance(self.inputs, SharedInputs):
            inputs = _POOLS[self.inputs.pool].tensor(self.inputs, is_pinned=is_pinned)
        else:
            inputs = self.inputs.pin_memory() if is_pinned else self.inputs
        rows = inputs[: len(labels)]
        return Batch(rows, labels, self.ids, self.step, self.epoch, self.replaced)


class _Rows:
    """A batch while it is read: each input is copied to its row at once."""

    def __init__(self, dataset: Dataset, num_rows: int, buffers: WorkerBuffers | None) -> None:
        self._dataset, self._num_rows, self._buffers = dataset, num_rows, buffers
        self._indices: list[int] = []
        self.labels: list[int] = []
        self.replaced: list[Replacement] = []

    def add(self, sample: Sample) -> None:
        """Copy a sample to the next row."""
        given = sample.inputs
        if not isinstance(given, np.ndarray):
            given = given.numpy()
        if not self._indices:
            self._reserve(given)
        if given.shape != self._shape or given.dtype != self._dtype:
            name, first = map(self._dataset.sample_id, (sample.index, self._indices[0]))
            raise DataError(
                f"sample {name!r} is {given.dtype} {list(given.shape)} and {first!r} is "
                f"{self._dtype} {list(self._shape)}; bring inputs to one shape and type"
            )
        self._array[len(self._indices)] = given  # NumPy copies small arrays faster than PyTorch
        self._indices.append(sample.index)
        self.labels.append(sample.label)
        self.replaced += sample.replaced

    def fill(
        self, indices: NDArray[Any], inputs: NDArray[Any], labels: NDArray[np.integer]
    ) -> None:
        """Copy all samples at once."""
        if not len(inputs) == len(labels) == len(indices):
            found = f"{len(inputs)} inputs and {len(labels)} labels for {len(indices)} samples"
            raise DataError(f"read_many gave {found}; give one of each")
        bad = np.flatnonzero((labels < 0) | (labels >= self._dataset.num_classes))
        if bad.size:
            check_label(self._dataset, int(indices[bad[0]]), int(labels[bad[0]]))
        self._reserve(inputs[0])
        self._array[:] = inputs
        self._indices, self.labels = indices.tolist(), labels.tolist()

    def _reserve(self, given: NDArray[Any]) -> None:
        layout = Layout.of(self._num_rows, given)
        shared = None
        if self._buffers is None:
            inputs = layout.on(torch.empty(layout.num_bytes, dtype=torch.uint8))
        else:
            inputs, shared = self._buffers.reserve(layout)
        self._array, self._inputs = inputs.numpy(), shared or inputs
        self._shape, self._dtype = given.shape, given.dtype

    def sent(self, step: int, epoch: int) -> _Sent:
        """The batch, once all rows are there."""
        ids = tuple(map(self._dataset.sample_id, self._indices))
        return _Sent(self._inputs, self.labels, ids, step, epoch, tuple(self.replaced))


class _BatchReader:
    """Read whole batches by their step; errors are returned as results, so that none is lost."""

    def __init__(self, dataset: Dataset, order: GlobalOrder, *, rank: int, world: int) -> None:
        self._dataset, self._order = dataset, order
        self._rank, self._world = rank, world
        self.buffers: WorkerBuffers | None = None

    def __getitem__(self, step: int) -> _Sent | _Failure:
        current: int | None = None
        try:
            part = self._order.part(step, rank=self._rank, world=self._world)
            # An empty part still needs the shape of an input: read one sample, keep no row of it.
            chosen = part if len(part) else self._order.batch(step)[:1]
            epoch = self._order.epoch_of(step)
            seeds = sample_seeds(self._order.seed, epoch, chosen)
            rows = _Rows(self._dataset, len(chosen), self.buffers)
            if reads_many(self._dataset):
                rows.fill(chosen, *self._dataset.read_many(chosen, seeds))
            else:
                for current, seed in zip(chosen.tolist(), seeds, strict=True):
                    rows.add(read_seeded(self._dataset, current, seed))
            sent = rows.sent(step, epoch)
            return sent if len(part) else replace(sent, labels=[], ids=(), replaced=())
        except Exception as error:
            where = "no sample yet"
            if current is not None:
                where = f"sample {self._dataset.sample_id(current)!r}"
            summary = f"step {step}, {where}: {type(error).__name__}: {error}"
            return _Failure(summary, traceback.format_exc())


class BatchStream(Iterator[Batch]):
    """Batches in the order of their steps; close it, or use it in a ``with`` block.

    An error while reading is raised at its step, after the traceback of the process in which it
    occurred.
    """

    def __init__(
        self, batches: Iterator[_Sent | Batch | _Failure], pool: BufferPool, budget: CorruptBudget
    ) -> None:
        self._batches: Iterator[_Sent | Batch | _Failure] | None = batches
        self._pool = pool  # kept: inputs are found by it
        self.budget = budget

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            sent = next(self._batches)
        except RuntimeError as error:  # a worker was killed, or exceeded timeout_s
            remedy = "check for a lack of memory, or set num_workers=0"
            raise DataError(f"the workers that read data stopped: {error}; {remedy}") from error
        if isinstance(sent, _Failure):
            raise DataError(f"cannot read {sent.summary}") from WorkerTraceback(sent.trace)
        batch = sent.received() if isinstance(sent, _Sent) else sent
        self.budget.add(batch.epoch, batch.replaced)
        return batch

    def close(self) -> None:
        """Stop the workers; batches read ahead are dropped."""
        self._batches = None  # the DataLoader's iterator ends its workers when it is released

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def build_loader(
    dataset: Dataset,
    order: GlobalOrder,
    *,
    start_step: int = 0,
    stop_step: int | None = None,
    rank: int = 0,
    world: int = 1,
    num_workers: int = 0,
    budget: CorruptBudget | None = None,
    pin_memory: bool = False,
    prefetch: int = 2,
    timeout_s: float = 0.0,
) -> BatchStream:
    """Batches of one rank from a step on, to ``stop_step`` or without an end.

    Samples depend on the dataset, the order and the step; not on ``num_workers``, on the first step
    of the stream, or, over all ranks together, on ``world``. Workers get a copy of the dataset and
    read ``prefetch`` batches ahead; one that needs longer than ``timeout_s`` raises. Without a
    budget, any number of corrupt samples is replaced.
    """
    if order.n != len(dataset):
        found = f"the order is of {order.n} samples and the dataset has {len(dataset)}"
        raise ConfigError(f"{found}; build the order with n=len(dataset)")
    check_count(num_workers, "num_workers")
    order.part(start_step, rank=rank, world=world)  # raises for a bad step, rank or world here
    steps = range(start_step, sys.maxsize if stop_step is None else stop_step)
    options: dict[str, Any] = {}
    if num_workers:
        check_count(prefetch, "prefetch", low=1)
        options = {"prefetch_factor": prefetch, "timeout": timeout_s}
    # A worker reads this many batches ahead; the caller holds one and is given the next.
    pool = BufferPool(num_workers, prefetch + 2)
    loader: DataLoader[_Sent | Batch | _Failure] = DataLoader(
        _BatchReader(dataset, order, rank=rank, world=world),  # type: ignore[arg-type]
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_WorkerStart(pool.in_use, pool.number),
        pin_memory=pin_memory,
        generator=torch.Generator(),  # does not change the state of the global one
        **options,
    )
    return BatchStream(iter(loader), pool, budget or CorruptBudget(None))


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class _WorkerStart:
    """Give a worker its buffers, and let it continue while its rank saves and stops.

    Ctrl-C and job managers signal the whole process group. The rank finishes its step and ends its
    workers itself, by a second SIGTERM, which a worker obeys.
    """

    in_use: Tensor
    pool: int

    def __call__(self, worker: int) -> None:
        reader: Any = get_worker_info().dataset  # type: ignore[union-attr]
        reader.buffers = WorkerBuffers(self.in_use, pool=self.pool, worker=worker)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _restore_default)


def _restore_default(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
