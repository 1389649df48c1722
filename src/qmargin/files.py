"""Atomic files: written under a temporary name, hashed, synced, then renamed.

``Guard`` decides which files a command may overwrite.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO, NamedTuple, TextIO

from qmargin.errors import ConfigError, DataError

Progress = Callable[[int, int], None]  # called with the amount done, and the total
CHUNK_BYTES = 1 << 24
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets evaluate cells that begin with these
MADE_BY = "Made by qmargin"  # a mark near the start or the end of files without a format entry
READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How files are opened: without waiting for the other end of a pipe."""

_EDGE_BYTES = 4096  # where marks are searched
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileEntry(NamedTuple):
    """Size and hash of a file in a manifest."""

    size: int
    sha256: str


def _open_checked(path: str | Path) -> tuple[int, os.stat_result]:
    """Descriptor and status of a regular file."""
    try:
        descriptor = os.open(path, READING)
    except ValueError as error:  # a zero byte, or an impossible character
        raise DataError(f"{str(path)[:80]!r} is not a file name ({error})") from error
    try:
        status = os.fstat(descriptor)
        check_regular(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading; ``DataError`` at once for a pipe, a device or a folder."""
    return os.fdopen(_open_checked(path)[0], "rb")


def open_text(path: str | Path, *, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """Open a text file for reading, as ``open_regular`` does."""
    return io.TextIOWrapper(open_regular(path), encoding=encoding, newline=newline)


def read_regular(path: str | Path, most: int) -> bytes:
    """All bytes of a regular file, without a buffer; ``DataError`` if more than ``most``."""
    descriptor, status = _open_checked(path)
    try:
        if status.st_size > most:
            raise DataError(f"{path} has {status.st_size:,} bytes; at most {most:,} are read")
        return os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file; False also for impossible names."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # longer than any name, or with a zero byte
        return False


def check_regular(path: str | Path, status: os.stat_result | None = None) -> None:
    """Raise ``DataError`` unless there is a regular file, for readers that take a path."""
    mode = (Path(path).stat() if status is None else status).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise DataError(f"{path} is {kind}; give a regular file")


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file from chunks, sync it to the disk, and return its size and hash."""
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
    """Temporary name to write to; it becomes ``path`` at the end, or is removed after an error.

    An error of the file system names ``path`` instead of the temporary name. With ``sync`` the new
    name survives a crash.
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
    """Write or replace a file atomically, even with respect to crashes."""
    with replacing(Path(path)) as temporary:
        write_file(temporary, [content])


def describe_file(path: str | Path) -> FileEntry:
    """Size and hash of a file on the disk."""
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
    """Sync the names in ``folder`` to the disk, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def escape_formula(text: str) -> str:
    """A cell that a spreadsheet reads as text: formulas get a leading quote."""
    return f"'{text}" if text.lstrip("'").startswith(FORMULA) else text


def unescape_formula(text: str) -> str:
    """The text behind a cell of ``escape_formula``."""
    is_escaped = text.startswith("'") and text.lstrip("'").startswith(FORMULA)
    return text[1:] if is_escaped else text


def without_folders(text: str) -> str:
    """Shorten a text, or the value of a setting, to the file name if it is an absolute path.

    Names of folders often identify people, customers and machines.
    """
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute():
            return path.name or path.anchor
    key, equals, value = text.partition("=")
    return f"{key}={without_folders(value)}" if equals else text


class Guard:
    """Refuse to overwrite inputs, and files that this program did not write.

    An input is never overwritten, by any name or link. Any other file is overwritten if it has the
    mark of its kind, or with ``overwrite``. ``own`` has the SHA-256 of files without a mark that an
    earlier run of the command wrote.
    """

    def __init__(
        self, inputs: Iterable[Path] = (), *, overwrite: bool = False, own: Iterable[str] = ()
    ) -> None:
        self.overwrite = overwrite
        self._own = frozenset(own)
        self._inputs: set[tuple[int, int]] = set()
        for path in inputs:
            with suppress(OSError):
                found = path.stat()
                self._inputs.add((found.st_dev, found.st_ino))
        self._outputs: set[Path] = set()

    def check(self, path: Path, mark: str) -> None:
        """Refuse a file that may not be written; call it before any work is done.

        ``mark`` is a text that this program leaves near the start or the end of such files.
        """
        place = path.parent.resolve() / path.name
        if place in self._outputs:
            raise ConfigError(f"{path} is used for two outputs; give each a different file")
        self._outputs.add(place)
        with suppress(OSError):
            found = path.stat()
            if (found.st_dev, found.st_ino) in self._inputs:
                raise ConfigError(f"{path} is an input of this command; write to another file")
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is not a regular file; write to another place")
        if self._is_taken(path):
            with path.open("rb") as file:
                edges = [file.read(_EDGE_BYTES)]
                file.seek(max(0, file.seek(0, os.SEEK_END) - _EDGE_BYTES))
                edges.append(file.read())
            if not any(mark.encode() in edge for edge in edges):
                raise _foreign(path)

    def check_content(self, path: Path, sha256: str) -> None:
        """Refuse to replace a file without marks, unless it is known or has this new content."""
        if self._is_taken(path) and sha256_of(path) not in {sha256, *self._own}:
            raise _foreign(path)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file without marks, unless a different file has its name."""
        self.check_content(path, hashlib.sha256(content).hexdigest())
        write_atomically(path, content)

    def write_all(self, files: Mapping[Path, bytes]) -> list[Path]:
        """Write documents after checking all of them; return their paths.

        Markdown and LaTeX get the mark as a comment. CSV tables are recognised by their first line,
        JSON by its format, other files by ``MADE_BY``.
        """
        for path, content in files.items():
            mark = '"format": "qmargin-' if path.suffix == ".json" else MADE_BY
            if path.suffix == ".csv":
                mark = content.partition(b"\n")[0].decode().strip()
            self.check(path, mark)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            before = f"% {MADE_BY}\n".encode() if path.suffix == ".tex" else b""
            after = f"\n<!-- {MADE_BY} -->\n".encode() if path.suffix == ".md" else b""
            write_atomically(path, before + content + after)
        return list(files)

    def _is_taken(self, path: Path) -> bool:
        """Whether a file or link exists that this program may not have written."""
        if self.overwrite or not os.path.lexists(path):
            return False
        if not path.exists():
            raise _foreign(path)
        return path.stat().st_size > 0  # as of mktemp


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} exists and this command did not write it; write to another place, or pass "
        "--overwrite to replace it"
    )
