"""Image folders: one folder per identity, named after it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qmargin.data.fingerprints import Fingerprint, started_after
from qmargin.data.images import EXTENSIONS
from qmargin.data.index import MAX_SAMPLE_BYTES, Index
from qmargin.data.index_writer import IndexWriter
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

_COLUMNS = ("length", "checksum", "name")
_KIND = "folders"
_PART_NAMES = (
    "train training test testing val valid validation dev devel development eval evaluation holdout"
)
_LIBRISPEECH = (
    "train-clean-100 train-clean-360 train-other-500 dev-clean dev-other test-clean test-other"
)
PARTS = frozenset(
    f"{part}{suffix}"
    for part in _PART_NAMES.split()
    for suffix in ("", "set", "_set", "-set", "_split", "_data", "_images", "_wav")
) | frozenset((*_LIBRISPEECH.split(), "wav", "aac"))
"""Lower-case names of folders that hold a part of a dataset, each identity one level below."""


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


def check_no_parts(
    root: Path,
    identities: Sequence[str],
    *,
    is_nested: Callable[[str], bool],
    has_samples: Callable[[str], bool],
) -> None:
    """Refuse a path one level too high: folders that are parts of a dataset and no identities.

    Args:
        root: The path that was given.
        identities: Names of its folders.
        is_nested: Whether the samples of a folder are in folders inside it.
        has_samples: Whether there are samples in a folder or below it.

    Raises:
        DataError: All folders with samples are called like parts, such as ``train`` and ``test``;
            or two of these have folders inside; or there is one folder around all others.
    """
    parts = [name for name in identities if name.lower() in PARTS]
    if len(identities) == 1 and not parts and is_nested(identities[0]):
        raise DataError(
            f"{root} has one folder, {identities[0]!r}, with folders inside, so there is one "
            f"identity; give the folder whose folders are the identities, such as "
            f"{root / identities[0]}"
        )
    if not parts:
        return
    others = (name for name in identities if name.lower() not in PARTS)
    if sum(map(is_nested, parts)) < 2 and any(map(has_samples, others)):
        return  # people may be called Dev or Val
    first = next((name for name in parts if name.lower().startswith("train")), parts[0])
    raise DataError(
        f"{root} has the folders {', '.join(parts[:5])}, which are parts of a dataset and no "
        f"identities; give one of them, such as {root / first}"
    )


def check_image_folder(root: Path, identities: Sequence[str]) -> None:
    """Refuse folders of images that are parts of a dataset; see ``check_no_parts``."""

    def has_images(name: str) -> bool:
        return next(images_below(root, name), None) is not None

    def is_nested(name: str) -> bool:
        first = next(images_below(root, name), "")
        return first.count("/") > 1

    check_no_parts(root, identities, is_nested=is_nested, has_samples=has_images)


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
