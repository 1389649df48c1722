"""Recipes as YAML and settings from a command line: read back equal, or refused with the place."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe
from qmargin.training.recipe import OptimizerPart, Recipe, ValueSchedule
from qmargin.training.recipe_files import (
    MAX_ALIASES,
    MAX_BYTES,
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


def debug_with(*texts: str) -> Recipe:
    return apply_settings(get_recipe("debug"), texts)


finite = st.floats(1e-12, 1e12)


@settings(max_examples=50, deadline=None)
@given(
    lr=finite,
    decay=st.floats(0.0, 1e3),
    name=st.text(min_size=1).filter(str.strip),
    seed=st.integers(0, 2**63 - 1),
    noise=st.one_of(
        st.booleans(), finite, st.integers(-(2**63) + 1, 2**63 - 1), st.text(max_size=8)
    ),
    initial=st.floats(-1.0, 1.0),
)
def test_a_recipe_comes_back_equal(
    lr: float, decay: float, name: str, seed: int, noise: Any, initial: float
) -> None:
    recipe = get_recipe("debug")
    recipe = replace(
        recipe,
        name=name,
        seed=seed,
        data=replace(recipe.data, options={"noise": noise, "shape": (3, 32, 32)}),
        optimizer=OptimizerPart(lr=lr, weight_decay=decay),
        margin_schedule=ValueSchedule(initial=initial, end_epoch=2),
    )
    back = from_yaml(to_yaml(recipe))
    assert back == recipe
    assert back.sha256 == recipe.sha256
    assert from_dict(to_dict(recipe)) == recipe


def test_the_hash_stands_at_the_top() -> None:
    recipe = get_recipe("debug")
    assert to_yaml(recipe).splitlines()[0].endswith(recipe.sha256)


def test_a_short_file_has_defaults_and_a_preset_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL, encoding="utf-8")
    recipe = read_recipe(path)
    assert recipe.optimizer.lr == 1e-3  # YAML alone reads a text
    assert (recipe.loss.margin_kind, recipe.loss.margin, recipe.loss.scale) == ("angular", 0.3, 64)
    assert recipe.head.update == "exact"
    assert "preset" not in to_yaml(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the recipe is None; give keys"),
        ("- 1", r"the recipe is \[1\]; give keys"),
        ("name: [", "cannot be read .*line 1"),
        ("name: x\nsead: 1", "a key of the recipe is 'sead', did you mean 'seed'"),
        ("name: x\n3: 1", "a key of the recipe is '3'"),
        ("name: x", "the recipe has no data, model, loss, optimizer, run"),
        (SMALL + "seed: 1\nseed: 2", "'seed' is given twice"),
        (SMALL.replace("{lr: 1e-3}", "{lr: 1, lr: 2}"), "'lr' is given twice"),
        (SMALL.replace("{lr: 1e-3}", "{lr: fast}"), "optimizer: lr is 'fast'; give a finite"),
        (SMALL.replace("{lr: 1e-3}", "{lr: .nan}"), "optimizer: lr is nan; give a finite"),
        (SMALL.replace("{lr: 1e-3}", "{}"), "optimizer has no lr"),
        (SMALL.replace("{lr: 1e-3}", "3"), "optimizer is 3; give keys"),
        (SMALL.replace("{lr: 1e-3}", "{lr: 1, momentun: 1}"), "did you mean 'momentum'"),
        (SMALL.replace("preset: arcface", "preset: arcfase"), "loss: preset is 'arcfase'"),
        (SMALL.replace("preset: arcface", "preset: arcface, margin_kind: prior"), "leave one"),
        (SMALL.replace("name: mine", "name: 2020-01-01"), r"name is datetime.date"),
        (SMALL.replace("name: mine", "name: !!python/object/apply:os.getcwd []"), "cannot be read"),
        (SMALL + "---\nname: second", "cannot be read"),
        (SMALL.replace("mine", '"a\x00b"'), "cannot be read"),
        ("a: &a [x]\nb: [" + ", ".join(["*a"] * (MAX_ALIASES + 1)) + "]", "over 10 aliases"),
        ("[" * 5000, "levels deep"),
        ("a: &a [*a]", "a key of the recipe is 'a'"),
        ("? [a, b]\n: 1", "cannot be read|a key of the recipe"),
        ("#" * (MAX_BYTES + 1), "characters"),
    ],
)
def test_bad_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{number}: 1\n" for number in range(90_000)),
        "data: {options: {shape: [" + "1," * 450_000 + "]}}",
        "name: " + "x" * 990_000,
        "seed: " + "1:" * 490_000 + "1",  # YAML 1.1 reads digits to the base of 60
        "seed: 0x" + "f" * 990_000,
        "seed: " + "9" * 990_000,
        "- " * 490_000,
        "[" * 990_000,
        "{a: " * 240_000,
        "#" * 990_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_huge_file_is_refused_within_a_second(text: str, tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(ConfigError):
        from_yaml(text)
    with pytest.raises(ConfigError, match=r"huge\.yaml"):
        read_recipe(path)
    with pytest.raises(ConfigError):
        from_yaml(text[: MAX_BYTES - 1])  # as large as is allowed
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "key",
    [
        "seed",
        "data.batch_size",
        "data.num_classes",
        "data.num_workers",
        "data.max_corrupt",
        "data.options.noise",
        "data.options.shape",
        "model.embedding_dim",
        "loss.margin",
        "optimizer.lr",
        "optimizer.accumulation",
        "schedule.milestones",
        "run.epochs",
        "run.max_steps",
        "run.keep",
        "run.timeout_s",
    ],
)
@pytest.mark.parametrize("digits", ["9" * 400, "0x" + "f" * 5000, "-0x" + "f" * 5000])
def test_huge_integers_are_refused_by_name(key: str, digits: str) -> None:
    text = f"[{digits}]" if key.endswith(("shape", "milestones")) else digits
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]) as refused:
        debug_with(f"{key}={text}")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("setting", "limit"),
    [("data.num_workers=100000", "1024"), ("run.timeout_s=1e300", "10000000")],
)
def test_absurd_numbers_are_refused_with_the_limit(setting: str, limit: str) -> None:
    name = setting.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"{name} is .*{limit}"):
        debug_with(setting)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_recipe_is_read_from_a_file_and_nothing_else(tmp_path: Path) -> None:
    """A FIFO without a writer, or a device without an end, would be read forever."""
    fifo, folder = tmp_path / "fifo.yaml", tmp_path / "folder.yaml"
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (fifo, folder, Path("/dev/zero"), tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            read_recipe(path)
    with pytest.raises(ConfigError, match=r"fifo\.yaml is a named pipe"):
        load_recipe(str(fifo))


def test_few_aliases_are_read() -> None:
    text = SMALL.replace("epochs: 2", "epochs: &n 2, keep: *n")
    assert from_yaml(text).run.keep == 2


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("sead: 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad.yaml: a key of the recipe"):
        read_recipe(path)
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"bad.yaml is not UTF-8"):
        read_recipe(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="another kind of file"):
        read_recipe(path)


def test_settings_have_the_type_of_their_field() -> None:
    recipe = debug_with(
        "loss.margin=0.3",
        "optimizer.lr=1e-2",
        "optimizer.nesterov=true",
        "optimizer.clip_norm=null",
        "schedule.milestones=[2, 3.5]",
        "run.max_steps=12",
        "name=1e3",
        "data.options.noise=1e-1",
        "data.options.shape=[3, 8, 8]",
        "head.screen_dtype=float32",
        "margin_schedule.initial=0.1",
        "margin_schedule.end_epoch=4",
    )
    assert (recipe.loss.margin, recipe.optimizer.lr, recipe.name) == (0.3, 0.01, "1e3")
    assert recipe.optimizer.nesterov is True
    assert recipe.optimizer.clip_norm is None
    assert recipe.schedule.milestones == (2.0, 3.5)
    assert recipe.run.max_steps == 12
    assert recipe.data.options == {"noise": 0.1, "samples_per_class": 16, "shape": (3, 8, 8)}
    assert recipe.margin_schedule == ValueSchedule(initial=0.1, end_epoch=4.0)
    cleared = apply_settings(recipe, ["margin_schedule=null"])
    assert cleared.margin_schedule is None


def test_settings_that_belong_together_may_come_in_any_order() -> None:
    pair = ["optimizer.kind=adamw", "head.update=torch"]
    assert debug_with(*pair) == debug_with(*reversed(pair))


def test_a_preset_replaces_the_loss_and_other_settings_change_the_preset() -> None:
    recipe = debug_with("loss.scale=20", "loss.preset=arcface")
    assert (recipe.loss.alpha, recipe.loss.margin_kind) == (1.0, "angular")
    assert (recipe.loss.margin, recipe.loss.scale) == (0.5, 20.0)


def test_the_last_of_two_settings_counts() -> None:
    assert debug_with("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "'seed' has no value; write it as key=value"),
        ("=3", "has no value"),
        ("los.margin=3", "did you mean 'loss'"),
        ("margin=0.3", "the recipe has no 'margin' of its own; did you mean loss.margin?"),
        ("loss.margn=3", "a key of loss is 'margn', did you mean 'margin'"),
        ("loss.prest=arcface", "did you mean 'preset'"),
        ("loss=3", "loss is a section"),
        ("data.options=3", "data.options is a section"),
        ("loss.margin.x=3", "loss.margin is a value"),
        ("loss.margin=abc", "loss: margin is 'abc'"),
        ("loss.margin=", "loss: margin is None"),
        ("run.epochs=2.5", "run: epochs is 2.5; give a whole number"),
        ("optimizer.nesterov=1", "nesterov is 1; give true or false"),
        ("optimizer.lr=[1]", r"lr is \[1\]"),
        ("optimizer.lr={", "cannot be read"),
        ("model=null", "model is None; give a ModelPart"),
        ("data.options.noise={a: 1}", "options.noise is"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        debug_with(text)


def test_what_is_written_is_plain_yaml() -> None:
    assert yaml.safe_load(to_yaml(get_recipe("debug")))["loss"]["margin_kind"] == "prior"
