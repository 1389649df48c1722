"""Where an index goes, and that it is said."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.pictures import jpeg, write_folder
from helpers.recordings import speaker_folders
from qmargin.cli.main import main
from qmargin.data import open_dataset
from qmargin.data.speech import open_speech
from qmargin.errors import DataError
from qmargin.recipes.registry import get_recipe
from qmargin.training.build import build_dataset

IMAGES, LABELS = [jpeg(seed) for seed in range(4)], [0, 0, 1, 1]


def test_writing_an_index_beside_the_data_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    with caplog.at_level(logging.WARNING, "qmargin.data"):
        place = open_dataset(root).index.path
    assert str(place) in caplog.text
    assert "index_dir" in caplog.text
    caplog.clear()
    open_dataset(root)
    assert not caplog.text
    wavs = speaker_folders(tmp_path / "wavs")
    with caplog.at_level(logging.WARNING, "qmargin.data"):
        open_dataset(wavs, verify=True)
    assert str(tmp_path / "wavs.qmindex") in caplog.text


def test_an_index_can_go_into_another_folder(tmp_path: Path) -> None:
    places = tmp_path / "indices"
    places.mkdir()
    for name in ("one", "two"):  # the same name in two folders
        root = write_folder(tmp_path / name / "faces", IMAGES, LABELS)
        assert open_dataset(root, index_dir=places).index.path.parent == places
        assert [path.name for path in root.parent.iterdir()] == ["faces"]
    wavs = speaker_folders(tmp_path / "three" / "wavs")
    open_dataset(wavs, verify=True, index_dir=places)
    open_speech(wavs, min_seconds=0.1, index_dir=str(places))
    assert [path.name for path in wavs.parent.iterdir()] == ["wavs"]
    assert len(list(places.iterdir())) == 3
    with pytest.raises(DataError, match="nowhere"):
        open_dataset(root, index_dir=tmp_path / "nowhere")


def test_a_recipe_says_where_and_keeps_its_hash(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    places = tmp_path / "indices"
    places.mkdir()
    recipe = get_recipe("faces_r18_q_margin")
    recipe = replace(recipe, data=replace(recipe.data, path=str(root)))
    moved = replace(recipe, data=replace(recipe.data, index_dir=str(places)))
    assert moved.sha256 == recipe.sha256
    assert build_dataset(moved).num_classes == 2
    assert len(list(places.iterdir())) == 1
    wavs = speaker_folders(tmp_path / "wavs")
    speech = get_recipe(next(name for name in _speaker_recipes()))
    options = {"min_seconds": 0.1}
    data = replace(speech.data, path=str(wavs), index_dir=str(places), options=options)
    build_dataset(replace(speech, data=data))
    assert len(list(places.iterdir())) == 2


def _speaker_recipes() -> list[str]:
    from qmargin.recipes.registry import list_recipes

    return [name for name in list_recipes() if get_recipe(name).data.kind == "audio"]


@pytest.mark.parametrize("command", [("data", "index"), ("check-data",)])
@pytest.mark.parametrize("kind", ["faces", "wavs"])
def test_commands_take_a_folder_for_indices(
    command: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    data = tmp_path / kind
    write_folder(data, IMAGES, LABELS) if kind == "faces" else speaker_folders(data)
    places = tmp_path / "indices"
    places.mkdir()
    assert main([*command, str(data), "--index-dir", str(places)]) == 0
    assert len(list(places.iterdir())) == 1
    assert not data.with_name(f"{kind}.qmindex").exists()
