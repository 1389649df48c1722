"""Steps over all cosines: of every class, of a sample (Partial FC), or the paper's own procedure.

The other paths are tested against the dense step. A class outside the sample has gradient zero in
that step: with a dense gradient and ``torch.optim.SGD`` it still moves by momentum and weight
decay, as in the second version of Partial FC; with a sparse gradient, or ``SparseSGD``, it does not
change, as in the first.

The paper finds the largest cosines of each row by sorting in half precision. The root over them is
the root over all classes if no class left out can be active (M8). The check allows for the rounding
of the sort: it tests the largest cosine that could have been left out. A batch that fails it is
solved again with twice as many, up to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.gradients import RowsGradient, deliver
from qmargin.heads.paths import Sampled, TopK
from qmargin.heads.sharding import ClassShard, gather_rows
from qmargin.heads.step import RowOutcome, StepStats, step_stats
from qmargin.kernels.head_reference import inverse_lengths
from qmargin.kernels.solver import (
    label_loss,
    posterior_rows,
    reference_gradient,
    slacks,
    solve_bisection,
)
from qmargin.losses.functional import lift_target
from qmargin.losses.margin_loss import LossOutput, margin_loss_with_stats
from qmargin.losses.margins import Margin, TargetTerm
from qmargin.losses.references import log_reference_of

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

IN_BATCH = 2.0  # above every draw, so that the batch's own classes are taken first


class UnitPrototypes(torch.autograd.Function):
    """Unit prototypes of all or of some classes; backward delivers their gradient."""

    @staticmethod
    def forward(
        ctx: Any, prototypes: Tensor, classes: Tensor | None, head: MarginClassifier
    ) -> Tensor:
        rows = prototypes if classes is None else prototypes[classes]
        inverse = inverse_lengths(rows)[:, None]
        unit: Tensor = rows * inverse
        ctx.head = head
        ctx.save_for_backward(unit, inverse, classes)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        unit, inverse, classes = ctx.saved_tensors
        rows = (grad - (grad * unit).sum(1, keepdim=True) * unit) * inverse
        head: MarginClassifier = ctx.head
        return deliver(head, RowsGradient(rows, len(head.shard), classes)), None, None


def unit_prototypes(head: MarginClassifier, classes: Tensor | None = None) -> Tensor:
    """Differentiable unit prototypes of all ranks, ``[k, d]`` or those of ``classes``."""
    apply: Callable[..., Tensor] = UnitPrototypes.apply
    ranks = head.ranks
    if ranks.world == 1:
        return apply(head.prototypes, classes, head)
    shards = [ClassShard.of(head.num_classes, rank, ranks.world) for rank in range(ranks.world)]
    own, sizes = apply(head.prototypes, None, head), [len(part) for part in shards]
    unit = gather_rows(own, ranks, sizes, adds_up=False)
    return unit if classes is None else unit[classes]


@dataclass
class DenseStep:
    """Record of a step with all cosines; it is summarised when it is first read."""

    path: str
    output: LossOutput  # detached
    cosines: Tensor  # [B, n], detached
    labels: Tensor  # [B], columns of the cosines, negative in rows that do not count
    scale: float
    edge: float
    num_classes: int

    def candidates(self) -> Tensor:
        """Active classes of each row, ``[B]``."""
        return self.output.support_size

    def class_share(self) -> float:
        """Share of the classes that are active in a row."""
        return int(self.output.support_size.sum()) / max(1, self.cosines.numel())

    def stats(self, counts: Tensor) -> StepStats:
        is_active = self.cosines * self.scale > (self.output.tau + self.edge)[:, None]
        has_gradient = is_active.any(0)
        has_gradient[self.labels[self.labels >= 0]] = True
        _, _, support, posterior, error = self.output
        is_satisfied = (support == 1) & (posterior > 0.5)
        return step_stats(
            self.path,
            RowOutcome(support, error, posterior, is_satisfied),
            counts,
            num_candidates=float(self.cosines.shape[1]),
            active_share=int(has_gradient.sum()) / self.num_classes,
        )


def dense_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the record of the step."""
    unit = unit_prototypes(head)
    cosines = embeddings @ unit.t()  # [B, k]: what this path is about
    measure = _reference_of(head, labels, unit)
    return _rows_of(head, "dense", cosines, labels, norms, head.loss.target_margin, measure)


def sampled_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` over the sampled classes, and the record of the step."""
    path = head.path
    assert isinstance(path, Sampled)
    classes = sample_classes(
        labels.clamp_min(0), head.num_classes, rate=path.rate, seed=head.next_seed()
    )
    unit = unit_prototypes(head, classes)
    cosines = embeddings @ unit.t()  # [B, n]
    columns = torch.where(labels < 0, labels, torch.searchsorted(classes, labels))
    margin = OwnLabels(head.loss.target_margin, labels)
    measure = _reference_of(head, columns, unit, classes)
    return _rows_of(head, "sampled", cosines, columns, norms, margin, measure)


def _reference_of(
    head: MarginClassifier, columns: Tensor, unit: Tensor, classes: Tensor | None = None
) -> Tensor | None:
    """Log reference of the classes of some unit prototypes, in their dtype; None for zero.

    They are all classes, or ``classes``; ``columns`` ``[B]`` are the rows' own among them.
    """
    reference, unit = head.loss.active_reference, unit.detach()
    if reference is None:
        return None
    like = unit.new_empty((0, len(unit)))
    return log_reference_of(reference, like, columns, head.loss.scale, unit, classes)


def _rows_of(
    head: MarginClassifier,
    path: str,
    cosines: Tensor,
    columns: Tensor,
    norms: Tensor,
    margin: Margin,
    log_reference: Tensor | None,
) -> tuple[Tensor, DenseStep]:
    loss = head.loss
    output = margin_loss_with_stats(
        cosines,
        torch.where(columns < 0, loss.ignore_index, columns),
        divergence=loss.divergence,
        margin=margin,
        scale=loss.scale,
        norms=norms,
        ignore_index=loss.ignore_index,
        debug=loss.debug,
        log_reference=log_reference,
    )
    known = LossOutput(*(part.detach() for part in output))
    numbers = (loss.scale, loss.divergence.edge, head.num_classes)
    return output.loss, DenseStep(path, known, cosines.detach(), columns, *numbers)


@dataclass(frozen=True)
class OwnLabels:
    """Margin that uses labels among all classes, not those among the sampled classes."""

    margin: Margin
    labels: Tensor  # [B]

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        return self.margin(target_cosines, scale, labels=self.labels, norms=norms)

    def effective(self, alpha: float, scale: float) -> float | None:
        return self.margin.effective(alpha, scale)


def sample_classes(labels: Tensor, num_classes: int, *, rate: float, seed: int) -> Tensor:
    """Ascending classes: those of the labels, filled up at random to ``rate * num_classes``."""
    generator = torch.Generator(labels.device).manual_seed(seed)
    keys = torch.rand(num_classes, device=labels.device, generator=generator)
    keys.index_fill_(0, labels, IN_BATCH)
    num_sampled = max(1, int(rate * num_classes))
    if len(labels) > num_sampled:  # only then can the positives exceed the budget
        num_sampled = max(num_sampled, int((keys == IN_BATCH).sum()))
    return keys.topk(num_sampled).indices.sort().values


BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}  # solved at a time, in float64


@dataclass
class TopKStep:
    """State of one forward and backward pass, shared by autograd function and record."""

    scale: float
    b: float
    num_classes: int
    percent: float
    labels: Tensor  # [B]
    measure: Tensor | None = None  # [B, k]: log reference of the classes; None for zero
    index: Tensor | None = None  # [B, K]: classes kept; None for all
    solved: SolvedKept = field(init=False)
    num_kept: int = 0
    num_widened: int = 0  # times that K was doubled
    num_violated: int = 0  # rows that failed the first check

    def stats(self, counts: Tensor) -> StepStats:
        solved = self.solved
        is_active = solved.posterior > 0
        if self.index is None:
            active = is_active.any(0).nonzero().flatten()
        else:
            active = self.index[is_active]
        reason = f"the top {self.percent:g} % passed the check"
        if self.num_widened:
            reason = f"{self.num_violated} rows failed the check of the top {self.percent:g} %"
            reason += f", which was doubled {self.num_widened} times"
        return step_stats(
            "top_k",
            RowOutcome.of_others(solved.support_size, solved.mass_error, solved.others_mass),
            counts,
            num_candidates=float(self.num_kept),
            active_share=len(torch.cat([active, self.labels]).unique()) / self.num_classes,
            num_overflowed=self.num_violated,
            reason=reason,
        )


def largest_left_out(floor: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound of the values that a half-precision sort put at or below ``floor``, float64."""
    wide = floor.double()
    if dtype == torch.float16:
        return wide
    return wide + 2.0**-11 * wide.abs() + 2.0**-25  # half a step of float16, normal or not


class SolvedKept(NamedTuple):
    """The solution over the kept classes and the target, ``[B]`` float64 if not said otherwise."""

    posterior: Tensor  # [B, K], without the target
    tau: Tensor
    loss: Tensor
    others_mass: Tensor
    target_posterior: Tensor
    target_level: Tensor
    support_size: Tensor  # int64
    mass_error: Tensor


def solve_kept(step: TopKStep, kept: Tensor, target: Tensor, log_reference: Tensor) -> SolvedKept:
    """Bisection from the paper's bracket on the kept cosines ``[B, K]``, by blocks of rows."""
    dtype = torch.float64 if kept.dtype == torch.float64 else torch.float32
    tolerance = 1e-14 if dtype == torch.float64 else 1e-9
    measure = step.measure
    if measure is not None and step.index is not None:
        measure = measure.gather(1, step.index)
    limit = BLOCK_LOGITS.get(kept.device.type, BLOCK_LOGITS["cuda"])
    size = max(1, limit // kept.shape[1])
    parts = []
    for start in range(0, len(kept), size):
        rows = slice(start, start + size)
        logits = torch.cat([kept[rows].double() * step.scale, target[rows, None]], 1)
        reference = torch.zeros_like(logits)
        if measure is not None:
            reference[:, :-1] = measure[rows]
        reference[:, -1] = log_reference[rows]
        anchor, level, _ = solve_bisection(
            logits, reference, step.b, bracket="paper", tolerance=tolerance
        )
        posterior, levels = posterior_rows(logits, reference, anchor, level, step.b)
        loss, own, others_mass = label_loss(posterior, levels, reference[:, -1], step.b)
        tau, support = anchor - slacks(level, step.b), (posterior > 0).sum(1)
        error = (posterior.sum(1) - 1.0).abs()
        target_part = (own, levels[:, -1], support, error)
        parts.append((posterior[:, :-1].to(dtype), tau, loss, others_mass, *target_part))
    return SolvedKept(*(torch.cat(column) for column in zip(*parts, strict=True)))


def solve_top(step: TopKStep, others: Tensor, target: Tensor, reference: Tensor) -> SolvedKept:
    """Solve on the largest cosines of each row, on twice as many while any row fails the check."""
    num_classes, rounded = others.shape[1], others.half()
    step.num_kept = math.ceil(step.percent / 100.0 * num_classes)
    while step.num_kept < num_classes:
        top = rounded.topk(step.num_kept, sorted=False)
        step.index = top.indices
        solved = solve_kept(step, others.gather(1, top.indices), target, reference)
        bound = step.scale * largest_left_out(top.values.amin(1), others.dtype)
        is_violated = bound > solved.tau - 1.0 / step.b  # M8; false for NaN
        num_violated = int(is_violated.sum())
        if num_violated == 0:
            return solved
        step.num_violated = step.num_violated or num_violated
        step.num_widened += 1
        step.num_kept = min(2 * step.num_kept, num_classes)
    step.index = None
    return solve_kept(step, others, target, reference)


class TopKRows(torch.autograd.Function):
    """Loss of each row from the kept cosines."""

    @staticmethod
    def forward(
        ctx: Any, cosines: Tensor, logits: Tensor, log_reference: Tensor, step: TopKStep
    ) -> Tensor:
        others = cosines.scatter(1, step.labels[:, None], -math.inf)
        step.solved = solved = solve_top(step, others, logits, log_reference)
        ctx.step, ctx.shape = step, cosines.shape
        ctx.save_for_backward(log_reference)
        return solved.loss.to(solved.posterior.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (log_reference,) = ctx.saved_tensors
        step: TopKStep = ctx.step
        solved = step.solved
        values = solved.posterior * (grad * step.scale)[:, None]
        if step.index is not None:
            values = values.new_zeros(ctx.shape).scatter_(1, step.index, values)
        in_reference = reference_gradient(
            solved.target_posterior, solved.target_level, log_reference, step.b
        )
        wide = grad.double()
        return values, -wide * solved.others_mass, wide * in_reference, None


def top_k_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor
) -> tuple[Tensor, TopKStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the record of the step."""
    loss, path = head.loss, head.path
    assert isinstance(path, TopK)
    columns = labels.clamp_min(0)
    step = TopKStep(loss.scale, head.alpha_minus_one, head.num_classes, path.percent, columns)
    unit = unit_prototypes(head)
    if embeddings.is_cuda and embeddings.dtype == torch.float32:
        cosines = embeddings.half() @ unit.half().t()  # [B, k], as the paper has them
    else:
        cosines = embeddings @ unit.t()
    measure = _reference_of(head, columns, unit)  # not in half precision, as the cosines may be
    step.measure = None if measure is None else measure.expand(cosines.shape)
    cosines, target_cosines = lift_target(cosines, columns)
    term = loss.target_margin(target_cosines.double(), loss.scale, labels=labels, norms=norms)
    rows: Callable[..., Tensor] = TopKRows.apply
    value = rows(cosines, term.logits, term.log_reference, step)
    if term.penalty is not None:
        value = value + term.penalty.to(value.dtype)
    return value.to(embeddings.dtype), step
