"""Small pictures held in memory: real data for the demo."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.strokes import moved
from qmargin.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Drawings:
    """Pictures with labels and names; what ``StrokeIdentities`` draws, others bring.

    Args:
        pictures: ``[n, size, size]`` uint8.
        labels: ``[n]``, from 0 without gaps.
        names: Of the samples.
        origin: Where they are from.
        shift: Pixels by which a reading may move a sample, as augmentations do.

    Examples:
        >>> blank = np.zeros((4, 32, 32), np.uint8)
        >>> drawings = Drawings(blank, np.array([0, 0, 1, 1]), ("a", "b", "c", "d"), "nowhere")
        >>> drawings.num_classes, drawings.read(3, seed=0)[1], drawings.sample_id(3)
        (2, 1, 'd')
    """

    pictures: NDArray[np.uint8] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    origin: str
    shift: int = 0

    def __post_init__(self) -> None:
        shape = self.pictures.shape
        if self.pictures.dtype != np.uint8 or len(shape) != 3 or shape[1] != shape[2]:
            raise ShapeError(
                f"pictures are {self.pictures.dtype} of shape {list(shape)}; give uint8 "
                "[n, size, size]"
            )
        if not len(self.labels) == len(self.names) == len(self.pictures):
            raise ShapeError(
                f"there are {len(self.pictures)} pictures, {len(self.labels)} labels and "
                f"{len(self.names)} names; give one of each per sample"
            )

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def num_classes(self) -> int:
        """Number of identities."""
        return int(self.labels.max(initial=-1)) + 1

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """The sample in [0, 1], ``[1, size, size]`` float32, moved by ``seed``; its identity."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        picture = self.pictures[index]
        if self.shift:
            picture = moved(picture, self.shift, seed)
        image = torch.from_numpy(picture).to(torch.float32).mul_(1.0 / 255.0)
        return image[None], int(self.labels[index])

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples as they are, ``[n, size, size]``."""
        chosen: NDArray[np.uint8] = self.pictures[indices]
        return chosen

    def sample_id(self, index: int) -> str:
        """Name of a sample."""
        return self.names[index]

    def source(self, index: int) -> str:
        """Where the sample is from."""
        return f"{self.origin}, sample {index}"
