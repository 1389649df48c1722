"""A dataset: one point of a circle per identity, and noise."""

import numpy as np
from numpy.typing import NDArray


class Circle:
    """Identities on a circle, in 32 dimensions of noise.

    Args:
        num_classes: ``data.num_classes`` of the recipe.
        noise: One of ``data.options``.
    """

    def __init__(self, num_classes: int, noise: float = 0.1) -> None:
        self.num_classes, self.noise = num_classes, noise
        self.labels = np.arange(16 * num_classes) % num_classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, seed: int) -> tuple[NDArray[np.float32], int]:
        """The sample's input, drawn from the seed, and its label."""
        label = int(self.labels[index])
        angle = 2.0 * np.pi * label / self.num_classes
        values = self.noise * np.random.default_rng(seed).normal(size=32)
        values[:2] += np.cos(angle), np.sin(angle)
        return values.astype(np.float32), label

    def sample_id(self, index: int) -> str:
        """A name for logs."""
        return f"sample {index}"

    def source(self, index: int) -> str:
        """Where the label comes from."""
        return "the circle"
