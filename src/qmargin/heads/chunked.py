"""The dense step by blocks of classes: any alpha, and no ``[B, k]`` tensor at any time.

Forward solves every row over blocks that are computed and forgotten (``heads.chunks``), and pulls
the embeddings' gradient out of the posterior while it is at hand. Backward computes the blocks once
more, for the prototypes' gradient alone: at ``alpha = 1`` a step has four products.

**Which logits.** The others' cosines are products of operands in ``head.chunk_dtype``: by default
the prototypes' own precision on a CPU, the precision of the screened copy on a GPU. With half
operands the loss is that of the *rounded* unit vectors, summed in float32, and its gradient is
taken as if rounding were the identity; posteriors are rounded to half precision before they are
multiplied, never before they are summed. The target's cosine always comes from the prototypes
themselves. Set ``head.chunk_dtype = torch.float32`` for exact products on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qmargin.heads.chunks import (
    HALF_FACTOR,
    Chunks,
    SoftmaxSums,
    SolvedBlocks,
    Target,
    log_sum_exp,
)
from qmargin.heads.fused_chunks import make_chunks
from qmargin.heads.leaving import leave_blocks
from qmargin.heads.pending import PendingGradient, element_bound, is_bounded
from qmargin.heads.ranked import own_labels, poisoned
from qmargin.heads.root_search import solve
from qmargin.heads.step import StepStats, reference_gradient
from qmargin.heads.step_loss import RowSolution
from qmargin.kernels.head_records import ClassGradient
from qmargin.kernels.update_reference import project_rows
from qmargin.maths.objective import loss_from_sums
from qmargin.maths.threshold import level_step

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


@dataclass
class ChunkedStep:
    """One forward and backward pass."""

    head: MarginClassifier
    chunks: Chunks
    targets: Tensor  # [B, d], unit prototypes of the rows' own classes
    softmax: SoftmaxSums | None = None
    solved: SolvedBlocks | None = None
    push: Push | None = None
    num_overflowed: int = 0  # rows of a sparse step that this one replaced

    def target_cosines(self) -> Tensor:
        """See ``SolvableStep``; from the prototypes themselves."""
        cosines = (self.chunks.embeddings * self.targets).sum(1)
        return self.head.ranks.sum_(poisoned(cosines, self.head.copy_error))

    def solve(
        self, target_logits: Tensor, target_log_reference: Tensor, *, has_gradient: bool
    ) -> RowSolution:
        """See ``SolvableStep``."""
        order = self.chunks.order
        target = Target(target_logits, target_log_reference)
        if self.softmax is not None:
            solved = log_sum_exp(self.chunks, target, self.softmax)
        else:
            solved = solve(self.chunks, target, pulls=has_gradient)
        self.solved = solved
        level = solved.level - level_step(order) * (solved.anchor - target_logits)
        loss, posterior = loss_from_sums(
            solved.excess, solved.others_mass, level, target_log_reference, order
        )
        in_reference = reference_gradient(posterior, level, target_log_reference, order)
        return RowSolution(loss, -solved.others_mass, in_reference)

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """See ``SolvableStep``."""
        assert self.solved is not None
        self.push = Push.of(self.chunks, self.solved, weights, target_weights)
        own = self.targets * target_weights[:, None]
        pulled = self.solved.pulled
        return own if pulled is None else own.addcmul_(pulled, weights[:, None])

    def hand_over(self, factor: Tensor) -> Tensor | None:
        """See ``SolvableStep``."""
        assert self.solved is not None and self.push is not None
        return leave_blocks(self.head, ChunkedPending(self.chunks, self.solved, self.push, factor))

    def confirm(self) -> bool:
        """Whether the sums hold; if not, the step must be taken again, with certainty."""
        return self.softmax is None or self.softmax.confirm()

    def stats(self) -> StepStats:
        """Summarise the step."""
        assert self.solved is not None
        num_classes = self.chunks.head.num_classes
        return StepStats(
            path="chunked",
            reason="its lists would have been too long" if self.num_overflowed else "",
            support_mean=float(self.solved.support_size.mean()),
            support_max=int(self.solved.support_size.max()),
            num_candidates=float(num_classes),
            num_overflowed=self.num_overflowed,
            mass_error=float(self.solved.mass_error.max()),
            active_share=float(self.solved.num_active) / num_classes,
        )

    def class_share(self) -> float:
        """Share of the classes that are active in a row, targets left out."""
        assert self.solved is not None
        if self.chunks.order <= 0.0:
            return 1.0
        num_others = (self.solved.support_size - 1.0).clamp_min(0.0)  # lists leave the target out
        return float(num_others.mean()) / self.chunks.head.num_classes


class Push(NamedTuple):
    """What the prototypes' gradient is made of, beside the posteriors; known before a backward."""

    weighted: Tensor  # [B, d], embeddings times their share, as operands
    targets: ClassGradient  # the rows' own classes
    factor: Tensor  # scalar, that products with ``weighted`` and ``targets`` still need
    bound: Tensor  # float64 scalar, see ``element_bound``; NaN if a row has no root

    @classmethod
    def of(
        cls, chunks: Chunks, solved: SolvedBlocks, weights: Tensor, target_weights: Tensor
    ) -> Push:
        """From gradients of the others' cosines per posterior, and of the targets', ``[B]``."""
        embeddings, dtype = chunks.embeddings, chunks.operand_dtype
        factor = torch.ones_like(weights[0])
        largest = factor
        if dtype != embeddings.dtype:  # bring posteriors and weights into the range of half
            largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
            factor = largest / HALF_FACTOR
        weighted = (embeddings * (weights / largest)[:, None]).to(dtype)
        columns, rows = chunks.labels.to(torch.int32).sort(stable=True)
        targets = ClassGradient(columns, rows, target_weights[rows] / factor)
        both = torch.cat([weights, target_weights.to(weights.dtype)])
        bound = element_bound(both, chunks.head.inverse_norms, embeddings.shape[1])
        return cls(weighted, targets, factor, bound + 0.0 * solved.level.sum())


@dataclass(frozen=True)
class ChunkedPending(PendingGradient):
    """The prototypes' gradient of a chunked step, computed block by block when asked for.

    It reads the prototypes: use it before they change, or step each block before the next.
    """

    chunks: Chunks
    solved: SolvedBlocks
    push: Push
    factor: Tensor  # scalar: gradient that came into the loss

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """See ``PendingGradient``: gradients of unit prototypes, up to a factor."""
        solved, (weighted, targets, factor, _) = self.solved, self.push
        factor = factor * self.factor
        for where, block in self.chunks.pushes(solved.anchor, solved.level, weighted, targets):
            yield where, block, factor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and the gradient of their prototypes, ``[n, d]``."""
        chunks = self.chunks
        for where, rows, factor in self.raw_blocks():
            assert factor is not None
            lengths = chunks.head.inverse_norms[where]
            yield where, project_rows(rows, chunks.prototypes[where], lengths, factor)

    def is_finite(self) -> Tensor:
        """From a bound of the gradient's elements, without making it."""
        bound = self.push.bound * self.factor.abs()
        return is_bounded(bound, self.chunks.embeddings.dtype)


def chunked_step(
    head: MarginClassifier,
    embeddings: Tensor,
    labels: Tensor,
    *,
    maxima: Tensor | None = None,
    is_certain: bool = False,
) -> ChunkedStep:
    """A step for unit embeddings; at ``alpha = 1`` its sums are launched.

    Args:
        head: Prototypes and loss.
        embeddings: ``[B, d]``.
        labels: ``[B]``; a negative one marks a row that does not count.
        maxima: Of a sparse step's groups, if there was one.
        is_certain: Take no short cut that would have to be confirmed.
    """
    local, columns = own_labels(head, labels)
    chunks = make_chunks(head, embeddings.detach(), local, maxima)
    if len(head.shard):
        targets = chunks.unit(columns)
    else:
        targets = torch.zeros_like(chunks.embeddings)
    if head.ranks.world > 1:
        targets = torch.where((local >= 0)[:, None], targets, 0.0)
    step = ChunkedStep(head, chunks, targets)
    if chunks.order == 0.0:
        pulls = torch.is_grad_enabled() and embeddings.requires_grad
        step.softmax = chunks.softmax_sums(pulls=pulls, is_certain=is_certain)
    return step
