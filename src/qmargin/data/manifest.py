"""CSV manifests: a header, then one line per image with its path and its label or identity."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from qmargin.data.image_folder import measure_file
from qmargin.data.index import Index
from qmargin.data.index_writer import ClassNames, IndexWriter, parse_label
from qmargin.errors import DataError
from qmargin.files import Progress, open_text, sha256_of

PATHS = ("path", "file", "filename", "image")
NUMBERS = ("label", "class")
NAMES = ("identity", "subject", "person")
LANDMARKS = tuple(f"{axis}{point}" for point in range(1, 6) for axis in "xy")
_COLUMNS = ("key", "length", "checksum", "name")
_BETWEEN_REPORTS = 64


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of each line of a CSV or TSV file with a header.

    Raises:
        DataError: A line has too few or too many fields, or the file is not UTF-8.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open_text(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            _check_header(path, header)
            for fields in reader:
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(fields)} fields for the "
                        f"{len(header)} of the header; correct the line"
                    )
                yield reader.line_num, dict(zip(header, fields, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{path}, after line {reader.line_num}: {error}; save it as CSV in UTF-8"
            ) from error


def column_of(path: Path, row: dict[str, str], names: tuple[str, ...]) -> str:
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


def manifest_fingerprint(path: Path, index: Index | None = None) -> str:
    """Hash of all of the manifest, so that nothing else is needed; images have checksums."""
    return sha256_of(path)[:16]


def index_manifest(path: Path, index: Path, *, progress: Progress | None = None) -> None:
    """Write the index of a manifest; paths in it are relative to its folder.

    It has the columns ``path`` and either ``label``, an integer, or ``identity``, a name; others
    are ignored.

    Raises:
        DataError: A label is impossible or a file is missing; the message has the line.
    """
    fingerprint, size = manifest_fingerprint(path), path.stat().st_size
    classes, is_named, seen = ClassNames(), False, 0
    with IndexWriter(index, _COLUMNS) as writer:
        for count, (line, row) in enumerate(read_rows(path)):
            where = f"{path}, line {line}"
            name = row[column_of(path, row, PATHS)]
            column = column_of(path, row, NUMBERS + NAMES)
            is_named = column in NAMES
            text = row[column]
            label = classes.number(text) if is_named else parse_label(text, where)
            length, checksum = _measured(path.parent / name, where)
            writer.add(label=label, name=name, key=line, length=length, checksum=checksum)
            seen += sum(map(len, row.values())) + len(row)
            if progress is not None and count % _BETWEEN_REPORTS == 0:
                progress(min(seen, size), size)
        if writer.num_rows == 0:
            raise DataError(
                f"{path} has no rows; its first line names the columns, such as path,label, and "
                "each line below is an image"
            )
        names, relabel = classes.sorted() if is_named else (None, None)
        writer.finish(
            format="manifest",
            root=path,
            fingerprint=fingerprint,
            class_names=names,
            relabel=relabel,
        )


def _measured(image: Path, where: str) -> tuple[int, int]:
    try:
        return measure_file(image)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise DataError(
            f"{where}: {image} cannot be read ({getattr(error, 'strerror', None) or error}); paths "
            "are relative to the folder of the manifest"
        ) from error
