"""Talk between the ranks that share a head's classes.

The conventions live here and nowhere else. Every rank sees all rows of the global batch and its own
classes, so what a rank knows of a row's gradient is its classes' share of it: ``gather_rows`` adds
the shares up on the way back. And it multiplies by the number of ranks, because
``DistributedDataParallel`` will divide by it: the average that it takes is then the true gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Ranks:
    """Those that share the classes; with one, no process group is needed and nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group)  # a process group cannot be copied, and need not be

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
        """Everyone's integers, by rank; waits for the device."""
        if self.world == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        return self.gather(mine, [len(values)] * self.world).view(self.world, -1).tolist()

    def gather(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Everyone's rows, one rank's after the other's; ``sizes`` says how many each has."""
        if self.world == 1:
            return values
        longest = max(sizes)
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def part(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of what ``gather`` made."""
        start = sum(sizes[: self.rank])
        return values[start : start + sizes[self.rank]]


class GatherRows(torch.autograd.Function):
    """Rows of the global batch from those of every rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
        """``[sum of sizes, d]``, the same on every rank."""
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.gather(rows, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The ranks' shares added up, times the number of ranks: see the top of this file."""
        ranks: Ranks = ctx.ranks
        return _scatter_sum(grad, ranks, ctx.sizes) * ranks.world, None, None


class GatherClasses(torch.autograd.Function):
    """Rows of all classes from those of every shard, for paths that look at all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
        """``[k, d]``, the same on every rank."""
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.gather(rows, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The shard's own part: every rank has computed all of the gradient."""
        part: Tensor = ctx.ranks.part(grad, ctx.sizes)
        return part.clone(), None, None


class EqualShare(torch.autograd.Function):
    """The identity, for rows whose whole gradient every rank computes: each gives its share."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        """The rows."""
        ctx.world = ranks.world
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """An equal share of the gradient."""
        return grad / ctx.world, None


def _scatter_sum(values: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum over the ranks."""
    is_even = len(set(sizes)) == 1
    if is_even and dist.get_backend(ranks.group) == "nccl":
        own = values.new_empty((sizes[0], *values.shape[1:]))
        dist.reduce_scatter_tensor(own, values.contiguous(), group=ranks.group)
        return own
    total = ranks.sum_(values.clone(memory_format=torch.contiguous_format))  # gloo has no scatter
    return ranks.part(total, sizes)


def gather_rows(rows: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
    """See ``GatherRows``; nothing to do for one rank."""
    if ranks.world == 1:
        return rows
    apply: Callable[..., Tensor] = GatherRows.apply
    return apply(rows, ranks, sizes)


def gather_classes(rows: Tensor, ranks: Ranks, sizes: Sequence[int]) -> Tensor:
    """See ``GatherClasses``; nothing to do for one rank."""
    if ranks.world == 1:
        return rows
    apply: Callable[..., Tensor] = GatherClasses.apply
    return apply(rows, ranks, sizes)


def equal_share(rows: Tensor, ranks: Ranks) -> Tensor:
    """See ``EqualShare``; nothing to do for one rank."""
    if ranks.world == 1:
        return rows
    apply: Callable[..., Tensor] = EqualShare.apply
    return apply(rows, ranks)
