"""Spoken digits of AudioMNIST."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import Experiment, Search, TestProtocol
from qmargin.experiments.named import SIZES, Grid, drawn_recipe, grid_arms, needed
from qmargin.experiments.worlds import Stored
from qmargin.recipes import get_recipe
from qmargin.registry import register_experiment
from qmargin.training.recipe import Recipe, flatten

# Of the paper's speaker table, and what suits a few speakers.
_SOFT = tuple((1.0, s, m) for s in (16.0, 32.0) for m in (0.1, 0.2, 0.3))
_SPARSE = (
    *((1.25, 10.0, 0.2), (1.25, 16.0, 0.1), (1.25, 16.0, 0.2)),
    *((1.5, 6.0, 0.2), (1.5, 10.0, 0.1), (1.75, 5.0, 0.1)),
)
SPEECH_GRID: Grid = {
    "arcface": _SOFT,
    "cosface": _SOFT,
    "entmax": _SPARSE,
    "sparsemax": tuple((2.0, s, m) for s in (1.9, 3.0, 5.0) for m in (0.1, 0.2)),
    "q_margin": _SPARSE,
}
SCALED = (  # settings that follow the number of epochs
    "run.epochs",
    "schedule.warmup_epochs",
    "margin_schedule.start_epoch",
    "margin_schedule.end_epoch",
)


def speech_recipe(epochs: int) -> Recipe:
    """The recipe of small collections of recordings, its schedules in proportion, with AdamW.

    By SGD at one learning rate, losses of large scales hardly learned while that of the smallest
    did: updates are those of the demo, whose steps do not depend on the scale.
    """
    made, strokes = get_recipe("audiomnist_r34_arcface"), drawn_recipe(SIZES["cpu"])
    share, margins = epochs / made.run.epochs, made.margin_schedule
    assert margins is not None and margins.end_epoch is not None  # the recipe has both
    return replace(
        made,
        data=replace(made.data, num_workers=0),
        optimizer=replace(strokes.optimizer, lr=1e-3),
        head=replace(strokes.head, lr_ratio=1.0),  # few speakers, each with many samples
        schedule=replace(strokes.schedule, warmup_epochs=share * made.schedule.warmup_epochs),
        margin_schedule=replace(
            margins, start_epoch=share * margins.start_epoch, end_epoch=share * margins.end_epoch
        ),
        run=replace(made.run, epochs=epochs),
    )


@register_experiment("audiomnist")
def audiomnist(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Spoken digits of speakers that no network was trained on, by a list of trials."""
    path, short = needed(data, "audiomnist"), flatten(speech_recipe(12))
    return Experiment(
        "audiomnist",
        speech_recipe(40),
        grid_arms(SPEECH_GRID),
        Stored(str(path / "train"), str(path / "test"), 0.25, str(path / "trials.txt")),
        "AudioMNIST, 20 speakers",
        TestProtocol("trials", fars=(1e-2, 1e-3, 1e-4)),
        Search(measure="tar@0.01", settings=tuple(f"{key}={short[key]}" for key in SCALED)),
    )
