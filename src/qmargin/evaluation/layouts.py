"""Which column of a text file means what: from a header, from a named layout, or found out."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qmargin.errors import ConfigError, DataError
from qmargin.files import check_regular

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
    check_regular(path)
    with Path(path).open("rb") as file:
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
