"""The pages for a first folder, followed command by command on generated folders of toy size."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.commands import run_command as run
from qmargin.data.images import encode_image
from qmargin.data.people import People
from qmargin.data.voices import Voices
from qmargin.errors import BackendError, ConfigError, DataError
from qmargin.evaluation.result import read_result

PAGES = Path(__file__).parents[2] / "docs" / "tutorial"
COMMAND = re.compile(r"^qmargin (.*)$", re.MULTILINE)
SMALLER = {  # of what a page trains, for seconds instead of minutes
    "faces": ("data.batch_size=32", "model.options.width=8", "run.epochs=8"),
    "speakers": (
        *("data.batch_size=16", "data.options.num_frames=80", "model.options.width=24"),
        *("data.options.speed_perturbation=false", "optimizer.lr=6e-3", "run.epochs=20"),
    ),
}


@pytest.fixture
def one_thread():
    """Threads of small operations wait for each other, and for whatever else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def follow(page: str, kind: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run every command of a page, and return what each printed."""
    said = []
    for line in COMMAND.findall((PAGES / page).read_text(encoding="utf-8")):
        words = shlex.split(line)
        if words[0] == "train":
            words += [word for setting in SMALLER[kind] for word in ("--set", setting)]
        if words[0] == "evaluate":
            words += ["--replicates", "20", "--fars", "0.1,0.01,0.001"]
        if words[0] == "report":
            words += ["--no-figures"]
        capsys.readouterr()
        run(*words)
        said.append(f"{words[0]}: {capsys.readouterr().out}")
    return said


def check(said: list[str], kind: str, eer: float) -> None:
    assert read_result(f"{kind}.json").measures.eer.value < eer
    assert [text.partition(":")[0] for text in said] == (
        ["train", "export", "evaluate", "export", "verify", "verify", "report"]
    )
    scores = [float(text.split()[2]) for text in said if text.startswith("verify")]
    assert scores[0] > scores[1]
    assert Path("models", kind, "thresholds.json").is_file()
    assert Path("report/index.html").is_file()


@pytest.mark.usefixtures("one_thread")
def test_the_page_for_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    People(40, 8).write("faces/train")
    People(20, 10, split="test").write("faces/test")
    check(follow("your-pictures.md", "faces", capsys), "faces", 0.35)


@pytest.mark.usefixtures("one_thread")
def test_the_page_for_recordings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Voices(40, 8, longest=2.5).write("speakers/train")
    Voices(12, 6, split="test", longest=2.5).write("speakers/test")
    check(follow("your-recordings.md", "speakers", capsys), "speakers", 0.3)


@pytest.mark.parametrize("kind", [People, Voices])
def test_made_data_of_two_splits_have_no_name_in_common(kind, tmp_path):
    """Otherwise ``qmargin compare`` takes them for the same identities, and refuses them."""
    folders = [tmp_path / split for split in ("train", "test")]
    for folder in folders:
        kind(2, 1, split=folder.name).write(folder)
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert len(names[0]) == len(names[1]) == 2 and not names[0] & names[1]


def train(kind: str, path: Path) -> None:
    out = path.with_name("run")
    run("train", f"{kind}_tiny", "--set", f"data.path={path}", "--device", "cpu", "--out", out)


@pytest.mark.parametrize("kind", ["faces", "speakers"])
def test_folders_without_samples_are_refused(kind, tmp_path):
    with pytest.raises((ConfigError, DataError), match="does not exist"):
        train(kind, tmp_path / "nowhere")
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="samples of each identity into a separate folder"):
        train(kind, tmp_path / "data")
    (tmp_path / "data" / "ada").mkdir()
    with pytest.raises(DataError, match="in its folders; give each identity a folder"):
        train(kind, tmp_path / "data")
    assert not (tmp_path / "run").exists()  # a refused run leaves nothing


def test_a_batch_of_more_pictures_than_there_are_is_refused_by_its_setting(tmp_path):
    People(2, 3).write(tmp_path / "faces")
    with pytest.raises(ConfigError, match=r"data\.batch_size is 64 and there are 6 samples"):
        train("faces", tmp_path / "faces")
    assert not (tmp_path / "run").exists()


def test_one_identity_is_refused(tmp_path):
    People(1, 3).write(tmp_path / "faces")
    with pytest.raises(DataError, match=r"has 1 identity; give at least 2"):
        train("faces", tmp_path / "faces")
    Voices(1, 2).write(tmp_path / "voices")
    with pytest.raises(DataError, match=r"has 1 identity; give at least 2"):
        train("speakers", tmp_path / "voices")


def test_pictures_that_are_too_small_are_refused(tmp_path):
    for person in ("ada", "bea"):
        (tmp_path / "faces" / person).mkdir(parents=True)
        pixels = encode_image(np.zeros((15, 40, 3), np.uint8), format="PNG")
        (tmp_path / "faces" / person / "1.png").write_bytes(pixels)
    with pytest.raises(ConfigError, match=r"at most 15 pixels .*size is 64; give larger ones"):
        train("faces", tmp_path / "faces")


def test_a_missing_package_for_audio_is_named(tmp_path, monkeypatch):
    Voices(2, 2).write(tmp_path / "voices")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BackendError, match="pip install soundfile"):
        train("speakers", tmp_path / "voices")
