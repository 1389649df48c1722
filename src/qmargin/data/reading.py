"""Bytes of indexed samples: from places in large files, or from files of their own."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from qmargin.data.index import MAX_SAMPLE_BYTES, Index
from qmargin.data.recordio import parse_payload, read_record
from qmargin.errors import CorruptSample, DataError

MAX_OPEN_FILES = 128


class ByteSource(Protocol):
    """Encoded bytes by row of an index."""

    def read(self, row: int) -> bytes:
        """The bytes of a sample, or ``CorruptSample``."""
        ...


class _Descriptor:
    """An open file that is closed when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self) -> None:
        if hasattr(self, "number"):  # not when opening failed
            os.close(self.number)


class OpenFiles:
    """Keeps the last files open and reads at any place of them, from any process or thread.

    Reads do not move a position, so that workers that were forked share the files without locks. A
    file that is put aside is closed when the last reader lets go of it.
    """

    def __init__(self, max_open: int = MAX_OPEN_FILES) -> None:
        self._max_open = max_open
        self._files: OrderedDict[Path, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._max_open,)

    def read_at(self, path: Path, offset: int, count: int) -> bytes:
        """Bytes of a file from an offset on; fewer than asked for at its end.

        Raises:
            CorruptSample: The file cannot be read there.
        """
        try:
            file = self._files.get(path) or self._opened(path)
            if hasattr(os, "pread"):
                return os.pread(file.number, count, offset)
            with self._lock:  # Windows
                os.lseek(file.number, offset, os.SEEK_SET)
                return os.read(file.number, count)
        except (OSError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptSample(f"{path} cannot be read at byte {offset}: {reason}") from error

    def _opened(self, path: Path) -> _Descriptor:
        with self._lock:
            file = self._files[path] = _Descriptor(path)
            if len(self._files) > self._max_open:
                self._files.popitem(last=False)
        return file


class RangeSource:
    """Samples that are ranges of bytes of RecordIO files or tar archives.

    Args:
        index: With offsets and lengths.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._files = OpenFiles()
        columns = index.columns
        self._offsets, self._lengths = columns["offset"], columns["length"]
        self._numbers, self._is_split = columns.get("file"), columns.get("is_split")
        self._paths = index.paths

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeSource, (self._index,)

    def read(self, row: int) -> bytes:
        """The bytes of a sample, or ``CorruptSample``."""
        path = self._path(row)
        offset, length = int(self._offsets[row]), int(self._lengths[row])
        if self._is_split is not None and self._is_split[row]:
            return self._read_split(path, offset)
        data = self._files.read_at(path, offset, length)
        if len(data) != length:
            raise CorruptSample(f"{path} ends inside the sample at byte {offset}; copy it again")
        return data

    def _read_split(self, path: Path, offset: int) -> bytes:
        payload = read_record(lambda at, count: self._files.read_at(path, at, count), offset)
        try:
            start = parse_payload(payload, f"record at byte {offset}").image_start
        except DataError as error:
            raise CorruptSample(str(error)) from error
        return bytes(payload[start:])

    def _path(self, row: int) -> Path:
        if self._paths is None or self._numbers is None:
            return self._index.root
        return self._index.root / self._paths[int(self._numbers[row])]


class FileSource:
    """Samples that are files of their own, by their names in the index.

    Args:
        index: With names.
        folder: What the names are relative to.
    """

    def __init__(self, index: Index, folder: Path) -> None:
        names = index.names
        assert names is not None  # the formats that come here write names
        self._index, self._folder, self._names = index, folder, names

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSource, (self._index, self._folder)

    def read(self, row: int) -> bytes:
        """The bytes of a sample, or ``CorruptSample``."""
        path = self._folder / self._names[row]
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_SAMPLE_BYTES:
                    raise CorruptSample(f"{size} bytes; at most {MAX_SAMPLE_BYTES} are read")
                return file.read(size)
        except (OSError, ValueError) as error:
            if isinstance(error, CorruptSample):
                raise
            raise CorruptSample(f"{getattr(error, 'strerror', None) or error}") from error
