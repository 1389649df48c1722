"""Faces for training: flipped and, on request, degraded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.images import Pixels, resize_image
from qmargin.data.order import check_count
from qmargin.data.stored import ImageDataset
from qmargin.errors import ConfigError

_LOW = 2**64 - 1
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class FaceAugmentation:
    """Augmentation of a face when it is read, drawn from the sample's seed only."""

    flip: float = 0.5  # probability of a mirror image
    photometric: float = 0.0  # probability of changed brightness, contrast and saturation
    strength: float = 0.5  # largest relative change of each of the three
    low_resolution: float = 0.0  # probability of scaling down and up again
    smallest: float = 0.2  # least share of the size that scaling down leaves
    crop: float = 0.0  # probability of blanking all but a part of the picture

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{item.name} is {value!r}; give a number in [0, 1]")
        if self.smallest == 0.0:
            raise ConfigError("smallest is 0, which leaves no pixel; give a number above 0")

    def mirrors(self, seed: int) -> bool:
        """Whether a seed draws the mirror image."""
        return _uniform(seed, 0) < self.flip

    def __call__(self, pixels: Pixels, seed: int) -> Pixels:
        """The picture ``[H, W, 3]`` with the other changes that a seed draws.

        Every change draws its own numbers, so that switching one on leaves the others as they are.
        """
        if self.crop and _uniform(seed, 1) < self.crop:
            pixels = _cropped(pixels, random.Random(seed))
        if self.low_resolution and _uniform(seed, 2) < self.low_resolution:
            share = self.smallest + (1.0 - self.smallest) * _uniform(seed, 3)
            pixels = _coarse(pixels, share)
        if self.photometric and _uniform(seed, 4) < self.photometric:
            pixels = _relit(pixels, random.Random(~seed), self.strength)
        return pixels


def _uniform(seed: int, number: int) -> float:
    """One number in [0, 1) of a seed: the finaliser of splitmix64, faster than a generator."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _LOW
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _LOW
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53


def _cropped(pixels: Pixels, draw: random.Random) -> Pixels:
    """Black except for a rectangle of at least a fifth of the picture."""
    height, width = pixels.shape[:2]
    share = draw.uniform(0.2, 1.0)
    rows = min(height, max(1, round(height * (share**0.5) * draw.uniform(0.9, 1.1))))
    columns = min(width, max(1, round(width * (share**0.5))))
    top, left = draw.randint(0, height - rows), draw.randint(0, width - columns)
    result = np.zeros_like(pixels)
    inside = np.s_[top : top + rows, left : left + columns]
    result[inside] = pixels[inside]
    return result


def _coarse(pixels: Pixels, share: float) -> Pixels:
    """Scaled down by a share and up again."""
    from PIL import Image

    height, width = pixels.shape[:2]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = (max(1, round(share * width)), max(1, round(share * height)))
    method = Image.Resampling.BILINEAR
    return np.array(image.resize(small, method).resize((width, height), method))


def _relit(pixels: Pixels, draw: random.Random, strength: float) -> Pixels:
    """Brightness, contrast and saturation times numbers around one, in a random order."""
    values = pixels.astype(np.float32)
    changes = ["brightness", "contrast", "saturation"]
    draw.shuffle(changes)
    for change in changes:
        factor = np.float32(1.0 + draw.uniform(-strength, strength))
        if change == "brightness":
            values = values * factor
        else:
            grey = values @ _GREY
            middle: Any = grey.mean() if change == "contrast" else grey[..., None]
            values = middle + (values - middle) * factor
        np.clip(values, 0.0, 255.0, out=values)
    result: Pixels = np.rint(values).astype(np.uint8)
    return result


@final
@dataclass(frozen=True)
class FaceImages:
    """Faces for a loader: the training dataset over any stored images.

    Inputs are bytes, a quarter of the memory of floats to send between processes and to a device;
    ``normalised`` turns a whole batch into floats there.
    """

    images: ImageDataset
    size: int = 112  # of a side; other pictures are scaled and centre-cropped
    augmentation: FaceAugmentation = field(default_factory=FaceAugmentation)

    def __post_init__(self) -> None:
        check_count(self.size, "size", low=1)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of identities: labels are below it."""
        return self.images.num_classes

    @property
    def labels(self) -> NDArray[np.int32]:
        """Identity of each sample, ``[n]``."""
        return self.images.labels

    def read(self, index: int, seed: int) -> tuple[Pixels, int]:
        """The face, ``[3, size, size]`` uint8 with the channels last in memory, and its identity.

        It may be read-only. An image that cannot be read is a ``CorruptSample``.
        """
        mirror = self.augmentation.mirrors(seed)
        pixels = self.images.decode(index, mirror=mirror, writable=False)
        pixels = self.augmentation(resize_image(pixels, self.size), seed)
        return pixels.transpose(2, 0, 1), int(self.images.labels[index])

    def sample_id(self, index: int) -> str:
        """Name of a sample's file or member, or the key of its record."""
        return self.images.sample_id(index)

    def source(self, index: int) -> str:
        """Where a sample's label is written."""
        return self.images.source(index)


def normalised(pictures: Tensor) -> Tensor:
    """Convert bytes to inputs of networks: float32, from -1 to 1.

    Examples:
        >>> normalised(torch.tensor([0, 255, 51], dtype=torch.uint8)).tolist()
        [-1.0, 1.0, -0.6000000238418579]
    """
    return pictures.to(torch.float32).div_(127.5).sub_(1.0)
