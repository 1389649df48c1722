"""The demo: its length is decided once, it reports, resumes and tells who is ahead."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.experiments import TINY_DEMO
from qmargin.cli.commands import build_parser
from qmargin.cli.main import main
from qmargin.data.strokes import StrokeIdentities
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.experiments import demo, named, page, tables
from qmargin.experiments.demo import DemoOptions, find_demo, fitted, run_demo
from qmargin.experiments.named import Size
from qmargin.experiments.runner import RECORD
from qmargin.training import dry_run, loop


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(named.SIZES, "cpu", TINY_DEMO)
    monkeypatch.setattr(demo, "seconds_per_step", lambda size, device: 0.001)
    monkeypatch.setattr(tables, "has_matplotlib", lambda: False)  # figures take seconds


def options(out: Path, *losses: str, **changes: object) -> DemoOptions:
    return DemoOptions(out, losses or ("cosface", "q_margin"), device="cpu", **changes)  # type: ignore[arg-type]


def test_a_demo_trains_tests_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_demo(options(tmp_path, seeds=2))
    said = capsys.readouterr().out
    assert found == tmp_path / "report" / "index.html"
    assert said.endswith(f"report: {found}\nfile://{found}\n")
    html = found.read_text(encoding="utf-8")
    assert "data:image/jpeg" in html  # the hardest pairs as pictures
    assert "synthetic stroke identities, seed 1" in html
    assert "2 losses, 2 seeds, 1 epoch, on cpu" in said and "synthetic" in said
    assert "[4/4] Q-Margin" in said and "TAR % at 0.001" in said
    assert "Q-Margin" in said and said.count("+-") >= 6
    (path,) = tmp_path.glob("runs/q_margin-seed0-*/result.json")
    result = read_result(path)
    assert result.protocol.num_impostors == 40 * 39 // 2 * 16
    assert result.run is not None and result.run.margins[0].kind == "prior"
    assert result.hardest is not None
    for pair in (*result.hardest.false_accepts, *result.hardest.false_rejects):
        assert (tmp_path / "pictures" / f"{pair.enrol}.png").exists()
    run_demo(options(tmp_path, seeds=2))
    assert "4 runs, 4 of them complete" in capsys.readouterr().out


def test_the_length_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MOST_EPOCHS", 2)
    run_demo(options(tmp_path, "cosface", minutes=2.0))
    monkeypatch.setattr(demo, "seconds_per_step", lambda size, device: 1e3)
    _, size = find_demo(options(tmp_path))
    assert size.epochs == 2 == find_demo(options(tmp_path, minutes=2.0))[1].epochs
    with pytest.raises(ConfigError, match="--minutes is 3"):
        find_demo(options(tmp_path, minutes=3.0))
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(DataError, match=RECORD):
        find_demo(options(tmp_path))


def test_time_buys_epochs_only_where_it_is_asked_to() -> None:
    size = Size(num_classes=256, samples_per_class=10, epochs=10, batch_size=256)
    assert fitted(size, 1e-6, minutes=None).epochs == 10  # never more than the standard
    slow = fitted(size, 2.0, minutes=None)
    assert 1 <= slow.epochs < 10 and slow.epochs * 10 * 2.0 * 5 < 60 * demo.MINUTES
    assert fitted(size, 2.0, minutes=60.0).epochs > 10
    assert fitted(size, 1e9, minutes=1.0).epochs == 1


def test_the_length_is_that_of_the_fastest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = SimpleNamespace(seconds=(0.001, 0.5, 0.1, 3.0))
    monkeypatch.setattr(dry_run, "dry_run", lambda *_, **options: found)
    assert demo.seconds_per_step(TINY_DEMO, "cpu") == 0.1


def test_a_demo_that_was_shortened_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(named.SIZES, "cpu", TINY_DEMO._replace(epochs=3))
    monkeypatch.setattr(demo, "seconds_per_step", lambda size, device: 1e3)
    run_demo(options(tmp_path, "cosface"))
    said = capsys.readouterr().out
    assert "1 loss, 1 seed, 1 epoch, on cpu; the standard length is 3 epochs" in said
    assert "nothing to compare" in said


def test_pictures_of_a_path_and_that_they_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, labels = tmp_path / "drawn.npz", np.repeat(np.arange(12), 8)
    images = StrokeIdentities(12, 8).images(np.arange(96))
    np.savez(file, images=images, label=labels)
    given = options(tmp_path / "out", "cosface", data=file)
    run_demo(given)
    said = capsys.readouterr().out
    assert "steps each" in said and demo.DATA_NOTE in said
    run_demo(given)
    np.savez(file, images=images[::-1], label=labels)
    with pytest.raises(ConfigError, match=r"data\.digest"):
        run_demo(given)
    with pytest.raises(ConfigError, match="holds another experiment"):
        run_demo(options(tmp_path / "out", "cosface"))
    with pytest.raises(DataError, match="does not exist"):
        run_demo(options(tmp_path / "new", data=tmp_path / "gone"))
    assert not (tmp_path / "new").exists()


def test_a_signal_ends_the_demo_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_step = loop.take_step

    def take_step_after_signal(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments, **options)

    monkeypatch.setattr(loop, "take_step", take_step_after_signal)
    assert main(["demo", "--out", str(tmp_path), "--device", "cpu"]) == 143
    told = capsys.readouterr().err
    assert "run the same command again" in told and "--resume" not in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": ("qmargin",)}, "did you mean 'q_margin'"),
        ({"losses": ("arcface", "arcface")}, "name each one once"),
        ({"seeds": 0}, "seeds is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"device": "cuda"}, "torch finds no GPU"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = {"losses": ("cosface",), "device": "cpu", **changes}
    with pytest.raises(ConfigError, match=words):
        run_demo(DemoOptions(tmp_path / "new", **given))
    assert not (tmp_path / "new").exists()


def test_losses_may_have_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DemoOptions] = []
    monkeypatch.setattr(demo, "run_demo", asked.append)
    parser = build_parser()
    for words in (["cosface,q_margin"], ["cosface,", "q_margin"], ["cosface", "q_margin"]):
        arguments = parser.parse_args(["demo", "--losses", *words])
        arguments.run(arguments)
    assert [one.losses for one in asked] == [("cosface", "q_margin")] * 3


def test_the_verdict_names_the_best_of_the_others(tmp_path: Path) -> None:
    run_demo(options(tmp_path, seeds=2))
    paths = sorted(tmp_path.glob("runs/*/result.json"))
    repeats = page.repeats_of(paths, "x")
    (line,) = page.verdict(repeats, [1e-2], bold="**{}**")
    assert (
        line.startswith("At FAR 0.01, Q-Margin **") and " CosFace, the best of the others" in line
    )
    assert page.verdict(page.repeats_of(paths[:2], "x"), [1e-2]) == []  # one loss
