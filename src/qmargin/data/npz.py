"""Arrays of NPZ files: every size is checked against the file before memory is taken for it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.files import open_regular

_ALWAYS: Final = 1 << 28  # bytes that any file may unpack to
_MOST_TIMES: Final = 64  # a file may unpack to so many times its size; scores shrink to a half
_DEFLATE: Final = 1032  # times that deflate can shrink anything
_CHUNK_BYTES: Final = 1 << 20
_HEADERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """Every array of an NPZ file; pickled objects are refused.

    Raises:
        DataError: It is no such file, is damaged, or would unpack to far more than its size.
    """
    with open_regular(path) as file:
        try:
            return _arrays(file)
        except Exception as error:  # damage shows as errors of zlib, struct, zipfile and others
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{path} is not an NPZ file of plain arrays ({reason})") from error


def _arrays(file: IO[bytes]) -> dict[str, NDArray[Any]]:
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        _check_members(members, size)
        return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse what no writer of arrays makes: other files, members that overlap, bombs."""
    names: set[str] = set()
    for member in members:
        name = member.filename
        if not name.endswith(".npy"):
            raise DataError(f"the member {name[:60]!r} is no array; give the file of arrays itself")
        if name in names:
            raise DataError(f"it has two arrays {name[:60]!r}; write it again")
        names.add(name)
        most = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _DEFLATE}.get(member.compress_type, 0)
        if member.file_size > most * member.compress_size:
            raise DataError(
                f"the array {name[:60]!r} cannot have {member.file_size:,} bytes, packed into "
                f"{member.compress_size:,}"
            )
    if sum(member.compress_size for member in members) > size:
        raise DataError(f"its arrays are packed into more than the {size:,} bytes of the file")
    total, limit = sum(member.file_size for member in members), max(_ALWAYS, _MOST_TIMES * size)
    if total > limit:
        raise DataError(f"its {size:,} bytes would unpack to {total:,}; at most {limit:,} are read")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    name = member.filename
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in _HEADERS:
            raise DataError(f"the array {name[:60]!r} has a header of version {version}")
        shape, is_fortran, dtype = _HEADERS[version](file)
        count = int(np.prod(shape, dtype=object))
        if dtype.hasobject:
            raise DataError(f"the array {name[:60]!r} holds pickled objects, which may be code")
        expected, found = count * dtype.itemsize, member.file_size - file.tell()
        if expected != found or (dtype.itemsize == 0 and count):
            raise DataError(
                f"the array {name[:60]!r} says {expected:,} bytes and has {found:,} of them"
            )
        values: NDArray[Any] = np.empty(count, dtype=dtype)
        content, at = values.view(np.uint8) if expected else np.empty(0, np.uint8), 0
        while chunk := file.read(_CHUNK_BYTES):
            content[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
            at += len(chunk)
        if at != expected:
            raise DataError(f"the array {name[:60]!r} is cut off")
    return values.reshape(shape, order="F" if is_fortran else "C")
