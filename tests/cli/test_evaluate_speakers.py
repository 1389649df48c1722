"""``qmargin evaluate voxceleb`` from files to a result."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import run_command
from helpers.speakers import make_speakers
from qmargin.errors import ConfigError
from qmargin.evaluation.embeddings import read_embeddings, read_seconds
from qmargin.evaluation.protocols.speakers import (
    Scoring,
    calibrate_speakers,
    draw_trials,
    score_speakers,
    speaker_means,
)
from qmargin.evaluation.result import Result, read_result
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials

run = partial(run_command, "evaluate", "voxceleb")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    speakers = make_speakers()
    speakers.write_embeddings(tmp_path / "e.npz")
    speakers.write_trials(tmp_path / "list.txt")
    generator = np.random.default_rng(2)
    centers = np.repeat(generator.normal(size=(30, 8)), 4, axis=0)
    matrix = centers + 0.9 * generator.normal(size=(120, 8)) + 0.3
    keys = [f"t{row // 4:02d}/v/{row}.wav" for row in range(120)]
    np.savez(tmp_path / "training.npz", keys=np.array(keys), embeddings=matrix)
    names = [*speakers.keys, *keys]
    (tmp_path / "utt2dur").write_text("".join(f"{name} {3 + len(name) % 5}\n" for name in names))
    return tmp_path


def measured(files: Path, *words: object) -> Result:
    common = ("--out", files / "r.json", "--replicates", 20, "--fars", 0.1, 0.01)
    run(files / "list.txt", "--embeddings", files / "e.npz", *common, *words)
    return read_result(files / "r.json")


def test_embeddings_to_a_result(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(files)
    assert (result.system.name, result.protocol.name) == ("e", "list")
    assert result.system.model_card == {"scoring": "cosine"}
    assert (files / "r.scores.tsv").exists()
    shown = capsys.readouterr().out
    assert "TAR at FAR 0.01" in shown
    assert "EER" in shown


def test_the_training_set_serves_as_mean_cohort_and_calibration(files: Path) -> None:
    training = ("--training", files / "training.npz", "--as-norm", 20)
    result = measured(files, *training, "--calibrate", "--durations", files / "utt2dur")
    assert result.system.model_card == {
        "scoring": "mean subtracted, cosine, AS-norm 20, quality-aware calibration"
    }
    roles = [source.role for source in result.sources]
    assert roles == ["trials", "embeddings", "center", "cohort", "scores"]
    center = read_embeddings(files / "training.npz")
    norm = CohortNorm(speaker_means(center), 20)
    scoring = Scoring(center, norm, read_seconds(files / "utt2dur"))
    calibration = calibrate_speakers(center, draw_trials(center, seed=0), scoring)
    trials = read_trials(files / "list.txt")
    scored = score_speakers(read_embeddings(files / "e.npz"), trials, scoring)
    expected = calibration.apply(scored.scores, scored.names, scored.columns)
    written = read_scores(files / "r.scores.tsv", trials=trials).scores
    np.testing.assert_array_equal(written, expected)


def test_what_cannot_work_is_refused_at_once(files: Path) -> None:
    for words, named in (
        (("--as-norm",), "--training"),
        (("--calibrate",), "--training"),
        (("--model", files), "--audio"),
        (("--out", files / "none" / "r.json"), "make the folder first"),
    ):
        with pytest.raises(ConfigError, match=named):
            measured(files, *words)
    with pytest.raises(ConfigError, match="neither --model nor --embeddings"):
        run(files / "list.txt", "--out", files / "r.json")
