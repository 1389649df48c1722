"""What differs between two recipes, and what may differ on resume."""

from dataclasses import replace
from typing import Any

import pytest

from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe
from qmargin.training.recipe import Recipe, ValueSchedule, flatten
from qmargin.training.recipe_changes import (
    FIXED,
    check_resume,
    compatible,
    diff,
    refused_changes,
)
from qmargin.training.recipe_files import apply_settings


def changed(*settings: str) -> Recipe:
    return apply_settings(get_recipe("debug"), settings)


def test_equal_recipes_have_no_difference() -> None:
    assert diff(get_recipe("debug"), get_recipe("debug")) == []


def test_differences_are_lines_that_people_can_read() -> None:
    lines = diff(
        get_recipe("debug"),
        changed("loss.margin=0.3", "schedule.milestones=[3, 4.5]", "data.options.augmentation=0"),
    )
    assert sorted(lines) == [
        "data.options.augmentation: none -> 0",
        "loss.margin: 0.2 -> 0.3",
        "schedule.milestones: [4, 5] -> [3, 4.5]",
    ]


def test_a_difference_that_follows_from_another_is_shown() -> None:
    lines = diff(get_recipe("debug"), changed("run.epochs=9"))
    assert lines == ["run.epochs: 6 -> 9", "schedule.epochs: 6 -> 9"]
    kept = changed("run.epochs=9", "schedule.epochs=6")
    assert diff(get_recipe("debug"), kept) == ["run.epochs: 6 -> 9"]


def test_a_section_that_appears_is_shown_by_its_values() -> None:
    recipe = replace(get_recipe("debug"), margin_schedule=ValueSchedule(end_epoch=2))
    lines = diff(get_recipe("debug"), recipe)
    assert lines == [
        "margin_schedule.kind: none -> exponential",
        "margin_schedule.initial: none -> 0",
        "margin_schedule.final: none -> 0.2",
        "margin_schedule.start_epoch: none -> 0",
        "margin_schedule.end_epoch: none -> 2",
    ]
    assert [line.split(":")[0] for line in diff(recipe, get_recipe("debug"))] == [
        line.split(":")[0] for line in lines
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "name=other",
        "run.epochs=9",
        "run.max_steps=7",
        "run.keep=1",
        "run.nan_budget=0",
        "data.num_workers=4",
        "data.max_corrupt=0",
        "optimizer.lr=0.05",
        "optimizer.weight_decay=0",
        "loss.margin=0.1",
        "loss.scale=16",
        "head.update=sparse",
        "precision.dtype=bf16",
        "schedule.gamma=0.5",
    ],
)
def test_what_may_change_on_resume(setting: str) -> None:
    saved, asked = get_recipe("debug"), changed(setting)
    assert compatible(saved, asked)
    is_other_outcome = saved.sha256 != asked.sha256
    if is_other_outcome:
        with pytest.raises(ConfigError, match=r" -> .*--allow-changes"):
            check_resume(saved, asked)
    shown = check_resume(saved, asked, allow_changes=is_other_outcome)
    assert shown
    assert is_other_outcome == any("changes the outcome" in line for line in shown)


@pytest.mark.parametrize(
    "settings",
    [
        ["seed=1"],
        ["data.num_classes=201"],
        ["data.batch_size=128"],
        ["data.drop_last=false"],
        ["data.options.noise=0.4"],
        ["data.options.augmentation=0.4"],
        ["model.backbone=small_conv"],
        ["model.embedding_dim=64"],
        ["model.options.hidden_dim=65"],
        ["loss.preset=arcface"],
        ["loss.preset=arcface", "loss.options.gradient=straight_through"],
        ["optimizer.kind=adamw", "head.update=torch"],
    ],
)
def test_what_may_not_change_on_resume(settings: list[str]) -> None:
    saved, asked = get_recipe("debug"), changed(*settings)
    assert not compatible(saved, asked)
    assert set(refused_changes(saved, asked)) <= set(diff(saved, asked))
    with pytest.raises(ConfigError, match=r"cannot be resumed with .* -> .*; undo the change"):
        check_resume(saved, asked)


def test_fixed_keys_exist() -> None:
    keys: dict[str, Any] = flatten(changed("loss.preset=arcface", "loss.options.gradient=exact"))
    for section in FIXED:
        assert any(key == section or key.startswith(f"{section}.") for key in keys), section
