"""``qmargin evaluate`` from files to a table and ``result.json``."""

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import parse_command, run_command
from helpers.speakers import make_speakers
from qmargin.cli.tables import line_progress, stage_progress
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.embed import write_embedding_file
from qmargin.evaluation.result import Result, read_result


def parse(*arguments: object) -> argparse.Namespace:
    return parse_command(["qmargin", "evaluate", *map(str, arguments)])


def evaluated(*arguments: object) -> Result:
    return read_result(run_command("evaluate", *arguments).out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    speakers = make_speakers()
    speakers.write_scores(tmp_path / "system.txt")
    speakers.write_trials(tmp_path / "trials.txt")
    speakers.write_embeddings(tmp_path / "model.npz")
    lines = [f"id{i:02d},{'f' if i % 2 else 'm'}\n" for i in range(12)]
    (tmp_path / "groups.csv").write_text("subject,group\n" + "".join(lines))
    return tmp_path


def test_scores_to_a_result_and_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "result.json"
    options = ["--out", out, "--replicates", 30, "--fars", 0.1, 1e-5, "--groups"]
    result = evaluated("scores", folder / "system.txt", *options, folder / "groups.csv")
    printed = capsys.readouterr().out
    assert result.system.name == "system"
    assert [source.role for source in result.sources] == ["scores", "groups"]
    assert result.protocol.interval.num_replicates == 30
    assert "TAR at FAR 0.1" in printed
    assert "not measurable" in printed
    assert "subject bootstrap, 95%, 30 replicates" in printed
    assert "INEQ" in printed
    assert printed.endswith(f"{out}\n")


def test_trials_with_embeddings_give_the_same_result(folder: Path) -> None:
    quick = ["--replicates", 20, "--name", "one"]
    trials = evaluated(
        "trials", folder / "trials.txt", "--embeddings", folder / "model.npz",
        "--out", folder / "a.json", *quick,
    )  # fmt: skip
    scores = evaluated("scores", folder / "system.txt", "--out", folder / "b.json", *quick)
    assert trials.protocol.data_sha256 == scores.protocol.data_sha256
    for first, second in zip(trials.measures.tar, scores.measures.tar, strict=True):
        assert (first.tar, first.interval) == (second.tar, second.interval)
    assert [source.role for source in trials.sources] == ["scores", "trials", "embeddings"]
    again = evaluated(
        "scores", folder / "a.scores.tsv", "--trials", folder / "trials.txt",
        "--out", folder / "c.json", *quick,
    )  # fmt: skip
    assert again.measures == trials.measures


def test_norms_and_subjects_are_options(folder: Path) -> None:
    (folder / "utt2spk").write_text("".join(f"{key} {key[:4]}\n" for key in make_speakers().keys))
    result = evaluated(
        "trials", folder / "trials.txt", "--embeddings", folder / "model.npz",
        "--cohort", folder / "model.npz", "--as-norm", 20, "--center", folder / "model.npz",
        "--subjects", folder / "utt2spk", "--scores", folder / "kept.tsv",
        "--out", folder / "a.json", "--replicates", 0,
    )  # fmt: skip
    roles = [source.role for source in result.sources]
    assert roles == ["scores", "trials", "embeddings", "cohort", "center", "subjects"]
    assert result.protocol.num_subjects == 12
    assert (folder / "kept.tsv").exists()


def test_a_model_card_is_kept(folder: Path) -> None:
    card = folder / "card.json"
    card.write_text('{"data": "made up"}')
    options = ["--out", folder / "a.json", "--replicates", 0, "--model-card", card]
    assert evaluated("scores", folder / "system.txt", *options).system.model_card == {
        "data": "made up"
    }
    for content in ('{"a": 1}', "[", "[]"):
        card.write_text(content)
        with pytest.raises(DataError, match=r"card\.json is not"):
            evaluated("scores", folder / "system.txt", *options)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("scores nan.txt", r"nan\.txt, line 2"),
        ("scores one.txt", r"one\.txt: there are 0 impostor trials"),
        ("scores no-such-file --out none/r.json", "make the folder first"),
        ("trials trials.txt --embeddings model.npz --as-norm 5", "--cohort"),
        ("trials bare.txt --embeddings model.npz", r"bare\.txt has no labels"),
        ("scores system.txt --ignore-extra", "--trials"),
        ("scores system.txt --trials-format csv", "--trials"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_written(
    folder: Path, words: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("nan.txt").write_text("a b 0.5 1\na c nan 0\n")
    Path("one.txt").write_text("a b 0.5 1\na c 0.25 1\n")
    Path("bare.txt").write_text("a b\n")
    kind, *options = words.split()
    with pytest.raises((ConfigError, DataError, ProtocolError), match=named):
        evaluated(kind, options[0], "--out", "r.json", *options[1:])
    assert not Path("r.json").exists()


def test_every_option_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "evaluating-scores.md"
    text = page.read_text(encoding="utf-8")
    names = {
        *vars(parse("scores", "f", "--out", "o")),
        *vars(parse("trials", "t", "--embeddings", "e", "--out", "o")),
    }
    for name in names - {"run", "resumes", "file"}:
        assert f"`--{name.replace('_', '-')}`" in text


def test_names_cannot_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[31mred\x1b[0m|\n[bold]x"
    evaluated(
        "scores", folder / "system.txt", "--out", folder / "r.json", "--replicates", 0,
        "--name", name,
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.startswith(r"\x1b[31mred\x1b[0m|\n[bold]x on ")


def test_progress_is_a_line_now_and_then_outside_a_terminal() -> None:
    stream, seconds = io.StringIO(), iter([0.0, 4.0, 6.0, 7.0, 7.5])
    progress = line_progress(stream, clock=lambda: next(seconds))
    for done in (1, 2, 3, 4):
        progress("scoring", done, 4)
    progress("bootstrap", 1, 4)
    assert stream.getvalue() == "scoring: 3 of 4 (75 %)\n"


def test_progress_in_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with stage_progress() as progress:
        progress("scoring", 1, 4)
        progress("scoring", 4, 4)
    assert "scoring" in stream.getvalue()


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_result_names_the_weights_behind_its_embeddings(folder: Path, suffix: str) -> None:
    speakers, weights = make_speakers(), "ab" * 32
    path = folder / f"e.{suffix}"
    write_embedding_file(path, speakers.keys, speakers.matrix, metadata={"model": weights})
    command = ["trials", folder / "trials.txt", "--embeddings", path, "--replicates", 0]
    result = evaluated(*command, "--out", folder / "r.json")
    assert result.system.model_card == {"weights_sha256": weights}
    other = folder / "card.json"
    other.write_text(json.dumps({"weights_sha256": "cd" * 32}))
    with pytest.raises(DataError, match=r"cdcdcdcdcdcd.* abababababab"):
        evaluated(*command, "--out", folder / "r.json", "--model-card", other)


def test_mirrored_and_self_pairs_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "system.txt").read_text().splitlines()
    enrol, test, score, label = lines[0].split()
    lines += [f"{test} {enrol} {score} {label}", f"{enrol} {enrol} 1.0 target"]
    (folder / "odd.txt").write_text("\n".join(lines) + "\n")
    result = evaluated("scores", folder / "odd.txt", "--out", folder / "r.json", "--replicates", 0)
    assert [note.split()[0] for note in result.notes] == ["1", "1"]
    printed = capsys.readouterr().out
    assert "note: 1 pairs occur in both orders" in printed
    assert "note: 1 trials compare a sample with itself" in printed


def test_thresholds_are_shown_with_digits_that_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split() for line in (folder / "system.txt").read_text().splitlines()]
    near = [f"{a} {b} {1 + float(score) * 1e-9!r} {label}\n" for a, b, score, label in lines]
    (folder / "near.txt").write_text("".join(near))
    options = ["--out", folder / "r.json", "--replicates", 0, "--fars", 0.1, 0.01]
    result = evaluated("scores", folder / "near.txt", *options)
    printed = capsys.readouterr().out
    first, second = (point.threshold for point in result.measures.tar)
    rows = [line.split("|") for line in printed.splitlines() if "TAR at FAR" in line]
    assert first != second
    assert rows[0][-3].strip() != rows[1][-3].strip()
    assert "does not tell subjects apart" in result.notes[0]
    assert "note: all " in printed


def test_collapsed_embeddings_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speakers = make_speakers()
    matrix = 1.0 + 1e-4 * speakers.matrix
    np.savez(folder / "flat.npz", keys=np.array(speakers.keys), embeddings=matrix)
    command = ["trials", folder / "trials.txt", "--embeddings", folder / "flat.npz"]
    result = evaluated(
        *command, "--center", folder / "flat.npz", "--out", folder / "r.json", "--replicates", 0
    )
    assert "embeddings have collapsed" in result.notes[0]
    assert "note: embeddings have collapsed" in capsys.readouterr().out
    healthy = ["trials", folder / "trials.txt", "--embeddings", folder / "model.npz"]
    assert evaluated(*healthy, "--out", folder / "h.json", "--replicates", 0).notes == ()
