"""RecordIO, as MXNet and InsightFace write it: every record that holds an image is a sample."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.index import SampleIndex, parse_label
from qmargin.data.reader import IMAGES, RECORDINGS, Found, Kind, ReadAt, Reader, Sample, Scan
from qmargin.errors import CorruptSample, DataError
from qmargin.files import open_regular
from qmargin.registry import register_reader

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
MAX_PART = (1 << 29) - 1
MAX_LABELS = 4096  # of one record
MAX_RECORD = 1 << 28  # larger sizes in headers count as damage
_HEAD = struct.Struct("<II")  # magic, flag << 29 | length
_LABEL = struct.Struct("<IfQQ")  # flag, label, id, second id
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_WINDOW = 1 << 23
_IDX_BYTES = 1 << 22
_IDX_LINE = re.compile(rb"\s*(\d{1,18}\s+\d{1,18})?\s*")
_MOST_DIGITS = 18
_LONGEST_LINE = 1000
_BETWEEN_REPORTS = 4096
_BytesAt = Callable[[int, int], memoryview]  # position and count; fewer at the end of the file


class Record(NamedTuple):
    """One record of a file."""

    offset: int
    payload: memoryview
    is_split: bool


class Payload(NamedTuple):
    """Content of a record: labels, and the start of its image."""

    flag: int
    label: float
    image_start: int


def scan_records(file: BinaryIO, *, name: str, size: int) -> Iterator[Record]:
    """Every record of an open file, in order, through a window of a few megabytes."""
    window, base = memoryview(b""), 0

    def bytes_at(position: int, count: int) -> memoryview:
        nonlocal window, base
        if position + count > base + len(window):
            file.seek(position)
            wanted = min(max(count, _WINDOW), size - position)  # memory only for existing bytes
            window, base = memoryview(file.read(max(0, wanted))), position
        return window[position - base : position - base + count]

    position = 0
    while position < size:
        offset = position
        payload, position, is_split = _joined(bytes_at, offset, f"{name}, record at byte {offset}")
        yield Record(offset, payload, is_split)


def _joined(bytes_at: _BytesAt, position: int, where: str) -> tuple[memoryview, int, bool]:
    """Payload of the record at a position, where the next one begins, and whether it was split."""
    flag, data, position = _part(bytes_at, position, where)
    if flag == _WHOLE:
        return data, position, False
    if flag != _FIRST:
        raise DataError(f"{where}: it begins with a middle part; copy the file again")
    parts, total = [bytes(data)], len(data)
    while flag != _LAST:
        flag, data, position = _part(bytes_at, position, where)
        if flag not in (_MIDDLE, _LAST):
            raise DataError(f"{where}: its last part is missing; copy the file again")
        parts.append(bytes(data))
        total += len(data) + 4
        if total > MAX_RECORD:
            raise DataError(f"{where}: more than {MAX_RECORD} bytes; the file is damaged")
    return memoryview(MAGIC_BYTES.join(parts)), position, True


def _part(bytes_at: _BytesAt, position: int, where: str) -> tuple[int, memoryview, int]:
    """Flag and bytes of one part, and where the next one begins."""
    head = bytes_at(position, 8)
    if len(head) < 8:
        raise DataError(f"{where}: the file ends inside it; copy the file again")
    magic, flag_and_length = _HEAD.unpack(head)
    if magic != MAGIC:
        found = f"{magic:#010x} instead of {MAGIC:#010x} at byte {position}"
        raise DataError(f"{where}: {found}; it is damaged or not a RecordIO file, copy it again")
    length = flag_and_length & MAX_PART
    if length > MAX_RECORD:
        raise DataError(f"{where}: a part of {length} bytes; at most {MAX_RECORD} are read")
    data = bytes_at(position + 8, length)
    if len(data) < length:
        raise DataError(
            f"{where}: the file ends after {len(data)} of {length} bytes; copy it again"
        )
    return flag_and_length >> 29, data, position + 8 + length + (-length % 4)


def parse_payload(payload: bytes | memoryview, where: str) -> Payload:
    """The label of a record and where its image begins."""
    if len(payload) < _LABEL.size:
        raise DataError(
            f"{where}: {len(payload)} bytes, fewer than the {_LABEL.size} of its header; "
            "copy the file again"
        )
    flag, label, _, _ = _LABEL.unpack_from(payload)
    start = _LABEL.size + 4 * flag
    if flag > MAX_LABELS or start > len(payload):
        raise DataError(f"{where}: {flag} labels do not fit into its {len(payload)} bytes")
    if flag:
        (label,) = struct.unpack_from("<f", payload, _LABEL.size)
    return Payload(flag, label, start)


def pack_payload(label: float | Sequence[float], image: bytes, *, number: int = 0) -> bytes:
    """Payload of a record: one label, or several as InsightFace writes them, then the image."""
    if isinstance(label, Sequence):
        values = struct.pack(f"<{len(label)}f", *label)
        return _LABEL.pack(len(label), 0.0, number, 0) + values + image
    return _LABEL.pack(0, label, number, 0) + image


class RecordWriter(ExitStack):
    """Writes a ``.rec`` file and the ``.idx`` beside it; to be used in a ``with`` statement."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        path = Path(path)
        idx = path.with_suffix(".idx")
        self._records = self.enter_context(path.open("wb"))
        self._lines = self.enter_context(idx.open("w", encoding="ascii", newline="\n"))

    def write(self, key: int, payload: bytes) -> None:
        """Append a record, in parts without the magic numbers at multiples of four."""
        self._lines.write(f"{key}\t{self._records.tell()}\n")
        parts, start, at = [], 0, payload.find(MAGIC_BYTES)
        while at >= 0:
            if at % 4 == 0:
                parts.append(payload[start:at])
                start = at + 4
            at = payload.find(MAGIC_BYTES, start if at % 4 == 0 else at + 1)
        parts.append(payload[start:])
        flags = [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST] if len(parts) > 1 else [_WHOLE]
        for flag, part in zip(flags, parts, strict=True):
            if len(part) > MAX_PART:
                raise DataError(f"record {key} has {len(part)} bytes; at most {MAX_PART} fit")
            self._records.write(_HEAD.pack(MAGIC, flag << 29 | len(part)))
            self._records.write(part + b"\0" * (-len(part) % 4))


def idx_lines(path: Path) -> Iterator[tuple[int, int]]:
    """Keys and offsets of an ``.idx`` file in the order of the offsets.

    A file in that order is read as a stream; another one is sorted in memory.
    """
    blocks: Iterable[NDArray[np.int64]] = _idx_blocks(path)
    last = -1
    for pairs in blocks:
        if np.any(np.diff(pairs[:, 1], prepend=last) <= 0):
            found = np.concatenate(list(_idx_blocks(path)))
            found = found[np.argsort(found[:, 1], kind="stable")]
            blocks = np.array_split(found, -(-len(found) // (1 << 16)))
            break
        last = int(pairs[-1, 1]) if len(pairs) else last
    else:
        blocks = _idx_blocks(path)
    for pairs in blocks:
        yield from zip(pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True)


def _idx_blocks(path: Path) -> Iterator[NDArray[np.int64]]:
    """Keys and offsets ``[n, 2]`` of a few megabytes of lines at a time."""
    num_lines = 0
    with open_regular(path) as file:
        while text := file.read(_IDX_BYTES):
            rest = file.readline(_LONGEST_LINE)
            text += rest
            words = text.split()
            try:
                widest = max(map(len, words), default=0)  # an array is as wide as that
                if widest > _MOST_DIGITS or len(rest) == _LONGEST_LINE:
                    raise ValueError("a number or a line that is too long")
                pairs = np.array(words).astype(np.int64).reshape(-1, 2)
                is_good = bool((pairs >= 0).all())
            except (ValueError, OverflowError):
                is_good = False
            if not is_good:
                lines = enumerate(text.split(b"\n"), num_lines + 1)
                row, line = next(
                    (each for each in lines if not _IDX_LINE.fullmatch(each[1])), (0, b"")
                )
                raise DataError(
                    f"{path}, line {row}: {line[:60].decode('utf-8', 'replace')!r} is not a key "
                    "and an offset; remove the .idx file to find the records without it"
                )
            num_lines += text.count(b"\n")
            yield pairs


@register_reader("recordio")
class RecordReader(Reader):
    """A ``.rec`` file with its ``.idx``, or a folder with one; samples are in its order.

    Counts in the header record are float32 and wrong above 2**24 images, so they are not used: a
    record with an image is a sample. Without an ``.idx`` file, keys are counted. A file
    ``property`` may give the number of identities.
    """

    precedence = -1

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        if kind is RECORDINGS:
            return None
        if path.is_dir():
            records = sorted(path.glob("*.rec"))
            if len(records) > 1:
                names = ", ".join(record.name for record in records[:5])
                raise DataError(f"{path} has {len(records)} .rec files ({names}); give one of them")
            return Found(self, records[0], IMAGES) if records else None
        if path.suffix.lower() not in (".rec", ".idx"):
            return None
        found = path.with_suffix(".rec") if path.suffix.lower() == ".idx" else path
        if not found.exists():
            raise DataError(f"{found} does not exist; {path.name} needs it")
        return Found(self, found, IMAGES)

    def files(self, scan: Scan) -> list[Path]:
        others = (scan.path.with_suffix(".idx"), scan.path.with_name("property"))
        return [scan.path, *(other for other in others if other.exists())]

    def samples(self, scan: Scan) -> Iterator[Sample]:
        path, num_empty, largest = scan.path, 0, -1
        name = path.name
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for count, (key, record) in enumerate(_numbered(path, file, size)):
                where = f"{name}, record {key} at byte {record.offset}"
                flag, value, start = parse_payload(record.payload, where)
                image = record.payload[start:]
                if count % _BETWEEN_REPORTS == 0:
                    scan.progress(record.offset, size)
                if not image and flag:
                    num_empty += 1
                    continue
                label = parse_label(value, where)
                if label > largest:
                    largest = label
                is_split = record.is_split
                offset = record.offset if is_split else record.offset + 8 + start
                # By position, as the names would take a tenth of the time of indexing.
                yield Sample(label, None, None, offset, len(image), key, None, image, is_split)
        if not path.with_suffix(".idx").exists():
            scan.notes.append(f"{path.stem}.idx is missing; records were found without it")
        if num_empty:
            scan.notes.append(f"{num_empty:,} records hold no image (header, ranges of identities)")
        scan.num_classes = _num_classes(path, largest + 1)

    def read(self, index: SampleIndex, row: int, read_at: ReadAt) -> bytes:
        payload, parsed = _split_record(index, row, read_at)
        return bytes(payload[parsed.image_start :])

    def has_label(self, index: SampleIndex, row: int, read_at: ReadAt) -> bool:
        if "by_reader" in index.columns and index.columns["by_reader"][row]:
            label: float | None = _split_record(index, row, read_at)[1].label
        else:
            label = _label_before(index, row, read_at)
        return label == int(index.columns["label"][row])


def _split_record(index: SampleIndex, row: int, read_at: ReadAt) -> tuple[memoryview, Payload]:
    """Payload of a record in parts, or ``CorruptSample``."""
    offset = int(index.columns["offset"][row])
    where = f"record at byte {offset}"

    def bytes_at(position: int, count: int) -> memoryview:
        return memoryview(read_at(index.root, position, count))

    try:
        payload = _joined(bytes_at, offset, where)[0]
        return payload, parse_payload(payload, where)
    except DataError as error:
        raise CorruptSample(str(error)) from error


def _label_before(index: SampleIndex, row: int, read_at: ReadAt) -> float | None:
    """The label in the header that ends where an image begins; None where there is no header."""
    offset = int(index.columns["offset"][row])
    for most in (2, MAX_LABELS):  # InsightFace writes two; a longer header is searched for
        start = max(0, offset - _HEAD.size - _LABEL.size - 4 * most)
        window = read_at(index.root, start, offset - start)
        for flag in range(most + 1):
            at = len(window) - _HEAD.size - _LABEL.size - 4 * flag
            if at < 0 or window[at : at + 4] != MAGIC_BYTES:
                continue
            payload = window[at + _HEAD.size :]
            if _LABEL.unpack_from(payload)[0] == flag:
                return parse_payload(payload, f"record at byte {start + at}").label
    return None


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
        end = f"{path.name} has {size} bytes"
        raise DataError(f"{idx} sends key {key} to byte {offset}, and {end}; {remedy}")


def _num_classes(path: Path, found: int) -> int:
    """Number of identities in the file ``property``, if given."""
    about = path.with_name("property")
    if not about.is_file():
        return found
    with open_regular(about) as file:
        text = file.read(64).split(b",")[0].strip()
    if not text.isdigit():
        raise DataError(f"{about} does not begin with a number of classes; correct or remove it")
    if int(text) < found:
        conflict = f"{int(text)} classes and {path.name} has the label {found - 1}"
        raise DataError(f"{about} says {conflict}; correct or remove it")
    return int(text)
