"""The demo: its length is decided once, it reports, resumes and tells who is ahead."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.commands import parse_command
from helpers.experiments import TINY_DEMO
from helpers.results import words_of
from qmargin.cli.main import main
from qmargin.data.strokes import StrokeIdentities
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.experiments import named, tables
from qmargin.experiments.named import Size, demo
from qmargin.experiments.named.demo import find_size, fitted
from qmargin.experiments.runner import RECORD, Finished
from qmargin.report.numbers import rate_text
from qmargin.report.verdicts import planned_verdicts
from qmargin.training import dry_run

TINY_PEOPLE = TINY_DEMO._replace(kind="people")
TINY_VOICES = named.VOICE_SIZES["cpu"]._replace(
    num_classes=8, samples_per_class=4, epochs=1, batch_size=16, width=8, num_test=8, samples_test=4
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(named.SIZES, "cpu", TINY_DEMO)
    monkeypatch.setitem(named.PEOPLE_SIZES, "cpu", TINY_PEOPLE)
    monkeypatch.setitem(named.VOICE_SIZES, "cpu", TINY_VOICES)
    monkeypatch.setattr(demo, "step_times", lambda size, device, num_threads: [0.001])
    monkeypatch.setattr(tables, "has_matplotlib", lambda: False)  # figures take seconds


def run_demo(out: Path, *losses: str, **changes: Any) -> Finished:
    given = {"losses": losses or ("cosface", "q_margin"), "device": "cpu", **changes}
    return demo.run_demo(out, **given)


def test_a_demo_trains_tests_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "demo",
        f"--out={tmp_path}",
        "--device=cpu",
        "--seeds=2",
        "--losses",
        "cosface,q_margin",
    ]
    assert main(words) == 0
    said, page = capsys.readouterr().out, tmp_path / "report" / "index.html"
    report, _, offered = said.rpartition("try the model: ")
    assert report.endswith(f"report: {page}\nfile://{page}\n")
    arguments = parse_command(shlex.split(offered))
    assert (arguments.model / "result.json").is_file() and arguments.fit == "resize"
    html = page.read_text(encoding="utf-8")
    assert "data:image/jpeg" in html  # the hardest pairs as pictures
    assert "synthetic people, seed 1" in html
    assert "2 losses, 2 seeds, 1 epoch, on cpu" in said and "synthetic" in said
    assert "[4/4] " in said and "TAR % at 0.1 %" in said and said.count("+-") >= 6
    (path,) = tmp_path.glob("runs/q_margin-seed0-*/result.json")
    result = read_result(path)
    assert result.protocol.num_impostors == 40 * 39 // 2 * 16
    assert result.run is not None and result.run.margins[0].kind == "prior"
    assert result.hardest is not None
    for pair in (*result.hardest.false_accepts, *result.hardest.false_rejects):
        assert (tmp_path / "pictures" / f"{pair.enrol}.png").exists()
    finished = run_demo(tmp_path, seeds=2)
    assert "4 runs, 4 of them complete" in capsys.readouterr().out
    plan = finished.experiment.comparison
    assert plan is not None and (plan.focus, plan.rivals) == ("q_margin", ("cosface",))
    repeats = tables.repeats_of(finished.paths["result.json"], "x", plan)
    (line,) = planned_verdicts(repeats, 1e-2, bold="**{}**")
    assert line.startswith("At FAR 1 %, Q-Margin **") and "** CosFace: " in line
    one_loss = tables.repeats_of(finished.paths["result.json"][::2], "x", plan)
    assert planned_verdicts(one_loss, 1e-2) == []
    # the terminal and the page say the same of the same comparison
    (told,) = planned_verdicts(repeats, repeats.headline_far)
    assert told in said and told in words_of(html)
    _, _, words = tables.summary(finished)
    plain, *others = words
    assert others == [told, "Intervals cover training seeds and test identities."]
    far = rate_text(repeats.headline_far)
    leader = repeats.ranked(repeats.headline_far)[0]
    assert plain.startswith(f"{leader} at FAR {far} in plain words: 1 impostor in ")
    assert "genuine attempts are refused." in plain
    assert plain in " ".join(said.split())


def test_voices_are_another_world(tmp_path: Path) -> None:
    finished = run_demo(tmp_path, "cosface", "q_margin", voices=True)
    assert finished.experiment.title == "synthetic voices"
    assert finished.experiment.recipe.data.kind == "voices"
    assert [result.system.name for result in finished.results] == ["CosFace", "Q-Margin"]
    html = finished.page.read_text(encoding="utf-8")
    assert "data:audio/wav" in html  # the hardest pairs can be heard
    with pytest.raises(ConfigError, match="holds a different experiment"):
        run_demo(tmp_path, "cosface")


def test_the_length_counts_the_time_to_speak() -> None:
    size = Size("voices", num_classes=256, samples_per_class=10, epochs=10, batch_size=256)
    usual, less = (fitted(size, 1.5, minutes=None, speech=s).epochs for s in (0.0, 120.0))
    assert less < usual < 10
    assert demo.seconds_of_speech(TINY_DEMO) == 0.0
    one, many = (
        demo.seconds_of_speech(TINY_VOICES._replace(num_classes=n)) for n in (100, 100_000)
    )
    assert 0.0 < one < many


def test_the_length_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MOST_EPOCHS", 2)
    run_demo(tmp_path, "cosface", minutes=2.0)
    monkeypatch.setattr(demo, "step_times", lambda size, device, num_threads: [1e3])
    for minutes in (None, 2.0):
        size, *others = find_size(tmp_path, TINY_PEOPLE, "cpu", minutes, None)
        assert (size.epochs, *others) == (2, 2.0, None)
    with pytest.raises(ConfigError, match="--minutes is 3"):
        find_size(tmp_path, TINY_PEOPLE, "cpu", 3.0, None)
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(DataError, match=RECORD):
        find_size(tmp_path, TINY_PEOPLE, "cpu", None, None)


def test_time_buys_epochs_only_where_it_is_asked_to() -> None:
    size = Size(num_classes=256, samples_per_class=10, epochs=10, batch_size=256)
    assert fitted(size, 1e-6, minutes=None).epochs == 10  # never more than the standard
    slow = fitted(size, 2.0, minutes=None)
    assert 1 <= slow.epochs < 10 and slow.epochs * 10 * 2.0 * 5 < 60 * demo.MINUTES
    assert fitted(size, 2.0, minutes=60.0).epochs > 10
    assert fitted(size, 1e9, minutes=1.0).epochs == 1


def test_the_length_is_that_of_the_fastest_step_and_the_time_that_of_the_median(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    timed = []

    def dry(recipe: Any, **options: Any) -> SimpleNamespace:
        timed.append(recipe.loss)
        return SimpleNamespace(seconds=[0.001, 0.5, 0.1, 3.0])

    monkeypatch.setattr(dry_run, "dry_run", dry)
    for size in (TINY_DEMO, TINY_VOICES):
        assert demo.step_times(size, "cpu", num_threads=1) == [0.5, 0.1, 3.0]
    standard = TINY_PEOPLE._replace(epochs=1000, num_classes=100)
    size, _, pace = find_size(tmp_path, standard, "cpu", None, None)
    rounds = -(-5 // demo.jobs_on("cpu", 5))
    assert size == fitted(standard, 0.1, minutes=None, rounds=rounds) and size.epochs < 1000
    assert pace == (0.5, 0.0)
    each = size.total_steps * 0.5 + demo.SECONDS_PER_TEST
    assert pace.seconds(size, rounds=rounds) == demo.SECONDS_BESIDES + rounds * each
    assert pace.share_of_training(size) == pytest.approx(1.0 - demo.SECONDS_PER_TEST / each)
    timed.pop()
    assert [(loss.margin_kind, loss.alpha) for loss in timed] == 2 * [("prior", 1.25)]


def test_a_demo_that_was_shortened_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(named.PEOPLE_SIZES, "cpu", TINY_PEOPLE._replace(epochs=3))
    monkeypatch.setattr(demo, "step_times", lambda size, device, num_threads: [1e3])
    assert main(["demo", f"--out={tmp_path}", "--device=cpu", "--losses", "cosface"]) == 0
    said = capsys.readouterr().out
    assert "1 loss, 1 seed, 1 epoch, on cpu; the standard length is 3 epochs" in said
    seconds = TINY_PEOPLE.total_steps * 1e3 + demo.SECONDS_PER_TEST + demo.SECONDS_BESIDES
    assert f"; about {seconds / 60:.0f} min at the present speed of this machine\n" in said
    assert "nothing to compare" in said


def test_pictures_of_a_path_and_that_they_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, labels, out = tmp_path / "drawn.npz", np.repeat(np.arange(12), 8), tmp_path / "out"
    images = StrokeIdentities(12, 8).images(np.arange(96))
    np.savez(file, images=images, label=labels)
    words = ["demo", f"--out={out}", "--device=cpu", "--losses", "cosface", f"--data={file}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "steps each" in said and demo.DATA_NOTE in said
    run_demo(out, "cosface", data=file)
    np.savez(file, images=images[::-1], label=labels)
    with pytest.raises(ConfigError, match=r"data\.digest"):
        run_demo(out, "cosface", data=file)
    with pytest.raises(ConfigError, match="holds a different experiment"):
        run_demo(out, "cosface")
    with pytest.raises(DataError, match="does not exist"):
        run_demo(tmp_path / "new", data=tmp_path / "gone")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": ("qmargin",)}, "did you mean 'q_margin'"),
        ({"losses": ("arcface", "arcface")}, "name each one once"),
        ({"seeds": 0}, "seeds is 0"),
        ({"voices": True, "data": Path("faces")}, "data are pictures of faces; give one of them"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"device": "cuda"}, "torch finds no GPU"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(demo, "step_times", lambda *_, **__: pytest.fail("steps were timed"))
    with pytest.raises(ConfigError, match=words):
        run_demo(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_folder_is_refused_before_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "step_times", lambda *_, **__: pytest.fail("steps were timed"))
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="notes cannot be written to"):
        run_demo(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
