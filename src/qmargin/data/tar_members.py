"""Members of a tar file by name and place: read as a stream, never extracted, nothing believed.

Plain, GNU and pax archives of regular files are understood. Names, sizes and counts have limits,
and links, devices and sparse files are refused, so that a hostile archive is an error and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qmargin.errors import CorruptSample, DataError

MAX_NAME = 4096
MAX_MEMBERS = 50_000_000
_BLOCK = 512
_MAX_EXTENSION = 1 << 16
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME, _PAX, _PAX_GLOBAL, _FOLDER, _LONG_LINK = b"L", b"x", b"g", b"5", b"K"


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    offset: int
    size: int


def tar_members(file: BinaryIO, *, name: str, max_size: int) -> Iterator[Member]:
    """Every regular file of an archive, in order.

    Args:
        file: Open for reading; its position may be moved between two members.
        name: Of the archive, for errors.
        max_size: Of a member.

    Raises:
        DataError: The archive is damaged, compressed, or holds what it should not.
    """
    size = file.seek(0, 2)
    position, next_name = 0, None
    for _ in range(MAX_MEMBERS):
        file.seek(position)
        header = file.read(_BLOCK)
        where = f"{name}, member at byte {position}"
        if not header.strip(b"\0"):
            return  # blocks of zeros end an archive; some writers leave them out
        _check_header(header, where)
        kind, length = header[156:157], _number(header[124:136], where)
        position += _BLOCK
        if position + length > size:
            raise DataError(f"{where}: the archive ends inside it; copy the file again")
        if kind in (_LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK):
            found = _extended_name(_extension(file, length, where), kind, where)
            next_name = next_name if found is None else found
        elif kind in _REGULAR:
            if length > max_size:
                raise DataError(f"{where}: {length} bytes; at most {max_size} are read")
            yield Member(_checked(next_name or _short_name(header), where), position, length)
            next_name = None
        elif kind == _FOLDER:
            next_name = None
        else:
            raise DataError(f"{where}: a link, device or sparse file ({kind!r}); store plain files")
        position += -(-length // _BLOCK) * _BLOCK
    raise DataError(f"{name} has more than {MAX_MEMBERS} members; split it")


def member_at(read_at: Callable[[int, int], bytes], offset: int, max_size: int) -> bytes:
    """Bytes of the member whose data begins at an offset.

    Args:
        read_at: Bytes of the archive from an offset on, at most so many.
        offset: Of the member's data.
        max_size: Of the member.

    Raises:
        CorruptSample: There is no such member any more.
    """
    where = f"member at byte {offset}"
    try:
        header = read_at(max(0, offset - _BLOCK), _BLOCK)
        _check_header(header, where)
        size = _number(header[124:136], where)
    except DataError as error:
        raise CorruptSample(str(error)) from error
    if size > max_size:
        raise CorruptSample(f"{where}: {size} bytes; at most {max_size} are read")
    return read_at(offset, size)


def _check_header(header: bytes, where: str) -> None:
    if header[:2] == b"\x1f\x8b" or header[:3] in (b"BZh", b"(\xb5/"):
        raise DataError(f"{where}: the archive is compressed; decompress it, samples are at random")
    if len(header) < _BLOCK:
        raise DataError(f"{where}: the archive ends inside its header; copy the file again")
    stored = header[148:156].strip(b" \0")
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    if not stored.isdigit() or any(digit > 55 for digit in stored) or int(stored, 8) != total:
        raise DataError(f"{where}: its header has a wrong checksum; the archive is damaged")


def _number(field: bytes, where: str) -> int:
    """A size: octal digits, or, as GNU writes large ones, binary after a set high bit."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0") or b"0"
    if not text.isdigit() or any(digit > 55 for digit in text):
        raise DataError(f"{where}: its size {field!r} is not a number; the archive is damaged")
    return int(text, 8)


def _extension(file: BinaryIO, length: int, where: str) -> bytes:
    if length > _MAX_EXTENSION:
        raise DataError(f"{where}: {length} bytes of attributes; at most {_MAX_EXTENSION} are read")
    return file.read(length)


def _extended_name(data: bytes, kind: bytes, where: str) -> str | None:
    """The name that an extension gives to the next member, if it gives one."""
    if kind == _LONG_NAME:
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    if kind != _PAX:
        return None
    name = None
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(data):
            raise DataError(f"{where}: its pax attributes are damaged")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size" or key.startswith(b"GNU.sparse"):
            raise DataError(f"{where}: it is larger than 8 GB or sparse; store plain files")
        data = data[int(length) :]
    return name


def _short_name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _checked(name: str, where: str) -> str:
    if not 0 < len(name) <= MAX_NAME or "\0" in name:
        raise DataError(f"{where}: its name has {len(name)} characters; 1 to {MAX_NAME} are read")
    return name


def archive_files(path: Path) -> list[Path]:
    """The archive itself, or the archives of a folder in the order of their names."""
    return [path] if path.is_file() else sorted(path.glob("*.tar"))
