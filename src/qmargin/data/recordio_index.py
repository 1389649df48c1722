"""The index of a RecordIO dataset: every record that holds an image, whatever its header claims."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qmargin.data.fingerprints import fingerprint_of, started_after
from qmargin.data.index import Index
from qmargin.data.index_writer import IndexWriter, parse_label
from qmargin.data.recordio import Record, file_size, idx_lines, parse_payload, scan_records
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

_BETWEEN_REPORTS = 4096
_KIND = "files"
_COLUMNS = ("offset", "key", "length", "checksum", "is_split")


def recordio_fingerprint(path: Path, index: Index) -> str:
    """Of the records, of their ``.idx`` and of ``property``, which counts the identities."""
    return str(fingerprint_of(_files(path), kind=_KIND))


def _files(path: Path) -> list[Path]:
    others = (path.with_suffix(".idx"), path.with_name("property"))
    return [path, *(other for other in others if other.exists())]


def index_recordio(path: Path, index: Path, *, progress: Progress | None = None) -> None:
    """Write the index of a ``.rec`` file; samples are in the order of the file.

    Counts in the header record are float32 and wrong above 2**24 images, so that they are not
    used: a record with an image is a sample. Without an ``.idx`` file, keys are counted.

    Raises:
        DataError: A record is damaged, a label is impossible, or the ``.idx`` and the ``.rec`` do
            not belong together.
    """
    files = _files(path)
    started = started_after(files, index.parent)
    fingerprint = fingerprint_of(files, kind=_KIND, started=started)
    with open_regular(path) as file, IndexWriter(index, _COLUMNS) as writer:
        size = file_size(file)
        num_empty = 0
        for count, (key, record) in enumerate(_numbered(path, file, size)):
            num_empty += not _add(writer, path, key, record)
            if progress is not None and count % _BETWEEN_REPORTS == 0:
                progress(record.offset, size)
        notes = []
        if not path.with_suffix(".idx").exists():
            notes.append(f"{path.stem}.idx is missing; records were found without it")
        if num_empty:
            notes.append(f"{num_empty:,} records hold no image (header, ranges of identities)")
        writer.finish(
            format="recordio",
            root=path,
            fingerprint=fingerprint,
            num_classes=_num_classes(path, writer.num_classes),
            notes=notes,
        )


def _add(writer: IndexWriter, path: Path, key: int, record: Record) -> bool:
    """Add a record to the index; False where it holds no image."""
    where = f"{path.name}, record {key} at byte {record.offset}"
    flag, value, start = parse_payload(record.payload, where)
    image = record.payload[start:]
    if not image and flag:
        return False
    writer.add(
        label=parse_label(value, where),
        offset=record.offset if record.is_split else record.offset + 8 + start,
        key=key,
        length=len(image),
        checksum=zlib.crc32(image),
        is_split=record.is_split,
    )
    return True


def _numbered(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, Record]]:
    """Records with their keys; the two files are read side by side and must agree."""
    idx = path.with_suffix(".idx")
    records = scan_records(file, name=path.name, size=size)
    if not idx.exists():
        yield from enumerate(records)
        return
    remedy = f"get the {idx.name} of this {path.name}, or remove it to find the records without it"
    lines = idx_lines(idx)
    for record in records:
        key, offset = next(lines, (-1, size))
        if offset < record.offset:
            raise DataError(f"{idx} sends key {key} to byte {offset}, inside a record; {remedy}")
        if offset > record.offset:
            raise DataError(f"{idx} has no line for the record at byte {record.offset}; {remedy}")
        yield key, record
    key, offset = next(lines, (-1, -1))
    if offset >= 0:
        raise DataError(
            f"{idx} sends key {key} to byte {offset}, and {path.name} has {size} bytes; {remedy}"
        )


def _num_classes(path: Path, found: int) -> int:
    """Number of identities: what ``property`` says, if anything."""
    about = path.with_name("property")
    if not about.is_file():
        return found
    with open_regular(about) as file:
        text = file.read(64).split(b",")[0].strip()
    if not text.isdigit():
        raise DataError(f"{about} does not begin with a number of classes; correct or remove it")
    if int(text) < found:
        raise DataError(
            f"{about} says {int(text)} classes and {path.name} has the label {found - 1}; correct "
            "or remove it"
        )
    return int(text)
