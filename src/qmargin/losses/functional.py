"""The operators as functions: posterior, log-partition, loss and threshold, any alpha, any q."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.losses.autograd import lift_target, posterior_of, solution_of, value_of
from qmargin.losses.generic import generic_log_partition, generic_loss, solve_generic
from qmargin.maths.divergences import Alpha, Divergence

SOLVERS = ("auto", "newton", "bisection")
BRACKETS = ("tight", "paper")


class TauSolution(NamedTuple):
    """The normaliser of each row and how well it normalises; no gradients."""

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
        alpha: Order of the divergence in ``(0, inf)``, 1 included; a tensor is learnable.
        log_reference: Log of the reference measure, broadcastable to the logits; 0 by default.
        divergence: Any other divergence, instead of ``alpha``.

    Returns:
        A tensor like ``logits`` whose rows sum to one.

    Example:
        >>> softargmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
        >>> softargmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.0)
        tensor([0.7054, 0.2595, 0.0351])
    """
    divergence = _divergence(alpha, divergence)
    logits = check_floating(logits)
    reference = _check_reference(log_reference, logits)
    if not isinstance(divergence, Alpha):
        reference = torch.zeros_like(logits) if reference is None else reference
        generic = solve_generic(logits.double(), reference.double(), divergence)
        return generic.posterior.to(logits.dtype)
    rows, row_reference, order = _as_rows(logits, reference, divergence)
    solved = solution_of(rows, row_reference, order)
    posterior = posterior_of(rows, row_reference, order, solved.anchor, solved.level)
    return posterior.reshape(logits.shape)


def log_partition(
    logits: Tensor,
    *,
    alpha: float | Tensor | None = None,
    log_reference: Tensor | float | None = None,
    divergence: Divergence | None = None,
) -> Tensor:
    """The generalised log-sum-exp, ``[...]``; its gradient is ``softargmax``.

    It is ``max_p <p, theta> - D(p:q)`` with ``D(p:q) = sum_j p_j f'(p_j / q_j) / alpha``:
    log-sum-exp at ``alpha = 1``, and the paper's operator for a reference measure that sums to one.
    Otherwise it is the paper's plus ``(sum_j q_j - 1) / alpha``: that constant cancels in every
    loss, and with it the value would drown in float32.

    Example:
        >>> log_partition(torch.tensor([1.0, 0.0]), alpha=1.0)
        tensor(1.3133)
    """
    divergence = _divergence(alpha, divergence)
    logits = check_floating(logits)
    reference = _check_reference(log_reference, logits)
    if not isinstance(divergence, Alpha):
        reference = torch.zeros_like(logits) if reference is None else reference
        value = generic_log_partition(logits.double(), reference.double(), divergence)
        return value.to(logits.dtype)
    rows, row_reference, order = _as_rows(logits, reference, divergence)
    value = value_of(rows, row_reference, order).value
    return value.reshape(logits.shape[:-1])


def fenchel_young_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor | None = None,
    log_reference: Tensor | float | None = None,
    divergence: Divergence | None = None,
) -> Tensor:
    """Fenchel-Young loss of each row, ``[...]``, never negative (M6).

    Args:
        logits: ``[..., k]``.
        target: Integer labels ``[...]``, or distributions ``[..., k]`` whose rows sum to one.
        alpha: As for ``softargmax``.
        log_reference: As for ``softargmax``.
        divergence: As for ``softargmax``.

    Example:
        >>> fenchel_young_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), alpha=1.0)
        tensor([0.3133])
        >>> fenchel_young_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), alpha=1.5)
        tensor([0.])
    """
    divergence = _divergence(alpha, divergence)
    logits = check_floating(logits)
    reference = _check_reference(log_reference, logits)
    if target.is_floating_point():
        distribution = _check_distribution(target, logits)
    else:
        target = check_labels(target, logits)
    if not isinstance(divergence, Alpha):
        reference = torch.zeros_like(logits) if reference is None else reference
        if not target.is_floating_point():
            distribution = torch.zeros_like(logits).scatter(-1, target[..., None], 1.0)
        value = generic_loss(logits.double(), distribution, reference.double(), divergence)
        return value.to(logits.dtype)
    rows, row_reference, order = _as_rows(logits, reference, divergence)
    if target.is_floating_point():
        flat = distribution.reshape(rows.shape)
        value = value_of(rows, row_reference, order, distribution=flat).value
    else:
        labels = target.reshape(-1)
        index = labels[:, None]
        rows, own = lift_target(rows, labels)
        own_reference = torch.zeros_like(own)
        if row_reference is not None:
            own_reference = row_reference.gather(1, index).squeeze(1)
        value = value_of(
            rows,
            row_reference,
            order,
            labels=labels,
            target_logits=own,
            target_log_reference=own_reference,
        ).value
    return value.reshape(logits.shape[:-1])


def solve_tau(
    logits: Tensor,
    *,
    alpha: float | Tensor,
    log_reference: Tensor | float | None = None,
    solver: str = "auto",
    bracket: str = "tight",
) -> TauSolution:
    """The normaliser ``tau`` of each row, with support size and residual (M2). No gradients.

    Args:
        logits: ``[..., k]``.
        alpha: Order of the divergence.
        log_reference: As for ``softargmax``.
        solver: ``"newton"`` (proven for ``alpha <= 2``), ``"bisection"`` (the paper's), or
            ``"auto"``: Newton up to 2, bisection above.
        bracket: Where bisection starts: ``"tight"``, or ``"paper"`` for the paper's own bracket.

    Example:
        >>> solution = solve_tau(torch.zeros(1, 4), alpha=2.0)
        >>> solution.tau, solution.support_size
        (tensor([0.7500]), tensor([4]))
    """
    if solver not in SOLVERS:
        raise ConfigError(f"solver is {solver!r}; known solvers are {', '.join(SOLVERS)}")
    if bracket not in BRACKETS:
        raise ConfigError(f"bracket is {bracket!r}; known brackets are {', '.join(BRACKETS)}")
    divergence = Alpha(alpha)
    if solver == "newton" and divergence.order > 1.0:
        raise ConfigError(
            f"solver 'newton' is proven for alpha up to 2 and alpha is {divergence.order + 1.0:g}; "
            "use solver='bisection' or 'auto'"
        )
    logits = check_floating(logits)
    reference = _check_reference(log_reference, logits)
    rows, row_reference, order = _as_rows(logits, reference, divergence)
    solved = solution_of(rows, row_reference, order, solver=solver, bracket=bracket)
    shape = logits.shape[:-1]
    return TauSolution(
        solved.tau.reshape(shape),
        solved.support_size.reshape(shape),
        solved.mass_error.reshape(shape),
        solved.num_evaluations,
    )


def check_labels(labels: Tensor, logits: Tensor, *, debug: bool = False) -> Tensor:
    """Integer labels ``[...]`` in range for logits ``[..., k]``, as int64.

    The range is checked where that needs no wait for a device: on a CPU always, elsewhere only when
    ``debug`` asks for it.
    """
    check_label_tensor(labels, logits)
    checked: Tensor = checked_labels(labels, logits.shape[-1], debug)
    return checked


def check_label_tensor(labels: Tensor, logits: Tensor) -> None:
    """Raise unless labels are integers, one per row, on the device of the logits."""
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ShapeError(
            f"labels have dtype {labels.dtype}; class indices are integers (torch.int64), "
            "and a target distribution is floating"
        )
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)} for logits {tuple(logits.shape)}; "
            f"one label per row is {tuple(logits.shape[:-1])}"
        )
    if labels.device != logits.device:
        raise ShapeError(
            f"labels are on {labels.device} and logits on {logits.device}; move one of them"
        )


@torch.library.custom_op("qmargin::checked_labels", mutates_args=())
def checked_labels(labels: Tensor, num_classes: int, debug: bool) -> Tensor:
    """Operator that lets a range check live inside a compiled graph; returns int64 labels."""
    if labels.numel() and (labels.device.type == "cpu" or debug):
        is_bad = (labels < 0) | (labels >= num_classes)
        if bool(is_bad.any()):
            row = int(is_bad.flatten().nonzero()[0])
            raise DataError(
                f"label {int(labels.flatten()[row])} at row {row} is outside 0..{num_classes - 1}; "
                "check the class count, or mark rows to skip with ignore_index"
            )
    return labels.to(torch.int64, copy=True)


@checked_labels.register_fake
def _(labels: Tensor, num_classes: int, debug: bool) -> Tensor:
    return torch.empty_like(labels, dtype=torch.int64)


@checked_labels.register_vmap
def _(
    info: object, in_dims: tuple[int, None, None], labels: Tensor, num_classes: int, debug: bool
) -> tuple[Tensor, int]:
    return checked_labels(labels, num_classes, debug), in_dims[0]


def _divergence(alpha: float | Tensor | None, divergence: Divergence | None) -> Divergence:
    if (alpha is None) == (divergence is None):
        raise ConfigError(
            f"alpha is {alpha!r} and divergence is {divergence!r}; give exactly one of them"
        )
    if divergence is not None:
        return divergence
    assert alpha is not None
    return Alpha(alpha)


def check_floating(logits: Tensor, name: str = "logits") -> Tensor:
    """The tensor, half precision lifted to float32, or an error that names it."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise ShapeError(f"{name} are {kind}; they must be a floating tensor, call .float() first")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(
            f"{name} have shape {tuple(logits.shape)}; the last dimension holds at least one class"
        )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _check_reference(log_reference: Tensor | float | None, logits: Tensor) -> Tensor | None:
    if log_reference is None:
        return None
    reference = torch.as_tensor(log_reference, dtype=logits.dtype, device=logits.device)
    try:
        return reference.broadcast_to(logits.shape)
    except RuntimeError:
        raise ShapeError(
            f"log_reference has shape {tuple(reference.shape)}, which does not broadcast to logits "
            f"{tuple(logits.shape)}; give a scalar, one per class [k], one per row [..., 1] or all"
        ) from None


def _check_distribution(target: Tensor, logits: Tensor) -> Tensor:
    if target.shape != logits.shape:
        raise ShapeError(
            f"target has shape {tuple(target.shape)} for logits {tuple(logits.shape)}; a target "
            "distribution has the shape of the logits, labels are integers without the class dim"
        )
    if target.requires_grad:
        raise ConfigError("target requires grad; a target is a constant, pass target.detach()")
    return target.to(logits.dtype)


def _as_rows(
    logits: Tensor, reference: Tensor | None, divergence: Alpha
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits and reference as ``[B, k]``, and alpha as a tensor."""
    num_classes = logits.shape[-1]
    rows = logits.reshape(-1, num_classes)
    flat = None if reference is None else reference.reshape(-1, num_classes)
    return rows, flat, divergence.as_tensor()
