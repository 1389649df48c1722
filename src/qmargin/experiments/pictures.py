"""Small grey pictures of a path: an NPZ file, or images in folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.folder import identity_folders
from qmargin.errors import CorruptSample, DataError

SIDE = 32
DIVIDED = ("train", "test")
_CHARACTER = re.compile(r"(.+)-character\d+")  # as ``qmargin data get omniglot`` names folders


@dataclass(frozen=True, eq=False)
class StoredPictures:
    """Pictures of a path.

    Attributes:
        pictures: ``[n, SIDE, SIDE]``.
        labels: Identities, ``[n]``.
        names: Of the samples.
        is_test: Which are for the test, where the data says it.
        origin: The path.
        is_ink: Whether 255 is ink.
        groups: Of each label what it belongs to, as a character does to an alphabet, where the data
            says it. Members of a group are more alike than others.
        note: What people should know about the pictures.
    """

    pictures: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    is_test: NDArray[np.bool_] | None
    origin: str
    is_ink: bool
    groups: NDArray[np.int64] | None = None
    note: str = ""

    @property
    def digest(self) -> str:
        """Of pictures, identities and their division: other data of the same path have another."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.pictures, self.labels, self.is_test):
            if array is not None:
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def read_pictures(path: Path) -> StoredPictures:
    """Pictures of an NPZ file, or of anything that ``open_images`` reads.

    A folder that has the folders ``train`` and ``test`` and no others keeps that division. An NPZ
    file, or a folder with one, has ``label`` ``[n]`` and ``images`` ``[n, 32, 32]`` uint8
    or ``packed4`` ``[n, 512]`` (two pixels a byte, ink is bright), and maybe ``split`` ``[n]``,
    which is 0 for training and 1 for the test, and ``alphabet``, of each label the group it is in.
    Folders whose names are all like ``Greek-character01`` are in groups, too.

    Args:
        path: The data; nothing is written there.
    """
    files = [path] if path.suffix == ".npz" else sorted(path.glob("*.npz")) if path.is_dir() else []
    for file in files:
        if (found := _from_npz(file, path)) is not None:
            return found
    if path.is_dir() and set(identity_folders(path)) == set(DIVIDED):
        return _on_dark_ground(_divided(path))
    return _on_dark_ground(_from_images(path))


def _on_dark_ground(stored: StoredPictures) -> StoredPictures:
    """Drawings on white paper inverted: a sample that is moved has black coming in."""
    frame = np.ones((SIDE, SIDE), dtype=bool)
    frame[1:-1, 1:-1] = False
    if stored.pictures[:, frame].mean() < 128.0:
        return stored
    return replace(stored, pictures=255 - stored.pictures, is_ink=True)


def _divided(path: Path) -> StoredPictures:
    """Image folders of training and test side by side: that division is kept."""
    train, test = (_from_images(path / name) for name in DIVIDED)
    labels = np.concatenate([train.labels, test.labels + train.labels.max() + 1])
    return StoredPictures(
        pictures=np.concatenate([train.pictures, test.pictures]),
        labels=labels,
        names=tuple(
            f"{name}-{row}"
            for name, part in zip(DIVIDED, (train, test), strict=True)
            for row in part.names
        ),
        is_test=np.arange(len(labels)) >= len(train.labels),
        origin=str(path),
        is_ink=train.is_ink,
        groups=_joined(train.groups, test.groups),
        note="\n".join(filter(None, (train.note, test.note))),
    )


def _joined(
    train: NDArray[np.int64] | None, test: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    if train is None or test is None:
        return None
    return np.concatenate([train, test + train.max() + 1])


def _from_npz(file: Path, path: Path) -> StoredPictures | None:
    from qmargin.data.readers.npz import read_npz

    arrays = read_npz(file)
    if "label" not in arrays or not {"packed4", "images"} & arrays.keys():
        if file != path:
            return None  # a folder may hold other files
        raise DataError(
            f"{file} has the arrays {', '.join(arrays) or 'none'}; it needs label, a number for "
            f"each picture, and images, uint8 [n, {SIDE}, {SIDE}], or packed4"
        )
    pictures = arrays["images"] if "images" in arrays else _unpacked(arrays["packed4"], file)
    given = _integers(file, arrays, "label")
    if pictures.shape != (len(given), SIDE, SIDE) or pictures.dtype != np.uint8:
        raise DataError(
            f"{file} has pictures of shape {list(pictures.shape)} and {len(given)} labels; it "
            f"needs uint8 [{len(given)}, {SIDE}, {SIDE}]"
        )
    known, labels = np.unique(given, return_inverse=True)
    return StoredPictures(
        pictures,
        labels.astype(np.int64),
        names=tuple(f"class-{label}/sample-{row}" for row, label in enumerate(given.tolist())),
        is_test=_split_of(file, arrays, given),
        origin=str(path),
        is_ink=True,
        groups=_alphabets_of(file, arrays, known),
    )


def _integers(file: Path, arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.int64]:
    found = arrays[name]
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise DataError(
            f"{file} has {name} of {found.dtype} and shape {list(found.shape)}; it needs one "
            "integer for each picture"
        )
    return found.astype(np.int64)


def _split_of(
    file: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    if "split" not in arrays:
        return None
    split = _integers(file, arrays, "split")
    others = sorted(set(split.tolist()) - {0, 1})
    if len(split) != len(labels) or others:
        raise DataError(
            f"{file} has split of {len(split)} numbers for {len(labels)} pictures"
            + (f", {others[0]} among them" if others else "")
            + "; it needs 0, for training, or 1, for the test, for each picture"
        )
    is_test: NDArray[np.bool_] = split == 1
    both = np.intersect1d(labels[is_test], labels[~is_test])
    if len(both):
        raise DataError(
            f"{file} has {len(both)} identities with pictures of both splits, such as {both[0]}; "
            "those of the test have to be others"
        )
    return is_test


def _alphabets_of(
    file: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Groups of the labels, which are ordered, from an array with one of each number up to them."""
    if "alphabet" not in arrays:
        return None
    given = arrays["alphabet"]
    most = int(labels.max(initial=-1))
    if given.shape != (most + 1,) or labels.min(initial=0) < 0 or given.dtype.kind not in "iuSU":
        raise DataError(
            f"{file} has alphabet of {given.dtype} and shape {list(given.shape)}, and labels from "
            f"{int(labels.min(initial=0))} to {most}; it needs one number or name for each label"
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)[labels]


def _unpacked(packed: NDArray[Any], file: Path) -> NDArray[np.uint8]:
    if packed.dtype != np.uint8 or packed.shape[1:] != (SIDE * SIDE // 2,):
        raise DataError(
            f"{file} has packed4 of {packed.dtype} and shape {list(packed.shape)}; it needs uint8 "
            f"[n, {SIDE * SIDE // 2}]"
        )
    pixels = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(packed), SIDE, SIDE)
    return pixels * np.uint8(17)


def _from_images(path: Path) -> StoredPictures:
    """Every image in grey and small; what cannot be decoded is left out, and said so."""
    from PIL import Image

    from qmargin.data.open import open_images

    with TemporaryDirectory() as folder:  # every picture is read once: no index is kept
        dataset = open_images(path, index=Path(folder) / "data.qmindex")
        pictures, rows, corrupt = [], [], []
        for row in range(len(dataset)):
            try:
                image = Image.fromarray(dataset.decode(row)).convert("L")
            except CorruptSample as error:
                corrupt.append(str(error))
                continue
            pictures.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)))
            rows.append(row)
        labels = dataset.labels[rows].astype(np.int64)
        folders = [dataset.class_name(label) for label in range(dataset.num_classes)]
    if not rows:
        raise DataError(
            f"{path} has {len(dataset)} images and none can be decoded"
            + (f", the first because of this: {corrupt[0]}" if corrupt else "; check the path")
        )
    names = tuple(f"row-{row}" for row in rows)  # names of files may say who is in them
    note = ""
    if corrupt:
        note = (
            f"{len(corrupt)} of {len(dataset)} images in {path} cannot be decoded and are left "
            f"out, the first because of this: {corrupt[0]}"
        )
    pixels = np.stack(pictures)
    return StoredPictures(
        pixels, labels, names, None, str(path), is_ink=False, groups=_groups_of(folders), note=note
    )


def _groups_of(folders: Sequence[str]) -> NDArray[np.int64] | None:
    """Alphabets of folders of characters; None where one has another name."""
    found = [_CHARACTER.fullmatch(folder) for folder in folders]
    alphabets = [match[1] for match in found if match]
    if len(alphabets) < len(folders):
        return None
    return np.unique(alphabets, return_inverse=True)[1].astype(np.int64)
