"""What goes wrong in a run of one rank: bad samples, bad values, spikes, kills, a second run."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.processes import Script
from helpers.runs import (
    MARK,
    FaultyIdentities,
    events,
    fragile_recipe,
    losses,
    saved_files,
    status,
    tiny_recipe,
    wait_for_step,
)
from qmargin.data.order import GlobalOrder
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.heads.paths import Sparse
from qmargin.training import build, loop, session, start
from qmargin.training.checkpoint import list_steps, load_checkpoint, open_checkpoint, read_backbone
from qmargin.training.loop import train
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings, to_yaml
from qmargin.training.start import RunLock
from qmargin.training.step import StepResult

SAMPLES = GlobalOrder(3200, seed=0, batch_size=64)  # of the debug recipe
NAN = float("nan")


def sample_of(step: int, row: int = 7) -> int:
    return int(SAMPLES.batch(step)[row])


def state_of_loop(out: Path, step: int) -> dict:
    return load_checkpoint(open_checkpoint(out / "checkpoints" / f"step-{step:06d}")).loop


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_an_input_that_is_not_finite_is_skipped(value: float, tmp_path: Path) -> None:
    """Neither weights nor running statistics notice; the sample is named."""
    bad = sample_of(5)
    recipe = tiny_recipe("run.max_steps=8", "schedule.warmup_epochs=0")
    outcome = train(recipe, tmp_path, dataset=FaultyIdentities([bad], value), device="cpu")
    assert (outcome.step, outcome.num_skipped) == (8, 1)
    (skip,) = events(tmp_path, "skip")
    assert (skip["step"], skip["samples"]) == (5, [f"sample-{bad}"])
    assert losses(tmp_path)[6] == "nan" and losses(tmp_path)[7] < 100
    whole = read_backbone(open_checkpoint(outcome.checkpoint))
    assert all(bool(value.isfinite().all()) for value in whole.values())


@pytest.mark.parametrize("value", [NAN, MARK], ids=["input", "gradient"])
def test_a_gradient_that_is_not_finite_is_skipped(value: float, tmp_path: Path) -> None:
    """Weights, momentum and running statistics are those before the step."""
    bad = sample_of(5)
    for name, steps in (("before", 5), ("after", 6)):
        recipe = fragile_recipe(f"run.max_steps={steps}", "model.options.dropout=0")
        train(recipe, tmp_path / name, dataset=FaultyIdentities([bad], value), device="cpu")
    (skip,) = events(tmp_path / "after", "skip")
    assert f"sample-{bad}" in skip["samples"]
    before, after = saved_files(tmp_path / "before", 5), saved_files(tmp_path / "after", 6)
    if value == MARK:
        assert skip["reason"] == "the gradient is not finite" and len(skip["samples"]) == 64
        measured = "head_state.safetensors"  # the head did take its step, up to the update
        assert before.pop(measured) != after.pop(measured)
    assert before == after


@pytest.mark.parametrize("clip", ["null", "5.0"])
def test_overflow_of_a_scaled_gradient_lowers_the_scale(clip: str, tmp_path: Path) -> None:
    recipe = fragile_recipe("precision.dtype=fp16", f"optimizer.clip_norm={clip}")
    recipe = apply_settings(recipe, ["run.nan_budget=0", "run.max_steps=8"])
    dataset = FaultyIdentities([sample_of(5)], MARK)
    assert train(recipe, tmp_path, dataset=dataset, device="cpu").num_skipped == 0
    # the first gradients are too large for the scale that fp16 begins with
    assert [skip["step"] for skip in events(tmp_path, "skip")] == [0, 5]
    scales = [record["loss_scale"] for record in events(tmp_path, "step")]
    assert scales == [32768.0] * 5 + [16384.0] * 3


def test_too_many_steps_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    bad = [sample_of(step) for step in (2, 4)]
    with pytest.raises(DataError, match=f"step 4 .*sample-{bad[1]}.*nan_budget allows 1"):
        dataset = FaultyIdentities(bad, NAN)
        train(tiny_recipe("run.nan_budget=1"), tmp_path, dataset=dataset, device="cpu")
    assert status(tmp_path)["state"] == "failed"
    assert "nan_budget" in status(tmp_path)["error"]


def test_corrupt_samples_are_replaced_and_counted(tmp_path: Path) -> None:
    bad = [sample_of(2), sample_of(3)]
    train(tiny_recipe("run.max_steps=6"), tmp_path, dataset=FaultyIdentities(bad), device="cpu")
    found = [(record["step"], record["samples"]) for record in events(tmp_path, "corrupt")]
    assert found == [(2, [f"sample-{bad[0]}"]), (3, [f"sample-{bad[1]}"])]
    assert state_of_loop(tmp_path, 6)["corrupt"] == {"epoch": 0, "count": 2}
    # the count of an epoch survives a resume
    recipe = tiny_recipe("run.max_steps=9", "data.max_corrupt=2")
    dataset = FaultyIdentities([*bad, sample_of(7)])
    with pytest.raises(DataError, match="3 corrupt samples in epoch 0"):
        train(recipe, tmp_path, resume=True, allow_changes=True, dataset=dataset, device="cpu")


@pytest.mark.parametrize(
    "setting",
    [
        f"data.num_classes={2**62}",
        f"data.options.samples_per_class={2**62}",
        f"data.options.samples_per_class={2**27}",  # 200 GiB of labels
        f"model.embedding_dim={2**62}",
        f"model.options.hidden_dim={2**62}",
        f"model.options.hidden_dim={2**40}",
        f"data.batch_size={2**62}",
    ],
)
def test_sizes_that_no_machine_has_are_refused(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our own error, with the key or the size in it, and not by a crash of numpy or torch."""

    def full(*details: object, **options: object) -> None:
        raise MemoryError("Unable to allocate 200. GiB")

    if setting.endswith(str(2**27)):
        monkeypatch.setattr(session, "check_labels", full)  # a large machine would begin to fill
    name = setting.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=f"{name}|{2**62:,}"):
        train(tiny_recipe(setting), tmp_path, device="cpu")


@pytest.mark.parametrize("label", [200, -1])
def test_labels_are_checked_before_step_0(label: int, tmp_path: Path) -> None:
    dataset = FaultyIdentities(labels_changed={77: label})
    with pytest.raises(DataError, match=rf"train.lst, row 77: label {label} .* \[0, 200\)"):
        train(tiny_recipe(), tmp_path, dataset=dataset, device="cpu")
    assert not (tmp_path / "journal.jsonl").exists()


def test_data_of_another_size_is_refused_on_resume(tmp_path: Path) -> None:
    train(tiny_recipe("run.max_steps=2"), tmp_path, device="cpu")
    dataset = FaultyIdentities(inner=FaultyIdentities().inner.__class__(200, 8, shape=(32,)))
    with pytest.raises(DataError, match=r"3,200 .* 1,600"):
        train(tiny_recipe("run.max_steps=2"), tmp_path, resume=True, dataset=dataset, device="cpu")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
        train(tiny_recipe(), tmp_path, device="cpu")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoints_are_passed_over_and_never_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe("run.max_steps=12", "run.save_every_steps=4")
    train(recipe, tmp_path, device="cpu")
    before, folder = saved_files(tmp_path, 12), tmp_path / "checkpoints"
    damage(folder / "step-000012" / "head-00000-of-00001.safetensors")
    capsys.readouterr()
    train(recipe, tmp_path, resume=True, device="cpu")
    lines = capsys.readouterr().err.splitlines()
    assert "step-000012" in lines[0] and "head-00000" in lines[0] and "step-000008" in lines[1]
    assert saved_files(tmp_path, 12) == before
    for path in folder.glob("step-*/manifest.json"):
        damage(path)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
            train(recipe, tmp_path, resume=resume, device="cpu")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*step-7; .* step-000012,"):
        train(recipe, tmp_path, resume=folder / "step-7", device="cpu")


def test_a_support_that_outgrows_the_lists_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_recipe("head.path=dense", "run.max_steps=6"), tmp_path / "dense", device="cpu")
    monkeypatch.setattr(build, "Sparse", partial(Sparse, list_capacity=2))
    train(tiny_recipe("head.path=sparse", "run.max_steps=6"), tmp_path / "short", device="cpu")
    steps = events(tmp_path / "short", "step")
    assert [record["num_redone"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["num_overflowed"] == 64 and steps[0]["path"] == "chunked"
    full, redone = (list(losses(tmp_path / name).values()) for name in ("dense", "short"))
    assert redone == pytest.approx(full, rel=1e-5)


def spike_at(steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Report a loss of 1e9 at some steps; the weights with which steps begin."""
    seen: dict[int, torch.Tensor] = {}
    take = loop.take_step

    def spiking(session: session.Session, *details: object, **options: object) -> StepResult:
        step = session.progress.step
        seen.setdefault(step, session.backbone.layers[0].weight.detach().clone())
        result = take(session, *details, **options)
        return StepResult(loss=1e9) if step in steps else result

    monkeypatch.setattr(loop, "take_step", spiking)
    return seen


def test_a_spike_rolls_back_and_skips_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spike_at((13,), monkeypatch)
    recipe = tiny_recipe("run.spike_factor=3", "run.spike_window=5")
    assert train(recipe, tmp_path, device="cpu").step == 20
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["checkpoint"], back["next_step"]) == (13, 10, 15)
    assert list(losses(tmp_path)) == [*range(1, 14), *range(16, 21)]
    assert torch.equal(seen[15], seen[10]) and not torch.equal(seen[16], seen[15])


def test_a_loss_that_keeps_rising_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike_at(tuple(range(5, 40)), monkeypatch)
    settings = ("run.spike_factor=3", "run.spike_window=2", "run.max_steps=40")
    monkeypatch.setattr(loop, "MOST_ROLLBACKS", 0)
    with pytest.raises(DataError, match=r"run\.spike_factor"):
        train(tiny_recipe(*settings, "run.save_every_steps=5"), tmp_path, device="cpu")


def test_a_resumed_run_remembers_the_recent_losses(tmp_path: Path) -> None:
    for last in (6, 8):
        settings = ("run.spike_factor=50", "run.spike_window=4", f"run.max_steps={last}")
        train(tiny_recipe(*settings), tmp_path, resume=True, allow_changes=True, device="cpu")
        expected = [losses(tmp_path)[step] for step in range(last - 3, last + 1)]
        assert state_of_loop(tmp_path, last)["losses"] == expected


RUN = """
import torch
torch.set_num_threads(1)
from qmargin.training.loop import train
from qmargin.training.recipe_files import from_yaml
outcome = train(from_yaml({recipe!r}), {out!r}, resume=True, device="cpu")
print(outcome.step, outcome.signal, flush=True)
"""


def start_run(recipe: Recipe, out: Path, step: int | None = None) -> Script:
    """Start a run, and wait until it has taken a step."""
    text, errors = RUN.format(recipe=to_yaml(recipe), out=str(out)), out.with_suffix(".err")
    process = Script(text, out.with_suffix(".out"), errors)
    if step is not None:
        wait_for_step(process, out, step, errors.read_text)
    return process


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """kill -9 at three moments, some of them during a save; the journal has every step once."""
    recipe = tiny_recipe("run.max_steps=150", "run.save_every_steps=7", "run.keep=2")
    out = tmp_path / "killed"
    for step in (20, 49, 99):
        process = start_run(recipe, out, step)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert max(list_steps(out / "checkpoints")) >= step - 14
    assert start_run(recipe, out).wait(120) == 0
    assert out.with_suffix(".out").read_text() == "150 0\n"
    train(recipe, tmp_path / "whole", device="cpu")
    assert saved_files(out, 150) == saved_files(tmp_path / "whole", 150)
    assert losses(out) == losses(tmp_path / "whole")
    assert len(events(out, "step")) == 150
    abandoned = (out / "journal-abandoned.jsonl").read_text(encoding="utf-8").splitlines()
    assert any(json.loads(line)["event"] == "step" for line in abandoned)


DAWDLE = """
import sys, time
from importlib import import_module
from qmargin.cli.main import main
module, _, name = {place!r}.rpartition(".")
module = import_module(f"qmargin.training.{{module}}")
def dawdle(*details, **options):
    print("here", flush=True)
    time.sleep(30)
setattr(module, name, dawdle)
sys.exit(main(["train", "debug", "--device=cpu", "--out", {out!r}, "--set=run.max_steps=1"]))
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("loop.start_process_group", signal.SIGTERM),
        ("start.check_writable", signal.SIGINT),
        ("build.build_dataset", signal.SIGTERM),
        ("loop._saver", signal.SIGINT),
    ],
)
def test_a_signal_before_the_first_step_leaves_nothing(
    place: str, number: signal.Signals, tmp_path: Path
) -> None:
    """At once, with its exit status: no traceback, no lock, no file that is not whole."""
    out, output, errors = tmp_path / "run", tmp_path / "out", tmp_path / "err"
    process = Script(DAWDLE.format(place=place, out=str(out)), output, errors)
    deadline = time.monotonic() + 60
    while "here" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.01)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait() == 128 + number, errors.read_text()
    assert time.monotonic() - began < 10
    assert "Traceback" not in errors.read_text()
    left = [path.name for path in out.rglob("*") if path.is_file() and path.stat().st_size]
    assert set(left) <= {"journal.jsonl", "status.json"}


def test_a_lock_is_given_back_by_a_run_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*details: object, **options: object) -> None:
        raise CheckpointError("no space")

    monkeypatch.setattr(start, "check_writable", refuse)
    with pytest.raises(CheckpointError, match="no space"):
        train(tiny_recipe(), tmp_path, device="cpu")
    assert not (tmp_path / "lock").exists()


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number: signal.Signals, tmp_path: Path) -> None:
    recipe = tiny_recipe("run.max_steps=5000", "run.epochs=200", "run.save_every_steps=4000")
    out = tmp_path / "run"
    process = start_run(recipe, out, 10)
    process.send_signal(number)
    assert process.wait() == 0, out.with_suffix(".err").read_text()
    step, stopped_by = map(int, out.with_suffix(".out").read_text().split())
    assert stopped_by == number and 10 <= step < 4000
    assert list(list_steps(out / "checkpoints")) == [step]
    assert (status(out)["state"], status(out)["signal"]) == ("stopped", number)
    shorter = apply_settings(recipe, [f"run.max_steps={step + 3}"])
    train(shorter, out, resume=True, allow_changes=True, device="cpu")
    train(shorter, tmp_path / "whole", device="cpu")
    assert saved_files(out, step + 3) == saved_files(tmp_path / "whole", step + 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_pipe_in_place_of_the_journal_is_refused(tmp_path):
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(DataError, match=r"journal\.jsonl is a named pipe"):
        train(tiny_recipe("run.max_steps=1"), tmp_path, device="cpu")
