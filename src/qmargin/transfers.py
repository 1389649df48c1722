"""Non-blocking device-to-host copies."""

from __future__ import annotations

import torch
from torch import Tensor


class Reading:
    """A copy of a small tensor that is waited for only when it is needed."""

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
        """The values, on the host, as soon as what was launched before the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
