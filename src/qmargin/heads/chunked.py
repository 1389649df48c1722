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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.chunks import HALF_FACTOR, Chunks, SolvedBlocks, Target
from qmargin.heads.fused_chunks import make_chunks
from qmargin.heads.pending import PendingGradient, is_bounded
from qmargin.heads.step import StepStats, target_gradients
from qmargin.kernels.head_records import GROUP, ClassGradient
from qmargin.kernels.update_reference import project_rows
from qmargin.maths.objective import loss_from_sums
from qmargin.maths.threshold import level_step

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


@dataclass
class ChunkedStep:
    """One forward and backward pass; what the autograd functions share."""

    chunks: Chunks
    solved: SolvedBlocks | None = None
    weights: Tensor | None = None  # [B], gradient of the others' cosines per posterior
    num_overflowed: int = 0  # rows of a sparse step that this one replaced

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

    def group_share(self) -> float:
        """Share of a row's groups that hold an active class, were active classes scattered."""
        assert self.solved is not None
        if self.chunks.order <= 0.0:
            return 1.0
        num_others = (self.solved.support_size - 1.0).clamp_min(0.0)  # lists leave the target out
        share = float(num_others.mean()) / self.chunks.head.num_classes
        return 1.0 - (1.0 - share) ** GROUP


@dataclass(frozen=True)
class ChunkedPending(PendingGradient):
    """The prototypes' gradient of a chunked step, computed block by block when asked for.

    It reads the prototypes: use it before they change, or step each block before the next.
    """

    chunks: Chunks
    solved: SolvedBlocks
    weights: Tensor  # [B]
    target_weights: Tensor  # [B], gradient of the targets' cosines

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """See ``PendingGradient``: gradients of unit prototypes, up to a factor."""
        chunks, solved, weights = self.chunks, self.solved, self.weights
        embeddings, dtype = chunks.embeddings, chunks.operand_dtype
        factor = torch.ones_like(weights[0])
        largest = factor
        if dtype != embeddings.dtype:  # bring posteriors and weights into the range of half
            largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
            factor = largest / HALF_FACTOR
        weighted = (embeddings * (weights / largest)[:, None]).to(dtype)
        columns, rows = chunks.labels.to(torch.int32).sort(stable=True)
        targets = ClassGradient(columns, rows, self.target_weights[rows] / factor)
        for where, block in chunks.pushes(solved.anchor, solved.level, weighted, targets):
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
        weights = torch.cat([self.weights, self.target_weights.to(self.weights.dtype)])
        has_root = self.solved.level.sum().isfinite()
        chunks = self.chunks
        depth = chunks.embeddings.shape[1]
        return has_root & is_bounded(weights, chunks.head.inverse_norms, depth)


class TargetCosine(torch.autograd.Function):
    """The target's cosine. Its backward runs last and hands over the prototypes' gradient."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, prototypes: Tensor, step: ChunkedStep) -> Tensor:
        """Cosines ``[B]``, from the prototypes themselves."""
        unit = step.chunks.unit(step.chunks.labels)
        ctx.step = step
        ctx.save_for_backward(unit)
        return (embeddings * unit).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """The target's share of both gradients, and the others' share of the prototypes'."""
        (unit,) = ctx.saved_tensors
        step: ChunkedStep = ctx.step
        received = None
        if ctx.needs_input_grad[1]:
            assert step.solved is not None and step.weights is not None
            pending = ChunkedPending(step.chunks, step.solved, step.weights, grad)
            received = step.chunks.head.receive(pending)
        return unit * grad[:, None], received, None


class ChunkedRows(torch.autograd.Function):
    """Loss of each row from sums over blocks."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, logits: Tensor, log_reference: Tensor, step: ChunkedStep
    ) -> Tensor:
        """Loss ``[B]``."""
        order = step.chunks.order
        target = Target(logits, log_reference)
        solved = step.chunks.solve(target, pulls=ctx.needs_input_grad[0])
        step.solved = solved._replace(pulled=None)
        level = solved.level - level_step(order) * (solved.anchor - logits)
        loss, posterior = loss_from_sums(
            solved.excess, solved.others_mass, level, log_reference, order
        )
        ctx.step = step
        ctx.save_for_backward(log_reference, level, posterior, solved.pulled)
        return loss.to(embeddings.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """``p - y`` for the logits (M7); the envelope's gradient for the target's measure."""
        step: ChunkedStep = ctx.step
        log_reference, level, posterior, pulled = ctx.saved_tensors
        assert step.solved is not None
        step.weights = grad * step.chunks.scale
        own = None if pulled is None else pulled * step.weights[:, None]
        in_logits, in_reference = target_gradients(
            grad, step.solved.others_mass, posterior, level, log_reference, step.chunks.order
        )
        return own, in_logits, in_reference, None


def chunked_rows(
    head: MarginClassifier,
    embeddings: Tensor,
    labels: Tensor,
    norms: Tensor | None,
    maxima: Tensor | None = None,
) -> tuple[Tensor, ChunkedStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the step's record."""
    step = ChunkedStep(make_chunks(head, embeddings.detach(), labels.clamp_min(0), maxima))
    target: Callable[..., Tensor] = TargetCosine.apply
    rows: Callable[..., Tensor] = ChunkedRows.apply
    cosines = target(embeddings, head.prototypes, step)
    term = head.loss.margin(cosines.double(), head.loss.scale, labels=labels, norms=norms)
    loss = rows(embeddings, term.logits, term.log_reference, step)
    if term.penalty is not None:
        loss = loss + term.penalty.to(loss.dtype)
    return loss, step
