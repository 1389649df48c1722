"""One step of a head: its record, normalisation, reduction, and the loss with its gradients.

A mean or summed loss is linear in the gradient that comes into it. So its own gradients are made in
the forward pass, while the device is still busy, and backward multiplies them by one number. Only
for ``reduction="none"`` does backward make the gradients, from one incoming number per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.kernels.head_types import Target
from qmargin.losses.margins import TargetTerm

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


@dataclass(frozen=True)
class StepStats:
    """What the last step did.

    Attributes:
        path: The path taken.
        reason: Why, in one sentence.
        support_mean: Classes with positive posterior, mean over the rows.
        support_max: The same, largest row.
        num_candidates: Classes scored exactly, per row.
        num_overflowed: Rows that did not fit and were redone: lists of the sparse path, violated
            checks of the paper's.
        mass_error: Largest ``|sum of the posterior - 1|``.
        active_share: Share of all classes that are in the support of a row, or its target.
    """

    path: str
    reason: str
    support_mean: float
    support_max: int
    num_candidates: float
    num_overflowed: int
    mass_error: float
    active_share: float


class StepRecord(Protocol):
    """What a path keeps of a step; reading it may wait for the device, keeping it does not."""

    def stats(self) -> StepStats:
        """Summarise the step."""


class UnitRows(torch.autograd.Function):
    """Unit embeddings and their lengths; the gradient is projected on the tangent."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """Unit rows ``[B, d]`` and norms ``[B]``."""
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
        """Tangent part over the length, plus the length's own gradient where it has one."""
        unit, norms = ctx.saved_tensors
        gradient = None
        if grad_unit is not None:
            gradient = ctx.kernels.unit_gradient(grad_unit, unit, norms)
        if grad_norms is not None:
            radial = grad_norms[:, None] * unit
            gradient = radial if gradient is None else gradient + radial
        return gradient, None, None, None


class ReduceRows(torch.autograd.Function):
    """Mean or sum of rows by their shares: one operation each way once the shares are known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Shares) -> Tensor:
        """A scalar."""
        ctx.save_for_backward(shares.values)
        return shares.reduce(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Its share for every row."""
        (shares,) = ctx.saved_tensors
        return grad * shares, None


class Shares(NamedTuple):
    """What each row counts in a mean or sum."""

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
        """Mean or sum of ``rows`` ``[B]``, whatever ignored rows hold.

        The mean of no rows is NaN, as in torch. It is added, so that it reaches no gradient.
        """
        total = torch.dot(torch.where(self.values == 0, 0.0, rows), self.values)
        return total if self.nothing is None else total + self.nothing


def reduce_rows(rows: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
    """Mean or sum of ``rows`` ``[B]`` over those whose label is not ``ignored``; or the rows."""
    if reduction == "none":
        return torch.where(labels == ignored, 0.0, rows)
    apply: Callable[..., Tensor] = ReduceRows.apply
    return apply(rows, Shares.of(labels, ignored, reduction, rows.dtype))


def unit_rows(
    embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
) -> tuple[Tensor, Tensor]:
    """Unit embeddings ``[B, d]`` and their lengths ``[B]``, differentiable once.

    A row with the label ``ignored`` becomes some unit vector: nothing in it can spoil the rest.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = UnitRows.apply
    return apply(embeddings, labels, ignored, kernels)


def own_labels(head: MarginClassifier, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels among this rank's classes, ``[B]``: -1 elsewhere; and with 0 there, to index with.

    A row that does not count has class 0 for its own: its loss is discarded.
    """
    columns = labels.clamp_min(0)
    if head.ranks.world == 1:
        return columns, columns
    local = head.shard.local(columns)
    return local, local.clamp_min(0)


def sum_target_cosines(head: MarginClassifier, cosines: Tensor) -> Tensor:
    """The targets' cosines ``[B]`` summed over ranks; all NaN if any prototype has no direction.

    Lists and kernels compare, and a NaN loses every comparison: a class without a cosine would
    just not be listed. The loss of every row depends on it, so every row becomes NaN; the sum over
    the ranks carries the NaN of one to all.
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
        """Solve every row; with what ``make_gradient`` needs, if there is to be one."""

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """Return the gradient of the unit embeddings, ``[B, d]``; keep what the prototypes' needs.

        Args:
            weights: Gradient of the others' cosines per posterior, ``[B]``.
            target_weights: Gradient of the targets' cosines, ``[B]``.
        """

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        """Deliver the gradient of the prototypes times a scalar, see ``gradients.deliver``."""

    def verify(self) -> bool:
        """Wait for the device; True if the speculative sizes sufficed."""

    def owns(self, gradient: object) -> bool:
        """Whether a fused gradient is that of this step, not of one before it."""

    def class_share(self) -> float:
        """Share of the classes that are, or may be, active in a row; equal on all ranks."""


class Gradients(NamedTuple):
    """Of the unit embeddings, their lengths and the margin's term; None where there is none."""

    embeddings: Tensor  # [B, d]
    lengths: Tensor | None  # [B]
    in_logits: Tensor  # [B]
    in_reference: Tensor
    in_penalty: Tensor


class StepLoss(torch.autograd.Function):
    """A loss whose gradients come from a function of the incoming one, times a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        step: SolvableStep,
        gradients_of: Callable[[Tensor], tuple[Gradients, Tensor]],
        prototypes: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        """The loss; ``gradients_of`` gives those of ``inputs``, the step that of prototypes."""
        ctx.step, ctx.gradients_of = step, gradients_of
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients times their factor."""
        _, _, _, is_pushed, *wanted = ctx.needs_input_grad
        gradients, factor = ctx.gradients_of(grad)
        made = (
            part * factor if is_wanted and part is not None else None
            for part, is_wanted in zip(gradients, wanted, strict=False)
        )
        return None, None, None, ctx.step.deliver_gradient(factor) if is_pushed else None, *made


@dataclass(frozen=True)
class MarginSolution:
    """A solved batch and the margin's graph: all that gradients are made of."""

    step: SolvableStep
    solved: RowSolution
    term: TargetTerm
    leaves: tuple[Tensor, Tensor]  # the targets' cosines and the embeddings' lengths
    keeps_graph: bool  # the graph is needed again

    def gradients(self, shares: Tensor) -> Gradients:
        """Gradients of ``sum_b shares_b loss_b``; the prototypes' stays with the step."""
        head, dtype = self.step.head, self.step.head.prototypes.dtype
        solved = self.solved
        in_term = (solved.in_logits * shares, solved.in_reference * shares, shares)
        target_weights, in_lengths = _through_margin(
            self.term, in_term, self.leaves, keeps_graph=self.keeps_graph
        )
        if in_lengths is not None:  # every rank has all of it
            in_lengths = in_lengths / head.ranks.world
        weights = (shares * head.loss.scale).to(dtype)
        own = self.step.make_gradient(weights, target_weights.to(dtype))
        return Gradients(own, in_lengths, *in_term)

    def gradients_of(self, shares: Shares | None) -> Callable[[Tensor], tuple[Gradients, Tensor]]:
        """Gradients and their factor from the incoming one; made at once for reduced rows."""
        if shares is None:
            return lambda grad: (self.gradients(grad.double()), torch.ones_like(grad[0]))
        known = self.gradients(shares.values)
        return lambda grad: (known, grad)


def step_loss(step: SolvableStep, embeddings: Tensor, labels: Tensor, norms: Tensor) -> Tensor:
    """Loss of a batch by the reduction of the head's loss.

    Args:
        step: A sparse or chunked step.
        embeddings: ``[B, d]`` of unit length.
        labels: ``[B]``.
        norms: Lengths that the embeddings had, ``[B]``.
    """
    head = step.head
    loss_of, dtype = head.loss, embeddings.dtype
    is_enabled = torch.is_grad_enabled()
    leaves = (step.target_cosines().double(), norms)
    cosines, lengths = (tensor.detach().requires_grad_(is_enabled) for tensor in leaves)
    term = loss_of.margin(cosines, loss_of.scale, labels=labels, norms=lengths)
    is_learned = is_enabled and _has_other_leaves(term, (cosines, lengths))
    inputs = (head.prototypes, embeddings)
    has_gradient = is_enabled and (is_learned or any(part.requires_grad for part in inputs))
    target = Target(term.logits.detach(), term.log_reference.detach())
    solved = step.solve(target, has_gradient=has_gradient)
    rows = solved.loss if term.penalty is None else solved.loss + term.penalty.detach()
    reduction, ignored = loss_of.reduction, loss_of.ignore_index
    is_reduced = reduction != "none"
    shares = Shares.of(labels, ignored, reduction, torch.float64) if is_reduced else None
    loss = (rows if shares is None else shares.reduce(rows)).to(dtype)
    if has_gradient:
        keeps_graph = is_learned or shares is None
        solution = MarginSolution(step, solved, term, (cosines, lengths), keeps_graph)
        own_graph = term if is_learned else ()  # the margin's own parameters take their share
        apply: Callable[..., Tensor] = StepLoss.apply
        loss = apply(loss, step, solution.gradients_of(shares), *inputs, norms, *own_graph)
    return reduce_rows(loss, labels, ignored, reduction) if shares is None else loss


def _through_margin(
    term: TargetTerm,
    in_term: tuple[Tensor, ...],
    leaves: tuple[Tensor, Tensor],
    *,
    keeps_graph: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the targets' cosines, and of the lengths where the margin looks at them."""
    pairs = [
        (output, grad)
        for output, grad in zip(term, in_term, strict=True)
        if output is not None and output.requires_grad
    ]
    if not pairs:
        return torch.zeros_like(leaves[0]), None
    outputs, grads = zip(*pairs, strict=True)
    in_cosines, in_lengths = torch.autograd.grad(
        outputs, leaves, grads, retain_graph=keeps_graph, allow_unused=True
    )
    return torch.zeros_like(leaves[0]) if in_cosines is None else in_cosines, in_lengths


def _has_other_leaves(term: TargetTerm, leaves: tuple[Tensor, Tensor]) -> bool:
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
