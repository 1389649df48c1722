"""Builds an index in bounded memory: columns grow in files of their own, joined at the end."""

from __future__ import annotations

import json
import logging
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.fingerprints import Fingerprint
from qmargin.data.index import (
    COLUMNS,
    DTYPES,
    TABLES,
    VERSION,
    header_checksum,
    relative_root,
)
from qmargin.errors import DataError
from qmargin.files import replacing

_CODES = {"I64": "q", "I32": "i", "U32": "I", "U8": "B"}
_FLUSH_ROWS = 1 << 16
_COPY_BYTES = 1 << 22
MAX_LABEL = 2**31 - 2
_log = logging.getLogger("qmargin.data")


@contextmanager
def one_builder(path: Path) -> Iterator[None]:
    """Let one process at a time build an index, while others wait for it.

    It only saves work: an index comes to its place whole, so that several builders would write the
    same file one after the other. That is what happens on a file system without locks.

    Args:
        path: Of the index.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process is building %s; waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.warning("no lock for %s (%s); other processes may build it too", path, error)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


class IndexWriter(AbstractContextManager["IndexWriter"]):
    """Takes samples one by one; ``finish`` makes the file, and an error leaves nothing behind.

    Args:
        path: The index to write.
        columns: Names of the columns that this kind of dataset has.
    """

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self.num_rows = 0
        self.num_classes = 0  # so far: one more than the largest label
        wanted = {*columns, "label"}
        self._texts = {name: bytearray() for name in ("name",) if name in wanted}
        wanted.update(f"{name}_end" for name in self._texts)
        self._names = [name for name in COLUMNS if name in wanted]
        self._pending = {name: _column(COLUMNS[name]) for name in self._names}
        self._name_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._spools: dict[str, IO[bytes]] = {}

    def __enter__(self) -> IndexWriter:
        self._folder = tempfile.TemporaryDirectory(
            prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent
        )
        for name in (*self._names, *self._texts):
            self._open_spool(name)
        return self

    def _open_spool(self, name: str) -> IO[bytes]:
        assert self._folder is not None  # made on entering
        spool: IO[bytes] = Path(self._folder.name, name).open("w+b")  # noqa: SIM115
        self._spools[name] = spool  # closed on leaving
        return spool

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for spool in self._spools.values():
            spool.close()
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, *, label: int, name: str | None = None, **values: int) -> None:
        """One sample; ``label`` must be in ``[0, 2**31 - 2]``, which the caller has checked."""
        pending = self._pending
        pending["label"].append(label)
        if label >= self.num_classes:
            self.num_classes = label + 1
        for column, value in values.items():
            pending[column].append(value)
        if name is not None:
            data = name.encode("utf-8", "surrogateescape")
            self._texts["name"] += data
            self._name_bytes += len(data)
            pending["name_end"].append(self._name_bytes)
        self.num_rows += 1
        if self.num_rows % _FLUSH_ROWS == 0:
            self._flush()

    def _flush(self) -> None:
        for name, values in self._pending.items():
            values.tofile(self._spools[name])
            self._pending[name] = _column(COLUMNS[name])
        for name, text in self._texts.items():
            self._spools[name].write(text)
            text.clear()

    def finish(
        self,
        *,
        format: str,
        root: Path,
        fingerprint: Fingerprint | str,
        num_classes: int | None = None,
        notes: Iterable[str] = (),
        class_names: Iterable[str] | None = None,
        paths: Iterable[str] | None = None,
        folders: Iterable[str] | None = None,
        relabel: NDArray[np.int32] | None = None,
    ) -> None:
        """Join the columns into the index.

        Args:
            format: Kind of dataset.
            root: The dataset.
            fingerprint: Of the data as a whole; another one makes the index stale.
            num_classes: Where it is known; otherwise one more than the largest label.
            notes: What was left out on the way, for people.
            class_names: By label.
            paths: Of the files that hold the samples.
            folders: That were listed.
            relabel: New label of each label that was added.
        """
        if self.num_rows == 0:
            raise DataError(f"{root} has no samples; see the documentation of data formats")
        self._flush()
        if relabel is not None:
            self._relabel(relabel)
        for name, texts in zip(TABLES[1:], (class_names, paths, folders), strict=True):
            if texts is not None:
                self._spool_texts(name, texts)
        names = sorted(self._spools, key=_order)
        details = {
            "num_classes": self.num_classes if num_classes is None else num_classes,
            "fingerprint": str(fingerprint),
            "is_racy": isinstance(fingerprint, Fingerprint) and fingerprint.is_racy,
            "notes": list(notes),
            "crc32": {name: self._checksum(name) for name in names},
        }
        about = {
            "qmargin_index": VERSION,
            "format": format,
            "root": relative_root(root, self.path),
            "details": json.dumps(details),
        }
        about["crc32"] = header_checksum(about)
        self._join(names, about)

    def _relabel(self, relabel: NDArray[np.int32]) -> None:
        """Replace labels by others, a block at a time."""
        spool = self._spools["label"]
        for start in range(0, 4 * self.num_rows, _COPY_BYTES):
            spool.seek(start)
            labels = np.frombuffer(spool.read(_COPY_BYTES), dtype="<i4")
            spool.seek(start)
            spool.write(relabel[labels].astype("<i4").tobytes())

    def _spool_texts(self, name: str, texts: Iterable[str]) -> None:
        ends, total, spool = array("q"), 0, self._open_spool(name)
        for text in texts:
            total += spool.write(text.encode("utf-8", "surrogateescape"))
            ends.append(total)
        ends.tofile(self._open_spool(f"{name}_end"))

    def _checksum(self, name: str) -> int:
        checksum = 0
        for block in self._blocks(name):
            checksum = zlib.crc32(block, checksum)
        return checksum

    def _blocks(self, name: str) -> Iterator[bytes]:
        spool = self._spools[name]
        spool.seek(0)
        while block := spool.read(_COPY_BYTES):
            yield block

    def _join(self, names: list[str], about: dict[str, str]) -> None:
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
        with replacing(self.path) as temporary, temporary.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                for block in self._blocks(name):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())


def _column(dtype: str) -> array[int]:
    return array(_CODES[dtype])


def _dtype(name: str) -> str:
    if name in COLUMNS:
        return COLUMNS[name]
    return "U8" if name in TABLES else "I64"


def _order(name: str) -> tuple[int, str]:
    """The widest first: every column then begins at a multiple of its own width."""
    return -np.dtype(DTYPES[_dtype(name)]).itemsize, name


class ClassNames:
    """Identities by name: numbered as they come, and in the order of their names at the end.

    Examples:
        >>> classes = ClassNames()
        >>> [classes.number(name) for name in ("bea", "ada", "bea")]
        [0, 1, 0]
        >>> names, relabel = classes.sorted()
        >>> names, relabel.tolist()
        (['ada', 'bea'], [1, 0])
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The number of a name, which is new or known."""
        return self._numbers.setdefault(name, len(self._numbers))

    def sorted(self) -> tuple[list[str], NDArray[np.int32]]:
        """All names in order, and the place of each number in it."""
        names = sorted(self._numbers)
        relabel = np.empty(len(names), dtype=np.int32)
        relabel[[self._numbers[name] for name in names]] = np.arange(len(names), dtype=np.int32)
        return names, relabel


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
