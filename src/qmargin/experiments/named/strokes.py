"""Synthetic stroke identities, as many as a GPU can train on."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Experiment, Search, TestProtocol
from qmargin.experiments.named import SIZES, Grid, Size, drawn_recipe, grid_arms
from qmargin.experiments.named.design import (
    PRIMARY,
    REPLICATES,
    SEEDS,
    study_arms,
    study_recipe,
    study_search,
)
from qmargin.experiments.named.people import TESTED
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment

# Where a run takes minutes: a hardness of 1.6, 2 and 2.5 for a million classes.
MILLION_GRID: Grid = {
    "arcface": tuple((1.0, s, 0.1) for s in (13.0, 16.0, 20.0)),
    "cosface": tuple((1.0, s, 0.3) for s in (13.0, 16.0, 20.0)),
    "entmax": tuple((1.25, s, 0.1) for s in (0.54, 0.8, 1.3)),
    "sparsemax": tuple((2.0, s, 0.1) for s in (4.5e-5, 1.2e-4, 5.3e-4)),
    "q_margin": tuple((1.25, s, 0.4) for s in (0.54, 0.8, 1.3)),
}
MILLION = Size(
    num_classes=1_000_000,
    samples_per_class=2,
    epochs=2,
    batch_size=4096,
    width=32,
    embedding_dim=64,
    batch_norm=True,
)


@register_experiment("strokes-10k")
def strokes_10k(device: str = "cuda", data: Path | None = None) -> Experiment:
    """10,000 synthetic stroke identities, settings chosen by each loss."""
    recipe = study_recipe(drawn_recipe(SIZES["cuda"]._replace(epochs=8), dtype="bf16", data_seed=0))
    return Experiment(
        "strokes-10k",
        recipe,
        study_arms(recipe),
        TESTED,
        "synthetic stroke identities, 10,000 classes",
        TestProtocol(normalise=True, num_replicates=REPLICATES),
        study_search("run.epochs=2"),
        seeds=SEEDS,
        primary=PRIMARY,
        question="Does Q-Margin tell scribbles, which have no families, apart better than CosFace?",
        expected="No difference between Q-Margin and CosFace is shown: there are no look-alikes.",
    )


@register_experiment("strokes-1m")
def strokes_1m(device: str = "cuda", data: Path | None = None) -> Experiment:
    """1,000,000 synthetic stroke identities of two samples each."""
    return Experiment(
        "strokes-1m",
        drawn_recipe(MILLION, dtype="bf16", data_seed=0),
        grid_arms(MILLION_GRID),
        Made(500, 10, 1000, 10),
        "synthetic stroke identities, 1,000,000 classes",
        TestProtocol(normalise=True),
        Search(measure="tar@0.0001", settings=("run.epochs=1",)),
    )
