"""SIGTERM and SIGINT: the first saves and stops, the second stops at once.

Before the first step a signal ends a run at once. After it all ranks vote to save the same step and
leave with status ``128 + number``. A second signal ends the process at once with the same status,
even while its main thread waits inside a collective or for a GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from qmargin.errors import ConfigError, RankError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_S = 0.5
"""Signals closer together than this count once: launchers tend to send one twice."""


def exit_status(number: int) -> int:
    """Exit status of a run that a signal stopped, by the convention of shells."""
    return 128 + number


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop; ``except Exception`` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


class StopRequest:
    """Record the first signal and exit on the second; for a ``with`` block in the main thread.

    Python runs its handlers between two bytecodes of the main thread, which may never happen. The
    interpreter's writes to its wake-up socket arrive at once; a thread counts signals there. On the
    second request it calls ``leave`` with the exit status.
    """

    def __init__(self, leave: Callable[[int], Any] = os._exit) -> None:
        self.number = 0  # of the signal that asked to stop, or 0
        self._leave = leave
        self._raises_at_once = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals can only be caught in the main thread; enter StopRequest there"
            )
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._count, name="qmargin-signals", daemon=True)
        self._thread.start()
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest):  # the process may continue after the run
                outer.number = outer.number or self.number
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()  # ends the thread
        self._thread.join()
        self._reader.close()

    def obey(self) -> None:
        """Raise ``Interrupted`` if a signal asked to stop."""
        if self.number:
            raise Interrupted(self.number)

    @contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Context of work without state to save: a signal raises ``Interrupted`` at once."""
        self._raises_at_once = True
        try:
            self.obey()
            yield
            self.obey()
        except RankError as error:
            if self.number:  # the same signal stopped the lost ranks
                raise Interrupted(self.number) from error
            raise
        finally:
            self._raises_at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number == 0:
            self.number = number
        if self._raises_at_once:
            self._raises_at_once = False  # do not interrupt clean-up
            self.obey()

    def _count(self) -> None:
        first: float | None = None
        while arrived := self._reader.recv(64):
            for number in arrived:
                if number not in SIGNALS:  # such as SIGCHLD, when a data worker ends
                    continue
                now = time.monotonic()
                if first is None:
                    first, self.number = now, self.number or number
                elif now - first > ONE_REQUEST_S:
                    self._leave(exit_status(number))
