"""Columns of a text file as arrays, a chunk of lines at a time; errors name the line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qmargin.errors import DataError
from qmargin.evaluation.keys import KeyTable
from qmargin.evaluation.layouts import LABEL_WORDS, LABELS, MAX_LINE_BYTES, Layout, is_number
from qmargin.files import Progress, open_regular

BLOCK = 1 << 22  # elements: so large a block of scores goes back to the system when it is freed
_CHUNK_BYTES = 1 << 18  # lists of the cells stay in the cache: twice as fast as 1 << 22
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Columns:
    """What ``read_columns`` found.

    Attributes:
        arrays: By the column's name: float64 scores, bool labels, int32 codes of names.
        keys: Numbers of enrol and test names.
        subjects: Numbers of subjects.
        sha256: Of the file's bytes.
    """

    def __init__(self) -> None:
        self.keys = KeyTable()
        self.subjects = KeyTable()
        self.sha256 = ""
        self.arrays: dict[str, NDArray[Any]] = {}

    def converter(self, name: str) -> Callable[[Sequence[bytes]], NDArray[Any]]:
        """What turns cells of a column into an array."""
        table = self.subjects if name.endswith("_subject") else self.keys
        return {"score": _scores, "label": _labels}.get(name, table.codes)


class Growing:
    """An array that grows: blocks until the end, then one array, never both.

    Args:
        dtype: Of its elements.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._blocks: list[NDArray[Any]] = []
        self._free = 0  # elements of the last block that are not in use

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK - self._free

    def append(self, values: NDArray[Any]) -> None:
        """Add values at the end."""
        while len(values):
            if not self._free:
                self._blocks.append(np.empty(BLOCK, self._dtype))
                self._free = BLOCK
            taken = values[: self._free]
            start = BLOCK - self._free
            self._blocks[-1][start : start + len(taken)] = taken
            self._free -= len(taken)
            values = values[len(taken) :]

    def move_to(self, target: NDArray[Any]) -> None:
        """Fill an array of the right length; each block is freed when it was copied."""
        start, self._free = 0, 0
        for place in range(len(self._blocks)):
            block, self._blocks[place] = self._blocks[place], np.empty(0)
            taken = block[: len(target) - start]
            target[start : start + len(taken)] = taken
            start += len(taken)
        self._blocks = []

    def array(self) -> NDArray[Any]:
        """All values; nothing is left here."""
        whole = np.empty(len(self), self._dtype)
        self.move_to(whole)
        return whole


class SplitScores:
    """Scores without names while they are read: genuine and impostor ones in arrays of their own.

    Nothing but the label tells such trials apart, so the genuine ones may come first.
    """

    def __init__(self) -> None:
        self._sides = Growing(np.float64), Growing(np.float64)

    def append(self, scores: NDArray[Any], is_genuine: NDArray[np.bool_]) -> None:
        """Add trials."""
        self._sides[0].append(scores[is_genuine])
        self._sides[1].append(scores[~is_genuine])

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Scores and labels, the genuine ones first, each kind in its order."""
        sizes = [len(side) for side in self._sides]
        scores = np.empty(sum(sizes))
        self._sides[0].move_to(scores[: sizes[0]])
        self._sides[1].move_to(scores[sizes[0] :])
        return scores, np.repeat([True, False], sizes)


class _BadCell(Exception):
    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def read_columns(path: str | Path, layout: Layout, progress: Progress | None = None) -> Columns:
    """Read a whole text file.

    Scores and labels without names are arranged: the genuine ones come first.

    Args:
        path: The file.
        layout: What its columns mean.
        progress: Called with the bytes read and the bytes of the file.
    """
    columns, sink = Columns(), _sink(layout)
    digest = hashlib.sha256()
    total = Path(path).stat().st_size
    with open_regular(path) as file:
        number = 1
        for chunk in _whole_lines(file, path):
            digest.update(chunk)
            lines = _without_mark(chunk, number).splitlines()
            _add_chunk(path, layout, columns, sink, lines, number)
            number += len(lines)
            if progress is not None:
                progress(file.tell(), total)
    columns.sha256 = digest.hexdigest()
    columns.arrays = sink.arrays()
    if not len(next(iter(columns.arrays.values()))):
        raise DataError(f"{path} has no trials: it needs at least one line of them")
    return columns


class _Columns:
    """Columns of named trials while they are read."""

    def __init__(self, names: Iterable[str]) -> None:
        dtypes = {"score": np.float64, "label": np.bool_}
        self._columns = {name: Growing(dtypes.get(name, np.int32)) for name in names}

    def append(self, chunk: dict[str, NDArray[Any]]) -> None:
        for name, values in chunk.items():
            self._columns[name].append(values)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: column.array() for name, column in self._columns.items()}


class _Nameless:
    """Columns of scores and labels alone."""

    def __init__(self) -> None:
        self._split = SplitScores()

    def append(self, chunk: dict[str, NDArray[Any]]) -> None:
        self._split.append(chunk["score"], chunk["label"])

    def arrays(self) -> dict[str, NDArray[Any]]:
        scores, is_genuine = self._split.arrays()
        return {"score": scores, "label": is_genuine}


def _sink(layout: Layout) -> _Columns | _Nameless:
    names = [name for name in layout.columns if name is not None]
    return _Nameless() if set(names) == {"score", "label"} else _Columns(names)


def _without_mark(chunk: bytes, number: int) -> bytes:
    return chunk.removeprefix(_BYTE_ORDER_MARK) if number == 1 else chunk


def _whole_lines(file: BinaryIO, path: str | Path) -> Iterator[bytes]:
    """Chunks that end where a line does."""
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end == 0 and len(rest) > MAX_LINE_BYTES:
            raise DataError(
                f"{path} has a line longer than {MAX_LINE_BYTES:,} bytes: is this a text file?"
            )
        if end == 0:
            rest += chunk
            continue
        yield rest + chunk[:end]
        rest = chunk[end:]
    if rest:
        yield rest


def _add_chunk(
    path: str | Path,
    layout: Layout,
    columns: Columns,
    sink: _Columns | _Nameless,
    lines: list[bytes],
    number: int,
) -> None:
    """Convert the cells of some lines, the first of which has the given number."""
    rows, numbers = _rows(path, layout, lines, number)
    if layout.has_header and number == 1 and rows:
        rows, numbers = rows[1:], numbers[1:]
    if not rows:
        return
    chunk: dict[str, NDArray[Any]] = {}
    for name, cells in zip(layout.columns, zip(*rows, strict=True), strict=True):
        if name is None:
            continue
        try:
            if b"" in cells:
                raise _BadCell(cells.index(b""), f"the {name} is empty")
            chunk[name] = columns.converter(name)(cells)
        except _BadCell as error:
            raise DataError(f"{path}, line {numbers[error.place]}: {error}") from None
    sink.append(chunk)


def _rows(
    path: str | Path, layout: Layout, lines: list[bytes], number: int
) -> tuple[list[list[bytes]], Sequence[int]]:
    """Cells of every line that is not blank, and the lines' numbers."""
    width = len(layout.columns)
    rows = _fast_rows(layout, lines)
    numbers: Sequence[int] = range(number, number + len(lines))
    if set(map(len, rows)) == {width}:
        return rows, numbers
    kept = [(at, line) for at, line in zip(numbers, lines, strict=True) if line.strip()]
    rows = []
    for at, line in kept:
        cells = layout.split(line)
        if len(cells) != width:
            raise DataError(
                f"{path}, line {at}: {len(cells)} columns where {width} are needed: {_shown(line)}"
            )
        rows.append(cells)
    return rows, [at for at, _ in kept]


def _fast_rows(layout: Layout, lines: list[bytes]) -> list[list[bytes]]:
    """Cells of every line, split by one call per line where nothing needs care."""
    if layout.delimiter is None:
        return list(map(bytes.split, lines))
    joined = b"\n".join(lines)
    if b'"' in joined or b" " in joined:
        return list(map(layout.split, lines))
    return list(map(methodcaller("split", layout.delimiter.encode()), lines))


def _scores(cells: Sequence[bytes]) -> NDArray[Any]:
    try:
        scores = np.fromiter(map(float, cells), np.float64, count=len(cells))
    except ValueError:
        scores = np.full(len(cells), np.nan)  # the search below finds the culprit
    if b"_" not in b"".join(cells) and not np.isnan(scores).any():
        return scores
    for place, cell in enumerate(cells):
        if not is_number(cell):
            raise _BadCell(place, f"the score {_shown(cell)} is not a number")
        if np.isnan(float(cell)):
            raise _BadCell(place, "the score is NaN: no trial may be without a score")
    return np.array([float(cell) for cell in cells])


class _Labels(dict[bytes, bool]):
    """Labels by their words, in any case."""

    def __missing__(self, cell: bytes) -> bool:
        lowered = cell.lower()
        if lowered == cell:
            raise KeyError(cell)
        return self[lowered]


def _labels(cells: Sequence[bytes]) -> NDArray[Any]:
    words = _Labels(LABELS)
    try:
        return np.fromiter(map(words.__getitem__, cells), np.bool_, count=len(cells))
    except KeyError:
        place = next(i for i, cell in enumerate(cells) if cell.lower() not in LABELS)
        message = f"the label {_shown(cells[place])} is not one of {LABEL_WORDS}"
        raise _BadCell(place, message) from None


def _shown(cell: bytes) -> str:
    text = cell.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 60 else text[:57] + "...")


def line_of_row(path: str | Path, layout: Layout, row: int) -> int:
    """The number of the line that holds a row, found by reading the file again."""
    row += layout.has_header
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            row -= bool(line.strip())
            if row < 0:
                return number
    raise DataError(f"{path} was changed while it was read: read it again")
