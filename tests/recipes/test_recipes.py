"""Every recipe with a name builds, is described and survives its file; ``debug`` trains."""

import math
import time

import pytest
import torch

from qmargin.recipes import get_recipe, list_recipes
from qmargin.recipes.face import FACE_RECIPES
from qmargin.recipes.speaker import SPEAKER_RECIPES
from qmargin.training.build import build_backbone, build_dataset, build_head
from qmargin.training.optim import build_optimizers, clip_gradients_
from qmargin.training.recipe_files import from_yaml, to_yaml
from qmargin.training.schedules import learning_rate


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


def test_debug_learns_on_one_rank() -> None:
    """A plain loop over its parts: the loss falls, and unseen samples find their identity."""
    recipe, start = get_recipe("debug"), time.monotonic()
    data = build_dataset(recipe)
    backbone, head = build_backbone(recipe), build_head(recipe)
    optimizers = build_optimizers(recipe, backbone, head)
    read = [data.read(index, seed=0) for index in range(len(data))]
    inputs = torch.stack([sample for sample, _ in read])
    labels = torch.tensor([label for _, label in read])
    batch, losses = recipe.data.batch_size, []
    steps_per_epoch = len(data) // batch
    for step in range(recipe.run.epochs * steps_per_epoch):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(data))
        rows = order[batch * (step % steps_per_epoch) :][:batch]
        optimizers.set_learning_rate(learning_rate(recipe, step, steps_per_epoch))
        optimizers.zero_grad()
        loss = head(backbone(inputs[rows]), labels[rows])
        loss.backward()
        clip_gradients_(optimizers, recipe.optimizer.clip_norm or math.inf)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.2 * sum(losses[:20])
    with torch.no_grad():
        fresh = torch.stack([data.read(index, seed=1)[0] for index in range(0, len(data), 16)])
        found = (backbone(fresh) @ torch.nn.functional.normalize(head.prototypes).T).argmax(1)
    assert float((found == labels[::16]).float().mean()) > 0.9
    assert time.monotonic() - start < 60.0
