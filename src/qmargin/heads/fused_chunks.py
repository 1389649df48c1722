"""The passes of ``heads.chunks`` with kernels that fold what follows a product into it.

For half-precision operands and ``1 <= alpha <= 2``. A pass over the classes is then one product,
and a block exists only as its posterior in half precision, for the product that comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.heads.chunks import HALF_FACTOR, Chunks, SoftmaxSums, Sums, product
from qmargin.kernels.head_records import ClassGradient
from qmargin.maths.threshold import RowSums
from qmargin.reading import Reading

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

FUSED_LOGITS = 1 << 27  # in a block, of which only its half posterior and its gradient rows live
NUM_COARSE = 8192  # sets of classes whose maxima bound the root
PULL_BLOCKS = 2  # at a time in passes that make no gradient rows: fewer launches, as much memory
TILE = 256  # classes: a block of whole tiles wastes none
# Weights of the softmax pass are relative to a guess of the largest cosine, times this: room for
# cosines above the guess, and for the many far below it.
GUESS_FACTOR = 2.0**4
GUESS_CLASSES = 1 << 16  # whose largest cosine is the guess


def make_chunks(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, maxima: Tensor | None = None
) -> Chunks:
    """Chunks for a batch, fused where kernels can serve it.

    Fused ones save a pass over the classes if the ``maxima`` of a sparse step's groups are known.
    """
    dtype = head.chunk_dtype or (head.screen_dtype if embeddings.is_cuda else embeddings.dtype)
    is_half = dtype in (torch.float16, torch.bfloat16) and head.copy.dtype == dtype
    has_kernels = head.kernels.__name__.endswith("triton.head") and head.embedding_dim % 8 == 0
    if is_half and has_kernels and 0.0 <= head.order <= 1.0:
        return FusedChunks(head, embeddings, labels, maxima)
    return Chunks(head, embeddings, labels)


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
            numbers = (shift, level, self.scale, self.order)
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
        return RowSums(*self.kernels.row_sums(*self.batch, shift, level, self.scale, self.order))

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
