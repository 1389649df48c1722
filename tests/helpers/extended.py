"""The definition again, vectorised in NumPy long double.

Good to about 1e-16 where it does not refuse; the tests hold it against ``definition.exact``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.definition import AlphaGenerator, bracketed_root, float_array, possibly_active

extended_float = np.longdouble


@dataclass(frozen=True)
class ExtendedSolution:
    """A row solved in long double: enough for float32 results, and for float64 ones to 1e-12."""

    tau: Any
    posterior: np.ndarray
    softmax_f: Any
    support_size: int
    slope: float
    loss: Callable[[int], Any]


def _extended_f(alpha: float, u: np.ndarray) -> np.ndarray:
    a = extended_float(alpha)
    if alpha == 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(u > 0, u * np.log(u), 0) - (u - 1)
    return ((u**a - 1) - a * (u - 1)) / (a * (a - 1))


def extended(
    alpha: float, logits: Any, log_reference: Any = 0.0, *, scale: float = 1.0
) -> ExtendedSolution:
    """Solve one row ``[k]`` in long double; -inf logits are masked out."""
    theta_all = extended_float(scale) * float_array(logits).astype(extended_float)
    log_q_all = np.broadcast_to(float_array(log_reference), theta_all.shape).astype(extended_float)
    alive = np.isfinite(theta_all)
    kept = np.flatnonzero(alive)
    generator = AlphaGenerator(alpha)
    kept = kept[
        possibly_active(generator, theta_all[alive].astype(float), log_q_all[alive].astype(float))
    ]
    total_q = np.exp(log_q_all[alive]).sum()
    log_q = log_q_all[kept]
    tau, log_ratio = _extended_tau(alpha, theta_all[kept], log_q, total_q)
    q, ratio = np.exp(log_q), np.exp(log_ratio)
    p = q * ratio
    if not abs(p.sum() - 1) < 1e4 * np.finfo(extended_float).eps:
        raise ArithmeticError(f"the mass is {p.sum()}: this row needs more digits")
    posterior = np.zeros(theta_all.shape)
    posterior[kept] = p
    f_zero = 1 / extended_float(alpha)
    divergence = (q * (_extended_f(alpha, ratio) - f_zero)).sum() + total_q * f_zero
    softmax_f = (p * theta_all[kept]).sum() - divergence

    def loss(label: int) -> Any:
        q_y = np.exp(log_q_all[label])
        cost = q_y * (_extended_f(alpha, 1 / q_y) - f_zero) + total_q * f_zero
        return softmax_f + cost - theta_all[label]

    active = ratio > 0
    slope = float((q[active] * ratio[active] ** (2 - extended_float(alpha))).sum())
    return ExtendedSolution(tau, posterior, softmax_f, int(active.sum()), slope, loss)


def _extended_tau(
    alpha: float, theta: np.ndarray, log_q: np.ndarray, total_q: Any
) -> tuple[Any, np.ndarray]:
    """``tau`` and ``ln(p / q)``.

    The unknown is ``tau - low``, with ``low`` the bound at which the leading class would hold all
    the mass: ``1 + b (theta_j - low)`` is then ``q^-b + b (theta_j - theta_leader)``, which keeps
    its digits where ``1 + b (theta_j - tau)`` is e^-100.
    """
    b = extended_float(alpha) - 1
    f_prime_q = -log_q if b == 0 else np.expm1(-b * log_q) / b
    f_prime_all = -np.log(total_q) if b == 0 else np.expm1(-b * np.log(total_q)) / b
    leader = int(np.argmax(theta - f_prime_q))
    low = theta[leader] - f_prime_q[leader]
    base = np.exp(-b * log_q[leader]) + b * (theta - theta[leader])

    def log_ratio(above: Any) -> np.ndarray:
        if b == 0:
            return (theta - low) - above
        x = base - b * above
        deviation = b * ((theta - low) - above)
        with np.errstate(divide="ignore", invalid="ignore"):
            # log1p needs x - 1, and keeps the digits that x loses when alpha is close to one
            log_x = np.where(np.abs(deviation) < 0.5, np.log1p(deviation), np.log(x))
            return np.where(x > 0, log_x / b, -extended_float(np.inf) * np.sign(b))

    def log_mass(above: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.log(np.exp(log_q + log_ratio(above)).sum())

    high = (theta.max() - low) - f_prime_all
    tiny = 2 * np.finfo(extended_float).eps * min(1.0, float(high) if high > 0 else 1.0)
    above = bracketed_root(log_mass, 0 * low, high, tiny)
    return low + above, log_ratio(above)
