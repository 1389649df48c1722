"""Runs for a laptop: a folder per identity, a small network, minutes on a CPU.

AdamW with a larger rate for the prototypes, as in the demo: the learning rate needs no tuning for a
few hundred steps. The scales are far smaller than for millions of identities: with few classes, the
paper's scales weigh only the nearest one or two classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmargin.registry import register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import HeadPart, OptimizerPart, Recipe

LR_RATIO = 20.0  # of prototypes to network, as in the demo


@register_recipe("faces_tiny")
def faces_tiny() -> Recipe:
    """Your folder of face pictures: a small network, minutes on a CPU.

    For about 100 to 1,000 people with at least 5 pictures each, which are scaled to 64 x 64.
    """
    from qmargin.training import recipe  # listing recipes does not import torch

    return recipe.Recipe(
        name="faces_tiny",
        data=recipe.DataPart(
            "images",
            batch_size=64,
            path="faces/train",
            options={"size": 64, "photometric": 0.2, "low_resolution": 0.2},
        ),
        model=recipe.ModelPart(
            "stroke_net",
            embedding_dim=128,
            options={"in_channels": 3, "width": 16, "depth": 1, "batch_norm": True},
        ),
        loss=recipe.LossPart.from_preset("q_margin", alpha=1.25, scale=12.0, margin=0.3),
        optimizer=_adamw(5e-3),
        head=_head(),
        schedule=recipe.SchedulePart("cosine", warmup_epochs=0.5),
        precision=recipe.PrecisionPart(channels_last=True),
        run=recipe.RunPart(epochs=20, save_every_steps=200, keep=1, log_every=20),
    )


@register_recipe("speakers_tiny")
def speakers_tiny() -> Recipe:
    """Your folder of recordings: a small network, minutes on a CPU.

    For about 50 to 500 speakers with at least 5 recordings each; a step uses 2 seconds of each.
    """
    from qmargin.training import recipe  # listing recipes does not import torch

    return recipe.Recipe(
        name="speakers_tiny",
        data=recipe.DataPart(
            "audio",
            batch_size=32,
            path="speakers/train",
            options={"num_frames": 200, "in_memory": True},
        ),
        model=recipe.ModelPart(
            "ecapa512",
            embedding_dim=128,
            options={"width": 96, "mixed": 288, "has_context": False},
        ),
        loss=recipe.LossPart.from_preset("q_margin", alpha=1.25, scale=10.0, margin=0.2),
        optimizer=_adamw(2e-3),
        head=_head(),
        schedule=recipe.SchedulePart("cosine", warmup_epochs=0.5),
        run=recipe.RunPart(epochs=30, save_every_steps=200, keep=1, log_every=20),
    )


def _adamw(lr: float) -> OptimizerPart:
    from qmargin.training.recipe import OptimizerPart

    return OptimizerPart(
        lr=lr, kind="adamw", weight_decay=0.05, beta2=0.99, epsilon=1e-12, decay_norms=False
    )


def _head() -> HeadPart:
    from qmargin.training.recipe import HeadPart

    return HeadPart(update="torch", lr_ratio=LR_RATIO)
