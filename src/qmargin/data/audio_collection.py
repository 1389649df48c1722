"""Utterances with their speakers, wherever their bytes are."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.audio import Samples, decode_audio
from qmargin.data.packed import PackedStrings
from qmargin.errors import CorruptSample, DataError
from qmargin.files import open_regular

MAX_FILE_BYTES = 1 << 31  # of a recording


class Utterance(NamedTuple):
    """One row of a list.

    Attributes:
        key: Name in trial lists.
        place: Path of the file, or of the tar that holds it.
        speaker: Any name.
        row: Line in the list, counted from one; zero where no line names it.
        offset: First byte inside a tar; -1 for a file of its own.
        size: Bytes inside a tar.
    """

    key: str
    place: str
    speaker: str
    row: int = 0
    offset: int = -1
    size: int = 0


class AudioCollection:
    """Utterances by index: encoded bytes, samples, labels and names.

    Labels follow the sorted names of the speakers.

    Args:
        utterances: In the order of their indices.
        origin: The list or folder they were read from, for messages.
        sample_rate: Of the samples that indexing gives.

    Attributes:
        origin: As given.
        sample_rate: As given.
        speakers: Names in the order of their labels.
        labels: Number of each utterance's speaker, ``[n]``.
        keys: Names in trial lists.

    Raises:
        DataError: If there are no utterances, or two share a key.

    Examples:
        >>> rows = [Utterance("b/1", "b/1.wav", "b"), Utterance("a/1", "a/1.wav", "a")]
        >>> collection = AudioCollection(rows, origin="wavs")
        >>> collection.speakers, collection.labels.tolist(), collection.sample_id(0)
        (('a', 'b'), [1, 0], 'b/1')
    """

    def __init__(
        self, utterances: Sequence[Utterance], *, origin: str, sample_rate: int = 16000
    ) -> None:
        if not utterances:
            raise DataError(f"{origin} has no utterances; check the path")
        self.origin, self.sample_rate = origin, sample_rate
        self.speakers = tuple(sorted({item.speaker for item in utterances}))
        number = {speaker: label for label, speaker in enumerate(self.speakers)}
        self.labels: NDArray[np.int64] = _integers([number[item.speaker] for item in utterances])
        self.keys = PackedStrings(item.key for item in utterances)
        places = {place: i for i, place in enumerate(dict.fromkeys(u.place for u in utterances))}
        self._places = PackedStrings(places)
        self._place_of = _integers([places[item.place] for item in utterances])
        self._rows = _integers([item.row for item in utterances])
        is_tar = any(item.offset >= 0 for item in utterances)
        self._spans = _integers([item[4:] for item in utterances]) if is_tar else None  # [n, 2]
        self._indexed: NDArray[np.int64] | None = None  # sizes and checksums, [n, 2]
        self._check_keys()

    def _check_keys(self) -> None:
        seen: dict[str, int] = {}
        for index, key in enumerate(self.keys):
            first = seen.setdefault(key, index)
            if first != index:
                raise DataError(
                    f"{self.source(index)}: key {key!r} was given before, in "
                    f"{self.source(first)}; give every utterance a key of its own"
                )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of speakers."""
        return len(self.speakers)

    def class_name(self, label: int) -> str:
        """Name of a speaker."""
        return self.speakers[label]

    def verify_(self, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        """From now on compare every utterance that is read with what its index has."""
        self._indexed = np.stack([_integers(sizes), _integers(checksums)], axis=1)

    def subset(self, indices: Sequence[int]) -> AudioCollection:
        """Some of the utterances, with the same speakers under the same labels."""
        chosen = copy.copy(self)
        rows = _integers(indices)
        chosen.labels, chosen._rows = self.labels[rows], self._rows[rows]
        chosen._place_of = self._place_of[rows]
        chosen.keys = PackedStrings(self.keys[row] for row in rows.tolist())
        chosen._spans = None if self._spans is None else self._spans[rows]
        chosen._indexed = None if self._indexed is None else self._indexed[rows]
        return chosen

    def __getitem__(self, index: int) -> tuple[Samples, int]:
        """Mono samples in [-1, 1] at ``sample_rate`` and the label."""
        samples = decode_audio(self.encoded(index), sample_rate=self.sample_rate)
        return samples, int(self.labels[index])

    def read(self, index: int) -> bytes:
        """Encoded bytes of an utterance.

        Raises:
            CorruptSample: If they are not there, or, once ``verify_`` was called, have changed.
        """
        content = self._stored(index)
        if self._indexed is not None:
            size, checksum = self._indexed[index].tolist()
            if len(content) != size or zlib.crc32(content) != checksum:
                raise CorruptSample(
                    f"{len(content)} bytes with checksum {zlib.crc32(content):08x}; {size} with "
                    f"{checksum:08x} were indexed: the data has changed or is damaged"
                )
        return content

    def _stored(self, index: int) -> bytes:
        path = self.path(index)
        try:
            with open_regular(path) as file:
                if self._spans is None:
                    return _all_of(file)
                offset, size = self._spans[index].tolist()
                file.seek(offset)
                content = file.read(size)
        except CorruptSample:
            raise
        except (OSError, DataError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptSample(f"{path} cannot be read: {reason}") from error
        if len(content) != size:
            raise CorruptSample(f"{path} ends inside the utterance; the tar is truncated")
        return content

    def encoded(self, index: int) -> Path | bytes:
        """What to decode: the path of a file of its own, or bytes of a tar or to be compared."""
        is_plain = self._spans is None and self._indexed is None
        return self.path(index) if is_plain else self.read(index)

    def path(self, index: int) -> Path:
        """File that holds the utterance: its own, or a tar."""
        return Path(self._places[int(self._place_of[index])])

    def size(self, index: int) -> int:
        """Encoded bytes of an utterance, without reading them.

        Raises:
            CorruptSample: If its file is not there.
        """
        if self._spans is not None:
            return int(self._spans[index, 1])
        path = self.path(index)
        try:
            return os.stat(path).st_size  # noqa: PTH116  # half the time of Path.stat
        except OSError as error:
            raise CorruptSample(f"{path} cannot be read: {error.strerror or error}") from error

    def sample_id(self, index: int) -> str:
        """The utterance's key."""
        return self.keys[index]

    def source(self, index: int) -> str:
        """Where the utterance and its speaker are named."""
        row = int(self._rows[index])
        return f"{self.origin}, row {row}" if row else str(self.path(index))


def _all_of(file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_FILE_BYTES:
        raise CorruptSample(f"{size:,} bytes; at most {MAX_FILE_BYTES:,} are read")
    return file.read()


def _integers(values: Sequence[object]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
