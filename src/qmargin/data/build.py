"""Build the index of a dataset: list its samples, read each once, write the columns.

Measuring recordings takes long. What was measured is appended to a file beside the index, so that
a build that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from qmargin.data.audio import decode_audio, read_info
from qmargin.data.fingerprint import started_after
from qmargin.data.index import COLUMNS, IndexWriter, SampleIndex
from qmargin.data.reader import RECORDINGS, Reader, Sample, Scan
from qmargin.data.stored import AudioDataset, OpenFiles
from qmargin.errors import CorruptSample, DataError
from qmargin.files import open_regular

CLIPPED_AT: Final = 0.999  # of full scale
_FORMAT: Final = "qmargin-index-part"
_LINES_PER_SYNC: Final = 256
_MAX_LINE: Final = 1 << 16
_PLACES: Final = [
    (name, at) for at, name in enumerate(Sample._fields) if name in COLUMNS and name != "label"
]
_Values = dict[str, Any]  # of a row, by column


def list_samples(scan: Scan, reader: Reader) -> SampleIndex:
    """The samples of a dataset in memory, without reading any of them.

    Raises:
        DataError: There are none, or two recordings have the same name, by which trial lists know
            them.
    """
    with IndexWriter(None) as writer:
        seen: dict[str | None, str] = {}
        for sample in reader.samples(scan):
            if scan.kind is RECORDINGS:
                where = _where(sample, scan)
                first = seen.setdefault(sample.name, where)
                if first is not where:
                    raise DataError(
                        f"{where}: {sample.name!r} was given before, in {first}; give every "
                        "recording a name of its own"
                    )
            writer.add(sample.identity, _values(sample), name=sample.name, path=sample.path)
        return _finished(writer, scan, reader)


def build_index(scan: Scan, reader: Reader, place: Path, *, num_threads: int = 2) -> None:
    """Read every sample once and write the index.

    Args:
        scan: The data.
        reader: Of its format.
        place: The index; it appears when it is whole.
        num_threads: That decode recordings at once.

    Raises:
        DataError: The data are wrong; the message names the place.
    """
    started = started_after(reader.watched(scan), place.parent)
    scan.hasher = reader.hasher(scan, None, started)
    if scan.kind is RECORDINGS:
        _build_measured(list_samples(scan, reader), scan, reader, place, num_threads)
        return
    files, folder = OpenFiles(), scan.folder
    with IndexWriter(place) as writer:
        for sample in reader.samples(scan):
            content = sample.content
            if content is None:
                content = _content(sample, scan, folder, files)
            values = _values(sample)
            values["length"], values["checksum"] = len(content), zlib.crc32(content)
            writer.add(sample.identity, values, name=sample.name, path=sample.path)
        _finished(writer, scan, reader)


def _values(sample: Sample) -> _Values:
    """Columns that a sample has by itself."""
    return {name: sample[at] for name, at in _PLACES if sample[at] is not None}


def _where(sample: Sample, scan: Scan) -> str:
    if sample.name is not None and sample.key is not None:
        return f"{scan.path}, line {sample.key}"
    return f"{scan.folder / sample.path if sample.path else scan.path}, {sample.name}"


def _finished(writer: IndexWriter, scan: Scan, reader: Reader) -> SampleIndex:
    return writer.finish(
        format=reader.format,
        kind=scan.kind.name,
        root=scan.path,
        fingerprint=None if scan.hasher is None else scan.hasher.fingerprint,
        is_racy=scan.hasher is not None and scan.hasher.is_racy,
        classes=scan.classes,
        num_classes=scan.num_classes,
        notes=scan.notes,
        folders=scan.folders,
        options=scan.options,
    )


def _content(sample: Sample, scan: Scan, folder: Path, files: OpenFiles) -> bytes:
    """Bytes of a sample; none of one that is too large, which is corrupt when it is read."""
    path = scan.path
    if sample.path is not None or sample.offset is None:
        path = folder / (sample.path or sample.name or "")
    try:
        if sample.offset is not None and sample.length is not None:
            return files.read_range(path, sample.offset, sample.length, scan.kind.max_bytes)
        with open_regular(path) as file:
            content = file.read(scan.kind.max_bytes + 1)
        return content if len(content) <= scan.kind.max_bytes else b""
    except (OSError, DataError) as error:
        raise DataError(
            f"{_where(sample, scan)}: {path} cannot be read "
            f"({getattr(error, 'strerror', None) or error}); paths are relative to {folder}"
        ) from error


def measure_recording(content: bytes) -> _Values:
    """Columns of an encoded recording: what its header says, and how loud it is.

    Raises:
        CorruptSample: It cannot be decoded.
    """
    info = read_info(content)
    samples = np.abs(decode_audio(content, sample_rate=info.sample_rate))
    return {
        "sample_rate": info.sample_rate,
        "num_channels": info.num_channels,
        "num_samples": len(samples),
        "peak": float(samples.max()),
        "rms": float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))),
        "clipped": float(np.mean(samples >= CLIPPED_AT)),
    }


_NOT_MEASURED: Final = {
    **dict.fromkeys(("length", "checksum", "sample_rate", "num_channels", "num_samples"), 0),
    **dict.fromkeys(("peak", "rms", "clipped"), 0.0),
}


def measure(recordings: AudioDataset, row: int) -> _Values:
    """Everything that an index says of a recording; of a corrupt one, the error."""
    values: _Values = {**_NOT_MEASURED, "error": ""}
    try:
        content = recordings.read(row)
        values.update(length=len(content), checksum=zlib.crc32(content))
        values.update(measure_recording(content))
    except CorruptSample as error:
        values["error"] = str(error) or "corrupt"
    return values


def measure_all(
    recordings: AudioDataset, *, start: int = 0, num_threads: int = 2
) -> Iterator[_Values]:
    """What ``measure`` gives for all recordings from one on, in their order; few at once."""
    waiting: deque[Future[_Values]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for row in range(start, len(recordings)):
            waiting.append(pool.submit(measure, recordings, row))
            if len(waiting) > 8 * num_threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _build_measured(
    listing: SampleIndex, scan: Scan, reader: Reader, place: Path, num_threads: int
) -> None:
    part = place.with_name(f"{place.name}.part")
    recordings, total = AudioDataset(listing), len(listing)
    names, paths = listing.texts("name"), listing.texts("path")
    columns = {name: column for name, column in listing.columns.items() if name in COLUMNS}
    labels = columns.pop("label")
    files = columns.pop("file", None)
    with IndexWriter(place) as writer:
        for row, values in enumerate(_resumed(recordings, part, num_threads)):
            scan.progress(row, total)
            label, error = int(labels[row]), values.pop("error")
            writer.add(
                label if listing.texts("class") is None else listing.class_name(label),
                {name: column[row].item() for name, column in columns.items()} | values,
                name=None if names is None else names[row],
                path=None if paths is None or files is None else paths[int(files[row])],
                error=error,
            )
        scan.progress(total, total)
        _finished(writer, scan, reader)
    part.unlink()


def _resumed(recordings: AudioDataset, part: Path, num_threads: int) -> Iterator[_Values]:
    """Measurements of all recordings: those of an interrupted build first."""
    header = _header(recordings)
    num_done = 0
    if part.exists():
        for values in _read_part(part, header):
            num_done += 1
            yield values
    with part.open("ab") as file:
        if file.tell() == 0:
            _append(file, header)
        for number, values in enumerate(
            measure_all(recordings, start=num_done, num_threads=num_threads), num_done + 1
        ):
            _append(file, values)
            if number % _LINES_PER_SYNC == 0:
                _sync(file)
            yield values
        _sync(file)


def _header(recordings: AudioDataset) -> _Values:
    digest = hashlib.sha256()
    for name, column in sorted(recordings.index.columns.items()):
        digest.update(name.encode() + column.tobytes())
    return {"format": _FORMAT, "count": len(recordings), "sha256": digest.hexdigest()}


def _read_part(part: Path, header: _Values) -> Iterator[_Values]:
    """Lines of an unfinished build; what a kill left of the last one is cut off.

    Raises:
        DataError: The file is of other recordings, or damaged.
    """
    with part.open("rb+") as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
        file.seek(0)
        for row, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b"")):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if row == 0 and values != header:
                raise DataError(
                    f"{part} is of other recordings or speakers; delete it and index again"
                )
            if row > header["count"] or (row and not _is_measured(values)):
                raise DataError(f"{part}, line {row + 1} is damaged; delete it and index again")
            if row:
                yield values


def _is_measured(values: Any) -> bool:
    """Whether a line has numbers for all columns, none below zero."""
    if not isinstance(values, dict) or values.keys() != {*_NOT_MEASURED, "error"}:
        return False
    limits = {"num_channels": 2**8, "num_samples": 2**53}
    return isinstance(values["error"], str) and all(
        type(values[name]) in (int, type(zero)) and 0 <= values[name] < limits.get(name, 2**32)
        for name, zero in _NOT_MEASURED.items()
    )


def _append(file: IO[bytes], values: _Values) -> None:
    file.write(json.dumps(values, separators=(",", ":")).encode() + b"\n")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
