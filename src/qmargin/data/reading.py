"""Bytes of indexed samples: from places in large files, or from files of their own."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from qmargin.data.index import MAX_SAMPLE_BYTES, Index
from qmargin.data.recordio import MAX_RECORD, label_before, parse_payload, read_record
from qmargin.data.tar_members import member_at
from qmargin.data.tar_shards import MAX_LABEL_BYTES, says_label
from qmargin.errors import CorruptSample, DataError
from qmargin.files import READING, check_regular, read_regular

MAX_OPEN_FILES = 128


class ByteSource(Protocol):
    """Encoded bytes by row of an index."""

    def read(self, row: int) -> bytes:
        """The bytes of a sample, or ``CorruptSample``."""
        ...

    def check_label(self, row: int) -> None:
        """Raise ``CorruptSample`` unless the data still gives a sample the label of the index."""
        ...


class _Descriptor:
    """An open file that is closed when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, READING)
        check_regular(path, os.fstat(self.number))

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
        if length > MAX_RECORD:
            raise CorruptSample(f"{length} bytes; at most {MAX_RECORD} are read")
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

    def check_label(self, row: int) -> None:
        """Raise ``CorruptSample`` unless the data still gives a sample the label of the index."""
        path, label = self._path(row), int(self._index.columns["label"][row])

        def read_at(offset: int, count: int) -> bytes:
            return self._files.read_at(path, offset, count)

        if self._index.format == "tar":
            names = self._index.class_names
            content = member_at(read_at, int(self._index.columns["key"][row]), MAX_LABEL_BYTES)
            is_same = says_label(content, label, None if names is None else names[label])
        else:
            is_same = self._recorded_label(read_at, row) == label
        if not is_same:
            raise CorruptSample(
                f"{path} no longer gives the label {label} that was indexed; build the index again "
                "with qmargin data index"
            )

    def _recorded_label(self, read_at: Callable[[int, int], bytes], row: int) -> float | None:
        offset = int(self._offsets[row])
        if self._is_split is None or not self._is_split[row]:
            return label_before(read_at, offset)
        return parse_payload(read_record(read_at, offset), f"record at byte {offset}").label

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
            return read_regular(path, MAX_SAMPLE_BYTES)
        except (OSError, DataError) as error:
            raise CorruptSample(f"{getattr(error, 'strerror', None) or error}") from error

    def check_label(self, row: int) -> None:
        """No-op: the label of a file of its own is its folder or a line of the hashed manifest."""
