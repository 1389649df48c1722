"""A path one level too high: the parts of a dataset are not identities."""

from pathlib import Path

import pytest

from helpers.pictures import jpeg, write_folder, write_shards
from helpers.recordings import encoded, tone
from qmargin.data import open_dataset
from qmargin.errors import DataError

IMAGES = [jpeg(seed) for seed in range(4)]
LABELS = [0, 0, 1, 1]
PARTS = [
    ("train", "test"),
    ("Train", "Validation"),
    ("training", "val", "testing"),
    ("dev", "eval"),
    ("train-clean-100", "dev-clean", "test-other"),
    ("train",),
]


def write_pictures(folder: Path) -> None:
    write_folder(folder, IMAGES, LABELS)


def write_recordings(folder: Path) -> None:
    for number, label in enumerate(LABELS):
        place = folder / f"id{label}" / "video" / f"{number}.wav"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(tone(0.1, hertz=300 + number)))


@pytest.mark.parametrize("names", PARTS, ids="-".join)
@pytest.mark.parametrize("write", [write_pictures, write_recordings])
def test_parts_of_a_dataset_are_not_identities(tmp_path: Path, names: tuple, write) -> None:
    for name in names:
        write(tmp_path / "data" / name)
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path / "data")
    assert str(tmp_path / "data" / names[0]) in str(caught.value)
    assert open_dataset(tmp_path / "data" / names[0]).num_classes == 2


@pytest.mark.parametrize("write", [write_pictures, write_recordings])
def test_other_folders_without_samples_do_not_hide_the_parts(tmp_path: Path, write) -> None:
    write(tmp_path / "train")
    write(tmp_path / "test")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "identities.txt").write_text("id0 Ada\n")
    with pytest.raises(DataError, match="train"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("write", [write_pictures, write_recordings])
def test_one_folder_around_the_identities_is_no_identity(tmp_path: Path, write) -> None:
    write(tmp_path / "data" / "aligned")
    with pytest.raises(DataError, match="aligned"):
        open_dataset(tmp_path / "data")


def test_shards_inside_parts_are_named_too(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, IMAGES, LABELS)
    with pytest.raises(DataError, match="train"):
        open_dataset(tmp_path)


def test_people_may_be_called_like_a_part(tmp_path: Path) -> None:
    """Dev is a name; other identities beside it, and images right in its folder, tell."""
    for name in ("Dev", "Ada", "Val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(IMAGES[0])
    assert open_dataset(tmp_path).num_classes == 3


def test_one_identity_with_images_of_its_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "faces" / "ada").mkdir(parents=True)
    (tmp_path / "faces" / "ada" / "1.jpg").write_bytes(IMAGES[0])
    assert open_dataset(tmp_path / "faces").num_classes == 1
