"""``qmargin data`` and ``qmargin check-data`` with arguments as users type them."""

import pickle

import numpy as np
import pytest

from helpers.commands import run_command as run
from helpers.pictures import jpeg, write_folder, write_records
from helpers.recordings import encoded, speaker_folders, tone
from qmargin.data import open_dataset, read_bin
from qmargin.data.alignment import TEMPLATE
from qmargin.errors import ConfigError, DataError

IMAGES = [jpeg(seed) for seed in range(6)]


def test_images_are_indexed(tmp_path, capsys):
    path = write_records(tmp_path / "train.rec", IMAGES, [0, 0, 1, 1, 2, 2])
    run("data", "index", path)
    output = capsys.readouterr().out
    assert "train.rec.qmindex: images, recordio" in output
    assert "| samples    |     6 |" in output and "| identities |     3 |" in output
    run("data", "index", path, "--out", tmp_path / "other.qmindex")
    assert len(open_dataset(tmp_path / "other.qmindex")) == 6


def test_a_converted_set_is_read_like_the_original(tmp_path):
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps((IMAGES, [True, False, True])))
    run("data", "convert-bin", tmp_path / "lfw.bin")
    images, is_genuine = read_bin(tmp_path / "lfw.npz")
    assert images == IMAGES and is_genuine.tolist() == [True, False, True]


def test_align_counts_what_became_of_the_photos(tmp_path, capsys):
    (tmp_path / "a.jpg").write_bytes(jpeg(0, 112))
    header = ",".join(f"x{point},y{point}" for point in range(1, 6))
    points = ",".join(map(str, np.ravel(TEMPLATE)))
    (tmp_path / "list.csv").write_text(f"path,{header}\na.jpg,{points}\ngone.jpg,{points}\n")
    run("data", "align", tmp_path / "list.csv", "--out", tmp_path / "out")
    output = capsys.readouterr().out
    assert "| aligned faces         |      1 |" in output
    assert "| not images            |      1 | gone.jpg |" in output
    assert (tmp_path / "out" / "a.jpg").exists()


def test_images_are_checked(tmp_path, capsys):
    run("check-data", write_folder(tmp_path / "faces", IMAGES, [0, 0, 1, 1, 2, 3]))
    output = capsys.readouterr().out
    assert "16 x 16: 6" in output and "| identities with one sample     |      2 |" in output
    root = write_folder(tmp_path / "damaged", [*IMAGES, b"", b"<html>"], [0] * 8)
    with pytest.raises(DataError, match="2 corrupt, 0 changed and 0 contradictory samples of 8"):
        run("check-data", root, "--threads", 1)
    output = capsys.readouterr().out
    assert "zero bytes" in output and "person0/7.jpg" in output


def test_recordings_are_indexed_and_everything_wrong_with_them_is_shown(tmp_path, capsys):
    wavs = speaker_folders(tmp_path / "wavs")
    paths = sorted(wavs.rglob("*.wav"))
    for number, path in enumerate(paths):
        path.write_bytes(encoded(tone(1.5, hertz=300 + number)))
    run("check-data", wavs)
    assert wavs.with_name("wavs.qmindex").exists()
    capsys.readouterr()
    run("data", "index", wavs, "--threads", 1)
    output = capsys.readouterr().out
    assert "wavs.qmindex: recordings" in output
    assert "| samples                        |      6 | 16,000 Hz: 6 |" in output
    assert "| identities                     |      3 |" in output

    paths[0].write_bytes(encoded(np.clip(20 * tone(1.5), -1, 1)))
    paths[1].write_bytes(encoded(0.0001 * tone(1.5)))
    paths[2].write_bytes(encoded(tone(0.3)))
    paths[3].write_bytes(b"<html>")
    paths[5].write_bytes(paths[4].read_bytes())
    with pytest.raises(DataError, match="1 corrupt, 5 changed and 0 contradictory"):
        run("check-data", wavs)
    output = capsys.readouterr().out
    for line in ("clipped  ", "silent  ", "shorter than 1 s", "cannot be read", "duplicates  "):
        (row,) = [row for row in output.splitlines() if row.startswith(f"| {line}")]
        assert row.split("|")[2].strip() == "1"
    paths[3].write_bytes(paths[0].read_bytes())  # of another speaker
    run("data", "index", wavs)
    with pytest.raises(DataError, match="0 corrupt, 0 changed and 1 contradictory"):
        run("check-data", wavs)


def test_options_of_lists_need_a_list(tmp_path):
    (tmp_path / "faces" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="leave split out"):
        run("data", "index", tmp_path / "faces", "--split", "train")
    with pytest.raises(ConfigError, match="leave root out"):
        run("check-data", tmp_path / "faces", "--root", tmp_path)
