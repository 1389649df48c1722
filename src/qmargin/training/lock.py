"""One run per output folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from qmargin.errors import ConfigError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class RunLock:
    """Holds ``folder/lock``, so that no second run writes to the folder. One rank takes it.

    The system releases the lock when the process ends, however it ends; the file stays, and says
    who held it last. On a file system without locks, what the file says decides: a process that is
    no longer alive on this machine has lost its lock.

    Args:
        folder: The output folder; made if it does not exist.

    Attributes:
        last_owner: The run that held the lock before and was killed, as in ``"process 12 on node
            a"``; None after a run that ended by itself.

    Raises:
        ConfigError: Another run holds it; the message says which.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, RunLock(folder) as lock:
        ...     lock.last_owner is None and lock.path.name
        'lock'
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "lock"
        self.last_owner: str | None = None
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or refuse."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened ({error.strerror}); choose another output folder"
            ) from error
        try:
            is_locked = _flock(file)
            owner = _read_owner(file)
            if is_locked is False or (is_locked is None and _may_be_alive(owner)):
                raise ConfigError(
                    f"{self.path.parent} is in use by {_name(owner)}; choose another output "
                    f"folder, or stop that run{'' if is_locked is False else ' and delete lock'}"
                )
            self.last_owner = _name(owner) if owner else None
            _write_owner(file, {"pid": os.getpid(), "host": socket.gethostname()})
        except BaseException:
            os.close(file)
            raise
        self._file = file
        _close_in_children(self)

    def release(self) -> None:
        """Give the lock back; without one, do nothing."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _close_in_children(lock: RunLock) -> None:
    """Keep the lock out of forked processes: data workers that outlive a killed run would hold it.

    Closing a copy of the descriptor does not unlock the original.
    """
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held._close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def _flock(file: int) -> bool | None:
    """Whether the lock is ours now; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read_owner(file: int) -> dict[str, Any]:
    """Who the file says holds the lock; empty if it says nothing that can be understood."""
    os.lseek(file, 0, os.SEEK_SET)
    try:
        owner = json.loads(os.read(file, 4096))
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write_owner(file: int, owner: dict[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, json.dumps(owner).encode())
    os.fsync(file)


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def _may_be_alive(owner: dict[str, Any]) -> bool:
    """Whether the owner may still run; one on another machine may."""
    if not owner:
        return False
    if owner["host"] != socket.gethostname():
        return True
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
