"""The index of a dataset: where every sample is, its label, a checksum, and what was measured.

The file has the layout of safetensors: a JSON header, then plain columns. They are mapped into
memory, not read, so that 42 million samples open at once and are shared by all workers. Recordings
have columns for duration and loudness besides those that all samples have.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple, dataclass, field
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from qmargin.data.fingerprint import Fingerprint
from qmargin.errors import DataError
from qmargin.files import open_regular, replacing

VERSION: Final = "3"
SUFFIX: Final = ".qmindex"
MAX_HEADER_BYTES: Final = 1 << 20
MAX_LABEL: Final = 2**31 - 2
DTYPES: Final = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "U32": "<u4", "U8": "u1"}
COLUMNS: Final = {  # one value per sample; a column that says nothing is left out
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
_CODES: Final = {"F64": "d", "I64": "q", "I32": "i", "U32": "I", "U8": "B"}
_FLUSH_ROWS: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 22


class Texts:
    """An immutable list of texts in two arrays, which processes share without copying.

    Python counts references inside every string object, so that reading a list of them in a forked
    worker copies its memory page by page.

    Args:
        data: UTF-8 of all texts, one after the other; names of files keep bytes that are not UTF-8.
        ends: Where each text ends.

    Examples:
        >>> names = Texts.of(["id1/a.wav", "", "id2/ü.wav"])
        >>> len(names), names[2], list(names)[0]
        (3, 'id2/ü.wav', 'id1/a.wav')
    """

    __slots__ = ("data", "ends")

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data, self.ends = data, ends

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
    """The samples of a dataset; see ``read_index`` and ``IndexWriter``.

    Attributes:
        path: The file; None for a list in memory, without lengths and checksums.
        format: Name of the reader of the data.
        kind: ``"images"`` or ``"recordings"``.
        root: The data: what paths are relative to, or the file itself.
        num_classes: Number of identities.
        fingerprint: Of the data when it was read; None in memory.
        is_racy: The data changed while it was read: the index is not trusted again.
        notes: What was left out on the way, for people.
        options: Of the reader, such as ``split``.
        columns: By name; see ``COLUMNS``.
        checksums: CRC-32 of the columns.
        is_new: Whether it was built just now.
    """

    path: Path | None
    format: str
    kind: str
    root: Path
    num_classes: int
    fingerprint: Fingerprint | None
    is_racy: bool
    notes: tuple[str, ...]
    options: Mapping[str, str]
    columns: dict[str, NDArray[Any]] = field(repr=False)
    checksums: dict[str, int] = field(repr=False)
    is_new: bool = False

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:  # a worker maps the file itself
            return _mapped, (self.path, self.root)
        values = tuple(getattr(self, name) for name in self.__dataclass_fields__)
        return SampleIndex, values

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

    def class_name(self, label: int) -> str:
        """Name of an identity; its number where the data has no names."""
        names = self.texts("class")
        return str(label) if names is None else names[label]

    def seconds(self) -> NDArray[np.float64]:
        """Durations of recordings, ``[n]``; zero for what cannot be decoded."""
        rates = self.columns["sample_rate"].astype(np.float64)
        found: NDArray[np.float64] = self.columns["num_samples"] / np.maximum(rates, 1.0)
        return found


class OutdatedIndex(DataError):
    """An index that another version of this package wrote."""


def read_index(path: str | Path, root: str | Path | None = None) -> SampleIndex:
    """Map an index into memory, once its bytes agree with the checksums stored in it.

    Args:
        path: Of the index.
        root: The data, where it is not where it was when the index was built.

    Raises:
        OutdatedIndex: Another version of this package wrote it.
        DataError: The file is not an index, or not a whole one.
    """
    index = _mapped(path, root)
    header, first = _header(Path(path))
    with open_regular(path) as file:  # mapped columns would stay in this process's memory
        for name in index.columns:
            begin, end = header[name]["data_offsets"]
            file.seek(first + begin)
            checksum, left = 0, end - begin
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                checksum = zlib.crc32(block, checksum)
                left -= len(block)
            if left or checksum != index.checksums.get(name):
                raise _damaged(Path(path), f"column {name} has changed since it was written")
    return index


def indexed_seconds(path: str | Path) -> dict[str, float]:
    """Durations by name from an index of recordings, without those that cannot be decoded.

    Raises:
        DataError: The file is not an index of recordings, or is damaged.
    """
    index = read_index(path)
    names, errors = index.texts("name"), index.texts("error")
    if index.kind != "recordings" or names is None or errors is None:
        raise DataError(
            f"{path} is an index of {index.kind}; make one of recordings with qmargin data index"
        )
    rows = zip(names, index.seconds().tolist(), errors, strict=True)
    return {name: seconds for name, seconds, error in rows if not error}


def header_checksum(about: dict[str, Any]) -> str:
    """Checksum of what a header says besides its columns, which have their own."""
    texts = [str(about.get(name)) for name in ("qmargin_index", "format", "root", "details")]
    return f"{zlib.crc32(json.dumps(texts).encode()):08x}"


def _mapped(path: str | Path, root: str | Path | None = None) -> SampleIndex:
    """The index without a look at its checksums, as workers map one that is open already."""
    path = Path(path)
    header, first = _header(path)
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or "qmargin_index" not in about:
        raise _damaged(path, "its header is of something else")
    if about["qmargin_index"] != VERSION:
        raise OutdatedIndex(
            f"{path} is not an index of version {VERSION}; build it again with qmargin data index"
        )
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
    if index.kind not in ("images", "recordings"):
        raise _damaged(path, f"it is of {index.kind!r}")
    _check_lengths(path, index)
    return index


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and where the columns begin."""
    with open_regular(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == b'{"format':  # as version 0.1 wrote for recordings
            raise OutdatedIndex(f"{path} is of version 0.1; build it again with qmargin data index")
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
            raise _damaged(path, f"column {name} ends at byte {end} of {size}")
        if count == 0:
            columns[name] = np.empty(0, dtype=dtype)
            continue
        mapped = np.memmap(path, dtype=dtype, mode="r", offset=first + begin, shape=(count,))
        columns[name] = mapped.view(np.ndarray)  # memmap's own indexing is slow
    return columns


def _check_lengths(path: Path, index: SampleIndex) -> None:
    """Columns that belong together have the same length, and texts stay inside their bytes."""
    count = len(index.columns.get("label", ()))
    if count == 0:
        raise _damaged(path, "it has no samples")
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


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not a whole index ({reason}); build it again with qmargin data index"
    )


class IndexWriter(AbstractContextManager["IndexWriter"]):
    """Takes samples one by one; ``finish`` makes the index, and an error leaves nothing behind.

    Args:
        path: The index to write; None to keep it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.num_rows = 0
        self._classes: dict[str, int] = {}  # identities by name, numbered as they come
        self._largest = -1  # of labels that are numbers
        self._path: str | None = None  # of the sample before
        self._num_paths = 0
        self._pending: dict[str, array[Any]] = {}
        self._texts: dict[str, bytearray] = {}
        self._text_bytes: dict[str, int] = {}
        self._spools: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()
        self._folder = ""

    def __enter__(self) -> IndexWriter:
        if self.path is not None:
            self._folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(
        self,
        identity: str | int,
        values: dict[str, Any],
        *,
        name: str | None = None,
        path: str | None = None,
        error: str | None = None,
    ) -> None:
        """Add one sample; all samples have the same columns.

        Args:
            identity: A name, or a label in ``[0, 2**31 - 2]``, which the caller has checked.
            values: Of columns, but for the label and the file.
            name: Of the sample.
            path: Of the file that holds it, if that is neither its name nor the data itself.
            error: Why it cannot be decoded; empty where it can.
        """
        if isinstance(identity, str):
            label = self._classes.setdefault(identity, len(self._classes))
        else:
            label = identity
            if label > self._largest:
                self._largest = label
        if self._classes and self._largest >= 0:
            raise DataError(
                f"sample {name!r} has the identity {identity!r}; give all of them names, or all "
                "numbers"
            )
        if path is not None:
            if path != self._path:
                self._path = path
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
        for name, values in self._pending.items():
            self._spool(name).write(values.tobytes())
            del values[:]
        for name, text in self._texts.items():
            self._spool(name).write(text)
            text.clear()

    def _spool(self, name: str) -> IO[bytes]:
        if name not in self._spools:
            if self._folder:
                file = Path(self._folder, name).open("w+b")  # noqa: SIM115  # closed on leaving
                self._spools[name] = self._stack.enter_context(file)
            else:
                self._spools[name] = BytesIO()
        return self._spools[name]

    def finish(
        self,
        *,
        format: str,
        kind: str,
        root: Path,
        fingerprint: Fingerprint | None = None,
        is_racy: bool = False,
        classes: Iterable[str] = (),
        num_classes: int | None = None,
        notes: Iterable[str] = (),
        folders: Iterable[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> SampleIndex:
        """Join the columns into the index; labels follow the sorted names of the identities.

        Args:
            format: Name of the reader.
            kind: ``"images"`` or ``"recordings"``.
            root: The dataset.
            fingerprint: Of the data as a whole; another one makes the index stale.
            is_racy: Whether the data changed meanwhile.
            classes: Identities that have a label even without a sample.
            num_classes: Where labels are numbers; otherwise one more than the largest.
            notes: What was left out on the way, for people.
            folders: That were listed.
            options: Of the reader.
        """
        if self.num_rows == 0:
            raise DataError(f"{root} has no samples; see the documentation of data formats")
        for name in classes:
            self._classes.setdefault(name, len(self._classes))
        if self._classes:
            names = sorted(self._classes)
            relabel = np.empty(len(names), dtype=np.int32)
            relabel[[self._classes[name] for name in names]] = np.arange(len(names))
            for name in names:
                self._add_text("class", name)
        for name in folders:
            self._add_text("folder", name)
        self._flush()
        if self._classes:
            self._relabel(relabel)
        self._drop_zeros("by_reader")
        found = len(self._classes) or self._largest + 1
        total = found if num_classes is None else num_classes
        columns = sorted(self._spools, key=_order)
        index = SampleIndex(
            path=self.path,
            format=format,
            kind=kind,
            root=root,
            num_classes=total,
            fingerprint=fingerprint,
            is_racy=is_racy,
            notes=tuple(notes),
            options=dict(options or {}),
            columns={},
            checksums={},
        )
        if self.path is not None:
            index.checksums.update({name: self._checksum(name) for name in columns})
            self._write(self.path, index, columns)
            return index
        for name in columns:
            self._spools[name].seek(0)
            dtype = np.dtype(DTYPES[_dtype(name)])
            index.columns[name] = np.frombuffer(self._spools[name].read(), dtype=dtype)
        return index

    def _relabel(self, relabel: NDArray[np.int32]) -> None:
        """Replace labels by others, a block at a time."""
        spool = self._spools["label"]
        for start in range(0, 4 * self.num_rows, _BLOCK_BYTES):
            spool.seek(start)
            labels = np.frombuffer(spool.read(_BLOCK_BYTES), dtype="<i4")
            spool.seek(start)
            spool.write(relabel[labels].astype("<i4").tobytes())

    def _drop_zeros(self, name: str) -> None:
        if name in self._spools and not any(any(block) for block in self._blocks(name)):
            del self._spools[name]

    def _checksum(self, name: str) -> int:
        checksum = 0
        for block in self._blocks(name):
            checksum = zlib.crc32(block, checksum)
        return checksum

    def _blocks(self, name: str) -> Iterator[bytes]:
        spool = self._spools[name]
        spool.seek(0)
        while block := spool.read(_BLOCK_BYTES):
            yield block

    def _write(self, path: Path, index: SampleIndex, names: list[str]) -> None:
        assert index.fingerprint is not None  # of what is written to a file
        details = {
            "kind": index.kind,
            "num_classes": index.num_classes,
            "fingerprint": list(astuple(index.fingerprint)),
            "is_racy": index.is_racy,
            "notes": list(index.notes),
            "options": dict(index.options),
            "crc32": index.checksums,
        }
        about = {
            "qmargin_index": VERSION,
            "format": index.format,
            "root": relative_root(index.root, path),
            "details": json.dumps(details),
        }
        about["crc32"] = header_checksum(about)
        header: dict[str, Any] = {"__metadata__": about}
        position = 0
        for name in names:
            size = self._spools[name].seek(0, os.SEEK_END)
            dtype = _dtype(name)
            count = size // np.dtype(DTYPES[dtype]).itemsize
            end = position + size
            header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with replacing(path) as temporary, temporary.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                for block in self._blocks(name):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())


def relative_root(root: Path, index: Path) -> str:
    """How an index names its data: relative where it lies beside it, so that both can move."""
    root, folder = root.resolve(), index.resolve().parent
    return os.path.relpath(root, folder) if folder in (root.parent, root) else str(root)


def _dtype(name: str) -> str:
    return COLUMNS.get(name) or ("I64" if name.endswith("_end") else "U8")


def _order(name: str) -> tuple[int, str]:
    """The widest first: every column then begins at a multiple of its own width."""
    return -np.dtype(DTYPES[_dtype(name)]).itemsize, name


def parse_label(text: str | float, where: str) -> int:
    r"""A label as an integer in ``[0, 2**31 - 2]``, or ``DataError`` that says where it stands.

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
        raise DataError(
            f"{where}: the label {shown!r} is not an integer in [0, {MAX_LABEL}]; correct it"
        )
    return label
