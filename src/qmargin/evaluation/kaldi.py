r"""Kaldi archives of vectors: binary and text ``.ark``, and ``.scp`` files that point into them.

A binary entry is ``key``, a space, ``\0B``, a type (``FV`` or ``DV`` for a vector of float32 or
float64, ``FM`` or ``DM`` for a matrix), a space, then each size as the byte 4 and a little-endian
int32, then the values. A text entry is ``key [ v v v ]``. Nothing is ever run: an entry of a
``.scp`` that is a command is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.layouts import MAX_LINE_BYTES, numbered_lines, text_of
from qmargin.files import is_file, open_regular

Entry = tuple[str, NDArray[Any], str]
_TYPES = {b"FV": "<f4", b"DV": "<f8", b"FM": "<f4", b"DM": "<f8"}
_MAX_KEY_BYTES = 4096
_OFFSET = re.compile("[0-9]{1,18}")


def read_ark(path: str | Path) -> list[Entry]:
    """Every vector of an archive: name, values, place in the file."""
    with open_regular(path) as file:
        return list(_entries(file, path))


def _entries(file: BinaryIO, path: str | Path) -> Iterator[Entry]:
    while True:
        start = file.tell()
        place = f"byte {start}"
        key = _read_key(file, path, place)
        if key is None:
            return
        yield key, _read_value(file, f"{path}, {place}: {key!r}"), place


def read_scp(path: str | Path) -> list[Entry]:
    """Every vector that a script file points to: lines of ``key archive:offset``."""
    return [_pointed(path, number, line) for number, line in numbered_lines(path)]


def _pointed(path: str | Path, number: int, line: bytes) -> Entry:
    place = f"line {number}"
    text = text_of(line, f"{path}, {place}")
    if "|" in text:
        raise DataError(
            f"{path}, {place}: an entry that runs a command is refused: write its output to an "
            "archive first"
        )
    key, _, target = text.partition(" ")
    archive, _, offset = target.strip().rpartition(":")
    if not archive or not _OFFSET.fullmatch(offset):
        raise DataError(f"{path}, {place}: {text[:80]!r} is not `key archive:offset`")
    file_path = Path(archive)
    if not is_file(file_path):  # Kaldi means the working folder; files that moved keep together
        file_path = Path(path).parent / archive
    if not is_file(file_path):
        raise DataError(
            f"{path}, {place}: the archive {archive[:80]!r} does not exist, or is no file"
        )
    with open_regular(file_path) as file:
        size = file.seek(0, 2)
        if int(offset) >= size:
            raise DataError(
                f"{path}, {place}: the offset is {offset}, and {archive!r} has {size:,} bytes"
            )
        file.seek(int(offset))
        return key, _read_value(file, f"{path}, {place}: {key!r} in {archive}:{offset}"), place


def _read_key(file: BinaryIO, path: str | Path, place: str) -> str | None:
    """The name before the next value; None at the end of the file."""
    key = bytearray()
    while (byte := file.read(1)) not in (b"", b" ", b"\t"):
        if byte == b"\n" and not key:
            continue
        if byte == b"\n" or len(key) > _MAX_KEY_BYTES:
            raise DataError(
                f"{path}, {place}: no value follows {bytes(key[:60])!r}: is this an ark?"
            )
        key += byte
    if not key and not byte:
        return None
    if not key or not byte:
        raise DataError(f"{path}, {place}: the archive is cut short in a name")
    return text_of(bytes(key), f"{path}, {place}")


def _read_value(file: BinaryIO, where: str) -> NDArray[Any]:
    """A vector, or the only row of a matrix, binary or text."""
    begin = file.read(2)
    if begin == b"\0B":
        return _one_row(_read_binary(file, where), where)
    file.seek(-len(begin), 1)
    return _one_row(_read_text(file, where), where)


def _one_row(value: NDArray[Any], where: str) -> NDArray[Any]:
    if value.ndim == 2 and len(value) != 1:
        raise DataError(f"{where} is a matrix of {len(value)} rows, but an embedding is one vector")
    return value.reshape(-1)


def _read_binary(file: BinaryIO, where: str) -> NDArray[Any]:
    kind = file.read(3).rstrip(b" ")
    if kind not in _TYPES:
        raise DataError(
            f"{where} has the type {kind!r}, not one of FV, DV, FM, DM: "
            "copy the archive without compression"
        )
    shape = tuple(_read_size(file, where) for _ in range(2 if kind.endswith(b"M") else 1))
    dtype = np.dtype(_TYPES[kind])
    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    here = file.tell()
    available = file.seek(0, 2) - here
    file.seek(here)
    if num_bytes > available:  # before memory is taken for it
        raise DataError(
            f"{where} should hold {num_bytes:,} bytes, but {available:,} follow: "
            "the archive is cut short"
        )
    return np.frombuffer(file.read(num_bytes), dtype=dtype).reshape(shape)


def _read_size(file: BinaryIO, where: str) -> int:
    content = file.read(5)
    if len(content) != 5 or content[0] != 4:
        raise DataError(f"{where} has no size where one belongs: the archive is damaged")
    (size,) = struct.unpack("<i", content[1:])
    if size < 0:
        raise DataError(f"{where} has the size {size}: the archive is damaged")
    return int(size)


def _read_text(file: BinaryIO, where: str) -> NDArray[Any]:
    rows: list[list[float]] = []
    is_open = False
    while line := file.readline(MAX_LINE_BYTES):
        cells = line.split()
        if not is_open:
            if cells[:1] != [b"["]:
                raise DataError(f"{where} does not begin with `[`: is this a Kaldi archive?")
            cells, is_open = cells[1:], True
        is_last = cells[-1:] == [b"]"]
        try:
            values = [float(cell) for cell in (cells[:-1] if is_last else cells)]
        except ValueError as error:
            raise DataError(f"{where} has a value that is not a number ({error})") from None
        if values:
            rows.append(values)
        if is_last:
            return _text_matrix(rows, where)
    raise DataError(f"{where} has no closing `]`: the archive is cut short")


def _text_matrix(rows: list[list[float]], where: str) -> NDArray[Any]:
    if len({len(row) for row in rows}) > 1:
        raise DataError(f"{where} has rows of different widths: the archive is damaged")
    return np.array(rows, dtype=np.float32) if rows else np.zeros(0, dtype=np.float32)
