"""Small sweeps: a recipe of few steps, and few identities to validate on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.runs import tiny_recipe
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.sweep.axes import parse_axis
from qmargin.sweep.run import SweepOptions
from qmargin.sweep.validation import TrialData
from qmargin.training.recipe import Recipe


def few_identities(recipe: Recipe) -> TrialData:
    """Validation data of a trial: 17,400 impostor pairs."""
    seed = recipe.seed + 1000
    return TrialData(SyntheticIdentities(30, 6, shape=(32,), augmentation=0.0, seed=seed))


def small_sweep(
    out: Path, *axes: str, settings: tuple[str, ...] = (), **options: Any
) -> SweepOptions:
    """Options of a sweep over the debug recipe, a few steps each."""
    given = {"devices": ("cpu",), "data": few_identities, "say": lambda text: None, **options}
    return SweepOptions(
        recipe=tiny_recipe("run.max_steps=6", "run.save_every_steps=3", *settings),
        axes=tuple(parse_axis(text) for text in axes),
        out=out,
        **given,
    )
