"""The paper's formulas, word for word, in arithmetic that cannot hide an error.

Nothing here imports the package: this file is the truth that the package is measured against.
``theta`` are logits, ``q`` is the reference measure, ``f`` generates the divergence:

* ``softmax_f(theta) = max over p in the simplex of <p, theta> - D_f(p : q)``
* ``D_f(p : q) = sum_j q_j f(p_j / q_j)``
* ``loss(theta, y) = softmax_f(theta) + D_f(y : q) - <theta, y>``
* the maximiser is ``p_j = q_j (f')^-1(max(theta_j - tau, f'(0)))`` with ``sum_j p_j = 1``

``exact`` solves a row in 80 digits, on distinct pairs of logit and log reference with their
multiplicities, so that two million equal logits cost one. Inputs are taken as the exact binary
values they are. ``extended.py`` does the same in long double, for rows with many active classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mpmath
import numpy as np

DIGITS = 80
mp = mpmath.MPContext()
mp.dps = DIGITS


class Generator(Protocol):
    """The convex function ``f`` of an f-divergence, on 80-digit numbers."""

    def f(self, u: Any) -> Any: ...
    def f_prime(self, u: Any) -> Any: ...
    def f_second(self, u: Any) -> Any: ...
    def f_prime_inverse(self, v: Any) -> Any: ...
    @property
    def edge(self) -> float: ...


@dataclass(frozen=True)
class AlphaGenerator:
    """``f(u) = (u^alpha - 1 - alpha (u - 1)) / (alpha (alpha - 1))``, and its limit at 1."""

    alpha: float

    @property
    def b(self) -> Any:
        return mp.mpf(self.alpha) - 1

    @property
    def edge(self) -> float:
        """``f'(0)``."""
        return -1.0 / (self.alpha - 1.0) if self.alpha > 1 else -np.inf

    def f(self, u: Any) -> Any:
        if self.alpha == 1:
            return (u * mp.log(u) if u > 0 else mp.zero) - (u - 1)
        a = mp.mpf(self.alpha)
        return ((u**a - 1) - a * (u - 1)) / (a * (a - 1))

    def f_prime(self, u: Any) -> Any:
        return mp.log(u) if self.alpha == 1 else (u**self.b - 1) / self.b

    def f_second(self, u: Any) -> Any:
        return u ** (self.b - 1)

    def f_prime_inverse(self, v: Any) -> Any:
        """``[1 + (alpha - 1) v]_+ ^ (1 / (alpha - 1))``, and ``exp`` at 1."""
        if self.alpha == 1:
            return mp.exp(v)
        base = 1 + self.b * v
        if base <= 0:
            return mp.zero if self.alpha > 1 else mp.inf
        return base ** (1 / self.b)


@dataclass(frozen=True)
class JensenShannonGenerator:
    """``f(u) = u ln u - (u + 1) ln((u + 1) / 2)``."""

    edge: float = -np.inf

    def f(self, u: Any) -> Any:
        return (u * mp.log(u) if u > 0 else mp.zero) - (u + 1) * mp.log((u + 1) / 2)

    def f_prime(self, u: Any) -> Any:
        return mp.log(2 * u / (u + 1))

    def f_second(self, u: Any) -> Any:
        return 1 / (u * (u + 1))

    def f_prime_inverse(self, v: Any) -> Any:
        return mp.exp(v) / (2 - mp.exp(v)) if v < mp.log(2) else mp.inf


def bracketed_root(function: Callable[[Any], Any], low: Any, high: Any, tiny: Any) -> Any:
    """Root of a decreasing function, by bisection; secant points are tried inside the bracket.

    Every point is judged by the sign of the function alone, so that a bad secant costs a step and
    never the answer. Works on any number type.
    """
    at_low, at_high = function(low), function(high)
    if at_low <= 0:
        return low
    if at_high >= 0:
        return high
    side, checkpoint = 0, high - low
    for step in range(1, 3000):
        width = high - low
        if width <= tiny * (abs(low) + abs(high)):
            break
        drop = at_low - at_high
        middle = low + width * (at_low / drop if drop < 1e300 else 0.5)
        if step % 4 == 0:
            stuck, checkpoint = width > checkpoint / 8, width
            middle = low + width / 2 if stuck else middle
        if not low < middle < high:
            middle = low + width / 2
            if not low < middle < high:  # neighbouring numbers
                break
        value = function(middle)
        if abs(value) <= tiny / 10**4:  # below the noise of the function itself
            return middle
        if value > 0:  # Illinois: an end that stays twice counts half
            at_high = at_high / 2 if side > 0 else at_high
            low, at_low, side = middle, value, 1
        else:
            at_low = at_low / 2 if side < 0 else at_low
            high, at_high, side = middle, value, -1
    return (low + high) / 2


@dataclass(frozen=True)
class Solution:
    """The maximiser of one row, from which everything else follows."""

    generator: Generator
    tau: Any
    theta: Callable[[int], Any]  # exact logit of a class
    log_q: Callable[[int], Any]
    posteriors: Sequence[Any]  # one per group of equal classes
    thetas: Sequence[Any]
    log_qs: Sequence[Any]
    counts: Sequence[int]
    groups: np.ndarray  # [k], class -> group; -1 where the posterior is zero, -2 where masked
    total_q: Any  # sum of q over all classes that are not masked

    @cached_property
    def posterior(self) -> np.ndarray:
        """``[k]``, float64."""
        values = np.array([float(p) for p in self.posteriors] + [0.0, 0.0])
        return values[self.groups]

    @cached_property
    def support_size(self) -> int:
        return sum(c for p, c in zip(self.posteriors, self.counts, strict=True) if p > 0)

    @cached_property
    def slope(self) -> float:
        """``- d mass / d tau``."""
        terms = zip(self.posteriors, self.log_qs, self.counts, strict=True)
        second = self.generator.f_second
        return float(mp.fsum(c * mp.exp(q) / second(p * mp.exp(-q)) for p, q, c in terms if p > 0))

    @cached_property
    def mass(self) -> Any:
        return mp.fsum(c * p for p, c in zip(self.posteriors, self.counts, strict=True))

    def divergence(self, terms: Sequence[tuple[Any, Any, int]]) -> Any:
        """``D_f(p : q)`` from (p, log q, count) of the classes with ``p > 0``, zeros added here."""
        value, q_left = mp.zero, self.total_q
        for p, log_q, count in terms:
            q = mp.exp(log_q)
            value += count * q * self.generator.f(p / q)
            q_left -= count * q
        return value + q_left * self.generator.f(mp.zero)

    @cached_property
    def softmax_f(self) -> Any:
        """The paper's log-partition: the value of the maximum."""
        terms = list(zip(self.posteriors, self.log_qs, self.counts, strict=True))
        inner = mp.fsum(
            c * p * t for p, t, c in zip(self.posteriors, self.thetas, self.counts, strict=True)
        )
        return inner - self.divergence(terms)

    @property
    def log_partition(self) -> Any:
        """``softmax_f + (sum q - 1) / alpha``: logsumexp of ``theta + log q`` at alpha = 1."""
        assert isinstance(self.generator, AlphaGenerator)
        return self.softmax_f + (self.total_q - 1) / mp.mpf(self.generator.alpha)

    def loss(self, label: int) -> Any:
        """``softmax_f + D_f(e_y : q) - theta_y``."""
        if self.groups[label] == -2:
            return mp.inf
        target_cost = self.divergence([(mp.one, self.log_q(label), 1)])
        return self.softmax_f + target_cost - self.theta(label)

    def distribution_loss(self, target: np.ndarray) -> Any:
        """``softmax_f + D_f(y : q) - <theta, y>`` for a distribution ``y`` of shape ``[k]``."""
        used = [int(j) for j in np.flatnonzero(target)]
        if any(self.groups[j] == -2 for j in used):
            return mp.inf
        terms = [(mp.mpf(float(target[j])), self.log_q(j), 1) for j in used]
        inner = mp.fsum(mp.mpf(float(target[j])) * self.theta(j) for j in used)
        return self.softmax_f + self.divergence(terms) - inner


def float_array(values: Any) -> np.ndarray:
    """A detached copy in float64, which holds every input dtype we test exactly."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.array(values, dtype=np.float64)


def possibly_active(generator: Generator, logits: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Mask of classes that could be active: ``theta > tau_low + f'(0)`` with slack for rounding."""
    if generator.edge == -np.inf or logits.size == 0:
        return np.ones(logits.shape, dtype=bool)
    assert isinstance(generator, AlphaGenerator)  # the others have no edge
    b = generator.alpha - 1.0
    with np.errstate(over="ignore"):
        lows = logits - np.expm1(-b * log_q) / b  # f'(1 / q) in float64
    best = int(np.argmax(lows))
    slack = 1e-9 * (1 + abs(logits[best]) + abs(lows[best]))
    return np.asarray(logits > lows[best] - slack + generator.edge)


def exact(
    generator: Generator,
    logits: Any,
    log_reference: Any = 0.0,
    *,
    scale: float = 1.0,
    target: tuple[int, Any, Any] | None = None,
) -> Solution:
    """Solve one row ``[k]`` in 80 digits; a logit of -inf marks a class as masked out.

    Logits are multiplied by ``scale``, exactly. ``target`` is (label, logit, log reference) of the
    class that a margin replaces, exact numbers not multiplied by ``scale``.
    """
    values = float_array(logits)
    log_q = np.broadcast_to(float_array(log_reference), values.shape)
    alive = np.isfinite(values) & np.isfinite(log_q)
    if target is not None:
        alive[target[0]] = False  # joins below as a group of its own
    kept = np.flatnonzero(alive)[possibly_active(generator, scale * values[alive], log_q[alive])]
    pairs, inverse = np.unique(values[kept] + 1j * log_q[kept], return_inverse=True)
    groups = np.where(alive, -1, -2)
    groups[kept] = inverse
    thetas = [mp.mpf(scale) * mp.mpf(float(pair.real)) for pair in pairs]
    log_qs = [mp.mpf(float(pair.imag)) for pair in pairs]
    counts = [int(n) for n in np.bincount(inverse, minlength=len(pairs))]
    measures = zip(*np.unique(log_q[alive], return_counts=True), strict=True)
    total_q = mp.fsum(mp.exp(float(measure)) * int(times) for measure, times in measures)
    if target is not None:
        groups[target[0]] = len(thetas)
        thetas.append(mp.mpf(target[1]))
        log_qs.append(mp.mpf(target[2]))
        counts.append(1)
        total_q += mp.exp(mp.mpf(target[2]))

    def theta_of(column: int) -> Any:
        if target is not None and column == target[0]:
            return mp.mpf(target[1])
        return mp.mpf(scale) * mp.mpf(float(values[column]))

    def log_q_of(column: int) -> Any:
        if target is not None and column == target[0]:
            return mp.mpf(target[2])
        return mp.mpf(float(log_q[column]))

    qs = [mp.exp(lq) for lq in log_qs]

    def posteriors_at(tau: Any) -> list[Any]:
        pairs = zip(thetas, qs, strict=True)
        return [q * generator.f_prime_inverse(theta - tau) for theta, q in pairs]

    def log_mass(tau: Any) -> Any:
        mass = mp.fsum(c * p for c, p in zip(counts, posteriors_at(tau), strict=True))
        return mp.log(mass) if mass > 0 else -mp.inf

    # Every p_j <= 1 at the root; at `high` every p_j <= q_j / sum q.
    low = max(t - generator.f_prime(1 / q) for t, q in zip(thetas, qs, strict=True))
    high = max(thetas) - generator.f_prime(1 / total_q)
    tau = bracketed_root(log_mass, low, high, mp.mpf(10) ** (8 - DIGITS))
    found = (posteriors_at(tau), thetas, log_qs, counts, groups, total_q)
    return Solution(generator, tau, theta_of, log_q_of, *found)


def margin_solution(
    alpha: float, cosines: Any, label: int, *, scale: float, kind: str, margin: float, prior=0.0
) -> Solution:
    """One row of a margin loss: ``theta = s c`` exactly, with the target replaced (M9).

    The kind is "prior", "cosine" or "angular"; ``prior`` is a prior margin combined with it.
    """
    values = float_array(cosines)
    s, m, c = mp.mpf(scale), mp.mpf(margin), mp.mpf(float(values[label]))
    logits = {"prior": s * c, "cosine": s * (c - m), "angular": s * mp.cos(mp.acos(c) + m)}
    log_q = -s * mp.mpf(prior) - (s * m if kind == "prior" else 0)
    return exact(AlphaGenerator(alpha), values, scale=scale, target=(label, logits[kind], log_q))
