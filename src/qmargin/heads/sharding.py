"""Classes split over ranks: which rank owns which, and the collectives between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK_CLASSES = 1 << 13  # prototypes that are drawn from one seed


@dataclass(frozen=True)
class ClassShard:
    """The half-open range of classes that a rank owns; empty with fewer classes than ranks."""

    start: int
    stop: int
    num_classes: int  # classes of all ranks together

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
        """Labels counted from the shard's first class, -1 for classes of other ranks."""
        local = labels - self.start
        return torch.where((local >= 0) & (local < len(self)), local, -1)


class Prototypes(nn.Parameter):
    """A parameter that detects writes through ``.data``, which do not change its version.

    A head compares ``stamp`` before it uses its copy of the prototypes. Writes through a stored
    *view* of ``.data``, or through arrays that share its memory, are not detected.
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
        if self.aliases:
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
        drawn = weights.new_empty((size, weights.shape[1])).normal_(generator=generator)
        start, stop = max(first, shard.start), min(first + size, shard.stop)
        weights[start - shard.start : stop - shard.start] = drawn[start - first : stop - first]
    return weights.mul_(0.01)


class Ranks:
    """Ranks that share the classes; a single one needs no process group and sends nothing."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group)  # a process group cannot be copied

    def sum_(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place; the same bits on each of them."""
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Largest over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def integers(self, *values: int, device: torch.device) -> list[list[int]]:
        """Integers of all ranks, by rank; waits for the device."""
        if self.world == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        return self.gather(mine, [len(values)] * self.world).view(self.world, -1).tolist()

    def gather(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all ranks, in the order of ranks; ``sizes`` says how many each has."""
        if self.world == 1:
            return values
        longest, rest = max(sizes), values.shape[1:]
        if longest == 0:
            return values
        padded = values.contiguous()
        if len(values) < longest:
            padded = values.new_zeros((longest, *rest))
            padded[: len(values)] = values
        # One tensor, not one for each rank: launches must not grow with the ranks.
        whole = values.new_empty((self.world * longest, *rest))
        _collective("all_gather_single", "all_gather_into_tensor")(whole, padded, group=self.group)
        if min(sizes) == longest:
            return whole
        places = torch.arange(longest).expand(self.world, -1) < torch.tensor(sizes)[:, None]
        return whole[places.flatten().nonzero().squeeze(1).to(values.device)]

    def part(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of what ``gather`` made."""
        start = sum(sizes[: self.rank])
        return values[start : start + sizes[self.rank]]


class Gather(torch.autograd.Function):
    """Rows of all ranks; see ``gather_rows`` for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: Ranks, sizes: Sequence[int], adds_up: bool
    ) -> Tensor:
        ctx.ranks, ctx.sizes, ctx.adds_up = ranks, sizes, adds_up
        return ranks.gather(rows, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ranks: Ranks = ctx.ranks
        if ctx.adds_up:
            return _scatter_sum(grad, ranks, ctx.sizes) * ranks.world, None, None, None
        return ranks.part(grad, ctx.sizes).clone(), None, None, None


def gather_rows(
    rows: Tensor, ranks: Ranks, sizes: Sequence[int], *, adds_up: bool = True
) -> Tensor:
    """Rows of the global batch, or of all classes, from those of every rank.

    With ``adds_up``, ranks have shares of the gradient, which are added up and multiplied by the
    number of ranks: ``DistributedDataParallel`` will average. Else every rank computes all of it.
    """
    apply: Callable[..., Tensor] = Gather.apply
    return rows if ranks.world == 1 else apply(rows, ranks, sizes, adds_up)


def equal_share(rows: Tensor, ranks: Ranks) -> Tensor:
    """The rows, whose whole gradient every rank computes: each contributes an equal share."""
    if ranks.world > 1 and rows.requires_grad:
        rows = rows.view_as(rows)
        rows.register_hook(lambda grad: grad / ranks.world)
    return rows


def _scatter_sum(values: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum over the ranks."""
    if len(set(sizes)) == 1 and dist.get_backend(ranks.group) == "nccl":
        own = values.new_empty((sizes[0], *values.shape[1:]))
        scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        scatter(own, values.contiguous(), group=ranks.group)
        return own
    total = ranks.sum_(values.clone(memory_format=torch.contiguous_format))  # gloo has no scatter
    return ranks.part(total, sizes)


def _collective(name: str, older_name: str) -> Callable[..., object]:
    """A collective of ``torch.distributed`` by its name of torch 2.13, or the one before."""
    call: Callable[..., object] = getattr(dist, name, None) or getattr(dist, older_name)
    return call
