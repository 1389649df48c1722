"""Files that are whole or absent: written aside, hashed, on the disk before anyone relies on them.

Every package may use these; they need nothing but Python.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

Progress = Callable[[int, int], None]  # called with how much is done, and of how much
CHUNK_BYTES = 1 << 24


class FileEntry(NamedTuple):
    """What a manifest knows of a file."""

    size: int
    sha256: str


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


def check_regular(path: str | Path) -> None:
    """Refuse what is no regular file before it is opened: FIFOs and devices may never end.

    Raises:
        OSError: It is something else, or is not there.
    """
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def describe_file(path: str | Path) -> FileEntry:
    """Size and hash of a file as it is on the disk."""
    check_regular(path)
    digest, size = hashlib.sha256(), 0
    with Path(path).open("rb", buffering=0) as file:
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
