"""Differentiation: the row operations as torch operators, and two autograd functions over them.

Operators (``torch.library``) keep the data-dependent part opaque, so that ``torch.compile`` traces
through without a break, and ``vmap`` folds its dimension into the rows. ``FenchelYoung`` is the
value and ``Posterior`` its gradient; the backward of each is written with differentiable pieces and
with ``Posterior`` itself, which gives second derivatives without a third function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.kernels import rows as row_kernels
from qmargin.kernels.rows import Outcome, Rows


def _rows(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    target_logits: Tensor | None,
    target_log_reference: Tensor | None,
    scale: float,
) -> Rows:
    order = float(alpha.detach().double() - 1.0)
    if not -1.0 < order < math.inf:
        raise ConfigError(
            f"alpha is {order + 1.0!r}; it must be a finite number above 0, clamp a learnable "
            "alpha after each update, e.g. alpha.data.clamp_(1.0, 2.0)"
        )
    return Rows(values, scale, order, log_reference, labels, target_logits, target_log_reference)


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
    rows = _rows(values, log_reference, alpha, labels, target_logits, target_log_reference, scale)
    solved = row_kernels.solve(rows, distribution, solver=solver, bracket=bracket)
    return (
        solved.value, solved.anchor, solved.level, solved.tau, solved.support_size,
        solved.mass_error, solved.target_posterior, solved.target_deficit, solved.num_evaluations,
    )  # fmt: skip


@solve_rows.register_fake
def _(values: Tensor, *_: Any) -> tuple[Tensor, ...]:
    row = values.new_empty(values.shape[0])
    wide = row.to(torch.float64)
    count = row.to(torch.int64)
    scalar = torch.empty((), dtype=torch.int64)
    return (
        row, wide, wide.clone(), row.clone(), count, row.clone(), row.clone(), row.clone(), scalar,
    )  # fmt: skip


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
    rows = _rows(values, log_reference, alpha, labels, None, None, scale)
    return row_kernels.posterior(rows, anchor, level, weights)


@weighted_posterior.register_fake
def _(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _fold_batch(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule: the mapped dimension joins the rows; a mapped alpha is looped over."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def pieces(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.movedim(dim, 0) if dim is not None else value.expand(size, *value.shape)

        moved = [pieces(value, dim) for value, dim in zip(args, in_dims, strict=True)]
        if in_dims[2] is None:
            moved[2] = None  # one alpha for all rows
            flat = [v.flatten(0, 1) if isinstance(v, Tensor) else v for v in moved]
            flat[2] = args[2]
            outputs = operator(*flat)
            single = isinstance(outputs, Tensor)
            outputs = (outputs,) if single else outputs
            split = tuple(
                value.unflatten(0, (size, -1)) if value.dim() else value.expand(size)
                for value in outputs
            )
        else:
            each = [
                operator(*(v[i] if isinstance(v, Tensor) else v for v in moved))
                for i in range(size)
            ]
            single = isinstance(each[0], Tensor)
            each = [(value,) for value in each] if single else each
            split = tuple(torch.stack(values) for values in zip(*each, strict=True))
        return (split[0], 0) if single else (split, (0,) * len(split))

    return rule


torch.library.register_vmap(solve_rows, _fold_batch(solve_rows))
torch.library.register_vmap(weighted_posterior, _fold_batch(weighted_posterior))


def _polynomial(z: Tensor, offset: int) -> Tensor:
    """``sum_i z^i / (i + offset)!`` by Horner's rule: exponential tails near zero."""
    result = torch.zeros_like(z)
    for power in range(14, -1, -1):
        result = result * z + 1.0 / math.factorial(power + offset)
    return result


def _phi1(z: Tensor) -> Tensor:
    """``expm1(z) / z``, 1 at zero, differentiable there."""
    is_small = z.abs() < 0.3
    safe = torch.where(is_small, 1.0, z)
    return torch.where(is_small, _polynomial(torch.where(is_small, z, 0.0), 1), safe.expm1() / safe)


def _phi2(z: Tensor) -> Tensor:
    """``(expm1(z) - z) / z^2``, 1/2 at zero, differentiable there."""
    is_small = z.abs() < 0.3
    safe = torch.where(is_small, 1.0, z)
    near = _polynomial(torch.where(is_small, z, 0.0), 2)
    return torch.where(is_small, near, (safe.expm1() - safe) / safe.square())


def _log_ratio(posterior: Tensor, log_reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """``log(p / q)`` with zero off the support, and the support."""
    is_active = posterior > 0
    log_posterior = torch.where(is_active, posterior, 1.0).log()
    if log_reference is None:
        return log_posterior, is_active
    return torch.where(is_active, log_posterior - log_reference, 0.0), is_active


class Posterior(torch.autograd.Function):
    """``softargmax`` of solved rows; its gradient follows from the implicit equation alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, log_reference: Tensor | None, alpha: Tensor, anchor: Tensor, level: Tensor
    ) -> Tensor:
        """Posterior ``[B, k]`` of rows with the given solution (M1)."""
        posterior: Tensor = weighted_posterior(
            logits, log_reference, alpha, None, anchor, level, None, 1.0
        )
        return posterior

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the result: everything else follows from it."""
        _, log_reference, alpha, _, _ = inputs
        ctx.save_for_backward(output, log_reference, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """``w (g - <w, g> / <w, 1>)`` with ``w = p / x``, and likewise for the other inputs."""
        posterior, log_reference, alpha = ctx.saved_tensors
        b = (alpha - 1.0).to(posterior)
        ratio, is_active = _log_ratio(posterior, log_reference)
        weight = torch.where(is_active, posterior * (-b * ratio).exp(), 0.0)  # [B, k]
        grad = torch.where(is_active, grad, 0.0)
        mean = (weight * grad).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        grad_logits = weight * (grad - mean) if ctx.needs_input_grad[0] else None
        grad_reference = grad_alpha = None
        if log_reference is not None and ctx.needs_input_grad[1]:
            grad_reference = posterior * (grad - mean)
        if ctx.needs_input_grad[2]:
            drift = -ratio.square() * _phi2(-b * ratio)  # d log p / d alpha at a fixed tau
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
        """The rows, unchanged, and their targets ``[B]``."""
        return rows.view_as(rows), rows.gather(1, labels[:, None]).squeeze(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        """Keep the labels, and which targets are masked out: those pass no gradient."""
        ctx.save_for_backward(inputs[1], output[1] == -math.inf)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_target: Tensor) -> tuple[Tensor, None]:
        """The rows' gradient with the target's added; in place, since the rows' is fresh."""
        labels, is_masked = ctx.saved_tensors
        own = torch.where(is_masked, 0.0, grad_target)[:, None]
        if torch.is_grad_enabled():
            return grad_rows.scatter_add(1, labels[:, None], own), None
        return grad_rows.scatter_add_(1, labels[:, None], own), None


class FenchelYoung(torch.autograd.Function):
    """Loss for a lifted or distributed target, or the log-partition when there is none.

    Inputs: values ``[B, k]``, log_reference ``[B, k]``, alpha (one element), labels ``[B]``,
    target_logits ``[B]``, target_log_reference ``[B]``, distribution ``[B, k]``, scale.
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
        scale: float,
    ) -> tuple[Tensor, ...]:
        """The value ``[B]`` and, not differentiable, what the solver knows about each row."""
        outputs: tuple[Tensor, ...] = solve_rows(
            values,
            log_reference,
            alpha,
            labels,
            target_logits,
            target_log_reference,
            distribution,
            scale,
            "auto",
            "tight",
        )
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs and the solution; the posterior is recomputed, never stored."""
        *tensors, ctx.scale = inputs
        _, anchor, level, _, _, _, _, target_deficit, _ = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, anchor, level, target_deficit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """``p - y`` for the logits (M7), and the envelope's gradient for everything else."""
        values, log_reference, alpha, labels, target_logits, _, _, anchor, level, deficit = (
            ctx.saved_tensors
        )
        needs = ctx.needs_input_grad
        only_logits = not (needs[1] or needs[2] or needs[5])
        if only_logits and not torch.is_grad_enabled():
            weights = grad * ctx.scale if ctx.scale != 1.0 else grad
            grad_values = weighted_posterior(
                values, log_reference, alpha, labels, anchor, level, weights, ctx.scale
            )
            distribution = ctx.saved_tensors[6]
            if distribution is not None:
                grad_values = grad_values - weights[:, None] * distribution
            grad_target = None
            if target_logits is not None:
                grad_target = torch.where(grad == 0, 0.0, -grad * deficit).to(target_logits.dtype)
            return grad_values, None, None, None, grad_target, None, None, None
        return _full_backward(ctx, grad)


def _full_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Every gradient, in differentiable pieces: for second derivatives, reference and alpha."""
    (
        values, log_reference, alpha, labels, target_logits, target_log_reference, distribution,
        anchor, level, _,
    ) = ctx.saved_tensors  # fmt: skip
    logits = values if ctx.scale == 1.0 else values * ctx.scale
    reference = log_reference
    if labels is not None:
        index = labels[:, None]
        logits = logits.scatter(1, index, target_logits[:, None].to(logits.dtype))
        reference = torch.zeros_like(logits) if reference is None else reference
        reference = reference.scatter(1, index, target_log_reference[:, None].to(logits.dtype))
        distribution = torch.zeros_like(logits).scatter(1, index, 1.0)
    p = posterior_of(logits, reference, alpha, anchor, level)
    order = (alpha - 1.0).to(p)
    grad = grad[:, None]
    grad_logits = grad * (p if distribution is None else p - distribution)
    grad_reference, value_alpha = _envelope(p, reference, order)
    if distribution is not None:
        target_reference, target_alpha = _envelope(distribution, reference, order)
        grad_reference, value_alpha = grad_reference - target_reference, value_alpha - target_alpha
    grad_reference = grad * grad_reference
    grad_alpha = (grad * value_alpha).sum().to(alpha).reshape(alpha.shape)
    if labels is None:
        grad_target = grad_target_reference = None
    else:
        grad_target = grad_logits.gather(1, index).squeeze(1).to(target_logits.dtype)
        grad_target_reference = grad_reference.gather(1, index).squeeze(1).to(target_logits.dtype)
        grad_logits = grad_logits.scatter(1, index, 0.0)
        grad_reference = grad_reference.scatter(1, index, 0.0)
    grad_values = grad_logits if ctx.scale == 1.0 else grad_logits * ctx.scale
    grad_values = torch.where(values == -math.inf, 0.0, grad_values)
    return (
        grad_values,
        None if log_reference is None else grad_reference,
        grad_alpha,
        None,
        grad_target,
        grad_target_reference,
        None,
        None,
    )


def _envelope(p: Tensor, reference: Tensor | None, order: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of ``-D(p:q)`` in ``log q``, and its summands in alpha, at fixed ``p``, ``[B, k]``.

    With ``l = log(p / q)`` and ``z = b l``: ``D = sum p L / alpha``, ``L = f'(p / q) = l phi1(z)``,
    ``dL / d log q = -exp(z)`` and ``dL / d alpha = l^2 (phi1(z) - phi2(z))``, finite through
    ``alpha = 1``.
    """
    ratio, is_active = _log_ratio(p, reference)
    alpha = order + 1.0
    z = order * ratio
    height = z.exp()
    slack = ratio * _phi1(z)
    bend = ratio.square() * (_phi1(z) - _phi2(z))
    in_reference = torch.where(is_active, p * height, 0.0) / alpha
    in_alpha = p * (slack / alpha - bend) / alpha
    return in_reference, in_alpha


def lift_target(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[B, k]`` for ``value_of`` alone, and the target's entry of each, ``[B]``."""
    apply: Callable[..., tuple[Tensor, Tensor]] = LiftTarget.apply
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
    labels: Tensor | None = None,
    target_logits: Tensor | None = None,
    target_log_reference: Tensor | None = None,
    distribution: Tensor | None = None,
    scale: float = 1.0,
) -> Outcome:
    """Differentiable value of each row, with what the solver knows about it."""
    apply: Callable[..., tuple[Tensor, ...]] = FenchelYoung.apply
    outputs = apply(
        values,
        log_reference,
        alpha,
        labels,
        target_logits,
        target_log_reference,
        distribution,
        scale,
    )
    return Outcome._make(outputs)


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
    return Outcome._make(outputs)
