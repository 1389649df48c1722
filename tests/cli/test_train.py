"""``qmargin train`` and ``qmargin doctor``, as a user meets them."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import events, losses, status
from qmargin.cli import doctor
from qmargin.cli.main import build_parser, main
from qmargin.errors import ConfigError, RankError
from qmargin.training import loop, trackers

SHORT = ["--device", "cpu", "--set", "run.max_steps=4", "--set", "run.log_every=2"]


def run(*arguments: str) -> None:
    parsed = build_parser().parse_args(arguments)
    parsed.run(parsed)


def test_training_writes_a_line_per_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train", "debug", "--out", str(tmp_path), *SHORT)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert all("schedule." in line for line in lines if line.startswith("warning: "))
    lines = [line for line in lines if not line.startswith("warning: ")]
    assert captured.out == "" and len(lines) == 4
    first, *lines = lines
    assert first == "training debug on cpu: 3,200 samples of 200 classes, 4 steps of 64"
    assert lines[0].startswith("step 2/4, epoch 0, loss 2")
    for part in ("lr ", "margin 0.2 (0.4941)", "support ", "samples/s", " left"):
        assert part in lines[0]
    saved = tmp_path / "checkpoints" / "step-000004"
    assert lines[-1] == f"finished at step 4 of 4, saved in {saved}"


def test_resume_goes_on(tmp_path: Path) -> None:
    run("train", "debug", "--out", str(tmp_path), *SHORT)
    longer = ["--set", "run.max_steps=6", "--allow-changes"]
    run("train", "debug", "--out", str(tmp_path), *SHORT, *longer, "--resume")
    assert list(losses(tmp_path)) == [2, 4, 6]
    named = str(tmp_path / "checkpoints" / "step-000004")
    run("train", "debug", "--out", str(tmp_path), *SHORT, *longer, "--resume-from", named)
    assert [record["step"] for record in events(tmp_path, "start")] == [0, 4]
    assert list(losses(tmp_path)) == [2, 4, 6]


@pytest.mark.parametrize("named", [["debug"], []], ids=["named", "not named"])
def test_resume_alone_takes_the_stored_recipe(
    named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path), "--device", "cpu"]
    begun = ["--set", "loss.margin=0.3", "--set", "run.save_every_steps=2"]
    run("train", "debug", *out, *SHORT, *begun)
    capsys.readouterr()
    checkpoint = str(tmp_path / "checkpoints" / "step-000002")
    run("train", *named, *out, "--resume-from", checkpoint)
    assert [step["margin"] for step in events(tmp_path, "step")] == [0.3, 0.3]
    assert events(tmp_path, "start")[-1]["changes"] == []
    text = capsys.readouterr().err
    assert ("loss.margin: 0.3 -> 0.2" in text) == bool(named)
    run("train", *named, *out, "--resume", "--set", "data.num_workers=1")  # changes no result
    for settings in (["--set", "optimizer.lr=0.05"], ["--set", "run.max_steps=6"]):
        key = settings[1].partition("=")[0]
        with pytest.raises(ConfigError, match=rf"{key}: .*--allow-changes") as refused:
            run("train", *named, *out, "--resume", *settings)
        assert "loss.margin" not in str(refused.value)  # only what was asked for
    run("train", *out, "--resume", "--set", "run.max_steps=6", "--allow-changes")
    assert [step["margin"] for step in events(tmp_path, "step")] == [0.3, 0.3, 0.3]
    run("train", *named, *out, "--resume", "--print-recipe")
    assert "margin: 0.3" in capsys.readouterr().out


def test_a_recipe_is_needed_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipe is missing; name one"):
        run("train", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="no checkpoint in"):
        run("train", "--out", str(tmp_path), "--resume")
    with pytest.raises(ConfigError, match="--out is missing"):
        run("train", "--resume")
    with pytest.raises(ConfigError, match=r"--allow-changes.*--resume"):
        run("train", "debug", "--out", str(tmp_path), "--allow-changes")


def test_a_named_recipe_replaces_the_stored_one_where_changes_are_allowed(tmp_path: Path) -> None:
    run("train", "debug", "--out", str(tmp_path), *SHORT, "--set", "loss.margin=0.3")
    longer = ["--set", "run.max_steps=6", "--resume", "--allow-changes"]
    run("train", "debug", "--out", str(tmp_path), *SHORT, *longer)
    assert [step["margin"] for step in events(tmp_path, "step")] == [0.3, 0.3, 0.2]


def test_a_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="--out is missing; name the folder"):
        run("train", "debug")


def test_a_dry_run_reports_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("train", "debug", "--dry-run", "--device", "cpu")
    text = capsys.readouterr().out
    for part in ("3,200 samples of 200 classes", "300 steps", "at the peak", "samples/s"):
        assert part in text
    assert "activations" in text and "losses     2" in text
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_the_run_never_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    late = ["margin_schedule.start_epoch=6", "margin_schedule.end_epoch=8"]
    run("train", "debug", "--dry-run", "--device=cpu", *(f"--set={setting}" for setting in late))
    text = capsys.readouterr().out
    assert "warning: the margin stays at 0" in text and "margin_schedule.start_epoch is 6" in text
    run("train", "debug", "--dry-run", "--device=cpu")
    assert "warning" not in capsys.readouterr().out


def test_a_dry_run_refuses_what_cannot_fit() -> None:
    """Two hundred million classes: refused with the estimate, before anything is allocated."""
    settings = ["data.num_classes=200000000", "data.options.samples_per_class=1"]
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"needs about 7\d\.\d GiB on cpu .*prototypes 23\.8 GiB"):
        run("train", "debug", "--dry-run", "--device", "cpu", *(f"--set={s}" for s in settings))
    assert time.monotonic() - began < 60


def test_a_dry_run_counts_what_the_backbone_keeps() -> None:
    """Half precision and more parts need less."""
    from qmargin.training.memory import activation_bytes

    settings = ["model.backbone=small_conv", "data.options.shape=[3, 32, 32]"]
    recipe = _recipe(*settings)
    full = activation_bytes(recipe, (64, 3, 32, 32))
    # three convolutions: 16, 32 and 64 channels at half the size each, input, norm and relu of each
    assert 64 * 4 * (3 * 32 * 32 + 16 * 16 * 16) < full < 64 * 4 * 4 * 16 * 32 * 32
    assert activation_bytes(recipe, (32, 3, 32, 32)) == pytest.approx(full / 2, rel=0.01)
    half = activation_bytes(_recipe(*settings, "precision.dtype=bf16"), (64, 3, 32, 32))
    assert half < 0.9 * full


def _recipe(*settings: str) -> Any:
    from dataclasses import replace

    from qmargin.recipes import get_recipe
    from qmargin.training.recipe import ModelPart
    from qmargin.training.recipe_files import apply_settings

    recipe = get_recipe("debug")
    return apply_settings(replace(recipe, model=ModelPart("small_conv", 32)), settings)


def test_trackers_get_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 0)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            logged.append((name, value, step))

        def close(self) -> None:
            logged.append(("closed", 0.0, 0))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    run("train", "debug", "--out", str(tmp_path), *SHORT, "--track", "tensorboard")
    assert ("loss", losses(tmp_path)[2], 2) in logged and logged[-1][0] == "closed"
    assert not any(isinstance(value, str) for _, value, _ in logged)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    run("train", "debug", "--out", str(tmp_path), *SHORT, "--track", "wandb")
    more = ["--resume", "--set", "run.max_steps=6", "--allow-changes"]
    run("train", "debug", "--out", str(tmp_path), *SHORT, *more, "--track", "wandb")
    assert [options["id"] for options in begun] == [None, "abc123"]
    assert [options["steps"] for options in begun] == [[2, 4], [6]]
    assert begun[0]["config"]["loss"]["margin"] == 0.2 and begun[1]["is_finished"]


def test_a_tracker_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'qmargin\[wandb\]'"):
        run("train", "debug", "--out", str(tmp_path / "out"), "--track", "wandb")
    assert not (tmp_path / "out").exists()


def test_a_lost_rank_has_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(*details: object, **options: object) -> None:
        raise RankError("rank 3 gave no sign of life")

    monkeypatch.setattr(loop, "train", lose)
    with pytest.raises(SystemExit) as stop:
        run("train", "debug", "--out", str(tmp_path))
    assert stop.value.code == 75
    assert capsys.readouterr().err == "qmargin: error: rank 3 gave no sign of life\n"


@pytest.mark.dist
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_have_their_exit_status(number: signal.Signals, code: int, tmp_path: Path) -> None:
    settings = ["run.epochs=500", "run.log_every=1", "run.save_every_steps=9000"]
    command = [sys.executable, "-W", "error", "-m", "qmargin", "train", "debug", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), *(f"--set={setting}" for setting in settings)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("training debug on cpu: ")
    assert "step 1/25000" in process.stderr.readline()
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    assert status(tmp_path)["state"] == "stopped" and len(list(tmp_path.glob("*/step-*"))) == 1


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_by_torchrun(tmp_path: Path) -> None:
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


def test_refusals_are_one_line_and_exit_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["debug"], ["debgu"], ["debug", "--set", "margin=3"], ["none.yaml"]):
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("qmargin: error: ") and error.count("\n") == 1


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    section = (
        page.read_text(encoding="utf-8").partition("## qmargin train")[2].partition("\n## ")[0]
    )
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    options = set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) - {"--help"}
    assert len(options) >= 9
    assert {option for option in options if f"`{option}`" not in section} == set()
    statuses = re.findall(r"^  (\d+)  ", text, re.MULTILINE)
    assert len(statuses) == 6
    assert {status for status in statuses if f"| {status} |" not in section} == set()


def test_the_doctor_says_what_runs_and_why_not_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("doctor", "--out", str(tmp_path / "not" / "yet"))
    lines = capsys.readouterr().out.splitlines()
    table = dict(line.split("  ", 1) for line in lines)
    table = {name: text.strip() for name, text in table.items()}
    assert table["torch"] == torch.__version__
    assert "not triton: tensors are on cpu" in table["head on cpu"]
    assert "threads" in table["cpu"] and "GiB" in table["free memory"]
    assert "GiB" in table["free disk"] and str(tmp_path) in table["free disk"]
    assert {"extra triton", "extra wandb", "several ranks"} <= set(table)


def test_the_doctor_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    run("doctor")
    expected = "not installed; for `qmargin train --track wandb`: pip install 'qmargin[wandb]'"
    assert expected in capsys.readouterr().out
