"""Handwritten characters of Omniglot."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Experiment, TestProtocol
from qmargin.experiments.named import Size, drawn_recipe, needed
from qmargin.experiments.named.design import (
    PRIMARY,
    REPLICATES,
    SEEDS,
    study_arms,
    study_recipe,
    study_search,
)
from qmargin.experiments.worlds import HELD_OUT, Drawn
from qmargin.registry import register_experiment

SIZE = Size(num_classes=6368, epochs=12, batch_size=512, network="stroke_resnet", width=64, depth=2)

DISTINCT = 0.5  # two characters count as alike if they correlate like halves of a typical one


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
        distinct=DISTINCT,
    )
    recipe = study_recipe(drawn_recipe(SIZE, lr=2e-3, dtype="bf16"))
    return Experiment(
        "omniglot",
        recipe,
        study_arms(recipe),
        world,
        "Omniglot, evaluation alphabets",
        TestProtocol(views=4, normalise=True, num_replicates=REPLICATES),
        study_search("run.epochs=3"),
        seeds=SEEDS,
        primary=PRIMARY,
        question=(
            "Does Q-Margin verify handwritten characters of other alphabets better than CosFace, "
            "once those that cannot be told apart by their pixels are left out?"
        ),
        expected="No difference between Q-Margin and CosFace is shown: training is short.",
    )
