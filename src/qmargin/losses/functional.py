"""Posterior, log-partition, loss and threshold for any alpha and reference measure.

The functions come first, then the torch operators behind them and their derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.kernels import dispatch
from qmargin.kernels import rows as row_kernels
from qmargin.kernels.rows import Outcome, Rows
from qmargin.losses import checks, fused
from qmargin.losses.divergences import (
    Alpha,
    Divergence,
    check_divergence,
    generic_log_partition,
    generic_loss,
    solve_generic,
)
from qmargin.losses.margins import ClosedForm


class TauSolution(NamedTuple):
    """Normaliser of each row with its residual; carries no gradients."""

    tau: Tensor  # [...]
    support_size: Tensor  # [...] number of classes with positive posterior
    mass_error: Tensor  # [...] |sum of the posterior - 1|, in the arithmetic of the solver
    num_evaluations: Tensor  # scalar: passes over the classes, the largest over the rows


def softargmax(
    logits: Tensor,
    *,
    alpha: float | Tensor | None = None,
    log_reference: Tensor | float | None = None,
    divergence: Divergence | None = None,
) -> Tensor:
    """Posterior ``q_j [1 + (alpha-1)(theta_j - tau)]_+^(1/(alpha-1))`` over the last dim (M1).

    Args:
        logits: ``[..., k]``; ``-inf`` masks a class out. Half precision is computed as, and
            returned in, float32.
        alpha: Order of the divergence in ``(0, 16]``, 1 included; a tensor is learnable.
        log_reference: Log of the reference measure, broadcastable to the logits; 0 by default.
        divergence: Any other divergence, instead of ``alpha``.

    Returns:
        A tensor like ``logits`` whose rows sum to one.

    Examples:
        >>> softargmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
        >>> softargmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.0)
        tensor([0.7054, 0.2595, 0.0351])
    """
    divergence = _divergence(alpha, divergence)
    logits = checks.check_floating(logits)
    reference = checks.check_reference(log_reference, logits)
    if not isinstance(divergence, Alpha):
        _, posterior = solve_generic(*_as_wide(logits, reference), divergence)
        return posterior.to(logits.dtype)
    rows, row_reference, alpha_tensor = _as_rows(logits, reference, divergence)
    solved = solution_of(rows, row_reference, alpha_tensor)
    posterior = posterior_of(rows, row_reference, alpha_tensor, solved.anchor, solved.level)
    return posterior.reshape(logits.shape)


def log_partition(
    logits: Tensor,
    *,
    alpha: float | Tensor | None = None,
    log_reference: Tensor | float | None = None,
    divergence: Divergence | None = None,
) -> Tensor:
    """Compute the generalised log-sum-exp, ``[...]``; its gradient is ``softargmax``.

    It is ``max_p <p, theta> - D(p:q)`` with ``D(p:q) = sum_j p_j f'(p_j / q_j) / alpha``:
    log-sum-exp at ``alpha = 1``, and the paper's operator for a reference measure that sums to one.
    Otherwise it is the paper's plus ``(sum_j q_j - 1) / alpha``: that constant cancels in every
    loss, and without it the value would be lost to rounding in float32.

    Examples:
        >>> log_partition(torch.tensor([1.0, 0.0]), alpha=1.0)
        tensor(1.3133)
    """
    divergence = _divergence(alpha, divergence)
    logits = checks.check_floating(logits)
    reference = checks.check_reference(log_reference, logits)
    if not isinstance(divergence, Alpha):
        value = generic_log_partition(*_as_wide(logits, reference), divergence)
        return value.to(logits.dtype)
    rows, row_reference, alpha_tensor = _as_rows(logits, reference, divergence)
    value = value_of(rows, row_reference, alpha_tensor).value
    return value.reshape(logits.shape[:-1])


def fenchel_young_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor | None = None,
    log_reference: Tensor | float | None = None,
    divergence: Divergence | None = None,
    debug: bool = False,
) -> Tensor:
    """Compute the Fenchel-Young loss of each row, ``[...]``; it is never negative (M6).

    Args:
        logits: ``[..., k]``.
        target: Integer labels ``[...]``, or distributions ``[..., k]`` whose rows sum to one. A NaN
            in a distribution gives NaN for that row.
        alpha: As for ``softargmax``.
        log_reference: As for ``softargmax``.
        divergence: As for ``softargmax``.
        debug: Check the values of the target on every device, which makes a GPU wait; on a CPU they
            are always checked.

    Examples:
        >>> fenchel_young_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), alpha=1.0)
        tensor([0.3133])
        >>> fenchel_young_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), alpha=1.5)
        tensor([0.])
    """
    divergence = _divergence(alpha, divergence)
    found = None if log_reference is not None else _fused_loss(logits, target, divergence, debug)
    if found is not None:
        return found
    logits = checks.check_floating(logits)
    reference = checks.check_reference(log_reference, logits)
    if isinstance(target, Tensor) and target.is_floating_point():
        distribution = checks.check_distribution(target, logits)
        fault: Tensor = checks.target_fault(
            target, debug
        )  # of the target as given: rounding is its own
        value = _distribution_loss(logits, distribution, reference, divergence)
        return value + fault.to(value.dtype)
    checks.check_label_tensor(target, logits)
    labels: Tensor = checks.checked_labels(target, logits.shape[-1], debug)
    if not isinstance(divergence, Alpha):
        one_hot = torch.zeros_like(logits).scatter(-1, labels[..., None], 1.0)
        return _distribution_loss(logits, one_hot, reference, divergence)
    rows, row_reference, alpha_tensor = _as_rows(logits, reference, divergence)
    labels = labels.reshape(-1)
    rows, own = lift_target(rows, labels)
    own_reference = torch.zeros_like(own)
    if row_reference is not None:
        own_reference = row_reference.gather(1, labels[:, None]).squeeze(1)
    solved = value_of(rows, row_reference, alpha_tensor, lifted=(labels, own, own_reference))
    return solved.value.reshape(logits.shape[:-1])


def _fused_loss(
    logits: Tensor, labels: Tensor, divergence: Divergence, debug: bool
) -> Tensor | None:
    """Compute the loss of labels by kernels only; None where they do not support it."""
    checks.check_classes(logits)
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    is_label = isinstance(labels, Tensor) and not labels.is_floating_point()
    if not is_label or not isinstance(divergence, Alpha):
        return None
    if not fused.serves(rows, divergence, 1.0):
        return None
    checks.check_label_tensor(labels, logits)
    labels = labels.reshape(-1)
    if debug or labels.device.type == "cpu":
        checks.checked_labels(labels, rows.shape[1], debug)
    settings = fused.Settings(divergence.alpha_minus_one, 1.0, ClosedForm(), None, "none")
    found = fused.loss_of(rows, labels, settings)
    if found is None:
        return None
    return found[0] if logits.dim() == 2 else found[0].reshape(logits.shape[:-1])


def _distribution_loss(
    logits: Tensor, distribution: Tensor, reference: Tensor | None, divergence: Divergence
) -> Tensor:
    if not isinstance(divergence, Alpha):
        wide, wide_reference = _as_wide(logits, reference)
        return generic_loss(wide, distribution, wide_reference, divergence).to(logits.dtype)
    rows, row_reference, alpha = _as_rows(logits, reference, divergence)
    solved = value_of(rows, row_reference, alpha, distribution=distribution.reshape(rows.shape))
    return solved.value.reshape(logits.shape[:-1])


def solve_tau(
    logits: Tensor,
    *,
    alpha: float | Tensor,
    log_reference: Tensor | float | None = None,
    solver: str = "auto",
    bracket: str = "tight",
) -> TauSolution:
    """Solve for the normaliser ``tau`` of each row (M2); the result carries no gradients.

    It solves alpha-divergences only.

    Args:
        logits: ``[..., k]``.
        alpha: Order of the divergence.
        log_reference: As for ``softargmax``.
        solver: ``"newton"`` (proven for ``alpha <= 2``), ``"bisection"`` (the paper's), or
            ``"auto"``: Newton up to 2, bisection above.
        bracket: Where bisection starts: ``"tight"``, or ``"paper"`` for the paper's own bracket.

    Examples:
        >>> solution = solve_tau(torch.zeros(1, 4), alpha=2.0)
        >>> solution.tau, solution.support_size
        (tensor([0.7500]), tensor([4]))
    """
    for name, value, known in (
        ("solver", solver, ("auto", "newton", "bisection")),
        ("bracket", bracket, ("tight", "paper")),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; known are {', '.join(known)}")
    divergence = Alpha(alpha)
    if solver == "auto":  # by name, so that evaluations are counted
        solver = "newton" if divergence.alpha_minus_one <= 1.0 else "bisection"
    if solver == "newton" and divergence.alpha_minus_one > 1.0:
        raise ConfigError(
            f"solver is 'newton', which is proven for alpha up to 2, and alpha is "
            f"{divergence.alpha_minus_one + 1.0:g}; use solver='bisection' or 'auto'"
        )
    logits = checks.check_floating(logits)
    reference = checks.check_reference(log_reference, logits)
    rows, row_reference, alpha_tensor = _as_rows(logits, reference, divergence)
    solved = solution_of(rows, row_reference, alpha_tensor, solver=solver, bracket=bracket)
    tau, support_size, mass_error = (
        value.reshape(logits.shape[:-1])
        for value in (solved.tau, solved.support_size, solved.mass_error)
    )
    return TauSolution(tau, support_size, mass_error, solved.num_evaluations)


def _divergence(alpha: float | Tensor | None, divergence: Divergence | None) -> Divergence:
    if alpha is not None and divergence is None:
        return Alpha(alpha)
    if alpha is None and divergence is not None:
        return check_divergence(divergence)
    raise ConfigError(f"alpha is {alpha!r} and divergence is {divergence!r}; give exactly one")


def _as_rows(
    logits: Tensor, reference: Tensor | None, divergence: Alpha
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits and reference as ``[B, k]``, and alpha as a tensor."""
    num_classes = logits.shape[-1]
    rows = logits.reshape(-1, num_classes)
    flat = None if reference is None else reference.reshape(-1, num_classes)
    return rows, flat, divergence.as_tensor()


def _as_wide(logits: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and a reference in float64, for the generic solver."""
    wide = logits.double()
    return wide, torch.zeros_like(wide) if reference is None else reference.double()


def _rows(
    values: Tensor,
    scale: float,
    alpha: Tensor,
    log_reference: Tensor | None,
    *lifted: Tensor | None,
) -> Rows:
    value = float(alpha.item())
    checks.check_alpha_range(value)
    return Rows(values, scale, value - 1.0, log_reference, *lifted)


@torch.library.custom_op("qmargin::solve_rows", mutates_args=())
def solve_rows(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    target_logits: Tensor | None,
    target_log_reference: Tensor | None,
    distribution: Tensor | None,
    scale: float,
    solver: str,
    bracket: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator form of ``kernels.rows.solve``: ``values`` is ``[B, k]``."""
    lifted = labels, target_logits, target_log_reference
    rows = _rows(values, scale, alpha, log_reference, *lifted)
    return row_kernels.solve(rows, distribution, solver=solver, bracket=bracket)[:9]


@solve_rows.register_fake
def _(values: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtypes = (None, torch.float64, torch.float64, None, torch.int64, None, None, None)
    rows = (values.new_empty(values.shape[0], dtype=dtype) for dtype in dtypes)
    return *rows, torch.empty((), dtype=torch.int64)


@torch.library.custom_op("qmargin::weighted_posterior", mutates_args=())
def weighted_posterior(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
    scale: float,
) -> Tensor:
    """Operator form of ``kernels.rows.posterior``."""
    rows = _rows(values, scale, alpha, log_reference, labels)
    return row_kernels.posterior(rows, anchor, level, weights)


@weighted_posterior.register_fake
def _(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _fold_batch(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule: the mapped dimension joins the rows; a mapped alpha is looped over."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size, is_shared = info.batch_size, in_dims[2] is None  # one alpha for all rows
        moved = []
        for place, (value, dim) in enumerate(zip(args, in_dims, strict=True)):
            if isinstance(value, Tensor) and not (place == 2 and is_shared):
                mapped = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
                value = mapped.flatten(0, 1) if is_shared else mapped
            moved.append(value)
        if is_shared:
            outputs = operator(*moved)
            is_single = isinstance(outputs, Tensor)
            split = [
                value.unflatten(0, (size, -1)) if value.dim() else value.expand(size)
                for value in ([outputs] if is_single else outputs)
            ]
        else:
            each = [
                operator(*(v[index] if isinstance(v, Tensor) else v for v in moved))
                for index in range(size)
            ]
            is_single = isinstance(each[0], Tensor)
            parts = [each] if is_single else zip(*each, strict=True)
            split = [torch.stack(list(values)) for values in parts]
        return (split[0], 0) if is_single else (tuple(split), (0,) * len(split))

    return rule


torch.library.register_vmap(solve_rows, _fold_batch(solve_rows))
torch.library.register_vmap(weighted_posterior, _fold_batch(weighted_posterior))


def _phi(z: Tensor, order: int) -> Tensor:
    """``expm1(z) / z`` (order 1) or ``(expm1(z) - z) / z^2`` (order 2), differentiable at zero."""
    is_small = z.abs() < 0.3
    near, safe = torch.where(is_small, z, 0.0), torch.where(is_small, 1.0, z)
    series = torch.zeros_like(z)  # sum_i z^i / (i + order)! by Horner's rule
    for power in range(14, -1, -1):
        series = series * near + 1.0 / math.factorial(power + order)
    far = safe.expm1() / safe if order == 1 else (safe.expm1() - safe) / safe.square()
    return torch.where(is_small, series, far)


def _log_ratio(posterior: Tensor, log_reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """``log(p / q)`` with zero off the support, and the support."""
    is_active = posterior > 0
    log_posterior = torch.where(is_active, posterior, 1.0).log()
    if log_reference is None:
        return log_posterior, is_active
    return torch.where(is_active, log_posterior - log_reference, 0.0), is_active


class Posterior(torch.autograd.Function):
    """``softargmax`` of solved rows (M1); its gradient follows from the implicit equation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, log_reference: Tensor | None, alpha: Tensor, anchor: Tensor, level: Tensor
    ) -> Tensor:
        posterior: Tensor = weighted_posterior(
            logits, log_reference, alpha, None, anchor, level, None, 1.0
        )
        return posterior

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, log_reference, alpha, _, _ = inputs
        ctx.save_for_backward(output, log_reference, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """``w (g - <w, g> / <w, 1>)`` with ``w = p / x``, and likewise for the other inputs."""
        posterior, log_reference, alpha = ctx.saved_tensors
        b = (alpha.double() - 1.0).to(posterior)  # in float32 the difference would lose digits
        ratio, is_active = _log_ratio(posterior, log_reference)
        weight = torch.where(is_active, posterior * (-b * ratio).exp(), 0.0)  # [B, k]
        grad = torch.where(is_active, grad, 0.0)
        mean = (weight * grad).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        grad_logits = weight * (grad - mean) if ctx.needs_input_grad[0] else None
        grad_reference = grad_alpha = None
        if log_reference is not None and ctx.needs_input_grad[1]:
            grad_reference = posterior * (grad - mean)
        if ctx.needs_input_grad[2]:
            drift = -ratio.square() * _phi(-b * ratio, 2)  # d log p / d alpha at a fixed tau
            grad_alpha = (posterior * drift * (grad - mean)).sum().to(alpha).reshape(alpha.shape)
        return grad_logits, grad_reference, grad_alpha, None, None


class LiftTarget(torch.autograd.Function):
    """Splits a batch into its rows and the target's entry of each.

    A plain ``gather`` would make its gradient a second ``[B, k]`` matrix of zeros and add it to the
    first; here the target's gradient is put into the rows' gradient where it belongs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return rows.view_as(rows), rows.gather(1, labels[:, None]).squeeze(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[1], output[1] == -math.inf)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_target: Tensor) -> tuple[Tensor, None]:
        labels, is_masked = ctx.saved_tensors  # a masked target passes no gradient
        own = torch.where(is_masked, 0.0, grad_target)[:, None]
        if torch.is_grad_enabled():
            return grad_rows.scatter_add(1, labels[:, None], own), None
        # In place, since the rows' gradient is fresh.
        return grad_rows.scatter_add_(1, labels[:, None], own), None


class EagerLiftTarget(torch.autograd.Function):
    """``LiftTarget`` for eager mode, with less overhead."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = LiftTarget.forward(rows, labels)
        LiftTarget.setup_context(ctx, (rows, labels), outputs)
        return outputs

    backward = LiftTarget.backward


class FenchelYoung(torch.autograd.Function):
    """Loss for a lifted or distributed target, or the log-partition when there is none.

    Inputs: values ``[B, k]``, log_reference ``[B, k]``, alpha (one element), labels ``[B]``,
    target_logits ``[B]``, target_log_reference ``[B]``, distribution ``[B, k]``, is_ignored ``[B]``
    (rows whose value the caller discards: they may hold anything), scale. The outputs after the
    value are not differentiable; the posterior is recomputed, never stored.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor,
        log_reference: Tensor | None,
        alpha: Tensor,
        labels: Tensor | None,
        target_logits: Tensor | None,
        target_log_reference: Tensor | None,
        distribution: Tensor | None,
        is_ignored: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, ...]:
        lifted = labels, target_logits, target_log_reference
        outputs: tuple[Tensor, ...] = solve_rows(
            values, log_reference, alpha, *lifted, distribution, scale, "auto", "tight"
        )
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        _, anchor, level, _, _, _, _, target_deficit, _ = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, anchor, level, target_deficit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """``p - y`` for the logits (M7), and the envelope's gradient for everything else."""
        needs = ctx.needs_input_grad
        if needs[1] or needs[2] or needs[5] or torch.is_grad_enabled():
            return _full_backward(ctx, grad)
        values, log_reference, alpha, labels, target_logits, _, distribution, _, *solved = (
            ctx.saved_tensors
        )
        anchor, level, deficit = solved
        weights = grad * ctx.scale if ctx.scale != 1.0 else grad
        grad_values = weighted_posterior(
            values, log_reference, alpha, labels, anchor, level, weights, ctx.scale
        )
        if distribution is not None:
            grad_values = grad_values - weights[:, None] * distribution
            grad_values = torch.where(values == -math.inf, 0.0, grad_values)
        grad_target = None
        if target_logits is not None:
            grad_target = torch.where(grad == 0, 0.0, -grad * deficit).to(target_logits.dtype)
        return grad_values, None, None, None, grad_target, None, None, None, None


class EagerFenchelYoung(torch.autograd.Function):
    """``FenchelYoung`` of a lifted target on a CPU, in eager mode, without operators.

    Forward keeps the posterior, as lists where it is sparse, and backward writes it out.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        values, _, alpha, *lifted, _, _, scale = inputs
        solved, kept = row_kernels.solve_and_keep(_rows(values, scale, alpha, None, *lifted))
        ctx.scale = scale
        value, *rest, _ = solved  # the last, a gradient, is that of kernels on a GPU
        ctx.mark_non_differentiable(*rest)
        known = (solved.anchor, solved.level, solved.target_deficit)
        ctx.save_for_backward(*inputs[:-1], *known, *kept)
        return value, *rest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """See ``FenchelYoung.backward``."""
        needs = ctx.needs_input_grad
        if needs[2] or needs[5] or torch.is_grad_enabled():
            return _full_backward(ctx, grad)
        values, _, alpha, labels, target_logits, *_ = ctx.saved_tensors
        anchor, level, deficit, *kept = ctx.saved_tensors[8:]
        weights = grad * ctx.scale if ctx.scale != 1.0 else grad
        grad_values = None
        if needs[0]:
            rows = _rows(values, ctx.scale, alpha, None, labels)
            grad_values = row_kernels.kept_posterior(rows, tuple(kept), anchor, level, weights)
        grad_target = torch.where(grad == 0, 0.0, -grad * deficit).to(target_logits.dtype)
        return grad_values, None, None, None, grad_target, None, None, None, None


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether a call is on a CPU, not traced, and not inside ``torch.func``."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not dispatch.may_interpret
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _full_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """All gradients by differentiable operations: for second derivatives, reference and alpha."""
    (
        values, log_reference, alpha, labels, target_logits, target_log_reference, distribution,
        is_ignored, anchor, level, _,
    ) = ctx.saved_tensors[:11]  # fmt: skip
    logits = values if ctx.scale == 1.0 else values * ctx.scale
    if is_ignored is not None:  # any finite row will do: its gradient is multiplied by zero
        logits = torch.where(is_ignored[:, None], 0.0, logits)
        anchor = torch.where(is_ignored, 0.0, anchor)
        level = torch.where(is_ignored, 1.0, level)
    b = alpha.double() - 1.0
    grad_target = grad_target_reference = None
    if labels is None:
        p = posterior_of(logits, log_reference, alpha, anchor, level)
        b = b.to(p)
        in_logits, in_reference = p, _reference_slope(p, log_reference, b)
        in_alpha = _alpha_slope(p, log_reference, b)
        if distribution is not None:  # less the gradients of what the target itself costs
            in_logits = p - distribution
            in_reference = in_reference - _reference_slope(distribution, log_reference, b)
            in_alpha = in_alpha - _alpha_slope(distribution, log_reference, b)
        in_alpha = in_alpha.sum(1, dtype=torch.float64)
    else:
        index = labels[:, None]
        logits = logits.scatter(1, index, target_logits[:, None].to(logits.dtype))
        reference = torch.zeros_like(logits) if log_reference is None else log_reference
        reference = reference.scatter(1, index, target_log_reference[:, None].to(logits.dtype))
        p = posterior_of(logits, reference, alpha, anchor, level)
        # Gradients of the target's own entries are differences, and taken in float64.
        in_logits = others = p.scatter(1, index, 0.0)
        deficit = others.sum(1, dtype=torch.float64)  # 1 - p_y with all its digits
        own, own_reference = p.gather(1, index).squeeze(1).double(), target_log_reference.double()
        own = torch.where(own < 1e-3, own, 1.0 - deficit)
        one = torch.ones_like(own)
        in_alpha = _alpha_slope(others, log_reference, b.to(p)).sum(1, dtype=torch.float64)
        in_alpha = in_alpha + _alpha_slope(own, own_reference, b)
        in_own = _reference_slope(own, own_reference, b)
        in_reference = _reference_slope(others, log_reference, b.to(p))
        in_alpha = in_alpha - _alpha_slope(one, own_reference, b)
        in_target = -deficit
        in_own = in_own - _reference_slope(one, own_reference, b)
    column = grad[:, None]
    grad_values = torch.where(values == -math.inf, 0.0, column * in_logits * ctx.scale)
    grad_reference = None if log_reference is None else column * in_reference
    if labels is not None:
        grad_target = (grad * in_target).to(target_logits.dtype)
        grad_target_reference = (grad * in_own).to(target_log_reference.dtype)
    grad_alpha = (grad * in_alpha).sum().to(alpha).reshape(alpha.shape)
    return (
        grad_values, grad_reference, grad_alpha, None, grad_target, grad_target_reference,
        None, None, None,
    )  # fmt: skip


def _reference_slope(p: Tensor, reference: Tensor | None, b: Tensor) -> Tensor:
    """Gradient of ``-D(p:q)`` in ``log q`` at fixed ``p``: ``p exp(b l) / alpha``, elementwise.

    With ``l = log(p / q)``: ``D = sum p L / alpha`` and ``L = f'(p / q)``.
    """
    ratio, is_active = _log_ratio(p, reference)
    return torch.where(is_active, p * (b * ratio).exp(), 0.0) / (b + 1.0)


def _alpha_slope(p: Tensor, reference: Tensor | None, b: Tensor) -> Tensor:
    """Summands of the gradient of ``-D(p:q)`` in alpha at fixed ``p``, elementwise.

    With ``z = b l``: ``L = l phi1(z)`` and ``dL / d alpha = l^2 (phi1(z) - phi2(z))``, finite
    through ``alpha = 1``.
    """
    ratio, _ = _log_ratio(p, reference)
    alpha, z = b + 1.0, b * ratio
    bend = ratio.square() * (_phi(z, 1) - _phi(z, 2))
    return p * (ratio * _phi(z, 1) / alpha - bend) / alpha


def lift_target(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[B, k]`` for ``value_of`` alone, and the target's entry of each, ``[B]``."""
    apply: Callable[..., tuple[Tensor, Tensor]] = LiftTarget.apply
    if is_on_cpu(rows):
        apply = EagerLiftTarget.apply
    return apply(rows, labels)


def posterior_of(
    logits: Tensor, log_reference: Tensor | None, alpha: Tensor, anchor: Tensor, level: Tensor
) -> Tensor:
    """Differentiable posterior ``[B, k]`` of solved rows."""
    apply: Callable[..., Tensor] = Posterior.apply
    return apply(logits, log_reference, alpha, anchor, level)


def value_of(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    *,
    lifted: tuple[Tensor | None, ...] = (None, None, None),
    distribution: Tensor | None = None,
    is_ignored: Tensor | None = None,
    scale: float = 1.0,
) -> Outcome:
    """Differentiable value of each row, with the statistics of the solver.

    ``lifted`` are labels, target logits and target log references, ``[B]`` each.
    """
    apply: Callable[..., tuple[Tensor, ...]] = FenchelYoung.apply
    is_lifted = lifted[0] is not None and log_reference is None
    if is_lifted and values.numel() and is_on_cpu(values):
        apply = EagerFenchelYoung.apply
    outputs = apply(values, log_reference, alpha, *lifted, distribution, is_ignored, scale)
    return Outcome(*outputs)


@torch.no_grad()
def solution_of(
    logits: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    *,
    solver: str = "auto",
    bracket: str = "tight",
) -> Outcome:
    """The solved rows, without gradients."""
    outputs = solve_rows(logits, log_reference, alpha, None, None, None, None, 1.0, solver, bracket)
    return Outcome(*outputs)
