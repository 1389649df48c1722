"""``open_dataset``: images from any of the layouts people have, recognised by the path."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qmargin.data.encoded import ImageDataset
from qmargin.data.image_folder import folder_fingerprint, identity_folders, index_folder
from qmargin.data.images import Channels, Decoder
from qmargin.data.index import SUFFIX, Index, default_index, read_index
from qmargin.data.manifest import index_manifest, manifest_fingerprint
from qmargin.data.recordio_index import index_recordio, recordio_fingerprint
from qmargin.data.tar_members import archive_files
from qmargin.data.tar_shards import index_tar, tar_fingerprint
from qmargin.errors import DataError
from qmargin.files import Progress

_log = logging.getLogger("qmargin.data")


@dataclass(frozen=True)
class Layout:
    """A way to store images: what its index is called, made by, and outdated by."""

    format: str
    build: Callable[..., None]
    fingerprint: Callable[[Path], str]


_LAYOUTS = {
    layout.format: layout
    for layout in (
        Layout("recordio", index_recordio, recordio_fingerprint),
        Layout("tar", index_tar, tar_fingerprint),
        Layout("manifest", index_manifest, manifest_fingerprint),
        Layout("folder", index_folder, folder_fingerprint),
    )
}


def open_dataset(
    path: str | Path,
    *,
    index: str | Path | None = None,
    verify: bool = False,
    decoder: Decoder = "pillow",
    channels: Channels = "rgb",
    progress: Progress | None = None,
) -> ImageDataset:
    """Images with labels from a path, whose layout is recognised.

    A ``.rec`` file or a folder with one, a ``.tar`` file or a folder of them, a ``.csv`` or
    ``.tsv`` manifest, a folder with one folder per identity, or an index of any of these. The index
    is built on first use, which reads all data once, and again when files have come or gone.

    Args:
        path: The data, or its index.
        index: Where the index is, or is to be; beside the data where it is left out.
        verify: Compare every sample with its checksum when it is read.
        decoder: ``"pillow"``, or ``"simplejpeg"``, which gives the same bits faster.
        channels: Order of the stored channels; pictures are RGB either way.
        progress: Called while an index is built.

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
    found = open_index(path, index=index, progress=progress)
    return ImageDataset(found, verify=verify, decoder=decoder, channels=channels)


def open_index(
    path: str | Path,
    *,
    index: str | Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> Index:
    """The index of a dataset, built where it is missing, stale or asked for.

    Args:
        path: The data, or its index.
        index: Where the index is, or is to be.
        rebuild: Build it in any case.
        progress: Called while it is built.
    """
    path = Path(path)
    if path.suffix == SUFFIX and index is None and not rebuild:
        return read_index(path)
    format, data = recognise(path)
    place = _place(data) if index is None else Path(index)
    if not rebuild and place.exists():
        known = read_index(place, data)
        reason = _stale(known, format, data)
        if reason is None:
            return known
        _log.warning("%s is built again: %s", place, reason)
    if not place.parent.is_dir():
        raise DataError(f"{place.parent} is not a folder; make it, or give another index")
    _LAYOUTS[format].build(data, place, progress=progress)
    return read_index(place, data)


def _stale(index: Index, format: str, data: Path) -> str | None:
    if index.format != format:
        return f"it is of {index.format} data"
    now = _LAYOUTS[format].fingerprint(data)
    return None if now == index.fingerprint else f"{data} has {now}, it was of {index.fingerprint}"


def _place(data: Path) -> Path:
    """Beside the data, or, where nothing can be written there, in the user's cache."""
    beside = default_index(data)
    if beside.exists() or os.access(beside.parent, os.W_OK):
        return beside
    cache = Path.home() / ".cache" / "qmargin"
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{hashlib.sha256(os.fsencode(data)).hexdigest()[:24]}{SUFFIX}"


def recognise(path: Path) -> tuple[str, Path]:
    """Format of the data at a path, and the path that stands for it.

    Raises:
        DataError: Nothing there is known.
    """
    path = path.resolve()
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder of images")
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
        f"{path} is of no known layout; give a .rec, .tar, .csv or .tsv file, or a folder with one "
        "folder per identity"
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
    if identity_folders(path):
        return "folder", path
    manifests = sorted((*path.glob("*.csv"), *path.glob("*.tsv")))
    if len(manifests) == 1:
        return "manifest", manifests[0]
    raise DataError(
        f"{path} has no folders, archives or records; put the images of each identity into a "
        "folder of their own"
    )
