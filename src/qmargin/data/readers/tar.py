"""Tar archives, read in place: samples and labels are members that share a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qmargin.data.index import SampleIndex, parse_label
from qmargin.data.reader import RECORDINGS, Found, Kind, ReadAt, Reader, Sample, Scan, kind_of
from qmargin.errors import CorruptSample, DataError
from qmargin.files import is_file, open_regular
from qmargin.registry import register_reader

MAX_NAME = 4096
MAX_MEMBERS = 50_000_000
MAX_LABEL_BYTES = 1 << 16
MAX_LIST_BYTES = 1 << 26
NUMBERS = ("cls", "cls.txt", "label")  # members that hold an integer
NAMES = ("id", "identity", "spk")  # members that hold a name
_BLOCK = 512
_MAX_EXTENSION = 1 << 16
_LOOK_AT = 64  # members that decide what a tar holds
_BETWEEN_REPORTS = 256
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME, _PAX, _PAX_GLOBAL, _FOLDER, _LONG_LINK = b"L", b"x", b"g", b"5", b"K"


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    offset: int
    size: int


_Group = dict[str, Member]  # members that share a key, by their extensions


def tar_members(file: BinaryIO, *, name: str, max_size: int) -> Iterator[Member]:
    """Every regular file of an archive, in order; the file may be moved between two members."""
    size = file.seek(0, 2)
    position, next_name = 0, None
    for _ in range(MAX_MEMBERS):
        file.seek(position)
        header = file.read(_BLOCK)
        where = f"{name}, member at byte {position}"
        if not header.strip(b"\0"):
            return  # blocks of zeros end an archive; some writers leave them out
        kind, length = header[156:157], _checked_size(header, where)
        position += _BLOCK
        if position + length > size:
            raise DataError(f"{where}: the archive ends inside it; copy the file again")
        if kind in (_LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK):
            if length > _MAX_EXTENSION:
                raise DataError(f"{where}: {length} bytes of attributes; most are {_MAX_EXTENSION}")
            found = _extended_name(file.read(length), kind, where)
            next_name = next_name if found is None else found
        elif kind in _REGULAR:
            if length > max_size:
                raise DataError(f"{where}: {length} bytes; at most {max_size} are read")
            full = next_name or _short_name(header)
            if not 0 < len(full) <= MAX_NAME or "\0" in full:
                raise DataError(
                    f"{where}: its name has {len(full)} characters, not 1 to {MAX_NAME}"
                )
            yield Member(full, position, length)
            next_name = None
        elif kind == _FOLDER:
            next_name = None
        else:
            raise DataError(f"{where}: a link, device or sparse file ({kind!r}); store plain files")
        position += -(-length // _BLOCK) * _BLOCK
    raise DataError(f"{name} has more than {MAX_MEMBERS} members; split it")


def _checked_size(header: bytes, where: str) -> int:
    """The size in a header, after a check of its checksum."""
    if header[:2] == b"\x1f\x8b" or header[:3] in (b"BZh", b"(\xb5/"):
        raise DataError(f"{where}: the archive is compressed; decompress it, samples are at random")
    if len(header) < _BLOCK:
        raise DataError(f"{where}: the archive ends inside its header; copy the file again")
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    if _octal(header[148:156]) != total:
        raise DataError(f"{where}: its header has a wrong checksum; the archive is damaged")
    field = header[124:136]
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)  # GNU's large
    if size is None:
        raise DataError(f"{where}: its size {field!r} is not a number; the archive is damaged")
    return size


def _octal(field: bytes) -> int | None:
    text = field.strip(b" \0") or b"0"
    return int(text, 8) if text.isdigit() and max(text) <= ord("7") else None


def _extended_name(data: bytes, kind: bytes, where: str) -> str | None:
    """The name that an extension gives to the next member, if it gives one."""
    if kind == _LONG_NAME:
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    name = None
    while data and kind == _PAX:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(data):
            raise DataError(f"{where}: its pax attributes are damaged")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size" or key.startswith(b"GNU.sparse"):
            raise DataError(f"{where}: it is larger than 8 GB or sparse; store plain files")
        data = data[int(length) :]
    return name


def _short_name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


@register_reader("tar")
class TarReader(Reader):
    """A tar, a folder of tars, or a text file that lists tars.

    A sample is ``key.jpg`` or ``key.wav`` with its label in ``key.cls`` (an integer), ``key.id`` or
    ``key.spk`` (a name), or ``key.json`` (``label`` or ``identity``). All samples of a dataset have
    the same kind of label.
    """

    precedence = -5
    options = ("root",)

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        first = None
        if path.is_dir():
            first = min(path.glob("*.tar"), default=None)
        elif path.suffix.lower() == ".tar":
            first = path if path.is_file() else None
        elif path.is_file():
            with open_regular(path) as file:
                line = file.readline(MAX_NAME).strip()
            if line.endswith(b".tar"):
                first = path.parent / line.decode("utf-8", "surrogateescape")
        return None if first is None else Found(self, path, kind or _kind_of(first))

    def files(self, scan: Scan) -> list[Path]:
        is_list = not scan.path.is_dir() and scan.path.suffix.lower() != ".tar"
        return [*(shard for _, shard in _shards(scan)), *([scan.path] if is_list else [])]

    def samples(self, scan: Scan) -> Iterator[Sample]:
        shards, done, num_other = _shards(scan), 0, 0
        total = sum(shard.stat().st_size for _, shard in shards if is_file(shard))
        for name, shard in shards:
            try:
                file = open_regular(shard)
            except OSError as error:
                reason = error.strerror or error
                raise DataError(f"{shard} cannot be read: {reason}; correct the list") from error
            with file:
                for count, (key, group) in enumerate(_groups(file, shard, scan.kind)):
                    where = f"{shard}, sample {key}"
                    content, label = _content(group, scan.kind, where), _label_member(group)
                    if content is None:
                        if scan.kind is RECORDINGS and label is not None:
                            raise DataError(f"{where}: it has a label and no recording; add it")
                        num_other += 1
                        continue
                    if label is None:
                        found = ", ".join(f".{extension}" for extension in group)
                        remedy = "add a .cls with an integer, or a .id or .spk with a name"
                        raise DataError(f"{where}: it has {found} and no label; {remedy}")
                    if label.size > MAX_LABEL_BYTES:
                        size = f"{label.name!r} has {label.size} bytes"
                        raise DataError(
                            f"{where}: {size}, not a label of at most {MAX_LABEL_BYTES}"
                        )
                    file.seek(label.offset)
                    yield Sample(
                        _identity(file.read(label.size), label.name, where),
                        key,
                        path=name,
                        offset=content.offset,
                        length=content.size,
                        label_at=label.offset,
                    )
                    if count % _BETWEEN_REPORTS == 0:
                        scan.progress(done + content.offset, total)
                done += file.seek(0, 2)
            scan.progress(min(done, total), total)
        if num_other:
            noun = scan.kind.noun
            scan.notes.append(f"{num_other:,} samples without an {noun} were left out")

    def has_label(self, index: SampleIndex, row: int, read_at: ReadAt) -> bool:
        path, label = index.sample_path(row), int(index.columns["label"][row])
        offset = int(index.columns["label_at"][row])
        try:
            header = read_at(path, max(0, offset - _BLOCK), _BLOCK)
            size = _checked_size(header, f"member at byte {offset}")
        except DataError as error:
            raise CorruptSample(str(error)) from error
        if size > MAX_LABEL_BYTES:
            raise CorruptSample(f"the label at byte {offset} has {size} bytes")
        content, names = read_at(path, offset, size), index.texts("class")
        wanted = label if names is None else names[label]
        for name in ("a.json", "a.id" if names is not None else "a.cls"):
            try:
                if _identity(content, name, "") == wanted:
                    return True
            except DataError:
                continue
        return False


def _shards(scan: Scan) -> list[tuple[str | None, Path]]:
    """Names of tars in an index, None for a single one, and where they are."""
    path = scan.path
    if path.is_dir():
        return [(shard.name, shard) for shard in sorted(path.glob("*.tar"))]
    if path.suffix.lower() == ".tar":
        return [(None, path)]
    with open_regular(path) as file:
        content = file.read(MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        raise DataError(f"{path} is over {MAX_LIST_BYTES:,} bytes; list fewer tars in one file")
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert the file") from error
    names = [(row, line.strip()) for row, line in enumerate(lines, start=1) if line.strip()]
    for row, name in names:
        if not name.endswith(".tar"):
            raise DataError(f"{path}, line {row}: {name!r} is not a .tar; list uncompressed tars")
    return [(name, scan.folder / name) for _, name in names]


def _kind_of(tar: Path) -> Kind | None:
    """Kind of the first members of a tar."""
    try:
        with open_regular(tar) as file:
            members = tar_members(file, name=str(tar), max_size=RECORDINGS.max_bytes)
            return kind_of(member.name for member in islice(members, _LOOK_AT))
    except (DataError, OSError):
        return None  # reading it reports the problem


def _groups(file: BinaryIO, shard: Path, kind: Kind) -> Iterator[tuple[str, _Group]]:
    """Members by key, in order; the members of a sample are usually next to each other.

    A key is a name up to the first dot of its last part, as in WebDataset; of recordings, up to
    the last dot. Incomplete samples wait for the rest of the archive.
    """
    waiting: dict[str, _Group] = {}
    current, group = "", _Group()
    for member in tar_members(file, name=str(shard), max_size=kind.max_bytes):
        folder, slash, base = member.name.rpartition("/")
        split = base.rpartition if kind is RECORDINGS else base.partition
        stem, dot, extension = split(".")
        if not stem or not dot:
            continue  # hidden files and files outside samples
        key, extension = folder + slash + stem, extension.lower()
        if key != current:
            if _label_member(group) is not None and _content(group, kind, "") is not None:
                yield current, group
            elif group:
                waiting[current] = group
            current, group = key, waiting.pop(key, {})
        if extension in group:
            raise DataError(f"{shard}: two members {key}.{extension}; a sample has one of each")
        group[extension] = member
    if group:
        waiting[current] = group
    yield from waiting.items()


def _content(group: _Group, kind: Kind, where: str) -> Member | None:
    """The member that is the image or recording, if there is one."""
    found = [item for extension, item in group.items() if f".{extension}" in kind.suffixes]
    if len(found) > 1 and kind is RECORDINGS and where:
        raise DataError(f"{where}: it has two recordings; keep one")
    return found[0] if found else None


def _label_member(group: _Group) -> Member | None:
    """The member that holds the label: a number or a name, or else the JSON."""
    return group.get(next((name for name in group if name in (*NUMBERS, *NAMES)), "json"))


def _identity(content: bytes, name: str, where: str) -> str | int:
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: its label {content[:60]!r} is not UTF-8; convert it") from error
    extension = name.rpartition("/")[2].partition(".")[2].lower()
    is_number = extension in NUMBERS
    if extension.endswith("json"):
        try:
            fields = json.loads(text)
            is_number = "label" in fields
            text = str(fields["label" if is_number else "identity"])
            text.encode()  # JSON can escape what no text has
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{where}: its .json has no label or identity; add one") from error
    elif not text and not is_number:
        raise DataError(f"{where}: its label {name!r} is empty; write a name")
    return parse_label(text, where) if is_number else text
