"""The exact sparse step: screen, bound, rescore, solve, sparse gradients (F1-F7).

A class outside the support has no posterior, no gradient and no share of the loss. So one product
with rounded operands finds where the support can be, float32 scores of those few groups decide, and
everything after touches active classes only. What makes it exact rather than likely is the slack:
rounding moves a cosine by no more than the measured lengths of the rounding errors (F3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.heads.step import StepStats
from qmargin.kernels.head_records import GROUP, PreparedRows, Rows, SolvedRows, Support

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

LIST_CAPACITY = 8192  # listed groups per row, on average, above which lists lose to blocks


@dataclass
class SparseStep:
    """One forward and backward pass; what the autograd functions share."""

    head: MarginClassifier
    prepared: PreparedRows
    labels: Tensor  # [B]
    maxima: Tensor | None = None  # [B, g], until it is used
    support: Support | None = None
    num_pairs: int = 0
    target_logits: Tensor | None = None  # [B]
    weights: Tensor | None = None  # [B], gradient of the others' cosines per posterior

    def screen(self) -> None:
        """Launch the screen: what the host does next, the margin above all, hides behind it."""
        head = self.head
        self.maxima = head.kernels.group_maxima(
            self.prepared.rounded, head.copy, self.labels, head.num_classes
        )

    def solve(
        self, target_logits: Tensor, target_log_reference: Tensor, *, has_gradient: bool
    ) -> SolvedRows:
        """Find the support and the posterior of every row (F1-F7)."""
        head, prepared = self.head, self.prepared
        self.target_logits = target_logits.detach()
        kernels, prototypes = head.kernels, head.prototypes.detach()
        options = {"scale": head.loss.scale, "order": head.order}
        terms = (target_logits, target_log_reference)
        maxima, self.maxima = self.maxima, None
        rows = Rows(prepared, head.copy, prototypes, head.inverse_norms, self.labels)
        limit = head.list_capacity * len(self.labels)
        hints = {"limit": limit, "expected": head.lengths, "has_gradient": has_gradient}
        self.support = kernels.find_support(rows, maxima, *terms, self.slack(), **options, **hints)
        return self.solved

    @property
    def solved(self) -> SolvedRows:
        """The solution; certain once the step is confirmed."""
        assert self.support is not None
        return self.support.solved

    def confirm(self) -> bool:
        """Whether the lists were long enough; if not, the step must be taken again."""
        assert self.support is not None
        self.head.lengths = self.support.confirm()
        if self.head.lengths is None:
            return False
        self.num_pairs = self.head.lengths.pairs
        return True

    def group_share(self) -> float:
        """Share of all (row, group) pairs that were listed: what the step's cost grows with."""
        num_groups = -(-self.head.num_classes // GROUP)
        return self.num_pairs / max(1, len(self.labels) * num_groups)

    def stats(self) -> StepStats:
        """Summarise the step; waits for the device."""
        solved = self.solved
        assert self.target_logits is not None
        is_active = solved.posterior > 0
        rows = solved.rows[is_active].long()
        support = torch.bincount(rows, minlength=len(self.labels))
        support += self.target_logits > solved.tau - 1.0 / self.head.order  # the target (M3)
        classes = torch.cat([solved.columns[is_active].long(), self.labels]).unique()
        return StepStats(
            path="sparse",
            reason="",
            support_mean=float(support.double().mean()),
            support_max=int(support.max()),
            num_candidates=len(solved.rows) / max(1, len(self.labels)),
            num_overflowed=0,
            mass_error=float(solved.mass_error.max()),
            active_share=len(classes) / self.head.num_classes,
        )

    def slack(self) -> Tensor:
        """How far a screened cosine can be from the exact one, per row, float64 (F3)."""
        rounding, copy_error = self.prepared.rounding.double(), self.head.copy_error
        # Two sums of d products of unit vectors: the screen's and the exact score's own.
        screened = torch.float64 if self.prepared.rounded.dtype == torch.float64 else torch.float32
        unit = torch.finfo(screened).eps + torch.finfo(self.prepared.embeddings.dtype).eps
        accumulated = self.head.embedding_dim * unit
        return rounding * (1.0 + copy_error) + (copy_error + accumulated)


class TargetCosine(torch.autograd.Function):
    """The target's cosine. Its backward runs last and makes both gradients."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, prototypes: Tensor, step: SparseStep) -> Tensor:
        """Cosines ``[B]``."""
        ctx.step = step
        return step.prepared.target_cosines

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Gradients of the embeddings and of the prototypes, all classes together."""
        step: SparseStep = ctx.step
        head, support, weights = step.head, step.support, step.weights
        assert support is not None and support.pulled is not None and weights is not None
        assert support.order is not None
        targets, embeddings = step.prepared.targets, step.prepared.embeddings
        own = torch.addcmul(support.pulled * weights[:, None], targets, grad[:, None])
        gradient = head.kernels.class_gradient(support.order, support.solved, weights, grad)
        return own, head.receive_gradient(gradient, embeddings), None


class SparseRows(torch.autograd.Function):
    """Loss of each row from the lists."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_reference: Tensor, step: SparseStep) -> Tensor:
        """Loss ``[B]``."""
        ctx.step = step
        solved = step.solve(logits, log_reference, has_gradient=ctx.needs_input_grad[0])
        return solved.loss.to(step.prepared.embeddings.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """``p - y`` for the logits (M7); the envelope's gradient for the target's measure."""
        step: SparseStep = ctx.step
        solved = step.solved
        step.weights = grad * step.head.loss.scale
        in_reference = grad * solved.in_reference if ctx.needs_input_grad[1] else None
        return -grad * solved.others_mass, in_reference, None


def sparse_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor | None
) -> tuple[Tensor, SparseStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the step's record, to be confirmed."""
    columns = labels.clamp_min(0)  # a negative label marks a row that the caller discards
    prepared = head.kernels.prepare_rows(
        embeddings.detach(), columns, head.prototypes.detach(), head.inverse_norms, head.copy.dtype
    )
    step = SparseStep(head, prepared, columns)
    step.screen()
    target_cosine: Callable[..., Tensor] = TargetCosine.apply
    row_loss: Callable[..., Tensor] = SparseRows.apply
    cosine = target_cosine(embeddings, head.prototypes, step).double()
    term = head.loss.margin(cosine, head.loss.scale, labels=labels, norms=norms)
    loss = row_loss(term.logits, term.log_reference, step)
    if term.penalty is not None:
        loss = loss + term.penalty.to(loss.dtype)
    return loss, step
