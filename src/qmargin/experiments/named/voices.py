"""Synthetic voices: the comparison of losses on speakers."""

from __future__ import annotations

from pathlib import Path

from qmargin.experiments.experiment import Experiment, TestProtocol
from qmargin.experiments.named import VOICE_SIZES, voice_recipe
from qmargin.experiments.named.design import (
    PRIMARY,
    REPLICATES,
    SEEDS,
    study_arms,
    study_recipe,
    study_search,
)
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment


@register_experiment("voices")
def voices(device: str = "cuda", data: Path | None = None) -> Experiment:
    """2,000 synthetic speakers of 12 utterances, settings chosen by each loss."""
    recipe = study_recipe(voice_recipe(VOICE_SIZES["cuda"]._replace(epochs=12), data_seed=0))
    return Experiment(
        "voices",
        recipe,
        study_arms(recipe),
        Made(500, 8, 2000, 8),
        "2,000 synthetic speakers",
        TestProtocol(num_replicates=REPLICATES),
        study_search("run.epochs=3"),
        seeds=SEEDS,
        primary=PRIMARY,
        question="Does Q-Margin verify speakers better than CosFace, with thousands of classes?",
        expected="No difference between Q-Margin and CosFace is shown: training is short.",
    )
