"""One file that says where every sample of a dataset is, with its label and a checksum.

The file has the layout of safetensors: a JSON header, then plain columns. They are mapped into
memory, not read, so that 42 million samples open at once and are shared by all workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.files import open_regular

VERSION: Final = "2"
SUFFIX: Final = ".qmindex"
MAX_HEADER_BYTES: Final = 1 << 20
_log = logging.getLogger("qmargin.data")
_READ_BYTES: Final = 1 << 22
MAX_SAMPLE_BYTES: Final = 1 << 26  # one image; what claims to be larger is damaged
DTYPES: Final = {"I64": "<i8", "I32": "<i4", "U32": "<u4", "U8": "u1"}
COLUMNS: Final = {  # of one row per sample; the largest first, so that all are aligned
    "offset": "I64",  # of the bytes in their file; of the record, where that is split
    "key": "I64",  # of a record; the row of a manifest; where a tar has the label
    "name_end": "I64",
    "length": "U32",
    "checksum": "U32",  # CRC-32 of the bytes
    "file": "U32",
    "label": "I32",
    "is_split": "U8",
}
TABLES: Final = (
    "name",
    "class",
    "path",
    "folder",
)  # texts: bytes one after the other, and where each ends


@dataclass(frozen=True)
class Texts:
    """Many texts in two columns."""

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]

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
class Index:
    """An index as it is on the disk; see ``read_index``.

    A column that all samples agree on, such as the file of a dataset in one file, is left out.
    """

    path: Path
    format: str  # "recordio", "folder", "tar" or "manifest"
    root: Path  # what the names in the index are relative to, or the file itself
    num_classes: int
    fingerprint: str
    is_racy: bool  # the data changed while it was built: it is not trusted again
    notes: tuple[str, ...]
    columns: dict[str, NDArray[Any]]
    checksums: dict[str, int]

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.path, self.root)  # a worker maps the file itself

    @property
    def names(self) -> Texts | None:
        """Names of the samples, where they have names."""
        return self._texts("name")

    @property
    def class_names(self) -> Texts | None:
        """Names of the identities by label, where they have names."""
        return self._texts("class")

    @property
    def paths(self) -> Texts | None:
        """Files that hold the samples, for datasets of several."""
        return self._texts("path")

    @property
    def folders(self) -> Texts | None:
        """Folders that were listed, relative to the root, where each image is a file."""
        return self._texts("folder")

    def _texts(self, name: str) -> Texts | None:
        if name not in self.columns:
            return None
        return Texts(self.columns[name], self.columns[f"{name}_end"])


def default_index(path: Path) -> Path:
    """Where the index of a dataset is looked for: beside it.

    Examples:
        >>> default_index(Path("data/train.rec")).as_posix()
        'data/train.rec.qmindex'
    """
    return path.with_name(path.name + SUFFIX)


def index_place(data: Path, folder: str | Path | None = None) -> Path:
    """In a folder if one is given, or else beside the data, or in the cache where that is locked.

    Args:
        data: The dataset, as an absolute path: names in a folder tell its namesakes apart.
        folder: Where indices go.

    Raises:
        DataError: There is no such folder.
    """
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:24]
    if folder is not None:
        if not Path(folder).is_dir():
            raise DataError(f"index_dir is {str(folder)!r}, which is not a folder; make it first")
        return Path(folder) / f"{data.name}.{digest[:12]}{SUFFIX}"
    beside = default_index(data)
    if beside.exists() or os.access(beside.parent, os.W_OK):
        return beside
    cache = Path.home() / ".cache" / "qmargin"
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{digest}{SUFFIX}"


def announce(data: object, place: Path) -> None:
    """Announce an index that is written without being asked for."""
    _log.warning(
        "writing the index of %s to %s; index_dir (--index-dir) puts it elsewhere", data, place
    )


def read_index(path: str | Path, root: str | Path | None = None) -> Index:
    """Map an index into memory, once its bytes agree with the checksums stored in it.

    Args:
        path: Of the index.
        root: The data, where it is not where it was when the index was built.

    Raises:
        OutdatedIndex: Another version of this package wrote it.
        DataError: The file is not an index, or not a whole one.
    """
    index = _mapped(path, root)
    for name in damaged_columns(index):
        raise _damaged(index.path, f"column {name} has changed since it was written")
    return index


class OutdatedIndex(DataError):
    """An index that another version of this package wrote."""


def damaged_columns(index: Index) -> tuple[str, ...]:
    """Columns of an index whose bytes are not those that were written.

    The file is read, not the mapped columns: those would stay in this process's memory.
    """
    header, first = _header(index.path)
    found = []
    with open_regular(index.path) as file:
        for name in index.columns:
            begin, end = header[name]["data_offsets"]
            file.seek(first + begin)
            checksum, left = 0, end - begin
            while left > 0 and (block := file.read(min(left, _READ_BYTES))):
                checksum = zlib.crc32(block, checksum)
                left -= len(block)
            if left or checksum != index.checksums.get(name):
                found.append(name)
    return tuple(found)


def header_checksum(about: dict[str, Any]) -> str:
    """Checksum of what a header says besides its columns, which have their own."""
    texts = [str(about.get(name)) for name in ("qmargin_index", "format", "root", "details")]
    return f"{zlib.crc32(json.dumps(texts).encode()):08x}"


def _mapped(path: str | Path, root: str | Path | None = None) -> Index:
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
        columns = _map_columns(path, header, first)
        details = json.loads(about["details"])
        index = Index(
            path=path,
            format=str(about["format"]),
            root=Path(root) if root is not None else path.parent / about["root"],
            num_classes=int(details["num_classes"]),
            fingerprint=str(details["fingerprint"]),
            is_racy=bool(details["is_racy"]),
            notes=tuple(map(str, details["notes"])),
            columns=columns,
            checksums={str(key): int(value) for key, value in details["crc32"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    _check_lengths(index)
    return index


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and where the columns begin."""
    with open_regular(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
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


def _check_lengths(index: Index) -> None:
    """Columns that belong together have the same length, and texts stay inside their bytes."""
    count = len(index.columns.get("label", ()))
    if count == 0:
        raise _damaged(index.path, "it has no samples")
    for name, column in index.columns.items():
        if name in COLUMNS and len(column) != count:
            raise _damaged(index.path, f"{len(column)} of {name} for {count} samples")
    for name in TABLES:
        if (name in index.columns) != (f"{name}_end" in index.columns):
            raise _damaged(index.path, f"half of the texts {name}")
        texts = index._texts(name)
        if texts is not None and len(texts) and int(texts.ends[-1]) != len(texts.data):
            raise _damaged(index.path, f"texts {name} end outside their bytes")
    if index.class_names is not None and len(index.class_names) != index.num_classes:
        raise _damaged(index.path, f"{len(index.class_names)} names of {index.num_classes} classes")


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not a whole index ({reason}); build it again with qmargin data index"
    )


def relative_root(root: Path, index: Path) -> str:
    """How an index names its data: relative where it lies beside it, so that both can move."""
    root, folder = root.resolve(), index.resolve().parent
    return os.path.relpath(root, folder) if folder in (root.parent, root) else str(root)
