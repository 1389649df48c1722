"""Files that are written once: hashed on the way, and on the disk before anyone relies on them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file as it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


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
