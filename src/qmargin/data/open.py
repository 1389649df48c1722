"""``open_dataset``: images or recordings in any of the layouts people have, by their path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qmargin.data.audio_collection import AudioCollection
from qmargin.data.audio_index import audio_records
from qmargin.data.audio_lists import audio_layout, open_audio
from qmargin.data.encoded import ImageDataset
from qmargin.data.fingerprints import is_in_place
from qmargin.data.image_folder import (
    check_image_folder,
    folder_fingerprint,
    identity_folders,
    index_folder,
)
from qmargin.data.images import Channels, Decoder
from qmargin.data.index import (
    SUFFIX,
    Index,
    OutdatedIndex,
    announce,
    index_place,
    read_index,
)
from qmargin.data.index_writer import one_builder
from qmargin.data.manifest import index_manifest, manifest_fingerprint
from qmargin.data.recordio_index import index_recordio, recordio_fingerprint
from qmargin.data.tar_members import archive_files
from qmargin.data.tar_shards import index_tar, tar_fingerprint
from qmargin.errors import ConfigError, DataError
from qmargin.files import Progress

_log = logging.getLogger("qmargin.data")


@dataclass(frozen=True)
class Layout:
    """A way to store images: what its index is called, made by, and outdated by."""

    format: str
    build: Callable[..., None]
    fingerprint: Callable[[Path, Index], str]


_LAYOUTS = {
    layout.format: layout
    for layout in (
        Layout("recordio", index_recordio, recordio_fingerprint),
        Layout("tar", index_tar, tar_fingerprint),
        Layout("manifest", index_manifest, manifest_fingerprint),
        Layout("folder", index_folder, folder_fingerprint),
    )
}


_OPTIONS = {"images": ("decoder", "channels"), "recordings": ("root", "split", "sample_rate")}
_NEVER_AUDIO = (".rec", ".idx", ".bin", ".tsv", SUFFIX)


def open_dataset(
    path: str | Path,
    *,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    verify: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ImageDataset | AudioCollection:
    """Samples with labels from a path, whose layout is recognised.

    Of images: a ``.rec`` file or a folder with one, a ``.tar`` file or a folder of them, a ``.csv``
    or ``.tsv`` manifest, a folder with one folder per identity, or an index of any of these; see
    ``open_images``. Of recordings: a folder with one folder per speaker, Kaldi's ``wav.scp`` and
    ``utt2spk``, JSON lines, tar shards of ``key.wav`` and ``key.spk``, or a CSV; see
    ``open_audio``. Either has ``labels``, ``num_classes``, ``class_name``, ``read`` for encoded
    bytes, ``sample_id`` and ``source``; indexing gives the picture, or the samples, and the label.

    Args:
        path: The data, or the index of images.
        index: Where the index is, or is to be; beside the data where it is left out.
        index_dir: Folder of indices, instead of beside the data.
        verify: Compare every sample with its checksum when it is read. Recordings are read without
            an index otherwise.
        progress: Called while an index is built.
        options: ``decoder`` and ``channels`` of images; ``root``, ``split`` and ``sample_rate`` of
            recordings.

    Raises:
        DataError: The layout is unknown, or the data cannot be indexed.

    Examples:
        >>> import tempfile
        >>> from qmargin.data.recordio import RecordWriter, pack_payload
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RecordWriter(Path(folder.name, "train.rec")) as writer:
        ...     for key, label in enumerate((0, 0, 1)):
        ...         writer.write(key, pack_payload(label, b"not really a picture"))
        >>> dataset = open_dataset(folder.name)
        >>> len(dataset), dataset.labels.tolist(), dataset.read(0)
        (3, [0, 0, 1], b'not really a picture')
        >>> folder.cleanup()
    """
    kind = "recordings" if is_audio(path) else "images"
    for name in options:
        if name not in _OPTIONS[kind]:
            known = ", ".join(_OPTIONS[kind])
            raise ConfigError(f"{path} has {kind}, and {name} is no option of them; known: {known}")
    if kind == "images":
        return open_images(
            path, index=index, index_dir=index_dir, verify=verify, progress=progress, **options
        )
    collection = open_audio(path, progress=progress, **options)
    if verify:
        place = index_place(Path(path).resolve(), index_dir) if index is None else Path(index)
        if index is None and index_dir is None and not place.exists():
            announce(path, place)
        records = audio_records(collection, place, progress=progress)
        collection.verify_([item.size for item in records], [item.checksum for item in records])
    elif index is not None:
        raise ConfigError(
            f"index is {index} and recordings are read without one; set verify to compare them with"
            " it"
        )
    return collection


def is_audio(path: str | Path) -> bool:
    """Whether what is at a path is a list or folder of recordings."""
    path = Path(path)
    has_records = path.is_dir() and any(path.glob("*.rec"))
    if has_records or path.suffix.lower() in _NEVER_AUDIO:
        return False
    return audio_layout(path) is not None


def open_images(
    path: str | Path,
    *,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    verify: bool = False,
    decoder: Decoder = "pillow",
    channels: Channels = "rgb",
    progress: Progress | None = None,
) -> ImageDataset:
    """Images with labels from a path, whose layout is recognised.

    The index is built on first use, which reads all data once, and again when files have come or
    gone.

    Args:
        path: The data, or its index.
        index: Where the index is, or is to be; beside the data where it is left out.
        index_dir: Folder of indices, instead of beside the data.
        verify: Compare every sample with its checksum, and its label with that of the data, when
            it is read.
        decoder: ``"pillow"``, or ``"simplejpeg"``, which gives the same bits faster.
        channels: Order of the stored channels; pictures are RGB either way.
        progress: Called while an index is built.

    Raises:
        DataError: The layout is unknown, or the data cannot be indexed.
    """
    found = open_index(path, index=index, index_dir=index_dir, progress=progress)
    return ImageDataset(found, verify=verify, decoder=decoder, channels=channels)


def open_index(
    path: str | Path,
    *,
    index: str | Path | None = None,
    index_dir: str | Path | None = None,
    rebuild: bool = False,
    keep_changed: bool = False,
    progress: Progress | None = None,
) -> Index:
    """The index of a dataset, built where it is missing, stale or asked for.

    Args:
        path: The data, or its index.
        index: Where the index is, or is to be.
        index_dir: Folder of indices, instead of beside the data.
        rebuild: Build it in any case.
        keep_changed: Keep the index of files that were changed in place, to find the changes.
        progress: Called while it is built.
    """
    path = Path(path)
    if path.suffix == SUFFIX and index is None and not rebuild:
        return read_index(path) if keep_changed else _trusted(read_index(path))
    with _no_recordings(path):
        format, data = recognise(path)
    place = index_place(data, index_dir) if index is None else Path(index)
    known = None if rebuild else _fresh(place, format, data, keep_changed=keep_changed)
    if known is not None:
        return known
    if not place.parent.is_dir():
        raise DataError(f"{place.parent} is not a folder; make it, or give another index")
    with one_builder(place):
        known = None if rebuild else _fresh(place, format, data)  # made by another process
        if known is not None:
            return known
        if place.exists() and not rebuild:
            _log.warning("%s is built again: %s", place, _reason(place, format, data))
        elif index is None and index_dir is None and not rebuild:
            announce(data, place)
        with _no_recordings(path):
            _LAYOUTS[format].build(data, place, progress=progress)
        return read_index(place, data)


@contextmanager
def _no_recordings(path: Path) -> Iterator[None]:
    """Say so where no image is found because there are recordings."""
    try:
        yield
    except DataError as error:
        if not path.exists() or not is_audio(path):
            raise
        raise DataError(
            f"{path} has recordings, and images are expected; take a speaker recipe, or set "
            "data.kind to audio"
        ) from error


def _fresh(place: Path, format: str, data: Path, *, keep_changed: bool = False) -> Index | None:
    """The index at a place, if there is one and the data have not changed."""
    if not place.exists():
        return None
    try:
        known = read_index(place, data)
    except OutdatedIndex:
        return None
    if _stale(known, format, data) is None:
        return known
    if keep_changed and known.format == format and not known.is_racy:
        now = _LAYOUTS[format].fingerprint(data, known)
        return known if is_in_place(known.fingerprint, now) else None
    return None


def _reason(place: Path, format: str, data: Path) -> str | None:
    try:
        return _stale(read_index(place, data), format, data)
    except OutdatedIndex:
        return "another version wrote it"


def _trusted(index: Index) -> Index:
    """An index that was opened by its own path, if its data have not changed."""
    if not index.root.exists():
        raise DataError(f"{index.path} is the index of {index.root}, which does not exist")
    reason = _stale(index, index.format, index.root) if index.format in _LAYOUTS else "no layout"
    if reason is not None:
        raise DataError(
            f"{index.path} is stale: {reason}; build it again with qmargin data index {index.root} "
            f"--out {index.path}"
        )
    return index


def _stale(index: Index, format: str, data: Path) -> str | None:
    if index.format != format:
        return f"it is of {index.format} data"
    if index.is_racy:
        return f"{data} was changing while it was built"
    now = _LAYOUTS[format].fingerprint(data, index)
    return None if now == index.fingerprint else f"{data} has {now}, it was of {index.fingerprint}"


def recognise(path: Path) -> tuple[str, Path]:
    """Format of the data at a path, and the path that stands for it.

    Raises:
        DataError: Nothing there is known.
    """
    path = path.resolve()
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder of images or recordings")
    if path.is_dir():
        return _recognise_folder(path)
    suffix = path.suffix.lower()
    if suffix in (".rec", ".idx"):
        records = path.with_suffix(".rec")
        if not records.exists():
            raise DataError(f"{records} does not exist; {path.name} is of no use without it")
        return "recordio", records
    if suffix in (".csv", ".tsv"):
        return "manifest", path
    if suffix == ".tar":
        return "tar", path
    if suffix == ".bin":
        raise DataError(f"{path} is a verification set; use qmargin.data.read_bin")
    raise DataError(
        f"{path} is of no known layout; give a .rec, .tar, .csv or .tsv file, JSON lines, or a "
        "folder with one folder per identity"
    )


def _recognise_folder(path: Path) -> tuple[str, Path]:
    records = sorted(path.glob("*.rec"))
    if len(records) > 1:
        names = ", ".join(record.name for record in records[:5])
        raise DataError(f"{path} has {len(records)} .rec files ({names}); give one of them")
    if records:
        return "recordio", records[0]
    if archive_files(path):
        return "tar", path
    if identities := identity_folders(path):
        check_image_folder(path, identities)
        return "folder", path
    manifests = sorted((*path.glob("*.csv"), *path.glob("*.tsv")))
    if len(manifests) == 1:
        return "manifest", manifests[0]
    raise DataError(
        f"{path} has no folders, archives or records; put the images of each identity into a "
        "folder of their own"
    )
