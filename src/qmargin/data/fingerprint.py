"""Fingerprints of data: what has to be the same for an index to be trusted again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmargin.errors import DataError
from qmargin.files import open_regular, sha256_of

_SECOND: Final = 10**9
_TICK: Final = 2 * 10**7  # in ns; kernels round times to 10 ms at most
_COARSE_TICK: Final = 2 * _SECOND  # of file systems that keep whole seconds
_BLOCK: Final = 4096
_MOST_BLOCKS: Final = 64  # over all files, and at least two of each


@dataclass(frozen=True)
class Fingerprint:
    """Count, size and digest of files or folders."""

    what: str  # is counted, for messages
    count: int
    size: int  # bytes of all of them; 0 where sizes say nothing
    digest: str  # of names, sizes, times, inodes and some or all of the bytes

    def __str__(self) -> str:
        return f"{self.count:,} {self.what} of {self.size:,} bytes, {self.digest}"

    def is_changed_in_place(self, now: Fingerprint) -> bool:
        """Whether there are as many files of the same sizes, with other bytes or times."""
        is_alike = (now.what, now.count, now.size) == (self.what, self.count, self.size)
        return is_alike and self.size > 0


class Hasher:
    """Collects a fingerprint.

    Args:
        what: What is counted, for messages.
        started: When the build of an index began, by the clock of the file system; None to compare
            only. ``is_racy`` is set if something is as new as that: a later change may not show.
    """

    def __init__(self, what: str, started: int | None = None) -> None:
        self._what, self._started = what, started
        self._begun = time.monotonic_ns()
        self._digest, self._count, self._size = hashlib.sha256(), 0, 0
        self.is_racy = False

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of everything that was added so far."""
        return Fingerprint(self._what, self._count, self._size, self._digest.hexdigest()[:16])

    def add_folder(self, name: str, path: Path) -> None:
        """Add the time of a folder, which changes as entries come and go."""
        self._add(name, os.stat(path), size=0)  # noqa: PTH116  # two million times

    def add_file(self, path: Path, *, num_blocks: int) -> None:
        """Add size, time and inode of a file, and blocks of it from its start to its end."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            self._add(path.name, status, size=size)
            if size <= num_blocks * _BLOCK:
                offsets = list(range(0, size, _BLOCK))
            else:
                offsets = [(size - _BLOCK) * n // (num_blocks - 1) for n in range(num_blocks)]
            for offset in offsets:
                file.seek(offset)
                self._digest.update(file.read(_BLOCK))

    def add_text(self, text: str) -> None:
        """Add a text that is not the same when the data has changed."""
        self._digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
        self._count += 1

    def _add(self, name: str, status: os.stat_result, *, size: int) -> None:
        written = status.st_mtime_ns
        about = f"\0{size}\0{written}\0{status.st_ino}\0"
        self._digest.update(name.encode("utf-8", "surrogateescape") + about.encode())
        self._count, self._size = self._count + 1, self._size + size
        if self._started is not None:
            now = self._started + time.monotonic_ns() - self._begun
            tick = _tick(written)
            self.is_racy |= self._started - tick < written <= now + tick


@contextmanager
def _readable() -> Iterator[None]:
    """Raise ``DataError`` for a file that is not there, or has no possible name."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as error:
        path, reason = getattr(error, "filename", "a file"), getattr(error, "strerror", None)
        found = f"{path} cannot be read: {reason or error}"
        raise DataError(f"{found}; give all files of the data") from error


def hash_files(paths: Sequence[Path], started: int | None = None) -> Hasher:
    """Hash files that hold samples, by some of their bytes."""
    hasher = Hasher("files", started)
    num_blocks = max(2, _MOST_BLOCKS // max(1, len(paths)))
    with _readable():
        for path in paths:
            hasher.add_file(path, num_blocks=num_blocks)
    return hasher


def hash_lists(paths: Sequence[Path]) -> Hasher:
    """All bytes of lists and nothing else: lists may be copied, and samples have checksums."""
    hasher = Hasher("lists")
    with _readable():
        for path in paths:
            hasher.add_text(sha256_of(path))
    return hasher


def clock_of(folder: Path) -> int:
    """Now, in ns, by the clock that stamps files in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def started_after(paths: Iterable[Path], folder: Path) -> int:
    """The clock of a folder's file system, once it shows another time than that of the paths."""
    now = clock_of(folder)
    with _readable():
        times = [os.stat(path).st_mtime_ns for path in paths]  # noqa: PTH116  # two million times
    ticks = [written + _tick(written) for written in times if written <= now + _TICK]
    wait = max(ticks, default=0) + _TICK - now  # stamps lag behind by a tick
    if wait > 0:
        time.sleep(wait / _SECOND)
        now = clock_of(folder)
    return now


def _tick(written: int) -> int:
    return _TICK if written % _SECOND else _COARSE_TICK
