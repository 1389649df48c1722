"""Spoken digits of AudioMNIST."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import Experiment, TestProtocol
from qmargin.experiments.named import SIZES, drawn_recipe, needed
from qmargin.experiments.named.design import (
    PRIMARY,
    REPLICATES,
    SEEDS,
    study_arms,
    study_recipe,
    study_search,
)
from qmargin.experiments.worlds import Stored
from qmargin.recipes import get_recipe
from qmargin.registry import register_experiment
from qmargin.training.recipe import Recipe, flatten

NUM_CLASSES = 120  # 40 speakers at three speeds
SCALED = ("run.epochs", "schedule.warmup_epochs")  # settings that follow the number of epochs


def speech_recipe(epochs: int) -> Recipe:
    """The recipe of small collections of recordings, its schedule in proportion, with AdamW.

    With SGD and a common learning rate, losses with large scales hardly learned while the one with
    the smallest did. The updates of the demo, used here, do not depend on the scale.
    """
    made, strokes = get_recipe("audiomnist_r34_arcface"), drawn_recipe(SIZES["cpu"])
    share = epochs / made.run.epochs
    return replace(
        made,
        data=replace(made.data, num_workers=0, num_classes=NUM_CLASSES),
        optimizer=replace(strokes.optimizer, lr=1e-3),
        head=replace(strokes.head, lr_ratio=1.0),  # few speakers, each with many samples
        schedule=replace(strokes.schedule, warmup_epochs=share * made.schedule.warmup_epochs),
        margin_schedule=None,  # margins that follow norms have none
        run=replace(made.run, epochs=epochs),
    )


@register_experiment("audiomnist")
def audiomnist(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Spoken digits of speakers that no network was trained on, by a list of trials."""
    path, short = needed(data, "audiomnist"), flatten(speech_recipe(8))
    recipe = study_recipe(speech_recipe(30))
    return Experiment(
        "audiomnist",
        recipe,
        study_arms(recipe),
        Stored(str(path / "train"), str(path / "test"), 0.25, str(path / "trials.txt")),
        "AudioMNIST, 20 speakers",
        TestProtocol("trials", fars=(1e-2, 1e-3, 1e-4), num_replicates=REPLICATES),
        study_search(*(f"{key}={short[key]}" for key in SCALED), measure="tar@0.01"),
        seeds=SEEDS,
        primary=PRIMARY,
        question="Does Q-Margin verify a handful of real speakers better than CosFace?",
        expected="No difference between Q-Margin and CosFace is shown: 120 classes are few.",
    )
