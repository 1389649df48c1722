"""A run that needs no files and no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmargin.registry import register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe


@register_recipe("debug")
def debug() -> Recipe:
    """Synthetic identities and a small network: Q-Margin end to end on a CPU in a minute.

    It has all parts of a large run in small: a warm-up and steps of the learning rate, a head that
    chooses its path, its exact update, checkpoints within the epoch. Samples do not depend on each
    other, so any number of ranks has the same loss curve, up to rounding.
    """
    from qmargin.training import recipe  # listing recipes does not import torch

    return recipe.Recipe(
        name="debug",
        data=recipe.DataPart(
            "synthetic",
            batch_size=64,
            num_classes=200,
            options={"samples_per_class": 16, "shape": (32,), "noise": 0.5},
        ),
        model=recipe.ModelPart("small_mlp", embedding_dim=32, options={"input_dim": 32}),
        loss=recipe.LossPart.from_preset("q_margin"),
        optimizer=recipe.OptimizerPart(lr=0.1, clip_norm=5.0),
        schedule=recipe.SchedulePart("step", warmup_epochs=0.5, milestones=(4, 5)),
        run=recipe.RunPart(epochs=6, save_every_steps=50, log_every=10),
    )
