"""``qmargin embed``: a folder to a private file that evaluations read."""

import stat
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import run_command
from helpers.model_directories import make_model, pictures, write_pictures
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.model import load_model

run = partial(run_command, "embed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "faces", pictures(6))
    return tmp_path / "faces"


@pytest.mark.parametrize("name", ["e.safetensors", "e.npz"])
def test_a_folder_becomes_a_file_of_embeddings(
    model: Path, folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    run(folder, "--model", model, "--out", out, "--flip", "sum", "--batch-size", 4)
    found = read_embeddings(out)
    assert found.keys[:2] == ("id00/0.png", "id00/1.png")
    expected = load_model(model).embed(pictures(6), flip="sum")
    np.testing.assert_allclose(found.matrix, expected, atol=1e-6)
    manifest = tmp_path / f"{name}.manifest.csv"
    for path in (out, manifest):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    printed = capsys.readouterr().out
    assert printed == f"6 embeddings of 6 files, flip sum\n{out}\n{manifest}\n"


def test_files_that_are_left_out_are_told_of(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(7):
        (folder / f"bad\x1b{number}.jpg").write_bytes(b"<html>")
    run(folder, "--model", model, "--out", tmp_path / "e.npz")
    printed = capsys.readouterr()
    assert "6 embeddings of 13 files" in printed.out
    assert r"left out bad\x1b0.jpg: " in printed.err
    assert "and 2 more, see " in printed.err
    assert "\x1b" not in printed.err
    assert len(read_embeddings(tmp_path / "e.npz")) == 6
    with pytest.raises(DataError, match="4 files cannot be embedded"):
        run(folder, "--model", model, "--out", tmp_path / "f.npz", "--max-corrupt", 3)
    assert not (tmp_path / "f.npz").exists()


def test_places_are_checked_before_the_work(model: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make the folder first"):
        run(folder, "--model", model, "--out", tmp_path / "none" / "e.npz")
    with pytest.raises(ConfigError, match=r"end in \.safetensors or \.npz"):
        run(folder, "--model", model, "--out", tmp_path / "e.pt")


def test_collapsed_embeddings_are_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "same", np.repeat(pictures(1), 4, axis=0))
    run(tmp_path / "same", "--model", model, "--out", tmp_path / "e.npz")
    assert "warning: embeddings have collapsed" in capsys.readouterr().err
