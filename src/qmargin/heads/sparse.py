"""The exact sparse step: screen, bound, rescore, solve, sparse gradients (F1-F7).

A class outside the support has no posterior, no gradient and no share of the loss. So one product
with rounded operands finds where the support can be, float32 scores of those few groups decide, and
everything after touches active classes only. What makes it exact rather than likely is the slack:
rounding moves a cosine by no more than the measured lengths of the rounding errors (F3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.kernels.head_reference import GROUP, ClassGradient, SolvedRows
from qmargin.maths.objective import loss_from_sums
from qmargin.maths.threshold import heights, level_step

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

LIST_CAPACITY = 8  # entries a row's list may hold per listed group of 32


@dataclass
class SparseStep:
    """One forward and backward pass; what the autograd functions share."""

    head: MarginClassifier
    embeddings: Tensor  # [B, d], unit, detached
    labels: Tensor  # [B]
    solved: SolvedRows | None = None
    num_pairs: int = 0
    num_overflowed: int = 0
    weights: Tensor | None = None  # [B], gradient of the others' cosines per posterior

    @property
    def kernels(self) -> Any:
        """The operations, plain or fused, for this device."""
        return self.head.kernels

    def target_cosines(self) -> Tensor:
        """Cosine of each row with its own class, ``[B]``, from the master prototypes."""
        return (self.embeddings * self.unit_targets()).sum(1)

    def unit_targets(self) -> Tensor:
        """Unit prototype of each row's class, ``[B, d]``."""
        head = self.head
        return head.prototypes.detach()[self.labels] * head.inverse_norms[self.labels][:, None]

    def solve(self, target_logits: Tensor, target_log_reference: Tensor) -> None:
        """Find the support and the posterior of every row (F1-F7)."""
        head, kernels = self.head, self.kernels
        scale, order = head.loss.scale, head.order
        rounded = self.embeddings.to(head.copy.dtype)
        maxima = kernels.group_maxima(rounded, head.copy, self.labels, head.num_classes)
        tau_low = kernels.bound_tau(
            maxima, target_logits, target_log_reference, scale=scale, order=order
        )
        slack = self.slack(rounded)  # [B], in cosine
        edge = (tau_low - 1.0 / order) / scale
        groups, rows, starts = kernels.list_groups(maxima, edge - 2.0 * slack)
        del maxima
        self.num_pairs = len(groups)
        prototypes = head.prototypes.detach()
        scores = kernels.rescore(
            self.embeddings, prototypes, head.inverse_norms, self.labels, groups, rows
        )
        terms = (scores, groups, rows, starts, target_logits, target_log_reference)
        options = {"scale": scale, "order": order, "floor": edge - slack}
        self.solved = kernels.solve_lists(*terms, **options, capacity=head.list_capacity)
        self.num_overflowed = int(self.solved.has_overflowed.sum())
        if self.num_overflowed:  # redo with room for every class of every listed group (F7)
            self.solved = kernels.solve_lists(*terms, **options, capacity=GROUP)

    def slack(self, rounded: Tensor) -> Tensor:
        """How far a screened cosine can be from the exact one, per row (F3)."""
        head = self.head
        own = (self.embeddings - rounded.to(self.embeddings.dtype)).norm(dim=1).double()
        unit = torch.finfo(self.embeddings.dtype).eps
        accumulated = head.embedding_dim * unit  # float32 sums of d products of unit vectors
        return own + head.copy_error.double() + accumulated


class TargetCosine(torch.autograd.Function):
    """The target's cosine. Its backward runs last and hands over the prototypes' gradient."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, prototypes: Tensor, step: SparseStep) -> Tensor:
        """Cosines ``[B]``."""
        ctx.step = step
        return step.target_cosines()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """The target's share of both gradients, and the others' share of the prototypes'."""
        step: SparseStep = ctx.step
        head, solved = step.head, step.solved
        assert solved is not None and step.weights is not None
        gradient = step.kernels.sort_by_class(solved, step.labels, step.weights, grad)
        own = step.unit_targets() * grad[:, None]
        return own, head.receive_gradient(gradient, step.embeddings), None


class SparseRows(torch.autograd.Function):
    """Loss of each row from the lists."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, logits: Tensor, log_reference: Tensor, step: SparseStep
    ) -> Tensor:
        """Loss ``[B]``."""
        order = step.head.order
        step.solve(logits, log_reference)
        solved = step.solved
        assert solved is not None
        level = solved.level - level_step(order) * (solved.anchor - logits)
        loss, target = loss_from_sums(
            solved.excess, solved.others_mass, level, log_reference, order
        )
        ctx.step = step
        ctx.save_for_backward(log_reference, level, target)
        return loss.to(embeddings.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """``p - y`` for the logits (M7); the envelope's gradient for the target's measure."""
        step: SparseStep = ctx.step
        log_reference, level, target = ctx.saved_tensors
        head, solved = step.head, step.solved
        assert solved is not None
        order = head.order
        step.weights = grad * head.loss.scale
        own = step.kernels.embedding_gradient(
            solved, head.prototypes.detach(), head.inverse_norms, step.weights
        )
        wide = grad.double()
        height = heights(level, order).clamp_min(0.0)
        in_reference = (target * height - (-order * log_reference).exp()) / (1.0 + order)
        return own, -wide * solved.others_mass, wide * in_reference, None


def sparse_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor | None
) -> tuple[Tensor, SparseStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the step's record."""
    step = SparseStep(head, embeddings.detach(), labels)
    cosine: Tensor = TargetCosine.apply(embeddings, head.prototypes, step)
    term = head.loss.margin(cosine.double(), head.loss.scale, labels=labels, norms=norms)
    loss: Tensor = SparseRows.apply(embeddings, term.logits, term.log_reference, step)
    if term.penalty is not None:
        loss = loss + term.penalty.to(loss.dtype)
    return loss, step


__all__ = ["ClassGradient", "SparseStep", "sparse_rows"]
