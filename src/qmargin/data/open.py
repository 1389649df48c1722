"""``open_dataset``: images or recordings in any format with a reader, by their path."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from qmargin.data.build import build_index, list_samples
from qmargin.data.images import Channels, Decoder
from qmargin.data.index import SUFFIX, OutdatedIndex, SampleIndex, read_index
from qmargin.data.reader import (
    IMAGES,
    KINDS,
    RECORDINGS,
    Found,
    Kind,
    Scan,
    all_readers,
    get_reader,
)
from qmargin.data.stored import AudioDataset, ImageDataset
from qmargin.errors import ConfigError, DataError, QMarginError
from qmargin.files import Progress

_OPTIONS = {
    "images": ("root", "split", "decoder", "channels"),
    "recordings": ("root", "split", "sample_rate"),
}
_RECIPES = {"images": "images", "recordings": "audio"}  # data.kind of a recipe
_IN_PLACE = "changed in place"
_log = logging.getLogger("qmargin.data")


def open_dataset(
    path: str | Path,
    *,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    verify: bool = False,
    progress: Progress | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    decoder: Decoder | None = None,
    channels: Channels | None = None,
    sample_rate: int | None = None,
) -> ImageDataset | AudioDataset:
    """Open labelled images or recordings; the format is recognised from the path.

    A path is a ``.rec`` file or a folder with one, a ``.tar`` file, a folder or a list of them, a
    ``.csv`` or ``.tsv`` manifest, a folder with one folder per identity, Kaldi's ``wav.scp`` and
    ``utt2spk``, JSON lines, a format of a registered reader, or an index of any of these. The
    result has ``labels``, ``num_classes``, ``class_name``, ``read`` for encoded bytes,
    ``sample_id`` and ``source``; indexing gives the picture, or the waveform, and the label.

    The index of images is built on first use, which reads all data once, and again when files are
    added or removed. Recordings are only listed, unless there is an index or ``verify`` needs one.

    Args:
        path: The data, or its index.
        index: Path of the index; by default it is next to the data.
        index_dir: Folder for the index; by default the folder of the data.
        verify: Check the checksum and the label of every sample when it is read.
        progress: Called while an index is built.
        root: Folder that relative paths in a list start from.
        split: Take the rows of a CSV file whose column ``split`` has this value.
        decoder: Of images: ``"pillow"``, the default, or ``"simplejpeg"``, which is faster and
            gives the same pixels.
        channels: Of images: channel order of the stored data, ``"rgb"`` (the default) or
            ``"bgr"``. Images are returned in RGB.
        sample_rate: Of recordings: samples per second, 16,000 by default.

    Raises:
        DataError: The format is unknown, or the data cannot be read.
        ConfigError: An option does not apply to this kind of data.

    Examples:
        >>> import tempfile
        >>> from qmargin.data.readers.recordio import RecordWriter, pack_payload
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RecordWriter(Path(folder.name, "train.rec")) as writer:
        ...     for key, label in enumerate((0, 0, 1)):
        ...         writer.write(key, pack_payload(label, b"not really a picture"))
        >>> dataset = open_dataset(folder.name)
        >>> len(dataset), dataset.labels.tolist(), dataset.read(0)
        (3, [0, 0, 1], b'not really a picture')
        >>> folder.cleanup()
    """
    if Path(path).suffix == SUFFIX:
        kind = KINDS[read_index(path).kind]
    else:
        kind = recognise(path).kind or IMAGES
    given = {
        "root": root,
        "split": split,
        "decoder": decoder,
        "channels": channels,
        "sample_rate": sample_rate,
    }
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in _OPTIONS[kind.name]:
            known = ", ".join(_OPTIONS[kind.name])
            found = f"{path} has {kind.name}, to which {name} does not apply"
            raise ConfigError(f"{found}; choose from {known}")
    opener: Any = open_images if kind is IMAGES else open_audio
    dataset: ImageDataset | AudioDataset = opener(
        path, index=index, index_dir=index_dir, verify=verify, progress=progress, **options
    )
    return dataset


def open_images(
    path: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    verify: bool = False,
    decoder: Decoder = "pillow",
    channels: Channels = "rgb",
    **place: Any,
) -> ImageDataset:
    """Images with labels from a path; see ``open_dataset``, and ``open_index`` for its place."""
    options = reader_options(root=root, split=split)
    found = open_index(path, kind=IMAGES, options=options, **place)
    return ImageDataset(found, verify=verify, decoder=decoder, channels=channels)


def open_audio(
    path: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    sample_rate: int = 16000,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    verify: bool = False,
    indexed: bool = False,
    progress: Progress | None = None,
) -> AudioDataset:
    """Recordings with speakers from a path; see ``open_dataset``.

    With ``indexed``, an index is built where it is missing, for durations.
    """
    options = reader_options(root=root, split=split)
    if verify or indexed or index is not None or Path(path).suffix == SUFFIX:
        place: dict[str, Any] = {"index": index, "index_dir": index_dir, "progress": progress}
        found = open_index(path, kind=RECORDINGS, options=options, **place)
    else:
        with _expecting(Path(path), RECORDINGS):
            data = recognise(path, RECORDINGS, options)
            known, reason = _known(index_place(data.path, index_dir, make=False), data, options)
            if known is None or reason:
                known = list_samples(_scan(data, options, progress), data.reader)
            found = known
    return AudioDataset(found, verify=verify, sample_rate=sample_rate)


def reader_options(**options: str | Path | None) -> dict[str, str]:
    """Given options of a reader, in the form of an index."""
    return {
        name: str(Path(value).resolve()) if name == "root" else str(value)
        for name, value in options.items()
        if value is not None
    }


def open_index(
    path: str | Path,
    *,
    kind: Kind | None = None,
    options: Mapping[str, str] | None = None,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    rebuild: bool = False,
    keep_changed: bool = False,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> SampleIndex:
    """The index of a dataset, built where it is missing, stale or, with ``rebuild``, in any case.

    ``kind`` is the kind of samples, ``options`` are the ``reader_options``. With ``keep_changed``,
    the index of files that changed in place is kept, to find the changes.
    """
    path, options = Path(path), options or {}
    if path.suffix == SUFFIX and index is None and not rebuild:
        return _opened_itself(path, kind, is_trusted=keep_changed)
    with _expecting(path, kind):
        data = recognise(path, kind, options)
    place = index_place(data.path, index_dir) if index is None else Path(index)
    if not rebuild:
        known, reason = _known(place, data, options)
        if known is not None and (not reason or (keep_changed and reason.endswith(_IN_PLACE))):
            return known
    if not place.parent.is_dir():
        raise DataError(f"{place.parent} is not a folder; make it, or give another index")
    with _one_builder(place):
        if not rebuild:
            known, reason = _known(place, data, options)
            if known is not None and not reason:
                return known  # made by another process
            if reason:
                _log.warning("%s is built again: %s", place, reason)
            elif index is None and index_dir is None:
                message = "writing the index of %s to %s; index_dir (--index-dir) puts it elsewhere"
                _log.warning(message, data.path, place)
        with _expecting(path, kind):
            scan = _scan(data, options, progress)
            build_index(scan, data.reader, place, num_threads=num_threads)
        return replace(read_index(place, data.path), is_new=True)


def recognise(
    path: str | Path, kind: Kind | None = None, options: Mapping[str, str] | None = None
) -> Found:
    """The data at a path, with the reader that recognises it and supports the options."""
    given, path = path, Path(path).resolve()
    if not path.exists():
        raise DataError(f"{given} does not exist; give a file or folder of images or recordings")
    found = _find(path, kind)
    for name, value in (options or {}).items():
        if name not in found.reader.options:
            format = f"{found.path} is of the format {found.reader.format}"
            raise ConfigError(f"{name} is {value!r} and {format}; leave {name} out")
    return found


def _find(path: Path, kind: Kind | None) -> Found:
    for reader in all_readers():
        try:
            found = reader.find(path, kind)
        except Exception as error:
            is_ours = type(reader).__module__.startswith("qmargin.")
            if is_ours or isinstance(error, OSError | QMarginError):
                raise
            failure = f"{type(error).__name__}: {error}"
            _log.warning("the reader %r failed on %s (%s)", reader.format, path, failure)
            continue
        if found is not None:
            return found
    if path.is_dir():
        remedy = "put the samples of each identity into a separate folder"
        raise DataError(f"{path} has no folders, archives, records or lists; {remedy}")
    if path.suffix.lower() == ".bin":
        raise DataError(f"{path} is a verification set; use qmargin.data.read_bin")
    known = "a .rec, .tar, .csv or .tsv file, JSON lines, or a folder with one folder per identity"
    raise DataError(f"{path} has no known format; give {known}")


@contextmanager
def _expecting(path: Path, kind: Kind | None) -> Iterator[None]:
    """Raise if nothing is found because the samples are of the other kind."""
    try:
        yield
    except DataError as error:
        try:
            other = None if kind is None else recognise(path).kind
        except DataError:
            other = None
        if kind is None or other is None or other is kind:
            raise
        raise _other_kind(path, other.name, kind) from error


def _other_kind(path: Path, found: str, kind: Kind) -> DataError:
    recipe = f"use a recipe for {found}, or set data.kind to {_RECIPES[found]}"
    return DataError(f"{path} has {found}, and {kind.name} are expected; {recipe}")


def _scan(data: Found, options: Mapping[str, str], progress: Progress | None = None) -> Scan:
    scan = Scan(data.path, data.kind or IMAGES, options)
    if progress is not None:
        scan.progress = progress
    return scan


def index_place(data: Path, folder: str | Path | None = None, *, make: bool = True) -> Path:
    """Path of an index: the given folder, else beside the data, or in the cache if read-only.

    The data is an absolute path, whose hash distinguishes data of equal names.
    """
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:24]
    if folder is not None:
        if not Path(folder).is_dir():
            raise DataError(f"index_dir is {str(folder)!r}, which is not a folder; make it first")
        return Path(folder) / f"{data.name}.{digest[:12]}{SUFFIX}"
    beside = data.with_name(data.name + SUFFIX)
    if beside.exists() or os.access(beside.parent, os.W_OK):
        return beside
    cache = Path.home() / ".cache" / "qmargin"
    if make:
        cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{digest}{SUFFIX}"


@contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Let one process at a time build an index, while others wait for it.

    The lock only saves work: an index is written atomically, so several builders would write the
    same file one after the other, as they do on a file system without locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process is building %s; waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.warning("no lock for %s (%s); other processes may build it too", path, error)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


def _known(place: Path, data: Found, options: Mapping[str, str]) -> tuple[SampleIndex | None, str]:
    """The index at a place, if any, and the reason why it is stale; empty if it is valid."""
    if not place.exists():
        return None, ""
    try:
        known = read_index(place, data.path)
    except OutdatedIndex:
        return None, "another version wrote it"
    return known, _stale(known, data, options)


def _opened_itself(path: Path, kind: Kind | None, *, is_trusted: bool) -> SampleIndex:
    """An index by its own path, if its data have not changed."""
    index = read_index(path)
    if not is_trusted:
        if not index.root.exists():
            raise DataError(f"{path} is the index of {index.root}, which does not exist")
        data = Found(get_reader(index.format), index.root, KINDS[index.kind])
        reason = _stale(index, data, index.options)
        if reason:
            command = f"qmargin data index {index.root} --out {path}"
            raise DataError(f"{path} is stale: {reason}; build it again with {command}")
    if kind is not None and index.kind != kind.name:
        raise _other_kind(path, index.kind, kind)
    return index


def _stale(index: SampleIndex, data: Found, options: Mapping[str, str]) -> str:
    """Reason why an index is stale; empty if it is valid."""
    if (index.format, index.kind) != (data.reader.format, (data.kind or IMAGES).name):
        return f"it is of {index.kind} of the format {index.format}"
    if dict(index.options) != dict(options):
        return f"it was built with the options {dict(index.options)}"
    if index.is_racy:
        return f"{data.path} was changing while it was built"
    before = index.fingerprint
    now = data.reader.hasher(_scan(data, options), index, None).fingerprint
    if before is None or now == before:
        return ""
    change = _IN_PLACE if before.is_changed_in_place(now) else "changed"
    return f"{data.path} has {now}, it was of {before}: {change}"
