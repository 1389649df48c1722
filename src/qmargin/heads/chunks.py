"""Passes over all classes, block by block: no ``[B, k]`` tensor at any time.

``Chunks`` is the plain version, ``FusedChunks`` overrides the passes with kernels whose blocks are
never seen as cosines. ``heads.chunked`` calls them.

**Which logits.** The others' cosines are products of operands in ``Chunked.dtype``: by default the
prototypes' own precision on a CPU, the precision of the screened copy on a GPU. With half operands
the loss is that of the *rounded* unit vectors, summed in float32, and its gradient is taken as if
rounding were the identity; posteriors are rounded to half precision before they are multiplied,
never before they are summed. The target's cosine always comes from the prototypes themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qmargin.kernels.head_reference import drop_targets_
from qmargin.kernels.head_types import GROUP, ClassGradient
from qmargin.kernels.solver import RowSums, heights, level_step, posterior_rows, row_sums
from qmargin.transfers import Reading

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier
    from qmargin.heads.sharding import Ranks


CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}  # in a block; about six such tensors live at once
HALF_FACTOR = 2.0**15  # posteriors are at most one: so scaled they use the range of float16
FUSED_LOGITS = 1 << 27  # in a block, of which only its half posterior and its gradient rows live
NUM_COARSE = 8192  # sets of classes whose maxima bound the root
PULL_BLOCKS = 2  # at a time in passes that make no gradient rows: fewer launches, as much memory
TILE = 256  # classes: a block of whole tiles wastes none
# Weights of the softmax pass are relative to a guess of the largest cosine, times this: room for
# cosines above the guess, and for the many far below it.
GUESS_FACTOR = 2.0**4
GUESS_CLASSES = 1 << 16  # whose largest cosine is the guess


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
    is_doubtful: Reading | None = None  # whether the guess of the largest cosine was too low

    def verify(self) -> bool:
        """Wait for the device; True if the sums hold."""
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
        self.scale, self.b = head.loss.scale, head.alpha_minus_one
        native = self.prototypes.dtype
        self.operand_dtype = head.chunk_dtype
        self.operand = embeddings.to(self.operand_dtype)
        # Above alpha = 2 a posterior is a root of its height: float32 would show at the edge.
        self.dtype = torch.float64 if self.b > 1.0 else native
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
        return shift, (level - level_step(self.b) * missing).to(self.dtype)

    def posteriors(
        self, anchor: Tensor, level: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """By blocks: classes, unit prototypes, posterior and levels ``[B, n]`` (M1)."""
        shift, level = self.shifted(anchor, level)
        zero = torch.zeros_like(level)
        for where, unit in self.blocks():
            logits = self.cosines(where, unit).sub_(shift[:, None]).mul_(self.scale)
            yield where, unit, *posterior_rows(logits, None, zero, level, self.b)

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
            sums = row_sums(gaps, None, level, self.b)
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
            levels = heights(levels, self.b).mul_(posterior)
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


class FusedChunks(Chunks):
    """See ``Chunks``; blocks are never seen as cosines."""

    def __init__(
        self,
        head: MarginClassifier,
        embeddings: Tensor,
        labels: Tensor,
        group_maxima: Tensor | None = None,
    ) -> None:
        super().__init__(head, embeddings, labels)
        self.group_maxima = group_maxima
        self.kernels: Any = import_module("qmargin.kernels.triton.blocks")
        self.screen: Any = import_module("qmargin.kernels.triton.screen")
        self.size = max(TILE, self.size // TILE * TILE)

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """What every kernel takes: operands, labels and the number of classes."""
        return self.operand, self.copy, self.labels, len(self.prototypes)

    def block_logits(self) -> int:
        """See ``Chunks``."""
        return FUSED_LOGITS

    def weighed(
        self, shift: Tensor, level: Tensor, num_blocks: int = 1, **options: Any
    ) -> Iterator[tuple[slice, slice, Any]]:
        """By some blocks at a time: classes, also with padding, and the kernel's ``Weighed``."""
        size, num_classes = num_blocks * self.size, len(self.prototypes)
        for start in range(0, num_classes, size):
            where = slice(start, min(start + size, num_classes))
            padded = slice(start, start + -(-(where.stop - start) // 8) * 8)
            numbers = (shift, level, self.scale, self.b)
            # No name for the block here: it must be gone before the next is made.
            yield (
                where,
                padded,
                self.kernels.posterior_block(*self.batch, where, *numbers, **options),
            )

    def softmax_sums(self, *, pulls: bool, is_certain: bool = False) -> SoftmaxSums:
        """See ``Chunks``; the pull goes along with the sums if it is not to be certain."""
        if is_certain or not pulls:
            return self._sums_first(pulls=pulls)
        first = min(GUESS_CLASSES, len(self.prototypes))
        guess, _ = self.kernels.log_sum_exp(*self.batch[:3], first, self.scale)
        guess = torch.where(guess == -torch.inf, 0.0, guess)
        pulled = torch.zeros_like(self.embeddings)
        options: dict[str, Any] = {"factor": GUESS_FACTOR, "with_sums": True}
        sums = []
        for _, padded, block in self.weighed(guess, 0.0 * guess, PULL_BLOCKS, **options):
            pulled.add_(product(block.weights, self.copy[padded]), alpha=1.0 / GUESS_FACTOR)
            sums.append(block.sums[0])
            del block
        masses = torch.cat(sums, 1)
        # Where the guess was far too low, weights were cut off and masses may have overflowed.
        room = min(torch.finfo(self.operand_dtype).max / GUESS_FACTOR, 2.0**100)
        is_doubtful = (~(masses < room)).any().to(torch.int32)
        is_doubtful = self.ranks.max_(is_doubtful)  # all ranks begin again, or none
        mass = masses.sum(1, dtype=torch.float64)
        return SoftmaxSums(guess, mass, pulled, Reading(is_doubtful))

    def _sums_first(self, *, pulls: bool) -> SoftmaxSums:
        """The sums first, the pull in a pass of its own when they are known."""
        top, mass = self.kernels.log_sum_exp(*self.batch, self.scale)
        if not pulls:
            return SoftmaxSums(top, mass, None)
        shift = torch.where(top == -torch.inf, 0.0, top)
        pulled = torch.zeros_like(self.embeddings)
        for _, padded, block in self.weighed(shift, torch.zeros_like(shift), PULL_BLOCKS):
            pulled.add_(product(block.weights, self.copy[padded]), alpha=1.0 / HALF_FACTOR)
            del block
        return SoftmaxSums(top, mass, pulled)

    def row_sums(self, anchor: Tensor, level: Tensor) -> RowSums:
        """See ``Chunks``."""
        shift, level = self.shifted(anchor, level)
        return RowSums(*self.kernels.row_sums(*self.batch, shift, level, self.scale, self.b))

    def maxima(self) -> Tensor:
        """Maxima of sets of groups: fewer than of groups, and almost as good a bound."""
        maxima, self.group_maxima = self.group_maxima, None
        if maxima is None:
            maxima = self.screen.group_maxima(*self.batch)
        whole = maxima.shape[1] // NUM_COARSE * NUM_COARSE
        if whole == 0:
            return maxima
        coarse = maxima[:, :whole].reshape(len(maxima), -1, NUM_COARSE).amax(1)
        rest = maxima[:, whole:]
        coarse[:, : rest.shape[1]] = torch.maximum(coarse[:, : rest.shape[1]], rest)
        return coarse

    def sums_at(self, anchor: Tensor, level: Tensor, *, pulls: bool) -> Sums:
        """See ``Chunks``."""
        shift, start = self.shifted(anchor, level)
        totals = level.new_zeros((3, len(level)))
        num_active = totals.new_zeros(())
        pulled = torch.zeros_like(self.embeddings) if pulls else None
        for where, padded, block in self.weighed(shift, start, PULL_BLOCKS, with_sums=True):
            if pulled is not None:
                pulled.add_(product(block.weights, self.copy[padded]), alpha=1 / HALF_FACTOR)
            totals += block.sums.sum(2, dtype=torch.float64)
            width = where.stop - where.start
            num_active = num_active + self.num_active(block.active[:, :width].any(0), where)
            del block
        mass, excess, support = totals.unbind()
        return Sums(mass, excess, support, num_active, pulled)

    def pushes(
        self, anchor: Tensor, level: Tensor, weighted: Tensor, targets: ClassGradient
    ) -> Iterator[tuple[slice, Tensor]]:
        """See ``Chunks``."""
        for where, _, block in self.weighed(*self.shifted(anchor, level)):
            rows = product(block.weights.t(), weighted)[: where.stop - where.start]
            del block
            self.kernels.add_entries_(rows, targets, self.embeddings, where)
            yield where, rows
            del rows


def make_chunks(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, maxima: Tensor | None = None
) -> Chunks:
    """Chunks for a batch, fused where kernels can serve it.

    Fused ones save a pass over the classes if the ``maxima`` of a sparse step's groups are known.
    """
    dtype = head.chunk_dtype
    is_half = dtype in (torch.float16, torch.bfloat16) and head.copy.dtype == dtype
    has_kernels = head.kernels.__name__.endswith("triton.head") and head.embedding_dim % 8 == 0
    if is_half and has_kernels and 0.0 <= head.alpha_minus_one <= 1.0:
        return FusedChunks(head, embeddings, labels, maxima)
    return Chunks(head, embeddings, labels)
