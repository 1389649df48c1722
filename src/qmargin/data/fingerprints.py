"""What files looked like when an index was built: names, sizes, times, inodes and samples of bytes.

A change within one tick of the file system's clock leaves the time of a file as it was. A builder
therefore waits until the clock has moved on, and what was still changing makes the index racy: it
is not trusted again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from qmargin.errors import DataError
from qmargin.files import open_regular

_SECOND: Final = 10**9
_TICK: Final = 2 * 10**7  # in ns; kernels round times to 10 ms at most
_COARSE_TICK: Final = 2 * _SECOND  # of file systems that keep whole seconds
_BLOCK: Final = 4096
_MOST_BLOCKS: Final = 64  # over all files, and at least two of each


class Fingerprint:
    """A digest of files and folders; any difference makes an index stale.

    Args:
        kind: What is counted, for messages.
        started: When the build began, by the clock of the file system; None to compare only.

    Attributes:
        is_racy: Whether something was as new as the build itself.
    """

    def __init__(self, kind: str, started: int | None = None) -> None:
        self._kind, self._started = kind, started
        self._begun = time.monotonic_ns()
        self._digest, self._count, self._size = hashlib.sha256(), 0, 0
        self.is_racy = False

    def __str__(self) -> str:
        digest = self._digest.hexdigest()[:16]
        return f"{self._count:,} {self._kind} of {self._size:,} bytes, {digest}"

    def add_folder(self, name: str, path: Path) -> None:
        """Time of a folder, which changes as entries come and go."""
        status = os.stat(path)  # noqa: PTH116  # two million times
        self._add(name, status, size=0)

    def add_file(self, name: str, path: Path, *, num_blocks: int) -> None:
        """Size, time and inode of a file, and blocks of it from its start to its end."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            self._add(name, status, size=status.st_size)
            for offset in _offsets(status.st_size, num_blocks):
                file.seek(offset)
                self._digest.update(file.read(_BLOCK))

    def _add(self, name: str, status: os.stat_result, *, size: int) -> None:
        written = status.st_mtime_ns
        about = f"\0{size}\0{written}\0{status.st_ino}\0"
        self._digest.update(name.encode("utf-8", "surrogateescape") + about.encode())
        self._count, self._size = self._count + 1, self._size + size
        if self._started is not None:
            now = self._started + time.monotonic_ns() - self._begun
            tick = _tick(written)
            self.is_racy |= self._started - tick < written <= now + tick


def fingerprint_of(paths: Sequence[Path], *, kind: str, started: int | None = None) -> Fingerprint:
    """Fingerprint of files that hold samples.

    Raises:
        DataError: One of them is not there, or not a regular file.
    """
    found = Fingerprint(kind, started)
    num_blocks = max(2, _MOST_BLOCKS // max(1, len(paths)))
    for path in paths:
        try:
            found.add_file(path.name, path, num_blocks=num_blocks)
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist; give the data of the index") from error
    return found


def is_in_place(before: str, now: str) -> bool:
    """Whether two fingerprints are of as many files of the same sizes: bytes have changed.

    Examples:
        >>> is_in_place("2 files of 40 bytes, ab", "2 files of 40 bytes, cd")
        True
        >>> is_in_place("2 folders of 0 bytes, ab", "2 folders of 0 bytes, cd")
        False
    """
    sizes = [text.rpartition(", ")[0] for text in (before, now)]
    return sizes[0] == sizes[1] != "" and " of 0 bytes" not in sizes[0]


def clock_of(folder: Path) -> int:
    """Now, in ns, by the clock that stamps files in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def started_after(paths: Iterable[Path], folder: Path) -> int:
    """The clock of a folder's file system, once it shows another time than that of the paths."""
    now = clock_of(folder)
    times = [os.stat(path).st_mtime_ns for path in paths]  # noqa: PTH116  # two million times
    ticks = [written + _tick(written) for written in times if written <= now + _TICK]
    wait = max(ticks, default=0) + _TICK - now  # stamps lag behind by a tick
    if wait > 0:
        time.sleep(wait / _SECOND)
        now = clock_of(folder)
    return now


def _tick(written: int) -> int:
    return _TICK if written % _SECOND else _COARSE_TICK


def _offsets(size: int, num_blocks: int) -> list[int]:
    """Where to read: everything of a small file, else blocks from the first to the last."""
    if size <= num_blocks * _BLOCK:
        return list(range(0, size, _BLOCK))
    return [(size - _BLOCK) * number // (num_blocks - 1) for number in range(num_blocks)]
