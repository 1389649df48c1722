"""Downloads: resumable, checked, and complete or absent."""

from __future__ import annotations

import base64
import http.client
import os
import queue
import re
import secrets
import shutil
import stat
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from qmargin.errors import ConfigError, DataError
from qmargin.files import Progress, describe_file, sync_folder, write_file

TIMEOUT_S = 30.0  # without a byte
ANSWER_S = 60.0  # until the headers are there, redirects included
WINDOW_S = 60.0  # over which the speed is measured
LEAST_SPEED = 2_000  # bytes per second
GRACE_S = 60.0  # of the whole download, in addition to the time at the least speed
CHUNK_BYTES = 1 << 16
PART = ".part"
_NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


class Remote(NamedTuple):
    """A file with known size and hash."""

    name: str
    size: int
    sha256: str


def check_base(base: str) -> str:
    """Base address of files, without a trailing slash; ``file:`` and others are refused."""
    try:
        parts = urlsplit(base)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"the address is {shown(base)!r}; it must begin with https:// or http://")
    return base.rstrip("/")


def shown(url: str) -> str:
    """An address for messages and notes, without a password and without its query.

    Examples:
        >>> shown("https://ada:secret@example.org/python?token=1")
        'https://example.org/python'
    """
    return re.sub(r"^([a-zA-Z]*:?//)?[^/?#]*@", r"\1", re.split(r"[?#]", url)[0])


def fetch(remote: Remote, base: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """Download a file to ``folder`` and check its size and hash.

    A partial download is kept in a file with the suffix ``.part``, and the next call resumes it.
    """
    path = folder / remote.name
    if path.exists() and describe_file(path) == (remote.size, remote.sha256):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    url = f"{check_base(base)}/{remote.name}"
    if not part.exists() or part.stat().st_size < remote.size:
        _receive(remote, url, part, progress)
    found = describe_file(part)
    if found != (remote.size, remote.sha256):
        part.unlink()
        raise DataError(
            f"{shown(url)} has {found.size:,} bytes with the SHA-256 {found.sha256}; expected were "
            f"{remote.size:,} with {remote.sha256}: run the command again, or give another address"
        )
    part.replace(path)
    sync_folder(folder)
    return path


def _receive(remote: Remote, url: str, part: Path, progress: Progress | None) -> None:
    """Append what is missing; a server that cannot resume starts again."""
    have = part.stat().st_size if part.exists() else 0
    request, url = _request(url), shown(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _answer(request) as answer:
            place = answer.headers.get("Content-Range") or ""
            is_part = answer.status == http.client.PARTIAL_CONTENT
            goes_on = is_part and place.startswith(f"bytes {have}-")
            with part.open("ab" if goes_on else "wb") as file:
                try:
                    _copy(answer, file, remote, url, progress)
                finally:
                    file.flush()
                    os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # of a longer file: resuming would always fail
        reason = f"{error.code} {_printable(error.reason)}"
        raise DataError(
            f"{url} answers {reason}; check the address, or give another one"
        ) from error
    except _NETWORK_ERRORS as error:
        reason = _printable(getattr(error, "reason", None) or error)
        remedy = "check the network and run the same command again to continue"
        raise DataError(f"{url} cannot be read ({reason}); {remedy}") from error
    size = part.stat().st_size
    if size < remote.size:
        stopped = f"{url} stopped after {size:,} of {remote.size:,} bytes"
        raise DataError(f"{stopped}; run the same command again to continue")


def _request(url: str) -> urllib.request.Request:
    """A request that sends the password to the first server only, in a header."""
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
    """Follow redirects to ``http`` and ``https`` only."""

    def http_error_302(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any
    ) -> Any:
        """Follow one redirect, or raise ``DataError``."""
        scheme = urlsplit(urljoin(req.full_url, headers.get("location") or "")).scheme
        if scheme not in ("http", "https"):
            fp.close()
            found = f"{shown(req.full_url)} redirects to an address of {scheme[:20]!r}"
            raise DataError(f"{found}; only https and http are followed")
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _answer(request: urllib.request.Request) -> http.client.HTTPResponse:
    """The response after its headers; a timeout covers name lookup, TLS and headers."""
    opener = urllib.request.build_opener(_WebOnly)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    is_late = threading.Event()

    def ask() -> None:
        try:
            found: Any = opener.open(request, timeout=TIMEOUT_S)
        except Exception as error:  # raised again in the waiting thread
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
    """Message of a server in one line, without terminal escapes."""
    line = " ".join(str(text).split())[:200]
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def _copy(
    answer: http.client.HTTPResponse,
    file: IO[bytes],
    remote: Remote,
    url: str,
    progress: Progress | None,
) -> None:
    """Write all bytes to the file, up to its expected size."""
    size = file.tell()
    start = since = time.monotonic()
    deadline, counted = start + GRACE_S + (remote.size - size) / LEAST_SPEED, 0
    while chunk := answer.read1(CHUNK_BYTES):
        size += len(chunk)
        counted += len(chunk)
        if size > remote.size:
            file.truncate(0)
            found = f"{url} is longer than the expected {remote.size:,} bytes"
            raise DataError(f"{found}; it is a different file, give another address")
        file.write(chunk)
        if progress is not None:
            progress(size, remote.size)
        now = time.monotonic()
        if now > deadline and size < remote.size:
            raise TimeoutError(f"{size:,} of {remote.size:,} bytes after {now - start:.0f} s")
        if now - since >= WINDOW_S:
            speed = counted / (now - since)
            if speed < LEAST_SPEED:
                raise TimeoutError(f"{speed:,.0f} bytes per second, below {LEAST_SPEED:,}")
            since, counted = now, 0


BASE = "https://github.com/brendenlake/omniglot/raw/master/python"
DOWNLOADS = ".download"  # beside the folder, until it is complete
NOTES = "SOURCE.txt"
MOST_BYTES = 1 << 16  # of a drawing; those of the official archives have a few hundred
MOST_MEMBERS = 100_000
_DRAWING = re.compile(
    r"images_(?:background|evaluation)/([A-Za-z0-9_()\-]{1,80})/(character\d{2})/(\d{4}_\d{2}\.png)"
)
StageProgress = Callable[[str, int, int], None]


class Archive(NamedTuple):
    """One official archive; its drawings become the part ``split``."""

    remote: Remote
    split: str
    num_classes: int
    num_drawings: int


# Sizes and SHA-256 as TensorFlow Datasets lists them for these addresses.
_TRAIN_SHA256 = "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640"
_TEST_SHA256 = "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee"
ARCHIVES = (
    Archive(Remote("images_background.zip", 9_464_212, _TRAIN_SHA256), "train", 964, 19_280),
    Archive(Remote("images_evaluation.zip", 6_462_886, _TEST_SHA256), "test", 659, 13_180),
)


def get_omniglot(
    out: Path,
    *,
    base: str = BASE,
    archives: Sequence[Archive] = ARCHIVES,
    progress: StageProgress = lambda stage, done, total: None,
) -> Path:
    """The folder ``out`` with ``train`` and ``test``, each with one folder per character.

    Characters of the two parts are of different alphabets, as divided by the authors. Downloads are
    kept until the folder is complete, so that a call can be repeated.
    """
    check_base(base)
    if (out / NOTES).exists():
        return out
    if out.exists():
        raise ConfigError(f"{out} exists and is not complete Omniglot; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    downloads = out.with_name(out.name + DOWNLOADS)
    paths = [
        fetch(archive.remote, base, downloads, progress=partial(progress, archive.remote.name))
        for archive in archives
    ]
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        for archive, path in zip(archives, paths, strict=True):
            told = partial(progress, f"unpacking {archive.split}")
            _unpack(archive, path, temporary / archive.split, told)
        write_file(temporary / NOTES, [_notes(archives, base).encode()])
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(downloads)
    return out


def _unpack(archive: Archive, path: Path, folder: Path, progress: Progress) -> None:
    """Write the drawings of an archive below a new folder."""
    written: set[Path] = set()
    folder.mkdir(parents=True)
    for alphabet, character, name, content in _drawings(path):
        place = folder / f"{alphabet}-{character}" / name
        if place in written:
            raise DataError(f"{path} has {place.parent.name}/{name} twice; download it again")
        if len(written) == archive.num_drawings:
            raise DataError(f"{path} has more than the {archive.num_drawings:,} drawings expected")
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
        written.add(place)
        progress(len(written), archive.num_drawings)
    num_classes = len({place.parent for place in written})
    if (num_classes, len(written)) != (archive.num_classes, archive.num_drawings):
        found = f"{len(written):,} drawings of {num_classes:,} characters"
        wanted = f"{archive.num_drawings:,} of {archive.num_classes:,}"
        raise DataError(f"{path} has {found}; expected were {wanted}: download it again")


def _drawings(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Alphabet, character, name and bytes of every drawing; other harmless members are left."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MOST_MEMBERS:
                raise DataError(f"{path} has {len(members):,} members; most are {MOST_MEMBERS:,}")
            for member in members:  # all of them before anything is written
                _check_member(path, member)
            for member in members:
                found = _DRAWING.fullmatch(member.filename)
                if found is None:
                    continue
                with archive.open(member) as file:
                    content = file.read(MOST_BYTES + 1)  # whatever its header says
                if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG\r\n\x1a\n"):
                    raise DataError(f"{path}: {member.filename!r} is not a small PNG image")
                yield found[1], found[2], found[3], content
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise DataError(f"{path} is not a valid ZIP archive ({error})") from error


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an archive with any unsafe member."""
    name = member.filename
    parts = name.replace("\\", "/").split("/")
    reason = None
    if name.startswith(("/", "\\")) or ":" in name or ".." in parts:
        reason = "leads outside the archive"
    elif "\\" in name or not name.isprintable():
        reason = "has characters that a path must not have"
    elif stat.S_ISLNK(member.external_attr >> 16):
        reason = "is a link"
    elif member.flag_bits & 0x1:
        reason = "is encrypted"
    elif member.file_size > MOST_BYTES:
        reason = f"has {member.file_size:,} bytes, above {MOST_BYTES:,}"
    if reason is not None:
        raise DataError(f"{path}: the member {name!r} {reason}; nothing was unpacked")


def _notes(archives: Sequence[Archive], base: str) -> str:
    lines = [
        "Omniglot, by Brenden Lake and others; MIT licence: github.com/brendenlake/omniglot",
        "train: the background set; test: the evaluation set, of other alphabets",
        *(f"{shown(base)}/{part.remote.name}, SHA-256 {part.remote.sha256}" for part in archives),
    ]
    return "\n".join(lines) + "\n"
