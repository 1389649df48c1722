"""Batches of one rank, read by any number of workers, from any step on.

A worker is told a step number and nothing else: which samples the step holds, and how they are
augmented, follows from the order. Workers therefore cannot change what is read.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from qmargin.data.order import GlobalOrder, check_count
from qmargin.data.samples import CorruptBudget, Dataset, Replacement, Sample, read_sample
from qmargin.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step."""

    inputs: Tensor  # [b, ...]; b may be zero where a batch has fewer samples than there are ranks
    labels: Tensor  # [b] int64
    ids: tuple[str, ...]
    step: int
    epoch: int
    replaced: tuple[Replacement, ...] = ()

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; called by the loader's thread when asked to."""
        return replace(self, inputs=self.inputs.pin_memory(), labels=self.labels.pin_memory())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; from page-locked memory the copy does not wait."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )


class WorkerTraceback(Exception):
    """The traceback of an exception in another process; printed before what it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class _Failure:
    """What stopped the reading of a batch, in a form that any process can send."""

    summary: str
    trace: str


class _BatchReader:
    """Reads whole batches by their step; errors become results, so that none is lost on the way."""

    def __init__(self, dataset: Dataset, order: GlobalOrder, *, rank: int, world: int) -> None:
        self._dataset, self._order = dataset, order
        self._rank, self._world = rank, world

    def __getitem__(self, step: int) -> Batch | _Failure:
        current = "no sample yet"
        try:
            indices = self._order.part(step, rank=self._rank, world=self._world).tolist()
            # An empty part still needs the shape of an input: read one sample, keep no row of it.
            chosen = indices or self._order.batch(step)[:1].tolist()
            samples = []
            for index in chosen:
                current = f"sample {self._dataset.sample_id(index)!r}"
                samples.append(self._read(index, step))
            return self._joined(samples, step, num_rows=len(indices))
        except Exception as error:
            summary = f"step {step}, {current}: {type(error).__name__}: {error}"
            return _Failure(summary, traceback.format_exc())

    def _read(self, index: int, step: int) -> Sample:
        epoch = self._order.epoch_of(step)
        return read_sample(self._dataset, index, seed=self._order.seed, epoch=epoch)

    def _joined(self, samples: Sequence[Sample], step: int, *, num_rows: int) -> Batch:
        ids = tuple(self._dataset.sample_id(sample.index) for sample in samples)
        for name, sample in zip(ids, samples, strict=True):
            if sample.inputs.shape != samples[0].inputs.shape:
                raise DataError(
                    f"sample {name!r} has shape {list(sample.inputs.shape)} and {ids[0]!r} has "
                    f"{list(samples[0].inputs.shape)}; bring inputs to one shape when reading"
                )
        inputs = default_collate([sample.inputs for sample in samples])  # straight to shared memory
        return Batch(
            inputs=inputs[:num_rows],
            labels=torch.tensor([sample.label for sample in samples[:num_rows]], dtype=torch.int64),
            ids=ids[:num_rows],
            step=step,
            epoch=self._order.epoch_of(step),
            replaced=tuple(item for sample in samples[:num_rows] for item in sample.replaced),
        )


class BatchStream(Iterator[Batch]):
    """Batches in the order of their steps; close it, or use it in a ``with`` block.

    An error while reading is raised at the step it belongs to, with the traceback of the process
    that met it printed first.
    """

    def __init__(self, batches: Iterator[Batch | _Failure], budget: CorruptBudget) -> None:
        self._batches: Iterator[Batch | _Failure] | None = batches
        self.budget = budget

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except RuntimeError as error:  # a worker was killed, or is later than timeout_s
            raise DataError(
                f"the workers that read data stopped: {error}; look for a lack of memory, or set "
                "num_workers=0 to see it happen in this process"
            ) from error
        if isinstance(batch, _Failure):
            raise DataError(f"cannot read {batch.summary}") from WorkerTraceback(batch.trace)
        self.budget.add(batch.epoch, batch.replaced)
        return batch

    def close(self) -> None:
        """Stop the workers; batches read ahead are dropped."""
        self._batches = None  # the DataLoader's iterator ends its workers when it is released

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Batches of one rank from a step on.

    What is read depends on the dataset, the order and the step; not on ``num_workers``, on where
    the stream was started, or, once the ranks' parts are joined, on ``world``.

    Args:
        dataset: Samples by index; with workers it is copied into each.
        order: Which samples each step holds.
        start_step: First step to read, counted through all epochs.
        stop_step: The step before which to stop; without it the stream does not end.
        rank: This rank.
        world: Number of ranks.
        num_workers: Processes that read ahead; zero reads in this process.
        budget: Counts corrupt samples and stops above its limit; without it any number is replaced.
        pin_memory: Put batches in page-locked memory, for faster copies to a GPU.
        prefetch: Batches that each worker reads ahead.
        timeout_s: Raise when workers need longer than this for a batch; zero waits for ever.

    Examples:
        >>> from qmargin.data.synthetic import SyntheticIdentities
        >>> dataset = SyntheticIdentities(5, 4, shape=(3,))
        >>> order = GlobalOrder(len(dataset), seed=0, batch_size=8)
        >>> with build_loader(dataset, order, start_step=1, stop_step=3) as stream:
        ...     [(batch.step, batch.epoch, list(batch.inputs.shape)) for batch in stream]
        [(1, 0, [8, 3]), (2, 1, [8, 3])]
    """
    if order.n != len(dataset):
        raise ConfigError(
            f"the order is of {order.n} samples and the dataset has {len(dataset)}; "
            "build the order with n=len(dataset)"
        )
    check_count(num_workers, "num_workers")
    order.part(start_step, rank=rank, world=world)  # raises for a bad step, rank or world here
    steps = range(start_step, sys.maxsize if stop_step is None else stop_step)
    options: dict[str, Any] = {}
    if num_workers:
        check_count(prefetch, "prefetch", low=1)
        options = {"prefetch_factor": prefetch, "timeout": timeout_s}
    loader: DataLoader[Batch | _Failure] = DataLoader(
        _BatchReader(dataset, order, rank=rank, world=world),  # type: ignore[arg-type]
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_outlive_first_signal,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # leaves the state of the global one alone
        **options,
    )
    return BatchStream(iter(loader), CorruptBudget(None) if budget is None else budget)


def _as_it_is(batch: Any) -> Any:
    return batch


def _outlive_first_signal(worker: int) -> None:
    """Let a worker read on while its rank saves and stops.

    Ctrl-C and job managers signal the whole process group. The rank finishes its step and ends its
    workers itself; a second SIGTERM is that, or someone in a hurry, and is obeyed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)


def _obey_the_next(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
