"""``qmargin data index`` and ``qmargin check-data`` for recordings, as users type them."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from helpers.recordings import encoded, speaker_folders, tone
from qmargin.cli.data import add_data
from qmargin.errors import ConfigError, DataError


def run(*words: object) -> None:
    parser = argparse.ArgumentParser()
    add_data(parser.add_subparsers(required=True))
    arguments = parser.parse_args([str(word) for word in words])
    arguments.run(arguments)


@pytest.fixture
def wavs(tmp_path: Path) -> Path:
    root = speaker_folders(tmp_path / "wavs")
    for number, path in enumerate(sorted(root.rglob("*.wav"))):
        path.write_bytes(encoded(tone(1.5, hertz=300 + number)))
    return root


def test_an_index_says_what_it_found(wavs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "index", wavs, "--threads", 1)
    output = capsys.readouterr().out
    assert "wavs.qmindex: recordings" in output
    assert "| utterances                   |      6 | 16,000 Hz: 6 |" in output
    assert "| speakers                     |      3 |" in output
    assert wavs.with_name("wavs.qmindex").read_bytes().count(b"\n") == 7


def test_good_recordings_pass_and_are_indexed(wavs: Path) -> None:
    run("check-data", wavs)
    assert wavs.with_name("wavs.qmindex").exists()
    run("check-data", wavs)


def test_everything_that_is_wrong_is_shown(wavs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "index", wavs)
    paths = sorted(wavs.rglob("*.wav"))
    paths[0].write_bytes(encoded(np.clip(20 * tone(1.5), -1, 1)))
    paths[1].write_bytes(encoded(0.0001 * tone(1.5)))
    paths[2].write_bytes(encoded(tone(0.3)))
    paths[3].write_bytes(b"<html>")
    paths[5].write_bytes(paths[4].read_bytes())
    capsys.readouterr()
    with pytest.raises(DataError, match="1 unreadable, 5 changed and 0 contradictory"):
        run("check-data", wavs)
    output = capsys.readouterr().out
    for line in ("clipped  ", "silent  ", "shorter than 1 s", "cannot be read", "duplicates  "):
        (row,) = [row for row in output.splitlines() if row.startswith(f"| {line}")]
        assert row.split("|")[2].strip() == "1"


def test_a_recording_under_two_speakers_is_an_error(wavs: Path) -> None:
    paths = sorted(wavs.rglob("*.wav"))
    paths[5].write_bytes(paths[0].read_bytes())
    with pytest.raises(DataError, match="0 unreadable, 0 changed and 1 contradictory"):
        run("check-data", wavs)


def test_options_of_lists_need_a_list(tmp_path: Path) -> None:
    (tmp_path / "faces" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="leave --split out"):
        run("data", "index", tmp_path / "faces", "--split", "train")
    with pytest.raises(ConfigError, match="leave --root out"):
        run("check-data", tmp_path / "faces", "--root", tmp_path)
