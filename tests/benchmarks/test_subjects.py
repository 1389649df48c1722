"""Subjects of ``python -m benchmarks`` about data and evaluations, at a small size."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import protocols
from benchmarks.coverage import CoverageBenchmark
from benchmarks.data import DataBenchmark
from benchmarks.features import FeaturesBenchmark
from benchmarks.protocols import ProtocolsBenchmark, make_release
from benchmarks.trials import TrialsBenchmark, make_trials
from helpers.commands import run_benchmark
from helpers.recordings import speaker_folders
from qmargin.errors import BackendError, ConfigError
from qmargin.evaluation.protocols.ijb import read_ijb
from qmargin.evaluation.trials import read_trials

FACES = {"images": 900, "templates": 60, "subjects": 12, "pairs": 500, "dim": 16, "seed": 0}
VOICES = {"trials": 300, "utterances": 120, "speakers": 10, "cohort": 20, "top": 5, "dim": 8}


def measured(subject: str, folder: Path, **options: object) -> dict[str, Any]:
    """What a benchmark writes to its JSON file."""
    words = [f"--{name}={value}" for name, value in options.items()]
    assert run_benchmark([subject, *words, "--json", str(folder / "found.json")]) == 0
    record: dict[str, Any] = json.loads((folder / "found.json").read_bytes())
    return record


def test_data(tmp_path, capsys):
    record = measured("data", tmp_path, images=60, records=500, batch=16, repeats=1)
    assert "records / folder" in capsys.readouterr().out and record["indexing"]["seconds"] > 0
    assert set(record["loading"]) == {"bare", "loader", "first_bytes", "last_bytes"}
    assert len(record["reading"]["rates"]) == 4


def test_features(tmp_path, capsys):
    pytest.importorskip("kaldi_native_fbank")
    audio = speaker_folders(tmp_path / "wavs")
    record = measured("features", tmp_path, utterances=4, repeats=2, audio=audio)
    printed = capsys.readouterr().out
    for text in ("kaldi-native-fbank", "batched on cpu", "share above 1e-3", "+ simulated room"):
        assert text in printed
    banks = record["banks"]
    assert banks["audio_seconds"] == pytest.approx(4 * 2.015) and len(banks["seconds"]) == 3
    assert min(banks["seconds"].values()) > 0 and banks["differences"]["largest_heard"] < 1e-3
    assert set(record["stage_ms"]) >= {"decode and cut", "+ speed", "+ filter banks"}
    measured("features", tmp_path, utterances=2, repeats=1, seconds=0.5)  # waveforms are made up
    assert "80 log-mel bins of 2 utterances of 0.5 s" in capsys.readouterr().out


def test_synthetic(tmp_path, capsys):
    record = measured("synthetic", tmp_path, portraits=3, utterances=1, repeats=1)
    assert "portraits of 112 x 112" in capsys.readouterr().out
    assert min(record["rates"].values()) > 0 and len(record["rates"]) == 3


def test_coverage(tmp_path, capsys):
    record = measured("coverage", tmp_path, studies=20, subjects=20, replicates=20)
    assert "identities alone" in capsys.readouterr().out
    assert record["seeds vary much, 2"]["used"] == record["seeds vary much, 2"]["apart"]
    assert record["seeds vary much, 6"]["used"] == record["seeds vary much, 6"]["by_seed"]
    assert "by_seed" not in record["seeds alone, 6 and 3"]
    with pytest.raises(ConfigError, match="studies is 0"):
        CoverageBenchmark(studies=0)


def test_protocols(tmp_path, capsys):
    record = measured("protocols", tmp_path, **FACES, replicates=3)
    assert "900 embeddings of 16, 60 templates, 500 pairs" in capsys.readouterr().out
    assert list(record["seconds"])[-2:] == ["score pairs", "measure, with intervals"]
    assert (record["num_genuine"], record["num_impostors"]) == (48, 452)
    assert record["peak_bytes"] > 1 << 20 and 0.0 < record["tar"]["0.1"] <= 1.0


def test_the_release_of_protocols_is_what_it_says(tmp_path):
    make_release({**FACES, "folder": str(tmp_path)})
    release = read_ijb(tmp_path)
    pairs = release.pairs()
    assert len(release) == 900 and len(set(release.rows.template.tolist())) == 60
    assert len({*zip(pairs.enrol.tolist(), pairs.test.tolist(), strict=True)}) == 500
    assert pairs.is_genuine.sum() == 48


def test_a_step_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(protocols, "SUBJECT", "absent")
    with pytest.raises(BackendError, match="the step 'make' failed"):
        protocols.run_protocols_benchmark(ProtocolsBenchmark(**FACES))


def test_trials(tmp_path, capsys):
    record = measured("trials", tmp_path, **VOICES, replicates=3)
    assert "300 trials of 120 embeddings of 8, cohort of 20 (top 5)" in capsys.readouterr().out
    assert list(record["seconds"])[-2:] == ["score, with AS-norm", "measure, with intervals"]
    assert (record["num_genuine"], record["num_impostors"]) == (150, 150)
    assert 0.0 < record["eer"] < 0.5 and record["peak_bytes"] > 1 << 20


def test_trials_are_distinct_and_half_genuine(tmp_path):
    make_trials({**VOICES, "seed": 0, "folder": str(tmp_path)})
    trials = read_trials(tmp_path / "trials.txt")
    names = trials.keys.names
    pairs = list(zip(trials.keys.enrol.tolist(), trials.keys.test.tolist(), strict=True))
    assert len(set(pairs)) == 300 and trials.is_genuine is not None
    for (a, b), is_genuine in zip(pairs, trials.is_genuine, strict=True):
        assert (names[a].split("/")[0] == names[b].split("/")[0]) == is_genuine


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        (DataBenchmark, {"images": 0}, "images"),
        (DataBenchmark, {"batch": 9, "images": 8}, "batch"),
        (DataBenchmark, {"records": -1}, "records"),
        (FeaturesBenchmark, {"utterances": 0}, "pass more"),
        (FeaturesBenchmark, {"repeats": 0}, "pass more"),
        (FeaturesBenchmark, {"seconds": 0.01}, "pass more"),
        (ProtocolsBenchmark, {**FACES, "subjects": 60}, "do not grow"),
        (ProtocolsBenchmark, {**FACES, "pairs": 48}, "is not above 48"),
        (ProtocolsBenchmark, {**FACES, "pairs": 577}, "at most 576"),
        (ProtocolsBenchmark, {**FACES, "dim": 0}, "dim is at least 1"),
        (TrialsBenchmark, {**VOICES, "speakers": 61}, "2 utterances of each"),
        (TrialsBenchmark, {**VOICES, "top": 21}, "top=21 is not from 2 to cohort=20"),
        (TrialsBenchmark, {**VOICES, "trials": 100_000}, "more utterances for more of them"),
        (TrialsBenchmark, {**VOICES, "dim": 0}, "dim is at least 1"),
    ],
)
def test_settings_that_make_no_sense(benchmark, options, message):
    with pytest.raises(ConfigError, match=message):
        benchmark(**options)
