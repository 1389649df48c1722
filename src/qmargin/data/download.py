"""Files from the network: resumed where they stopped, whole and checked, or not there at all."""

from __future__ import annotations

import base64
import http.client
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from qmargin.errors import ConfigError, DataError
from qmargin.files import Progress, describe_file, sync_folder

TIMEOUT_S = 30.0  # without a byte
ANSWER_S = 60.0  # until the headers are there, redirects included
WINDOW_S = 60.0  # over which the speed is measured
LEAST_SPEED = 2_000  # bytes per second
GRACE_S = 60.0  # of the whole download, besides the time at the least speed
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
    try:
        parts = urlsplit(base)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"the address is {shown(base)!r}; it must begin with https:// or http://")
    return base.rstrip("/")


def shown(url: str) -> str:
    """An address for messages and notes: without a password, and without what follows a ``?``.

    Examples:
        >>> shown("https://ada:secret@example.org/python?token=1")
        'https://example.org/python'
    """
    return re.sub(r"^([a-zA-Z]*:?//)?[^/?#]*@", r"\1", re.split(r"[?#]", url)[0])


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
    _check(remote, shown(url), part)
    part.replace(path)
    sync_folder(folder)
    return path


def _receive(remote: Remote, url: str, part: Path, progress: Progress | None) -> None:
    """Append what is missing; a server that cannot go on in the middle starts again."""
    have = part.stat().st_size if part.exists() else 0
    request, url = _request(url), shown(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _answer(request) as answer:
            goes_on = answer.status == http.client.PARTIAL_CONTENT and _starts_at(answer, have)
            with part.open("ab" if goes_on else "wb") as file:
                try:
                    _copy(answer, file, remote, url, progress)
                finally:
                    file.flush()
                    os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # of a longer file: it would fail for ever
        raise DataError(
            f"{url} answers {error.code} {_printable(error.reason)}; check the address, or give "
            "another one"
        ) from error
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url} cannot be read ({_printable(reason)}); check the network and run the same "
            "command again, "
            "which goes on where this one stopped"
        ) from error
    size = part.stat().st_size
    if size < remote.size:
        raise DataError(
            f"{url} stopped after {size:,} of {remote.size:,} bytes; run the same command again to "
            "go on"
        )


def _request(url: str) -> urllib.request.Request:
    """A request whose password goes to the first server alone, in a header and not in the URL."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(
        parts._replace(netloc=host).geturl(), headers={"Accept-Encoding": "identity"}
    )
    if user:
        secret = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    return request


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to ``http`` and ``https``, and to nothing else."""

    def http_error_302(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any
    ) -> Any:
        """Follow one redirect, or raise ``DataError``."""
        scheme = urlsplit(urljoin(req.full_url, headers.get("location") or "")).scheme
        if scheme not in ("http", "https"):
            fp.close()
            raise DataError(
                f"{shown(req.full_url)} redirects to an address of {scheme[:20]!r}; only https and "
                "http are followed"
            )
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _answer(request: urllib.request.Request) -> http.client.HTTPResponse:
    """The answer once its headers are there; names, TLS and headers may not take for ever."""
    opener = urllib.request.build_opener(_WebOnly)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    is_late = threading.Event()

    def ask() -> None:
        try:
            found: Any = opener.open(request, timeout=TIMEOUT_S)
        except Exception as error:  # raised again where it is waited for
            found = error
        answers.put(found)
        if is_late.is_set() and hasattr(found, "close"):
            found.close()

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=ANSWER_S)
    except queue.Empty:
        is_late.set()
        raise TimeoutError(f"no answer within {ANSWER_S:g} s") from None
    if isinstance(found, Exception):
        raise found
    answer: http.client.HTTPResponse = found
    return answer


def _printable(text: object) -> str:
    """What a server says, in one line and without what could steer a terminal."""
    line = " ".join(str(text).split())[:200]
    return "".join(sign if sign.isprintable() else "?" for sign in line)


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
    start = since = time.monotonic()
    deadline, counted = start + GRACE_S + (remote.size - size) / LEAST_SPEED, 0
    while chunk := answer.read1(CHUNK_BYTES):
        size += len(chunk)
        counted += len(chunk)
        if size > remote.size:
            file.truncate(0)
            raise DataError(
                f"{url} is longer than the {remote.size:,} bytes that were expected; it is not the "
                "file that this version knows"
            )
        file.write(chunk)
        if progress is not None:
            progress(size, remote.size)
        now = time.monotonic()
        if now > deadline and size < remote.size:
            raise TimeoutError(f"{size:,} of {remote.size:,} bytes after {now - start:.0f} s")
        if now - since >= WINDOW_S:
            if counted < LEAST_SPEED * (now - since):
                raise TimeoutError(
                    f"{counted / (now - since):,.0f} bytes per second; at least {LEAST_SPEED:,} "
                    "are needed"
                )
            since, counted = now, 0


def _check(remote: Remote, url: str, part: Path) -> None:
    found = describe_file(part)
    if found != (remote.size, remote.sha256):
        part.unlink()
        raise DataError(
            f"{url} has {found.size:,} bytes with the SHA-256 {found.sha256}; expected were "
            f"{remote.size:,} with {remote.sha256}: what came was thrown away, run the command "
            "again, or give another address"
        )
