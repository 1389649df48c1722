"""Sums over blocks of classes that the root and the loss need, without a ``[B, k]`` tensor.

Blocks of cosines are computed, reduced to sums (M11) and forgotten. At ``alpha = 1`` one pass keeps
a running log-sum-exp. Otherwise ``heads.root_search`` finds the root in a few passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qmargin.kernels.head_records import GROUP, ClassGradient
from qmargin.kernels.head_reference import drop_targets_
from qmargin.maths.objective import posterior_rows
from qmargin.maths.threshold import RowSums, heights, level_step, row_sums
from qmargin.reading import Reading

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier
    from qmargin.heads.collectives import Ranks

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}  # in a block; about six such tensors live at once
HALF_FACTOR = 2.0**15  # posteriors are at most one: so scaled they use the range of float16


class SolvedBlocks(NamedTuple):
    """The root of a batch and sums at it, over all classes but the target where not said otherwise.

    ``[B]`` float64 each.
    """

    anchor: Tensor  # logit
    level: Tensor
    others_mass: Tensor
    excess: Tensor  # sum of p * x
    support_size: Tensor  # target included
    mass_error: Tensor  # target included
    num_active: Tensor  # scalar: classes in the support of any row, or the target of one
    pulled: Tensor | None  # [B, d]: sum of p times unit prototype


class Target(NamedTuple):
    """What the margin made of each row's own class, ``[B]`` float64 each."""

    logits: Tensor
    log_reference: Tensor

    def sums(self, anchor: Tensor, level: Tensor, order: float) -> RowSums:
        """Its share of the mass and the slope."""
        gap = (anchor - self.logits)[:, None]
        return row_sums(gap, self.log_reference[:, None], level, order)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left @ right``; half operands are summed, and returned, in float32."""
    if left.dtype not in (torch.float16, torch.bfloat16):
        return torch.mm(left, right, out=out)
    if left.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):  # torch 2.8 and later
        if out is None:
            shape = (left.shape[0], right.shape[1])
            out = torch.empty(shape, dtype=torch.float32, device=left.device)
        result: Tensor = torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        return result
    return torch.mm(left.float(), right.float(), out=out)


class Sums(NamedTuple):
    """Sums over all classes but the target at some level, ``[B]`` float64 each."""

    mass: Tensor
    excess: Tensor  # sum of p * x
    support_size: Tensor
    num_active: Tensor  # scalar: classes in the support of any row, or the target of one
    pulled: Tensor | None  # [B, d]: sum of p times unit prototype


class SoftmaxSums(NamedTuple):
    """Sums over the others at ``alpha = 1``, relative to a cosine near their largest."""

    top: Tensor  # [B], that cosine; -inf if there are no others
    mass: Tensor  # [B] float64
    pulled: Tensor | None  # [B, d]
    is_doubtful: Reading | None = None  # says afterwards whether a short cut failed

    def confirm(self) -> bool:
        """Wait for what is known only afterwards: whether the sums hold."""
        return self.is_doubtful is None or not bool(self.is_doubtful.wait())

    def over(self, ranks: Ranks, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Top and mass over all ranks; ``pulled`` is this rank's share, relative to that top."""
        if ranks.world == 1:
            return self.top, self.mass, self.pulled
        top = ranks.max_(self.top.clone())
        factor = ((self.top - top).double() * scale).exp()
        factor = torch.where(self.top == -torch.inf, 0.0, factor)
        mass = ranks.sum_(self.mass * factor)
        pulled = self.pulled
        return top, mass, None if pulled is None else pulled * factor.to(pulled.dtype)[:, None]


class Chunks:
    """A batch against all prototypes, block by block.

    ``heads.fused_chunks`` overrides the passes over the blocks with kernels.

    Attributes:
        weight: How many classes each of these stands for: one, except in a sample.
        group_maxima: Of a sparse step before this one, if there was one.
    """

    weight = 1.0
    group_maxima: Tensor | None = None

    def __init__(self, head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> None:
        self.head, self.embeddings, self.labels = head, embeddings, labels
        self.prototypes, self.ranks = head.prototypes.detach(), head.ranks
        self.copy, self.inverse_norms = head.copy, head.inverse_norms
        self.scale, self.order = head.loss.scale, head.order
        native = self.prototypes.dtype
        default = head.screen_dtype if embeddings.is_cuda else native
        self.operand_dtype = head.chunk_dtype or default
        self.operand = embeddings.to(self.operand_dtype)
        # Above alpha = 2 a posterior is a root of its height: float32 would show at the edge.
        self.dtype = torch.float64 if self.order > 1.0 else native
        self.rounding = torch.finfo(native).eps
        limit = self.block_logits()
        num_rows, num_groups = len(embeddings), max(1, -(-len(head.shard) // GROUP))
        self.group = GROUP * -(-4 * num_rows * num_groups // limit)  # maxima: a quarter of a block
        self.size = self.group * max(1, limit // (num_rows * self.group))

    def block_logits(self) -> int:
        """Logits in a block: what bounds the memory."""
        return CHUNK_LOGITS.get(self.embeddings.device.type, CHUNK_LOGITS["cuda"])

    def sample(self, step: int) -> Chunks:
        """The same batch against every ``step``-th class, which stands for all of them."""
        few = copy(self)
        few.weight, few.group_maxima = float(step), None
        few.prototypes, few.inverse_norms = self.prototypes[::step], self.inverse_norms[::step]
        few.copy = self.copy[: len(self.prototypes) : step].contiguous()
        is_there = (self.labels >= 0) & (self.labels % step == 0)  # below zero: of another rank
        few.labels = torch.where(is_there, self.labels // step, -1)
        return few

    def ranges(self) -> Iterator[slice]:
        """Consecutive blocks of classes."""
        num_classes = len(self.prototypes)
        for start in range(0, num_classes, self.size):
            yield slice(start, min(start + self.size, num_classes))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and their unit prototypes in the precision of the operands."""
        for where in self.ranges():
            if self.copy.dtype == self.operand_dtype:
                yield where, self.copy[where]
            else:
                yield where, self.unit(where).to(self.operand_dtype)

    def unit(self, where: slice | Tensor) -> Tensor:
        """Unit prototypes of some classes, ``[n, d]``, in their own precision."""
        return self.prototypes[where] * self.inverse_norms[where][:, None]

    def cosines(self, where: slice, unit: Tensor) -> Tensor:
        """Cosines ``[B, n]``, ``-inf`` at targets."""
        cosines = product(self.operand, unit.t()).to(self.dtype)
        drop_targets_(cosines, self.labels - where.start)
        return cosines

    def pull(self, posterior: Tensor, unit: Tensor) -> Tensor:
        """``posterior @ unit``, ``[B, d]``, for posteriors between zero and one."""
        if unit.dtype == self.prototypes.dtype:
            return posterior.to(unit.dtype) @ unit
        return product((posterior * HALF_FACTOR).to(unit.dtype), unit) / HALF_FACTOR

    def shifted(self, anchor: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """The anchor as a rounded cosine, and the level there: differences of cosines are exact."""
        shift = (anchor / self.scale).to(self.dtype)
        missing = anchor - shift.double() * self.scale
        return shift, (level - level_step(self.order) * missing).to(self.dtype)

    def posteriors(
        self, anchor: Tensor, level: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """By blocks: classes, unit prototypes, posterior and levels ``[B, n]`` (M1)."""
        shift, level = self.shifted(anchor, level)
        zero = torch.zeros_like(level)
        for where, unit in self.blocks():
            logits = self.cosines(where, unit).sub_(shift[:, None]).mul_(self.scale)
            yield where, unit, *posterior_rows(logits, None, zero, level, self.order)

    def softmax_sums(self, *, pulls: bool, is_certain: bool = False) -> SoftmaxSums:
        """Everything that ``alpha = 1`` needs of the others, in one pass."""
        scale, embeddings = self.scale, self.embeddings
        top = embeddings.new_full((len(embeddings),), -torch.inf)
        mass = torch.zeros_like(top, dtype=torch.float64)
        pulled = torch.zeros_like(embeddings) if pulls else None
        for where, unit in self.blocks():
            cosines = self.cosines(where, unit)
            higher = torch.maximum(top, cosines.amax(1))
            shift = torch.where(higher == -torch.inf, 0.0, higher)  # only the target so far
            shrink = ((top - shift) * scale).exp()
            part = cosines.sub_(shift[:, None]).mul_(scale).exp_()
            mass = mass * shrink.double() + part.sum(1).double()
            if pulled is not None:
                pulled = pulled.mul_(shrink[:, None]).add_(self.pull(part, unit))
            top = higher
        return SoftmaxSums(top, mass, pulled)

    def row_sums(self, anchor: Tensor, level: Tensor) -> RowSums:
        """Mass and slope of the others at a trial level (M11)."""
        mass = slope = torch.zeros_like(level)
        shift, level = self.shifted(anchor, level)
        for where, unit in self.blocks():
            gaps = self.cosines(where, unit).sub_(shift[:, None]).mul_(-self.scale)
            sums = row_sums(gaps, None, level, self.order)
            mass, slope = mass + sums.mass.double(), slope + sums.slope.double()
        return RowSums(mass, slope)

    def maxima(self) -> Tensor:
        """Largest cosine of each group of consecutive classes, targets left out."""
        parts = [self.embeddings.new_empty((len(self.embeddings), 0), dtype=self.dtype)]
        for where, unit in self.blocks():
            cosines = self.cosines(where, unit)
            missing = -cosines.shape[1] % self.group
            if missing:
                cosines = torch.nn.functional.pad(cosines, (0, missing), value=-torch.inf)
            parts.append(cosines.unflatten(1, (-1, self.group)).amax(2))
        return torch.cat(parts, 1)

    def sums_at(self, anchor: Tensor, level: Tensor, *, pulls: bool) -> Sums:
        """What the loss, the statistics and the embeddings' gradient need, in one pass."""
        mass = excess = support = torch.zeros_like(level)
        num_active = mass.sum()
        pulled = torch.zeros_like(self.embeddings) if pulls else None
        for where, unit, posterior, levels in self.posteriors(anchor, level):
            if pulled is not None:
                pulled += self.pull(posterior, unit)
            is_active = posterior > 0
            mass = mass + posterior.sum(1).double()
            support = support + is_active.sum(1)
            levels = heights(levels, self.order).mul_(posterior)
            excess = excess + torch.where(is_active, levels, 0.0).sum(1).double()
            num_active = num_active + self.num_active(is_active.any(0), where)
        return Sums(mass, excess, support, num_active, pulled)

    def num_active(self, is_active: Tensor, where: slice) -> Tensor:
        """Classes of a block that are active in some row or a target, a scalar."""
        local, width = self.labels - where.start, where.stop - where.start
        has_gradient = torch.nn.functional.pad(is_active, (0, 1))
        is_elsewhere = (local < 0) | (local >= width)
        has_gradient[local.masked_fill(is_elsewhere, width)] = True
        return has_gradient[:width].sum()

    def pushes(
        self, anchor: Tensor, level: Tensor, weighted: Tensor, targets: ClassGradient
    ) -> Iterator[tuple[slice, Tensor]]:
        """Classes and ``sum_b f p_bj weighted_b``, ``[n, d]``, plus the targets' own entries.

        ``f`` is ``HALF_FACTOR`` for operands in half precision, else one.
        """
        is_native = weighted.dtype == self.embeddings.dtype
        for where, _, posterior, _ in self.posteriors(anchor, level):
            scaled = posterior if is_native else posterior * HALF_FACTOR
            rows = product(scaled.to(weighted.dtype).t(), weighted).to(self.embeddings.dtype)
            add_entries_(rows, targets, self.embeddings, where)
            yield where, rows


def add_entries_(rows: Tensor, gradient: ClassGradient, embeddings: Tensor, where: slice) -> None:
    """Add the entries of some classes, times their embeddings, to the classes' rows ``[n, d]``."""
    columns, entries, values = gradient
    is_here = (columns >= where.start) & (columns < where.stop)
    own = torch.where(is_here[:, None], embeddings[entries.long()] * values[:, None], 0.0)
    local = (columns.long() - where.start).clamp(0, len(rows) - 1)
    rows.index_add_(0, local, own)


def log_sum_exp(chunks: Chunks, target: Target, sums: SoftmaxSums) -> SolvedBlocks:
    """``alpha = 1``: the solution from sums relative to a cosine."""
    top, mass, pulled = sums.over(chunks.ranks, chunks.scale)
    anchor = torch.where(top == -torch.inf, 0.0, top.double() * chunks.scale)
    joint = target.logits - anchor + target.log_reference
    total = torch.logaddexp(mass.log(), joint)  # tau, relative to the anchor
    others = (mass.log() - total).exp()
    if pulled is not None:
        pulled = pulled * (-total).exp().to(pulled.dtype)[:, None]
    count = torch.full_like(others, chunks.head.num_classes)
    error = (others + (joint - total).exp() - 1.0).abs()
    return SolvedBlocks(anchor, -total, others, others, count, error, count.mean(), pulled)
