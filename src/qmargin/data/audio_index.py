"""One line per utterance: its checksum, duration and loudness, measured once and kept.

The index is a text file of JSON lines. While it is made, lines are appended to a file beside it,
so that an index that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from qmargin.data.audio import decode_audio, read_info
from qmargin.data.audio_collection import AudioCollection
from qmargin.errors import CorruptSample, DataError
from qmargin.files import Progress, open_regular, sync_folder

FORMAT = "qmargin-audio-index"
VERSION = 1
CLIPPED_AT = 0.999  # of full scale
_LINES_PER_SYNC = 256
_MAX_LINE = 1 << 16
_log = logging.getLogger("qmargin.data")


@dataclass(frozen=True)
class AudioRecord:
    """What was measured of one utterance.

    Attributes:
        key: Its name.
        size: Encoded bytes.
        checksum: CRC-32 of them.
        sample_rate: In Hz, in the file.
        num_channels: In the file.
        num_samples: Per channel.
        peak: Largest absolute sample.
        rms: Root of the mean square.
        clipped: Share of the samples at full scale.
        error: Why it cannot be decoded; empty when it can.
    """

    key: str
    size: int = 0
    checksum: int = 0
    sample_rate: int = 0
    num_channels: int = 0
    num_samples: int = 0
    peak: float = 0.0
    rms: float = 0.0
    clipped: float = 0.0
    error: str = ""

    @property
    def seconds(self) -> float:
        """Duration; zero for what cannot be decoded."""
        return self.num_samples / self.sample_rate if self.sample_rate else 0.0


def measure(collection: AudioCollection, index: int) -> AudioRecord:
    """Read and decode one utterance; a corrupt one gives a record with an error."""
    key = collection.sample_id(index)
    try:
        content = collection.read(index)
    except CorruptSample as error:
        return AudioRecord(key, error=str(error))
    checksum = zlib.crc32(content)
    try:
        info = read_info(content)
        samples = np.abs(decode_audio(content, sample_rate=info.sample_rate))
    except CorruptSample as error:
        return AudioRecord(key, len(content), checksum, error=str(error))
    return AudioRecord(
        key,
        len(content),
        checksum,
        info.sample_rate,
        info.num_channels,
        len(samples),
        peak=float(samples.max()),
        rms=float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))),
        clipped=float(np.mean(samples >= CLIPPED_AT)),
    )


def measure_all(
    collection: AudioCollection,
    *,
    start: int = 0,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> Iterator[AudioRecord]:
    """Records of all utterances from one on, in their order; few are held at once.

    Args:
        collection: What to measure.
        start: The first utterance.
        num_threads: That decode at once.
        progress: Called with utterances done and utterances in all.
    """
    total = len(collection)
    for number, record in enumerate(_measured(collection, start, num_threads), start=start):
        if progress is not None:
            progress(number, total)
        yield record
    if progress is not None:
        progress(total, total)


def _measured(collection: AudioCollection, start: int, num_threads: int) -> Iterator[AudioRecord]:
    waiting: deque[Future[AudioRecord]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for index in range(start, len(collection)):
            waiting.append(pool.submit(measure, collection, index))
            if len(waiting) > 8 * num_threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def index_audio(
    collection: AudioCollection,
    path: str | Path,
    *,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> list[AudioRecord]:
    """Measure every utterance and write the index; go on with one that was interrupted.

    Args:
        collection: What to index.
        path: The index; it appears when it is whole.
        num_threads: That decode at once.
        progress: Called with utterances done and utterances in all.

    Raises:
        DataError: If an unfinished index beside ``path`` is of other utterances.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    header = _header(collection)
    records = _resumed(part, header) if part.exists() else []
    for number, record in enumerate(records):
        _check_key(part, collection, number, record)
    with part.open("ab") as file:
        if not records and file.tell() == 0:
            _append(file, header)
        for record in measure_all(
            collection, start=len(records), num_threads=num_threads, progress=progress
        ):
            records.append(record)
            _append(file, asdict(record))
            if len(records) % _LINES_PER_SYNC == 0:
                _sync(file)
        _sync(file)
    part.replace(path)
    sync_folder(path.parent)
    return records


def audio_records(
    collection: AudioCollection, path: str | Path, *, progress: Progress | None = None
) -> list[AudioRecord]:
    """Records of an index, which is made where it is missing or of other utterances."""
    path = Path(path)
    if path.exists():
        if is_index_of(path, collection):
            return read_audio_index(path, collection)
        _log.warning("%s is made again: it is of other utterances or speakers", path)
    return index_audio(collection, path, progress=progress)


def indexed_seconds(path: str | Path) -> dict[str, float]:
    """Durations by key of an index, whatever collection it is of.

    Raises:
        DataError: The file is no index of recordings, or damaged.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            header = json.loads(file.readline(_MAX_LINE))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise DataError(f"{path} is no index of recordings; make one with qmargin data index")
        file.seek(0)
        records = list(_records(path, file, header))
    return {record.key: record.seconds for record in records if not record.error}


def is_index_of(path: str | Path, collection: AudioCollection) -> bool:
    """Whether a file begins like the index of a collection."""
    with open_regular(path) as file:
        first = file.readline(_MAX_LINE)
    try:
        return bool(json.loads(first) == _header(collection))
    except (ValueError, RecursionError):
        return False


def read_audio_index(path: str | Path, collection: AudioCollection) -> list[AudioRecord]:
    """Records of an index that was made of this collection, in its order.

    Raises:
        DataError: If it is of other utterances, or damaged.
    """
    path = Path(path)
    with open_regular(path) as file:
        records = list(_records(path, file, _header(collection)))
    if len(records) != len(collection):
        raise DataError(
            f"{path} has {len(records)} of {len(collection)} utterances; make the index again"
        )
    for number, record in enumerate(records):
        _check_key(path, collection, number, record)
    return records


def _header(collection: AudioCollection) -> dict[str, Any]:
    digest = hashlib.sha256()
    for key, label in zip(collection.keys, collection.labels.tolist(), strict=True):
        digest.update(f"{key}\0{collection.speakers[label]}\n".encode("utf-8", "surrogateescape"))
    return {
        "format": FORMAT,
        "version": VERSION,
        "count": len(collection),
        "sha256": digest.hexdigest(),
    }


def _resumed(part: Path, header: dict[str, Any]) -> list[AudioRecord]:
    """Whole lines of an unfinished index; what a kill left of the last one is cut off."""
    with part.open("rb+") as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
        file.seek(0)
        return list(_records(part, file, header)) if end else []


def _records(path: Path, file: IO[bytes], header: dict[str, Any]) -> Iterator[AudioRecord]:
    names = {field.name for field in fields(AudioRecord)}
    for row, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"{path}, row {row} is damaged; delete the file and index again"
            raise DataError(problem) from error
        if row == 1:
            if record != header:
                raise DataError(
                    f"{path} is of other utterances or speakers; delete it and index again"
                )
            continue
        if not isinstance(record, dict) or set(record) != names or not _is_measured(record):
            raise DataError(f"{path}, row {row} is damaged; delete the file and index again")
        yield AudioRecord(**record)


def _is_measured(record: dict[str, Any]) -> bool:
    """Whether the values of a record are of their types, and none is below zero."""
    texts, numbers = ("key", "error"), ("peak", "rms", "clipped")
    for name, value in record.items():
        if name in texts:
            is_good = isinstance(value, str)
        else:
            kinds = (int, float) if name in numbers else (int,)
            is_good = type(value) in kinds and 0 <= value < 2**53
        if not is_good:
            return False
    return True


def _check_key(path: Path, collection: AudioCollection, number: int, record: AudioRecord) -> None:
    if number >= len(collection) or record.key != collection.sample_id(number):
        raise DataError(
            f"{path}, row {number + 2}: utterance {record.key!r} is out of order; delete the file "
            "and index again"
        )


def _append(file: IO[bytes], record: dict[str, Any]) -> None:
    file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
