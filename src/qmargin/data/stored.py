"""Stored samples by number: encoded bytes, pictures or waveforms, labels and names."""

from __future__ import annotations

import operator
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from qmargin.data.audio import Samples, decode_audio
from qmargin.data.images import Channels, Decoder, Pixels, check_decoding, decode_image
from qmargin.data.index import SampleIndex
from qmargin.data.reader import KINDS, get_reader
from qmargin.errors import CorruptSample, DataError
from qmargin.files import READING, check_regular, read_regular

MAX_OPEN_FILES = 128
MAX_RANGE = 1 << 28  # bytes of an image inside a larger file; larger sizes count as damage


def check_several(num_classes: int, path: str | Path) -> None:
    """Refuse data with a single identity."""
    if num_classes < 2:
        found = f"{path} has {num_classes} identity"
        raise DataError(f"{found}; give at least 2, each in its own folder")


class _Descriptor:
    """An open file that is closed when it is no longer used."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, READING)
        check_regular(path, os.fstat(self.number))

    def __del__(self) -> None:
        if hasattr(self, "number"):  # not when opening failed
            os.close(self.number)


class OpenFiles:
    """Keep recent files open and read at any position, from any process or thread.

    Reads do not move a file position, so forked workers share the files without locks. A replaced
    file is closed when its last reader has finished.
    """

    def __init__(self, max_open: int = MAX_OPEN_FILES) -> None:
        self._max_open = max_open
        self._files: OrderedDict[Path, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def read_at(self, path: Path, offset: int, count: int) -> bytes:
        """Bytes of a file from an offset on, or ``CorruptSample``; fewer at its end."""
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

    def read_range(self, path: Path, offset: int, length: int, most: int) -> bytes:
        """Bytes of a range; ``CorruptSample`` if they are incomplete."""
        if length > most:
            raise CorruptSample(f"{length} bytes; at most {most} are read")
        data = self.read_at(path, offset, length)
        if len(data) != length:
            raise CorruptSample(f"{path} ends inside the sample at byte {offset}; copy it again")
        return data

    def _opened(self, path: Path) -> _Descriptor:
        with self._lock:
            file = self._files[path] = _Descriptor(path)
            if len(self._files) > self._max_open:
                self._files.popitem(last=False)
        return file


class StoredSamples:
    """Encoded samples of an index, or of some of its rows, with labels and names.

    With ``verify``, bytes and labels are compared with the index when a sample is read.
    """

    _options: ClassVar[tuple[str, ...]] = ("verify", "rows")

    def __init__(
        self, index: SampleIndex, *, verify: bool = False, rows: NDArray[np.int64] | None = None
    ) -> None:
        self.index, self.verify, self.rows = index, verify, rows
        self._reader = get_reader(index.format)
        columns = index.columns
        for name in ("checksum", "length") if verify or index.path is not None else ():
            if name not in columns:
                where = index.path or index.root
                raise DataError(f"{where} has no {name}; build it again with qmargin data index")
        self._files = OpenFiles()
        self._kind = KINDS[index.kind]
        self._most = max(MAX_RANGE, self._kind.max_bytes)
        self._offsets, self._lengths = columns.get("offset"), columns.get("length")
        self._by_reader, self._keys = columns.get("by_reader"), columns.get("key")
        self._names, self._paths = index.texts("name"), index.texts("path")
        self._folder = index.folder
        self._labels = columns["label"] if rows is None else columns["label"][rows]
        self._length = len(self._labels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers open the files themselves."""
        options = {name: getattr(self, name) for name in self._options}
        return partial(type(self), **options), (self.index,)

    def __len__(self) -> int:
        return self._length

    @property
    def num_classes(self) -> int:
        """Number of identities: labels are below it."""
        return self.index.num_classes

    @property
    def labels(self) -> NDArray[np.int32]:
        """Identity of each sample, ``[n]``; mapped from the index, so not to be written to."""
        return self._labels

    def class_name(self, label: int) -> str:
        """Name of an identity; its number where the data has no names."""
        return self.index.class_name(label)

    @property
    def has_names(self) -> bool:
        """Whether identities have names, not only numbers."""
        return self.index.texts("class") is not None

    def read(self, index: int) -> bytes:
        """Encoded bytes of a sample; ``CorruptSample`` if unreadable or, with verify, changed."""
        data = self.stored(index)
        if self.verify:
            self.check(index, data)
        return data

    def stored(self, index: int) -> bytes:
        """Encoded bytes of a sample, without verification."""
        row = self._row(index)
        if self._by_reader is not None and self._by_reader[row]:
            return self._reader.read(self.index, row, self._files.read_at)
        if self._offsets is not None and self._lengths is not None:
            offset, length = int(self._offsets[row]), int(self._lengths[row])
            path = self.index.root if self._paths is None else self.index.sample_path(row)
            return self._files.read_range(path, offset, length, self._most)
        path = self._path(row)
        try:
            return read_regular(path, self._kind.max_bytes)
        except (OSError, DataError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptSample(f"{path} cannot be read: {reason}") from error

    def check(self, index: int, data: bytes) -> None:
        """Raise ``CorruptSample`` unless bytes and label are those that were indexed."""
        row, columns = self._row(index), self.index.columns
        length, checksum = int(columns["length"][row]), int(columns["checksum"][row])
        if len(data) != length or zlib.crc32(data) != checksum:
            found = f"{len(data)} bytes with checksum {zlib.crc32(data):08x}"
            raise CorruptSample(
                f"{found} have changed from {length} with {checksum:08x}; restore the data, or "
                "build the index again"
            )
        if not self._reader.has_label(self.index, row, self._files.read_at):
            found = f"{self._path(row)} no longer gives the label {int(columns['label'][row])}"
            raise CorruptSample(f"{found}; build the index again with qmargin data index")

    def path(self, index: int) -> Path:
        """File that holds a sample: its own, or that of many."""
        return self._path(self._row(index))

    def _path(self, row: int) -> Path:
        if self._paths is None and self._offsets is None and self._names is not None:
            return self._folder / self._names[row]  # as sample_path, in less time
        return self.index.sample_path(row)

    def _row(self, index: int) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise IndexError(f"sample {place} of {self._length}")
        place %= self._length
        return place if self.rows is None else int(self.rows[place])

    def sample_id(self, index: int) -> str:
        """Name of a sample, or the key of its record."""
        row = self._row(index)
        if self._names is not None:
            return self._names[row]
        return f"record {row if self._keys is None else self._keys[row]}"

    def source(self, index: int) -> str:
        """Where a sample's label is written."""
        row = self._row(index)
        if self._names is not None and self._keys is not None:
            return f"{self.index.root}, line {int(self._keys[row])}"
        holder = self.index.root if self._paths is None else self._path(row)
        return f"{holder}, {self.sample_id(index)}"


@final
class ImageDataset(StoredSamples):
    """Images with labels; ``open_dataset`` makes one."""

    _options = ("verify", "rows", "decoder", "channels")

    def __init__(
        self,
        index: SampleIndex,
        *,
        verify: bool = False,
        rows: NDArray[np.int64] | None = None,
        decoder: Decoder = "pillow",
        channels: Channels = "rgb",
    ) -> None:
        check_decoding(decoder, channels)
        super().__init__(index, verify=verify, rows=rows)
        self.decoder, self.channels = decoder, channels

    def decode(self, index: int, *, mirror: bool = False, writable: bool = True) -> Pixels:
        """Picture of a sample, ``[H, W, 3]`` RGB; see ``decode_image``."""
        return decode_image(
            self.read(index),
            decoder=self.decoder,
            channels=self.channels,
            mirror=mirror,
            writable=writable,
        )

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        return self.decode(index), int(self._labels[index])


@final
class AudioDataset(StoredSamples):
    """Recordings with speakers; ``open_dataset`` makes one."""

    _options = ("verify", "rows", "sample_rate")

    def __init__(
        self,
        index: SampleIndex,
        *,
        verify: bool = False,
        rows: NDArray[np.int64] | None = None,
        sample_rate: int = 16000,
    ) -> None:
        super().__init__(index, verify=verify, rows=rows)
        self.sample_rate = sample_rate

    def __getitem__(self, index: int) -> tuple[Samples, int]:
        """Mono samples in [-1, 1] at ``sample_rate`` and the label."""
        samples = decode_audio(self.encoded(index), sample_rate=self.sample_rate)
        return samples, int(self._labels[index])

    def encoded(self, index: int) -> Path | bytes:
        """Path of a sample's own file, or its bytes if they are verified or inside another file."""
        is_plain = self._offsets is None and self._by_reader is None and not self.verify
        return self.path(index) if is_plain else self.read(index)

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> AudioDataset:
        """Some of the recordings, with the same speakers under the same labels."""
        rows = np.array([self._row(index) for index in indices], dtype=np.int64)
        return AudioDataset(self.index, verify=self.verify, rows=rows, sample_rate=self.sample_rate)


def open_stored(index: SampleIndex, *, verify: bool = False) -> ImageDataset | AudioDataset:
    """The dataset of an index, by its kind."""
    if index.kind == "recordings":
        return AudioDataset(index, verify=verify)
    return ImageDataset(index, verify=verify)
