"""Every recipe with a name builds, is described and survives its file."""

import pytest

from qmargin.recipes import get_recipe, list_recipes
from qmargin.recipes.face import FACE_RECIPES
from qmargin.recipes.speaker import SPEAKER_RECIPES
from qmargin.training.build import build_backbone, build_head
from qmargin.training.recipe_files import from_yaml, to_yaml


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")  # rows of the paper beyond 2
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_builds_without_memory_and_survives_its_file(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert from_yaml(to_yaml(recipe)) == recipe
    assert next(build_backbone(recipe, device="meta").parameters()).is_meta
    num_classes = recipe.data.num_classes or 1000
    assert build_head(recipe, num_classes=num_classes, device="meta").prototypes.is_meta


def test_every_recipe_has_a_line_and_says_if_it_is_untried() -> None:
    for name, description in list_recipes().items():
        assert description.endswith(".") and len(description) < 90, name
    for name, builder in {**FACE_RECIPES, **SPEAKER_RECIPES}.items():
        assert name in list_recipes() and "Not run end to end" in (builder.__doc__ or ""), name
