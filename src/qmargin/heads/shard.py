"""Which classes a rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_CLASSES = 1 << 13  # prototypes that are drawn from one seed


@dataclass(frozen=True)
class ClassShard:
    """The half-open range of classes that a rank owns.

    Attributes:
        start: First class.
        stop: One past the last; equal to ``start`` where there are fewer classes than ranks.
        num_classes: Of all ranks together.

    Examples:
        >>> [ClassShard.of(10, rank, 4).start for rank in range(4)]
        [0, 3, 6, 8]
        >>> ClassShard.of(10, 2, 4)
        ClassShard(start=6, stop=8, num_classes=10)
    """

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, num_classes: int, rank: int, world: int) -> ClassShard:
        """Consecutive classes in equal parts; the first ranks have one more where needed."""
        size, more = divmod(num_classes, world)
        start = rank * size + min(rank, more)
        return cls(start, start + size + (rank < more), num_classes)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether there is no other shard."""
        return len(self) == self.num_classes

    def local(self, labels: Tensor) -> Tensor:
        """Labels counted from the shard's first class, -1 for classes that others own."""
        local = labels - self.start
        return torch.where((local >= 0) & (local < len(self)), local, -1)


def draw_prototypes(shard: ClassShard, weights: Tensor, seed: int) -> Tensor:
    """Fill the prototypes of a shard ``[n, d]`` with numbers that do not depend on the sharding."""
    if weights.is_meta:  # shapes only
        return weights
    for block in range(shard.start // BLOCK_CLASSES, -(-shard.stop // BLOCK_CLASSES)):
        first = block * BLOCK_CLASSES
        size = min(BLOCK_CLASSES, shard.num_classes - first)
        generator = torch.Generator(weights.device).manual_seed((seed + block) % (1 << 63))
        drawn = torch.randn(
            (size, weights.shape[1]),
            generator=generator,
            device=weights.device,
            dtype=weights.dtype,
        )
        start, stop = max(first, shard.start), min(first + size, shard.stop)
        weights[start - shard.start : stop - shard.start] = drawn[start - first : stop - first]
    return weights.mul_(0.01)
