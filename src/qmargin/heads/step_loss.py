"""The loss of a sparse or chunked step, with both gradients made in the forward pass.

A mean or summed loss is linear in the gradient that comes into it, so its own gradients can be made
before that is known and multiplied by it later. What a backward pass would launch kernel by kernel
is launched while the device is still busy with the forward pass; backward itself is a product.
Only for ``reduction="none"`` does backward make the gradients, from one incoming number per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.batch import Shares, reduce_rows
from qmargin.maths.margins import TargetTerm

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


class RowSolution(NamedTuple):
    """Loss of each row and its gradient in the target's term, ``[B]`` float64 each (M7)."""

    loss: Tensor
    in_logits: Tensor
    in_reference: Tensor


class SolvableStep(Protocol):
    """What a path's step offers."""

    head: MarginClassifier

    def target_cosines(self) -> Tensor:
        """Cosines with the rows' own classes, ``[B]``."""

    def solve(
        self, target_logits: Tensor, target_log_reference: Tensor, *, has_gradient: bool
    ) -> RowSolution:
        """Solve every row; with what ``make_gradient`` needs, if there is to be one."""

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """Gradient of the unit embeddings, ``[B, d]``; what makes the prototypes' is kept.

        Args:
            weights: Gradient of the others' cosines per posterior, ``[B]``.
            target_weights: Gradient of the targets' cosines, ``[B]``.
        """

    def hand_over(self, factor: Tensor) -> Tensor | None:
        """Gradient of the prototypes times a scalar: what the head's ``gradient`` asks for."""


class StepLoss(torch.autograd.Function):
    """A mean or summed loss whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        step: SolvableStep,
        known: Gradients,
        prototypes: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        """The loss; ``known`` are the gradients of the inputs, but not the prototypes'."""
        ctx.step, ctx.known = step, known
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The known gradients times the one that comes in."""
        _, _, _, is_pushed, *wanted = ctx.needs_input_grad
        known = (
            part * grad if is_wanted and part is not None else None
            for part, is_wanted in zip(ctx.known, wanted, strict=False)
        )
        return None, None, None, ctx.step.hand_over(grad) if is_pushed else None, *known


class StepRows(torch.autograd.Function):
    """Losses of single rows: their gradients are made when the incoming one is known."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        step: SolvableStep,
        solution: MarginSolution,
        prototypes: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        """The losses, ``[B]``."""
        ctx.step, ctx.solution = step, solution
        return rows.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients, with the rows' own weights."""
        _, _, _, is_pushed, *wanted = ctx.needs_input_grad
        made = ctx.solution.gradients(ctx.step, grad.double())
        known = (part if is_wanted else None for part, is_wanted in zip(made, wanted, strict=False))
        pushed = ctx.step.hand_over(torch.ones_like(grad[0])) if is_pushed else None
        return None, None, None, pushed, *known


class Gradients(NamedTuple):
    """Of the unit embeddings, their lengths and the margin's term; None where there is none."""

    embeddings: Tensor  # [B, d]
    lengths: Tensor | None  # [B]
    in_logits: Tensor  # [B]
    in_reference: Tensor
    in_penalty: Tensor


@dataclass(frozen=True)
class MarginSolution:
    """A solved batch and the margin's graph: all that gradients are made of."""

    solved: RowSolution
    term: TargetTerm
    leaves: tuple[Tensor, Tensor]  # the targets' cosines and the embeddings' lengths
    keeps_graph: bool  # the graph is needed again

    def gradients(self, step: SolvableStep, shares: Tensor) -> Gradients:
        """Gradients of ``sum_b shares_b loss_b``; the prototypes' stays with the step."""
        head, dtype = step.head, step.head.prototypes.dtype
        solved = self.solved
        in_term = (solved.in_logits * shares, solved.in_reference * shares, shares)
        target_weights, in_lengths = _through_margin(
            self.term, in_term, self.leaves, keeps_graph=self.keeps_graph
        )
        if in_lengths is not None:  # every rank has all of it
            in_lengths = in_lengths / head.ranks.world
        weights = (shares * head.loss.scale).to(dtype)
        own = step.make_gradient(weights, target_weights.to(dtype))
        return Gradients(own, in_lengths, *in_term)


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
    solved = step.solve(
        term.logits.detach(), term.log_reference.detach(), has_gradient=has_gradient
    )
    rows = solved.loss if term.penalty is None else solved.loss + term.penalty.detach()
    reduction, ignored = loss_of.reduction, loss_of.ignore_index
    own_graph = term if is_learned else ()  # the margin's own parameters take their share
    solution = MarginSolution(solved, term, (cosines, lengths), is_learned or reduction == "none")
    if reduction == "none":
        if has_gradient:
            rows_of: Callable[..., Tensor] = StepRows.apply
            rows = rows_of(rows.to(dtype), step, solution, *inputs, norms, *own_graph)
        return reduce_rows(rows.to(dtype), labels, ignored, reduction)
    shares = Shares.of(labels, ignored, reduction, torch.float64)
    loss = shares.reduce(rows).to(dtype)
    if not has_gradient:
        return loss
    known = solution.gradients(step, shares.values)
    apply: Callable[..., Tensor] = StepLoss.apply
    return apply(loss, step, known, *inputs, norms, *own_graph)


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
