"""A recipe: the built-in one named debug, shorter and with the backbone of this package."""

from dataclasses import replace

from qmargin.recipes import get_recipe
from qmargin.training.recipe import ModelPart, Recipe


def example_recipe() -> Recipe:
    """Synthetic identities and a linear network, for a few steps."""
    debug = get_recipe("debug")
    return replace(
        debug,
        name="example-recipe",
        model=ModelPart("example-net", embedding_dim=16, options={"input_dim": 32}),
        run=replace(debug.run, max_steps=4, log_every=2),
    )
