"""Rows worth testing: the grid that the project's numbers are promised on."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from helpers.definition import AlphaGenerator, Solution, exact
from helpers.extended import ExtendedSolution, extended, extended_float

ALPHAS = (0.5, 1.0, 1 + 1e-6, 1.01, 1.25, 1.5, 1.75, 2.0, 3.0)
LOGIT_SCALES = (1e-3, 1e-1, 1.0, 10.0, 1e2, 1e4)
NUM_IDENTITIES = 2_059_906  # WebFace42M
# Long double must be wider than double to judge float64 results; some platforms have none.
EXTENDED_IS_WIDER = float(np.finfo(extended_float).eps) < 1e-18


@dataclass(frozen=True)
class Rows:
    """A batch and the name of what each row is about."""

    logits: Tensor  # [R, k]
    log_reference: Tensor  # [R, k]
    labels: Tensor  # [R]
    names: list[str]


def truth_of(alpha: float, logits: Tensor, log_reference: Tensor) -> ExtendedSolution | Solution:
    """One row ``[k]`` by the cheapest arithmetic that is good to 1e-15."""
    if EXTENDED_IS_WIDER:
        with suppress(ArithmeticError):  # it says so when it is not good enough
            return extended(alpha, logits, log_reference)
    return exact(AlphaGenerator(alpha), logits, log_reference)


def target_log_references(alpha: float) -> list[float]:
    """``log q_y`` from 0 to -200, as far as ``-log q_y (alpha - 1) <= 64``."""
    limit = 64.0 / (alpha - 1.0) if alpha > 1 else math.inf
    return sorted({-min(value, limit) for value in (0.0, 1.0, 7.0, 32.0, 100.0, 200.0)})


def effective_gap(alpha: float, log_reference: float) -> float:
    """``f'(1 / q_y)``: what a reference measure ``q_y`` adds to the lead a target needs (M12)."""
    b = alpha - 1.0
    return -log_reference if b == 0.0 else math.expm1(-b * log_reference) / b


def satisfying_gap(alpha: float, log_reference: float) -> float:
    """The lead over the other logits from which the loss is zero; infinite for alpha <= 1."""
    return effective_gap(alpha, log_reference) - AlphaGenerator(alpha).edge


def _reference_row(num_classes: int, label: int, log_reference: float) -> np.ndarray:
    row = np.zeros(num_classes)
    row[label] = log_reference
    return row


def _gaps(alpha: float, log_q: float) -> dict[str, float]:
    """Leads of the target over the rest, from an unmet margin to one met exactly or exceeded."""
    effective, full = effective_gap(alpha, log_q), satisfying_gap(alpha, log_q)
    gaps = {f"{part:g} of m_eff": part * effective for part in (0.3, 0.9, 1.0)}
    for part in (0.3, 0.9, 0.999, 1.01):
        gaps[f"{part:g} beyond m_eff"] = effective + part * (full - effective)
    return {name: gap for name, gap in gaps.items() if gap <= 5e4}


@lru_cache(maxsize=16)
def grid_rows(
    alpha: float, scale: float, *, num_classes: int = 50, dtype: torch.dtype = torch.float32
) -> Rows:
    """Random rows, ties, equal logits and lowered targets, at one alpha and one logit scale."""
    rng = np.random.default_rng([round(1e6 * alpha), round(1e3 * scale), num_classes])
    rows: list[tuple[str, np.ndarray, np.ndarray, int]] = []
    zeros = np.zeros(num_classes)

    def random() -> np.ndarray:
        return scale * rng.standard_normal(num_classes)

    base = random()
    rows.append(("random, target last", base, zeros, int(base.argmin())))
    rows.append(("random, target first", base, zeros, int(base.argmax())))
    tied = np.sort(random())
    tied[-7:] = tied[-1]
    tied[:9] = tied[0]
    rows.append(("ties at both ends", tied, zeros, num_classes - 1))
    rows.append(("two values", np.where(np.arange(num_classes) % 2, scale, -scale), zeros, 0))
    rows.append(("all equal", np.full(num_classes, scale), zeros, 3))
    rows.append(("any reference", random(), -20.0 * rng.random(num_classes), 5))
    for log_q in target_log_references(alpha):
        label = int(rng.integers(num_classes))
        reference = _reference_row(num_classes, label, log_q)
        rows.append((f"log q_y {log_q:g}", random(), reference, label))
        first = random()
        first[label] = first.max() + scale
        rows.append((f"log q_y {log_q:g}, target first", first, reference, label))
        for name, gap in _gaps(alpha, log_q).items():
            lifted = random()
            lifted[label] = -np.inf
            lifted[label] = lifted.max() + gap
            rows.append((f"log q_y {log_q:g}, gap {name}", lifted, reference, label))
    return Rows(
        torch.from_numpy(np.stack([row[1] for row in rows])).to(dtype),
        torch.from_numpy(np.stack([row[2] for row in rows])).to(dtype),
        torch.tensor([row[3] for row in rows]),
        [row[0] for row in rows],
    )


@lru_cache(maxsize=16)
def grid_truth(
    alpha: float, scale: float, *, num_classes: int = 50, dtype: torch.dtype = torch.float32
) -> list[ExtendedSolution | Solution]:
    """The truth for each row of ``grid_rows``."""
    rows = grid_rows(alpha, scale, num_classes=num_classes, dtype=dtype)
    return [
        truth_of(alpha, logits, log_reference)
        for logits, log_reference in zip(rows.logits, rows.log_reference, strict=True)
    ]


def random_cosines(rows: int, num_classes: int, *, seed: int, dim: int = 512) -> Tensor:
    """Cosines between random directions: normal with deviation ``1 / sqrt(dim)``, float32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, num_classes, generator=generator) / math.sqrt(dim)).clamp(-1, 1)


def cosine_batch(rows: int, num_classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random cosines and labels, the targets' cosines spread over [-0.2, 0.9]."""
    cosines = random_cosines(rows, num_classes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    lifted = torch.linspace(-0.2, 0.9, rows)
    return cosines.scatter(1, labels[:, None], lifted[:, None]), labels


def spread_cosines(rows: int = 5, num_classes: int = 12) -> tuple[Tensor, Tensor]:
    """A small batch whose cosines fill most of [-1, 1]."""
    cosines, labels = cosine_batch(rows, num_classes, seed=8)
    return (4 * cosines).clamp(-1, 1), labels
