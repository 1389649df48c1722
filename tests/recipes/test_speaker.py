"""Speaker recipes: the paper's table to the letter, WeSpeaker's schedules, buildable networks."""

import inspect

import pytest

from qmargin.data.speech import open_speech
from qmargin.recipes import get_recipe
from qmargin.recipes.speaker import COMPARED, SPEAKER_RECIPES, TABLE
from qmargin.schema import check_options
from qmargin.training.build import build_loss
from qmargin.training.schedules import learning_rate, loss_settings

PAPER = {  # kind of margin, alpha, m, s: the rows of the speaker table
    "arcface": ("angular", 1.0, 0.2, 32.0),
    "cosface": ("cosine", 1.0, 0.2, 32.0),
    "entmax_a200": ("angular", 2.0, 0.1, 5.0),
    "entmax_a175": ("angular", 1.75, 0.1, 5.0),
    "q_margin_a175": ("prior", 1.75, 0.1, 5.0),
    "q_margin_a150": ("prior", 1.5, 0.1, 10.0),
}
STEPS = 2132  # of an epoch: 1,092,009 utterances in batches of 512


@pytest.mark.parametrize("row", PAPER)
def test_every_row_of_the_paper_is_a_recipe(row: str) -> None:
    recipe = get_recipe(f"voxceleb2_r34_{row}")
    assert set(TABLE) == set(PAPER)
    assert recipe.loss.strength is None
    assert (recipe.loss.margin_kind, *recipe.loss.settings[:3]) == PAPER[row]
    assert build_loss(recipe).loss.scale == PAPER[row][-1]
    assert (recipe.model.backbone, recipe.model.embedding_dim) == ("speaker_resnet34", 256)
    assert (recipe.run.epochs, recipe.data.batch_size) == (150, 4 * 128)
    assert recipe.data.num_classes == 17_982
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 1e-4)


def test_the_learning_rate_is_the_one_of_wespeaker() -> None:
    """c(t) lr0 (lrT / lr0)^(t / T), c = S t / W under the warm-up and S after it, S = 512 / 64."""
    recipe = get_recipe("voxceleb2_r34_arcface")
    for step in (0, 1, 3 * STEPS, 6 * STEPS, 75 * STEPS, 150 * STEPS - 1):
        share = min(step / (6 * STEPS), 1.0)
        decay = 0.1 * (5e-5 / 0.1) ** (step / (150 * STEPS))
        assert learning_rate(recipe, step, STEPS) == pytest.approx(8.0 * share * decay, rel=1e-12)


def test_the_margin_rises_between_epochs_20_and_40() -> None:
    recipe = get_recipe("voxceleb2_r34_arcface")
    margins = [loss_settings(recipe, epoch * STEPS, STEPS).margin for epoch in (18, 19, 20, 29, 39)]
    assert [round(margin, 3) for margin in margins] == [0.0, 0.0, 0.058, 0.194, 0.2]


def test_checkpoints_of_the_last_ten_epochs_are_averaged() -> None:
    recipe = get_recipe("voxceleb2_r34_arcface")
    assert recipe.run.save_every_steps == STEPS
    assert recipe.run.average_last == recipe.run.keep == 10
    assert get_recipe("voxceleb2_r34_arcface_1gpu").run.save_every_steps == 8531


@pytest.mark.parametrize("name", SPEAKER_RECIPES)
def test_every_recipe_asks_the_data_for_what_it_has(name: str) -> None:
    recipe = get_recipe(name)
    check_options(recipe.data.options, open_speech, "an option", given=("path",))
    inspect.signature(open_speech).bind(recipe.data.path, **recipe.data.options)


def test_fine_tuning_is_that_of_wespeaker() -> None:
    """From averaged weights: 5 epochs of 6 s, a fixed large margin, 1e-4 to 2.5e-5, 64 per GPU."""
    recipe = get_recipe("voxceleb2_r34_arcface_lm")
    assert (recipe.run.epochs, recipe.run.start_from) == (5, "runs/voxceleb2_r34_arcface")
    assert (recipe.loss.margin, recipe.margin_schedule) == (0.5, None)
    assert (recipe.optimizer.lr, recipe.schedule.final_lr) == (1e-4, 2.5e-5)
    assert (recipe.data.batch_size, recipe.optimizer.base_batch) == (4 * 64, 64)
    assert recipe.data.num_classes == 17_982  # three speeds were trained, one is tuned
    options = recipe.data.options
    assert (options["num_frames"], options["augment"]) == (600, 0.6)
    assert (options["speed_perturbation"], options["keep_speed_classes"]) == (False, True)


@pytest.mark.parametrize("row", COMPARED)
def test_small_collections_are_compared_with_the_same_losses(row: str) -> None:
    names = ("audiomnist", "speakers", "voxceleb2")
    spoken, small, full = (get_recipe(f"{name}_r34_{row}") for name in names)
    assert spoken.loss == small.loss == full.loss and spoken.optimizer == full.optimizer
    assert spoken.data.options["in_memory"] is True and spoken.data.num_classes is None


def test_networks_of_other_families_have_their_usual_sizes() -> None:
    for name, size in {"r101": 256, "ecapa512": 192, "ecapa1024": 192, "campplus": 512}.items():
        assert get_recipe(f"voxceleb2_{name}_q_margin_a150").model.embedding_dim == size
