"""Experiments from end to end: what is trained, kept, resumed, stopped and refused."""

import csv
import json
import os
import shutil
import signal
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.experiments import Few, run, small_comparison, small_sweep, start, wait_for
from helpers.runs import saved_files, tiny_recipe
from qmargin.cli.main import main
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.experiments import run as run_module
from qmargin.experiments import slots
from qmargin.experiments.experiment import Arm, TestProtocol, make_arm
from qmargin.experiments.run import RESULT, Run, Task
from qmargin.experiments.runner import RECORD
from qmargin.experiments.tables import results_page, summary
from qmargin.experiments.worlds import Made
from qmargin.report.systems import Primary
from qmargin.training import loop
from qmargin.training.signals import Interrupted, StopRequest
from qmargin.training.start import RunLock

GRID = ("loss.scale=10,32", "m_eff=0.2,0.5")
MANY = (
    *("optimizer.lr=0.2", "loss.preset=cosface", "data.batch_size=16", "model.embedding_dim=8"),
    *("data.num_classes=20", "seed=3"),
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_grid_is_trained_measured_and_written(tmp_path: Path) -> None:
    finished, said = run(small_sweep(*GRID, seeds=2), tmp_path)
    (tried,) = finished.rounds
    assert len(tried) == 4 and all(one.is_complete for one in tried)
    folders = sorted(path.name for path in (tmp_path / "search").iterdir())
    assert len(folders) == 8 and folders[0].startswith("debug-seed0-")
    one = tried[2]
    assert one.point == {"loss.scale": "32", "m_eff": "0.2"}
    results = [read_result(path) for path in (tmp_path / "search").glob(f"*/{RESULT}")]
    eers = {result.measures.eer.value for result in results}
    assert {outcome.measures["eer"] for row in tried for outcome in row.outcomes} == eers
    names = {path.name for path in tmp_path.rglob("*.*")}
    expected = {RECORD, "search.md", "search.csv", "search.tex", "sensitivity.svg"}
    assert expected | {"effective-margin.pdf"} <= names
    with (tmp_path / "search.csv").open(encoding="utf-8") as file:
        row = next(
            row for row in csv.DictReader(file) if row["s"] == "32" and row["m_eff"] == "0.2"
        )
    values = [outcome.measures["eer"] for outcome in one.outcomes]
    assert float(row["EER"]) == pytest.approx(100 * statistics.fmean(values), rel=1e-12)
    assert float(row["EER deviation"]) == pytest.approx(100 * statistics.stdev(values))
    assert "8 runs, 0 of them complete" in said
    assert any(line.startswith("[1/8] debug, scale 10, m_eff 0.2, seed 0: ") for line in said)
    assert said[-2].startswith("debug: best is scale ")
    assert said[-1].startswith("At an edge of what was tried: debug (")


def test_arms_choose_are_trained_and_tested(tmp_path: Path) -> None:
    finished, said = run(small_comparison(seeds=(0, 1)), tmp_path)
    assert set(finished.chosen) == {"cosface", "q_margin"} and finished.chosen["q_margin"] == {}
    scale = float(finished.chosen["cosface"]["loss.scale"])
    assert scale in (10.0, 16.0) and "4 runs, 0 of them complete" in said
    names = [path.parent.name.rpartition("-")[0] for path in finished.paths[RESULT]]
    assert names == ["cosface-seed0", "q_margin-seed0", "cosface-seed1", "q_margin-seed1"]
    first = finished.results[0]
    assert first.system.name == "CosFace" and first.measures.tar[0].interval is not None
    data = [result.protocol.data_sha256 for result in finished.results]
    assert data[0] == data[1] != data[2]  # each seed has other identities
    assert finished.page.exists() and (tmp_path / "report" / "tables.tex").exists()
    again, said = run(small_comparison(seeds=(0, 1)), tmp_path)
    assert "4 runs, 4 of them complete" in said and again.chosen == finished.chosen


def test_an_arm_may_take_the_settings_of_another(tmp_path: Path) -> None:
    base = small_comparison()
    settings = ("loss.preset=cosface", "loss.margin=0.2", "optimizer.lr=0.05")
    sampled = Arm("sampled", settings, like="cosface")
    experiment = replace(base, arms={"cosface": base.arms["cosface"], "sampled": sampled})
    finished, _ = run(experiment, tmp_path)
    assert finished.chosen["sampled"] == finished.chosen["cosface"]
    with pytest.raises(ConfigError, match="add cosface"):
        experiment.with_arms(["sampled"])


def test_arms_may_have_seeds_of_their_own_and_finalists_too(tmp_path: Path) -> None:
    base = small_comparison(seeds=(0, 1, 2))
    few = replace(base.arms["q_margin"], seeds=(0, 1))
    search = replace(base.search, finalists=1, finalist_seeds=(7, 8))
    made = replace(base, arms={**base.arms, "q_margin": few}, search=search)
    finished, said = run(made, tmp_path)
    names = [path.parent.name.rpartition("-")[0] for path in finished.paths[RESULT]]
    assert names == [
        *("cosface-seed0", "q_margin-seed0", "cosface-seed1", "q_margin-seed1", "cosface-seed2")
    ]
    assert "5 runs, 0 of them complete" in said
    assert [one.num_wanted for tried in finished.rounds for one in tried] == [1, 1, 2]
    assert finished.rounds[1][0].recipe.seed == 7
    page = results_page(finished, command="compare")
    assert "2 or 3 seeds" in page
    alike = made.with_seeds((0, 1))
    assert {alike.seeds_of(name) for name in alike.arms} == {(0, 1)}
    again, said = run(alike, tmp_path)
    assert "4 runs, 4 of them complete" in said and len(again.results) == 4


def test_seeds_of_an_arm_are_checked() -> None:
    base = small_comparison()
    for seeds, text in (((), "seeds is empty"), ((0, 0), "each seed once"), ((-1,), "below 0")):
        arm = replace(base.arms["cosface"], seeds=seeds)
        with pytest.raises(ConfigError, match=f"arms.cosface: .*{text}"):
            replace(base, arms={"cosface": arm})
    with pytest.raises(ConfigError, match="each seed once"):
        replace(base.search, finalist_seeds=(1, 1))


def test_settings_reach_the_recipe_the_data_and_the_protocol() -> None:
    base = replace(small_comparison(), world=Made())
    made = base.with_settings(
        ["data.num_test=7", "data.batch_size=9", "protocol.far=1e-2", "protocol.replicates=3"]
    )
    assert (made.world.num_test, made.recipe.data.batch_size) == (7, 9)
    assert (made.protocol.fars, made.protocol.num_replicates) == ((0.01,), 3)
    many = base.with_settings(["protocol.far=[1e-3, 1e-2]"])
    assert many.protocol.fars == (0.01, 0.001)
    for setting, text in (
        ("data.num_tests=7", "did you mean 'num_test'"),
        ("data.bach_size=7", "did you mean 'batch_size'"),
        ("protocol.fars=1", "did you mean 'far'"),
        ("data.num_test=some", "data.num_test"),
        ("protocol.far=2", "between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            base.with_settings([setting])


def test_a_page_has_the_question_and_what_was_expected(tmp_path: Path) -> None:
    asked = small_comparison(question="Which is better?", expected="Q-Margin is ahead.")
    finished, _ = run(asked, tmp_path)
    page = results_page(finished, command="compare")
    start = page.partition("## Verdict")[0]
    assert "## Question\n\nWhich is better?\n\n[Expected before any run]" in start
    assert start.index("Q-Margin is ahead.") < start.index("## Set-up") < start.index("- training")
    silent = replace(finished, experiment=replace(asked, question="", expected=""))
    assert "## Question" not in results_page(silent, command="compare")


# -- resuming -------------------------------------------------------------------------------------


def test_what_is_there_is_kept_and_more_is_added(tmp_path: Path) -> None:
    run(small_sweep("loss.scale=10"), tmp_path)
    (first,) = (tmp_path / "search").iterdir()
    before = (first / RESULT).stat().st_mtime_ns
    finished, said = run(small_sweep("loss.scale=10,16", seeds=2), tmp_path)
    assert "4 runs, 1 of them complete" in said
    assert (first / RESULT).stat().st_mtime_ns == before and len(finished.rounds[0]) == 2


def test_runs_are_measured_over_their_training_time_and_train_alike(tmp_path: Path) -> None:
    protocol = TestProtocol(num_replicates=20, every_epochs=1)
    arms = {"q_margin": make_arm("q_margin", {"scale": 16})}
    settings = ("run.max_steps=null", "run.epochs=3")
    finished, _ = run(small_comparison(*settings, protocol=protocol, arms=arms), tmp_path / "a")
    (result,) = finished.results
    assert result.run is not None and result.run.train_seconds is not None
    points, steps = result.run.progress, result.run.steps
    assert steps is not None and [point.step for point in points] == [
        steps // 3,
        2 * steps // 3,
        steps,
    ]
    seconds = [point.train_seconds for point in points]
    assert 0.0 < seconds[0] < seconds[1] < seconds[2] <= result.run.train_seconds
    assert points[-1].eer == result.measures.eer.value
    last = {repr(point.far_target): point.tar for point in result.measures.tar if point.allowed}
    assert points[-1].tar == last and len(last) >= 2
    assert "To TAR" in finished.page.read_text(encoding="utf-8")
    plain, _ = run(small_comparison(*settings, arms=arms), tmp_path / "b")
    (other,) = plain.results
    assert other.run is not None and other.run.progress == ()
    assert other.run.checkpoint_sha256 == result.run.checkpoint_sha256  # measuring changes nothing
    with pytest.raises(ConfigError, match="every_epochs is 0"):
        TestProtocol(every_epochs=0)
    with pytest.raises(ConfigError, match="every_epochs measures all pairs"):
        TestProtocol("trials", every_epochs=1)


def test_the_primary_comparison_cannot_be_changed_after_the_test(tmp_path: Path) -> None:
    first = Primary("q_margin", ("cosface",), 1e-2)
    run(small_comparison(primary=first), tmp_path)
    for changed, message in (
        (replace(first, far=1e-3), r"primary\.far is 0\.01 there, 0\.001 here"),
        (
            replace(first, focus="cosface", rivals=("q_margin",)),
            r"primary\.focus is q_margin there",
        ),
        (None, "primary"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(small_comparison(primary=changed), tmp_path)


def test_a_choice_at_an_edge_is_told_on_the_terminal_and_the_page(tmp_path: Path) -> None:
    finished, said = run(small_comparison(), tmp_path)
    side = {"10": "smallest", "16": "largest"}[finished.chosen["cosface"]["loss.scale"]]
    (note,) = [line for line in said if line.startswith("At an edge")]
    assert note == (
        f"At an edge of what was tried: CosFace ({side} scale). Beyond it there may be better "
        "settings."
    )
    assert note in finished.page.read_text(encoding="utf-8")
    assert note in results_page(finished, command="x")


@pytest.mark.parametrize("count", [0, 20])
def test_the_results_page_has_the_verdict_of_the_terminal(tmp_path: Path, count: int) -> None:
    protocol = TestProtocol(num_replicates=count)
    arms = {name: make_arm(name, {"scale": 16}) for name in ("q_margin", "cosface", "arcface")}
    made = small_comparison(
        arms=arms, seeds=(0, 1), protocol=protocol, primary=Primary("cosface", ("q_margin",), 1e-3)
    )
    finished, _ = run(made, tmp_path)
    page, (_, rows, words) = results_page(finished, command="x"), summary(finished)
    assert "| q_margin |" not in page and "| Q-Margin | 2 |" in page and len(rows) == 3
    if not count:  # without replicates there are no intervals
        assert words[1:] == ["There is nothing to compare."] and "**ties with**" not in page
        return
    plain_words, line, cover = words
    assert plain_words.endswith("genuine attempts are refused.")
    assert line.startswith("At FAR 0.1 %, CosFace ") and "primary comparison" in line
    plain = page.replace("**", "")
    assert f"- {line}" in plain and cover == "Intervals cover training seeds and test identities."
    assert "| CosFace minus |" in page and "| ArcFace |" in page.partition("CosFace minus")[2]
    assert "corrected for 11 comparisons" in plain  # 3 pairs by 3 TARs and the EER, but for one


@pytest.mark.parametrize("damage", [None, b'{"format": "qmargin-res'])
def test_a_result_that_cannot_be_read_is_made_again_from_the_checkpoint(
    tmp_path: Path, damage: bytes | None
) -> None:
    before, _ = run(small_sweep("loss.scale=10"), tmp_path)
    (folder,) = (tmp_path / "search").iterdir()
    (folder / RESULT).unlink() if damage is None else (folder / RESULT).write_bytes(damage)
    saved = saved_files(folder, 6)
    after, said = run(small_sweep("loss.scale=10"), tmp_path)
    assert "1 runs, 0 of them complete" in said
    assert after.rounds[0][0].outcomes[0].measures == before.rounds[0][0].outcomes[0].measures
    assert saved_files(folder, 6) == saved  # nothing was trained anew


def test_a_result_of_another_recipe_is_refused(tmp_path: Path) -> None:
    run(small_sweep("loss.scale=10"), tmp_path)
    (folder,) = (tmp_path / "search").iterdir()
    text = (folder / RESULT).read_text()
    sha256 = small_sweep("loss.scale=10").run_recipe(
        "debug", {"loss.scale": "10"}, seed=0, is_search=True
    ).sha256  # fmt: skip
    (folder / RESULT).write_text(text.replace(sha256, "0" * 64))
    with pytest.raises(ConfigError, match="is of a different recipe"):
        run(small_sweep("loss.scale=10"), tmp_path)


def test_a_run_without_a_whole_checkpoint_names_the_folder_to_remove(tmp_path: Path) -> None:
    run(small_sweep("loss.scale=10,16"), tmp_path)
    first, second = sorted((tmp_path / "search").iterdir())
    (first / RESULT).unlink()
    for manifest in first.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(DataError, match=f"no complete checkpoint; remove .*{first.name} "):
        run(small_sweep("loss.scale=10,16"), tmp_path)
    assert "none of the 2 checkpoints" in (first / "train.log").read_text(encoding="utf-8")
    shutil.rmtree(first)
    before = (second / RESULT).stat().st_mtime_ns
    finished, _ = run(small_sweep("loss.scale=10,16"), tmp_path)
    assert all(one.is_complete for one in finished.rounds[0])
    assert (second / RESULT).stat().st_mtime_ns == before


def test_a_run_stopped_before_its_test_does_not_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small_comparison().with_arms(["q_margin"])

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate_run", full)
        with pytest.raises(DataError, match="has no space left; free some and run the same"):
            run(experiment, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / RESULT).exists()
    run(experiment, tmp_path)
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 6]
    assert len([event for event in events if event["event"] == "step"]) == 6


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    experiment = small_sweep("optimizer.lr=1e38,0.1", settings=("run.nan_budget=0",))
    with pytest.raises(DataError, match="1 of 2 runs failed, the first of them with lr 1e38"):
        run(experiment, tmp_path)
    assert "1 failed" in (tmp_path / "search.md").read_text(encoding="utf-8")
    assert len(list(tmp_path.glob(f"search/*/{RESULT}"))) == 1
    with pytest.raises(DataError):  # failures are tried again, what is finished is kept
        run(experiment, tmp_path)


def test_a_schedule_that_runs_never_reach_is_announced_once(tmp_path: Path) -> None:
    late = ("margin_schedule.start_epoch=6", "margin_schedule.end_epoch=9")
    _, said = run(small_sweep("loss.margin=0.1,0.3", settings=late), tmp_path)
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert "margin_schedule.start_epoch is 6" in warning


# -- refusals -------------------------------------------------------------------------------------


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path) -> None:
    run(small_sweep("loss.margin=0.1"), tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    for changes, message in (
        ({"settings": ("optimizer.lr=0.2",)}, r"recipe\.optimizer\.lr is 0\.1 there, 0\.2 here"),
        ({"measure": "eer"}, r"search\.measure is tar@0\.01 there, eer here"),
        ({"settings": MANY}, "and [1-9] more"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(small_sweep("loss.margin=0.1", **changes), tmp_path)
    assert (tmp_path / RECORD).read_bytes() == before


@pytest.mark.parametrize("text", ["{", "[]", "format: other", "format: qmargin-experiment\nx: 1"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(DataError, match=r"experiment\.yaml is not the record"):
        run(small_sweep("loss.scale=10"), tmp_path)


@pytest.mark.parametrize("name", ["search.md", "report/index.html"])
def test_files_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match=name):
        run(small_sweep("loss.scale=10"), tmp_path)
    assert path.read_text() == "mine"
    run(small_sweep("loss.scale=10"), tmp_path, overwrite=True)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match="is in use by"):
        run(small_sweep("loss.scale=10"), tmp_path)
    (tmp_path / "sweep.json").write_text("{}")  # of an older version
    with pytest.raises(ConfigError, match=r"sweep\.json.*another --out"):
        run(small_sweep("loss.scale=10"), tmp_path)
    assert not (tmp_path / RECORD).exists()
    with pytest.raises((ConfigError, CheckpointError), match="cannot be"):
        run(small_sweep("loss.scale=10"), tmp_path / "sweep.json" / "sweep")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ("cpu", "cuda:0")}, "device is 'cuda:0'"),
        ({"devices": ("tpu",)}, "device is 'tpu'"),
        ({"devices": ()}, "devices is empty"),
        ({"jobs": 0}, "jobs is 0"),
        ({"measure": "tar@1e-9"}, "the measure is 'tar@1e-9'"),
    ],
)
def test_what_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    experiment = small_sweep("loss.scale=10", measure=options.pop("measure", None))
    with pytest.raises(ConfigError, match=message):
        run(experiment, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


# -- signals and kills ----------------------------------------------------------------------------


def test_a_signal_stops_after_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = loop.take_step

    def take_step_after_signal(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", take_step_after_signal)
        with pytest.raises(Interrupted):
            run(small_sweep("loss.scale=10,16"), tmp_path)
    (folder,) = (tmp_path / "search").iterdir()
    assert (folder / "checkpoints").is_dir() and not (folder / RESULT).exists()
    finished, _ = run(small_sweep("loss.scale=10,16"), tmp_path)
    assert all(one.is_complete for one in finished.rounds[0])


@pytest.mark.parametrize("where", ["snapshot", "evaluate_run"])
def test_a_signal_that_comes_when_a_training_has_ended_stops_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module = loop if where == "snapshot" else run_module
    last = getattr(module, where)

    def after_a_signal(*arguments, **options):
        is_end = module is run_module or arguments[0].progress.step == arguments[0].total_steps
        if is_end:
            os.kill(os.getpid(), signal.SIGINT)
        return last(*arguments, **options)

    monkeypatch.setattr(module, where, after_a_signal)
    with pytest.raises(Interrupted):
        run(small_comparison(seeds=(0, 1)).with_arms(["q_margin"]), tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_result(folder / RESULT)


SETTINGS = ("run.max_steps=60", "run.save_every_steps=5")
SWEEP = f"""
    experiment = small_sweep("loss.scale=10,16", settings={SETTINGS})
    run(experiment, Path(out), jobs=int(words[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_experiment_that_is_killed_continues_bit_for_bit(tmp_path: Path, jobs: int) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected, _ = run(small_sweep("loss.scale=10,16", settings=SETTINGS), whole)
    process = start(killed, SWEEP, jobs)
    wait_for("search/*/checkpoints/step-000010", killed, process)
    process.kill()
    process.communicate(timeout=60)
    assert len(list(killed.glob(f"search/*/{RESULT}"))) < 2
    time.sleep(1.0)  # workers notice that the experiment is gone
    found, _ = run(small_sweep("loss.scale=10,16", settings=SETTINGS), killed)
    starts = [path.read_text().count('"start"') for path in killed.glob("search/*/journal.jsonl")]
    assert max(starts) == 2  # it was a half training that went on
    for folder in (whole / "search").iterdir():
        assert saved_files(folder, 60) == saved_files(killed / "search" / folder.name, 60)
    for one, other in zip(expected.rounds[0], found.rounds[0], strict=True):
        assert one.outcomes[0].measures == other.outcomes[0].measures


@pytest.mark.slow
def test_a_signal_saves_what_runs_in_all_processes(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    process = start(out, SWEEP, 2)
    wait_for("search/*/checkpoints/step-000010", out, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    states = [json.loads(path.read_text())["state"] for path in out.glob("search/*/status.json")]
    assert "stopped" in states and set(states) <= {"stopped", "finished", "running"}


@pytest.mark.slow
def test_a_worker_whose_run_is_over_is_not_waited_for(tmp_path: Path) -> None:
    """Its outcome is in the pipe, nobody took it, and then everything is to stop."""
    task = Task(Few(), TestProtocol(), "x", "x", tmp_path / "pictures")
    one = Run("x", "x", {}, tiny_recipe("run.max_steps=2"), tmp_path / "search" / "x", True)
    with StopRequest() as request:
        with slots.open_slots(task, devices=("cpu",), jobs=2, request=request) as opened:
            opened.start(one)
            while not (one.folder / RESULT).exists():
                time.sleep(0.05)
            time.sleep(1.0)  # it waits for another run now, where signals are not noted
            opened._workers[0].process.terminate = lambda: None
            began = time.monotonic()
        assert time.monotonic() - began < 30.0


# -- commands -------------------------------------------------------------------------------------


def test_the_sweep_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "debug", "--set", "run.max_steps=2", "--devices", "cpu"]
    assert main([*words, f"--out={tmp_path / 'sweep'}", "--grid", "loss.alpha=1.25,1.5"]) == 0
    assert "[2/2] debug, alpha 1.5, seed 0: " in capsys.readouterr().out
    grid = ["--grid", "loss.scale=10,20"]
    for more, message in (
        (["--grid", "loss.alpa=1,2"], "did you mean 'alpha'"),
        ([*grid, "--set", "loss.scale=3"], "loss.scale=3 is set"),
        ([*grid, "--trials", "3"], "--trials is 3"),
        ([], "there is nothing to sweep"),
        ([*grid, "--validation", "x"], "leave --validation out"),
    ):
        assert main([*words, *more, f"--out={tmp_path / 'new'}"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_compare_lists_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--list"]) == 0
    assert "strokes-10k" in capsys.readouterr().out
    for words, message in (
        (["omnigot"], "did you mean 'omniglot'"),
        (["omniglot"], "--data PATH"),
        (["strokes-10k", "--data", str(tmp_path)], "leave --data out"),
        (["strokes-10k", "--arms", "arcfase"], "did you mean 'arcface'"),
        (["strokes-1m", "--arms", "sampled"], "add arcface"),
        (["strokes-10k", "--set", "run.epoch=3"], "did you mean 'epochs'"),
    ):
        assert main(["compare", *words, "--devices", "cpu", f"--out={tmp_path / 'new'}"]) == 2
        assert message in capsys.readouterr().err
    assert main(["compare", "demo"]) == 2 and "--out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
