"""``qmargin train``, ``recipes`` and ``doctor``, as a user meets them."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import run_command as run
from helpers.runs import events, losses, status
from qmargin.cli import doctor
from qmargin.cli.main import main
from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError, RankError
from qmargin.recipes import get_recipe, list_recipes
from qmargin.training import loop, reporting
from qmargin.training.dry_run import activation_bytes
from qmargin.training.recipe import ModelPart
from qmargin.training.recipe_files import apply_settings, from_yaml, to_yaml

SHORT = ["--device", "cpu", "--set", "run.max_steps=4", "--set", "run.log_every=2"]
LONGER = ["--set", "run.max_steps=6", "--allow-changes"]


def margins(out: Path) -> list[float]:
    return [step["margin"] for step in events(out, "step")]


def test_training_writes_a_line_per_interval_and_resumes(tmp_path, capsys):
    run("train", "debug", "--out", tmp_path, *SHORT, "--set", "loss.margin=0.3")
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("warning: ")]
    assert captured.out == "" and len(lines) == 4
    assert lines[0].startswith("training debug on cpu: 3,200 samples of 200 classes, 4 steps")
    assert lines[1].startswith("step 2/4, epoch 0, loss 4")
    for part in ("lr ", "margin 0.3 (1.253)", "support ", "samples/s", " left"):
        assert part in lines[1]
    named = tmp_path / "checkpoints" / "step-000004"
    assert lines[-1].endswith(str(named))
    run("train", "debug", "--out", tmp_path, *SHORT, *LONGER, "--resume")
    assert list(losses(tmp_path)) == [2, 4, 6] and margins(tmp_path) == [0.3, 0.3, 0.2]
    run("train", "debug", "--out", tmp_path, *SHORT, *LONGER, "--resume-from", named)
    assert [record["step"] for record in events(tmp_path, "start")] == [0, 4]
    assert list(losses(tmp_path)) == [2, 4, 6]


@pytest.mark.parametrize("named", [["debug"], []], ids=["named", "not named"])
def test_resume_alone_takes_the_stored_recipe(named, tmp_path, capsys):
    out = ["--out", tmp_path, "--device", "cpu"]
    begun = ["--set", "loss.margin=0.3", "--set", "run.save_every_steps=2"]
    run("train", "debug", *out, *SHORT, *begun)
    capsys.readouterr()
    run("train", *named, *out, "--resume-from", tmp_path / "checkpoints" / "step-000002")
    assert margins(tmp_path) == [0.3, 0.3] and events(tmp_path, "start")[-1]["changes"] == []
    assert ("loss.margin: 0.3 -> 0.2" in capsys.readouterr().err) == bool(named)
    run("train", *named, *out, "--resume", "--set", "data.num_workers=1")  # changes no result
    for key, value in {"optimizer.lr": 0.05, "run.max_steps": 6}.items():
        with pytest.raises(ConfigError, match=rf"{key}: .*--allow-changes") as refused:
            run("train", *named, *out, "--resume", "--set", f"{key}={value}")
        assert "loss.margin" not in str(refused.value)  # only what was asked for
    run("train", *out, "--resume", *LONGER)
    assert margins(tmp_path) == [0.3, 0.3, 0.3]
    run("train", *named, *out, "--resume", "--print-recipe")
    assert "margin: 0.3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--out run", "recipe is missing"),
        ("--out run --resume", "no checkpoint in"),
        ("--resume", "--out is missing"),
        ("debug", "--out is missing"),
        ("debug --out run --allow-changes", r"--allow-changes.*--resume"),
        ("debug --print-recipe --dry-run", "--dry-run"),
        ("missing.yaml", r"missing\.yaml"),
        ("some/where", "some/where"),
        ("debgu", "did you mean 'debug'"),
    ],
)
def test_what_is_missing_is_named(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        run("train", *words.split())
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reports_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "debug", "--dry-run", "--device", "cpu")
    text = capsys.readouterr().out
    facts = ("3,200 samples of 200 classes", "300 steps", "at the peak", "samples/s", "activations")
    for part in (*facts, "losses     2"):
        assert part in text
    assert "warning" not in text and not list(tmp_path.iterdir())
    late = ["--set=margin_schedule.start_epoch=6", "--set=margin_schedule.end_epoch=8"]
    run("train", "debug", "--dry-run", "--device=cpu", *late)
    assert "margin_schedule.start_epoch is 6" in capsys.readouterr().out


def test_a_dry_run_refuses_what_cannot_fit():
    """Two hundred million classes: refused with the estimate, before anything is allocated."""
    settings = ["--set=data.num_classes=200000000", "--set=data.options.samples_per_class=1"]
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"needs about 7\d\.\d GiB on cpu .*prototypes 23\.8 GiB"):
        run("train", "debug", "--dry-run", "--device", "cpu", *settings)
    assert time.monotonic() - began < 60


def test_a_dry_run_counts_what_the_backbone_keeps():
    """Half precision and more parts need less."""
    small = replace(get_recipe("debug"), model=ModelPart("small_conv", 32))
    recipe = apply_settings(small, ["data.options.shape=[3, 32, 32]"])
    full = activation_bytes(recipe, (64, 3, 32, 32))
    # three convolutions: 16, 32 and 64 channels at half the size each, input, norm and relu of each
    assert 64 * 4 * (3 * 32 * 32 + 16 * 16 * 16) < full < 64 * 4 * 4 * 16 * 32 * 32
    assert activation_bytes(recipe, (32, 3, 32, 32)) == pytest.approx(full / 2, rel=0.01)
    half = activation_bytes(apply_settings(recipe, ["precision.dtype=bf16"]), (64, 3, 32, 32))
    assert half < 0.9 * full


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    logged: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 0)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            logged.append((name, value, step))

        def close(self) -> None:
            logged.append(("closed", 0.0, 0))

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(reporting, "find_spec", lambda name: object())
    run("train", "debug", "--out", tmp_path, *SHORT, "--track", "tensorboard")
    assert ("loss", losses(tmp_path)[2], 2) in logged and logged[-1][0] == "closed"
    assert not any(isinstance(value, str) for _, value, _ in logged)


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"qmargin\[wandb\]"):
        run("train", "debug", "--out", tmp_path / "out", "--track", "wandb")
    assert not (tmp_path / "out").exists()
    begun: list[dict[str, Any]] = []

    class Run:
        id = "abc123"

        def log(self, numbers: dict[str, float], step: int) -> None:
            begun[-1].setdefault("steps", []).append(step)

        def finish(self) -> None:
            begun[-1]["is_finished"] = True

    def init(**options: Any) -> Run:
        begun.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr(reporting, "find_spec", lambda name: object())
    run("train", "debug", "--out", tmp_path, *SHORT, "--track", "wandb")
    run("train", "debug", "--out", tmp_path, *SHORT, *LONGER, "--resume", "--track", "wandb")
    assert [options["id"] for options in begun] == [None, "abc123"]
    assert [options["steps"] for options in begun] == [[2, 4], [6]]
    assert begun[0]["config"]["loss"]["margin"] == 0.2 and begun[1]["is_finished"]


def test_a_lost_rank_has_an_exit_status_of_its_own(tmp_path, monkeypatch, capsys):
    def lose(*details: object, **options: object) -> None:
        raise RankError("rank 3 sent no heartbeat")

    monkeypatch.setattr(loop, "train", lose)
    with pytest.raises(SystemExit) as stop:
        run("train", "debug", "--out", tmp_path)
    assert stop.value.code == 75
    assert capsys.readouterr().err == "qmargin: error: rank 3 sent no heartbeat\n"


@pytest.mark.dist
def test_a_signal_saves_and_has_its_exit_status(tmp_path):
    """SIGTERM; test_interrupts.py has Ctrl-C."""
    settings = ["--set=run.epochs=500", "--set=run.log_every=1", "--set=run.save_every_steps=9000"]
    command = [sys.executable, "-W", "error", "-m", "qmargin", "train", "debug", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), *settings],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("training debug on cpu: ")
    assert "step 1/25000" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143, errors
    assert status(tmp_path)["state"] == "stopped" and len(list(tmp_path.glob("*/step-*"))) == 1


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_by_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, "-m", "qmargin", "train", "debug", "--out", str(tmp_path), *SHORT],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    ours = ("training ", "step ", "finished ")  # the launcher has lines of its own
    lines = [line for line in result.stderr.splitlines() if line.startswith(ours)]
    assert lines[0].startswith("training debug on 2 ranks: 3,200 samples")
    assert len(lines) == 4  # from the first rank alone
    assert events(tmp_path, "start")[0]["world"] == 2


def test_exit_statuses_are_documented(capsys):
    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    section = page.read_text("utf-8").partition("## Exit status")[2].partition("\n## ")[0]
    told = re.findall(
        r"\d+", " ".join(line.split("|")[1] for line in section.split("\n") if "|" in line)
    )
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    statuses = re.findall(r"^  (\d+)  ", capsys.readouterr().out, re.MULTILINE)
    assert len(statuses) == 6 and set(statuses) <= set(told)


def test_the_doctor_says_what_runs_and_what_is_missing(capsys, tmp_path, monkeypatch):
    run("doctor", "--out", tmp_path / "not" / "yet")
    lines = capsys.readouterr().out.splitlines()
    table = {name: text.strip() for name, text in (line.split("  ", 1) for line in lines)}
    assert table["torch"] == torch.__version__ and "threads" in table["cpu"]
    assert "no Triton kernels: tensors are on cpu" in table["head on cpu"]
    assert "GiB" in table["free memory"] and f"GiB at {tmp_path}" in table["free disk"]
    assert {"extra triton", "extra wandb", "several ranks"} <= set(table)
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    run("doctor")
    assert "pip install 'qmargin[wandb]'" in capsys.readouterr().out


def test_recipes_are_listed_and_printed_as_they_would_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("recipes")
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line and not line.startswith(" ")]
    assert headings[0].startswith("Start here") and lines[1].split()[0] == "faces_tiny"
    names = [line.split()[0] for line in lines if line.startswith(" ")]
    assert sorted(names) == sorted(list_recipes()) and len(headings) == 4
    assert any(line.endswith("on a CPU in a minute.") for line in lines)
    Path("debug").mkdir()  # a folder of that name is no recipe
    run("train", "debug", "--set", "loss.margin=0.3", "--set", "seed=3", "--print-recipe")
    printed = capsys.readouterr().out
    recipe = from_yaml(printed)
    assert (recipe.loss.margin, recipe.seed) == (0.3, 3)
    Path("mine.yaml").write_text(printed, encoding="utf-8")
    run("train", "mine.yaml", "--print-recipe")
    assert capsys.readouterr().out == printed
    Path("own.yml").write_text(to_yaml(load_recipe("debug", ["seed=9"])), encoding="utf-8")
    assert load_recipe("own.yml").seed == 9
