"""``qmargin compare faces``: folders of real faces, as people have them, and what is refused."""

import csv
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qmargin.cli.main import main
from qmargin.data.people import People
from qmargin.evaluation.result import read_result

SIZES = ((178, 218), (112, 112), (250, 250))  # of CelebA, of aligned faces, of LFW
TOY = [  # settings that a CPU trains in a second
    *("data.batch_size=16", "data.options.size=32", "model.backbone=stroke_net"),
    *("model.embedding_dim=16", "model.options.in_channels=3", "model.options.width=8"),
]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """Eight people to train on and six to test, in pictures of several sizes and formats."""
    people = People(14, 4)
    pictures = people.images(np.arange(len(people)))
    for row, pixels in enumerate(pictures):
        person, number = divmod(row, 4)
        folder = tmp_path / ("train" if person < 8 else "test") / f"person-{person}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels).resize(SIZES[row % 3])
        image.save(folder / f"{number}.{('jpg', 'png')[row % 2]}")
    return tmp_path


def compare(folder: Path, *settings: str, out: str = "out", arms: tuple[str, ...] = ()) -> int:
    given = [f"data.train={folder / 'train'}", f"data.test={folder / 'test'}", "data.budget=64"]
    sets = [word for one in (*given, *TOY, *settings) for word in ("--set", one)]
    chosen = ["--arms", *arms] if arms else []
    command = ["compare", "faces", *sets, "--out", str(folder / out), "--devices", "cpu", *chosen]
    return main(command)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> str:
    assert compare(folder, *settings) == 2
    assert not (folder / "out" / "runs").exists()  # before anything is trained
    return capsys.readouterr().err


def test_five_losses_are_trained_and_tested(faces: Path, capsys) -> None:
    assert compare(faces) == 0
    results = [read_result(path) for path in (faces / "out" / "runs").glob("*/result.json")]
    names = {"ArcFace", "CosFace", "EntMax", "SparseMax", "Q-Margin"}
    assert {result.system.name for result in results} == names
    for result in results:
        assert (result.protocol.num_subjects, result.protocol.num_genuine) == (6, 6 * 6)
        assert result.run is not None and result.run.steps == 2 * 2  # 64 pictures are two epochs
    assert "report: " in capsys.readouterr().out


def test_one_folder_may_hold_both_parts(faces: Path) -> None:
    sets = [word for one in (*TOY, "data.budget=16") for word in ("--set", one)]
    command = ["compare", "faces", "--data", str(faces), *sets, "--arms", "cosface"]
    assert main([*command, "--out", str(faces / "out"), "--devices", "cpu"]) == 0


def test_folders_that_are_missing_are_named(faces: Path, capsys) -> None:
    assert main(["compare", "faces", "--out", str(faces / "out")]) == 2
    assert "--set data.train=PATH" in capsys.readouterr().err
    assert main(["compare", "faces", "--set", f"data.train={faces}", "--out", "out"]) == 2
    assert "--set data.test=PATH" in capsys.readouterr().err
    assert "data.test is nowhere" in refused(capsys, faces, "data.test=nowhere")
    assert "did you mean 'train'" in refused(capsys, faces, "data.trian=x")


def test_people_who_are_trained_and_tested_are_refused(faces: Path, capsys) -> None:
    shutil.copytree(faces / "train" / "person-3", faces / "test" / "person-3")
    message = refused(capsys, faces)
    assert "1 identities are in" in message and "'person-3'" in message


def test_a_rate_that_so_few_people_cannot_measure_is_refused(faces: Path, capsys) -> None:
    message = refused(capsys, faces, "protocol.far=1e-4")
    assert "240 impostor pairs" in message


def test_pictures_that_cannot_be_read_are_counted_or_refused(faces: Path, capsys) -> None:
    damaged = faces / "test" / "person-9" / "0.jpg"
    damaged.write_bytes(b"<!DOCTYPE html>")
    (faces / "test" / "person-9" / "notes.txt").write_text("no picture")
    assert compare(faces, arms=("cosface",)) == 0
    (path,) = (faces / "out" / "runs").glob("*/result.json")
    assert "1 samples cannot be read and are left out" in path.read_text()
    for picture in (faces / "test").rglob("*.*"):
        picture.write_bytes(b"<!DOCTYPE html>")
    assert compare(faces, out="other", arms=("cosface",)) == 2
    assert "check the data" in capsys.readouterr().err


def test_portraits_of_real_people(tmp_path: Path) -> None:
    """Half of the people with two photos or more train, the others are tested."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    source = Path(os.environ.get("QMARGIN_DATA", beside)) / "congress_faces"
    if not source.exists():
        pytest.skip("needs congress_faces in shared/data or QMARGIN_DATA")
    with (source / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["identity"]] = counts.get(row["identity"], 0) + 1
    several = [identity for identity, count in counts.items() if count > 1]
    with zipfile.ZipFile(source / "images.zip") as archive:
        for row in rows:
            if row["identity"] in several:
                part = ("train", "test")[several.index(row["identity"]) % 2]
                folder = tmp_path / part / row["identity"]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / row["path"]).write_bytes(archive.read(row["path"]))
    assert compare(tmp_path, "data.budget=600", arms=("cosface", "q_margin")) == 0
    results = [read_result(path) for path in (tmp_path / "out" / "runs").glob("*/result.json")]
    assert [result.protocol.num_subjects for result in results] == [84, 84]
    assert all(0.2 < result.measures.eer.value < 0.5 for result in results)  # it learned a little
