"""Handwritten characters of Omniglot."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Experiment, Search, TestProtocol
from qmargin.experiments.named import Size, drawn_recipe, grid_arms, needed
from qmargin.experiments.named.strokes import STROKE_GRID
from qmargin.experiments.worlds import HELD_OUT, Drawn
from qmargin.registry import register_experiment

SIZE = Size(num_classes=6368, epochs=16, batch_size=512, network="stroke_resnet", width=64, depth=2)


@register_experiment("omniglot")
def omniglot(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Handwritten characters of alphabets that no network was trained on."""
    world = Drawn(
        str(needed(data, "omniglot")),
        seed=HELD_OUT,
        samples_test=10,
        turns=True,
        mirrors=True,
        alike=0.9,
        warp=0.6,
        num_variants=SIZE.epochs,
    )
    return Experiment(
        "omniglot",
        drawn_recipe(SIZE, lr=2e-3, dtype="bf16"),
        grid_arms(STROKE_GRID),
        world,
        "Omniglot, evaluation alphabets",
        TestProtocol(views=4, normalise=True),
        Search(measure="tar@0.0001", settings=("run.epochs=4",), finalists=3),
    )
