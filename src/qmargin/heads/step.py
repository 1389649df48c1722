"""One step of a head: its record, normalisation, reduction, and the loss with its gradients.

A mean or summed loss is linear in the incoming gradient. So its gradients are computed in the
forward pass, while the device is busy, and backward multiplies them by one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.kernels.head_reference import Target
from qmargin.losses.margins import TargetTerm

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


@dataclass(frozen=True)
class StepStats:
    """Statistics of the last step.

    Attributes:
        path: The path taken.
        reason: Why, in one sentence.
        support_mean: Classes with positive posterior, mean over the rows.
        support_max: The same, largest row.
        num_candidates: Classes scored exactly, per row.
        num_overflowed: Rows that were computed again: lists of the sparse path that were too short,
            or failed checks of the paper's path.
        mass_error: Largest ``|sum of the posterior - 1|``.
        active_share: Share of all classes that are in the support of a row, or its target.
        satisfied_share: Share of rows whose posterior is that of the target alone: their loss is
            exactly zero, apart from a penalty of the margin. Ignored rows do not count.
        target_posterior: Posterior of the target, mean over the rows that are not ignored.
    """

    path: str
    reason: str
    support_mean: float
    support_max: int
    num_candidates: float
    num_overflowed: int
    mass_error: float
    active_share: float
    satisfied_share: float
    target_posterior: float


class RowOutcome(NamedTuple):
    """Statistics of each row, ``[B]``."""

    support: Tensor  # sizes
    mass_error: Tensor
    target_posterior: Tensor
    is_satisfied: Tensor

    @classmethod
    def of_others(cls, support: Tensor, mass_error: Tensor, others_mass: Tensor) -> RowOutcome:
        """From the posterior mass of all classes but the target, which is exactly zero or not."""
        target = (1.0 - others_mass).clamp_min(0.0)  # rounding may leave the others more than one
        return cls(support, mass_error, target, others_mass == 0.0)


def step_stats(
    path: str,
    rows: RowOutcome,
    counts: Tensor,
    *,
    num_candidates: float,
    active_share: float,
    num_overflowed: int = 0,
    reason: str = "",
) -> StepStats:
    """Statistics of rows, ``counts`` ``[B]`` saying which are not ignored; waits for the device."""
    support, weight = rows.support.double(), counts.double()
    posterior = torch.where(counts, rows.target_posterior.double(), 0.0)
    numbers = (
        support.mean(),
        support.max(),
        rows.mass_error.max().double(),
        torch.where(counts, rows.is_satisfied, False).double().sum() / weight.sum(),
        posterior.sum() / weight.sum(),
    )
    mean, largest, error, satisfied, target = torch.stack(numbers).tolist()
    sizes = (mean, int(largest), num_candidates, num_overflowed)
    return StepStats(path, reason, *sizes, error, active_share, satisfied, target)


class StepRecord(Protocol):
    """Record of a step; only reading it may wait for the device."""

    def stats(self, counts: Tensor) -> StepStats:
        """Summarise the step; ``counts`` ``[B]`` says which rows are not ignored."""


class UnitRows(torch.autograd.Function):
    """Unit embeddings and their lengths; the gradient is projected on the tangent."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        unit, norms = kernels.unit_rows(embeddings, labels, ignored)
        ctx.kernels = kernels
        ctx.save_for_backward(unit, norms)
        ctx.set_materialize_grads(False)
        return unit, norms

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_unit: Tensor | None, grad_norms: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        unit, norms = ctx.saved_tensors
        gradient = None
        if grad_unit is not None:
            gradient = ctx.kernels.unit_gradient(grad_unit, unit, norms)
        if grad_norms is not None:
            radial = grad_norms[:, None] * unit
            gradient = radial if gradient is None else gradient + radial
        return gradient, None, None, None


# Embeddings, labels, the label of ignored rows, and kernels -> unit embeddings [B, d] and
# lengths [B]. Ignored rows become some unit vector, so that they cannot affect other rows.
unit_rows: Callable[[Tensor, Tensor, int, ModuleType], tuple[Tensor, Tensor]] = UnitRows.apply


class Shares(NamedTuple):
    """Weight of each row in a mean or sum."""

    values: Tensor  # [B], zero for ignored rows
    nothing: Tensor | None  # scalar: NaN if the mean is one of no rows, else zero

    @classmethod
    def of(cls, labels: Tensor, ignored: int, reduction: str, dtype: torch.dtype) -> Shares:
        """Shares of rows with these labels for ``"mean"`` or ``"sum"``."""
        counts = (labels != ignored).to(dtype)
        if reduction == "sum":
            return cls(counts, None)
        total = counts.sum()
        return cls(counts / total.clamp_min(1.0), 0.0 / total)

    def reduce(self, rows: Tensor) -> Tensor:
        """Mean or sum of ``rows`` ``[B]``, whatever values ignored rows have.

        The mean of no rows is NaN, as in torch. It is added, so that it reaches no gradient.
        """
        total = torch.dot(torch.where(self.values == 0, 0.0, rows), self.values)
        return total if self.nothing is None else total + self.nothing


def reduce_rows(rows: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
    """Mean or sum of ``rows`` ``[B]`` over those whose label is not ``ignored``; or the rows."""
    if reduction == "none":
        return torch.where(labels == ignored, 0.0, rows)
    return Shares.of(labels, ignored, reduction, rows.dtype).reduce(rows)


def own_labels(head: MarginClassifier, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels among this rank's classes, ``[B]``: -1 elsewhere; and with 0 there, to index with."""
    columns = labels.clamp_min(0)
    if head.ranks.world == 1:
        return columns, columns
    local = head.shard.local(columns)
    return local, local.clamp_min(0)


def sum_target_cosines(head: MarginClassifier, cosines: Tensor) -> Tensor:
    """The targets' cosines ``[B]`` summed over ranks; all NaN if any prototype has no direction.

    NaN fails every comparison, so a class without a cosine would silently be left out.
    """
    return head.ranks.sum_(torch.add(cosines, head.copy_error, alpha=0.0))


class RowSolution(NamedTuple):
    """Loss of each row and its gradient in the target's term, ``[B]`` float64 each (M7)."""

    loss: Tensor
    in_logits: Tensor
    in_reference: Tensor


class SolvableStep(StepRecord, Protocol):
    """A step that solves its rows without a ``[B, k]`` matrix: sparse or chunked."""

    head: MarginClassifier

    def target_cosines(self) -> Tensor:
        """Cosines with the rows' own classes, ``[B]``."""

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        """Solve every row; keep what ``make_gradient`` needs, if a gradient is needed."""

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """Gradient of the unit embeddings ``[B, d]``, from those of the cosines; keep the rest."""

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        """Deliver the gradient of the prototypes times a scalar, see ``gradients.deliver``."""

    def verify(self) -> bool:
        """Wait for the device; True if the speculative list sizes sufficed."""

    def owns(self, gradient: object) -> bool:
        """Whether a fused gradient is that of this step, not of one before it."""

    def class_share(self) -> float:
        """Share of the classes that are, or may be, active in a row; equal on all ranks."""


# Gradients of the unit embeddings [B, d], their lengths [B] or None, and the margin's three terms.
Gradients = tuple[Tensor | None, ...]


class StepLoss(torch.autograd.Function):
    """A loss whose gradients are known up to a factor, or a function of the incoming ones."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        step: SolvableStep,
        gradients: Gradients | Callable[[Tensor], Gradients],
        prototypes: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.step, ctx.gradients = step, gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, _, _, is_pushed, *wanted = ctx.needs_input_grad
        gradients, factor = ctx.gradients, grad
        if callable(gradients):
            gradients, factor = gradients(grad.double()), torch.ones_like(grad[0])
        made = (
            part * factor if is_wanted and part is not None else None
            for part, is_wanted in zip(gradients, wanted, strict=False)
        )
        return None, None, None, ctx.step.deliver_gradient(factor) if is_pushed else None, *made


def step_loss(step: SolvableStep, embeddings: Tensor, labels: Tensor, norms: Tensor) -> Tensor:
    """Loss of unit embeddings ``[B, d]`` that had lengths ``norms``, by the loss's reduction."""
    head, loss_of, dtype = step.head, step.head.loss, embeddings.dtype
    is_enabled = torch.is_grad_enabled()
    inner = (step.target_cosines().double(), norms)
    cosines, lengths = leaves = tuple(leaf.detach().requires_grad_(is_enabled) for leaf in inner)
    term = loss_of.target_margin(cosines, loss_of.scale, labels=labels, norms=lengths)
    is_learned = is_enabled and _has_other_leaves(term, leaves)
    inputs = (head.prototypes, embeddings)
    has_gradient = is_enabled and (is_learned or any(part.requires_grad for part in inputs))
    target = Target(term.logits.detach(), term.log_reference.detach())
    solved = step.solve(target, has_gradient=has_gradient)
    rows = solved.loss if term.penalty is None else solved.loss + term.penalty.detach()
    reduction, ignored = loss_of.reduction, loss_of.ignore_index
    is_reduced = reduction != "none"
    shares = Shares.of(labels, ignored, reduction, torch.float64) if is_reduced else None
    loss = (rows if shares is None else shares.reduce(rows)).to(dtype)

    def gradients(weights: Tensor) -> Gradients:
        """Gradients of ``sum_b weights_b loss_b``; the prototypes' stays with the step."""
        in_term = (solved.in_logits * weights, solved.in_reference * weights, weights)
        keeps_graph = is_learned or not is_reduced
        target_weights, in_lengths = _through_margin(term, in_term, leaves, keeps_graph)
        if in_lengths is not None:  # every rank has all of it
            in_lengths = in_lengths / head.ranks.world
        own = step.make_gradient((weights * loss_of.scale).to(dtype), target_weights.to(dtype))
        return own, in_lengths, *in_term

    if has_gradient:
        made = gradients if shares is None else gradients(shares.values)
        own_graph = term if is_learned else ()  # the margin's own parameters take their share
        apply: Callable[..., Tensor] = StepLoss.apply
        loss = apply(loss, step, made, *inputs, norms, *own_graph)
    return loss if is_reduced else reduce_rows(loss, labels, ignored, reduction)


def _through_margin(
    term: TargetTerm, in_term: tuple[Tensor, ...], leaves: tuple[Tensor, ...], keeps_graph: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the targets' cosines, and of the lengths if the margin uses them."""
    pairs = [
        (output, grad)
        for output, grad in zip(term, in_term, strict=True)
        if output is not None and output.requires_grad
    ]
    in_cosines = in_lengths = None
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        in_cosines, in_lengths = torch.autograd.grad(
            outputs, leaves, grads, retain_graph=keeps_graph, allow_unused=True
        )
    return torch.zeros_like(leaves[0]) if in_cosines is None else in_cosines, in_lengths


def _has_other_leaves(term: TargetTerm, leaves: tuple[Tensor, ...]) -> bool:
    """Whether a margin's term depends on tensors of its own that require a gradient."""
    nodes = [output.grad_fn for output in term if output is not None]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and all(variable is not leaf for leaf in leaves):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
