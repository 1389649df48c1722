"""The paper's own procedure: the top K percent of the logits, bisection on them, a runtime check.

All cosines ``[B, k]`` exist, in half precision on a GPU as in mixed-precision training. The largest
of each row are found by sorting in half precision, and the root over them is the root over all
classes if no class left out can be active (M8). The check allows for the rounding of the sort: it
asks of the largest cosine that could have been left out, not of the smallest that was kept. A batch
that fails it is solved again with twice as many, up to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.dense import unit_prototypes
from qmargin.heads.paths import TopK
from qmargin.heads.step import StepStats
from qmargin.kernels.solver import (
    label_loss,
    posterior_rows,
    reference_gradient,
    slacks,
    solve_bisection,
)
from qmargin.losses.operators import lift_target

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}  # solved at a time, in float64


@dataclass
class TopKStep:
    """One forward and backward pass; what the autograd function and the record share."""

    scale: float
    b: float
    num_classes: int
    percent: float
    labels: Tensor  # [B]
    index: Tensor | None = None  # [B, K]: classes kept; None for all
    solved: SolvedKept | None = None
    num_kept: int = 0
    num_widened: int = 0  # times that K was doubled
    num_violated: int = 0  # rows that failed the first check

    def stats(self) -> StepStats:
        """Summarise the step."""
        solved = self.solved
        assert solved is not None
        is_active = solved.posterior > 0
        if self.index is None:
            active = is_active.any(0).nonzero().flatten()
        else:
            active = self.index[is_active]
        active = torch.cat([active, self.labels]).unique()
        reason = f"the top {self.percent:g} % passed the check"
        if self.num_widened:
            reason = f"{self.num_violated} rows failed the check of the top {self.percent:g} %"
            reason += f", which was doubled {self.num_widened} times"
        return StepStats(
            path="top_k",
            reason=reason,
            support_mean=float(solved.support_size.double().mean()),
            support_max=int(solved.support_size.max()),
            num_candidates=float(self.num_kept),
            num_overflowed=self.num_violated,
            mass_error=float(solved.mass_error.max()),
            active_share=len(active) / self.num_classes,
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
    limit = BLOCK_LOGITS.get(kept.device.type, BLOCK_LOGITS["cuda"])
    size = max(1, limit // kept.shape[1])
    parts = []
    for start in range(0, len(kept), size):
        rows = slice(start, start + size)
        logits = torch.cat([kept[rows].double() * step.scale, target[rows, None]], 1)
        reference = torch.zeros_like(logits)
        reference[:, -1] = log_reference[rows]
        anchor, level, _ = solve_bisection(
            logits, reference, step.b, bracket="paper", tolerance=tolerance
        )
        posterior, levels = posterior_rows(logits, reference, anchor, level, step.b)
        loss, own, others_mass = label_loss(posterior, levels, reference[:, -1], step.b)
        part = SolvedKept(
            posterior[:, :-1].to(dtype),
            anchor - slacks(level, step.b),
            loss,
            others_mass,
            own,
            levels[:, -1],
            (posterior > 0).sum(1),
            (posterior.sum(1) - 1.0).abs(),
        )
        parts.append(part)
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
        """Loss ``[B]`` of cosines ``[B, k]`` with the target lifted out."""
        others = cosines.scatter(1, step.labels[:, None], -math.inf)
        solved = solve_top(step, others, logits, log_reference)
        step.solved = solved
        ctx.step, ctx.shape = step, cosines.shape
        ctx.save_for_backward(log_reference)
        return solved.loss.to(solved.posterior.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """``p - y`` for the logits (M7); the envelope's gradient for the target's measure."""
        (log_reference,) = ctx.saved_tensors
        step: TopKStep = ctx.step
        solved = step.solved
        assert solved is not None
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
    cosines, target_cosines = lift_target(cosines, columns)
    term = loss.margin(target_cosines.double(), loss.scale, labels=labels, norms=norms)
    rows: Callable[..., Tensor] = TopKRows.apply
    value = rows(cosines, term.logits, term.log_reference, step)
    if term.penalty is not None:
        value = value + term.penalty.to(value.dtype)
    return value.to(embeddings.dtype), step
