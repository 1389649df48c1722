"""What arithmetic costs in accuracy: a plain bisection on tau next to ours, against 60 digits.

It needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import qmargin

NUM_CLASSES = 2_059_906  # identities of WebFace42M


class Row(NamedTuple):
    """One row of logits, in float32."""

    name: str
    alpha: float
    logits: Tensor  # [k]
    log_reference: Tensor  # [k]


def rows() -> list[Row]:
    """Three rows that are hard for three different reasons."""
    zeros = torch.zeros(NUM_CLASSES)
    return [
        Row("2,059,906 equal logits", 2.0, torch.full((NUM_CLASSES,), 9.6), zeros),
        Row(
            "one class just inside the edge", 3.0, torch.tensor([20.1, 19.95, 19.888752]), zeros[:3]
        ),
        Row("target with q = e^-200", 1.01, torch.tensor([639.22, 0.0]), torch.tensor([-200.0, 0])),
    ]


def plain(row: Row, dtype: torch.dtype) -> Tensor:
    """Posterior by the textbook: bisection on tau between the bounds of the largest logit."""
    b, logits, q = row.alpha - 1.0, row.logits.to(dtype), row.log_reference.to(dtype).exp()
    top = logits.argmax()
    low, high = logits[top] - (q[top] ** -b - 1.0) / b, logits[top] - (q.sum() ** -b - 1.0) / b
    for _ in range(100):
        tau = (low + high) / 2.0
        posterior = q * (1.0 + b * (logits - tau)).clamp_min(0.0) ** (1.0 / b)
        low, high = (tau, high) if posterior.sum() > 1.0 else (low, tau)
    return posterior


def ours(row: Row, dtype: torch.dtype) -> Tensor:
    """Posterior by the library."""
    logits, log_reference = row.logits.to(dtype), row.log_reference.to(dtype)
    return qmargin.softargmax(logits, alpha=row.alpha, log_reference=log_reference)


def truth(row: Row) -> Tensor:
    """Posterior to 60 digits; equal logits share the mass."""
    import mpmath  # type: ignore[import-untyped]

    if len(row.logits) == NUM_CLASSES:
        return torch.full((NUM_CLASSES,), 1.0 / NUM_CLASSES, dtype=torch.float64)
    with mpmath.workdps(60):
        b = mpmath.mpf(row.alpha) - 1
        logits = [mpmath.mpf(value) for value in row.logits.tolist()]
        q = [mpmath.exp(value) for value in row.log_reference.tolist()]
        low, high = -mpmath.mpf(1000), max(logits)
        high += 1000
        for _ in range(220):
            tau = (low + high) / 2
            terms = zip(logits, q, strict=True)
            posterior = [weight * max(1 + b * (t - tau), 0) ** (1 / b) for t, weight in terms]
            low, high = (tau, high) if mpmath.fsum(posterior) > 1 else (low, tau)
        return torch.tensor([float(value) for value in posterior], dtype=torch.float64)


def textbook_loss(row: Row, target: int) -> float:
    """``softmax_f + D_f(y:q) - theta_y`` with every sum in float32, given the right posterior."""
    alpha, logits = row.alpha, row.logits
    posterior = ours(row, torch.float32)
    label = torch.zeros_like(logits)
    label[target] = 1.0

    def divergence(p: Tensor) -> Tensor:  # sum of q f(p / q), with q = 1
        return ((p**alpha - 1.0 - alpha * (p - 1.0)) / (alpha * (alpha - 1.0))).sum()

    softmax = (posterior * logits).sum() - divergence(posterior)
    return float(softmax + divergence(label) - logits[target])


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``precision`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "precision",
        help="what arithmetic costs in accuracy: a plain bisection beside ours",
        description="Compare posteriors and losses of rows with up to two million classes with 60 "
        "digits; it takes half a minute.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print both tables."""
    methods: list[tuple[str, Callable[[Row, torch.dtype], Tensor], torch.dtype]] = [
        ("plain, float32", plain, torch.float32),
        ("plain, float64", plain, torch.float64),
        ("ours, float32", ours, torch.float32),
        ("ours, float64", ours, torch.float64),
    ]
    lines = ["| row | alpha | method | mass error | largest error of p |", "|---|---|---|---|---|"]
    for row in rows():
        exact = truth(row)
        for name, method, dtype in methods:
            posterior = method(row, dtype).double()
            mass_error = float((posterior.sum() - 1.0).abs())
            error = float((posterior - exact).abs().max())
            lines.append(
                f"| {row.name} | {row.alpha:g} | {name} | {mass_error:.1e} | {error:.1e} |"
            )
    generator = torch.Generator().manual_seed(0)
    logits = 35.0 * torch.randn(NUM_CLASSES, generator=generator) / 512**0.5  # random cosines
    logits[0] = 35.0 * 0.2
    row = Row("random cosines", 1.25, logits, torch.zeros(NUM_CLASSES))
    label = torch.tensor(0)
    lines += ["", "| loss of 2,059,906 random cosines, alpha 1.25 | value |", "|---|---|"]
    own = qmargin.fenchel_young_loss(logits, label, alpha=1.25)
    exact_loss = qmargin.fenchel_young_loss(logits.double(), label, alpha=1.25)
    lines.append(f"| textbook form, float32 | {textbook_loss(row, 0):.7g} |")
    lines.append(f"| ours, float32 | {float(own):.7g} |")
    lines.append(f"| ours, float64 | {float(exact_loss):.12g} |")
    sys.stdout.write("\n".join(lines) + "\n")
