"""Columns of a text file as arrays, a chunk of lines at a time; errors name the line."""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
Where = Callable[[int], str]  # row to "file, line n", for messages
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
_DTYPES = {"score": np.float64, "label": np.bool_}  # other columns are codes of names
MAX_LINE_BYTES = 1 << 20
_HEADS = ("subject", "speaker", "identity", "key", "file", "utterance", "name", "utt", "id")


@dataclass(frozen=True)
class Layout:
    """Names of the columns, None for unused ones; no delimiter means white space."""

    columns: tuple[str | None, ...]
    delimiter: str | None
    has_header: bool = False

    def split(self, line: bytes) -> list[bytes]:
        """Cells of one line."""
        if self.delimiter is None:
            return line.split()
        if b'"' not in line:
            return [cell.strip() for cell in line.split(self.delimiter.encode())]
        text = [line.decode("utf-8", "surrogateescape")]
        try:
            (cells,) = csv.reader(
                text, delimiter=self.delimiter, strict=True, skipinitialspace=True
            )
        except csv.Error:  # a quote without its partner: too few columns for any layout
            return [line]
        return [cell.strip().encode("utf-8", "surrogateescape") for cell in cells]


def first_row(is_wanted: Any) -> int | None:
    """Place of the first True, or None."""
    place = int(np.argmax(is_wanted)) if len(is_wanted) else 0
    return place if len(is_wanted) and is_wanted[place] else None


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, without their ends and a byte-order mark."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes: is it text?"
                )
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line := line.strip():
                yield number, line


def text_of(content: bytes, where: str) -> str:
    """Names as text; ``DataError`` where they are not UTF-8, which would merge different names."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {content[:60]!r} is not UTF-8: convert the file") from error


def _refuse_semicolons(cells: Sequence[bytes], where: str) -> None:
    if len(cells) == 1 and b";" in cells[0]:
        raise DataError(f"{where}: columns are separated by semicolons: use commas or tabs")


def read_mapping(path: str | Path, *, role: str) -> tuple[dict[str, str], Source]:
    """Read two columns: a name and its value, such as ``utt2spk`` or ``subject,group``.

    A first line such as ``subject,group`` is a header. A name with two values is a ``DataError``.
    """
    mapping: dict[str, str] = {}
    layout = None
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        text, is_first = text_of(line, where), layout is None
        if layout is None:
            layout = Layout((), next((each for each in ("\t", ",") if each in text), None))
        raw = layout.split(line)
        _refuse_semicolons(raw, where)
        cells = [cell.decode("utf-8") for cell in raw]
        if is_first and cells[0].lower() in _HEADS:
            continue
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{where}: {text[:80]!r} is not a name and a {role[:-1]}")
        name, value = cells
        if mapping.setdefault(name, value) != value:
            raise DataError(
                f"{where}: {name!r} is {value!r}, but was {mapping[name]!r} before: remove one"
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
    """The layout of a file: a name of ``layouts``, or detected.

    A header is recognised by its names, ``required`` ones among them; ``"csv"`` and ``"tsv"`` need
    one. Without a header the lines are read until they fit one layout only.
    """
    known = ("auto", "csv", "tsv", *layouts)
    if format not in known:
        raise ConfigError(f"format {format!r} is not known: choose one of {', '.join(known)}")
    number, line = next(numbered_lines(path), (0, b""))
    if not number:
        raise DataError(f"{path} is empty: it needs at least one trial")
    delimiter = {"csv": ",", "tsv": "\t"}.get(format) or _delimiter(path, line)
    cells = Layout((), delimiter).split(line)
    _refuse_semicolons(cells, f"{path}, line {number}")
    if format in layouts:
        return Layout(layouts[format], delimiter)
    texts = [cell.decode("utf-8", "replace") for cell in cells]
    names = [HEADER_NAMES.get(text.lower().replace(" ", "_")) for text in texts]
    is_header = len(names) - names.count(None) >= 2 and any(name in names for name in required)
    if format == "auto" and not is_header:
        return Layout(_fitting_columns(path, len(cells), delimiter, layouts), delimiter)
    header = f"{path}, line {number}: the header {', '.join(texts)}"
    for name in required:
        if name not in names:
            raise DataError(f"{header} has no column {name!r}: add it")
    for name in filter(None, names):
        if names.count(name) > 1:
            raise DataError(f"{header} has two columns for {name!r}: rename one")
    if ("enrol" in names) != ("test" in names):
        raise DataError(f"{header} has one of enrol and test: name both")
    return Layout(tuple(names), delimiter, has_header=True)


def _delimiter(path: str | Path, line: bytes) -> str | None:
    """Tabs before commas before white space; commas in names of a spaced line do not count."""
    if b"\t" in line:
        return "\t"
    is_table = str(path).lower().endswith(".csv") or len(line.split()) == 1
    return "," if b"," in line and (is_table or b", " in line) else None


def _fitting_columns(
    path: str | Path, width: int, delimiter: str | None, layouts: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Columns of the only layout that fits the lines of a file."""
    splitter = Layout((), delimiter)
    fitting = {name: columns for name, columns in layouts.items() if len(columns) == width}
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
        raise DataError(f"{path} can be read as {' or as '.join(fitting)}: choose by --format")
    return next(iter(fitting.values()))


def _may_be(column: str, cell: bytes) -> bool:
    if column == "score":
        return _is_number(cell)
    return column != "label" or cell.lower() in LABELS


def _is_number(cell: bytes) -> bool:
    """Whether Python reads a cell as a float; digits grouped by ``_`` are refused."""
    try:
        float(cell)
    except ValueError:
        return False
    return b"_" not in cell


class KeyTable(defaultdict[bytes, int]):
    """Number names in the order of their first appearance."""

    def __init__(self) -> None:
        super().__init__(count().__next__)

    def codes(self, column: Sequence[bytes]) -> Codes:
        """The number of every name of a column, ``[n]``."""
        return np.fromiter(map(self.__getitem__, column), np.int32, count=len(column))


class Growing:
    """An array that grows: blocks while reading, then one array, never both in memory."""

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
        """Return all values and empty the object."""
        whole = np.empty(len(self), self._dtype)
        self.move_to(whole)
        return whole


class SplitScores:
    """Scores without names while they are read: genuine ones first, as only labels matter."""

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


@dataclass(frozen=True)
class Columns:
    """The columns of a text file."""

    arrays: dict[str, NDArray[Any]]  # float64 scores, bool labels, int32 codes of names
    keys: tuple[bytes, ...]  # enrol and test names by their codes
    subjects: tuple[bytes, ...]  # names of subjects by their codes
    sha256: str
    where: Where  # does not keep the arrays


def _line_of_row(path: str | Path, has_header: bool, row: int) -> str:
    """The line of a row, for messages; the file is read again."""
    row += has_header
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            row -= bool(line.strip())
            if row < 0:
                return f"{path}, line {number}"
    raise DataError(f"{path} was changed while it was read: read it again")


def read_columns(path: str | Path, layout: Layout, progress: Progress | None = None) -> Columns:
    """Read a whole text file; of scores and labels without names, the genuine ones come first."""
    names = [name for name in layout.columns if name is not None]
    keys, subjects, digest, number = KeyTable(), KeyTable(), hashlib.sha256(), 1
    grown = {name: Growing(_DTYPES.get(name, np.int32)) for name in names}
    split = SplitScores() if set(names) == {"score", "label"} else None
    total = Path(path).stat().st_size
    with open_regular(path) as file:
        for chunk in _whole_lines(file, path):
            digest.update(chunk)
            lines = (chunk.removeprefix(_BYTE_ORDER_MARK) if number == 1 else chunk).splitlines()
            rows, numbers = _rows(path, layout, lines, number)
            if layout.has_header and number == 1 and rows:
                rows, numbers = rows[1:], numbers[1:]
            number += len(lines)
            found = _converted(path, layout, rows, numbers, keys, subjects) if rows else {}
            if split is not None and found:
                split.append(found["score"], found["label"])
            else:
                for name, values in found.items():
                    grown[name].append(values)
            if progress is not None:
                progress(file.tell(), total)
    if split is None:
        arrays = {name: column.array() for name, column in grown.items()}
    else:
        arrays = dict(zip(("score", "label"), split.arrays(), strict=True))
    if not len(next(iter(arrays.values()))):
        raise DataError(f"{path} has no trials: it needs at least one line of them")
    where = partial(_line_of_row, path, layout.has_header)
    return Columns(arrays, tuple(keys), tuple(subjects), digest.hexdigest(), where)


def _converted(
    path: str | Path,
    layout: Layout,
    rows: list[list[bytes]],
    numbers: Sequence[int],
    keys: KeyTable,
    subjects: KeyTable,
) -> dict[str, NDArray[Any]]:
    """Columns of some lines, which have the given numbers."""

    def where(place: int) -> str:
        return f"{path}, line {numbers[place]}"

    found = {}
    for name, cells in zip(layout.columns, zip(*rows, strict=True), strict=True):
        if name is None:
            continue
        if b"" in cells:
            raise DataError(f"{where(cells.index(b''))}: the {name} is empty")
        if name in _CONVERTERS:
            found[name] = _CONVERTERS[name](cells, where)
        else:
            found[name] = (subjects if name.endswith("_subject") else keys).codes(cells)
    return found


def _whole_lines(file: BinaryIO, path: str | Path) -> Iterator[bytes]:
    """Chunks that end where a line does."""
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
            continue
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(f"{path} has a line longer than {MAX_LINE_BYTES:,} bytes: is it text?")
        rest += chunk
    if rest:
        yield rest


def _rows(
    path: str | Path, layout: Layout, lines: list[bytes], number: int
) -> tuple[list[list[bytes]], Sequence[int]]:
    """Cells of every line that is not blank, and the lines' numbers, of which one is given."""
    width = len(layout.columns)
    numbers: Sequence[int] = range(number, number + len(lines))
    split: Callable[[bytes], list[bytes]] = layout.split
    joined = b"\n".join(lines)
    if layout.delimiter is None:
        split = bytes.split
    elif b'"' not in joined and b" " not in joined:  # one call per line without special cases
        split = methodcaller("split", layout.delimiter.encode())
    rows = list(map(split, lines))
    if set(map(len, rows)) == {width}:
        return rows, numbers
    kept = [(at, line) for at, line in zip(numbers, lines, strict=True) if line.strip()]
    rows = [layout.split(line) for _, line in kept]
    for (at, line), cells in zip(kept, rows, strict=True):
        if len(cells) != width:
            raise DataError(
                f"{path}, line {at}: {len(cells)} columns where {width} are needed: {_shown(line)}"
            )
    return rows, [at for at, _ in kept]


def _scores(cells: Sequence[bytes], where: Where) -> NDArray[Any]:
    try:
        scores = np.fromiter(map(float, cells), np.float64, count=len(cells))
    except ValueError:
        scores = np.full(len(cells), np.nan)  # the search below finds the line
    if b"_" in b"".join(cells) or np.isnan(scores).any():
        for place, cell in enumerate(cells):
            if not _is_number(cell):
                raise DataError(f"{where(place)}: the score {_shown(cell)} is not a number")
            if np.isnan(float(cell)):
                raise DataError(f"{where(place)}: the score is NaN: every trial needs a score")
    return scores


def _labels(cells: Sequence[bytes], where: Where) -> NDArray[Any]:
    words = map(bytes.lower, cells)
    try:
        return np.fromiter(map(LABELS.__getitem__, words), np.bool_, count=len(cells))
    except KeyError:
        place = next(i for i, cell in enumerate(cells) if cell.lower() not in LABELS)
        shown = f"{where(place)}: the label {_shown(cells[place])}"
        raise DataError(f"{shown} is not one of {LABEL_WORDS}") from None


_CONVERTERS = {"score": _scores, "label": _labels}


def _shown(cell: bytes) -> str:
    text = cell.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 60 else text[:57] + "...")
