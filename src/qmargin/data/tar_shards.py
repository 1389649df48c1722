"""Tar shards in the layout of WebDataset, read in place.

The members of one sample follow each other: ``key.jpg`` and ``key.cls``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.fingerprints import fingerprint_of, started_after
from qmargin.data.images import EXTENSIONS
from qmargin.data.index import MAX_SAMPLE_BYTES, Index
from qmargin.data.index_writer import ClassNames, IndexWriter, parse_label
from qmargin.data.tar_members import Member, archive_files, tar_members
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

NUMBERS = ("cls", "cls.txt", "label")  # hold an integer
NAMES = ("id", "identity", "spk")  # hold a name
_COLUMNS = ("offset", "key", "length", "checksum", "file", "name")
_KIND = "archives"
MAX_LABEL_BYTES = 1 << 16
_BETWEEN_REPORTS = 256


class TarSample(NamedTuple):
    """The members that share a key, by their extensions."""

    key: str
    members: dict[str, Member]


def tar_samples(file: BinaryIO, *, name: str) -> Iterator[TarSample]:
    """Samples of an open archive in order; a key is a name up to the first dot of its last part."""
    current: TarSample | None = None
    for member in tar_members(file, name=name, max_size=MAX_SAMPLE_BYTES):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot:
            continue  # hidden files and files that are no part of a sample
        key, extension = folder + slash + stem, extension.lower()
        if current is not None and key != current.key:
            yield current
            current = None
        if current is None:
            current = TarSample(key, {})
        if extension in current.members:
            raise DataError(f"{name}: two members {key}.{extension}; a sample has one of each")
        current.members[extension] = member
    if current is not None:
        yield current


def tar_fingerprint(path: Path, index: Index) -> str:
    """Of all archives."""
    return str(fingerprint_of(archive_files(path), kind=_KIND))


def index_tar(path: Path, index: Path, *, progress: Progress | None = None) -> None:
    """Write the index of an archive, or of a folder of them.

    A sample has an image and a label: ``.cls`` with an integer, ``.id`` with a name, or ``.json``
    with ``label`` or ``identity``. All of a dataset have the same kind of label.
    """
    shards = archive_files(path)
    started = started_after(shards, index.parent)
    fingerprint = fingerprint_of(shards, kind=_KIND, started=started)
    total = sum(shard.stat().st_size for shard in shards)
    before, num_other = 0, 0
    labels = _Labels()
    with IndexWriter(index, _COLUMNS) as writer:
        for number, shard in enumerate(shards):
            with open_regular(shard) as file:
                for count, sample in enumerate(tar_samples(file, name=shard.name)):
                    is_image = _add(writer, file, sample, shard=shard, number=number, labels=labels)
                    num_other += not is_image
                    if progress is not None and count % _BETWEEN_REPORTS == 0:
                        progress(before + file.tell(), total)
            before += shard.stat().st_size
        names, relabel = labels.finished()
        writer.finish(
            format="tar",
            root=path,
            fingerprint=fingerprint,
            notes=[f"{num_other:,} samples without an image were left out"] if num_other else [],
            class_names=names,
            paths=None if path.is_file() else (shard.name for shard in shards),
            relabel=relabel,
        )


def _add(
    writer: IndexWriter,
    file: BinaryIO,
    sample: TarSample,
    *,
    shard: Path,
    number: int,
    labels: _Labels,
) -> bool:
    """Add a sample to the index; False where it has no image."""
    image = next((item for kind, item in sample.members.items() if kind in EXTENSIONS), None)
    if image is None:
        return False
    where = f"{shard}, sample {sample.key}"
    label, place = labels.read(file, sample, where)
    data = _read(file, image)
    writer.add(
        label=label,
        name=sample.key,
        offset=image.offset,
        key=place,
        length=image.size,
        checksum=zlib.crc32(data),
        file=number,
    )
    return True


class _Labels:
    """Labels of samples, all by number or all by name."""

    def __init__(self) -> None:
        self._classes = ClassNames()
        self._kind: str | None = None

    def read(self, file: BinaryIO, sample: TarSample, where: str) -> tuple[int, int]:
        """The label of a sample and its place; a name is a number until all names are known."""
        member = _label_member(sample, where)
        kind, text = _label_text(_read(file, member), member.name, where)
        if self._kind not in (None, kind):
            raise DataError(f"{where}: its label is a {kind}, those before are {self._kind}s")
        self._kind = kind
        label = parse_label(text, where) if kind == "number" else self._classes.number(text)
        return label, member.offset

    def finished(self) -> tuple[list[str] | None, NDArray[np.int32] | None]:
        """Names by label and the label of each number; nothing where labels are numbers."""
        return self._classes.sorted() if self._kind == "name" else (None, None)


def _label_member(sample: TarSample, where: str) -> Member:
    """The member that holds the label: a number or a name, or else the JSON."""
    wanted = next((name for name in sample.members if name in (*NUMBERS, *NAMES)), "json")
    if wanted not in sample.members:
        kinds = ", ".join(f".{kind}" for kind in sample.members)
        raise DataError(f"{where}: it has {kinds} and no label; add a .cls with an integer")
    member = sample.members[wanted]
    if member.size > MAX_LABEL_BYTES:
        raise DataError(f"{where}: its .{wanted} has {member.size} bytes, not a label")
    return member


def _label_text(content: bytes, name: str, where: str) -> tuple[str, str]:
    """Kind and text of a label."""
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: its label {content[:60]!r} is not UTF-8; convert it to UTF-8"
        ) from error
    extension = name.rpartition("/")[2].partition(".")[2].lower()
    if extension == "json":
        return _from_json(text, where)
    return ("number" if extension in NUMBERS else "name"), text


def _from_json(text: str, where: str) -> tuple[str, str]:
    try:
        fields = json.loads(text)
        if "label" in fields:
            return "number", str(fields["label"])
        identity = str(fields["identity"])
        identity.encode()  # JSON can escape what no text has
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{where}: its .json has no label or identity; add one") from error
    return "name", identity


def says_label(content: bytes, label: int, name: str | None) -> bool:
    """Whether the bytes of a label's member give a label: its number, or its name if it has one."""
    for kind in ("a.json", "a.id"):
        try:
            _, text = _label_text(content, kind, "")
            if (text if name is not None else parse_label(text, "")) == (name or label):
                return True
        except DataError:
            continue
    return False


def _read(file: BinaryIO, member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)
