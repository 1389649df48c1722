"""The losses of the demo and their settings."""

from __future__ import annotations

from typing import Literal, NamedTuple


class DemoLoss(NamedTuple):
    """A loss by its parts; ``key`` names it on the command line and in folders."""

    key: str
    title: str
    alpha: float
    margin_kind: Literal["prior", "cosine", "angular"]
    scale: float
    margin: float


LOSSES = {
    loss.key: loss
    for loss in (
        DemoLoss("arcface", "ArcFace", 1.0, "angular", scale=16.0, margin=0.2),
        DemoLoss("cosface", "CosFace", 1.0, "cosine", scale=16.0, margin=0.2),
        DemoLoss("entmax", "EntMax", 1.25, "angular", scale=16.0, margin=0.2),
        DemoLoss("sparsemax", "SparseMax", 2.0, "angular", scale=4.0, margin=0.2),
        DemoLoss("q_margin", "Q-Margin", 1.25, "prior", scale=16.0, margin=0.1),
    )
}
# alpha, scale and margin: six of each, and two more around the best of the six
GRID: dict[str, tuple[tuple[float, float, float], ...]] = {
    "arcface": (
        *((1.0, s, m) for s in (10.0, 16.0, 32.0) for m in (0.1, 0.2)),
        (1.0, 12.0, 0.1),
        (1.0, 16.0, 0.05),
    ),
    "cosface": (
        *((1.0, s, m) for s in (10.0, 16.0, 32.0) for m in (0.1, 0.2)),
        (1.0, 12.0, 0.3),
        (1.0, 16.0, 0.3),
    ),
    "entmax": (
        *((1.25, s, m) for s in (10.0, 16.0) for m in (0.1, 0.2)),
        (1.5, 6.0, 0.2),
        (1.5, 10.0, 0.1),
        (1.25, 7.0, 0.1),
        (1.25, 10.0, 0.05),
    ),
    "sparsemax": (
        *((2.0, s, m) for s in (2.0, 4.0, 8.0) for m in (0.1, 0.2)),
        (2.0, 1.0, 0.1),
        (2.0, 1.4, 0.1),
    ),
    "q_margin": (
        *((1.25, s, m) for s in (10.0, 16.0) for m in (0.1, 0.2)),
        (1.5, 6.0, 0.2),
        (1.5, 10.0, 0.1),
        (1.25, 7.0, 0.3),
        (1.25, 10.0, 0.3),
    ),
}
