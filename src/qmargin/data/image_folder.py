"""Image folders: one folder per identity, named after it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from qmargin.data.fingerprints import Fingerprint, started_after
from qmargin.data.images import EXTENSIONS
from qmargin.data.index import MAX_SAMPLE_BYTES, Index
from qmargin.data.index_writer import IndexWriter
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

_COLUMNS = ("length", "checksum", "name")
_KIND = "folders"


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


def images_below(
    root: Path, identity: str, *, before_listing: Callable[[str], None] | None = None
) -> Iterator[str]:
    """Images of an identity as paths relative to the root, in order, with those in subfolders.

    Args:
        root: The dataset.
        identity: Name of its folder.
        before_listing: Called with each folder, relative to the root, before it is listed.
    """
    waiting = [identity]
    while waiting:
        folder = waiting.pop()
        if before_listing is not None:
            before_listing(folder)
        subfolders, images = [], []
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith(".") and not entry.is_symlink():
                        subfolders.append(f"{folder}/{entry.name}")
                elif is_image_name(entry.name):
                    images.append(f"{folder}/{entry.name}")
        yield from sorted(images)
        waiting += sorted(subfolders, reverse=True)


def folder_fingerprint(root: Path, index: Index) -> str:
    """Names of the identities, and times of all folders that were listed: new ones change them."""
    found, known = Fingerprint(_KIND), []
    try:
        for name in index.folders or ():
            found.add_folder(name, root / name)
            if "/" not in name:
                known.append(name)
    except (FileNotFoundError, NotADirectoryError):
        return f"no folder {name}"
    return str(found) if known == identity_folders(root) else "other identities"


def index_folder(root: Path, index: Path, *, progress: Progress | None = None) -> None:
    """Write the index of a folder of folders; labels follow the order of the identities' names.

    An identity without an image keeps its label; ``qmargin check-data`` reports it.

    Raises:
        DataError: There is no folder with an image.
    """
    identities = identity_folders(root)
    stray = sum(1 for entry in root.iterdir() if is_image_name(entry.name))
    if not identities:
        raise DataError(
            f"{root} has {stray} images and no folders; put the images of each identity into a "
            "folder of their own"
        )
    started = started_after((root / identity for identity in identities), index.parent)
    fingerprint, folders = Fingerprint(_KIND, started), list[str]()

    def note(folder: str) -> None:
        fingerprint.add_folder(folder, root / folder)
        folders.append(folder)

    with IndexWriter(index, _COLUMNS) as writer:
        for label, identity in enumerate(identities):
            for name in images_below(root, identity, before_listing=note):
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
            folders=folders,
            notes=[f"{stray} images outside the folders were left out"] if stray else [],
        )


def measure_file(path: Path) -> tuple[int, int]:
    """Length and checksum of a file; one that is too large to be an image has zeros."""
    with open_regular(path) as file:
        data = file.read(MAX_SAMPLE_BYTES + 1)
    if len(data) > MAX_SAMPLE_BYTES:
        return 0, 0
    return len(data), zlib.crc32(data)
