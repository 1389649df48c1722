"""From a recipe to backbone, head, loss and data: seeded, checked, the same everywhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qmargin.errors import ConfigError, DataError, MarginWarning
from qmargin.recipes import get_recipe
from qmargin.training.build import (
    build_backbone,
    build_dataset,
    build_head,
    build_loss,
    set_loss_,
)
from qmargin.training.loss_part import LossSettings
from qmargin.training.recipe import DataPart, LossPart, ModelPart, Recipe
from qmargin.training.recipe_files import apply_settings


def debug_with(*settings: str) -> Recipe:
    return apply_settings(get_recipe("debug"), settings)


def test_weights_follow_from_the_seed_and_leave_other_draws_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    recipe = get_recipe("debug")
    first, head = build_backbone(recipe), build_head(recipe)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    second, other = build_backbone(recipe), build_head(recipe)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(head.prototypes, other.prototypes)
    changed = build_head(debug_with("seed=1"))
    assert not torch.equal(head.prototypes, changed.prototypes)


def test_settings_reach_the_head() -> None:
    recipe = debug_with(
        "head.path=sampled",
        "head.update=torch",
        "head.sample_rate=0.25",
        "head.top_percent=2",
        "head.screen_dtype=bfloat16",
        "head.chunk_dtype=float32",
        "seed=5",
    )
    head = build_head(recipe)
    assert (head.path, head.gradient, head.sample_rate, head.top_percent) == (
        "sampled",
        "dense",
        0.25,
        2.0,
    )
    assert (head.screen_dtype, head.chunk_dtype) == (torch.bfloat16, torch.float32)
    assert (head.seed, head.num_classes, head.embedding_dim) == (5, 200, 32)
    assert build_head(get_recipe("debug")).gradient == "fused"


def test_the_number_of_classes_may_come_from_the_data() -> None:
    counted = replace(get_recipe("debug"), data=DataPart("images", 8, path="somewhere"))
    assert build_head(counted, num_classes=7).num_classes == 7
    with pytest.raises(ConfigError, match=r"data.num_classes is missing"):
        build_head(counted)
    with pytest.raises(ConfigError, match=r"num_classes is 200 and the data has 7"):
        build_head(get_recipe("debug"), num_classes=7)


def test_options_that_a_backbone_does_not_take_are_refused() -> None:
    recipe = replace(get_recipe("debug"), model=ModelPart("small_mlp", 8, {"depth": 3}))
    with pytest.raises(ConfigError, match=r"model.options is .*depth.* small_mlp does not take"):
        build_backbone(recipe)
    with pytest.raises(ConfigError, match="did you mean 'small_mlp'"):
        build_backbone(debug_with("model.backbone=small_mpl"))


def test_channels_last_reaches_the_filters() -> None:
    recipe = debug_with("precision.channels_last=true")
    recipe = replace(recipe, model=ModelPart("small_conv", 8))
    weight: Any = build_backbone(recipe).layers[3].weight  # type: ignore[index,union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_synthetic_data_follows_the_recipe() -> None:
    data = build_dataset(debug_with("data.options.samples_per_class=3", "seed=4"))
    assert (len(data), data.num_classes) == (600, 200)
    inputs, label = data.read(599, seed=0)
    assert (tuple(inputs.shape), label) == ((32,), 199)
    other, _ = build_dataset(debug_with("seed=5")).read(0, seed=0)
    assert not torch.equal(other, build_dataset(debug_with("seed=4")).read(0, seed=0)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_class": 3, "noize": 1.0}, "did you mean 'noise'"),
        ({"noise": 1.0}, "samples_per_class has no default"),
        ({"samples_per_class": 3, "num_classes": 4}, "is 'num_classes'"),
    ],
)
def test_bad_options_of_data_are_refused(options: dict[str, Any], message: str) -> None:
    recipe = get_recipe("debug")
    recipe = replace(recipe, data=replace(recipe.data, options=options))
    with pytest.raises(ConfigError, match=message):
        build_dataset(recipe)


def test_data_that_is_not_there_is_refused() -> None:
    recipe = replace(get_recipe("debug"), data=DataPart("audio", 8, path="x"))
    with pytest.raises(DataError, match="give a folder per speaker"):
        build_dataset(recipe)


def test_a_margin_out_of_reach_warns_when_it_is_built_and_not_before() -> None:
    recipe = debug_with("loss.margin=1")
    with pytest.warns(MarginWarning, match="lower the margin"):
        build_loss(recipe)
    with pytest.warns(MarginWarning):
        head = build_head(recipe)
    set_loss_(head, recipe, recipe.loss.settings._replace(margin=0.9))


def test_scheduled_numbers_reach_the_next_step() -> None:
    recipe = get_recipe("debug")
    head = build_head(recipe)
    head.eval()
    unchanged = head.loss
    set_loss_(head, recipe, recipe.loss.settings)
    assert head.loss is unchanged
    wanted = LossSettings(alpha=1.5, margin=0.1, scale=8.0)
    set_loss_(head, recipe, wanted)
    assert not head.loss.training
    embeddings, labels = torch.randn(4, 32), torch.arange(4)
    fresh = build_head(replace(recipe, loss=LossPart(1.5, "prior", 0.1, 8.0)))
    assert torch.equal(head(embeddings, labels), fresh(embeddings, labels))


def test_a_margin_with_statistics_keeps_them() -> None:
    recipe = debug_with("loss.preset=adaface")
    head = build_head(recipe)
    margin = head.loss.margin
    set_loss_(head, recipe, recipe.loss.settings._replace(scale=16.0))
    assert head.loss.margin is margin
    assert head.loss.scale == 16.0
    assert "loss.margin.running_mean" in head.state_dict()
