"""Sweeps from end to end: what is trained, kept, refused, and gone on with."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.runs import saved_files
from helpers.sweeps import small_sweep
from qmargin.cli.main import main
from qmargin.errors import ConfigError, DataError
from qmargin.sweep.run import run_sweep
from qmargin.sweep.trial import RESULT
from qmargin.training.lock import RunLock

LOOKS = ("run.max_steps=24", "run.validate_every=12", "schedule.warmup_epochs=0")
GRID = ("loss.scale=10,32", "m_eff=0.2,0.5")


def trials(out: Path) -> list[dict]:
    lines = (out / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_grid_is_trained_measured_and_written(tmp_path: Path) -> None:
    said: list[str] = []
    summary = run_sweep(small_sweep(tmp_path, *GRID, seeds=2, say=said.append))
    found = trials(tmp_path)
    assert len(found) == 8 and {trial["state"] for trial in found} == {"finished"}
    assert {trial["seed"] for trial in found} == {0, 1} and {trial["step"] for trial in found} == {
        6
    }
    assert len({trial["recipe_sha256"] for trial in found}) == 8
    row = summary.rows[2]
    assert row.point == {"loss.scale": "32", "m_eff": "0.2"} and row.gap == pytest.approx(0.2)
    values = [trial["metrics"]["eer"] for trial in found if trial["point"] == row.point]
    spread = row.spread("eer")
    assert spread is not None
    assert (spread.mean, spread.deviation) == (statistics.fmean(values), statistics.stdev(values))
    names = {path.name for path in tmp_path.rglob("*.*") if path.parent.name != "trials"}
    expected = {"sweep.json", "table.md", "table.csv", "table.tex", "sensitivity.svg"}
    assert expected | {"effective-margin.pdf"} <= names
    best = summary.best()
    assert best is not None and said[-1].startswith("best by tar@0.01: loss.scale=")
    assert said[0] == "trials: 8, there already: 0"
    assert said[1].startswith("[1/8] scale 10, m_eff 0.2, seed 0: tar@0.01 ")
    assert " left" in said[1] and " left" not in said[8]


def test_a_schedule_that_trials_never_reach_is_announced_once(tmp_path: Path) -> None:
    """Their own warnings are in their logs, where nobody looks in time."""
    late = ("margin_schedule.start_epoch=6", "margin_schedule.end_epoch=9")
    said: list[str] = []
    run_sweep(small_sweep(tmp_path, "loss.margin=0.1,0.3", settings=late, say=said.append))
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert "the margin stays at 0" in warning and "margin_schedule.start_epoch is 6" in warning


def test_what_is_there_is_kept_and_more_is_added(tmp_path: Path) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10"))
    (first,) = (tmp_path / "trials").iterdir()
    before = (first / RESULT).stat().st_mtime_ns
    said: list[str] = []
    run_sweep(small_sweep(tmp_path, "loss.scale=10,16", seeds=2, say=said.append))
    assert said[0] == "trials: 4, there already: 1"
    assert (first / RESULT).stat().st_mtime_ns == before and len(trials(tmp_path)) == 4


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10"))
    with pytest.raises(ConfigError, match=r"another recipe: optimizer\.lr: 0\.1 -> 0\.2 \(there"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10", settings=("optimizer.lr=0.2",)))
    with pytest.raises(ConfigError, match=r"holds a sweep whose measure is tar@0\.01"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10", measure="eer"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": {"name": "half"}}, "cannot be read, so they cannot be compared"),
        ({"recipe_sha256": "other"}, r"no setting in sweep\.json differs"),
    ],
)
def test_another_sweep_whose_settings_are_not_known_is_refused(
    tmp_path: Path, changes: dict, message: str
) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10"))
    plan = json.loads((tmp_path / "sweep.json").read_bytes())
    (tmp_path / "sweep.json").write_text(json.dumps({**plan, "recipe_sha256": "", **changes}))
    with pytest.raises(ConfigError, match=message):
        run_sweep(small_sweep(tmp_path, "loss.scale=10"))


def test_only_some_of_many_settings_that_differ_are_named(tmp_path: Path) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10"))
    settings = ("optimizer.lr=0.2", "loss.preset=cosface", "data.batch_size=16", "seed=3")
    others = ("model.embedding_dim=8", "data.num_classes=20")
    with pytest.raises(ConfigError, match=r", and [1-9] more \(there -> here\)"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10", settings=(*settings, *others)))


def test_what_is_there_is_counted_before_anything_is_trained(tmp_path: Path) -> None:
    axis = "loss.scale=10,16,32"
    run_sweep(small_sweep(tmp_path, axis, seeds=2))
    missing = sorted(tmp_path.glob("trials/*seed=0*"))  # one of each point
    for folder in missing:
        shutil.rmtree(folder)
    (tmp_path / "sweep.json").unlink()
    said: list[str] = []
    run_sweep(small_sweep(tmp_path, axis, seeds=2, say=said.append))
    assert len(missing) == 3 and said[0] == "trials: 6, there already: 3"
    assert [line.split(" ")[0] for line in said[1:4]] == ["[4/6]", "[5/6]", "[6/6]"]


def test_one_sweep_in_a_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match="is in use by"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10"))


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be opened"):
        run_sweep(small_sweep(tmp_path / "file" / "sweep", "loss.scale=10"))
    with pytest.raises(ConfigError, match="cannot be opened"):
        run_sweep(small_sweep(Path("/proc/sweep"), "loss.scale=10"))


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ((), {}, "there is nothing to sweep"),
        (("loss.scale=10",), {"seeds": 0}, "seeds is 0"),
        (("loss.scale=10",), {"parallel": 0}, "parallel is 0"),
        (("loss.scale=10",), {"devices": ()}, "devices is empty"),
        (("loss.scal=10",), {}, "did you mean 'scale'"),
        (("loss.scal=10:20",), {"search": "optuna"}, "did you mean 'scale'"),
        (("loss.scale=10",), {"num_points": 3}, "--trials is 3 and a grid visits every"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, axes: tuple, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_sweep(tmp_path / "new", *axes, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ("cpu", "cuda:0")}, "device is 'cuda:0'"),
        ({"devices": ("tpu",)}, "device is 'tpu'"),
        ({"measure": "tar@1e-9"}, "the measure is 'tar@1e-9'"),
    ],
)
def test_what_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        run_sweep(small_sweep(tmp_path / "new", "loss.scale=10", **options))
    assert not (tmp_path / "new").exists()


def test_a_trial_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    options = small_sweep(tmp_path, "optimizer.lr=1e38,0.1", settings=("run.nan_budget=0",))
    with pytest.raises(DataError, match=r"1 of 2 trials failed, the first with optimizer.lr=1e38"):
        run_sweep(options)
    states = {trial["point"]["optimizer.lr"]: trial["state"] for trial in trials(tmp_path)}
    assert states == {"1e38": "failed", "0.1": "finished"}
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "1 failed" in table
    with pytest.raises(DataError):  # failures are tried again, what is finished is kept
        run_sweep(options)


def test_seeds_alone_are_a_sweep(tmp_path: Path) -> None:
    (row,) = run_sweep(small_sweep(tmp_path, seeds=2)).rows
    assert row.point == {} and row.is_complete and len(row.results) == 2


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(DataError, match=r"sweep\.json is damaged"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10"))


@pytest.mark.parametrize("damage", [b"", b'{"format": "qmargin-sweep-tr', b'{"format": "other"}'])
def test_a_result_that_cannot_be_read_is_made_again_from_the_checkpoint(
    tmp_path: Path, damage: bytes
) -> None:
    (before,) = run_sweep(small_sweep(tmp_path, "loss.scale=10")).rows
    (folder,) = (tmp_path / "trials").iterdir()
    (folder / RESULT).write_bytes(damage)
    saved = saved_files(folder, 6)
    said: list[str] = []
    (after,) = run_sweep(small_sweep(tmp_path, "loss.scale=10", say=said.append)).rows
    assert said[0] == "trials: 1, there already: 0"
    assert after.results[0].metrics == before.results[0].metrics
    assert saved_files(folder, 6) == saved  # nothing was trained anew


def test_a_result_of_another_recipe_is_refused(tmp_path: Path) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10"))
    (folder,) = (tmp_path / "trials").iterdir()
    content = json.loads((folder / RESULT).read_bytes())
    (folder / RESULT).write_text(json.dumps({**content, "recipe_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="is of another recipe than this sweep has"):
        run_sweep(small_sweep(tmp_path, "loss.scale=10"))


def test_a_trial_without_a_whole_checkpoint_names_the_folder_to_remove(tmp_path: Path) -> None:
    run_sweep(small_sweep(tmp_path, "loss.scale=10,16"))
    first, second = sorted((tmp_path / "trials").iterdir())
    (first / RESULT).unlink()
    for manifest in first.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text("{")
    remedy = re.escape(f"no whole checkpoint; remove {first}, only this trial is trained anew")
    with pytest.raises(DataError, match=remedy) as refused:
        run_sweep(small_sweep(tmp_path, "loss.scale=10,16"))
    assert "another folder" not in str(refused.value)
    assert "none of the 2 checkpoints" in (first / "train.log").read_text(encoding="utf-8")
    shutil.rmtree(first)
    before = (second / RESULT).stat().st_mtime_ns
    assert all(row.is_complete for row in run_sweep(small_sweep(tmp_path, "loss.scale=10,16")).rows)
    assert (second / RESULT).stat().st_mtime_ns == before


def test_trials_that_are_behind_are_stopped(tmp_path: Path) -> None:
    axes = "optimizer.lr=0.1,0.09,0.08,0.11,1e-6"  # the last does not learn
    options = small_sweep(tmp_path, axes, settings=LOOKS, stop_early=True)
    summary = run_sweep(options)
    states = [row.results[0].state for row in summary.rows]
    assert states[:3] == ["finished"] * 3 and states[4] == "stopped early"
    last = summary.rows[4]
    assert last.results[0].step == 12 and last.note == "1 stopped early"
    assert not last.is_complete and "behind the median" in last.results[0].error
    assert run_sweep(options).rows[4].results == last.results  # and stays so


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--set", "run.max_steps=2", "--devices", "cpu"]
    out = tmp_path / "sweep"
    assert main(["sweep", "debug", *steps, "--grid", "loss.alpha=1.25,1.5", f"--out={out}"]) == 0
    assert "[2/2] alpha 1.5, seed 0: tar@0.0001 " in capsys.readouterr().out
    plan = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert plan["measure"] == "tar@0.0001" and plan["axes"][0]["key"] == "loss.alpha"
    assert main(["sweep", "debug", "--grid", "loss.alpa=1,2", "--out", str(out)]) == 2
    assert "did you mean 'alpha'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--grid", "loss.scale=10,20", "--set", "loss.scale=3"],
            "loss.scale=3 is set, and loss.scale is",
        ),
        (["--grid", "m_eff=0.2,0.3", "--set", "loss.margin=0.3"], "follows from the axis m_eff"),
        (["--grid", "loss.scale=10,20", "--trials", "3"], "--trials is 3 and a grid"),
    ],
)
def test_options_of_the_command_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["sweep", "debug", *words, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "new").exists()


SCRIPT = """
import sys
from pathlib import Path
from helpers.sweeps import small_sweep
from qmargin.sweep.run import run_sweep
if __name__ == "__main__":
    settings = ("run.max_steps=60", "run.save_every_steps=5")
    parallel = int(sys.argv[2])
    out, axis = Path(sys.argv[1]), "loss.scale=10,16"
    run_sweep(small_sweep(out, axis, settings=settings, parallel=parallel))
"""


def start(out: Path, parallel: int) -> subprocess.Popen:
    script = out.parent / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script), str(out), str(parallel)], env=environment)


def wait_for(pattern: str, folder: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_sweep_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, parallel: int) -> None:
    settings = ("run.max_steps=60", "run.save_every_steps=5")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_sweep(small_sweep(whole, "loss.scale=10,16", settings=settings))
    process = start(killed, parallel)
    wait_for("trials/*/checkpoints/step-000010", killed, process)
    process.kill()
    process.wait(timeout=60)
    assert len(list(killed.glob(f"trials/*/{RESULT}"))) < 2
    time.sleep(1.0)  # workers notice that the sweep is gone
    run_sweep(small_sweep(killed, "loss.scale=10,16", settings=settings))
    starts = [path.read_text().count('"start"') for path in killed.glob("trials/*/journal.jsonl")]
    assert max(starts) == 2  # it was a half training that went on
    for trial in (whole / "trials").iterdir():
        assert saved_files(trial, 60) == saved_files(killed / "trials" / trial.name, 60)
    metrics = [[trial["metrics"] for trial in trials(out)] for out in (whole, killed)]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_signal_saves_what_runs_on_every_device(tmp_path: Path) -> None:
    from qmargin.cli import sweep as command

    assert "143  stopped by SIGTERM" in command.EXIT_CODES
    out = tmp_path / "sweep"
    process = start(out, 2)
    wait_for("trials/*/checkpoints/step-000010", out, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    states = [json.loads(path.read_text())["state"] for path in out.glob("trials/*/status.json")]
    assert "stopped" in states and set(states) <= {"stopped", "finished", "running"}
