"""Optimizers for ``MarginClassifier(gradient="fused")``: the prototypes' gradient is never built.

They consume ``head.fused_gradient`` in one sweep that steps the prototypes, their momentum and the
copy that the next forward pass screens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qmargin.devices import on_device
from qmargin.errors import ConfigError, DataError
from qmargin.heads.gradients import ListedGradient, PrototypeGradient
from qmargin.heads.matrix import MatrixGradient, MatrixUpdate
from qmargin.kernels.head_reference import PrototypeState, SgdRule

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


class _FusedSGD(torch.optim.Optimizer):
    """Base of both optimizers.

    The gradient's scale is the ``.grad`` of a separate parameter: one for a new gradient, infinity
    for one that is not finite. ``torch.amp.GradScaler`` unscales and checks it.
    """

    _only_active: bool

    def __init__(
        self,
        head: MarginClassifier,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        nesterov: bool = False,
        *,
        error_if_nonfinite: bool = False,
    ) -> None:
        if head.gradient != "fused":
            raise ConfigError(
                f"gradient is {head.gradient!r} and sets prototypes.grad; build the head with "
                "gradient='fused' or use torch.optim.SGD"
            )
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least 0")
        if nesterov and momentum == 0.0:
            raise ConfigError("nesterov needs momentum, which is 0; raise it or drop nesterov")
        self.head, self.error_if_nonfinite = head, error_if_nonfinite
        self._seen: PrototypeGradient | None = None
        self._scale = nn.Parameter(head.prototypes.detach().new_ones(()))
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=head.prototypes.device)
        self._matrix = MatrixUpdate(self._scale.detach())
        defaults = {  # the keys of torch.optim.SGD: each loads the other's state
            "lr": lr,
            "momentum": momentum,
            "dampening": 0.0,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": False,
        }
        super().__init__([head.prototypes, self._scale], defaults)
        head.has_optimizer = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group: the prototypes, and the scale of their fused gradient."""
        self._attach()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped because the gradient was not finite; waits for the device."""
        return int(self._num_skipped)

    @torch.no_grad()
    def _attach(self) -> PrototypeGradient | None:
        """The head's fused gradient; a new one gets a scale of one, or infinity."""
        head = self.head
        gradient = head.fused_gradient
        if gradient is not None and not head.is_verified:
            raise ConfigError(
                "the gradient may be invalid: after a speculative forward pass, call head.verify() "
                "before an optimizer is used"
            )
        if gradient is not self._seen:
            self._seen = gradient
            self._scale.grad = None
            if gradient is not None:
                is_finite = gradient.is_finite()
                if head.ranks.world > 1:  # a step is skipped by all ranks or by none
                    is_finite = head.ranks.max_((~is_finite).to(torch.int32)) == 0
                self._scale.grad = torch.where(is_finite, 1.0, math.inf).to(self._scale)
        return gradient

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the fused gradient of all ranks, as scaled now; zero without one."""
        gradient, scale = self._attach(), self._scale.grad
        if gradient is None or scale is None:
            return torch.zeros_like(self._scale.detach())
        with torch.no_grad(), on_device(scale):
            norm = gradient.norm()
            if self.head.ranks.world > 1:
                norm = self.head.ranks.sum_(norm.square()).sqrt()
            return (norm * scale.abs()).to(scale.dtype)

    def scale_gradient_(self, factor: float | Tensor) -> None:
        """Multiply the fused gradient, if any, without building it or waiting."""
        self._attach()
        if self._scale.grad is not None:
            self._scale.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the fused gradient."""
        self.head.fused_gradient = self._seen = None
        self._scale.grad = self.head.prototypes.grad = None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Apply and consume the fused gradient; without one, do nothing.

        A gradient that is not finite, or whose scale is not, changes nothing: the step is counted
        in ``num_skipped``, or raises an error with ``error_if_nonfinite``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        head = self.head
        if head.prototypes.grad is not None:
            raise ConfigError(
                f"gradient is {head.gradient!r} and set prototypes.grad, which this optimizer "
                "does not read; clear it and use gradient='fused', or use torch.optim.SGD"
            )
        gradient = head.fused_gradient
        is_new = gradient is not self._seen and not self.error_if_nonfinite
        if is_new and isinstance(gradient, MatrixGradient) and gradient.step.rows.factor.ndim == 0:
            self._consume(gradient, self._matrix.one)  # its kernel checks whether it is finite
            return loss
        gradient, scale = self._attach(), self._scale.grad
        if gradient is None or scale is None:
            return loss
        if self.error_if_nonfinite and not bool(scale.isfinite()):
            raise DataError(
                f"the prototypes' gradient times its scale of {float(scale)} is not finite; "
                "look for NaN in the embeddings, or skip such steps with error_if_nonfinite=False"
            )
        self._consume(gradient, scale)
        return loss

    def _consume(self, gradient: PrototypeGradient, scale: Tensor) -> None:
        head = self.head
        head.refresh()  # does nothing unless the prototypes changed since forward
        with on_device(scale):
            self._update(gradient, scale)
        torch.autograd.graph.increment_version(head.prototypes)  # kernels write without changing it
        head.note_current()
        self.zero_grad()

    def _update(self, gradient: PrototypeGradient, scale: Tensor) -> None:
        """Run the sweep, and note the copy's largest error and whether the step was skipped."""
        head, group = self.head, self.__dict__["param_groups"][0]
        parameter = head.prototypes
        prototypes = parameter.detach()
        lr, kept, decay = (float(group[name]) for name in ("lr", "momentum", "weight_decay"))
        momentum = None
        if kept != 0.0:
            own = self.state[parameter]
            if own.get("momentum_buffer") is None:  # zeros: as torch, whose first buffer is g
                form = torch.contiguous_format
                own["momentum_buffer"] = torch.zeros_like(prototypes, memory_format=form)
            momentum = own["momentum_buffer"]
        rule = SgdRule(lr, kept, decay, bool(group["nesterov"]), scale, self._only_active)
        if isinstance(gradient, MatrixGradient):
            self._matrix.apply(gradient, momentum, rule, self._num_skipped)
            return
        state = PrototypeState(prototypes, momentum, head.inverse_norms, head.copy)
        error: Tensor
        if isinstance(gradient, ListedGradient):
            error = head.kernels.sgd_update(gradient.entries, gradient.embeddings, state, rule)
        else:
            error = prototypes.new_zeros(())
            for classes, rows, factor in gradient.raw_blocks():
                part = head.kernels.sgd_update_rows(classes, rows, state, rule, factor)
                error = torch.maximum(error, part)
        is_finite = scale.isfinite()
        if self._only_active:  # the others' errors still stand
            error = torch.maximum(error, head.copy_error)
        head.copy_error.copy_(torch.where(is_finite, error, head.copy_error))
        self._num_skipped += ~is_finite

    def state_dict(self) -> dict[str, Any]:
        """Settings and momentum, in the layout of ``torch.optim.SGD`` over the prototypes."""
        state: dict[str, Any] = super().state_dict()
        groups = [{**group, "params": [0]} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, here or in ``torch.optim.SGD`` over the prototypes."""
        for group in state_dict["param_groups"]:
            for name in ("dampening", "maximize"):
                if group.get(name):
                    raise ConfigError(f"the saved {name} is {group[name]}; it must be 0 here")
        groups = [{**group, "params": [0, 1]} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        own = self.state[self.head.prototypes]
        if own.get("momentum_buffer") is not None:  # kernels read whole rows
            own["momentum_buffer"] = own["momentum_buffer"].contiguous()


class ExactSGD(_FusedSGD):
    """Momentum SGD with weight decay over all classes, without a gradient matrix.

    Equal to ``torch.optim.SGD`` on the dense gradient, to rounding: a class without a gradient
    still moves along its momentum and decays.

    Args:
        head: A ``MarginClassifier`` with ``gradient="fused"``.
        lr: Learning rate; schedulers of ``torch.optim.lr_scheduler`` change it as usual.
        momentum: Share of the momentum that is kept; 0 saves its memory.
        weight_decay: Factor of the prototype that is added to the gradient.
        nesterov: Look ahead along the new momentum.
        error_if_nonfinite: Raise instead of skipping a step whose gradient is not finite. It makes
            a GPU wait.

    Examples:
        >>> import qmargin
        >>> from qmargin.heads.classifier import MarginClassifier
        >>> head = MarginClassifier(4, 100, qmargin.q_margin(), path="sparse", gradient="fused")
        >>> optimizer = ExactSGD(head, lr=0.1)
        >>> head(torch.randn(8, 4), torch.arange(8)).backward()
        >>> optimizer.step()
        >>> head.prototypes.grad is None and head.fused_gradient is None
        True
    """

    _only_active = False


class SparseSGD(_FusedSGD):
    """Momentum SGD that touches active classes only: a different optimizer than ``ExactSGD``.

    A class is active in a step if its gradient is not exactly zero. In that step its prototype,
    momentum and weight decay follow ``torch.optim.SGD`` on that row alone. In every other step the
    row does not change: it does not decay, and its momentum stays as it is until the next step in
    which the class is active. So the cost of a step depends on its active classes, and a rarely
    active class decays less than a frequently active one. Where all classes are active, as at
    ``alpha = 1``, the two optimizers are the same. The arguments are those of ``ExactSGD``.
    """

    _only_active = True


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    optimizers: Sequence[ExactSGD | SparseSGD],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip ordinary and fused gradients together, by their global Euclidean norm.

    This works like ``torch.nn.utils.clip_grad_norm_`` over all gradients; a fused gradient is
    scaled without being built.

    Args:
        parameters: Parameters of the backbone, and any others; gradients may be dense or sparse.
        optimizers: Optimizers whose fused gradients are included.
        max_norm: Largest norm after clipping.
        error_if_nonfinite: Raise, before anything is scaled, if the norm is not finite.

    Returns:
        The global norm before clipping, a scalar.
    """
    scales = {id(optimizer._scale) for optimizer in optimizers}
    grads = [p.grad for p in parameters if p.grad is not None and id(p) not in scales]
    merged = [_stored(grad.coalesce() if grad.is_sparse else grad) for grad in grads]
    # A few kernels for many small tensors: one for each would take longer than the head.
    norms = [
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group, 2, _wide(group[0]))))
        for group in _alike(merged)
    ]
    norms += [optimizer.grad_norm() for optimizer in optimizers]
    if not norms:
        return torch.zeros(())
    device, dtype = norms[0].device, reduce(torch.promote_types, (norm.dtype for norm in norms))
    alike = torch.stack([norm.to(device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(alike)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise DataError(
            f"the global norm of the gradients is {float(total)}; nothing was clipped, look for "
            "NaN in the embeddings or set error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp_max(1.0)
    scale_all_([_stored(grad) for grad in grads], factor)
    for optimizer in optimizers:
        optimizer.scale_gradient_(factor.to(optimizer.head.prototypes.device))
    return total


def _stored(grad: Tensor) -> Tensor:
    """The stored numbers of a dense or sparse gradient; a view."""
    values: Tensor = grad._values() if grad.is_sparse else grad
    return values


def scale_all_(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply dense tensors by a scalar, with few kernels."""
    for group in _alike(tensors):
        torch._foreach_mul_(group, factor.to(group[0].device, _wide(group[0])))


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors by device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _wide(values: Tensor) -> torch.dtype:
    """A type in which norms and factors of such numbers are not rounded to half precision."""
    return torch.promote_types(values.dtype, torch.float32)
