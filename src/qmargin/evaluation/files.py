"""Files that are whole or absent, their fingerprints, and how far the work on them is."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int], None]  # called with how much is done, and of how much
CHUNK_BYTES = 1 << 24


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file through a temporary one in the same folder, which is synced and renamed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | Path) -> str:
    """Fingerprint of a file's bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
