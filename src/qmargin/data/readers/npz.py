"""Arrays of NPZ files: sizes are checked against the file before memory is allocated."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.files import open_regular

_ALWAYS: Final = 1 << 28  # bytes that any file may unpack to
_MOST_TIMES: Final = 64  # a file may unpack to this many times its size; scores shrink to a half
_FACTORS: Final = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # that packing can shrink by
_CHUNK_BYTES: Final = 1 << 20
_ROWS_AT_ONCE: Final = 1 << 17  # of an array that is read piece by piece
_SUFFIX: Final = ".npy"
_HEADERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzFile:
    """Arrays of an NPZ file by name, read whole or a few rows at a time; no pickled objects."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self._is_fortran: dict[str, bool] = {}
        members = archive.infolist()
        _check_members(members, size)
        for member in members:
            name = member.filename.removesuffix(_SUFFIX)
            with archive.open(member) as file:
                shape, is_fortran, dtype = _header(file, name)
                found = member.file_size - file.tell()
            if dtype.hasobject:
                raise DataError(f"the array {name[:60]!r} holds pickled objects, which may be code")
            count = int(np.prod(shape, dtype=object))
            said = count * dtype.itemsize
            if said != found or (dtype.itemsize == 0 and count):
                raise DataError(f"the array {name[:60]!r} says {said:,} bytes and has {found:,}")
            self.shapes[name], self.dtypes[name] = shape, dtype
            self._is_fortran[name] = is_fortran

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """The rows of an array of one dimension, in order, some at a time."""
        (length,), dtype = self.shapes[name], self.dtypes[name]
        with self._archive.open(name + _SUFFIX) as file:
            _header(file, name)
            for start in range(0, length, _ROWS_AT_ONCE):
                needed = min(_ROWS_AT_ONCE, length - start) * dtype.itemsize
                content = file.read(needed)
                if len(content) != needed:
                    raise DataError(f"the array {name[:60]!r} is cut off")
                yield np.frombuffer(content, dtype)
            file.read(1)  # at the end zipfile compares the checksum

    def array(self, name: str) -> NDArray[Any]:
        """A whole array."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        values: NDArray[Any] = np.empty(int(np.prod(shape)), dtype=dtype)
        content, at = values.view(np.uint8) if values.nbytes else np.empty(0, np.uint8), 0
        with self._archive.open(name + _SUFFIX) as file:
            _header(file, name)
            while chunk := file.read(_CHUNK_BYTES):
                content[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                at += len(chunk)
        if at != values.nbytes:
            raise DataError(f"the array {name[:60]!r} is cut off")
        return values.reshape(shape, order="F" if self._is_fortran[name] else "C")


@contextmanager
def open_npz(path: str | Path) -> Iterator[NpzFile]:
    """Open an NPZ file; any problem is a ``DataError`` that names it."""
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield NpzFile(archive, os.fstat(file.fileno()).st_size)
        except Exception as error:  # damage shows as errors of zlib, struct, zipfile and others
            if isinstance(error, DataError) and str(path) in str(error):
                raise  # raised by the reader, about the content of arrays
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{path} is not an NPZ file of plain arrays ({reason})") from error


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """Every array of an NPZ file; see ``open_npz``."""
    with open_npz(path) as npz:
        return {name: npz.array(name) for name in npz.shapes}


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse other files, overlapping members and decompression bombs."""
    names: set[str] = set()
    for member in members:
        name, packed, unpacked = member.filename, member.compress_size, member.file_size
        if not name.endswith(_SUFFIX):
            raise DataError(f"the member {name[:60]!r} is not an array; give a file of arrays")
        if name in names:
            raise DataError(f"it has two arrays {name[:60]!r}; write it again")
        names.add(name)
        if unpacked > _FACTORS.get(member.compress_type, 0) * packed:
            raise DataError(f"the array {name[:60]!r} packs {unpacked:,} bytes into {packed:,}")
    if sum(member.compress_size for member in members) > size:
        raise DataError(f"its arrays are packed into more than the {size:,} bytes of the file")
    total, limit = sum(member.file_size for member in members), max(_ALWAYS, _MOST_TIMES * size)
    if total > limit:
        raise DataError(f"its {size:,} bytes would unpack to {total:,}; at most {limit:,} are read")


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise DataError(f"the array {name[:60]!r} has a header of version {version}")
    return _HEADERS[version](file)
