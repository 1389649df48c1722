"""CSV manifests: a header, then one line per sample with its path and its label or identity."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from qmargin.data.fingerprint import Hasher, hash_lists
from qmargin.data.index import SampleIndex, parse_label
from qmargin.data.reader import IMAGES, RECORDINGS, Found, Kind, Reader, Sample, Scan
from qmargin.data.readers.folder import identity_folders
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular, open_text
from qmargin.registry import register_reader

PATHS = ("path", "file", "filename", "image", "wav", "audio")
SPEAKERS = ("speaker", "spk", "speaker_id", "spk_id")
NUMBERS = ("label", "class")  # hold an integer; the other identities are names
IDENTITIES = (*SPEAKERS, *NUMBERS, "identity", "subject", "person")
LANDMARKS = tuple(f"{axis}{point}" for point in range(1, 6) for axis in "xy")
MAX_LINE = 1 << 20
_BETWEEN_REPORTS = 64


def read_rows(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of each line of a CSV or TSV file with a header.

    Args:
        path: Of the file.
        progress: Called with characters read and bytes in all.

    Raises:
        DataError: A line has too few or too many cells, or the file is not UTF-8.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open_text(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(lines_of(path, file, progress), delimiter=delimiter, strict=True)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            _check_header(path, header)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells under the "
                        f"{len(header)} columns of the header; correct the line"
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{path}, after line {reader.line_num}: {error}; save it as CSV in UTF-8"
            ) from error


def lines_of(path: Path, file: TextIO, progress: Progress | None = None) -> Iterator[str]:
    """Lines of an open text file; one that is longer than any line of a list is refused."""
    number, seen = 0, 0
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(MAX_LINE):
        if progress is not None and number % _BETWEEN_REPORTS == 0:
            progress(min(seen, size), size)
        number += 1
        seen += len(line)
        if len(line) == MAX_LINE:
            raise DataError(
                f"{path}, line {number} has more than {MAX_LINE:,} characters; is it text"
            )
        yield line


def column_of(path: Path, row: dict[str, str], names: Sequence[str]) -> str:
    """The first of some names that is a column, or ``DataError``."""
    found = next((name for name in names if name in row), None)
    if found is None:
        raise DataError(
            f"{path} has the columns {', '.join(row)[:200]}; it needs one of {', '.join(names)}, "
            "named in its first line"
        )
    return found


def _check_header(path: Path, header: list[str]) -> None:
    if len(header) < 2 and ";" in "".join(header):
        raise DataError(
            f"{path}, line 1: the columns are separated by semicolons; separate them by commas, or "
            "by tabs in a .tsv file"
        )
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}, line 1: two columns are called {twice[:60]!r}; rename one")


def check_path(place: str, where: str) -> str:
    """A path of a list, or ``DataError`` for what is none: commands are never run."""
    if not place:
        raise DataError(f"{where}: the path is empty; write one")
    if place.endswith("|") or place.startswith(("|", "pipe:")):
        raise DataError(
            f"{where}: {place!r} is a command, and lists never start one; run it once and write "
            "the files it makes into the list"
        )
    head, colon, offset = place.rpartition(":")
    if colon and offset.isdigit() and head.endswith(".ark"):
        raise DataError(
            f"{where}: {place!r} points into a Kaldi archive; extract the samples into files first"
        )
    if "\0" in place:
        raise DataError(f"{where}: the path has a NUL character; correct it")
    return place


@register_reader("manifest")
class ManifestReader(Reader):
    """A CSV or TSV file with the columns ``path`` and ``label``, ``identity`` or ``speaker``.

    ``label`` holds an integer, the others a name. A column ``key`` names samples otherwise than by
    their path; ``split`` can choose rows. Other columns are ignored.
    """

    precedence = -3
    options = ("root", "split")

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        if path.is_file():
            if path.suffix.lower() not in (".csv", ".tsv"):
                return None
            seen = _kind_of(path)
            return Found(self, path, kind or seen) if kind in (None, seen) or not seen else None
        files = [file for file in sorted(path.glob("*.[ct]sv")) if file.is_file()]
        speakers = [file for file in files if _has_speakers(file)]
        if len(speakers) == 1 and kind is not IMAGES:
            return self.find(speakers[0], kind)
        if len(files) == 1 and not identity_folders(path) and not any(path.glob("*.tar")):
            return self.find(files[0], kind)
        return None

    def hasher(self, scan: Scan, index: SampleIndex | None, started: int | None) -> Hasher:
        return hash_lists(self.files(scan))

    def watched(self, scan: Scan) -> list[Path]:
        return []

    def samples(self, scan: Scan) -> Iterator[Sample]:
        path, split = scan.path, scan.options.get("split")
        count = 0
        for line, row in read_rows(path, scan.progress):
            where = f"{path}, line {line}"
            if split is not None and row[column_of(path, row, ["split"])] != split:
                continue
            place = check_path(row[column_of(path, row, PATHS)], where)
            count += 1
            yield Sample(
                _identity(row, column_of(path, row, IDENTITIES), where),
                row.get("key", place),
                path=place if "key" in row else None,
                key=line,
            )
        if not count:
            chosen = "" if split is None else f" whose split is {split!r}"
            raise DataError(
                f"{path} has no rows{chosen}; its first line names the columns, such as path,label,"
                " and each line below is a sample"
            )


def _identity(row: dict[str, str], column: str, where: str) -> str | int:
    if column in NUMBERS:
        return parse_label(row[column], where)
    name = row[column].strip()
    if not name:
        raise DataError(f"{where}: the {column} is empty; name it")
    return name


def _columns(path: Path) -> list[str]:
    with open_regular(path) as file:
        text = file.readline(MAX_LINE).decode("utf-8-sig", "replace")
    sign = "\t" if path.suffix.lower() == ".tsv" else ","
    return [name.strip().strip('"').lower() for name in text.split(sign)]


def _has_speakers(path: Path) -> bool:
    columns = _columns(path)
    return any(name in columns for name in SPEAKERS) and any(name in columns for name in PATHS)


def _kind_of(path: Path) -> Kind | None:
    """By the columns, or else by the first path."""
    if _has_speakers(path):
        return RECORDINGS
    try:
        _, row = next(read_rows(path))
        name = row[column_of(path, row, PATHS)]
    except (StopIteration, DataError):  # which reading it will show
        return None
    return next((kind for kind in (IMAGES, RECORDINGS) if kind.is_name(name)), None)
