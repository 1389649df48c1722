"""Non-blocking device-to-host copies."""

from __future__ import annotations

import torch
from torch import Tensor


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
