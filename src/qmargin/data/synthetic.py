"""Identities made from a seed: for tests, examples and runs without any file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.order import check_count, check_samples, derived_seed
from qmargin.errors import ConfigError


class SyntheticDataset:
    """What synthetic worlds share: sample ``i`` is of identity ``i // samples_per_class``.

    A world is a frozen dataclass that derives from this class and has ``read``, such as
    ``StrokeIdentities``.
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

    def sample_id(self, index: int) -> str:
        """Identity and number of a sample."""
        label, number = divmod(index, self.samples_per_class)
        return f"identity-{label}/sample-{number}"

    def source(self, index: int) -> str:
        """Labels are computed, not written anywhere."""
        return f"{type(self).__name__} of seed {self.seed}, sample {index}"


@dataclass(frozen=True)
class SyntheticIdentities(SyntheticDataset):
    """A cloud of samples around one random centre per identity.

    A sample is its identity's centre, plus noise of its own, plus noise that is drawn anew each
    time it is read, as an augmentation is. All are Gaussian per element.

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
    seed: int = 0  # another seed makes other identities, such as those to validate on
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
