"""Files from the network: resumed where they stopped, whole and checked, or not there at all."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from qmargin.errors import ConfigError, DataError
from qmargin.files import Progress, describe_file, sync_folder

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 16
PART = ".part"


class Remote(NamedTuple):
    """A file that is known before it is fetched."""

    name: str
    size: int
    sha256: str


def check_base(base: str) -> str:
    """An address that files are below, without its last slash.

    Raises:
        ConfigError: It is not an address of the web; ``file:`` and others are not read.

    Examples:
        >>> check_base("http://127.0.0.1:8000/")
        'http://127.0.0.1:8000'
    """
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"the address is {base!r}; it must begin with https:// or http://")
    return base.rstrip("/")


def fetch(remote: Remote, base: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """A file in ``folder`` with exactly the bytes that were expected.

    What has come is kept in a file with the suffix ``.part``, and the next call goes on behind it.

    Args:
        remote: The file, its size and its fingerprint.
        base: Address that its name is appended to.
        folder: Where to put it; made if it is missing.
        progress: Called with the bytes that are there and the size.

    Raises:
        DataError: The address cannot be reached, the transfer stopped, or other bytes came.
    """
    path = folder / remote.name
    if path.exists() and describe_file(path) == (remote.size, remote.sha256):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    url = f"{check_base(base)}/{remote.name}"
    if not part.exists() or part.stat().st_size < remote.size:
        _receive(remote, url, part, progress)
    _check(remote, url, part)
    part.replace(path)
    sync_folder(folder)
    return path


def _receive(remote: Remote, url: str, part: Path, progress: Progress | None) -> None:
    """Append what is missing; a server that cannot go on in the middle starts again."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            goes_on = answer.status == http.client.PARTIAL_CONTENT and _starts_at(answer, have)
            with part.open("ab" if goes_on else "wb") as file:
                _copy(answer, file, remote, url, progress)
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # of a longer file: it would fail for ever
        raise DataError(
            f"{url} answers {error.code} {error.reason}; check the address, or give another one"
        ) from error
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url} cannot be read ({reason}); check the network and run the same command again, "
            "which goes on where this one stopped"
        ) from error
    size = part.stat().st_size
    if size < remote.size:
        raise DataError(
            f"{url} stopped after {size:,} of {remote.size:,} bytes; run the same command again to "
            "go on"
        )


def _starts_at(answer: http.client.HTTPResponse, have: int) -> bool:
    return (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")


def _copy(
    answer: http.client.HTTPResponse,
    file: IO[bytes],
    remote: Remote,
    url: str,
    progress: Progress | None,
) -> None:
    """All bytes to the file, and not one more than it should have."""
    size = file.tell()
    while chunk := answer.read(CHUNK_BYTES):
        size += len(chunk)
        if size > remote.size:
            file.truncate(0)
            raise DataError(
                f"{url} is longer than the {remote.size:,} bytes that were expected; it is not the "
                "file that this version knows"
            )
        file.write(chunk)
        if progress is not None:
            progress(size, remote.size)


def _check(remote: Remote, url: str, part: Path) -> None:
    found = describe_file(part)
    if found != (remote.size, remote.sha256):
        part.unlink()
        raise DataError(
            f"{url} has {found.size:,} bytes with the SHA-256 {found.sha256}; expected were "
            f"{remote.size:,} with {remote.sha256}: what came was thrown away, run the command "
            "again, or give another address"
        )
