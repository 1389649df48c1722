"""Files that are whole or absent: written aside, hashed, on the disk before anyone relies on them.

Every package may use these; they need nothing but Python and our errors.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from qmargin.errors import DataError

Progress = Callable[[int, int], None]  # called with how much is done, and of how much
CHUNK_BYTES = 1 << 24


class FileEntry(NamedTuple):
    """What a manifest knows of a file."""

    size: int
    sha256: str


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How files are opened: without waiting for the other end of a pipe."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading; a pipe, a device or a folder is refused at once, not waited for.

    Raises:
        DataError: It is not a regular file.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, READING)
    except ValueError as error:  # a zero byte, or a character that no name can have
        raise DataError(f"{str(path)[:80]!r} is no name of a file ({error})") from error
    try:
        check_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most: int) -> bytes:
    """All bytes of a small file, as fast as the system allows; see ``open_regular``.

    Raises:
        DataError: It is not a regular file, or has more than ``most`` bytes.
        OSError: It cannot be read.
    """
    try:
        descriptor = os.open(path, READING)
    except ValueError as error:
        raise DataError(f"{str(path)[:80]!r} is no name of a file ({error})") from error
    try:
        status = os.fstat(descriptor)
        check_regular(path, status)
        if status.st_size > most:
            raise DataError(f"{path} has {status.st_size:,} bytes; at most {most:,} are read")
        return os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file; False too for what cannot be a name, as lists may have."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # longer than any name, or with a zero byte
        return False


def open_text(path: str | Path, *, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """Open a text file for reading, as ``open_regular`` does."""
    return io.TextIOWrapper(open_regular(path), encoding=encoding, newline=newline)


def check_regular(path: str | Path, status: os.stat_result | None = None) -> None:
    """Raise ``DataError`` unless there is a regular file, for readers that take a path.

    Args:
        path: The file.
        status: Of the file, where it is known.

    Raises:
        OSError: There is no such file.
    """
    mode = (os.stat(path) if status is None else status).st_mode  # noqa: PTH116
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise DataError(f"{path} is {kind}; give a regular file")


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file, sync it to the disk, and describe it.

    Args:
        path: A name that does not exist yet.
        chunks: Its content; large ones are split, so that nothing is copied.

    Raises:
        OSError: The file exists, or the disk is full.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
            while rest:
                written = file.write(rest[:CHUNK_BYTES]) or 0
                digest.update(rest[:written])
                size += written
                rest = rest[written:]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A free name to write to; it becomes ``path`` at the end, or vanishes after an error.

    An error of the file system names ``path``, which people know, and not the free name.

    Args:
        path: The file to make or replace.
        sync: Make the new name last; what is not worth a wait for the disk goes without.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # as in a folder that is none
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename, error.filename2 = str(path), None
        raise
    if sync:
        sync_folder(path.parent)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file, or replace it: a reader finds the old content or the new, even after a crash.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder, "a.txt"), b"all of it")
        ...     [path.name for path in Path(folder).iterdir()]
        ['a.txt']
    """
    with replacing(Path(path)) as temporary:
        write_file(temporary, [content])


def describe_file(path: str | Path) -> FileEntry:
    """Size and hash of a file as it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def sha256_of(path: str | Path) -> str:
    """Fingerprint of a file's bytes, as hexadecimal digits."""
    return describe_file(path).sha256


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
