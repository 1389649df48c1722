"""Non-blocking device-to-host copies, and cheap device queries."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def gpu_properties(device: torch.device) -> Any:
    """Cached properties of a GPU: a lookup takes as long as a kernel launch."""
    return torch.cuda.get_device_properties(device)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU the current device, where Triton launches kernels."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(tensor)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off on a tensor's device, if it is enabled."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class Reading:
    """Asynchronous copy of a small tensor to the host."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return the values on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
