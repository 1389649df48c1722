"""What the demo trains and tests on: stroke identities, or pictures from a path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.drawings import Drawings
from qmargin.data.image_folder import identity_folders
from qmargin.data.order import derived_seed
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.evaluate import Pictures
from qmargin.demo.recipe import SHIFT, Size
from qmargin.errors import CorruptSample, DataError

if TYPE_CHECKING:
    from qmargin.data.samples import Dataset

SIDE = 32
TRAIN_SHARE = 0.6  # of the identities, where the data does not say which ones
INDEX = "data.qmindex"
DIVIDED = ("train", "test")
_CHARACTER = re.compile(r"(.+)-character\d+")  # as ``qmargin data get omniglot`` names folders


@dataclass(frozen=True)
class World:
    """Data of one seed; identities of training and test are disjoint.

    Attributes:
        train: None for what the recipe itself describes.
        test: Whose pairs are tested.
        size: As far as the data allows.
        name: Of the protocol.
        is_ink: Whether 255 is ink, and pictures are shown inverted.
    """

    train: Dataset | None
    test: Pictures
    size: Size
    name: str
    is_ink: bool = True


@dataclass(frozen=True, eq=False)
class Stored:
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
    """

    pictures: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    is_test: NDArray[np.bool_] | None
    origin: str
    is_ink: bool
    groups: NDArray[np.int64] | None = None


def stroke_world(size: Size, seed: int) -> World:
    """Synthetic identities."""
    test = StrokeIdentities(size.num_test, size.samples_test, seed=seed, split="test")
    return World(None, test, size, f"synthetic stroke identities, seed {seed}")


def stored_world(stored: Stored, size: Size, seed: int) -> World:
    """Pictures of a path, divided by their identities; no more of them than the plan reads.

    Raises:
        DataError: There are too few identities to train and test.
    """
    order = sorted(set(stored.labels.tolist()), key=lambda label: derived_seed(seed, label))
    if stored.is_test is None:
        split = round(TRAIN_SHARE * len(order))
        train, test = order[:split], order[split:]
    else:
        tested = set(stored.labels[stored.is_test].tolist())
        train = [label for label in order if label not in tested]
        test = [label for label in order if label in tested]
    if len(train) < 2 or len(test) < 2:
        raise DataError(
            f"{stored.origin} has {len(train)} identities to train and {len(test)} to test; at "
            "least 2 of each are needed"
        )
    budget = size.total_steps * size.batch_size
    learned = part_of(stored, train, budget, shift=SHIFT)
    epochs = max(1, round(budget / len(learned)))
    return World(
        train=learned,
        test=part_of(stored, test, size.num_test * size.samples_test),
        size=size._replace(
            num_classes=learned.num_classes,
            epochs=epochs,
            batch_size=min(size.batch_size, len(learned)),
        ),
        name=f"{Path(stored.origin).name}, seed {seed}",
        is_ink=stored.is_ink,
    )


def part_of(
    stored: Stored, labels: Sequence[int], most: int | None = None, *, shift: int = 0
) -> Drawings:
    """Samples of some identities, as many whole identities as ``most`` samples allow."""
    counts = np.bincount(stored.labels)
    kept = list(labels)
    if most is not None:
        totals = np.cumsum(counts[kept])
        kept = kept[: max(2, int(np.searchsorted(totals, most, side="right")))]
    numbers = np.full(len(counts), -1)
    numbers[kept] = np.arange(len(kept))
    rows = np.flatnonzero(numbers[stored.labels] >= 0)
    rows = rows[np.argsort(numbers[stored.labels[rows]], kind="stable")]
    return Drawings(
        pictures=stored.pictures[rows],
        labels=numbers[stored.labels[rows]],
        names=tuple(stored.names[row] for row in rows),
        origin=stored.origin,
        shift=shift,
    )


def read_stored(path: Path, index: Path) -> Stored:
    """Pictures of an NPZ file, or of anything that ``open_images`` reads.

    A folder that has the folders ``train`` and ``test`` and no others keeps that division. An NPZ
    file, or a folder with one, has ``label`` ``[n]`` and ``images`` ``[n, 32, 32]`` uint8
    or ``packed4`` ``[n, 512]`` (two pixels a byte, ink is bright), and maybe ``split`` ``[n]``,
    which is 0 for training and 1 for the test, and ``alphabet``, of each label the group it is in.
    Folders whose names are all like ``Greek-character01`` are in groups, too.

    Args:
        path: The data.
        index: Where the index of an image folder may be written.
    """
    files = [path] if path.suffix == ".npz" else sorted(path.glob("*.npz")) if path.is_dir() else []
    for file in files:
        if (found := _from_npz(file, path)) is not None:
            return found
    if path.is_dir() and set(identity_folders(path)) == set(DIVIDED):
        return _on_dark_ground(_divided(path, index))
    return _on_dark_ground(_from_images(path, index))


def _on_dark_ground(stored: Stored) -> Stored:
    """Drawings on white paper inverted: a sample that is moved has black coming in."""
    frame = np.ones((SIDE, SIDE), dtype=bool)
    frame[1:-1, 1:-1] = False
    if stored.pictures[:, frame].mean() < 128.0:
        return stored
    return replace(stored, pictures=255 - stored.pictures, is_ink=True)


def _divided(path: Path, index: Path) -> Stored:
    """Image folders of training and test side by side: that division is kept."""
    train, test = (
        _from_images(path / name, index.with_name(f"{name}.{index.name}")) for name in DIVIDED
    )
    labels = np.concatenate([train.labels, test.labels + train.labels.max() + 1])
    return Stored(
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
    )


def _joined(
    train: NDArray[np.int64] | None, test: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    if train is None or test is None:
        return None
    return np.concatenate([train, test + train.max() + 1])


def _from_npz(file: Path, path: Path) -> Stored | None:
    from qmargin.evaluation.npz_scores import read_npz

    arrays = read_npz(file)
    if "label" not in arrays or not {"packed4", "images"} & arrays.keys():
        return None
    pictures = arrays["images"] if "images" in arrays else _unpacked(arrays["packed4"], file)
    labels = arrays["label"].astype(np.int64)
    split = arrays.get("split")
    if pictures.shape != (len(labels), SIDE, SIDE) or pictures.dtype != np.uint8:
        raise DataError(
            f"{file} has pictures of shape {list(pictures.shape)} and {len(labels)} labels; it "
            f"needs uint8 [{len(labels)}, {SIDE}, {SIDE}]"
        )
    names = tuple(f"class-{label}/sample-{row}" for row, label in enumerate(labels.tolist()))
    is_test = None if split is None else np.asarray(split) == 1
    groups = arrays.get("alphabet")
    if groups is not None and groups.shape != (int(labels.max(initial=-1)) + 1,):
        raise DataError(
            f"{file} has alphabet of shape {list(groups.shape)} and labels up to "
            f"{int(labels.max(initial=-1))}; it needs one number for each label"
        )
    groups = None if groups is None else groups.astype(np.int64)
    return Stored(pictures, labels, names, is_test, str(path), is_ink=True, groups=groups)


def _unpacked(packed: NDArray[Any], file: Path) -> NDArray[np.uint8]:
    if packed.dtype != np.uint8 or packed.shape[1:] != (SIDE * SIDE // 2,):
        raise DataError(
            f"{file} has packed4 of {packed.dtype} and shape {list(packed.shape)}; it needs uint8 "
            f"[n, {SIDE * SIDE // 2}]"
        )
    pixels = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(packed), SIDE, SIDE)
    return pixels * np.uint8(17)


def _from_images(path: Path, index: Path) -> Stored:
    """Every image in grey and small; what cannot be decoded is left out."""
    from PIL import Image

    from qmargin.data.open import open_images

    dataset = open_images(path, index=index)
    pictures, rows = [], []
    for row in range(len(dataset)):
        try:
            image = Image.fromarray(dataset.decode(row)).convert("L")
        except CorruptSample:
            continue
        pictures.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)))
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has {len(dataset)} images and none can be decoded; check the path")
    labels = dataset.labels[rows].astype(np.int64)
    names = tuple(f"row-{row}" for row in rows)  # names of files may say who is in them
    folders = [dataset.class_name(label) for label in range(dataset.num_classes)]
    groups = _groups_of(folders)
    return Stored(np.stack(pictures), labels, names, None, str(path), is_ink=False, groups=groups)


def _groups_of(folders: Sequence[str]) -> NDArray[np.int64] | None:
    """Alphabets of folders of characters; None where one has another name."""
    found = [_CHARACTER.fullmatch(folder) for folder in folders]
    alphabets = [match[1] for match in found if match]
    if len(alphabets) < len(folders):
        return None
    return np.unique(alphabets, return_inverse=True)[1].astype(np.int64)
