"""Launches that are repeated with other tensors of the same kind.

Triton binds and classifies the arguments of every launch, which for a kernel of forty arguments
takes longer than the launch itself. A recording keeps the compiled kernels and all arguments; a
repeated launch replaces only the addresses of the tensors. The caller must ensure that shapes,
strides, types and alignments are those of the recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_thread = (
    threading.local()
)  # its recordings in progress: backward passes have a thread of their own


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel; an open recording records it."""
    compiled = kernel[grid](*args, **options)
    for recording in getattr(_thread, "recordings", ()):
        recording.launches.append((compiled, grid, args))


class Recording:
    """Records the launches inside a ``with`` block."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] = []

    def __enter__(self) -> Recording:
        _thread.recordings = [*getattr(_thread, "recordings", ()), self]
        return self

    def __exit__(self, *error: object) -> None:
        _thread.recordings.remove(self)

    def between(self, *places: Tensor | TensorDescriptor) -> Repeated | None:
        """Return an object that repeats the launches with others in place of these.

        None if a launch had a tensor that is none of them, or where kernels are interpreted.
        """
        roles = {id(place): role for role, place in enumerate(places)}
        bound = []
        for compiled, grid, args in self.launches:
            others = [i for i, a in enumerate(args) if isinstance(a, Tensor | TensorDescriptor)]
            found = [(i, roles.get(id(args[i]))) for i in others]
            if any(role is None for _, role in found) or not _is_known(compiled):
                return None
            template = [None if i in others else a for i, a in enumerate(args)]
            sizes = (*grid, 1, 1)[:3]
            bound.append((compiled, sizes, template, found))
        return Repeated(bound) if bound else None


def _is_known(compiled: Any) -> bool:
    """Whether a compiled kernel is launched as here: other versions of Triton may differ."""
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        return False
    names = list(signature(type(compiled.run).__call__).parameters)
    return names[1:6] == ["gridX", "gridY", "gridZ", "stream", "function"]


class Repeated:
    """Launches of compiled kernels, to be repeated with other addresses."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = [
            (compiled.run, sizes, compiled.function, compiled.packed_metadata, template, places)
            for compiled, sizes, template, places in launches
        ]

    def __call__(self, device: int, *addresses: int | TensorDescriptor) -> None:
        """Launch on the current stream of a CUDA device, which has to be the current one."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, sizes, function, metadata, template, places in self._launches:
            args = template.copy()
            for place, role in places:
                args[place] = addresses[role]
            run(*sizes, stream, function, metadata, None, None, None, *args)


MOST_KNOWN = 256
_known: dict[tuple[object, ...], Repeated] = {}


def repeat(
    launches: Callable[[], None],
    key: tuple[object, ...],
    *given: Tensor,
    made: tuple[Tensor | TensorDescriptor, ...] = (),
) -> None:
    """Launch kernels, by a recording if such launches were recorded before.

    Args:
        launches: Launches the kernels by ``launch``.
        key: Their names and all arguments that do not follow from shapes, strides and types.
        given: Their tensors, at least one.
        made: The other tensors and descriptors, whose shapes, strides and types follow from the
            key and the tensors given: new ones, aligned as PyTorch allocates.
    """
    if not _can_record(given[0]):
        launches()
        return
    device = given[0].device.index
    kinds = (key, device, *map(_kind, given))
    known, places = _known.get(kinds), (*given, *made)
    if known is not None:
        known(device, *(one.data_ptr() if isinstance(one, Tensor) else one for one in places))
        return
    with Recording() as recording:
        launches()
    repeated = recording.between(*places)
    if repeated is not None:
        if len(_known) == MOST_KNOWN:  # sizes that change with every batch
            _known.clear()
        _known[kinds] = repeated


def _can_record(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _kind(place: Tensor) -> tuple[object, ...]:
    return place.dtype, place.shape, place.stride(), place.data_ptr() % 16
