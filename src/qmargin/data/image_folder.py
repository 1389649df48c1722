"""Image folders: one folder per identity, named after it."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from qmargin.data.images import EXTENSIONS
from qmargin.data.index import MAX_SAMPLE_BYTES
from qmargin.data.index_writer import IndexWriter
from qmargin.errors import DataError
from qmargin.files import Progress

_COLUMNS = ("length", "checksum", "name")


def is_image_name(name: str) -> bool:
    """Whether a file is taken for an image by its name.

    Examples:
        >>> is_image_name("1.JPG"), is_image_name("notes.txt"), is_image_name(".hidden.jpg")
        (True, False, False)
    """
    return not name.startswith(".") and name.rpartition(".")[2].lower() in EXTENSIONS


def identity_folders(root: Path) -> list[str]:
    """Names of the folders of a dataset, in order; hidden ones are left out."""
    with os.scandir(root) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


def images_below(root: Path, identity: str) -> Iterator[str]:
    """Images of an identity as paths relative to the root, in order, with those in subfolders."""
    for folder, subfolders, names in os.walk(root / identity):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        relative = Path(folder).relative_to(root).as_posix()
        for name in sorted(filter(is_image_name, names)):
            yield f"{relative}/{name}"


def folder_fingerprint(root: Path) -> str:
    """Names and times of the identities' folders: both change as files come and go."""
    digest = hashlib.sha256()
    names = identity_folders(root)
    for name in names:
        digest.update(f"{name}\0{(root / name).stat().st_mtime_ns}\0".encode("utf-8", "replace"))
    return f"{len(names)} folders {digest.hexdigest()[:16]}"


def index_folder(root: Path, index: Path, *, progress: Progress | None = None) -> None:
    """Write the index of a folder of folders; labels follow the order of the identities' names.

    An identity without an image keeps its label; ``qmargin check-data`` reports it.

    Raises:
        DataError: There is no folder with an image.
    """
    fingerprint = folder_fingerprint(root)  # before reading: what changes meanwhile makes it stale
    identities = identity_folders(root)
    stray = sum(1 for entry in root.iterdir() if is_image_name(entry.name))
    if not identities:
        raise DataError(
            f"{root} has {stray} images and no folders; put the images of each identity into a "
            "folder of their own"
        )
    with IndexWriter(index, _COLUMNS) as writer:
        for label, identity in enumerate(identities):
            for name in images_below(root, identity):
                length, checksum = measure_file(root / name)
                writer.add(label=label, name=name, length=length, checksum=checksum)
            if progress is not None:
                progress(label + 1, len(identities))
        writer.finish(
            format="folder",
            root=root,
            fingerprint=fingerprint,
            num_classes=len(identities),
            class_names=identities,
            notes=[f"{stray} images outside the folders were left out"] if stray else [],
        )


def measure_file(path: Path) -> tuple[int, int]:
    """Length and checksum of a file; one that is too large to be an image has zeros."""
    with path.open("rb") as file:
        data = file.read(MAX_SAMPLE_BYTES + 1)
    if len(data) > MAX_SAMPLE_BYTES:
        return 0, 0
    return len(data), zlib.crc32(data)
