"""Small pictures held in memory: real data for the demo and for experiments."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import uniform_filter
from torch import Tensor

from qmargin.data.order import check_count, derived_seed
from qmargin.data.strokes import as_inputs
from qmargin.errors import ConfigError, DataError, ShapeError

# Standard deviations of a warp of 1.
TURN = 0.1  # radians
STRETCH = 0.1  # of the logarithm of width and height
SLANT = 0.1  # sideways per upwards
MOVE = 0.03  # of a side
BLUR = 3  # pixels, each way, of outlines that are compared


@dataclass(frozen=True, eq=False)
class Drawings:
    """Given pictures with labels and names, as a dataset like ``StrokeIdentities``."""

    pictures: NDArray[np.uint8] = field(repr=False)  # [n, size, size]
    labels: NDArray[np.int64] = field(repr=False)  # [n], from 0 without gaps
    names: tuple[str, ...] = field(repr=False)
    origin: str  # source of the pictures
    shift: int = 0  # pixels by which a reading may move a sample
    variants: NDArray[np.uint8] | None = field(default=None, repr=False)
    """``[n, v, size, size]``, such as those of ``variants_of``; the seed of a read selects one."""

    def __post_init__(self) -> None:
        shape = self.pictures.shape
        if self.pictures.dtype != np.uint8 or len(shape) != 3 or shape[1] != shape[2]:
            found = f"{self.pictures.dtype} {list(shape)}"
            raise ShapeError(f"pictures are {found}; give uint8 [n, size, size]")
        if not len(self.labels) == len(self.names) == len(self.pictures):
            counts = f"{len(self.pictures)} pictures, {len(self.labels)} labels"
            raise ShapeError(f"there are {counts} and {len(self.names)} names; give one of each")
        given = self.variants
        if given is not None and (
            given.dtype != np.uint8
            or given.shape != (shape[0], *given.shape[1:2], *shape[1:])
            or given.shape[1] < 1
        ):
            wanted = f"uint8 [{shape[0]}, v, {shape[1]}, {shape[2]}]"
            raise ShapeError(f"variants are {given.dtype} {list(given.shape)}; give {wanted}")

    def __len__(self) -> int:
        return len(self.pictures)

    @cached_property  # used for every sample
    def num_classes(self) -> int:
        """Number of identities."""
        return int(self.labels.max(initial=-1)) + 1

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """The sample in [0, 1], ``[1, size, size]`` float32, moved by ``seed``; its identity."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        images, labels = self.read_many(np.array([index]), [seed])
        return torch.from_numpy(images[0]), int(labels[0])

    def read_many(
        self, indices: NDArray[np.integer], seeds: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Results of ``read`` for several samples, ``[n, 1, size, size]`` and ``[n]``."""
        if self.variants is None:
            pictures: NDArray[np.uint8] = self.pictures[indices]
        else:  # by the upper half of the seed: the shift takes the lower
            which = (np.asarray(seeds, dtype=np.int64) >> 32) % self.variants.shape[1]
            pictures = self.variants[indices, which]
        return as_inputs(pictures, self.shift, seeds), self.labels[indices]

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples without augmentation, ``[n, size, size]``."""
        chosen: NDArray[np.uint8] = self.pictures[indices]
        return chosen

    def with_turns(self, *, has_mirrors: bool = False, alike: float | None = None) -> Drawings:
        """Up to eight times the identities: each once more for every quarter turn of its pictures.

        Args:
            has_mirrors: Whether to add mirror images as well.
            alike: Leave out a copy whose mean picture correlates more than this with that of an
                earlier copy: a circle looks the same from all sides, so its four copies could not
                be distinguished. None to keep all.
        """
        copies = _turned(self.pictures, has_mirrors)
        is_kept = np.ones((len(copies), self.num_classes), dtype=np.bool_)
        if alike is not None:
            outlines = list(_turned(self._outlines(), has_mirrors).values())
            for copy, mine in enumerate(outlines):
                for earlier in range(copy):
                    is_alike = (mine * outlines[earlier]).sum((1, 2)) > alike
                    is_kept[copy] &= ~(is_alike & is_kept[earlier])
        labels = np.cumsum(is_kept).reshape(is_kept.shape) - 1  # new ones, of those that are kept
        pictures, new, names = [], [], []
        for (name, seen), kept, label in zip(copies.items(), is_kept, labels, strict=True):
            rows = np.flatnonzero(kept[self.labels])
            pictures.append(seen[rows])
            new.append(label[self.labels[rows]])
            names += [f"{self.names[row]}-{name}" for row in rows]
        return replace(
            self, pictures=np.concatenate(pictures), labels=np.concatenate(new), names=tuple(names)
        )

    def distinct(self, share: float) -> list[int]:
        """Labels without those whose pictures cannot be distinguished by their pixels.

        The pictures of each identity are split into two halves. Two identities look alike if the
        mean correlation of their halves reaches a quantile: the given share of identities have a
        lower correlation between their own halves. The identity with the most look-alikes is left
        out first, until none are left.
        """
        counts = np.bincount(self.labels)
        if not 0.0 < share < 1.0:
            raise ConfigError(f"distinct is {share:g}; give a share between 0 and 1")
        if counts.min() < 2:
            name = self.names[int(np.argmin(counts[self.labels]))]
            raise DataError(
                f"{name} of {self.origin} is alone in its identity; look-alikes are found by "
                "halves, give 2 pictures or more of each"
            )
        order = np.argsort(self.labels, kind="stable")
        numbers = np.arange(len(order)) - np.searchsorted(self.labels[order], self.labels[order])
        halves = [
            replace(
                self,
                pictures=self.pictures[rows],
                labels=self.labels[rows],
                names=tuple(self.names[row] for row in rows),
                variants=None,
            )._outlines()
            for rows in (order[numbers % 2 == 0], order[numbers % 2 == 1])
        ]
        first, second = (half.reshape(len(counts), -1) for half in halves)
        crossed = first @ second.T
        is_alike = (crossed + crossed.T) / 2 >= np.quantile(np.diagonal(crossed), share)
        np.fill_diagonal(is_alike, False)
        is_kept = np.ones(len(counts), dtype=np.bool_)
        while is_alike.any():
            worst = int(np.argmax(is_alike.sum(0)))
            is_alike[worst] = is_alike[:, worst] = is_kept[worst] = False
        return [int(label) for label in np.flatnonzero(is_kept)]

    def _outlines(self) -> NDArray[np.float64]:
        """Mean picture of every identity, blurred, less its mean, of length one."""
        order = np.argsort(self.labels, kind="stable")
        starts = np.searchsorted(self.labels[order], np.arange(self.num_classes))
        sums = np.add.reduceat(self.pictures[order], starts, axis=0, dtype=np.float64)
        blurred = uniform_filter(sums, size=(0, BLUR, BLUR))
        outlines = blurred - blurred.mean((1, 2), keepdims=True)
        lengths = np.sqrt((outlines**2).sum((1, 2), keepdims=True))
        unit: NDArray[np.float64] = outlines / np.maximum(lengths, np.finfo(float).tiny)
        return unit

    def sample_id(self, index: int) -> str:
        """Name of a sample."""
        return self.names[index]

    def source(self, index: int) -> str:
        """Where the sample is from."""
        return f"{self.origin}, sample {index}"


def _turned(pictures: NDArray[Any], has_mirrors: bool) -> dict[str, NDArray[Any]]:
    """Pictures ``[n, size, size]`` in four or eight orientations, the first unchanged."""
    sides = {"": pictures, "mirrored-": pictures[:, :, ::-1]} if has_mirrors else {"": pictures}
    return {
        f"{side}turned-{turn}": np.rot90(seen, turn, (1, 2))
        for side, seen in sides.items()
        for turn in range(4)
    }


def warped(picture: NDArray[np.uint8], amount: float, seed: int) -> NDArray[np.uint8]:
    """A picture randomly rotated, stretched, sheared and moved, padded with blank paper."""
    draw = random.Random(seed)
    turn, wide, tall, slant, across, down = (amount * draw.gauss(0.0, 1.0) for _ in range(6))
    middle = (len(picture) - 1) / 2
    cosine, sine = math.cos(TURN * turn), math.sin(TURN * turn)
    wide, tall = math.exp(STRETCH * wide), math.exp(STRETCH * tall)
    # Rows of the matrix that takes a place in the new picture to its place in the old one.
    a, b = wide * cosine, wide * (SLANT * slant * cosine - sine)
    c, d = tall * sine, tall * (SLANT * slant * sine + cosine)
    e = middle * (1.0 - a - b) + MOVE * across * len(picture)
    f = middle * (1.0 - c - d) + MOVE * down * len(picture)
    result = Image.fromarray(picture).transform(
        picture.shape, Image.Transform.AFFINE, (a, b, e, c, d, f), Image.Resampling.BILINEAR
    )
    return np.asarray(result)


def variants_of(
    pictures: NDArray[np.uint8], amount: float, count: int, *, first: int = 0
) -> NDArray[np.uint8]:
    """``count`` warps of every picture, ``[n, count, size, size]``.

    Warps follow from the number of a picture; ``first`` is that of the first one here.
    """
    if not 0.0 <= amount < math.inf:
        raise ConfigError(f"warp is {amount}; it must be finite and at least 0")
    check_count(count, "the number of variants", low=1)
    drawn = np.empty((len(pictures), count, *pictures.shape[1:]), dtype=np.uint8)
    for row, picture in enumerate(pictures):
        for number in range(count):
            drawn[row, number] = warped(picture, amount, derived_seed(first + row, number))
    return drawn
