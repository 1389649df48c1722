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

from qmargin.heads.chunks import (
    HALF_FACTOR,
    Chunks,
    SolvedBlocks,
    Target,
    product,
    project_rows,
)
from qmargin.heads.pending import PendingGradient
from qmargin.heads.step import StepStats, target_gradients
from qmargin.kernels.head_reference import GROUP
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
    gradient: Tensor | None = None  # [k, d] of the others, where it was made with the embeddings'

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

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and the gradient of their prototypes, ``[n, d]``."""
        chunks = self.chunks
        embeddings = chunks.embeddings
        inverse_norms = chunks.head.inverse_norms
        own = embeddings * self.target_weights[:, None]
        push = Push(chunks, self.solved, self.weights)
        own = own / push.factor  # the rows get it back
        for where, rows in push.blocks():
            local = chunks.labels - where.start
            is_here = (local >= 0) & (local < len(rows))
            rows.index_add_(
                0, local.clamp(0, len(rows) - 1), torch.where(is_here[:, None], own, 0.0)
            )
            yield where, push.project(rows, chunks.prototypes[where], inverse_norms[where])

    def is_finite(self) -> Tensor:
        """From a bound of the gradient's elements, without making it."""
        embeddings, inverse_norms = self.chunks.embeddings, self.chunks.head.inverse_norms
        weight = self.weights.abs().sum() + self.target_weights.abs().sum()
        weight = weight.double() + 0.0 * self.solved.level.sum()  # NaN where the root is
        largest = embeddings.abs().amax() * inverse_norms.amax()
        bound = weight * largest.double() * (1 + embeddings.shape[1])  # with projection
        return bound < torch.finfo(embeddings.dtype).max  # false for NaN


class Push:
    """The others' share of the prototypes' gradient, block by block, up to a common factor."""

    def __init__(self, chunks: Chunks, solved: SolvedBlocks, weights: Tensor) -> None:
        self.chunks, self.solved = chunks, solved
        embeddings, dtype = chunks.embeddings, chunks.operand_dtype
        self.is_native = dtype == embeddings.dtype
        # In half precision posteriors and weights are brought into range, and the rows back.
        largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
        factor = torch.ones_like(largest) if self.is_native else largest
        self.weighted = (embeddings * (weights / factor)[:, None]).to(dtype)
        self.factor = factor if self.is_native else factor / HALF_FACTOR

    def blocks(
        self, pulled: Tensor | None = None, out: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Classes and ``sum_b weight_b p_bj x_b / factor``, ``[n, d]``, in ``out`` if given.

        With fused kernels, ``sum_j p_bj w_j`` is added to ``pulled`` on the way.
        """
        chunks, solved, weighted = self.chunks, self.solved, self.weighted
        if chunks.fused is not None:
            for where, posterior in chunks.half_posteriors(solved.anchor, solved.level):
                if pulled is not None:
                    add_pull_(pulled, posterior, chunks.head.copy[where])
                rows = product(posterior.t(), weighted, None if out is None else out[where])
                yield where, rows
            return
        for where, _, posterior, _ in chunks.posteriors(solved.anchor, solved.level):
            scaled = posterior if self.is_native else posterior * HALF_FACTOR
            rows = product(scaled.to(weighted.dtype).t(), weighted)
            yield where, rows.to(chunks.embeddings.dtype)

    def project(self, rows: Tensor, prototypes: Tensor, inverse_norms: Tensor) -> Tensor:
        """Tangents of the rows times the factor, over the prototypes' lengths; in place."""
        fused = self.chunks.fused
        function = project_rows if fused is None else fused.project_rows_
        result: Tensor = function(rows, prototypes, inverse_norms, self.factor)
        return result


def add_pull_(pulled: Tensor, posterior: Tensor, unit: Tensor) -> None:
    """Add ``sum_j p_bj w_j`` of a block of scaled half posteriors."""
    pulled.add_(product(posterior, unit), alpha=1.0 / HALF_FACTOR)


def pulled_rows(chunks: Chunks, solved: SolvedBlocks) -> Tensor:
    """``sum_j p_bj w_j`` over the others, ``[B, d]``, with fused kernels."""
    pulled = torch.zeros_like(chunks.embeddings)
    for where, posterior in chunks.half_posteriors(solved.anchor, solved.level):
        add_pull_(pulled, posterior, chunks.head.copy[where])
    return pulled


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
            if step.gradient is not None:
                return unit * grad[:, None], self_share(step, unit, grad), None
            pending = ChunkedPending(step.chunks, step.solved, step.weights, grad)
            received = step.chunks.head.receive(pending)
        return unit * grad[:, None], received, None


def self_share(step: ChunkedStep, unit: Tensor, grad: Tensor) -> Tensor:
    """The prototypes' gradient ``[k, d]`` with the targets' own share added."""
    chunks = step.chunks
    assert step.gradient is not None
    cosines = (chunks.embeddings * unit).sum(1, keepdim=True)
    length = (grad * chunks.head.inverse_norms[chunks.labels])[:, None]
    own = (chunks.embeddings - cosines * unit) * length
    return step.gradient.index_add_(0, chunks.labels, own)


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
        if pulled is None and ctx.needs_input_grad[0]:
            pulled = _pulled_in_backward(step)
        own = None if pulled is None else pulled * step.weights[:, None]
        in_logits, in_reference = target_gradients(
            grad, step.solved.others_mass, posterior, level, log_reference, step.chunks.order
        )
        return own, in_logits, in_reference, None


def _pulled_in_backward(step: ChunkedStep) -> Tensor:
    """Pull the embeddings' gradient; if a dense one of the prototypes is due, make both at once."""
    chunks, solved, weights = step.chunks, step.solved, step.weights
    assert solved is not None and weights is not None
    head = chunks.head
    if head.gradient != "dense" or not head.prototypes.requires_grad:
        return pulled_rows(chunks, solved)
    pulled = torch.zeros_like(chunks.embeddings)
    step.gradient = torch.empty_like(chunks.prototypes)
    push = Push(chunks, solved, weights)
    for where, rows in push.blocks(pulled, step.gradient):
        push.project(rows, chunks.prototypes[where], head.inverse_norms[where])
    return pulled


def chunked_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor | None
) -> tuple[Tensor, ChunkedStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the step's record."""
    step = ChunkedStep(Chunks(head, embeddings.detach(), labels.clamp_min(0)))
    target: Callable[..., Tensor] = TargetCosine.apply
    rows: Callable[..., Tensor] = ChunkedRows.apply
    cosines = target(embeddings, head.prototypes, step)
    term = head.loss.margin(cosines.double(), head.loss.scale, labels=labels, norms=norms)
    loss = rows(embeddings, term.logits, term.log_reference, step)
    if term.penalty is not None:
        loss = loss + term.penalty.to(loss.dtype)
    return loss, step
