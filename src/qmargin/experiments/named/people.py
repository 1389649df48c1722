"""Synthetic people: how the number of training identities changes what a network tells apart."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Arm, Experiment
from qmargin.experiments.named import PEOPLE_SIZES, drawn_recipe
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment

NUMBERS = (250, 500, 1000, 2000, 4000)  # of training identities


@register_experiment("people-growth")
def people_growth(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Plain softmax on more and more synthetic people, with the same number of steps."""
    size = PEOPLE_SIZES["cpu"]
    softmax = ("loss.margin_kind=cosine", "loss.margin=0", "loss.scale=16")
    arms = {
        f"people_{number}": Arm(
            f"{number:,} people",
            (
                *softmax,
                f"data.num_classes={number}",
                f"run.epochs={size.epochs * size.num_classes // number}",
            ),
        )
        for number in NUMBERS
    }
    return Experiment(
        "people-growth",
        drawn_recipe(size, data_seed=0),
        arms,
        Made(num_test=500, samples_test=10),
        "synthetic people, plain softmax, by the number of training identities",
        seeds=(0,),
    )
