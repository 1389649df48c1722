"""The losses of the demo and their settings, by the kind of device."""

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
        DemoLoss("arcface", "ArcFace", 1.0, "angular", scale=24.0, margin=0.2),
        DemoLoss("cosface", "CosFace", 1.0, "cosine", scale=32.0, margin=0.4),
        DemoLoss("entmax", "EntMax", 1.5, "angular", scale=4.0, margin=0.1),
        DemoLoss("sparsemax", "SparseMax", 2.0, "angular", scale=1.9, margin=0.05),
        DemoLoss("q_margin", "Q-Margin", 1.25, "prior", scale=12.0, margin=0.3),
    )
}
# Those that the study `strokes-10k` chose, whose network and classes the demo has on a GPU.
LARGE = {
    key: LOSSES[key]._replace(alpha=alpha, scale=scale, margin=margin)
    for key, (alpha, scale, margin) in {
        "arcface": (1.0, 16.0, 0.05),
        "cosface": (1.0, 23.0, 0.4),
        "entmax": (1.5, 1.6, 0.1),
        "sparsemax": (2.0, 0.4, 0.1),
        "q_margin": (1.25, 4.4, 0.4),
    }.items()
}
BY_DEVICE = {"cpu": LOSSES, "cuda": LARGE}
# Alpha, scale and margin: twelve of each loss, around where it is good and at the paper's settings.
GRID: dict[str, tuple[tuple[float, float, float], ...]] = {
    "arcface": (
        *((1.0, s, m) for s in (12.0, 16.0, 20.0) for m in (0.025, 0.05, 0.1)),
        *((1.0, 24.0, m) for m in (0.1, 0.2)),
        (1.0, 64.0, 0.5),
    ),
    "cosface": (
        (1.0, 16.0, 0.3),
        *((1.0, 24.0, m) for m in (0.2, 0.3, 0.4)),
        *((1.0, 32.0, m) for m in (0.2, 0.3, 0.4, 0.5)),
        *((1.0, 40.0, m) for m in (0.3, 0.4)),
        (1.0, 48.0, 0.4),
        (1.0, 64.0, 0.4),
    ),
    "entmax": (
        *((1.25, s, m) for s in (5.0, 7.0, 10.0) for m in (0.05, 0.1)),
        *((1.5, s, 0.1) for s in (3.0, 4.0, 6.0)),
        (1.5, 4.0, 0.2),
        (1.75, 2.5, 0.1),
        (1.25, 64.0, 0.5),
    ),
    "sparsemax": (
        *((2.0, s, m) for s in (0.5, 0.7, 1.0, 1.4, 1.9) for m in (0.05, 0.1)),
        (2.0, 1.0, 0.2),
        (2.0, 3.0, 0.1),
    ),
    "q_margin": (
        *((1.25, s, 0.3) for s in (8.0, 10.0, 12.0, 16.0)),
        *((1.25, 10.0, m) for m in (0.2, 0.5)),
        (1.25, 12.0, 0.5),
        *((1.5, s, 0.4) for s in (4.0, 6.0, 8.0)),
        (1.75, 4.0, 0.4),
        (1.25, 35.0, 0.2),
    ),
}
