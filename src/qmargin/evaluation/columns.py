"""Columns of a text file as arrays, a chunk of lines at a time; errors name the line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.keys import KeyTable
from qmargin.evaluation.layouts import LABEL_WORDS, LABELS, MAX_LINE_BYTES, Layout, is_number
from qmargin.files import Progress, open_regular

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


class _BadCell(Exception):
    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def read_columns(path: str | Path, layout: Layout, progress: Progress | None = None) -> Columns:
    """Read a whole text file.

    Args:
        path: The file.
        layout: What its columns mean.
        progress: Called with the bytes read and the bytes of the file.
    """
    columns, parts = Columns(), _parts(layout)
    digest = hashlib.sha256()
    total = Path(path).stat().st_size
    with open_regular(path) as file:
        number = 1
        for chunk in _whole_lines(file, path):
            digest.update(chunk)
            lines = _without_mark(chunk, number).splitlines()
            _add_chunk(path, layout, columns, parts, lines, number)
            number += len(lines)
            if progress is not None:
                progress(file.tell(), total)
    if not next(iter(parts.values())):
        raise DataError(f"{path} has no trials: it needs at least one line of them")
    columns.sha256 = digest.hexdigest()
    columns.arrays = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return columns


def _parts(layout: Layout) -> dict[str, list[NDArray[Any]]]:
    return {name: [] for name in layout.columns if name is not None}


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
    parts: dict[str, list[NDArray[Any]]],
    lines: list[bytes],
    number: int,
) -> None:
    """Convert the cells of some lines, the first of which has the given number."""
    rows, numbers = _rows(path, layout, lines, number)
    if layout.has_header and number == 1 and rows:
        rows, numbers = rows[1:], numbers[1:]
    if not rows:
        return
    for name, cells in zip(layout.columns, zip(*rows, strict=True), strict=True):
        if name is None:
            continue
        try:
            if b"" in cells:
                raise _BadCell(cells.index(b""), f"the {name} is empty")
            parts[name].append(columns.converter(name)(cells))
        except _BadCell as error:
            raise DataError(f"{path}, line {numbers[error.place]}: {error}") from None


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
