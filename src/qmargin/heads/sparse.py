"""The exact sparse step: screen, bound, rescore, solve, sparse gradients (F1-F7).

A class outside the support has no posterior, no gradient and no share of the loss. So one product
with rounded operands finds where the support can be, float32 scores of those few groups decide, and
everything after touches active classes only. What makes it exact rather than likely is the slack:
rounding moves a cosine by no more than the measured lengths of the rounding errors (F3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.heads.gradients import ListedGradient, deliver, element_bound
from qmargin.heads.sharding import Ranks
from qmargin.heads.step import RowSolution, StepStats, own_labels, step_stats, sum_target_cosines
from qmargin.kernels.head_reference import (
    Batch,
    Candidates,
    ClassGradient,
    Lengths,
    ListOverflow,
    PreparedRows,
    SolvedRows,
    Support,
    Target,
    class_order,
)
from qmargin.transfers import Reading

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


def find_support(
    kernels: Any,
    ranks: Ranks,
    batch: Batch,
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    limit: int,
    has_gradient: bool,
) -> Support:
    """From group maxima to the solution; lists are of this rank's classes, sums of everyone's.

    More pairs than ``limit`` raise ``ListOverflow``.
    """
    pairs = kernels.list_pairs(maxima, target, slack, reduce=ranks.max_, scale=scale, b=b)
    listed = ranks.integers(len(pairs.groups), limit, device=maxima.device)
    if any(count > most for count, most in listed):  # all of them go on by blocks together
        raise ListOverflow(maxima)
    candidates = kernels.score_candidates(batch, pairs)
    merged, own, support = candidates, None, None
    if ranks.world > 1:
        merged, own = merge_candidates(candidates, ranks)
    solved = kernels.solve_lists(merged, target, scale=scale, b=b)
    if own is not None:
        is_active = solved.posterior > 0
        support = torch.bincount(merged.rows[is_active].long(), minlength=len(target.logits))
        rows, columns, _, starts = candidates
        posterior = solved.posterior[own]
        solved = solved._replace(rows=rows, columns=columns, posterior=posterior, starts=starts)
    pulled = sorted_classes = None
    if has_gradient:
        pulled = kernels.pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(solved.columns, batch.labels.clamp_min(0))
    lengths = Lengths(sum(count for count, _ in listed), len(candidates.rows))
    reading = Reading(torch.tensor(lengths))
    return Support(solved, pulled, sorted_classes, reading, lengths, lengths.pairs, support)


def merge_candidates(candidates: Candidates, ranks: Ranks) -> tuple[Candidates, Tensor]:
    """Everyone's candidates, row by row, and where in them this rank's own are."""
    device = candidates.scores.device
    sizes = [size for (size,) in ranks.integers(len(candidates.rows), device=device)]
    rows = ranks.gather(candidates.rows.long(), sizes)
    rows, order = rows.sort(stable=True)
    scores = ranks.gather(candidates.scores, sizes)[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    counts = torch.bincount(rows, minlength=len(candidates.starts) - 1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    merged = Candidates(rows.to(candidates.rows.dtype), torch.zeros_like(rows), scores, starts)
    return merged, ranks.part(place, sizes)


@dataclass
class SparseStep:
    """Record of one forward and backward pass, see ``SolvableStep``."""

    head: MarginClassifier
    prepared: PreparedRows
    labels: Tensor  # [B] among this rank's classes, -1 where another rank has the row's own
    maxima: Tensor | None  # [B, g], until it is used
    support: Support = field(init=False)
    target_logits: Tensor = field(init=False)  # [B]
    gradient: ClassGradient | None = None
    bound: Tensor = field(init=False)  # of the gradient's elements, see ``element_bound``
    num_candidates: int = 0

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        head, kernels, prototypes = self.head, self.head.kernels, self.head.prototypes.detach()
        self.target_logits = target.logits
        numbers: dict[str, Any] = {"scale": head.loss.scale, "b": head.alpha_minus_one}
        numbers |= {"limit": head.list_capacity * len(self.labels), "has_gradient": has_gradient}
        maxima, self.maxima = self.maxima, None
        assert maxima is not None
        batch = Batch(self.prepared, head.copy, prototypes, head.inverse_norms, self.labels)
        given = (batch, maxima, target, self.slack())
        if head.ranks.world == 1 and hasattr(kernels, "find_support"):  # need not wait for lengths
            self.support = kernels.find_support(*given, expected=head.list_lengths, **numbers)
        else:
            self.support = find_support(kernels, head.ranks, *given, **numbers)
        solved = self.solved
        return RowSolution(solved.loss, -solved.others_mass, solved.in_reference)

    def target_cosines(self) -> Tensor:
        return self.prepared.target_cosines

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        support = self.support
        assert support.pulled is not None and support.order is not None
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

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        assert self.gradient is not None
        entries = self.gradient._replace(values=self.gradient.values * factor)
        given = (entries, self.prepared.embeddings, self.bound * factor.abs())
        return deliver(self.head, ListedGradient(self.head, *given))

    @property
    def solved(self) -> SolvedRows:
        """The solution; certain once the step is verified."""
        return self.support.solved

    def verify(self) -> bool:
        """See ``SolvableStep``; cuts the lists, and a fused gradient made of them, to length."""
        head = self.head
        found = head.list_lengths = self.support.verify()
        if found is None:
            return False
        self.num_candidates = found.candidates
        if self.gradient is not None:
            self.gradient = self._cut(self.gradient)
        fused = head.fused_gradient
        if isinstance(fused, ListedGradient) and self.owns(fused):
            head.fused_gradient = replace(fused, entries=self._cut(fused.entries))
        return True

    def _cut(self, gradient: ClassGradient) -> ClassGradient:
        """A gradient without what was made of spare entries of the lists, which comes last."""
        return gradient.part(slice(self.num_candidates + len(self.labels)))

    def owns(self, gradient: object) -> bool:
        mine = self.prepared.embeddings
        return isinstance(gradient, ListedGradient) and gradient.embeddings is mine

    def class_share(self) -> float:
        """Share of the classes that rows list; with several ranks, a number they agree on."""
        num_logits = max(1, len(self.labels) * self.head.num_classes)
        support = self.support.others_support
        return (self.num_candidates if support is None else int(support.sum())) / num_logits

    def stats(self) -> StepStats:
        solved = self.solved
        is_active = solved.posterior > 0
        support = self.support.others_support
        if support is None:
            rows = solved.rows[is_active].long()
            support = torch.bincount(rows, minlength=len(self.labels))
        edge = solved.tau - 1.0 / self.head.alpha_minus_one  # M3
        support = support + (self.target_logits > edge)
        labels = self.labels[self.labels >= 0]
        classes = torch.cat([solved.columns[is_active].long(), labels]).unique()
        return step_stats(
            "sparse",
            support,
            solved.mass_error,
            num_candidates=len(solved.rows) / max(1, len(self.labels)),
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
    """A step for unit embeddings, its screen launched: what the host does next hides behind it."""
    local, columns = own_labels(head, labels)
    embeddings, prototypes, dtype = embeddings.detach(), head.prototypes.detach(), head.copy.dtype
    if len(head.shard):
        norms = head.inverse_norms
        prepared = head.kernels.prepare_rows(embeddings, columns, prototypes, norms, dtype)
    else:
        nothing = embeddings * 0.0
        empty = (nothing[:, 0], nothing, nothing[:, 0])
        prepared = PreparedRows(embeddings, embeddings.to(dtype), *empty)
    cosines = prepared.target_cosines
    if head.ranks.world > 1:
        is_own = local >= 0
        cosines = torch.where(is_own, cosines, 0.0)
        prepared = prepared._replace(targets=torch.where(is_own[:, None], prepared.targets, 0.0))
    prepared = prepared._replace(target_cosines=sum_target_cosines(head, cosines))
    maxima = head.kernels.group_maxima(prepared.rounded, head.copy, local, len(head.shard))
    return SparseStep(head, prepared, local, maxima)
