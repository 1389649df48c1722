"""Which classes a rank owns, and the parameter that holds their prototypes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


class Prototypes(nn.Parameter):
    """A parameter that notices writes through ``.data``, which leave no trace in its version.

    Weight averaging and many training scripts write that way. A head reads ``stamp`` before it
    trusts what it keeps of the prototypes. A *view* of ``.data`` that outlives it, and arrays that
    share its memory, still write unseen.
    """

    num_handed_out = 0
    aliases: tuple[weakref.ref[Tensor], ...] = ()

    @property
    def data(self) -> Tensor:
        """The values without their history, counted as a write."""
        alias: Tensor = nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]
        self.num_handed_out += 1
        self.aliases = (*self._living(), weakref.ref(alias))
        return alias

    @data.setter
    def data(self, values: Tensor) -> None:
        self.num_handed_out += 1
        nn.Parameter.data.__set__(self, values)  # type: ignore[attr-defined]

    def stamp(self) -> tuple[int, int] | None:
        """What changes with every write; None while an alias can write at any time."""
        self.aliases = self._living()
        return None if self.aliases else (self._version, self.num_handed_out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)  # files need not know this class
        return plain.__reduce_ex__(protocol)

    def _living(self) -> tuple[weakref.ref[Tensor], ...]:
        return tuple(alias for alias in self.aliases if alias() is not None)


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
