"""Steps on one half-precision ``[B, k]`` matrix: few launches, and no host wait.

For one GPU and a number of classes for which the matrix fits into memory. Above ``alpha = 1`` the
matrix has screened cosines: candidates are scored against the master prototypes and solved in
float64, as in ``heads.sparse``, and a row whose list is too short is solved without one, so no step
has to be verified. At ``alpha = 1`` it has posteriors, which are multiplied as in
``heads.chunked``. Steps of one shape are captured as CUDA graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.gradients import PrototypeGradient, check_delivered, deliver
from qmargin.heads.step import RowOutcome, RowSolution, StepStats, step_stats
from qmargin.kernels.head_reference import UPDATE_CLASSES, PrototypeState, SgdRule, Target
from qmargin.losses.divergences import Alpha
from qmargin.losses.margins import ClosedForm
from qmargin.losses.references import only_scales_margins

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

CAPACITY = 8192  # classes that a row can list; a longer list only costs time
CAPTURED_LOGITS = 1 << 27  # of larger steps the launches do not show
STEPS_BEFORE_CAPTURE = 3  # of one kind, one after the other


@cache
def matrix_kernels() -> Any:
    """Import the kernels, which needs Triton."""
    return import_module("qmargin.kernels.triton.matrix")


def fits(head: MarginClassifier, path: str, num_rows: int) -> bool:
    """Whether a sparse or chunked step of this head uses one matrix."""
    limit = getattr(head.path, "matrix_logits", 0)
    if not 0 < num_rows * head.num_classes <= limit:
        return False
    b, reference = head.alpha_minus_one, head.loss.active_reference
    if reference is not None and not only_scales_margins(reference, head.loss.scale):
        return False  # kernels of the matrix take every class but the target with measure one
    is_possible = 0.0 < b <= 1.0 if path == "sparse" else b == 0.0 and path == "chunked"
    return (
        is_possible
        and head.ranks.world == 1
        and head.embedding_dim % 8 == 0
        and head.kernels.__name__.endswith("triton.head")
        and (path == "sparse" or head.chunk_dtype == head.screen_dtype)
    )


@dataclass
class MatrixStep:
    """One forward pass, see ``SolvableStep``."""

    head: MarginClassifier
    rows: Any  # kernels.triton.matrix.Rows
    scale: float
    b: float
    generation: int = 0  # of a captured step: how often it was replayed
    is_static: bool = False  # captured: the next replay overwrites its tensors

    @property
    def loss(self) -> Tensor:
        """Reduced, or of each row."""
        total = loss_of_rows(self.head, self.rows)
        return total.clone() if self.is_static else total

    def target_cosines(self) -> Tensor:
        cosines: Tensor = self.rows.field(matrix_kernels().COSINE)
        return cosines.clone()  # the margin's graph may keep it, and the rows are written again

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        rows, kernels = self.rows, matrix_kernels()
        rows.field(kernels.LOGIT).copy_(target.logits)
        rows.field(kernels.REFERENCE).copy_(target.log_reference)
        rows.field(kernels.SLOPE).fill_(1.0)
        settings = {"scale": self.scale, "b": self.b, "has_gradient": has_gradient}
        settings |= {"is_finished": False, "capacity": CAPACITY}
        kernels.solve(rows, prototype_state(self.head), **settings)
        found = (kernels.LOSS, kernels.OTHERS, kernels.IN_REFERENCE)
        loss, others, in_reference = (rows.field(number) for number in found)
        return RowSolution(loss, -others, in_reference)

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        rows, kernels, head = self.rows, matrix_kernels(), self.head
        rows.field(kernels.WEIGHT).copy_(weights)
        rows.field(kernels.IN_COSINE).copy_(target_weights)
        kernels.reduce(rows)
        columns = rows.labels.clamp(0, head.num_classes - 1)
        targets = head.prototypes.detach()[columns] * head.inverse_norms[columns][:, None]
        return torch.addcmul(rows.gradient * weights[:, None], targets, target_weights[:, None])

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        self.rows.factor.copy_(factor)
        return self.deliver_scaled()

    def deliver_scaled(self) -> Tensor | None:
        """Deliver the gradient times the factor that the rows keep."""
        return deliver(self.head, MatrixGradient(self))

    def verify(self) -> bool:
        """Return True: no size is guessed."""
        return True

    def owns(self, gradient: object) -> bool:
        return isinstance(gradient, MatrixGradient) and gradient.step is self

    def candidates(self) -> Tensor:
        """How many classes each row scored, ``[B]``; more than ``CAPACITY`` without a list."""
        counts: Tensor = self.rows.field(matrix_kernels().COUNT)
        return counts

    def class_share(self) -> float:
        return float(self.candidates().mean()) / self.head.num_classes

    def stats(self, counts: Tensor) -> StepStats:
        rows, kernels, num_classes = self.rows, matrix_kernels(), self.head.num_classes
        active = num_classes
        if self.b > 0.0:
            active = 0 if rows.bits is None else int((rows.bits != 0).any(1).sum())
        found = (rows.field(number) for number in (kernels.SUPPORT, kernels.ERROR, kernels.OTHERS))
        return step_stats(
            "sparse" if self.b > 0.0 else "chunked",
            RowOutcome.of_others(*found),
            counts,
            num_candidates=float(rows.field(kernels.COUNT).mean()),
            active_share=active / num_classes,
            num_overflowed=int((rows.field(kernels.COUNT) > CAPACITY).sum()) if self.b else 0,
            reason="by one matrix" + (", as a CUDA graph" if self.is_static else ""),
        )


def loss_of_rows(head: MarginClassifier, rows: Any) -> Tensor:
    """Loss of solved rows: reduced, or of each."""
    loss: Tensor = rows.loss
    if head.loss.reduction == "none":
        loss = rows.field(matrix_kernels().LOSS).float()
    return loss


def prototype_state(head: MarginClassifier, momentum: Tensor | None = None) -> PrototypeState:
    """The prototypes and what is kept of them."""
    return PrototypeState(head.prototypes.detach(), momentum, head.inverse_norms, head.copy)


@dataclass(frozen=True)
class MatrixGradient(PrototypeGradient):
    """Gradient of a matrix step, made from the bits of each class when it is asked for."""

    step: MatrixStep

    def pushed(self, momentum: Tensor | None = None) -> Any:
        """What kernels take."""
        step = self.step
        state = prototype_state(step.head, momentum)
        return matrix_kernels().Pushed(step.rows, state, step.scale, step.b)

    def to_dense(self, prototypes: Tensor) -> Tensor:
        gradient: Tensor = matrix_kernels().class_gradient(self.pushed())
        return gradient

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        gradient = self.to_dense(self.step.head.prototypes.detach())
        for start in range(0, len(gradient), UPDATE_CLASSES):
            stop = min(start + UPDATE_CLASSES, len(gradient))
            yield slice(start, stop), gradient[start:stop]

    def norm(self) -> Tensor:
        squares: Tensor = matrix_kernels().squared_norms(self.pushed())
        return squares.sum().sqrt()

    def is_finite(self) -> Tensor:
        bound: Tensor = self.step.rows.sums[3] * self.step.rows.factor.abs().amax()
        return bound < torch.finfo(torch.float32).max  # false for NaN


def prepared_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, margin: ClosedForm
) -> Any:
    """Unit rows and what the margin makes of their targets, see ``kernels.triton.matrix.Rows``."""
    rows = _empty_rows(head, len(labels))
    _prepare(head, rows, embeddings.detach(), labels, margin, head.loss.reduction == "mean")
    return rows


def _empty_rows(head: MarginClassifier, num_rows: int) -> Any:
    loss, copy = head.loss, head.copy
    options = {"ignored": loss.ignore_index, "has_factors": loss.reduction == "none"}
    return matrix_kernels().Rows.empty(
        num_rows, head.embedding_dim, copy.dtype, copy.device, **options
    )


def _prepare(
    head: MarginClassifier,
    rows: Any,
    embeddings: Tensor,
    labels: Tensor,
    margin: ClosedForm,
    is_mean: bool,
) -> None:
    kernels = matrix_kernels()
    given = (prototype_state(head), head.copy_error)
    kernels.prepare(
        rows, embeddings, labels, *given, scale=head.loss.scale, margin=margin, is_mean=is_mean
    )


def matrix_step(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> MatrixStep:
    """A step for unit embeddings and any margin, which is applied outside the kernels."""
    rows = _empty_rows(head, len(labels))
    rows.factor = rows.unit.new_ones(())  # the weights of rows hold what each of them counts
    _prepare(head, rows, embeddings.detach(), labels, ClosedForm(), False)
    return MatrixStep(head, rows, head.loss.scale, head.alpha_minus_one)


class MatrixLoss(torch.autograd.Function):
    """The loss of a step that made its gradients already."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, prototypes: Tensor, step: MatrixStep) -> Tensor:
        """Return the loss of the step."""
        ctx.step, ctx.generation, ctx.is_done = step, step.generation, False
        ctx.dtype = embeddings.dtype
        if step.is_static:
            step.head.captured_steps.pending = weakref.ref(ctx)
        return step.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Multiply the step's gradients by the incoming one."""
        step: MatrixStep = ctx.step
        if step.generation != ctx.generation:
            raise RuntimeError(
                "backward was called twice for this loss, the second time after the next forward "
                "pass of the head; call it before, or give the path capture=False"
            )
        if ctx.needs_input_grad[1]:  # a gradient that waits reads the factor that is written next
            check_delivered(step.head)
        ctx.is_done = True
        in_embeddings = matrix_kernels().scale_rows(step.rows, grad, ctx.dtype)  # keeps the factor
        in_prototypes = None
        if ctx.needs_input_grad[1]:
            in_prototypes = step.deliver_scaled()
        return in_embeddings if ctx.needs_input_grad[0] else None, in_prototypes, None


def _solve(head: MarginClassifier, rows: Any, has_gradient: bool) -> None:
    """Everything after ``_prepare``."""
    kernels, state = matrix_kernels(), prototype_state(head)
    settings = {"scale": head.loss.scale, "has_gradient": has_gradient}
    b = head.alpha_minus_one
    if b == 0.0:
        kernels.solve_softmax(rows, state, **settings)
    else:
        kernels.solve(rows, state, **settings, b=b, is_finished=True, capacity=CAPACITY)
    kernels.reduce(rows)


def needs_gradient(head: MarginClassifier, embeddings: Tensor) -> bool:
    """Whether a backward pass may follow."""
    wanted = embeddings.requires_grad or head.prototypes.requires_grad
    return torch.is_grad_enabled() and wanted


def fused_step(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, margin: ClosedForm
) -> tuple[Tensor, MatrixStep]:
    """Loss of embeddings of any length, reduced as the head's loss says, and the step."""
    has_gradient = needs_gradient(head, embeddings)
    loss, b = head.loss, head.alpha_minus_one
    step = MatrixStep(head, _empty_rows(head, len(labels)), loss.scale, b)
    given = (embeddings.detach(), labels, margin)
    captured = head.captured_steps
    if captured.is_due(head, embeddings, labels):
        captured.capture(head, step, *given, has_gradient)
    else:
        _prepare(head, step.rows, *given, loss.reduction == "mean")
        _solve(head, step.rows, has_gradient)
    return attach_loss(step, embeddings, has_gradient), step


def attach_loss(step: Any, embeddings: Tensor, has_gradient: bool) -> Tensor:
    """The loss of a step, through which its gradients are delivered."""
    loss: Tensor
    if not has_gradient:
        loss = step.loss
        return loss
    apply: Any = MatrixLoss.apply
    loss = apply(embeddings, step.head.prototypes, step)
    return loss


class CapturedSteps:
    """A step of a head as a CUDA graph, once several of the same kind came in a row.

    A graph replays into the tensors of its first run. While a loss still waits for its backward
    pass, or a fused gradient for its optimizer, other steps are launched into tensors of their own.
    """

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.count = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.step: MatrixStep | None = None
        self.places: tuple[int, ...] = ()  # of what the graph reads of the head
        self.has_gradient = False
        self.pending: weakref.ref[Any] | None = None  # to the loss of the last replay

    def replay(self, head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> Tensor | None:
        """Loss of a batch by the graph; None where it is one of a different kind, or in use."""
        graph, step, inputs = self.graph, self.step, self.inputs
        if graph is None or step is None or inputs is None or not _can_capture(embeddings):
            return None
        if self._key(head, embeddings, labels) != self.key:
            return None
        last = None if self.pending is None else self.pending()
        if (last is not None and not last.is_done) or head.fused_gradient is not None:
            return None
        head.refresh()
        if _places(head) != self.places:  # it was on another device in between
            self.graph = self.inputs = self.step = None
            return None
        inputs[0].copy_(embeddings.detach())
        inputs[1].copy_(labels)
        graph.replay()
        step.generation += 1
        self.pending = None
        return attach_loss(step, embeddings, self.has_gradient)

    def is_due(self, head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> bool:
        """Whether this step is to be captured: it is one of several of the same kind."""
        if (
            not _can_capture(embeddings)
            or not getattr(head.path, "capture", False)
            or len(embeddings) * head.num_classes > CAPTURED_LOGITS
        ):
            return False
        key = self._key(head, embeddings, labels)
        if key != self.key:
            self.key, self.count, self.pending = key, 0, None
            self.graph = self.inputs = self.step = None  # frees the memory of a different kind
        self.count += 1
        return self.graph is None and self.count > STEPS_BEFORE_CAPTURE

    def capture(
        self,
        head: MarginClassifier,
        step: MatrixStep,
        embeddings: Tensor,
        labels: Tensor,
        margin: ClosedForm,
        has_gradient: bool,
    ) -> None:
        """Take a step and keep it as the graph."""
        self.inputs = (embeddings.clone(), labels.clone())
        with _captured(embeddings.device) as graph:
            _prepare(head, step.rows, *self.inputs, margin, head.loss.reduction == "mean")
            _solve(head, step.rows, has_gradient)
        graph.replay()
        step.is_static, self.has_gradient = True, has_gradient
        self.graph, self.step, self.places = graph, step, _places(head)

    @staticmethod
    def _key(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> tuple[Any, ...]:
        """Everything that a graph depends on, apart from the contents of tensors."""
        loss, prototypes, divergence = head.loss, head.prototypes, head.loss.divergence
        order = divergence.alpha_minus_one if isinstance(divergence, Alpha) else None
        return (
            embeddings.shape, embeddings.dtype, embeddings.device, embeddings.requires_grad,
            labels.shape, labels.dtype, labels.device, torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),  # whose tensors cannot be written to outside of it
            prototypes.requires_grad, prototypes.data_ptr(), head.path, head.gradient,
            order, loss.margin, loss.scale, loss.reduction, loss.ignore_index, loss.debug,
            loss.active_reference,
        )  # fmt: skip


def _can_capture(tensor: Tensor) -> bool:
    """Whether this is a GPU's, and no graph of the user is being captured: they do not nest."""
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def _places(head: MarginClassifier) -> tuple[int, ...]:
    """Addresses of the prototypes, and of what is kept of them."""
    kept = (head.prototypes, head.copy, head.inverse_norms, head.copy_error)
    return tuple(tensor.data_ptr() for tensor in kept)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of each device: that of ``torch.cuda.graph`` belongs to the first that captured."""
    return torch.cuda.Stream(device)


@contextmanager
def _captured(device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is launched inside; all of it has to be compiled before."""
    torch.cuda.current_stream(device).synchronize()
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield graph


class MatrixUpdate:
    """Applies the gradients of matrix steps for a fused optimizer, captured as a CUDA graph too."""

    def __init__(self, like: Tensor) -> None:
        self.rates = like.new_zeros(3)  # learning rate, momentum, weight decay
        self.known_rates = (0.0, 0.0, 0.0)
        self.largest = like.new_zeros(())
        self.one = like.new_ones(())
        self.key: tuple[Any, ...] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.step: MatrixStep | None = None

    def apply(
        self,
        gradient: MatrixGradient,
        momentum: Tensor | None,
        rule: SgdRule,
        num_skipped: Tensor,
    ) -> None:
        """Step the prototypes, and note the copy's error and whether the step was skipped."""
        rates, scale, step = rule[:3], rule.grad_scale, gradient.step
        if rates != self.known_rates:
            self.rates.copy_(torch.tensor(rates), non_blocking=True)
            self.known_rates = rates
        flags = {"nesterov": rule.nesterov, "only_active": rule.only_active}
        places = (None if momentum is None else momentum.data_ptr(), *_places(step.head))
        key = (*places, *flags.values())
        can_replay = step.is_static and scale is self.one and _can_capture(step.rows.unit)
        if can_replay and self.graph is not None and self.step is step and key == self.key:
            self.graph.replay()
            return
        given = (gradient.pushed(momentum), scale, self.rates, step.head.copy_error, num_skipped)
        matrix_kernels().sgd_update(*given, self.largest, **flags)
        if can_replay:
            # Launched above, so compiled: the next update of this kind is replayed.
            with _captured(step.rows.unit.device) as graph:
                matrix_kernels().sgd_update(*given, self.largest, **flags)
            self.graph, self.step, self.key = graph, step, key
