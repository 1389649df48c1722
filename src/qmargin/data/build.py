"""Build the index of a dataset: list its samples, read each once, write the columns.

Measuring recordings takes long. Measurements are appended to a file next to the index, so that
an interrupted build continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import numpy as np

from qmargin.data.audio import decode_audio, read_info
from qmargin.data.index import (
    BLOCK_BYTES,
    COLUMNS,
    DTYPES,
    VERSION,
    SampleIndex,
    header_checksum,
    started_after,
)
from qmargin.data.reader import RECORDINGS, Reader, Sample, Scan
from qmargin.data.stored import AudioDataset, OpenFiles
from qmargin.errors import CorruptSample, DataError
from qmargin.files import open_regular, replacing

CLIPPED_AT: Final = 0.999  # of full scale
_CODES: Final = {"F64": "d", "I64": "q", "I32": "i", "U32": "I", "U8": "B"}
_FLUSH_ROWS: Final = 1 << 16
_LINES_PER_SYNC: Final = 256
_MAX_LINE: Final = 1 << 16
_PLACES: Final = [
    (name, at) for at, name in enumerate(Sample._fields) if name in COLUMNS and name != "label"
]
_Values = dict[str, Any]  # of a row, by column
T = TypeVar("T")
R = TypeVar("R")


def _dtype(name: str) -> str:
    return COLUMNS.get(name) or ("I64" if name.endswith("_end") else "U8")


def _width(name: str) -> int:
    return np.dtype(DTYPES[_dtype(name)]).itemsize


class IndexWriter(ExitStack):
    """Collect samples one by one; ``finish`` makes the index, in memory without a path."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path
        self.num_rows = 0
        self._classes: dict[str, int] = {}  # identities by name, numbered as they come
        self._largest = -1  # of labels that are numbers
        self._last_path: str | None = None
        self._num_paths = 0
        self._pending: dict[str, array[Any]] = {}
        self._texts: dict[str, bytearray] = {}
        self._text_bytes: dict[str, int] = {}
        self._spools: dict[str, IO[bytes]] = {}
        self._folder = ""
        if path is not None:
            prefix = f".{path.name}."
            temporary = tempfile.TemporaryDirectory(".tmp", prefix, path.parent)
            self._folder = self.enter_context(temporary)

    def add(self, sample: Sample, values: _Values, *, error: str | None = None) -> None:
        """Add identity, name and path of a sample, and its other columns, the same for all."""
        identity, name, path = sample.identity, sample.name, sample.path
        if isinstance(identity, str):
            label = self._classes.setdefault(identity, len(self._classes))
        else:
            label = identity
            if label > self._largest:
                self._largest = label
        if self._classes and self._largest >= 0:
            found = f"sample {name!r} has the identity {identity!r}"
            raise DataError(f"{found}; give all of them names, or all numbers")
        if path is not None:
            if path != self._last_path:
                self._last_path = path
                self._num_paths += 1
                self._add_text("path", path)
            values["file"] = self._num_paths - 1
        if name is not None:
            self._add_text("name", name)
        if error is not None:
            self._add_text("error", error)
        pending = self._pending
        try:
            pending["label"].append(label)
            for column, value in values.items():
                pending[column].append(value)
        except KeyError:
            if self.num_rows:
                raise
            for column, value in (("label", label), *values.items()):
                pending[column] = array(_CODES[COLUMNS[column]], [value])
        self.num_rows += 1
        if self.num_rows % _FLUSH_ROWS == 0:
            self._flush()

    def _add_text(self, table: str, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        if table not in self._texts:
            self._texts[table], self._text_bytes[table] = bytearray(), 0
            self._pending[f"{table}_end"] = array("q")
        self._texts[table] += data
        self._text_bytes[table] += len(data)
        self._pending[f"{table}_end"].append(self._text_bytes[table])

    def _flush(self) -> None:
        columns: dict[str, array[Any] | bytearray] = {**self._pending, **self._texts}
        for name, values in columns.items():
            if name not in self._spools:
                file: IO[bytes] = BytesIO()
                if self._folder:
                    place = Path(self._folder, name)
                    file = self.enter_context(place.open("w+b"))
                self._spools[name] = file
            self._spools[name].write(values)
            del values[:]

    def finish(self, scan: Scan, reader: Reader) -> SampleIndex:
        """Join the columns into the index; labels follow the sorted names of the identities."""
        if self.num_rows == 0:
            raise DataError(f"{scan.path} has no samples; see the documentation of data formats")
        for name in scan.classes:
            self._classes.setdefault(name, len(self._classes))
        names = sorted(self._classes)
        for table, texts in (("class", names), ("folder", scan.folders)):
            for text in texts:
                self._add_text(table, text)
        self._flush()
        if names:
            self._relabel(names)
        if "by_reader" in self._spools and not any(map(any, self._blocks("by_reader"))):
            del self._spools["by_reader"]
        # The widest first: every column then begins at a multiple of its own width.
        columns = sorted(self._spools, key=lambda name: (-_width(name), name))
        found = len(names) or self._largest + 1
        index = SampleIndex(
            path=self.path,
            format=reader.format,
            kind=scan.kind.name,
            root=scan.path,
            num_classes=found if scan.num_classes is None else scan.num_classes,
            fingerprint=None if scan.hasher is None else scan.hasher.fingerprint,
            is_racy=scan.hasher is not None and scan.hasher.is_racy,
            notes=tuple(scan.notes),
            options=dict(scan.options),
            columns={},
            checksums={},
        )
        if self.path is not None:
            self._write(self.path, index, columns)
            return index
        for name in columns:
            content = b"".join(self._blocks(name))
            index.columns[name] = np.frombuffer(content, dtype=DTYPES[_dtype(name)])
        return index

    def _relabel(self, names: list[str]) -> None:
        """Replace labels in the order of the samples by those in the order of the names."""
        relabel = np.empty(len(names), dtype=np.int32)
        relabel[[self._classes[name] for name in names]] = np.arange(len(names))
        spool = self._spools["label"]
        for start in range(0, 4 * self.num_rows, BLOCK_BYTES):
            spool.seek(start)
            labels = np.frombuffer(spool.read(BLOCK_BYTES), dtype="<i4")
            spool.seek(start)
            spool.write(relabel[labels].astype("<i4").tobytes())

    def _blocks(self, name: str) -> Iterator[bytes]:
        spool = self._spools[name]
        spool.seek(0)
        while block := spool.read(BLOCK_BYTES):
            yield block

    def _write(self, path: Path, index: SampleIndex, names: list[str]) -> None:
        assert index.fingerprint is not None  # of what is written to a file
        header: dict[str, Any] = {"__metadata__": {}}
        position = 0
        for name in names:
            checksum, size = 0, 0
            for block in self._blocks(name):
                checksum, size = zlib.crc32(block, checksum), size + len(block)
            index.checksums[name] = checksum
            header[name] = {
                "dtype": _dtype(name),
                "shape": [size // _width(name)],
                "data_offsets": [position, position + size],
            }
            position += size
        details = {
            "kind": index.kind,
            "num_classes": index.num_classes,
            "fingerprint": list(astuple(index.fingerprint)),
            "is_racy": index.is_racy,
            "notes": list(index.notes),
            "options": dict(index.options),
            "crc32": index.checksums,
        }
        # Relative where the index lies beside the data, so that both can move.
        root, folder = index.root.resolve(), path.resolve().parent
        is_beside = folder in (root.parent, root)
        about = {
            "qmargin_index": VERSION,
            "format": index.format,
            "root": os.path.relpath(root, folder) if is_beside else str(root),
            "details": json.dumps(details),
        }
        header["__metadata__"] = {**about, "crc32": header_checksum(about)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with replacing(path) as temporary, temporary.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                file.writelines(self._blocks(name))
            _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def list_samples(scan: Scan, reader: Reader) -> SampleIndex:
    """The samples of a dataset in memory, without reading any of them.

    Two recordings must not have the same name, by which trial lists know them.
    """
    with IndexWriter(None) as writer:
        seen: dict[str | None, str] = {}
        for sample in reader.samples(scan):
            if scan.kind is RECORDINGS:
                where = _where(sample, scan)
                first = seen.setdefault(sample.name, where)
                if first is not where:
                    found = f"{where}: {sample.name!r} was given before, in {first}"
                    raise DataError(f"{found}; give every recording a unique name")
            writer.add(sample, _values(sample))
        return writer.finish(scan, reader)


def build_index(scan: Scan, reader: Reader, place: Path, *, num_threads: int = 2) -> None:
    """Read every sample once and write the index atomically."""
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
            writer.add(sample, values)
        writer.finish(scan, reader)


def _values(sample: Sample) -> _Values:
    """Columns that do not depend on the content of a sample."""
    return {name: sample[at] for name, at in _PLACES if sample[at] is not None}


def _where(sample: Sample, scan: Scan) -> str:
    if sample.name is not None and sample.key is not None:
        return f"{scan.path}, line {sample.key}"
    return f"{scan.folder / sample.path if sample.path else scan.path}, {sample.name}"


def _content(sample: Sample, scan: Scan, folder: Path, files: OpenFiles) -> bytes:
    """Bytes of a sample; empty if it is too large, so that it is corrupt when read."""
    path, most = scan.path, scan.kind.max_bytes
    if sample.path is not None or sample.offset is None:
        path = folder / (sample.path or sample.name or "")
    try:
        if sample.offset is not None and sample.length is not None:
            return files.read_range(path, sample.offset, sample.length, most)
        with open_regular(path) as file:
            content = file.read(most + 1)
        return content if len(content) <= most else b""
    except (OSError, DataError) as error:
        reason = getattr(error, "strerror", None) or error
        found = f"{_where(sample, scan)}: {path} cannot be read ({reason})"
        raise DataError(f"{found}; paths are relative to {folder}") from error


def measure_recording(content: bytes) -> _Values:
    """Columns of an encoded recording: facts of its header, and its loudness."""
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
    """All columns of a recording; for a corrupt one, the error."""
    values: _Values = {**_NOT_MEASURED, "error": ""}
    try:
        content = recordings.read(row)
        values.update(length=len(content), checksum=zlib.crc32(content))
        values.update(measure_recording(content))
    except CorruptSample as error:
        values["error"] = str(error) or "corrupt"
    return values


def in_order(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Results of a function in the order of the items, computed by threads a little ahead."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 8 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


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
            sample = Sample(
                label if listing.texts("class") is None else listing.class_name(label),
                None if names is None else names[row],
                None if paths is None or files is None else paths[int(files[row])],
            )
            values = {name: column[row].item() for name, column in columns.items()} | values
            writer.add(sample, values, error=error)
        scan.progress(total, total)
        writer.finish(scan, reader)
    part.unlink()


def _resumed(recordings: AudioDataset, part: Path, num_threads: int) -> Iterator[_Values]:
    """Measurements of all recordings: those of an interrupted build first."""
    digest = hashlib.sha256()
    for name, column in sorted(recordings.index.columns.items()):
        digest.update(name.encode() + column.tobytes())
    count = len(recordings)
    header = {"format": "qmargin-index-part", "count": count, "sha256": digest.hexdigest()}
    num_done = 0
    if part.exists():
        for values in _read_part(part, header):
            num_done += 1
            yield values
    with part.open("ab") as file:
        if file.tell() == 0:
            _append(file, header)
        found = in_order(partial(measure, recordings), range(num_done, count), num_threads)
        for number, values in enumerate(found, num_done + 1):
            _append(file, values)
            if number % _LINES_PER_SYNC == 0:
                _sync(file)
            yield values
        _sync(file)


def _append(file: IO[bytes], values: _Values) -> None:
    file.write(json.dumps(values, separators=(",", ":")).encode() + b"\n")


def _read_part(part: Path, header: _Values) -> Iterator[_Values]:
    """Lines of an unfinished build, without an incomplete last line."""
    with part.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0)
        for row, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b"")):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if row == 0 and values != header:
                raise DataError(f"{part} is of different recordings; delete it and index again")
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
