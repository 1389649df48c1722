"""The process around every command: signals, errors and exit statuses.

Nothing but the standard library is imported before signals are caught.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from qmargin.errors import QMarginError
from qmargin.terminal import printable, safe_streams
from qmargin.training.signals import ONE_REQUEST_S, Interrupted, exit_status

REFUSED, UNFORESEEN, CLOSED_PIPE = 2, 1, 128 + 13  # the last as shells count SIGPIPE
_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
_ALARM = getattr(signal, "SIGALRM", None)
_RETRY_S = 0.01
_REMEDIES = {
    errno.ENOENT: "check the path",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions, or choose another place"),
    **dict.fromkeys((errno.EROFS, errno.EEXIST), "choose another place"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another place"),
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or use fewer workers",
    errno.ENOMEM: "close other programs, or use fewer workers",
}
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def main(
    argv: Sequence[str] | None = None,
    *,
    parser: Callable[[], argparse.ArgumentParser] | None = None,
) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: Arguments without the program's name; those of the process when None.
        parser: Returns a different parser; called after signal handlers are set.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may not be in the terminal's set
        sys.stdout.reconfigure(errors="backslashreplace")
    with safe_streams():
        return _main(argv, _Stop(is_last=argv is None), parser)


def _main(
    argv: Sequence[str] | None, stop: _Stop, build: Callable[[], argparse.ArgumentParser] | None
) -> int:
    arguments = argparse.Namespace()
    try:
        with stop:
            if build is None:
                from qmargin.cli.commands import build_parser

                build = build_parser
            arguments = build().parse_args(argv)
            arguments.run(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt as error:
        return _interrupted(getattr(error, "signal", signal.SIGINT), arguments)
    except Exception as error:
        if stop.number:  # a library may raise something else
            return _interrupted(stop.number, arguments)
        return _failed(error, arguments)
    return 0


class _Stop:
    """Turn the first signal into ``Interrupted``, so that open files are closed and removed.

    Signals that follow at once count as the same request; a later one ends the process. Training
    runs have a ``StopRequest``, which replaces these handlers until the run is saved. The
    exception waits until a module is imported, because C++ code of torch aborts when it meets one,
    and until a temporary folder is made or removed as a whole.
    """

    def __init__(self, *, is_last: bool) -> None:
        self.number = 0
        self._since = 0.0
        self._is_last = is_last  # the process ends afterwards: signals then leave no traceback
        self._handlers: dict[int, Any] = {}
        self._old_hook = sys.unraisablehook

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        sys.unraisablehook = self._look_at_swallowed
        if _ALARM is not None:
            self._handlers[_ALARM] = signal.signal(_ALARM, self._raise)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup and `&` in scripts
                self._handlers[number] = signal.signal(number, self._arrived)
        if self._is_last:
            atexit.register(self._ignore)  # functions registered first are called last

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if _ALARM in self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        # A finished command has succeeded, whatever arrives while the interpreter shuts down.
        leave = _leave if kind else lambda *_: os._exit(0)
        for number, handler in self._handlers.items():
            is_ours = self._is_last and number != _ALARM
            signal.signal(number, leave if is_ours else handler)
        sys.unraisablehook = self._old_hook

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            self._raise(number, frame)
        elif now - self._since > ONE_REQUEST_S:
            _leave(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if _ALARM is not None and _must_wait(frame):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
        else:
            raise Interrupted(self.number or number)

    def _look_at_swallowed(self, unraisable: Any) -> None:
        """Raise an exception again that was lost inside a callback or ``__del__``."""
        if not isinstance(unraisable.exc_value, Interrupted):
            self._old_hook(unraisable)
        elif _ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)

    def _ignore(self) -> None:
        """The command is finished; only the interpreter has to exit."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)


def _must_wait(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__")
        is_removing = module == "shutil" and "rmtree" in code.co_name
        if code.co_filename.startswith("<frozen importlib") or module == "tempfile" or is_removing:
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # progress bars hide the cursor
    os._exit(exit_status(number))


def _interrupted(number: int, arguments: argparse.Namespace) -> int:
    advice = "; run the same command again to continue" if "resumes" in arguments else ""
    _say(f"interrupted by {signal.Signals(number).name}{advice}")
    return exit_status(number)


def _failed(error: Exception, arguments: argparse.Namespace) -> int:
    """Print error and remedy in one line; only unexpected errors have a traceback."""
    is_runtime = isinstance(error, RuntimeError)
    if isinstance(error, QMarginError):
        text = str(error)
    elif isinstance(error, MemoryError) or (
        is_runtime and any(words in str(error).lower() for words in _NO_MEMORY)
    ):
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        text = f"out of memory ({first}); {_smaller(arguments)}"
    elif isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
        text = f"{place}{error.strerror or error}{remedy}"
    else:
        sys.stderr.write("".join(traceback.format_exception(error)))
        kind, place = type(error).__name__, _place_in_extension(error)
        text = f"unexpected {kind}; report it with the traceback above, the command and the output "
        text += "of `qmargin doctor`"
        if place:
            text = f"{kind} in {place}, which is not part of qmargin: {error}"
        _say(f"error: {text}")
        return UNFORESEEN
    _say(f"error: {text}")
    return REFUSED


def _place_in_extension(error: Exception) -> str:
    """The innermost line that a user's package ran; empty where none was involved."""
    from importlib.metadata import entry_points

    from qmargin.registry import KINDS

    groups = [entry_points(group=kind.group) for kind in KINDS.values()]
    packages = {point.module.partition(".")[0] for points in groups for point in points}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            place = f"{frame.f_code.co_filename}, line {line}"
    return place


def _smaller(arguments: argparse.Namespace) -> str:
    """Advice on what to make smaller, by the options of the command."""
    if "batch_size" in arguments:
        return f"lower --batch-size, now {arguments.batch_size}, or use a machine with more memory"
    if "settings" in arguments:
        return "lower the batch with --set data.batch_size=N, or use a machine with more memory"
    return "use smaller inputs, or a machine with more memory"


def _say(text: str) -> None:
    with suppress(OSError):  # standard error may be closed
        sys.stderr.write(f"qmargin: {printable(text)}\n")
