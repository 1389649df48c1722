import argparse
import json
from pathlib import Path

import pytest

from benchmarks.features import FeaturesBenchmark, add_subject
from helpers.recordings import speaker_folders
from qmargin.errors import ConfigError

pytest.importorskip("kaldi_native_fbank")


def run(*options: str) -> None:
    parser = argparse.ArgumentParser()
    add_subject(parser.add_subparsers())
    arguments = parser.parse_args(["features", *options])
    arguments.run(arguments)


def test_the_tables_and_the_file_have_every_number(tmp_path: Path, capsys) -> None:
    path = tmp_path / "numbers.json"
    audio = speaker_folders(tmp_path / "wavs")
    run("--utterances", "4", "--repeats", "2", "--audio", str(audio), "--json", str(path))
    printed = capsys.readouterr().out
    for text in ("kaldi-native-fbank", "batched on cpu", "share above 1e-3", "+ simulated room"):
        assert text in printed
    record = json.loads(path.read_text())
    assert record["banks"]["audio_seconds"] == pytest.approx(4 * 2.015)
    assert len(record["banks"]["seconds"]) == 3
    assert min(record["banks"]["seconds"].values()) > 0
    assert record["banks"]["differences"]["largest_heard"] < 1e-3
    assert set(record["stage_ms"]) >= {"decode and cut", "+ speed", "+ filter banks"}


def test_waveforms_are_made_up_without_audio(capsys) -> None:
    run("--utterances", "2", "--repeats", "1", "--seconds", "0.5")
    assert "80 log-mel bins of 2 utterances of 0.5 s" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"utterances": 0}, {"repeats": 0}, {"seconds": 0.01}])
def test_impossible_settings_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="pass more"):
        FeaturesBenchmark(**options)
