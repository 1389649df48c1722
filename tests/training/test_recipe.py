"""``Recipe``: refuses what cannot be run, hashes what decides the outcome, reads files, resumes."""

import hashlib
import json
import os
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe
from qmargin.schema import flatten
from qmargin.training.recipe import (
    FIXED,
    FREE,
    DataPart,
    LossPart,
    ModelPart,
    OptimizerPart,
    Recipe,
    SchedulePart,
    ValueSchedule,
    check_resume,
    diff,
)
from qmargin.training.recipe_files import (
    apply_settings,
    from_dict,
    from_yaml,
    read_recipe,
    to_dict,
    to_yaml,
)

SMALL = """
name: mine
data: {kind: synthetic, batch_size: 8, num_classes: 5}
model: {backbone: small_mlp}
loss: {preset: arcface, margin: 3e-1}
optimizer: {lr: 1e-3}
run: {epochs: 2}
"""


def changed(*texts: str) -> Recipe:
    return apply_settings(get_recipe("debug"), texts)


def small_recipe(**changes: Any) -> Recipe:
    return replace(get_recipe("debug"), **changes)


IMPOSSIBLE = """
data.batch_size=0 data.batch_size=true data.batch_size=4.0 data.num_classes=null data.path=x
data.kind=synthetc data.options.a={} data.num_workers=100000 model.embedding_dim=0
head.path=spares head.sample_rate=0 head.lr_ratio=0 head.top_percent=101 head.gradient=dense
optimizer.lr=0 optimizer.lr=.inf optimizer.lr=fast optimizer.momentum=1 optimizer.weight_decay=-1
optimizer.clip_norm=0 optimizer.accumulation=0 optimizer.accumulation=2 optimizer.nesterov=1
schedule.milestones=[] schedule.milestones=[7,7] schedule.milestones=[0,7] schedule.milestones=7
schedule.warmup_start=1 schedule.warmup_epochs=6 schedule.final_lr=0.2 margin_schedule.end_epoch=0
run.epochs=0 run.epochs=2.5 run.max_steps=0 run.average_last=4 run.ema_decay=1 run.spike_factor=1
run.timeout_s=1e300 loss.alpha=-1 loss.scale=0 loss.margin=abc loss.margin= loss.margn=3
loss.options.gradient=exact loss.options.margin=1 loss.prest=arcface seed=-1
seed=9223372036854775808 name= los.margin=3 margin=0.3 seed model=null
"""


@pytest.mark.parametrize("setting", IMPOSSIBLE.split())
def test_settings_that_are_impossible_are_refused_by_their_key(setting: str) -> None:
    key = setting.partition("=")[0]
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"{key}|{section}.*{last}"):
        changed(setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("optimizer.kind=adamw", "head.update .*optimizer.kind"),
        ("optimizer.kind=adamw head.update=torch optimizer.nesterov=true", "optimizer.nesterov"),
        ("optimizer.momentum=0 optimizer.nesterov=true", "optimizer.nesterov"),
        ("optimizer.accumulation=3 head.update=torch", "optimizer.accumulation .*data.batch_size"),
        ("head.update=torch head.gradient=fused", "head.gradient"),
        ("head.update=torch head.gradient=sparse", "head.gradient"),
        ("head.path=sparse loss.preset=arcface", "head.path .*loss.alpha 1"),
        ("head.path=sparse loss.divergence=jensen_shannon", "head.path"),
        ("head.path=paper alpha_schedule.initial=1 alpha_schedule.end_epoch=3", "head.path"),
        ("loss.preset=adaface margin_schedule.end_epoch=3", "margin_schedule .*adaface"),
        ("loss.divergence=jensen_shannon alpha_schedule.end_epoch=3", "alpha_schedule"),
        ("scale_schedule.initial=0 scale_schedule.end_epoch=3", "scale_schedule"),
        ("alpha_schedule.initial=1 alpha_schedule.final=99 alpha_schedule.end_epoch=3", "99"),
        ("schedule.kind=exponential", "schedule.final_lr"),
        ("margin_schedule.kind=constant margin_schedule.end_epoch=3", "margin_schedule.end_epoch"),
        ("data.options.shape=[0x" + "f" * 5000 + "]", "data.options.shape"),
        ("seed=" + "9" * 400, "seed is too large"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(*settings.split())


def test_parts_refuse_what_is_impossible_in_python_too() -> None:
    for make, message in (
        (lambda: DataPart("images", 4), "^path is missing.* data.path"),
        (lambda: DataPart("images", 4, path="x", options={"a b": 1}), "^options .*'a b'"),
        (lambda: OptimizerPart(lr="0.1"), "^lr is '0.1'"),
        (lambda: ValueSchedule("linear"), "^end_epoch is missing"),
        (lambda: LossPart.from_preset("arcface", margn=1), "did you mean 'margin'"),
        (lambda: small_recipe(data=3), "^data is 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_values_have_the_type_of_their_field() -> None:
    part = SchedulePart("step", milestones=[7, 13], warmup_epochs=1)  # type: ignore[arg-type]
    assert part.milestones == (7.0, 13.0)
    assert isinstance(part.warmup_epochs, float)
    assert hash(small_recipe()) == hash(small_recipe())
    with pytest.raises(FrozenInstanceError):
        part.gamma = 0.5  # type: ignore[misc]
    options = {"input_dim": 32}
    part = ModelPart("small_mlp", 8, options)  # type: ignore[arg-type,assignment]
    options["input_dim"] = 99  # a part does not share its options with the caller
    assert part.options == {"input_dim": 32}


def test_the_hash_changes_with_what_decides_the_outcome_and_nothing_else() -> None:
    same = "name=b data.num_workers=7 data.max_corrupt=0 run.keep=9 run.timeout_s=1"
    same += " run.save_every_steps=1 schedule.epochs=6"
    other = "seed=1 data.batch_size=32 data.options.noise=0.1 loss.margin=0.21 optimizer.lr=0.11"
    other += " run.epochs=7 margin_schedule.end_epoch=2"
    own = small_recipe().sha256
    assert {changed(setting).sha256 for setting in same.split()} == {own}
    assert len({own, *(changed(setting).sha256 for setting in other.split())}) == 8
    assert set(FREE) <= set(flatten(small_recipe()))


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


def test_what_follows_from_other_values_is_resolved() -> None:
    recipe = small_recipe(margin_schedule=ValueSchedule(end_epoch=2))
    assert (recipe.schedule_epochs, recipe.schedule.epochs) == (6, None)
    resolved = recipe.resolved()
    assert resolved.schedule.epochs == 6
    assert resolved.margin_schedule is not None
    assert resolved.margin_schedule.final == recipe.loss.margin
    assert resolved.resolved() == resolved
    assert resolved.sha256 == recipe.sha256
    assert small_recipe().lr_factor == 1.0
    assert small_recipe(optimizer=OptimizerPart(lr=0.1, base_batch=256)).lr_factor == 0.25


finite = st.floats(1e-12, 1e12)


@settings(max_examples=30, deadline=None)
@given(
    lr=finite,
    name=st.text(min_size=1).filter(str.strip),
    seed=st.integers(0, 2**63 - 1),
    noise=st.one_of(st.booleans(), finite, st.integers(-(2**63) + 1, 2**63 - 1), st.text()),
    initial=st.floats(-1.0, 1.0),
)
def test_a_recipe_comes_back_equal(
    lr: float, name: str, seed: int, noise: Any, initial: float
) -> None:
    recipe = get_recipe("debug")
    recipe = replace(
        recipe,
        name=name,
        seed=seed,
        data=replace(recipe.data, options={"noise": noise, "shape": (3, 32, 32)}),
        optimizer=OptimizerPart(lr=lr),
        margin_schedule=ValueSchedule(initial=initial, end_epoch=2),
    )
    text = to_yaml(recipe)
    assert text.splitlines()[0].endswith(recipe.sha256)
    back = from_yaml(text)
    assert back == recipe and back.sha256 == recipe.sha256
    assert from_dict(to_dict(recipe)) == recipe


def test_a_short_file_has_defaults_and_a_preset_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("epochs: 2", "epochs: &n 2, keep: *n"), encoding="utf-8")
    recipe = read_recipe(path)
    assert (recipe.optimizer.lr, recipe.run.keep) == (1e-3, 2)  # YAML alone reads a text
    assert (recipe.loss.margin_kind, recipe.loss.margin, recipe.loss.scale) == ("angular", 0.3, 64)
    assert recipe.head.update == "exact" and "preset" not in to_yaml(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is None, not an object"),
        ("- 1", r"is \[1\], not an object"),
        ("name: x\nsead: 1", "sead is unknown, did you mean 'seed'"),
        ("name: x\n3: 1", "3 is unknown"),
        ("name: x", "data, model, loss, optimizer, run is missing"),
        (SMALL.replace("{lr: 1e-3}", "{lr: fast}"), "optimizer.lr is 'fast'"),
        (SMALL.replace("{lr: 1e-3}", "{lr: .nan}"), "optimizer.lr is nan"),
        (SMALL.replace("{lr: 1e-3}", "{}"), "optimizer.lr is missing"),
        (SMALL.replace("{lr: 1e-3}", "3"), "optimizer is 3"),
        (SMALL.replace("{lr: 1e-3}", "{lr: 1, momentun: 1}"), "optimizer.momentun .*'momentum'"),
        (SMALL.replace("{lr: 1e-3}", "{lr: 0}"), "optimizer.lr is 0"),
        (SMALL.replace("name: mine", "name: 2020-01-01"), "name is datetime.date"),
        ("a: &a [*a]", "a is unknown"),
        ("? [a, b]\n: 1", "cannot be read|is unknown"),
    ],
)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)
    (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.yaml: .*({message})"):
        read_recipe(tmp_path / "bad.yaml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_recipe_is_read_from_a_file_and_nothing_else(tmp_path: Path) -> None:
    """A FIFO without a writer, or a device without an end, would be read forever."""
    fifo, folder, latin = (tmp_path / f"{name}.yaml" for name in ("fifo", "folder", "latin"))
    os.mkfifo(fifo)
    folder.mkdir()
    latin.write_bytes(b"name: \xff\xfe")
    for path in (fifo, folder, latin, Path("/dev/zero"), tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            read_recipe(path)
    with pytest.raises(ConfigError, match=r"fifo\.yaml is a named pipe"):
        load_recipe(str(fifo))


def test_settings_may_come_in_any_order_and_the_last_of_two_counts() -> None:
    pair = ["optimizer.kind=adamw", "head.update=torch"]
    assert changed(*pair) == changed(*reversed(pair))
    assert changed("seed=1", "seed=2").seed == 2
    recipe = changed("margin_schedule.initial=0.1", "margin_schedule.end_epoch=4")
    assert recipe.margin_schedule == ValueSchedule(initial=0.1, end_epoch=4.0)
    assert apply_settings(recipe, ["margin_schedule=null"]).margin_schedule is None


def test_differences_are_lines_that_people_can_read() -> None:
    debug = get_recipe("debug")
    form = ("loss.margin=0.3", "schedule.milestones=[3, 4.5]", "data.options.augmentation=0")
    assert sorted(diff(debug, changed(*form))) == [
        "data.options.augmentation: none -> 0",
        "loss.margin: 0.2 -> 0.3",
        "schedule.milestones: [4, 5] -> [3, 4.5]",
    ]
    lines = diff(debug, changed("run.epochs=9"))  # one follows from the other
    assert lines == ["run.epochs: 6 -> 9", "schedule.epochs: 6 -> 9"]
    assert diff(debug, changed("run.epochs=9", "schedule.epochs=6")) == ["run.epochs: 6 -> 9"]
    recipe = replace(debug, margin_schedule=ValueSchedule(end_epoch=2))
    lines = diff(debug, recipe)  # a section that appears is shown by its values
    assert "margin_schedule.final: none -> 0.2" in lines and len(lines) == 5
    assert len(diff(recipe, debug)) == 5


MAY_CHANGE = """
name=other run.epochs=9 run.max_steps=7 run.keep=1 run.nan_budget=0 data.num_workers=4
data.max_corrupt=0 optimizer.lr=0.05 optimizer.weight_decay=0 loss.margin=0.1 loss.scale=16
head.update=sparse precision.dtype=bf16 schedule.gamma=0.5
"""


@pytest.mark.parametrize("setting", MAY_CHANGE.split())
def test_what_may_change_on_resume(setting: str) -> None:
    saved, asked = get_recipe("debug"), changed(setting)
    is_other_outcome = saved.sha256 != asked.sha256
    if is_other_outcome:
        with pytest.raises(ConfigError, match="--allow-changes"):
            check_resume(saved, asked)
    shown = check_resume(saved, asked, allow_changes=is_other_outcome)
    assert shown
    assert is_other_outcome == any("changes the outcome" in line for line in shown)


MAY_NOT_CHANGE = """
seed=1 data.num_classes=201 data.batch_size=128 data.drop_last=false data.options.noise=0.4
data.options.augmentation=0.4 model.backbone=small_conv model.embedding_dim=64
model.options.hidden_dim=65 loss.preset=arcface loss.divergence=jensen_shannon
loss.margin=[{prior:0.2},{angular:0.1}] optimizer.kind=adamw&head.update=torch
"""


@pytest.mark.parametrize("settings", MAY_NOT_CHANGE.split())
def test_what_may_not_change_on_resume(settings: str) -> None:
    settings = settings.replace(":0", ": 0")
    saved, asked = get_recipe("debug"), changed(*settings.split("&"))
    with pytest.raises(ConfigError, match=r"cannot be resumed with .* -> "):
        check_resume(saved, asked, allow_changes=True)


def test_fixed_keys_exist() -> None:
    form = "loss.margin=[{angular: {margin: 0.1, gradient: exact}}, {prior: 0.1}]"
    keys: dict[str, Any] = flatten(
        changed("loss.divergence=jensen_shannon", form, "loss.reference=look_alike")
    )
    for section in set(FIXED) - {"loss.divergence_options"}:
        assert any(key == section or key.startswith(f"{section}.") for key in keys), section
