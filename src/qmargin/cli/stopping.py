"""How commands that can be run again end after a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_to_go_on() -> Iterator[None]:
    """A signal ends the command with its status, and with a word on what to do next."""
    from qmargin.training.signals import Interrupted, exit_status

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        number = stop.signal if isinstance(stop, Interrupted) else signal.SIGINT
        sys.stderr.write("interrupted and saved; run the same command again to go on\n")
        raise SystemExit(exit_status(number)) from stop
