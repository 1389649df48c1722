"""Ordinary mistakes with lists and folders get a message that names the remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.pictures import jpeg, write_folder, write_tar
from helpers.recordings import encoded, speaker_folders, tone
from qmargin.data import open_dataset
from qmargin.data.audio_lists import open_audio
from qmargin.data.open import open_images
from qmargin.data.pairs_lists import read_pairs
from qmargin.errors import DataError
from qmargin.evaluation.protocols.pairs import FolderImages, read_pair_trials
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.subjects import read_mapping
from qmargin.evaluation.trials import read_trials

SEMICOLONS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": ("path;label\na.jpg;0\n", open_dataset),
    "recordings": ("path;speaker\na.wav;ada\n", open_dataset),
    "audio": ("path;speaker\na.wav;ada\n", open_audio),
    "pairs": ("a;b;label\nx.jpg;y.jpg;1\n", read_pairs),
    "pair trials": ("a;b;label\nx.jpg;y.jpg;1\n", read_pair_trials),
    "scores": ("enrol;test;score;label\na;b;0.5;1\n", read_scores),
    "scores without a header": ("a;b;0.5;1\n", read_scores),
    "trials": ("enrol;test;label\na;b;1\n", read_trials),
    "groups": ("subject;group\nada;x\n", lambda path: read_mapping(path, role="groups")),
}


@pytest.mark.parametrize("name", SEMICOLONS)
def test_semicolons_are_named(name: str, tmp_path: Path) -> None:
    text, read = SEMICOLONS[name]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match="semicolon") as caught:
        read(tmp_path / "a.csv")
    assert "comma" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a.jpg,0\nb.jpg,1\n", open_dataset),
        ("a.jpg,0\n", open_dataset),
        ("", open_dataset),
        ("a.wav,ada\nb.wav,bea\n", open_audio),
        ("x.jpg,y.jpg,1\nx.jpg,z.jpg,0\n", read_pairs),
    ],
)
def test_a_missing_header_is_named(
    text: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match="first line"):
        read(tmp_path / "a.csv")


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "a.csv").write_text("path,label,label\na.jpg,0,1\n")
    with pytest.raises(DataError, match="label"):
        open_dataset(tmp_path / "a.csv")


def audio_folder(folder: Path) -> Path:
    return speaker_folders(folder / "wavs")


def audio_tar(folder: Path) -> Path:
    members = [("a.wav", encoded(tone(0.1))), ("a.spk", b"ada")]
    return write_tar(folder / "a.tar", members)


def audio_csv(folder: Path) -> Path:
    (folder / "a.csv").write_text("path,speaker\na.wav,ada\n")
    return folder / "a.csv"


def kaldi(folder: Path) -> Path:
    (folder / "wav.scp").write_text("a a.wav\n")
    (folder / "utt2spk").write_text("a ada\n")
    return folder


def json_lines(folder: Path) -> Path:
    (folder / "a.json").write_text('{"key": "a", "wav": "a.wav", "spk": "ada"}\n')
    return folder / "a.json"


@pytest.mark.parametrize(
    "write", [audio_folder, audio_tar, audio_csv, kaldi, json_lines], ids=lambda f: f.__name__
)
def test_recordings_for_a_face_recipe(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"recordings.*data\.kind") as caught:
        open_images(write(tmp_path))
    assert "audio" in str(caught.value)


def test_images_for_a_speaker_recipe(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "faces", [jpeg(0)] * 2, [0, 1])
    with pytest.raises(DataError, match=r"images.*data\.kind"):
        open_audio(root)


def test_a_folder_without_the_images_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "right" / "Ada").mkdir(parents=True)
    (tmp_path / "right" / "Ada" / "Ada_0001.png").write_bytes(jpeg(0))
    names = ("Ada/Ada_0001.jpg", "Ada/Ada_0002.jpg")
    with pytest.raises(DataError, match="--images") as caught:
        FolderImages(tmp_path / "wrong", names)
    assert "Ada/Ada_0001.jpg" in str(caught.value)
    with pytest.raises(DataError, match="--extension png"):
        FolderImages(tmp_path / "right", names)
    with pytest.raises(DataError, match=r"--images .*right"):
        FolderImages(tmp_path, ("Ada/Ada_0001.png",))
    assert len(FolderImages(tmp_path / "right", ("Ada/Ada_0001.png", "gone.png"))) == 2
