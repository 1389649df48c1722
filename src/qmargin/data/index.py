"""The index of a dataset, and the fingerprint of its data.

An index has the place, label, checksum and measurements of every sample. It is reused as long as
the fingerprint of the data matches. The file has the layout of safetensors: a JSON header, then
plain columns. They are mapped into memory, so that 42 million samples open at once and are shared
by all workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import CorruptSample, DataError
from qmargin.files import open_regular, sha256_of

_SECOND: Final = 10**9
_TICK: Final = 2 * 10**7  # in ns; kernels round times to 10 ms at most
_COARSE_TICK: Final = 2 * _SECOND  # of file systems that keep whole seconds
_SAMPLED: Final = 4096  # bytes of a block
_MOST_BLOCKS: Final = 64  # over all files, and at least two of each


@dataclass(frozen=True)
class Fingerprint:
    """Count, size and digest of files or folders."""

    what: str  # is counted, for messages
    count: int
    size: int  # bytes of all of them; 0 if sizes are meaningless
    digest: str  # of names, sizes, times, inodes and some or all of the bytes

    def __str__(self) -> str:
        return f"{self.count:,} {self.what} of {self.size:,} bytes, {self.digest}"

    def is_changed_in_place(self, now: Fingerprint) -> bool:
        """Whether there are as many files of the same sizes, with other bytes or times."""
        is_alike = (now.what, now.count, now.size) == (self.what, self.count, self.size)
        return is_alike and self.size > 0


class Hasher:
    """Collect a fingerprint.

    ``started`` is when the build of an index began, by the clock of the file system. ``is_racy`` is
    set if something is as new as that: a later change may not show.
    """

    def __init__(self, what: str, started: int | None = None) -> None:
        self._what, self._started = what, started
        self._begun = time.monotonic_ns()
        self._digest, self._count, self._size = hashlib.sha256(), 0, 0
        self.is_racy = False

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of everything that was added so far."""
        return Fingerprint(self._what, self._count, self._size, self._digest.hexdigest()[:16])

    def add_folder(self, name: str, path: Path) -> None:
        """Add the time of a folder, which changes as entries come and go."""
        self._add(name, os.stat(path), size=0)  # noqa: PTH116  # two million times

    def add_file(self, path: Path, *, num_blocks: int) -> None:
        """Add size, time and inode of a file, and blocks of it from its start to its end."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            self._add(path.name, status, size=size)
            if size <= num_blocks * _SAMPLED:
                offsets = list(range(0, size, _SAMPLED))
            else:
                offsets = [(size - _SAMPLED) * n // (num_blocks - 1) for n in range(num_blocks)]
            for offset in offsets:
                file.seek(offset)
                self._digest.update(file.read(_SAMPLED))

    def add_text(self, text: str) -> None:
        """Add a text that changes with the data."""
        self._digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
        self._count += 1

    def _add(self, name: str, status: os.stat_result, *, size: int) -> None:
        written = status.st_mtime_ns
        about = f"\0{size}\0{written}\0{status.st_ino}\0"
        self._digest.update(name.encode("utf-8", "surrogateescape") + about.encode())
        self._count, self._size = self._count + 1, self._size + size
        if self._started is not None:
            now = self._started + time.monotonic_ns() - self._begun
            tick = _tick(written)
            self.is_racy |= self._started - tick < written <= now + tick


@contextmanager
def _readable() -> Iterator[None]:
    """Raise ``DataError`` for a missing file or an impossible name."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as error:
        path, reason = getattr(error, "filename", "a file"), getattr(error, "strerror", None)
        found = f"{path} cannot be read: {reason or error}"
        raise DataError(f"{found}; give all files of the data") from error


def hash_files(paths: Sequence[Path], started: int | None = None) -> Hasher:
    """Hash files that hold samples, by some of their bytes."""
    hasher = Hasher("files", started)
    num_blocks = max(2, _MOST_BLOCKS // max(1, len(paths)))
    with _readable():
        for path in paths:
            hasher.add_file(path, num_blocks=num_blocks)
    return hasher


def hash_lists(paths: Sequence[Path]) -> Hasher:
    """Hash all bytes of lists only: lists may be copied, and samples have checksums."""
    hasher = Hasher("lists")
    with _readable():
        for path in paths:
            hasher.add_text(sha256_of(path))
    return hasher


def clock_of(folder: Path) -> int:
    """Now, in ns, by the clock that stamps files in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def started_after(paths: Iterable[Path], folder: Path) -> int:
    """The clock of a folder's file system, once it shows another time than that of the paths."""
    now = clock_of(folder)
    with _readable():
        times = [os.stat(path).st_mtime_ns for path in paths]  # noqa: PTH116  # two million times
    ticks = [written + _tick(written) for written in times if written <= now + _TICK]
    wait = max(ticks, default=0) + _TICK - now  # stamps lag behind by a tick
    if wait > 0:
        time.sleep(wait / _SECOND)
        now = clock_of(folder)
    return now


def _tick(written: int) -> int:
    return _TICK if written % _SECOND else _COARSE_TICK


VERSION: Final = "3"
SUFFIX: Final = ".qmindex"
MAX_HEADER_BYTES: Final = 1 << 20
MAX_LABEL: Final = 2**31 - 2
BLOCK_BYTES: Final = 1 << 22
DTYPES: Final = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "U32": "<u4", "U8": "u1"}
COLUMNS: Final = {  # one value per sample; constant columns without information are left out
    "label": "I32",
    "file": "U32",  # which of the paths holds it; else its name is the path, or the data one file
    "offset": "I64",  # of its bytes; the whole file where left out
    "length": "U32",
    "checksum": "U32",  # CRC-32 of the bytes
    "key": "I64",  # of a record, or its line in a list
    "label_at": "I64",  # where the label is written, in archives
    "by_reader": "U8",  # whether the reader has to put its bytes together
    "sample_rate": "U32",  # of a recording, as all below; zeros if it cannot be decoded
    "num_channels": "U8",
    "num_samples": "I64",  # per channel
    "peak": "F64",
    "rms": "F64",
    "clipped": "F64",  # share of the samples at full scale
}
ROW_TEXTS: Final = ("name", "error")  # one per sample: its name, why it cannot be decoded
TABLES: Final = ("class", "path", "folder")  # names of identities, files, folders that were listed


class Texts:
    """An immutable list of texts in two arrays, which processes share without copying.

    Python counts references inside every string object, so that reading a list of them in a forked
    worker copies its memory page by page.

    Examples:
        >>> names = Texts.of(["id1/a.wav", "", "id2/ü.wav"])
        >>> len(names), names[2], list(names)[0]
        (3, 'id2/ü.wav', 'id1/a.wav')
    """

    __slots__ = ("data", "ends")

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data = data  # UTF-8 of all texts; names of files keep bytes that are not UTF-8
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Pack any texts."""
        parts = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        data, first = self.data.tobytes(), 0
        for end in self.ends.tolist():
            yield data[first:end].decode("utf-8", "surrogateescape")
            first = end

    def __getitem__(self, row: int) -> str:
        first = int(self.ends[row - 1]) if row else 0
        return self.data[first : int(self.ends[row])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a dataset; see ``read_index`` and ``qmargin.data.build``."""

    path: Path | None  # None for a list in memory, without lengths and checksums
    format: str  # name of the reader
    kind: str  # "images" or "recordings"
    root: Path  # the data: what paths are relative to, or the file itself
    num_classes: int
    fingerprint: Fingerprint | None  # of the data when it was read; None in memory
    is_racy: bool  # the data changed while it was read: the index is not reused
    notes: tuple[str, ...]  # what was left out, as text
    options: Mapping[str, str]  # of the reader, such as split
    columns: dict[str, NDArray[Any]] = field(repr=False)  # see COLUMNS
    checksums: dict[str, int] = field(repr=False)  # CRC-32 of the columns
    is_new: bool = False  # whether it was built just now

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:  # a worker maps the file itself
            return partial(read_index, check=False), (self.path, self.root)
        return SampleIndex, tuple(vars(self).values())

    def texts(self, name: str) -> Texts | None:
        """Texts of one of ``ROW_TEXTS`` or ``TABLES``, if the index has them."""
        if name not in self.columns:
            return None
        return Texts(self.columns[name], self.columns[f"{name}_end"])

    @property
    def folder(self) -> Path:
        """What the paths of samples are relative to."""
        if "root" in self.options:
            return Path(self.options["root"])
        return self.root if self.root.is_dir() else self.root.parent

    def sample_path(self, row: int) -> Path:
        """The file that holds a sample, or ``CorruptSample`` if the index names none."""
        paths, names = self.texts("path"), self.texts("name")
        try:
            if paths is not None:
                return self.folder / paths[int(self.columns["file"][row])]
            if names is None or "offset" in self.columns or "by_reader" in self.columns:
                return self.root
            return self.folder / names[row]
        except (IndexError, KeyError) as error:
            raise CorruptSample(f"{self.path} names no file for sample {row}") from error

    def class_name(self, label: int) -> str:
        """Name of an identity; its number where the data has no names."""
        names = self.texts("class")
        if names is not None and not 0 <= label < len(names):
            found = f"{self.path or self.root} has {len(names)} classes and the label {label}"
            raise DataError(f"{found}; build the index again with qmargin data index")
        return str(label) if names is None else names[label]

    def seconds(self) -> NDArray[np.float64]:
        """Durations of recordings, ``[n]``; zero for what cannot be decoded."""
        if not {"sample_rate", "num_samples"} <= self.columns.keys():
            raise DataError(f"{self.path} has no durations; run qmargin data index again")
        rates = self.columns["sample_rate"].astype(np.float64)
        found: NDArray[np.float64] = self.columns["num_samples"] / np.maximum(rates, 1.0)
        return found


class OutdatedIndex(DataError):
    """An index that another version of this package wrote."""


def read_index(
    path: str | Path, root: str | Path | None = None, *, check: bool = True
) -> SampleIndex:
    """Map an index into memory, or raise ``DataError`` if it is incomplete.

    ``root`` is the data, if moved since the index was built. Without ``check``, columns are not
    compared with their checksums: workers map an index that was checked before.
    """
    path = Path(path)
    header, first = _header(path)
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or "qmargin_index" not in about:
        raise _damaged(path, "its header is of a different format")
    if about["qmargin_index"] != VERSION:
        raise OutdatedIndex(f"{path} is not of version {VERSION}; run qmargin data index again")
    if about.get("crc32") != header_checksum(about):
        raise _damaged(path, "its header has changed since it was written")
    try:
        details = json.loads(about["details"])
        what, count, size, digest = details["fingerprint"]
        index = SampleIndex(
            path=path,
            format=str(about["format"]),
            kind=str(details["kind"]),
            root=Path(root) if root is not None else path.parent / about["root"],
            num_classes=int(details["num_classes"]),
            fingerprint=Fingerprint(str(what), int(count), int(size), str(digest)),
            is_racy=bool(details["is_racy"]),
            notes=tuple(map(str, details["notes"])),
            options={str(key): str(value) for key, value in details["options"].items()},
            columns=_map_columns(path, header, first),
            checksums={str(key): int(value) for key, value in details["crc32"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    _check_lengths(path, index)
    if check:
        _check_columns(path, index, header, first)
    return index


def indexed_seconds(path: str | Path) -> dict[str, float]:
    """Durations by name from an index of recordings, without those that cannot be decoded."""
    index = read_index(path)
    names, errors = index.texts("name"), index.texts("error")
    if index.kind != "recordings" or names is None or errors is None:
        raise DataError(f"{path} is an index of {index.kind}; index recordings instead")
    rows = zip(names, index.seconds().tolist(), errors, strict=True)
    return {name: seconds for name, seconds, error in rows if not error}


def header_checksum(about: dict[str, Any]) -> str:
    """Checksum of a header without its columns, which have their own."""
    texts = [str(about.get(name)) for name in ("qmargin_index", "format", "root", "details")]
    return f"{zlib.crc32(json.dumps(texts).encode()):08x}"


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and where the columns begin."""
    with open_regular(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == b'{"format':  # as version 0.1 wrote for recordings
            raise OutdatedIndex(f"{path} is of version 0.1; run qmargin data index again")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise _damaged(path, f"a header of {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + length


def _map_columns(path: Path, header: dict[str, Any], first: int) -> dict[str, NDArray[Any]]:
    size = path.stat().st_size - first
    columns: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        dtype = np.dtype(DTYPES[entry["dtype"]])
        begin, end = entry["data_offsets"]
        (count,) = entry["shape"]
        if not 0 <= begin <= end <= size or end - begin != count * dtype.itemsize:
            raise ValueError(f"column {name} ends at byte {end} of {size}")
        columns[name] = np.empty(0, dtype=dtype)
        if count:
            mapped = np.memmap(path, dtype=dtype, mode="r", offset=first + begin, shape=(count,))
            columns[name] = mapped.view(np.ndarray)  # memmap's own indexing is slow
    return columns


def _check_lengths(path: Path, index: SampleIndex) -> None:
    """Check that columns have the same length, and texts lie inside their bytes."""
    count = len(index.columns.get("label", ()))
    if count == 0 or index.kind not in ("images", "recordings"):
        raise _damaged(path, f"{count} samples of {index.kind!r}")
    for name, column in index.columns.items():
        is_row = name in COLUMNS or name in (f"{text}_end" for text in ROW_TEXTS)
        if is_row and len(column) != count:
            raise _damaged(path, f"{len(column)} of {name} for {count} samples")
    for name in (*ROW_TEXTS, *TABLES):
        if (name in index.columns) != (f"{name}_end" in index.columns):
            raise _damaged(path, f"half of the texts {name}")
        texts = index.texts(name)
        if texts is not None and len(texts) and int(texts.ends[-1]) != len(texts.data):
            raise _damaged(path, f"texts {name} end outside their bytes")
    classes = index.texts("class")
    if classes is not None and len(classes) != index.num_classes:
        raise _damaged(path, f"{len(classes)} names of {index.num_classes} classes")


def _check_columns(path: Path, index: SampleIndex, header: dict[str, Any], first: int) -> None:
    with open_regular(path) as file:  # mapped columns would stay in this process's memory
        for name in index.columns:
            begin, end = header[name]["data_offsets"]
            file.seek(first + begin)
            checksum, left = 0, end - begin
            while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
                checksum = zlib.crc32(block, checksum)
                left -= len(block)
            if left or checksum != index.checksums.get(name):
                raise _damaged(path, f"column {name} has changed since it was written")


def _damaged(path: Path, reason: str) -> DataError:
    found = f"{path} is not a complete index ({reason})"
    return DataError(f"{found}; build it again with qmargin data index")


def parse_label(text: str | float, where: str) -> int:
    r"""A label as an integer in ``[0, 2**31 - 2]``, or a ``DataError`` that names its place.

    Examples:
        >>> parse_label(" 7\n", "list.csv, line 2"), parse_label(7.0, "record 1")
        (7, 7)
    """
    try:
        value = float(text)
        label = int(text) if isinstance(text, str) else int(value)
        is_good = value == label and 0 <= label <= MAX_LABEL
    except (ValueError, OverflowError):
        is_good = False
    if not is_good:
        shown = text.strip()[:40] if isinstance(text, str) else text
        limits = f"[0, {MAX_LABEL}]"
        raise DataError(f"{where}: the label {shown!r} is not an integer in {limits}; correct it")
    return label
