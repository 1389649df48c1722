"""Small grey pictures of a path: an NPZ file, or images in folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
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
    """Pictures of a path."""

    pictures: NDArray[np.uint8]  # [n, SIDE, SIDE]
    labels: NDArray[np.int64]
    names: tuple[str, ...]  # of the samples
    origin: str
    is_ink: bool  # 255 is ink
    is_test: NDArray[np.bool_] | None = None  # if the data have it
    groups: NDArray[np.int64] | None = None  # of each label, as a character is of an alphabet
    note: str = ""  # a note on the pictures

    @property
    def digest(self) -> str:
        """Hash of pictures, identities and their division: it changes with the data of a path."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.pictures, self.labels, self.is_test):
            if array is not None:
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def read_pictures(path: Path) -> StoredPictures:
    """Read pictures of an NPZ file, or of any path that ``open_images`` reads; write nothing there.

    A folder with only the folders ``train`` and ``test`` keeps that division. An NPZ
    file, or a folder with one, has ``label`` ``[n]`` and ``images`` ``[n, 32, 32]`` uint8
    or ``packed4`` ``[n, 512]`` (two pixels a byte, ink is bright), and maybe ``split`` ``[n]``,
    which is 0 for training and 1 for the test, and ``alphabet``, of each label the group it is in.
    Folders whose names are all like ``Greek-character01`` are in groups, too.
    """
    files = [path] if path.suffix == ".npz" else sorted(path.glob("*.npz")) if path.is_dir() else []
    for file in files:
        if (found := _from_npz(file, path)) is not None:
            return found
    if path.is_dir() and set(identity_folders(path)) == set(DIVIDED):
        stored = _divided(path)
    else:
        stored = _from_images(path)
    frame = np.ones((SIDE, SIDE), dtype=bool)
    frame[1:-1, 1:-1] = False
    if stored.pictures[:, frame].mean() < 128.0:
        return stored
    # drawings on white paper: moving a sample would bring in black
    return replace(stored, pictures=255 - stored.pictures, is_ink=True)


def _divided(path: Path) -> StoredPictures:
    """Image folders of training and test side by side: that division is kept."""
    train, test = (_from_images(path / name) for name in DIVIDED)
    labels, groups = np.concatenate([train.labels, test.labels + train.labels.max() + 1]), None
    if train.groups is not None and test.groups is not None:
        groups = np.concatenate([train.groups, test.groups + train.groups.max() + 1])
    return StoredPictures(
        np.concatenate([train.pictures, test.pictures]),
        labels,
        (*(f"train-{row}" for row in train.names), *(f"test-{row}" for row in test.names)),
        str(path),
        is_ink=False,
        is_test=np.arange(len(labels)) >= len(train.labels),
        groups=groups,
        note="\n".join(filter(None, (train.note, test.note))),
    )


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
    given = _integers(file, arrays, "label")
    if "images" in arrays:
        pictures = _checked(file, arrays, "images", (len(given), SIDE, SIDE))
    else:
        packed = _checked(file, arrays, "packed4", (len(given), SIDE * SIDE // 2))
        pixels = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(packed), SIDE, SIDE)
        pictures = pixels * np.uint8(17)
    known, labels = np.unique(given, return_inverse=True)
    return StoredPictures(
        pictures,
        labels.astype(np.int64),
        tuple(f"class-{label}/sample-{row}" for row, label in enumerate(given.tolist())),
        str(path),
        is_ink=True,
        is_test=_split_of(file, arrays, given) if "split" in arrays else None,
        groups=_alphabets_of(file, arrays, known) if "alphabet" in arrays else None,
    )


def _described(file: Path, arrays: Mapping[str, NDArray[Any]], name: str) -> str:
    return f"{file} has {name} of {arrays[name].dtype} and shape {list(arrays[name].shape)}"


def _checked(
    file: Path, arrays: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    found = arrays[name]
    if found.dtype != np.uint8 or found.shape != shape:
        raise DataError(
            f"{_described(file, arrays, name)}; its {shape[0]} labels need uint8 {list(shape)}"
        )
    return found


def _integers(file: Path, arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.int64]:
    if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iub":
        raise DataError(f"{_described(file, arrays, name)}; it needs one integer for each picture")
    return arrays[name].astype(np.int64)


def _split_of(
    file: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
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
            f"{file} has {len(both)} identities in both splits, such as {both[0]}; move them"
        )
    return is_test


def _alphabets_of(
    file: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Groups of the labels, which are ordered, from an array with one of each number up to them."""
    given = arrays["alphabet"]
    least, most = int(labels.min(initial=0)), int(labels.max(initial=-1))
    if given.shape != (most + 1,) or least < 0 or given.dtype.kind not in "iuSU":
        raise DataError(
            f"{_described(file, arrays, 'alphabet')}, and labels from {least} to {most}; it needs "
            "one number or name for each label"
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)[labels]


def _from_images(path: Path) -> StoredPictures:
    """Every image in grey and small; undecodable images are left out and reported."""
    from PIL import Image

    from qmargin.data.open import open_images

    with TemporaryDirectory() as folder:  # every picture is read once: no index is kept
        dataset = open_images(path, index=Path(folder) / "data.qmindex")
        pictures, rows, note = [], [], ""
        for row in range(len(dataset)):
            try:
                image = Image.fromarray(dataset.decode(row)).convert("L")
            except CorruptSample as error:
                note = note or f"left out, the first because of this: {error}"
                continue
            pictures.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)))
            rows.append(row)
        labels = dataset.labels[rows].astype(np.int64)
        folders = [dataset.class_name(label) for label in range(dataset.num_classes)]
    if note:
        count = len(dataset) - len(rows)
        note = f"{count} of {len(dataset)} images in {path} cannot be decoded and are {note}"
    if not rows:
        raise DataError(note or f"{path} has no images; check the path")
    matches = [_CHARACTER.fullmatch(name) for name in folders]
    alphabets = [match[1] for match in matches if match]
    groups = np.unique(alphabets, return_inverse=True)[1].astype(np.int64)
    return StoredPictures(
        np.stack(pictures),
        labels,
        tuple(f"row-{row}" for row in rows),  # names of files may identify people
        str(path),
        is_ink=False,
        groups=groups if len(alphabets) == len(folders) else None,
        note=note,
    )
