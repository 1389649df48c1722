"""Images by number, whatever they are stored in: encoded bytes, pictures, labels."""

from __future__ import annotations

import operator
import zlib
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from qmargin.data.images import Channels, Decoder, Pixels, check_decoding, decode_image
from qmargin.data.index import Index
from qmargin.data.reading import ByteSource, FileSource, RangeSource
from qmargin.errors import CorruptSample, DataError


@final
class ImageDataset:
    """Images with labels; ``open_dataset`` makes one.

    Args:
        index: Where the samples are.
        verify: Compare every sample with its checksum, and its label with that of the data, when
            it is read.
        decoder: ``"pillow"``, or ``"simplejpeg"``, which gives the same bits faster.
        channels: Order of the stored channels; pictures are RGB either way.
    """

    def __init__(
        self,
        index: Index,
        *,
        verify: bool = False,
        decoder: Decoder = "pillow",
        channels: Channels = "rgb",
    ) -> None:
        check_decoding(decoder, channels)
        self.index, self.verify, self.decoder, self.channels = index, verify, decoder, channels
        self._source = _byte_source(index)
        self._length = len(index)
        self._labels = index.columns["label"]
        self._names, self._keys = index.names, index.columns.get("key")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.index, self.verify, self.decoder, self.channels)

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
        names = self.index.class_names
        return str(label) if names is None else names[label]

    def read(self, index: int) -> bytes:
        """Encoded bytes of a sample.

        Raises:
            CorruptSample: They cannot be read, or, with ``verify``, have changed.
        """
        row = self._row(index)
        data = self._source.read(row)
        if self.verify:
            self.check(row, data)
        return data

    def check(self, index: int, data: bytes) -> None:
        """Raise ``CorruptSample`` unless bytes and label are those that were indexed."""
        columns = self.index.columns
        length, checksum = int(columns["length"][index]), int(columns["checksum"][index])
        if len(data) != length or zlib.crc32(data) != checksum:
            raise CorruptSample(
                f"{len(data)} bytes with checksum {zlib.crc32(data):08x}; {length} with "
                f"{checksum:08x} were indexed: the data has changed or is damaged"
            )
        self._source.check_label(index)

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
        row = self._row(index)
        return self.decode(row), int(self._labels[row])

    def _row(self, index: int) -> int:
        row = operator.index(index)
        if not -self._length <= row < self._length:
            raise IndexError(f"sample {row} of {self._length}")
        return row % self._length

    def sample_id(self, index: int) -> str:
        """Name of a sample's file or member, or the key of its record."""
        row = self._row(index)
        if self._names is not None:
            return self._names[row]
        return f"record {row if self._keys is None else self._keys[row]}"

    def source(self, index: int) -> str:
        """Where a sample's label is written."""
        row, root = self._row(index), self.index.root
        if self.index.format == "manifest":
            return f"{root}, line {int(self.index.columns['key'][row])}"
        if self.index.paths is not None:
            root = root / self.index.paths[int(self.index.columns["file"][row])]
        return f"{root}, {self.sample_id(row)}"


def _rebuilt(index: Index, verify: bool, decoder: Decoder, channels: Channels) -> ImageDataset:
    return ImageDataset(index, verify=verify, decoder=decoder, channels=channels)


def _byte_source(index: Index) -> ByteSource:
    if index.format in ("recordio", "tar"):
        needed, source = ("offset", "length", "checksum"), RangeSource
    else:
        needed, source = ("name", "length", "checksum"), None
    missing = [name for name in needed if name not in index.columns]
    if missing or index.format not in ("recordio", "tar", "folder", "manifest"):
        raise DataError(
            f"{index.path} is of the format {index.format!r} without {', '.join(missing) or 'data'}"
            "; build it again with qmargin data index"
        )
    if source is not None:
        return source(index)
    return FileSource(index, index.root if index.format == "folder" else index.root.parent)
