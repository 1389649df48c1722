"""Readers of formats: their interface and their samples.

A reader is one class in one file, registered by name with ``qmargin.registry.register_reader``, in
``qmargin.data.readers`` or in a package of yours. It recognises paths of its format and yields
their samples; indexing, checking, verifying and training work the same for all formats.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from qmargin import registry
from qmargin.data import audio, images
from qmargin.data.index import Hasher, SampleIndex, hash_files
from qmargin.errors import ConfigError
from qmargin.files import Progress

ReadAt = Callable[[Path, int, int], bytes]  # path, offset, count to bytes; fewer at the end
_log = logging.getLogger("qmargin.data")


class Kind(NamedTuple):
    """Whether samples are images or recordings."""

    name: str  # in indices and messages
    noun: str  # for one of them
    suffixes: tuple[str, ...]  # lower-case endings of their files
    max_bytes: int  # larger sizes in headers count as damage

    def is_name(self, name: str) -> bool:
        """Whether the name of a file is that of a sample.

        Examples:
            >>> IMAGES.is_name("a/1.JPG"), IMAGES.is_name("notes.txt"), IMAGES.is_name(".1.jpg")
            (True, False, False)
        """
        return name.lower().endswith(self.suffixes) and not name.rpartition("/")[2].startswith(".")


IMAGES = Kind("images", "image", images.SUFFIXES, 1 << 26)
RECORDINGS = Kind("recordings", "recording", audio.SUFFIXES, 0x7FFFF000)  # what one call reads
KINDS = {kind.name: kind for kind in (IMAGES, RECORDINGS)}


class Sample(NamedTuple):
    """One sample of a reader; all samples of a dataset have the same fields.

    Attributes:
        identity: Name of the identity, or a label in ``[0, 2**31 - 2]``.
        name: Unique among recordings, where trial lists use it; None for numbered records.
        path: File that holds it, relative to the folder of the data; without it that is ``name``,
            or the data itself where there is an offset.
        offset: First byte in the file; None where the file is the sample.
        length: Bytes from there on.
        key: Number of a record, or line in a list.
        label_at: Where the identity is written, for ``Reader.has_label``.
        content: Encoded bytes, if the reader has read them already.
        by_reader: Whether ``Reader.read`` has to assemble the bytes.
    """

    identity: str | int
    name: str | None = None
    path: str | None = None
    offset: int | None = None
    length: int | None = None
    key: int | None = None
    label_at: int | None = None
    content: bytes | memoryview | None = None
    by_reader: bool | None = None


@dataclass
class Scan:
    """One pass over a dataset: inputs of a reader, and its notes besides the samples."""

    path: Path
    kind: Kind
    options: Mapping[str, str] = field(default_factory=dict)  # that were given, such as split
    progress: Progress = lambda done, total: None
    hasher: Hasher | None = None  # for readers that update the fingerprint while they read
    classes: Sequence[str] = ()  # identities that have a label even without a sample
    num_classes: int | None = None  # where the data says it
    notes: list[str] = field(default_factory=list)  # what was left out, as text
    folders: list[str] = field(default_factory=list)  # that were listed

    @property
    def folder(self) -> Path:
        """Folder to which paths in lists are relative."""
        if "root" in self.options:
            return Path(self.options["root"])
        return self.path if self.path.is_dir() else self.path.parent


class Found(NamedTuple):
    """Data that a reader recognised; images if it does not show what they are."""

    reader: Reader
    path: Path
    kind: Kind | None


class Reader(ABC):
    """A format; see ``docs/guide/face-data.md`` for an example."""

    format: str = ""  # in indices: the name that it was registered with
    precedence: ClassVar[int] = 0  # highest first; built-in readers are below 0
    options: ClassVar[tuple[str, ...]] = ()  # names of options that it takes

    @abstractmethod
    def find(self, path: Path, kind: Kind | None) -> Found | None:
        """Recognise an existing path; None if it is not of this format.

        ``kind`` is the requested kind of samples; None for any.
        """

    @abstractmethod
    def samples(self, scan: Scan) -> Iterator[Sample]:
        """Yield the samples of a dataset in order; a ``DataError`` names the place of a problem."""

    def files(self, scan: Scan) -> list[Path]:
        """Files whose change makes an index stale."""
        return [scan.path]

    def watched(self, scan: Scan) -> list[Path]:
        """Files and folders that must not be as new as the index."""
        return self.files(scan)

    def hasher(self, scan: Scan, index: SampleIndex | None, started: int | None) -> Hasher:
        """Fingerprint of the data as it is now.

        An index to compare with may limit what is read; a build gives its start time.
        """
        return hash_files(self.files(scan), started)

    def read(self, index: SampleIndex, row: int, read_at: ReadAt) -> bytes:
        """Bytes of a sample that was given with ``by_reader``, or ``CorruptSample``."""
        raise NotImplementedError(f"{self.format} gives samples that are ranges of bytes")

    def has_label(self, index: SampleIndex, row: int, read_at: ReadAt) -> bool:
        """Whether the label of a sample in the data still matches the index.

        The default is for formats whose labels are names of folders or in the list that was hashed.
        """
        return True


def kind_of(names: Iterable[str]) -> Kind | None:
    """Kind of files by their names; recordings if there are both."""
    found = None
    for name in names:
        if RECORDINGS.is_name(name):
            return RECORDINGS
        found = IMAGES if IMAGES.is_name(name) else found
    return found


def all_readers() -> list[Reader]:
    """Every reader, in the order of their priority; unusable readers are logged."""
    found = []
    for name in registry.readers.names():
        try:
            found.append(get_reader(name))
        except ConfigError as error:
            _log.warning("%s", error)
    return sorted(found, key=lambda reader: -reader.precedence)


def get_reader(name: str) -> Reader:
    """A reader by the name of its format, or ``ConfigError``."""
    maker = registry.readers.get(name)
    try:
        reader = maker()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the reader {name!r} cannot be made ({reason}); repair it") from error
    if not isinstance(reader, Reader):
        found = f"the reader {name!r} gives a {type(reader).__name__}"
        raise ConfigError(f"{found}; derive it from qmargin.data.reader.Reader")
    reader.format = name
    return reader
