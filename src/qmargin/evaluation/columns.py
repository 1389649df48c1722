"""Columns of a text file as arrays, a chunk of lines at a time; errors name the line."""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Source
from qmargin.files import Progress, open_regular, sha256_of

Codes = NDArray[np.int32]
BLOCK = 1 << 22  # elements: so large a block of scores goes back to the system when it is freed
_CHUNK_BYTES = 1 << 18  # lists of the cells stay in the cache: twice as fast as 1 << 22
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SCORE_LAYOUTS = {  # the first two are the orders of WeSpeaker, and of SpeechBrain and 3D-Speaker
    "enrol-test-score-label": ("enrol", "test", "score", "label"),
    "enrol-test-label-score": ("enrol", "test", "label", "score"),
    "enrol-test-score": ("enrol", "test", "score"),
    "score-label": ("score", "label"),
    "label-score": ("label", "score"),
}
TRIAL_LAYOUTS = {
    "enrol-test-label": ("enrol", "test", "label"),  # Kaldi
    "label-enrol-test": ("label", "enrol", "test"),  # VoxCeleb
    "enrol-test": ("enrol", "test"),
}
_LABELS = {
    True: ("1", "target", "true", "same", "genuine"),
    False: ("0", "nontarget", "false", "different", "impostor"),
}
LABELS = {word.encode(): label for label, words in _LABELS.items() for word in words}
LABEL_WORDS = "1/0, target/nontarget, true/false, same/different, genuine/impostor"
_ALIASES = {
    "enrol": "enroll enrolment enrollment reference model key1 id1 path1 file1 left",
    "test": "probe query key2 id2 path2 file2 right",
    "score": "scores similarity cosine llr",
    "label": "labels target is_target is_genuine genuine same issame is_same match",
    "enrol_subject": "enroll_subject enrol_speaker enroll_speaker subject1 speaker1 identity1",
    "test_subject": "test_speaker probe_subject subject2 speaker2 identity2",
}
HEADER_NAMES = {
    alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases.split())
}
MAX_LINE_BYTES = 1 << 20
_HEADS = ("subject", "speaker", "identity", "key", "file", "utterance", "name", "utt", "id")


@dataclass(frozen=True)
class Layout:
    """Names of the columns, None for one that is not used; no delimiter means white space."""

    columns: tuple[str | None, ...]
    delimiter: str | None
    has_header: bool = False

    def split(self, line: bytes) -> list[bytes]:
        """Cells of one line."""
        if self.delimiter is None:
            return line.split()
        if b'"' in line:
            return _split_quoted(line, self.delimiter)
        return [cell.strip() for cell in line.split(self.delimiter.encode())]


def _split_quoted(line: bytes, delimiter: str) -> list[bytes]:
    text = line.decode("utf-8", "surrogateescape")
    try:
        rows = list(csv.reader([text], delimiter=delimiter, strict=True, skipinitialspace=True))
    except csv.Error:  # a quote without its partner: too few columns for any layout
        return [line]
    return [cell.strip().encode("utf-8", "surrogateescape") for cell in rows[0]]


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, without their ends and a byte-order mark."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes: "
                    "is this a text file?"
                )
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line := line.strip():
                yield number, line


def text_of(content: bytes, where: str) -> str:
    """Names and the like as text; what is not UTF-8 would be merged with its kind.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {content[:60]!r} is not UTF-8: convert the file") from error


def refuse_semicolons(cells: Sequence[bytes], where: str) -> None:
    """Raise where a line is one cell because its columns are separated by semicolons."""
    if len(cells) == 1 and b";" in cells[0]:
        raise DataError(
            f"{where}: the columns are separated by semicolons; separate them by commas or tabs"
        )


def read_mapping(path: str | Path, *, role: str) -> tuple[dict[str, str], Source]:
    """Read two columns: a name and what it belongs to, such as ``utt2spk`` or ``subject,group``.

    A first line such as ``subject,group`` is a header.

    Raises:
        DataError: A line has not two columns, or gives a name again with another value.
    """
    mapping: dict[str, str] = {}
    delimiter: str | None = None
    for place, (number, line) in enumerate(numbered_lines(path)):
        text = text_of(line, f"{path}, line {number}")
        if place == 0:
            delimiter = next((each for each in ("\t", ",") if each in text), None)
        layout = Layout((), delimiter)
        raw = layout.split(line)
        cells = [cell.decode("utf-8") for cell in raw]
        refuse_semicolons(raw, f"{path}, line {number}")
        if place == 0 and cells[0].lower() in _HEADS:
            continue
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{path}, line {number}: {text[:80]!r} is not a name and a {role[:-1]}")
        if mapping.setdefault(cells[0], cells[1]) != cells[1]:
            raise DataError(
                f"{path}, line {number}: {cells[0]!r} is {cells[1]!r}, but was "
                f"{mapping[cells[0]]!r} before: remove one"
            )
    if not mapping:
        raise DataError(f"{path} is empty: it needs lines of a name and a {role[:-1]}")
    return mapping, Source(str(path), sha256_of(path), role)


def find_layout(
    path: str | Path,
    layouts: Mapping[str, tuple[str, ...]],
    *,
    required: tuple[str, ...],
    format: str = "auto",
) -> Layout:
    """The layout of a file.

    Args:
        path: A text file.
        layouts: Those that a file without a header may have, by their names.
        required: Columns that a header must name.
        format: A name of ``layouts``, ``"csv"`` or ``"tsv"`` (a header is needed), or ``"auto"``:
            a header is recognised by its names, and without one the lines are read until they fit
            one layout only.
    """
    if format not in ("auto", "csv", "tsv", *layouts):
        known = ", ".join(["auto", "csv", "tsv", *layouts])
        raise ConfigError(f"format {format!r} is not known for {path}: choose one of {known}")
    first = next(numbered_lines(path), None)
    if first is None:
        raise DataError(f"{path} is empty: it needs at least one trial")
    delimiter = {"csv": ",", "tsv": "\t"}.get(format) or _delimiter(path, first[1])
    cells = Layout((), delimiter).split(first[1])
    refuse_semicolons(cells, f"{path}, line {first[0]}")
    if format in layouts:
        return Layout(layouts[format], delimiter)
    if format in ("csv", "tsv") or _is_header(cells, required):
        return _header_layout(path, first[0], cells, delimiter, required)
    fitting = {name: columns for name, columns in layouts.items() if len(columns) == len(cells)}
    return Layout(_fitting_columns(path, fitting, delimiter, layouts), delimiter)


def _delimiter(path: str | Path, line: bytes) -> str | None:
    """Tabs before commas before white space; a comma inside a name of a spaced line is no comma."""
    if b"\t" in line:
        return "\t"
    is_table = str(path).lower().endswith(".csv") or len(line.split()) == 1
    return "," if b"," in line and (is_table or b", " in line) else None


def _known_names(cells: Sequence[bytes]) -> list[str | None]:
    texts = [cell.decode("utf-8", "replace").lower().replace(" ", "_") for cell in cells]
    return [HEADER_NAMES.get(text) for text in texts]


def _is_header(cells: Sequence[bytes], required: tuple[str, ...]) -> bool:
    names = _known_names(cells)
    return sum(name is not None for name in names) >= 2 and any(name in names for name in required)


def _header_layout(
    path: str | Path,
    number: int,
    cells: Sequence[bytes],
    delimiter: str | None,
    required: tuple[str, ...],
) -> Layout:
    names = _known_names(cells)
    shown = ", ".join(cell.decode("utf-8", "replace") for cell in cells)
    for name in required:
        if name not in names:
            raise DataError(
                f"{path}, line {number}: the header has no column {name!r}, only {shown}"
            )
    for known in names:
        if known is not None and names.count(known) > 1:
            raise DataError(
                f"{path}, line {number}: the header {shown} has two columns for {known!r}: "
                "rename one"
            )
    if ("enrol" in names) != ("test" in names):
        raise DataError(
            f"{path}, line {number}: the header {shown} has one of enrol and test: name both"
        )
    return Layout(tuple(names), delimiter, has_header=True)


def _fitting_columns(
    path: str | Path,
    fitting: dict[str, tuple[str, ...]],
    delimiter: str | None,
    layouts: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    splitter = Layout((), delimiter)
    for number, line in numbered_lines(path):
        if len(fitting) == 1:
            break
        cells = splitter.split(line)
        still = {
            name: columns
            for name, columns in fitting.items()
            if len(cells) == len(columns) and all(map(_may_be, columns, cells))
        }
        if not still:
            raise DataError(
                f"{path}, line {number}: {len(cells)} columns that are none of "
                f"{', '.join(fitting or layouts)} (labels are {LABEL_WORDS}); a file with other "
                "columns needs a header"
            )
        fitting = still
    if len(fitting) > 1:
        raise DataError(
            f"{path} can be read as {' or as '.join(fitting)}, because both columns hold nothing "
            f"but 0 and 1: say which with --format"
        )
    return next(iter(fitting.values()))


def _may_be(column: str, cell: bytes) -> bool:
    checks: dict[str, Callable[[bytes], bool]] = {
        "score": is_number,
        "label": lambda cell: cell.lower() in LABELS,
    }
    return column not in checks or checks[column](cell)


def is_number(cell: bytes) -> bool:
    """Whether Python reads a cell as a float; digits grouped by ``_`` are refused."""
    try:
        float(cell)
    except ValueError:
        return False
    return b"_" not in cell


class KeyTable:
    """Numbers names in the order in which they are met.

    Examples:
        >>> table = KeyTable()
        >>> table.codes([b"ann", b"bob", b"ann"]).tolist()
        [0, 1, 0]
        >>> table.names
        [b'ann', b'bob']
    """

    def __init__(self) -> None:
        self._codes: defaultdict[bytes, int] = defaultdict(count().__next__)

    def codes(self, column: Sequence[bytes]) -> Codes:
        """The number of every name of a column, ``[n]``."""
        return np.fromiter(map(self._codes.__getitem__, column), np.int32, count=len(column))

    @property
    def names(self) -> list[bytes]:
        """Names by their number."""
        return list(self._codes)


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
