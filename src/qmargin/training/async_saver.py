"""Checkpoints in the background: a step waits for a copy in memory, not for the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread
from types import TracebackType

import torch
from torch import Tensor

from qmargin.errors import CheckpointError
from qmargin.training.exchange import Exchange, check_ranks
from qmargin.training.state import CheckpointState, HeadRows
from qmargin.training.trees import map_tensors
from qmargin.training.writer import save_checkpoint


class AsyncSaver:
    """Saves checkpoints in a thread, one at a time.

    ``save`` copies the state to host memory and returns; the memory is kept and used again by the
    next save. A failure is raised by the next ``poll``, ``wait`` or ``save``, never dropped. All
    ranks fail together, but each notices at its own time: ask ``has_failed`` on every rank, agree,
    and then call ``wait``, so that no rank is left alone in a collective.

    Args:
        folder: The folder of checkpoints.
        rank: This rank.
        world: Number of ranks.
        exchange: Over a process group that nothing else uses; not needed for one rank.
        keep: Whole checkpoints that stay.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, AsyncSaver(folder) as saver:
        ...     saver.save(CheckpointState(step=5, backbone={"weight": torch.ones(2)}))
        ...     saver.wait().name
        'step-000005'
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int = 0,
        world: int = 1,
        exchange: Exchange | None = None,
        keep: int = 3,
    ) -> None:
        self.folder, self.rank, self.world, self.keep = Path(folder), rank, world, keep
        self.exchange = check_ranks(rank, world, exchange)
        self._buffers: list[Tensor] = []  # in the order in which a state's tensors are met
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._path: Path | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the next one would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a failure waits to be raised."""
        return self._error is not None

    def reserve(self, state: CheckpointState) -> None:
        """Allocate the host memory for states like this one, so that the first save is fast."""
        self._map(state, lambda buffer, tensor: buffer)

    def save(self, state: CheckpointState) -> None:
        """Copy the state and start to write it, after the save before this one has ended."""
        self.wait()
        devices: set[torch.device] = set()

        def copy(buffer: Tensor, tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                devices.add(tensor.device)
            return buffer.copy_(tensor.detach(), non_blocking=True)

        staged = self._map(state, copy)
        for device in devices:  # the next step may change the tensors
            torch.cuda.current_stream(device).synchronize()
        self._thread = Thread(target=self._run, args=(staged,), name="save", daemon=True)
        self._thread.start()

    def poll(self) -> Path | None:
        """The checkpoint that was completed since the last call, if any; raises its error."""
        return None if self.is_busy else self.wait()

    def wait(self) -> Path | None:
        """Wait for the save under way, then do as ``poll``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, path = self._error, self._path
        self._error = self._path = None
        if error is not None:
            raise CheckpointError(str(error)) from error
        return path

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:  # what ended the block came first, and is the one to show
                raise

    def _run(self, state: CheckpointState) -> None:
        try:
            self._path = save_checkpoint(
                self.folder,
                state,
                rank=self.rank,
                world=self.world,
                exchange=self.exchange,
                keep=self.keep,
            )
        except Exception as error:
            self._error = error

    def _buffer(self, index: int, tensor: Tensor) -> Tensor:
        """Host memory for a tensor; pinned for one on a GPU, which is copied much faster then."""
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[index]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[index] = buffer.zero_()  # makes the system find the memory now
        return buffer

    def _map(
        self, state: CheckpointState, function: Callable[[Tensor, Tensor], Tensor]
    ) -> CheckpointState:
        """The part of the state that this rank writes, every tensor as ``function`` of a buffer."""
        indices = count()

        def take(path: str, tensor: Tensor) -> Tensor:
            return function(self._buffer(next(indices), tensor), tensor)

        head = state.head
        if head is not None:
            head = HeadRows(head.start, head.num_classes, map_tensors(head.tensors, take))
        if self.rank > 0:
            return replace(state, head=head, backbone={}, parts={}, loop={})
        return replace(
            state,
            head=head,
            backbone=map_tensors(state.backbone, take),
            parts=map_tensors(state.parts, take),
            loop=map_tensors(state.loop, take),
        )
