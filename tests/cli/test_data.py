"""``qmargin data`` and ``qmargin check-data`` with arguments as users type them."""

import argparse
import pickle
from pathlib import Path

import numpy as np
import pytest

from helpers.pictures import jpeg, write_folder, write_records
from qmargin.cli.data import add_data
from qmargin.data import open_dataset, read_bin
from qmargin.data.alignment import TEMPLATE
from qmargin.errors import DataError

IMAGES = [jpeg(seed) for seed in range(6)]


def run(*words: object) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    add_data(commands)
    arguments = parser.parse_args([str(word) for word in words])
    arguments.run(arguments)


def test_index_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, [0, 0, 1, 1, 2, 2])
    run("data", "index", path)
    output = capsys.readouterr().out
    assert "train.rec.qmindex: recordio" in output
    assert "| samples    |     6 |" in output
    assert "| identities |     3 |" in output
    run("data", "index", path, "--out", tmp_path / "other.qmindex")
    assert len(open_dataset(tmp_path / "other.qmindex")) == 6


def test_a_converted_set_is_read_like_the_original(tmp_path: Path) -> None:
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps((IMAGES, [True, False, True])))
    run("data", "convert-bin", tmp_path / "lfw.bin")
    images, is_genuine = read_bin(tmp_path / "lfw.npz")
    assert images == IMAGES
    assert is_genuine.tolist() == [True, False, True]


def test_align_counts_what_became_of_the_photos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(0, 112))
    header = ",".join(f"x{point},y{point}" for point in range(1, 6))
    points = ",".join(map(str, np.ravel(TEMPLATE)))
    (tmp_path / "list.csv").write_text(f"path,{header}\na.jpg,{points}\ngone.jpg,{points}\n")
    run("data", "align", tmp_path / "list.csv", "--out", tmp_path / "out")
    output = capsys.readouterr().out
    assert "| aligned faces         |      1 |" in output
    assert "| not images            |      1 | gone.jpg |" in output
    assert (tmp_path / "out" / "a.jpg").exists()


def test_good_data_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check-data", write_folder(tmp_path / "faces", IMAGES, [0, 0, 1, 1, 2, 3]))
    output = capsys.readouterr().out
    assert "16 x 16: 6" in output
    assert "| identities with one sample     |      2 |" in output


def test_damaged_data_ends_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "faces", [*IMAGES, b"", b"<html>"], [0] * 8)
    with pytest.raises(DataError, match="2 corrupt, 0 changed and 0 contradictory samples of 8"):
        run("check-data", root, "--threads", 1)
    output = capsys.readouterr().out
    assert "zero bytes" in output
    assert "person0/7.jpg" in output
