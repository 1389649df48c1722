"""A folder to embeddings by name: private files, and nothing lost without a word."""

import csv
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from helpers.model_directories import make_model, pictures, write_pictures
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embed_folder import (
    FileRow,
    embed_files,
    find_files,
    write_embedding_file,
    write_manifest,
    write_private,
)
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.model import Model, load_model


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_model(tmp_path / "m")
    return load_model(tmp_path / "m", fit="exact")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "faces", pictures(6))
    (tmp_path / "faces" / "notes.txt").write_text("not a picture")
    return tmp_path / "faces"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_found_at_any_depth_in_order(folder: Path) -> None:
    (folder / "id00" / "0.png").rename(folder / "id00" / "0.PNG")
    names = find_files(folder, "images")
    assert names[:3] == ["id00/0.PNG", "id00/1.png", "id01/0.png"]
    assert len(names) == 6


def test_every_file_has_its_embedding(model: Model, folder: Path) -> None:
    names, seen = find_files(folder, "images"), []
    found = embed_files(
        model, folder, names, batch_size=4, progress=lambda *numbers: seen.append(numbers)
    )
    assert found.keys == names
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)), atol=1e-6)
    content = (folder / names[2]).read_bytes()
    assert found.files[2] == FileRow(names[2], 2, hashlib.sha256(content).hexdigest())
    assert seen == [(4, 6), (6, 6)]


def test_bad_files_are_left_out_and_told_of(model: Model, folder: Path) -> None:
    (folder / "id00" / "1.png").write_bytes(b"<html>")
    (folder / "id02" / "0.png").write_bytes(b"")
    names = find_files(folder, "images")
    found = embed_files(model, folder, names, max_corrupt=2)
    assert [file.row for file in found.files] == [0, None, 1, 2, None, 3]
    assert "markup" in found.files[1].problem
    assert found.keys == [names[i] for i in (0, 2, 3, 5)]
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)[[0, 2, 3, 5]]), atol=1e-6)
    with pytest.raises(DataError, match="2 files cannot be embedded and 1 may be left out"):
        embed_files(model, folder, names, max_corrupt=1)
    with pytest.raises(DataError, match="none of 1 files"):
        embed_files(model, folder, ["id02/0.png"])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_is_what_evaluations_read_and_private(tmp_path: Path, suffix: str) -> None:
    matrix = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    path, keys = tmp_path / f"e{suffix}", ["a/0.jpg", 'b "quoted".jpg', "é/1.jpg"]
    before = os.umask(0)
    try:
        write_embedding_file(path, keys, matrix, metadata={"model": "m"})
        write_embedding_file(path, keys, matrix)  # replaces the first
    finally:
        os.umask(before)
    read = read_embeddings(path)
    assert list(read.keys) == keys
    np.testing.assert_array_equal(read.matrix, matrix)
    assert mode_of(path) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_manifest_has_a_line_for_every_file(tmp_path: Path) -> None:
    files = [FileRow("a,b\n.png", 0, "ab"), FileRow("c.png", None, "", "zero bytes")]
    write_manifest(tmp_path / "m.csv", files)
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == ["a,b\n.png", "c.png"]
    assert [row["row"] for row in rows] == ["0", ""]
    assert rows[1]["problem"] == "zero bytes"
    assert mode_of(tmp_path / "m.csv") == 0o600


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def chunks() -> object:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_private(path, chunks())
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_folders_that_cannot_be_embedded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        find_files(tmp_path / "none", "images")
    with pytest.raises(DataError, match="has no images; files have to end in"):
        find_files(tmp_path, "images")
    with pytest.raises(ConfigError, match="no files; embed them in Python"):
        find_files(tmp_path, "arrays")
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"")
    with pytest.raises(DataError, match="not UTF-8"):
        find_files(tmp_path, "images")


def test_sizes_and_names_are_checked(model: Model, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        embed_files(model, folder, ["id00/0.png"], batch_size=0)
    with pytest.raises(ConfigError, match=r"end in \.safetensors or \.npz"):
        write_embedding_file(tmp_path / "e.pt", ["a"], np.zeros((1, 2), np.float32))
