"""Posterior, log-partition, loss and threshold as functions: any alpha, any reference measure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.losses import checks
from qmargin.losses.divergences import (
    Alpha,
    Divergence,
    check_divergence,
    generic_log_partition,
    generic_loss,
    solve_generic,
)
from qmargin.losses.operators import lift_target, posterior_of, solution_of, value_of


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
    """The generalised log-sum-exp, ``[...]``; its gradient is ``softargmax``.

    It is ``max_p <p, theta> - D(p:q)`` with ``D(p:q) = sum_j p_j f'(p_j / q_j) / alpha``:
    log-sum-exp at ``alpha = 1``, and the paper's operator for a reference measure that sums to one.
    Otherwise it is the paper's plus ``(sum_j q_j - 1) / alpha``: that constant cancels in every
    loss, and without it the value would drown in float32.

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
    """Fenchel-Young loss of each row, ``[...]``, never negative (M6).

    Args:
        logits: ``[..., k]``.
        target: Integer labels ``[...]``, or distributions ``[..., k]`` whose rows sum to one. A NaN
            in a distribution gives NaN for that row.
        alpha: As for ``softargmax``.
        log_reference: As for ``softargmax``.
        divergence: As for ``softargmax``.
        debug: Check the values of the target on every device, at the price of waiting for it; on a
            CPU they are always checked.

    Examples:
        >>> fenchel_young_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), alpha=1.0)
        tensor([0.3133])
        >>> fenchel_young_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), alpha=1.5)
        tensor([0.])
    """
    divergence = _divergence(alpha, divergence)
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
    """The normaliser ``tau`` of each row, with support size and residual (M2). No gradients.

    It is the alpha-divergence's solver, so it takes no other divergence.

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
