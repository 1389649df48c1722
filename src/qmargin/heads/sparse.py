"""The exact sparse step: screen, bound, rescore, solve, sparse gradients (F1-F7).

A class outside the support has zero posterior, zero gradient and no share in the loss. One product
with rounded operands finds groups of classes that may be in the support, float32 scores of these
groups decide, and all further operations use active classes only. The slack makes this exact:
rounding changes a cosine by at most the measured lengths of the rounding errors (F3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.devices import Reading
from qmargin.heads.gradients import ListedGradient, deliver, element_bound
from qmargin.heads.matrix import (
    loss_of_rows,
    matrix_kernels,
    needs_gradient,
    prepared_rows,
    prototype_state,
)
from qmargin.heads.reference import row_reference
from qmargin.heads.sharding import Ranks
from qmargin.heads.step import (
    RowOutcome,
    RowSolution,
    StepStats,
    own_labels,
    step_stats,
    sum_target_cosines,
)
from qmargin.kernels.head_reference import (
    Batch,
    Candidates,
    ClassGradient,
    Lengths,
    ListOverflow,
    Pairs,
    PreparedRows,
    SolvedRows,
    Support,
    Target,
    class_order,
)
from qmargin.losses.margins import ClosedForm
from qmargin.losses.references import ReferencedMargin

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


BOUND_STEPS = 2  # of Newton, over the maxima of all ranks


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
    """From group maxima to the solution; lists have this rank's classes, sums those of all ranks.

    More pairs than ``limit`` raise ``ListOverflow``.
    """
    lower = None if batch.reference is None else batch.reference.group_minima()
    numbers: dict[str, Any] = {"scale": scale, "b": b, "lower": lower}
    pairs = kernels.list_pairs(maxima, target, slack, reduce=ranks.max_, **numbers)
    listed = ranks.integers(len(pairs.groups), limit, device=maxima.device)
    if any(count > most for count, most in listed):  # all ranks continue by blocks
        raise ListOverflow(maxima)
    if ranks.world > 1 and b <= 1.0:
        pairs = tighten_pairs(pairs, maxima, target, ranks, **numbers)
    candidates = kernels.score_candidates(batch, pairs)
    merged, own, support = candidates, None, None
    if ranks.world > 1:
        merged, own = merge_candidates(candidates, ranks)
    solved = kernels.solve_lists(merged, target, scale=scale, b=b)
    if own is not None:
        is_active = solved.posterior > 0
        support = torch.bincount(merged.rows[is_active].long(), minlength=len(target.logits))
        rows, columns, _, starts, _ = candidates
        posterior = solved.posterior[own]
        solved = solved._replace(rows=rows, columns=columns, posterior=posterior, starts=starts)
    pulled = sorted_classes = None
    if has_gradient:
        pulled = kernels.pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(solved.columns, batch.labels.clamp_min(0))
    lengths = Lengths(sum(count for count, _ in listed), len(candidates.rows))
    reading = Reading(torch.tensor(lengths))
    return Support(solved, pulled, sorted_classes, reading, lengths, lengths.pairs, support)


def tighten_pairs(
    pairs: Pairs,
    maxima: Tensor,
    target: Target,
    ranks: Ranks,
    *,
    scale: float,
    b: float,
    lower: Tensor | None = None,
) -> Pairs:
    """Pairs above a floor that counts the maxima of all ranks.

    The largest floor of any rank knows the classes of that rank alone: the more ranks, the lower
    it is, and the more candidates would be gathered. Each step of Newton takes one sum over the
    ranks and stays below the root (F6), as maxima less their slack are at most exact cosines.
    ``lower`` is that of ``list_pairs``.
    """
    rows, rate = pairs.rows.long(), b * scale
    lowered = maxima[rows, pairs.groups.long()].double() - pairs.slack[rows]
    reference, floor = target.log_reference.double().exp(), pairs.floor
    measure = None if lower is None else lower.expand(maxima.shape[1])[pairs.groups.long()].exp()
    for _ in range(BOUND_STEPS):
        heights = _mass_and_slope(rate * (lowered - floor[rows]), b)
        if measure is not None:
            heights = heights * measure
        sums = [torch.segment_reduce(part, "sum", offsets=pairs.starts) for part in heights]
        own = _mass_and_slope(b * target.logits.double() - rate * floor, b) * reference
        mass, slope = ranks.sum_(torch.stack(sums)) + own
        change = (mass - mass.pow(1.0 - b)) / (rate * slope)
        floor = torch.where(change > 0.0, floor + change, floor)  # the mass may round to below one
    is_kept = lowered > (floor - 2.0 * pairs.slack)[rows]
    starts = torch.nn.functional.pad(is_kept.cumsum(0), (1, 0))[pairs.starts]
    kept = is_kept.nonzero().squeeze(1)
    return Pairs(pairs.groups[kept], pairs.rows[kept], starts, floor, pairs.slack)


def _mass_and_slope(heights: Tensor, b: float) -> Tensor:
    """``x^(1/b)`` and ``x^(1/b - 1)`` of heights, stacked; zero at and below zero."""
    slope = torch.where(heights > 0.0, heights.clamp_min(0.0).pow(1.0 / b - 1.0), 0.0)
    return torch.stack([slope * heights, slope])


def merge_candidates(candidates: Candidates, ranks: Ranks) -> tuple[Candidates, Tensor]:
    """Candidates of all ranks, row by row, and the positions of this rank's own."""
    device = candidates.scores.device
    sizes = [size for (size,) in ranks.integers(len(candidates.rows), device=device)]
    rows = ranks.gather(candidates.rows.long(), sizes)
    rows, order = rows.sort(stable=True)
    scores = ranks.gather(candidates.scores, sizes)[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    counts = torch.bincount(rows, minlength=len(candidates.starts) - 1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    log_reference = candidates.log_reference
    if log_reference is not None:
        log_reference = ranks.gather(log_reference, sizes)[order]
    columns, dtype = torch.zeros_like(rows), candidates.rows.dtype
    merged = Candidates(rows.to(dtype), columns, scores, starts, log_reference)
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
    num_candidates: int | None = None  # once the step is verified

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        head, kernels, prototypes = self.head, self.head.kernels, self.head.prototypes.detach()
        self.target_logits = target.logits
        numbers: dict[str, Any] = {"scale": head.loss.scale, "b": head.alpha_minus_one}
        numbers |= {"limit": head.list_capacity * len(self.labels), "has_gradient": has_gradient}
        maxima, self.maxima = self.maxima, None
        assert maxima is not None
        batch = Batch(
            self.prepared,
            head.copy,
            prototypes,
            head.inverse_norms,
            self.labels,
            row_reference(head, self.prepared.targets),
        )
        given = (batch, maxima, target, self.slack())
        if head.ranks.world == 1 and hasattr(kernels, "find_support"):  # need not wait for lengths
            self.support = kernels.find_support(*given, expected=head.list_lengths, **numbers)
        else:
            self.support = find_support(kernels, head.ranks, *given, **numbers)
        solved = self.support.solved
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
        given = (self.gradient, self.prepared.embeddings, self.bound, factor, self._length())
        return deliver(self.head, ListedGradient(self.head, *given))

    @property
    def solved(self) -> SolvedRows:
        """The solution of a verified step."""
        assert self.num_candidates is not None
        return self.support.cut(self.num_candidates)

    def verify(self) -> bool:
        """See ``SolvableStep``; tells a fused gradient how long its lists are."""
        head = self.head
        found = head.list_lengths = self.support.verify()
        if found is None:
            return False
        self.num_candidates = found.candidates
        fused = head.fused_gradient
        if isinstance(fused, ListedGradient) and self.owns(fused):
            head.fused_gradient = replace(fused, length=self._length())
        return True

    def _length(self) -> int | None:
        return None if self.num_candidates is None else self.num_candidates + len(self.labels)

    def owns(self, gradient: object) -> bool:
        mine = self.prepared.embeddings
        return isinstance(gradient, ListedGradient) and gradient.embeddings is mine

    def class_share(self) -> float:
        """Share of the classes that rows list; with several ranks, a number they agree on."""
        num_logits = max(1, len(self.labels) * self.head.num_classes)
        support = self.support.others_support
        assert self.num_candidates is not None
        return (self.num_candidates if support is None else int(support.sum())) / num_logits

    def stats(self, counts: Tensor) -> StepStats:
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
            RowOutcome.of_others(support, solved.mass_error, solved.others_mass),
            counts,
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


@dataclass
class FusedSparseStep(SparseStep):
    """The same where the margin is numbers: few launches, its loss attached by ``attach_loss``."""

    rows: Any = None  # kernels.triton.matrix.Rows
    generation = 0
    is_static = False

    @property
    def loss(self) -> Tensor:
        """Reduced, or of each row."""
        return loss_of_rows(self.head, self.rows)

    def deliver_scaled(self) -> Tensor | None:
        """Deliver the gradient times the factor that the rows keep."""
        return self.deliver_gradient(self.rows.factor)


def fused_sparse_step(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, margin: ClosedForm
) -> FusedSparseStep:
    """A step for embeddings of any length on one GPU, all of it launched; to be verified."""
    kernels, operations = matrix_kernels(), head.kernels
    rows = prepared_rows(head, embeddings, labels, margin)
    # The first thing that takes long: what can wait comes after it.
    maxima = operations.group_maxima(
        rows.rounded, head.copy, rows.labels, head.num_classes, clamps=True
    )
    state, loss = prototype_state(head), head.loss
    columns = rows.labels.clamp(0, head.num_classes - 1)
    slack, cosines = rows.field(kernels.SLACK), rows.field(kernels.COSINE)
    prepared = PreparedRows(rows.unit, rows.rounded, slack, rows.unit, cosines)
    target = Target(rows.field(kernels.LOGIT), rows.field(kernels.REFERENCE))
    step = FusedSparseStep(head, prepared, columns, None, rows=rows)
    step.target_logits = target.logits
    batch = Batch(prepared, head.copy, state.prototypes, head.inverse_norms, columns)
    measures = loss.target_margin
    if isinstance(measures, ReferencedMargin):  # it changes the kernel's result for the margin
        norms, own = rows.field(kernels.NORM), target.log_reference
        own.copy_(measures.target(own, loss.scale, rows.labels, norms))
        targets = rows.unit  # a placeholder: no pairs are compared
        if measures.reference.pair_bounds(loss.scale) is not None:
            targets = state.prototypes[columns] * head.inverse_norms[columns][:, None]
        batch = batch._replace(reference=row_reference(head, targets))
    step.support = support = operations.find_support(
        batch,
        maxima,
        target,
        slack,
        scale=loss.scale,
        b=head.alpha_minus_one,
        limit=head.list_capacity * len(labels),
        expected=head.list_lengths,
        has_gradient=needs_gradient(head, embeddings),
    )
    solved = support.solved
    given = (solved.loss, solved.others_mass, support.pulled)
    weights = kernels.settle_lists(rows, state, *given, scale=loss.scale)
    if support.order is not None:
        step.gradient = operations.class_gradient(support.order, solved, *weights)
        step.bound = rows.sums[3]
    return step


def sparse_step(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> SparseStep:
    """A step for unit embeddings, its screen launched: the host continues while it runs."""
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
