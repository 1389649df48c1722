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

from qmargin.heads.leaving import leave_classes
from qmargin.heads.pending import element_bound
from qmargin.heads.ranked import find_support_of_ranks, own_labels, poisoned
from qmargin.heads.step import StepStats
from qmargin.heads.step_loss import RowSolution
from qmargin.kernels.head_records import (
    ClassGradient,
    PreparedRows,
    Rows,
    SolvedRows,
    Support,
)

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

LIST_CAPACITY = 8192  # listed groups per row, on average, above which lists lose to blocks


@dataclass
class SparseStep:
    """One forward and backward pass; what the autograd functions share."""

    head: MarginClassifier
    prepared: PreparedRows
    labels: Tensor  # [B] among this rank's classes, -1 where another rank has the row's own
    maxima: Tensor | None = None  # [B, g], until it is used
    support: Support | None = None
    num_candidates: int = 0
    target_logits: Tensor | None = None  # [B]
    gradient: ClassGradient | None = None
    bound: Tensor | None = None  # of the gradient's elements, see ``element_bound``

    @property
    def others_support(self) -> Tensor | None:
        """Active classes of each row on all ranks, the target left out; None with one rank."""
        return self.support.others_support if self.support is not None else None

    def screen(self) -> None:
        """Launch the screen: what the host does next, the margin above all, hides behind it."""
        head = self.head
        self.maxima = head.kernels.group_maxima(
            self.prepared.rounded, head.copy, self.labels, len(head.shard)
        )

    def solve(
        self, target_logits: Tensor, target_log_reference: Tensor, *, has_gradient: bool
    ) -> RowSolution:
        """Find the support and the posterior of every row (F1-F7)."""
        head, prepared = self.head, self.prepared
        self.target_logits = target_logits.detach()
        kernels, prototypes = head.kernels, head.prototypes.detach()
        numbers: dict[str, Any] = {"scale": head.loss.scale, "order": head.order}
        numbers |= {"limit": head.list_capacity * len(self.labels), "has_gradient": has_gradient}
        maxima, self.maxima = self.maxima, None
        rows = Rows(prepared, head.copy, prototypes, head.inverse_norms, self.labels)
        given = (rows, maxima, target_logits, target_log_reference, self.slack())
        if head.ranks.world > 1:
            self.support = find_support_of_ranks(kernels, head.ranks, *given, **numbers)
        else:
            self.support = kernels.find_support(*given, expected=head.lengths, **numbers)
        solved = self.solved
        return RowSolution(solved.loss, -solved.others_mass, solved.in_reference)

    def target_cosines(self) -> Tensor:
        """See ``SolvableStep``."""
        return self.prepared.target_cosines

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """See ``SolvableStep``."""
        support = self.support
        assert support is not None and support.pulled is not None and support.order is not None
        if self.head.ranks.world > 1:  # the owner has the others' targets
            target_weights = torch.where(self.labels >= 0, target_weights, 0.0)
        self.gradient = self.head.kernels.class_gradient(
            support.order, support.solved, weights, target_weights
        )
        # From the rows' masses, not the lists: known before the lists are, while the device works.
        total = torch.cat([support.solved.others_mass * weights, target_weights.double()])
        self.bound = element_bound(total, self.head.inverse_norms, self.head.embedding_dim)
        if not len(self.head.shard):  # the targets stand at class 0, which is not there
            self.gradient = ClassGradient(*(part[:0] for part in self.gradient))
        pulled = support.pulled * weights[:, None]
        return torch.addcmul(pulled, self.prepared.targets, target_weights[:, None])

    def hand_over(self, factor: Tensor) -> Tensor | None:
        """See ``SolvableStep``."""
        assert self.gradient is not None and self.bound is not None
        gradient = self.gradient._replace(values=self.gradient.values * factor)
        bound = self.bound * factor.abs()
        return leave_classes(self.head, gradient, self.prepared.embeddings, bound)

    @property
    def solved(self) -> SolvedRows:
        """The solution; certain once the step is confirmed."""
        assert self.support is not None
        return self.support.solved

    def confirm(self) -> bool:
        """Whether the lists were long enough; if not, the step must be taken again."""
        assert self.support is not None
        found = self.head.lengths = self.support.confirm()
        if found is None:
            return False
        self.num_candidates = found.candidates
        if self.gradient is not None:
            self.gradient = self.cut(self.gradient)
        return True

    def cut(self, gradient: ClassGradient) -> ClassGradient:
        """A gradient without what was made of spare entries of the lists, which comes last."""
        length = self.num_candidates + len(self.labels)
        return ClassGradient(*(part[:length] for part in gradient))

    def class_share(self) -> float:
        """Share of the classes that rows list; with several ranks, a number they agree on."""
        num_logits = max(1, len(self.labels) * self.head.num_classes)
        support = self.others_support
        return (self.num_candidates if support is None else int(support.sum())) / num_logits

    def stats(self) -> StepStats:
        """Summarise the step; waits for the device."""
        solved = self.solved
        assert self.target_logits is not None
        is_active = solved.posterior > 0
        support = self.others_support
        if support is None:
            rows = solved.rows[is_active].long()
            support = torch.bincount(rows, minlength=len(self.labels))
        support = support + (self.target_logits > solved.tau - 1.0 / self.head.order)  # M3
        labels = self.labels[self.labels >= 0]
        classes = torch.cat([solved.columns[is_active].long(), labels]).unique()
        return StepStats(
            path="sparse",
            reason="",
            support_mean=float(support.double().mean()),
            support_max=int(support.max()),
            num_candidates=len(solved.rows) / max(1, len(self.labels)),
            num_overflowed=0,
            mass_error=float(solved.mass_error.max()),
            active_share=len(classes) / max(1, len(self.head.shard)),
        )

    def slack(self) -> Tensor:
        """How far a screened cosine can be from the exact one, per row, float64 (F3)."""
        rounding, copy_error = self.prepared.rounding.double(), self.head.copy_error
        # Two sums of d products of unit vectors: the screen's and the exact score's own.
        screened = torch.float64 if self.prepared.rounded.dtype == torch.float64 else torch.float32
        unit = torch.finfo(screened).eps + torch.finfo(self.prepared.embeddings.dtype).eps
        accumulated = self.head.embedding_dim * unit
        return rounding * (1.0 + copy_error) + (copy_error + accumulated)


def sparse_step(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> SparseStep:
    """A step for unit embeddings, its screen launched."""
    local, columns = own_labels(head, labels)
    if len(head.shard):
        prepared = head.kernels.prepare_rows(
            embeddings.detach(), columns, head.prototypes.detach(), head.inverse_norms,
            head.copy.dtype,
        )  # fmt: skip
    else:
        rounded, nothing = embeddings.detach().to(head.copy.dtype), embeddings.detach() * 0.0
        prepared = PreparedRows(embeddings.detach(), rounded, nothing[:, 0], nothing, nothing[:, 0])
    cosines = prepared.target_cosines
    if head.ranks.world > 1:
        is_own = local >= 0
        cosines = torch.where(is_own, cosines, 0.0)
        prepared = prepared._replace(targets=torch.where(is_own[:, None], prepared.targets, 0.0))
    cosines = head.ranks.sum_(poisoned(cosines, head.copy_error))
    prepared = prepared._replace(target_cosines=cosines)
    step = SparseStep(head, prepared, local)
    step.screen()
    return step
