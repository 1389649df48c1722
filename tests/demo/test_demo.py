"""The demo from end to end, small: it trains, tests, reports, and goes on where it was stopped."""

import json
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.tiny_demo import TINY, options_for, patch_demo
from qmargin.cli.main import build_parser, main
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo import plan, run
from qmargin.demo import report as demo_report
from qmargin.demo.losses import LOSSES
from qmargin.demo.recipe import Size, demo_recipe
from qmargin.demo.run import run_demo
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.training import folders, loop, rehearsal
from qmargin.training.signals import Interrupted


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    patch_demo(monkeypatch)


def test_a_demo_trains_tests_and_reports(tmp_path, capsys):
    page = run_demo(options_for(tmp_path, seeds=2))
    said = capsys.readouterr().out
    assert page == tmp_path / "report" / "index.html"
    assert said.endswith(f"report: {page}\nfile://{page}\n")
    html = page.read_text(encoding="utf-8")
    assert "data:image/jpeg" in html  # the hardest pairs as pictures
    assert "synthetic stroke identities, seed 1" in html
    assert "[4/4] Q-Margin, seed 1" in said
    assert "All data are synthetic" in said
    assert "TAR % at 0.001" in said
    assert "Q-Margin minus CosFace over 2 seeds" in said
    assert said.count("+-") >= 6
    result = read_result(tmp_path / "seed-0" / "q_margin" / "result.json")
    assert result.protocol.num_impostors == 40 * 39 // 2 * 16
    assert result.protocol.num_genuine == 40 * 6
    assert result.hardest is not None
    for pair in (*result.hardest.false_accepts, *result.hardest.false_rejects):
        assert (tmp_path / "pictures" / f"{pair.enrol}.png").exists()


def test_both_losses_have_one_recipe():
    made = [demo_recipe(loss, seed=0, size=TINY) for loss in LOSSES.values()]
    common = {replace(recipe, loss=made[0].loss).sha256 for recipe in made}
    assert len(common) == 1
    assert len({recipe.sha256 for recipe in made}) == len(LOSSES)


def test_what_is_done_is_not_done_again(tmp_path, capsys):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    result = tmp_path / "seed-0" / "cosface" / "result.json"
    before = result.stat().st_mtime_ns
    run_demo(options_for(tmp_path))
    assert result.stat().st_mtime_ns == before
    assert "[1/2] CosFace, seed 0: done before" in capsys.readouterr().out


def test_a_demo_stopped_before_its_test_does_not_train_again(tmp_path, monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "_test", stopped)
        with pytest.raises(CheckpointError, match="no space left; free some and run the same"):
            run_demo(options_for(tmp_path, losses=("cosface",)))
    journal = tmp_path / "seed-0" / "cosface" / "journal.jsonl"
    assert not (tmp_path / "seed-0" / "cosface" / "result.json").exists()
    run_demo(options_for(tmp_path, losses=("cosface",)))
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    starts = [event["step"] for event in events if event["event"] == "start"]
    assert starts[-1] == TINY.total_steps
    assert len([event for event in events if event["event"] == "step"]) == 1
    assert (tmp_path / "seed-0" / "cosface" / "result.json").exists()


def test_a_full_disk_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"1,048,576 bytes left and .* 41,943,040"):
        run_demo(options_for(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        run_demo(options_for(tmp_path / "file" / "out"))


def test_data_that_cannot_be_read_leaves_no_plan(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        run_demo(options_for(tmp_path / "out", data=tmp_path / "gone"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_demo_that_was_shortened_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(plan.SIZES, "cpu", TINY._replace(epochs=3))
    monkeypatch.setattr(plan, "_seconds_per_step", lambda size, device: 1e3)
    run_demo(options_for(tmp_path, losses=("cosface",)))
    assert "1 epoch, on cpu; the standard length is 3 epochs" in capsys.readouterr().out


def test_the_length_is_that_of_the_fastest_step(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(
        rehearsal, "rehearse", lambda *_, **options: SimpleNamespace(seconds=(0.001, 0.5, 0.1, 3.0))
    )
    assert plan._seconds_per_step(TINY, "cpu") == 0.1


def test_a_rehearsal_takes_the_steps_that_it_is_asked_for():
    recipe = demo_recipe(LOSSES["q_margin"], seed=0, size=TINY)
    assert len(rehearsal.rehearse(recipe, device="cpu", num_steps=4).seconds) == 4


def test_half_a_result_is_made_again(tmp_path):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    result = tmp_path / "seed-0" / "cosface" / "result.json"
    tar = read_result(result).metrics.tar
    result.write_bytes(result.read_bytes()[:500])
    run_demo(options_for(tmp_path, losses=("cosface",)))
    assert read_result(result).metrics.tar == tar


def test_a_signal_ends_the_demo_with_its_status(tmp_path, monkeypatch, capsys):
    take_step = loop.take_step

    def take_step_after_signal(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments, **options)

    monkeypatch.setattr(loop, "take_step", take_step_after_signal)
    with pytest.raises(Interrupted):
        run_demo(options_for(tmp_path))
    assert main(["demo", "--out", str(tmp_path), "--device", "cpu"]) == 143
    told = capsys.readouterr().err
    assert "stopped at step" in told and "--resume" not in told  # which the demo does not have
    assert "run the same command again to go on" in told


@pytest.mark.parametrize("where", ["loop.snapshot", "run._test"])
def test_a_signal_that_comes_when_a_training_has_ended_ends_the_demo(tmp_path, monkeypatch, where):
    module, name = (loop, "snapshot") if where == "loop.snapshot" else (run, "_test")
    last = getattr(module, name)

    def after_a_signal(*arguments, **options):
        if module is run or arguments[0].progress.step == arguments[0].total_steps:
            os.kill(os.getpid(), signal.SIGINT)
        return last(*arguments, **options)

    monkeypatch.setattr(module, name, after_a_signal)
    with pytest.raises(Interrupted):
        run_demo(options_for(tmp_path, losses=("arcface", "cosface")))
    assert read_result(tmp_path / "seed-0" / "arcface" / "result.json")
    assert not (tmp_path / "seed-0" / "cosface").exists()


def test_pictures_that_have_changed_are_refused(tmp_path, capsys):
    file, labels = tmp_path / "drawn.npz", np.repeat(np.arange(12), 8)
    images = StrokeIdentities(12, 8).images(np.arange(96))
    np.savez(file, images=images, label=labels)
    options = options_for(tmp_path / "out", losses=("cosface",), data=file)
    run_demo(options)
    assert "steps each" in capsys.readouterr().out
    run_demo(options)
    np.savez(file, images=images[::-1], label=labels)
    with pytest.raises(ConfigError, match="has other pictures than the demo in"):
        run_demo(options)


def test_ctrl_c_during_a_test_says_the_same(tmp_path, monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_test", stopped)
    words = ["demo", "--out", str(tmp_path), "--device", "cpu", "--losses", "cosface"]
    assert main(words) == 130
    assert "run the same command again to go on" in capsys.readouterr().err


def test_a_folder_of_another_recipe_is_refused(tmp_path, monkeypatch):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    other = LOSSES["cosface"]._replace(margin=0.33)
    monkeypatch.setitem(LOSSES, "cosface", other)
    with pytest.raises(ConfigError, match=r"is of another recipe than CosFace .*seed-0/cosface to"):
        run_demo(options_for(tmp_path, losses=("cosface",)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": ("qmargin",)}, "a loss is 'qmargin', did you mean 'q_margin'"),
        ({"losses": ("arcface", "arcface")}, "name each one once"),
        ({"losses": ()}, "losses are none"),
        ({"seeds": 0}, "seeds is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
    ],
)
def test_impossible_options_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        options_for(tmp_path, **changes)


def test_the_length_is_decided_once(tmp_path):
    first = plan.find_plan(tmp_path, minutes=2.0, device="cpu")
    assert plan.find_plan(tmp_path, minutes=None, device="cpu") == first
    assert plan.find_plan(tmp_path, minutes=2.0, device="cpu") == first
    with pytest.raises(ConfigError, match="--minutes is 3"):
        plan.find_plan(tmp_path, minutes=3.0, device="cpu")
    (tmp_path / plan.PLAN).write_text("{}")
    with pytest.raises(DataError, match="is not the plan of a demo"):
        plan.find_plan(tmp_path, minutes=None, device="cpu")


def test_time_buys_epochs_only_where_it_is_asked_to():
    size = Size(num_classes=256, samples_per_class=10, epochs=10, batch_size=256)
    assert plan.fitted(size, 1e-6, minutes=None).epochs == 10  # never more than the standard
    slow = plan.fitted(size, 2.0, minutes=None)
    assert 1 <= slow.epochs < 10
    assert slow.epochs * 10 * 2.0 * len(LOSSES) < 60 * plan.MINUTES
    assert plan.fitted(size, 2.0, minutes=60.0).epochs > 10
    assert plan.fitted(size, 1e9, minutes=1.0).epochs == 1


def test_losses_may_have_commas_between_them(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "run_demo", asked.append)
    parser = build_parser()
    for words in (["cosface,q_margin"], ["cosface,", "q_margin"], ["cosface", "q_margin"]):
        arguments = parser.parse_args(["demo", "--losses", *words])
        arguments.run(arguments)
    assert [options.losses for options in asked] == [("cosface", "q_margin")] * 3
    arguments = parser.parse_args(["demo", "--losses", ","])
    with pytest.raises(ConfigError, match="losses are none"):
        arguments.run(arguments)


def test_one_loss_is_compared_with_nothing(tmp_path, capsys):
    run_demo(options_for(tmp_path, losses=("q_margin",)))
    said = capsys.readouterr().out
    assert "1 loss, 1 seed" in said and "accepts the most" not in said


def test_a_verdict_on_one_loss_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_report, "VERDICT_FAR", 1e-2)  # that so few pairs can measure
    run_demo(options_for(tmp_path, losses=("q_margin",)))
    said = capsys.readouterr().out
    assert "At FAR 0.01, Q-Margin accepts " in said and "accepts the most" not in said
    assert "It is the only loss here: there is nothing to compare it with." in said


def test_a_device_that_is_not_there_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        run_demo(options_for(tmp_path / "out", device="cuda"))
    assert not (tmp_path / "out").exists()
