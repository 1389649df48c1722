"""Synthetic identities from a seed: for tests, examples and runs without files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.order import MAX_BYTES, check_count, check_samples, derived_seed
from qmargin.errors import ConfigError, ShapeError


class SyntheticDataset:
    """Base of synthetic datasets: sample ``i`` is of identity ``i // samples_per_class``.

    Derive a frozen dataclass with ``read``, such as ``StrokeIdentities``.
    """

    num_classes: int
    samples_per_class: int
    seed: int

    def _check_counts(self) -> None:
        check_count(self.num_classes, "num_classes", low=1)
        check_count(self.samples_per_class, "samples_per_class", low=1)

    def __len__(self) -> int:
        return self.num_classes * self.samples_per_class

    @property
    def labels(self) -> NDArray[np.int64]:
        """Identity of each sample, ``[n]``."""
        check_samples(self.num_classes, self.samples_per_class)
        return np.repeat(np.arange(self.num_classes), self.samples_per_class)

    def _label(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index // self.samples_per_class

    def _checked_labels(self, labels: NDArray[np.integer]) -> NDArray[np.int64]:
        checked = np.asarray(labels, np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= self.num_classes):
            raise IndexError(f"a label is outside [0, {self.num_classes})")
        return checked

    def sample_id(self, index: int) -> str:
        """Identity and number of a sample."""
        return f"identity-{self._label(index)}/sample-{index % self.samples_per_class}"

    def source(self, index: int) -> str:
        """Labels are computed, not written anywhere."""
        return f"{type(self).__name__} of seed {self.seed}, sample {index}"


SPLITS = ("train", "validation", "test")
SPLIT_SIZE = 1 << 40  # identities of a split: the numbers of two splits are disjoint


def check_world(num_classes: int, split: str, difficulty: float) -> None:
    """Check number of classes, split and difficulty."""
    if num_classes > SPLIT_SIZE:
        raise ConfigError(f"num_classes is {num_classes}; a split has {SPLIT_SIZE}")
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; give one of {', '.join(SPLITS)}")
    if not 0.0 <= difficulty < math.inf:
        raise ConfigError(f"difficulty is {difficulty}; it must be finite and at least 0")


def numbers_in_world(labels: NDArray[np.integer], split: str) -> NDArray[np.int64]:
    """Numbers of identities among those of all splits."""
    return np.asarray(labels, np.int64) + SPLIT_SIZE * SPLITS.index(split)


@dataclass(frozen=True)
class DrawnIdentities(SyntheticDataset):
    """Base of drawn pictures: three disjoint splits, and cached pictures.

    Subclasses have ``images``, which draws samples, and ``augmented``, which makes inputs from
    them.
    """

    num_classes: int  # at most SPLIT_SIZE
    samples_per_class: int
    size: int  # pixels of a side
    seed: int = 0  # a different seed gives different identities
    split: str = "train"  # or "validation" or "test"
    difficulty: float = 1.0  # factor of the differences between samples of an identity; 0 for none
    shift: int = 0  # pixels by which a reading may move a sample, as augmentations do
    in_memory: bool = False  # draw all samples at the first reading and keep them
    _kept: dict[str, NDArray[np.uint8]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    smallest: ClassVar[int]  # pixels of a side that can be drawn on
    is_ink: ClassVar[bool] = False  # bright ink on dark paper, which is shown inverted

    def __post_init__(self) -> None:
        self._check_counts()
        check_count(self.size, "size", low=self.smallest)
        check_count(self.shift, "shift")
        check_world(self.num_classes, self.split, self.difficulty)
        if self.shift >= self.size:
            raise ConfigError(f"shift is {self.shift}, not below the size {self.size}; lower it")

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples without augmentation."""
        raise NotImplementedError

    def augmented(self, pictures: NDArray[np.uint8], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Inputs of a network, each augmented by its seed."""
        raise NotImplementedError

    def _labels_of(self, indices: NDArray[np.integer]) -> NDArray[np.integer]:
        return indices // self.samples_per_class

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """The sample in [0, 1], float32, augmented by ``seed``; its identity."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        images, labels = self.read_many(np.array([index]), [seed])
        return torch.from_numpy(images[0]), int(labels[0])

    def read_many(
        self, indices: NDArray[np.integer], seeds: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Results of ``read`` for several samples."""
        if self.in_memory and "images" not in self._kept:
            num_bytes = math.prod((len(self), *self.images(np.arange(0)).shape[1:]))
            if num_bytes > MAX_BYTES:
                raise ConfigError(
                    f"{len(self):,} pictures take {num_bytes / 2**30:.1f} GiB and at most "
                    f"{MAX_BYTES / 2**30:.1f} are held; set in_memory to false"
                )
            self._kept["images"] = self.images(np.arange(len(self)))
        pictures = self._kept["images"][indices] if self.in_memory else self.images(indices)
        return self.augmented(pictures, seeds), self._labels_of(indices)

    def kept_in(self, file: Path) -> DrawnIdentities:
        """The same samples, read from a file of all pictures, which processes can share."""
        pictures = np.load(file, mmap_mode="r")
        wanted = (len(self), *self.images(np.arange(0)).shape[1:])
        if pictures.shape != wanted or pictures.dtype != np.uint8:
            found = f"{file} has {pictures.dtype} {list(pictures.shape)}"
            raise ShapeError(f"{found}; uint8 {list(wanted)} is needed: remove the file")
        kept = replace(self, in_memory=True)
        kept._kept["images"] = pictures
        return kept

    def held_out(self, split: str, num_classes: int, samples_per_class: int) -> DrawnIdentities:
        """Other identities from the same generator, for evaluation."""
        return replace(
            self,
            num_classes=num_classes,
            samples_per_class=samples_per_class,
            split=split,
            shift=0,
            in_memory=False,
        )

    def _checked(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        checked = np.asarray(indices, np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= len(self)):
            raise IndexError(f"a sample is outside [0, {len(self)})")
        return checked

    def _numbers(self, labels: NDArray[np.integer]) -> NDArray[np.int64]:
        return numbers_in_world(labels, self.split)


@dataclass(frozen=True)
class SyntheticIdentities(SyntheticDataset):
    """A cloud of samples around one random centre per identity.

    A sample is its identity's centre, plus fixed noise, plus new noise at each read, like an
    augmentation. All are Gaussian per element.

    Examples:
        >>> dataset = SyntheticIdentities(10, 4, shape=(8,))
        >>> inputs, label = dataset.read(39, seed=0)
        >>> len(dataset), list(inputs.shape), label, dataset.sample_id(39)
        (40, [8], 9, 'identity-9/sample-3')
    """

    num_classes: int
    samples_per_class: int
    shape: Sequence[int] = (64,)  # of one input; (3, 32, 32) for images
    noise: float = 0.5  # deviation between samples of one identity; centres have one
    augmentation: float = 0.1  # deviation between readings of one sample
    seed: int = 0  # a different seed gives different identities, for example for validation
    as_bytes: bool = False  # rounded, as pictures: 128 stands for zero, 32 for a deviation

    def __post_init__(self) -> None:
        self._check_counts()
        check_samples(self.num_classes, self.samples_per_class)
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape:
            raise ConfigError("shape is empty; give the size of an input, such as (64,)")
        for size in self.shape:
            check_count(size, "a size in shape", low=1)
        for name in ("noise", "augmentation"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least 0")

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """The sample with the augmentation of ``seed``, and its identity."""
        label = self._label(index)
        inputs = self._normal(0, label)
        inputs += self.noise * self._normal(1, index)
        if self.augmentation:
            inputs += self.augmentation * self._normal(2, index, seed)
        if self.as_bytes:
            inputs = inputs.mul_(32.0).add_(128.0).round_().clamp_(0.0, 255.0).to(torch.uint8)
        return inputs, label

    def _normal(self, *key: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, *key))
        return torch.randn(tuple(self.shape), generator=generator)
