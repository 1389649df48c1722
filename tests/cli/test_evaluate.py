"""``qmargin evaluate scores``, ``trials`` and ``voxceleb`` from files to ``result.json``."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import run_command
from helpers.speakers import make_speakers
from qmargin.cli.tables import line_progress, stage_progress
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.embed import write_embedding_file
from qmargin.evaluation.embeddings import read_embeddings, read_seconds
from qmargin.evaluation.protocols import speakers as speaker_trials
from qmargin.evaluation.result import Result, read_result
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: scores, trials, embeddings of 12 speakers, and their groups."""
    monkeypatch.chdir(tmp_path)
    speakers = make_speakers()
    speakers.write_scores(Path("system.txt"))
    speakers.write_trials(Path("trials.txt"))
    speakers.write_embeddings(Path("model.npz"))
    lines = [f"id{i:02d},{'f' if i % 2 else 'm'}\n" for i in range(12)]
    Path("groups.csv").write_text("subject,group\n" + "".join(lines))
    return tmp_path


pytestmark = pytest.mark.usefixtures("folder")


def evaluated(words: str, *others: str, out: str = "r.json") -> Result:
    """The result of a command, without intervals unless it asks for them."""
    run_command("evaluate", *words.split(), "--out", out, "--replicates", "0", *others)
    return read_result(out)


def test_scores_to_a_result_and_a_table(capsys):
    words = "scores system.txt --fars 0.1 1e-5 --groups groups.csv"
    result = evaluated(words, "--replicates", "30")
    printed = capsys.readouterr().out
    assert result.system.name == "system" and result.protocol.interval.num_replicates == 30
    assert [source.role for source in result.sources] == ["scores", "groups"]
    for part in ("TAR at FAR 10 %", "not measurable", "95%, 30 replicates", "INEQ"):
        assert part in printed
    assert printed.endswith("r.json\n")


def test_trials_with_embeddings_give_the_same_result():
    quick = ("--replicates", "20", "--name", "one")
    trials = evaluated("trials trials.txt --embeddings model.npz", *quick, out="a.json")
    scores = evaluated("scores system.txt", *quick)
    assert trials.protocol.data_sha256 == scores.protocol.data_sha256
    for first, second in zip(trials.measures.tar, scores.measures.tar, strict=True):
        assert (first.tar, first.interval) == (second.tar, second.interval)
    assert [source.role for source in trials.sources] == ["scores", "trials", "embeddings"]
    again = evaluated("scores a.scores.tsv --trials trials.txt", *quick)
    assert again.measures == trials.measures


def test_norms_and_subjects_are_options():
    Path("utt2spk").write_text("".join(f"{key} {key[:4]}\n" for key in make_speakers().keys))
    result = evaluated(
        "trials trials.txt --embeddings model.npz --cohort model.npz --as-norm 20 "
        "--center model.npz --subjects utt2spk --scores kept.tsv"
    )
    roles = [source.role for source in result.sources]
    assert roles == ["scores", "trials", "embeddings", "cohort", "center", "subjects"]
    assert result.protocol.num_subjects == 12 and Path("kept.tsv").exists()


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_result_has_the_card_and_the_weights_behind_its_embeddings(suffix):
    card, speakers, weights = Path("card.json"), make_speakers(), "ab" * 32
    card.write_text('{"data": "made up"}')
    result = evaluated("scores system.txt --model-card card.json")
    assert result.system.model_card == {"data": "made up"}
    for content in ('{"a": 1}', "[", "[]"):
        card.write_text(content)
        with pytest.raises(DataError, match=r"card\.json is not"):
            evaluated("scores system.txt --model-card card.json")
    path = Path(f"e.{suffix}")
    write_embedding_file(path, speakers.keys, speakers.matrix, metadata={"model": weights})
    words = f"trials trials.txt --embeddings {path}"
    assert evaluated(words).system.model_card == {"weights_sha256": weights}
    card.write_text(json.dumps({"weights_sha256": "cd" * 32}))
    with pytest.raises(DataError, match=r"cdcdcdcdcdcd.* abababababab"):
        evaluated(f"{words} --model-card card.json")


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
        ("voxceleb trials.txt --embeddings model.npz --as-norm", "--training"),
        ("voxceleb trials.txt --embeddings model.npz --calibrate", "--training"),
        ("voxceleb trials.txt --model . --embeddings e.npz", "--audio"),
        ("voxceleb trials.txt --embeddings e.npz --out none/r.json", "make the folder first"),
        ("voxceleb trials.txt", "neither --model nor --embeddings"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_written(words, named):
    Path("nan.txt").write_text("a b 0.5 1\na c nan 0\n")
    Path("one.txt").write_text("a b 0.5 1\na c 0.25 1\n")
    Path("bare.txt").write_text("a b\n")
    with pytest.raises((ConfigError, DataError, ProtocolError), match=named):
        run_command("evaluate", *words.split(" ")[:2], "--out", "r.json", *words.split(" ")[2:])
    assert not Path("r.json").exists()


def test_names_cannot_steer_the_terminal(capsys):
    evaluated("scores system.txt", "--name", "\x1b[31mred\x1b[0m|\n[bold]x")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and printed.startswith(r"\x1b[31mred\x1b[0m|\n[bold]x on ")


def test_progress_is_a_line_now_and_then_or_a_bar(monkeypatch):
    stream, seconds = io.StringIO(), iter([0.0, 4.0, 6.0, 7.0, 7.5])
    progress = line_progress(stream, clock=lambda: next(seconds))
    for done in (1, 2, 3, 4):
        progress("scoring", done, 4)
    progress("bootstrap", 1, 4)
    assert stream.getvalue() == "scoring: 3 of 4 (75 %)\n"

    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stage_progress() as progress:
        progress("scoring", 4, 4)
    assert "scoring" in terminal.getvalue()


def test_odd_trials_are_noted(capsys):
    """Mirrored and self pairs; scores that hardly differ, whose thresholds are shown to differ."""
    lines = [line.split() for line in Path("system.txt").read_text().splitlines()]
    enrol, test, score, label = lines[0]
    odd = [*lines, [test, enrol, score, label], [enrol, enrol, "1.0", "target"]]
    Path("odd.txt").write_text("".join(" ".join(line) + "\n" for line in odd))
    assert [note.split()[0] for note in evaluated("scores odd.txt").notes] == ["1", "1"]
    printed = capsys.readouterr().out
    assert "note: 1 pairs occur in both orders" in printed
    assert "note: 1 trials compare a sample with itself" in printed

    near = [f"{a} {b} {1 + float(score) * 1e-9!r} {label}\n" for a, b, score, label in lines]
    Path("near.txt").write_text("".join(near))
    result = evaluated("scores near.txt --fars 0.1 0.01")
    printed = capsys.readouterr().out
    rows = [line.split("|") for line in printed.splitlines() if "TAR at FAR" in line]
    assert result.measures.tar[0].threshold != result.measures.tar[1].threshold
    assert rows[0][-3].strip() != rows[1][-3].strip()
    assert "does not tell subjects apart" in result.notes[0] and "note: all " in printed


def test_collapsed_embeddings_are_reported(capsys):
    speakers = make_speakers()
    np.savez("flat.npz", keys=np.array(speakers.keys), embeddings=1.0 + 1e-4 * speakers.matrix)
    result = evaluated("trials trials.txt --embeddings flat.npz --center flat.npz")
    assert "embeddings have collapsed" in result.notes[0]
    assert "note: embeddings have collapsed" in capsys.readouterr().out
    assert evaluated("trials trials.txt --embeddings model.npz", out="h.json").notes == ()


def test_speaker_trials_with_mean_cohort_and_calibration():
    words = "voxceleb trials.txt --embeddings model.npz --fars 0.1 0.01"
    result = evaluated(words)
    assert (result.system.name, result.protocol.name) == ("model", "trials")
    assert result.system.model_card == {"scoring": "cosine"} and Path("r.scores.tsv").exists()

    generator = np.random.default_rng(2)
    centers = np.repeat(generator.normal(size=(30, 8)), 4, axis=0)
    matrix = centers + 0.9 * generator.normal(size=(120, 8)) + 0.3
    keys = [f"t{row // 4:02d}/v/{row}.wav" for row in range(120)]
    np.savez("training.npz", keys=np.array(keys), embeddings=matrix)
    names = [*make_speakers().keys, *keys]
    Path("utt2dur").write_text("".join(f"{name} {3 + len(name) % 5}\n" for name in names))
    result = evaluated(
        f"{words} --training training.npz --as-norm 20 --calibrate --durations utt2dur"
    )
    assert result.system.model_card == {
        "scoring": "mean subtracted, cosine, AS-norm 20, quality-aware calibration"
    }
    roles = [source.role for source in result.sources]
    assert roles == ["trials", "embeddings", "center", "cohort", "scores"]
    center = read_embeddings("training.npz")
    norm = CohortNorm(speaker_trials.speaker_means(center), 20)
    scoring = speaker_trials.Scoring(center, norm, read_seconds("utt2dur"))
    drawn = speaker_trials.draw_trials(center, seed=0)
    calibration = speaker_trials.calibrate_speakers(center, drawn, scoring)
    trials = read_trials("trials.txt")
    scored = speaker_trials.score_speakers(read_embeddings("model.npz"), trials, scoring)
    expected = calibration.apply(scored.scores, scored.names, scored.columns)
    np.testing.assert_array_equal(read_scores("r.scores.tsv", trials=trials).scores, expected)
