"""Effect of the number of training identities on verification."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Arm, Experiment
from qmargin.experiments.named import (
    PEOPLE_SIZES,
    VOICE_SIZES,
    Size,
    made_recipe,
)
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment

PEOPLE = (250, 500, 1000, 2000, 4000)
SPEAKERS = (50, 100, 200, 400, 1000)
SOFTMAX = ("loss.margin_kind=cosine", "loss.margin=0", "loss.scale=16")


@register_experiment("people-growth")
def people_growth(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Plain softmax on more and more synthetic people, with the same number of steps."""
    return _growth("people", PEOPLE, PEOPLE_SIZES["cpu"])


@register_experiment("voices-growth")
def voices_growth(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Plain softmax on more and more synthetic speakers, with as many steps or more."""
    return _growth("speakers", SPEAKERS, VOICE_SIZES["cpu"], least_epochs=VOICE_SIZES["cpu"].epochs)


def _growth(
    what: str, numbers: tuple[int, ...], size: Size, *, least_epochs: int = 1
) -> Experiment:
    arms = {
        f"{what}_{number}": Arm(
            f"{number:,} {what}",
            (
                *SOFTMAX,
                f"data.num_classes={number}",
                f"run.epochs={max(least_epochs, size.epochs * size.num_classes // number)}",
            ),
        )
        for number in numbers
    }
    return Experiment(
        f"{size.kind}-growth",
        made_recipe(size, data_seed=0),
        arms,
        Made(num_test=size.num_test, samples_test=size.samples_test),
        f"synthetic {what}, plain softmax, by the number of training identities",
        seeds=(0,),
    )
