"""Memory of batches that workers fill again and again.

A batch in fresh shared memory costs its pages twice, once in the worker that fills it and once in
the process that reads it, and a file descriptor that is sent along; together that can cost half as
much as decoding. So each worker keeps a few pieces of shared memory and lends them. A piece is sent
once, and then only named; it is free again when the last tensor on it is gone.

Which pieces are lent is one byte each, ``[workers, pieces]``, in memory that all processes share. A
worker sets the bytes of its own pieces and the reader clears them, so no lock is needed.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64  # bytes: a multiple of the size of any element


class Layout(NamedTuple):
    """How a batch of inputs lies in a piece of memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, num_rows: int, given: NDArray[Any]) -> Layout:
        """Rows one after the other, each laid out as one input is."""
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


@dataclass(frozen=True)
class Parcel:
    """Inputs on their way to the reader: which piece they are in, and how."""

    reader: int
    worker: int
    piece: int
    layout: Layout
    memory: Tensor | None  # of the piece, when it is sent for the first time

    def unpacked(self, *, is_pinned: bool = False) -> Tensor:
        """The inputs, in the process that reads.

        Args:
            is_pinned: Copy them to page-locked memory; without it they stay where they are.
        """
        return _BORROWERS[self.reader].unpacked(self, is_pinned=is_pinned)


class Lender:
    """A worker's pieces of memory.

    Args:
        is_lent: The bytes that say what is lent.
        reader: Number of the ``Borrower`` that the pieces are for.
        worker: Number of this worker.
    """

    def __init__(self, is_lent: Tensor, *, reader: int, worker: int) -> None:
        self._is_lent, self._reader, self._worker = is_lent, reader, worker
        self._pieces: dict[int, Tensor] = {}

    def lend(self, layout: Layout) -> tuple[Tensor, Parcel | None]:
        """Room for inputs, and how to send it.

        Where the reader keeps more batches than there are pieces, the room is used only once and
        there is no parcel.
        """
        for piece, is_lent in enumerate(self._is_lent[self._worker].tolist()):
            if not is_lent:
                self._is_lent[self._worker, piece] = 1
                return self._taken(piece, layout)
        return layout.on(_shared(layout.num_bytes)), None

    def _taken(self, piece: int, layout: Layout) -> tuple[Tensor, Parcel]:
        memory = self._pieces.get(piece)
        is_new = memory is None or len(memory) < layout.num_bytes
        if memory is None or is_new:
            memory = self._pieces[piece] = _shared(layout.num_bytes)
        parcel = Parcel(self._reader, self._worker, piece, layout, memory if is_new else None)
        return layout.on(memory), parcel


def _shared(num_bytes: int) -> Tensor:
    memory: Tensor = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
    return memory


class Borrower:
    """What the reader has of the workers' memory.

    Args:
        num_workers: Processes that lend.
        num_pieces: Pieces that each of them may keep.
    """

    def __init__(self, num_workers: int, num_pieces: int) -> None:
        self.is_lent = torch.zeros(num_workers, num_pieces, dtype=torch.uint8).share_memory_()
        self.number = next(_NUMBERS)
        self._pieces: dict[tuple[int, int], Tensor] = {}
        _BORROWERS[self.number] = self

    def unpacked(self, parcel: Parcel, *, is_pinned: bool) -> Tensor:
        """See ``Parcel``."""
        place = (parcel.worker, parcel.piece)
        if parcel.memory is not None:
            self._pieces[place] = parcel.memory
        if is_pinned:
            inputs = parcel.layout.on(self._pieces[place]).pin_memory()
            self._give_back(place)
            return inputs
        # PyTorch keeps the array for as long as any tensor is on its memory, and no longer.
        array = self._pieces[place].numpy()
        weakref.finalize(array, self._give_back, place).atexit = False
        return parcel.layout.on(torch.from_numpy(array))

    def _give_back(self, place: tuple[int, int]) -> None:
        self.is_lent[place] = 0


_NUMBERS = itertools.count()
_BORROWERS: weakref.WeakValueDictionary[int, Borrower] = weakref.WeakValueDictionary()
