"""``Recipe`` and its parts refuse what cannot be run, and hash what decides the outcome."""

import hashlib
import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import yaml

from qmargin.errors import ConfigError
from qmargin.losses import presets
from qmargin.losses.module import MarginLoss
from qmargin.recipes import get_recipe
from qmargin.training.loss_part import PRESETS, LossSettings
from qmargin.training.recipe import (
    FREE,
    DataPart,
    HeadPart,
    LossPart,
    ModelPart,
    OptimizerPart,
    Recipe,
    RunPart,
    SchedulePart,
    ValueSchedule,
    flatten,
)
from qmargin.training.recipe_files import to_yaml

LOSS = LossPart.from_preset("q_margin")


def small_recipe(**changes: Any) -> Recipe:
    return replace(get_recipe("debug"), **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataPart("synthetic", 0, num_classes=3), "batch_size is 0; .* at least 1"),
        (lambda: DataPart("synthetic", True, num_classes=3), "batch_size is True; give a whole"),
        (lambda: DataPart("synthetic", 4.0, num_classes=3), "batch_size is 4.0; give a whole"),
        (lambda: DataPart("synthetic", 4), "num_classes is missing"),
        (lambda: DataPart("synthetic", 4, path="x", num_classes=3), "path is 'x' and synthetic"),
        (lambda: DataPart("images", 4), "path is missing; .* data.path"),
        (lambda: DataPart("imags", 4, path="x"), "did you mean 'images'"),
        (lambda: DataPart("images", 4, path="x", options={"a b": 1}), "the key 'a b'"),
        (lambda: DataPart("images", 4, path="x", options={"a": {}}), "options.a is {}; give a"),
        (lambda: DataPart("images", 4, path="x", options={"a": float("nan")}), "options.a is nan"),
        (lambda: ModelPart("iresnet18", 0), "embedding_dim is 0"),
        (lambda: HeadPart(path="spares"), "did you mean 'sparse'"),
        (lambda: HeadPart(sample_rate=0.0), "sample_rate is 0; .* at most 1"),
        (lambda: HeadPart(lr_ratio=0.0), "lr_ratio is 0"),
        (lambda: HeadPart(top_percent=101.0), "top_percent is 101; .* at most 100"),
        (lambda: HeadPart(update="exact", gradient="dense"), "update 'exact' needs 'fused'"),
        (lambda: HeadPart(update="torch", gradient="fused"), "update 'torch' needs 'dense'"),
        (lambda: OptimizerPart(lr=0.0), "lr is 0; it must be above 0"),
        (lambda: OptimizerPart(lr=float("inf")), "lr is inf; give a finite number"),
        (lambda: OptimizerPart(lr="0.1"), "lr is '0.1'; give a finite number"),
        (lambda: OptimizerPart(lr=0.1, momentum=1.0), r"momentum is 1; it must be in \[0, 1\)"),
        (lambda: OptimizerPart(lr=0.1, weight_decay=-1.0), "weight_decay is -1"),
        (lambda: OptimizerPart(lr=0.1, clip_norm=0.0), "clip_norm is 0"),
        (lambda: OptimizerPart(lr=0.1, accumulation=0), "accumulation is 0"),
        (lambda: OptimizerPart(lr=0.1, momentum=0.0, nesterov=True), "nesterov is on"),
        (lambda: OptimizerPart(lr=0.1, kind="adamw", nesterov=True), "nesterov is on for adamw"),
        (lambda: SchedulePart("step"), "milestones is empty"),
        (lambda: SchedulePart("step", milestones=(7, 7)), r"milestones is \[7.0, 7.0\]"),
        (lambda: SchedulePart("step", milestones=(0, 7)), "above 0"),
        (lambda: SchedulePart("step", milestones=7), "milestones is 7; give a list"),
        (lambda: SchedulePart("exponential"), "final_lr is 0, which no exponential"),
        (lambda: SchedulePart(warmup_start=1.0), "warmup_start is 1"),
        (lambda: ValueSchedule("linear"), "end_epoch is missing"),
        (lambda: ValueSchedule("linear", start_epoch=3, end_epoch=3), "the end must be later"),
        (lambda: ValueSchedule("constant", end_epoch=3), "a jump has none"),
        (lambda: RunPart(epochs=0), "epochs is 0"),
        (lambda: RunPart(epochs=1, max_steps=0), "max_steps is 0"),
        (lambda: RunPart(epochs=1, average_last=4), "average_last is 4 .* raise run.keep"),
        (lambda: RunPart(epochs=1, ema_decay=1.0), "ema_decay is 1"),
        (lambda: RunPart(epochs=1, spike_factor=1.0), "spike_factor is 1"),
        (lambda: replace(LOSS, alpha=-1.0), "alpha is -1"),
        (lambda: replace(LOSS, scale=0.0), "scale"),
        (lambda: replace(LOSS, options={"gradient": "exact"}), "an option of the prior margin"),
        (lambda: replace(LOSS, options={"margin": 1.0}), "which is loss.margin"),
        (lambda: LossPart(1.0, "angular", 4.0, 64.0), "angular margin is 4"),
        (lambda: LossPart.from_preset("arcfac"), "did you mean 'arcface'"),
        (lambda: LossPart.from_preset("arcface", margn=1), "did you mean 'margin'"),
        (lambda: LossPart.from_preset("arcface", margin_kind="prior"), "leave one of them out"),
    ],
)
def test_parts_refuse_what_is_impossible(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        make()
    assert not str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808; .* at most"),
        ({"name": " "}, "name is empty"),
        ({"data": 3}, "data is 3; give a DataPart"),
        ({"schedule": SchedulePart(warmup_epochs=6)}, "warmup_epochs is 6 and .* 6 epochs"),
        ({"schedule": SchedulePart("cosine", final_lr=0.2)}, "final_lr is 0.2 .* only 0.1"),
        ({"optimizer": OptimizerPart(lr=0.1, kind="adamw")}, "set head.update to 'torch'"),
        ({"optimizer": OptimizerPart(lr=0.1, accumulation=2)}, "holds the gradient of one part"),
        (
            {
                "optimizer": OptimizerPart(lr=0.1, accumulation=3),
                "head": HeadPart(update="torch"),
            },
            "accumulation is 3, which does not divide data.batch_size 64",
        ),
        ({"head": HeadPart(update="torch", gradient="sparse")}, "without decay"),
        (
            {"head": HeadPart(path="sparse"), "loss": LossPart.from_preset("arcface")},
            "head.path is 'sparse' and alpha is 1;",
        ),
        (
            {
                "head": HeadPart(path="paper"),
                "alpha_schedule": ValueSchedule("linear", initial=1.0, end_epoch=3),
            },
            "head.path is 'paper' and alpha is 1;",
        ),
        (
            {
                "loss": LossPart.from_preset("adaface"),
                "margin_schedule": ValueSchedule("linear", end_epoch=3),
            },
            "the adaface margin sets its own",
        ),
        (
            {"scale_schedule": ValueSchedule("linear", initial=0.0, end_epoch=3)},
            "scale_schedule: scale",
        ),
        (
            {"alpha_schedule": ValueSchedule("linear", initial=1.0, final=99.0, end_epoch=3)},
            "alpha_schedule: alpha is 99",
        ),
    ],
)
def test_recipes_refuse_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_recipe(**changes)


def test_values_have_the_type_of_their_field() -> None:
    part = SchedulePart("step", milestones=[7, 13], warmup_epochs=1)  # type: ignore[arg-type]
    assert part.milestones == (7.0, 13.0)
    assert isinstance(part.warmup_epochs, float)
    assert hash(small_recipe()) == hash(small_recipe())
    with pytest.raises(FrozenInstanceError):
        part.gamma = 0.5  # type: ignore[misc]


def test_a_part_does_not_share_its_options_with_the_caller() -> None:
    options = {"input_dim": 32}
    part = ModelPart("small_mlp", 8, options)  # type: ignore[arg-type]
    options["input_dim"] = 99
    assert part.options == {"input_dim": 32}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_written_out_and_built_again(name: str) -> None:
    published: MarginLoss = getattr(presets, name)()
    built = LossPart.from_preset(name).build()
    assert repr(built) == repr(published)
    assert built.scale == published.scale
    assert type(built.margin) is type(published.margin)


def test_no_preset_is_left_out() -> None:
    made = {
        name
        for name, value in vars(presets).items()
        if getattr(value, "__module__", "") == presets.__name__
    }
    assert made == set(PRESETS)


def test_a_preset_can_be_changed() -> None:
    part = LossPart.from_preset("arcface", margin=0.3, options={"gradient": "straight_through"})
    loss = part.build(LossSettings(alpha=1.0, margin=0.1, scale=16.0))
    assert "AngularMargin(margin=0.1, gradient='straight_through'), scale=16" in repr(loss)
    assert part.settings == LossSettings(1.0, 0.3, 64.0)


def test_draws_of_an_elastic_margin_follow_the_seed() -> None:
    margin: Any = LossPart.from_preset("elasticface").build_margin(seed=5)
    assert margin.seed == 5


def test_the_hash_changes_with_what_decides_the_outcome_and_nothing_else() -> None:
    recipe = small_recipe()
    same = [
        replace(recipe, name="other"),
        replace(recipe, data=replace(recipe.data, num_workers=7, max_corrupt=0)),
        replace(recipe, run=replace(recipe.run, save_every_steps=1, keep=9, timeout_s=1.0)),
        replace(recipe, schedule=replace(recipe.schedule, epochs=recipe.run.epochs)),
    ]
    other = [
        replace(recipe, seed=1),
        replace(recipe, data=replace(recipe.data, batch_size=32)),
        replace(recipe, data=replace(recipe.data, options={**recipe.data.options, "noise": 0.1})),
        replace(recipe, loss=replace(recipe.loss, margin=0.21)),
        replace(recipe, optimizer=replace(recipe.optimizer, lr=0.11)),
        replace(recipe, run=replace(recipe.run, epochs=7)),
        replace(recipe, margin_schedule=ValueSchedule(end_epoch=2)),
    ]
    assert {made.sha256 for made in same} == {recipe.sha256}
    assert len({made.sha256 for made in [recipe, *other]}) == len(other) + 1


def test_the_hash_is_that_of_canonical_json() -> None:
    """Anyone can recompute it from the file: dotted keys in order, no spaces."""
    values: dict[str, Any] = yaml.safe_load(to_yaml(small_recipe().resolved()))
    flat: dict[str, Any] = {}
    while values:
        key, value = values.popitem()
        if isinstance(value, dict):
            values.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif key not in FREE:
            flat[key] = value
    text = json.dumps(flat, sort_keys=True, separators=(",", ":"))
    assert small_recipe().sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_keys_that_decide_nothing_exist() -> None:
    keys = flatten(small_recipe())
    assert set(FREE) <= set(keys)


def test_what_follows_from_other_values_is_resolved() -> None:
    recipe = small_recipe(margin_schedule=ValueSchedule(end_epoch=2))
    assert (recipe.schedule_epochs, recipe.schedule.epochs) == (6, None)
    resolved = recipe.resolved()
    assert resolved.schedule.epochs == 6
    assert resolved.margin_schedule is not None
    assert resolved.margin_schedule.final == recipe.loss.margin
    assert resolved.resolved() == resolved
    assert resolved.sha256 == recipe.sha256


def test_linear_scaling_is_explicit() -> None:
    assert small_recipe().lr_factor == 1.0
    assert small_recipe(optimizer=OptimizerPart(lr=0.1, base_batch=256)).lr_factor == 0.25
