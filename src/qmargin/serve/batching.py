"""One thread for the model, which batches samples of concurrent requests."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import QMarginError

Row = NDArray[np.float32]  # [d]
Embed = Callable[[Sequence[NDArray[Any]]], NDArray[np.float32]]
MOST = 32  # samples in one batch of the model


class Busy(Exception):
    """Raised if the server has reached its memory limit; try again."""


class Budget:
    """Bytes of inputs in memory; used by the event loop only."""

    def __init__(self, most: int) -> None:
        self.most, self.held, self.peak = most, 0, 0

    def take(self, size: int) -> None:
        """Account for more bytes, or raise ``Busy``."""
        if self.held + size > self.most:
            raise Busy(
                f"the server holds {self.held:,} bytes of inputs and takes at most {self.most:,}; "
                "send less at once, or try again"
            )
        self.held += size
        self.peak = max(self.peak, self.held)

    def give(self, size: int) -> None:
        """Release bytes."""
        self.held -= size


class Batcher:
    """Embeds samples in a separate thread.

    No sample waits for others: samples that arrive while the model is busy form the next batch. A
    sample that the model refuses does not affect the others.
    """

    def __init__(self, embed: Embed, *, most: int = MOST) -> None:
        self._embed, self._most = embed, most
        self._waiting: deque[tuple[NDArray[Any], Future[Row]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_batches = 0
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, sample: NDArray[Any]) -> Future[Row]:
        """Future with the embedding of a sample."""
        future: Future[Row] = Future()
        with self._changed:
            self._waiting.append((sample, future))
            self._changed.notify()
        return future

    async def embed(self, sample: NDArray[Any]) -> Row:
        """The embedding of a sample."""
        return await asyncio.wrap_future(self.submit(sample))

    def close(self) -> None:
        """Finish waiting samples and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                size = min(self._most, len(self._waiting))
                batch = [self._waiting.popleft() for _ in range(size)]
            if not batch:
                return
            self._answer([one for one in batch if one[1].set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[tuple[NDArray[Any], Future[Row]]]) -> None:
        if not batch:
            return
        self.num_batches += 1
        try:
            rows = self._embed([sample for sample, _ in batch])
        except QMarginError as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for one in batch:
                    self._answer([one])
        except BaseException as error:  # all waiting requests get the error
            for _, future in batch:
                with suppress(Exception):
                    future.set_exception(error)
        else:
            for row, (_, future) in zip(rows, batch, strict=True):
                future.set_result(row)
