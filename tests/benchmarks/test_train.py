"""``python -m benchmarks train`` at a size that a CPU does in seconds."""

import json

import pytest
import torch

from benchmarks import train as bench_train
from helpers.commands import run_benchmark
from qmargin.recipes import get_recipe
from qmargin.training.recipe_files import apply_settings

SMALL = ("data.num_classes=50", "data.batch_size=16")


def test_one_command_measures_everything(tmp_path, capsys):
    out, file = tmp_path / "disk", tmp_path / "found.json"
    out.mkdir()
    settings = [f"--set={setting}" for setting in SMALL]
    short = ["--repeats=3", "--seconds=1", "--save-steps=3", "--device=cpu"]
    status = run_benchmark(["train", "debug", *settings, *short, f"--out={out}", f"--json={file}"])
    assert status == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert set(found["ms"]) == set(bench_train.WHAT) and min(found["ms"].values()) > 0
    assert all(len(times) == 3 for times in found["ms_all"].values())
    assert found["classes"] == 50 and found["head"].startswith("sparse")
    assert found["loop_share"] + found["head_share"] < 1.0
    save = found["save"]
    assert save["steps_during"] >= 1 and save["bytes"] > 10_000
    assert save["stall_s"] == pytest.approx(save["largest_s"] - save["usual_s"])
    assert save["largest_s"] >= save["copy_s"]
    assert not list(out.iterdir())  # the checkpoint is gone
    captured = capsys.readouterr()
    assert "loop, share of the step" in captured.out and "step 2/" not in captured.err


def test_timed_steps_leave_the_weights_as_they_are(tmp_path):
    recipe = bench_train.q_margin_recipe(apply_settings(get_recipe("debug"), SMALL))
    with bench_train.looped(recipe, tmp_path, "cpu") as step:
        session = step.run.session
        weights = [*session.backbone.parameters(), session.head.prototypes]
        before = [weight.detach().clone() for weight in weights]
        bare = bench_train.Bare(session, next(step.batches))
        for take in (step, bare.whole, bare.backbone, step):
            take()
        assert session.progress.step == 2
        for one, other in zip(before, weights, strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=1e-20)  # biases begin at zero


def test_a_dense_head_that_does_not_fit_is_left_out(monkeypatch, capsys):
    def refuses(*given: object) -> object:
        def step() -> None:
            raise torch.OutOfMemoryError("too large")

        return step

    monkeypatch.setattr(bench_train, "common_step", refuses)
    recipe = apply_settings(get_recipe("debug"), SMALL)
    settings = bench_train.TrainBenchmark(recipe, "cpu", repeats=3, seconds=1.0, save_steps=1)
    found = bench_train.run_train_benchmark(settings)
    assert found["versus_common"] is None and bench_train.COMMON not in found["ms"]
    bench_train.print_results(found)
    assert "out of memory" in capsys.readouterr().out
