"""Pictures from a path: divided by identity, no more than the plan reads, and refused in words."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qmargin.data.drawings import Drawings
from qmargin.demo.recipe import Size
from qmargin.demo.stored import read_stored
from qmargin.demo.worlds import stored_world, stroke_world
from qmargin.errors import DataError, ShapeError

SIZE = Size(num_classes=10, samples_per_class=4, epochs=3, batch_size=8, num_test=4, samples_test=3)


def stored_npz(folder, **changes):
    draws = np.random.default_rng(0)
    arrays = {
        "images": draws.integers(0, 255, (60, 32, 32), dtype=np.uint8),
        "label": np.repeat(np.arange(20), 3),
        "split": np.repeat(np.arange(20) >= 12, 3).astype(np.int8),
    }
    arrays.update(changes)
    path = folder / "drawn.npz"
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_a_split_of_the_data_is_kept(tmp_path):
    stored = read_stored(stored_npz(tmp_path), tmp_path / "index")
    world = stored_world(stored, SIZE, seed=0)
    assert isinstance(world.train, Drawings)
    trained = {name.split("/")[0] for name in world.train.names}
    tested = {world.test.sample_id(row).split("/")[0] for row in range(len(world.test))}
    assert trained == {f"class-{label}" for label in range(12)}
    assert tested < {f"class-{label}" for label in range(12, 20)}
    assert len(world.test) == 12  # four identities of three samples: what the plan tests
    assert world.size.epochs == round(SIZE.total_steps * 8 / 36)
    row = stored.names.index(world.test.sample_id(5))
    assert np.array_equal(world.test.images(np.array([5]))[0], stored.pictures[row])
    assert world.test.labels.tolist() == np.repeat(np.arange(4), 3).tolist()


def test_without_a_split_identities_are_divided_by_the_seed(tmp_path):
    stored = read_stored(stored_npz(tmp_path, split=None), tmp_path / "index")
    halves = []
    for seed in (0, 1):
        world = stored_world(stored, SIZE._replace(num_test=100), seed)
        trained = {name.split("/")[0] for name in world.train.names}
        tested = {world.test.sample_id(row).split("/")[0] for row in range(len(world.test))}
        assert not trained & tested
        assert (len(trained), len(tested)) == (12, 8)
        halves.append(trained)
    assert halves[0] != halves[1]


def test_image_folders_are_read_in_grey(tmp_path):
    for name, value in (("ann", 40), ("bob", 90), ("cat", 140), ("dan", 200)):
        (tmp_path / "faces" / name).mkdir(parents=True)
        for number in range(2):
            picture = Image.new("RGB", (50, 40), (value, value, value))
            picture.save(tmp_path / "faces" / name / f"{number}.png")
    stored = read_stored(tmp_path / "faces", tmp_path / "data.qmindex")
    assert stored.pictures.shape == (8, 32, 32)
    assert stored.pictures[:, 5, 5].tolist() == [40, 40, 90, 90, 140, 140, 200, 200]
    assert not stored.is_ink
    assert not any("ann" in name for name in stored.names)


def test_omniglot_is_read(tmp_path):
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("QMARGIN_DATA", beside)) / "omniglot32"
    if not folder.exists():
        pytest.skip(f"no Omniglot in {folder}")
    stored = read_stored(folder, tmp_path / "index")
    world = stored_world(stored, Size(), seed=0)
    assert stored.pictures.shape == (32460, 32, 32)
    assert world.train.num_classes == 964
    assert len(world.test) == 5000
    assert 10 < stored.pictures[0].mean() < 80


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": np.zeros((60, 28, 28), np.uint8)}, r"it needs uint8 \[60, 32, 32\]"),
        ({"label": np.repeat(np.arange(20), 2)}, "40 labels"),
        ({"images": None, "packed4": np.zeros((60, 100), np.uint8)}, "packed4 of uint8"),
        ({"label": np.array("a")}, r"label of <U1 and shape \[\]; it needs one integer"),
        ({"label": np.zeros((60, 1), int)}, r"shape \[60, 1\]; it needs one integer"),
        ({"label": np.repeat(np.arange(20.0), 3)}, "label of float64"),
        ({"label": np.repeat([f"p{n}" for n in range(20)], 3)}, "label of <U3"),
        ({"split": np.zeros(59, int)}, "split of 59 numbers for 60 pictures; it needs 0"),
        ({"split": np.full(60, 2)}, "60 pictures, 2 among them; it needs 0"),
        ({"split": np.arange(60) % 2}, "20 identities with pictures of both splits, such as 0"),
        ({"alphabet": np.zeros(20)}, "alphabet of float64"),
        (
            {"label": None, "labels": np.zeros(60, int)},
            "arrays images, split, labels; it needs label",
        ),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, changes, words):
    with pytest.raises(DataError, match=words):
        read_stored(stored_npz(tmp_path, **changes), tmp_path / "index")


def test_labels_may_be_any_integers_and_alphabets_names(tmp_path):
    known = read_stored(stored_npz(tmp_path), tmp_path / "index")
    far = np.repeat(np.arange(20) * 10**11 - 5, 3)
    found = read_stored(stored_npz(tmp_path, label=far), tmp_path / "index")
    assert found.labels.tolist() == known.labels.tolist()
    assert found.names[3] == "class-99999999995/sample-3"
    names = np.repeat(["Greek", "Latin"], 10)
    found = read_stored(stored_npz(tmp_path, alphabet=names), tmp_path / "index")
    assert found.groups.tolist() == np.repeat([0, 1], 10).tolist()


def test_single_pictures_of_everybody_are_refused(tmp_path):
    path = stored_npz(tmp_path, label=np.arange(60), split=None)
    with pytest.raises(DataError, match="that is tested has two pictures"):
        stored_world(read_stored(path, tmp_path / "index"), SIZE, seed=0)


def test_pictures_that_cannot_be_decoded_are_counted(tmp_path):
    for name in ("ann", "bob"):
        (tmp_path / "faces" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (40, 40)).save(tmp_path / "faces" / name / f"{number}.png")
    (tmp_path / "faces" / "ann" / "1.png").write_bytes(b"junk")
    stored = read_stored(tmp_path / "faces", tmp_path / "data.qmindex")
    assert len(stored.labels) == 5
    assert stored.note.startswith("1 of 6 images in ")
    for path in (tmp_path / "faces").rglob("*.png"):
        Image.new("I;16", (40, 40)).save(path)
    with pytest.raises(DataError, match=r"none can be decoded, the first because .* 8 bits per"):
        read_stored(tmp_path / "faces", tmp_path / "other.qmindex")


def test_too_few_identities_are_refused(tmp_path):
    path = stored_npz(tmp_path, split=np.ones(60, np.int8))
    with pytest.raises(DataError, match="0 identities to train and 20 to test"):
        stored_world(read_stored(path, tmp_path / "index"), SIZE, seed=0)


def test_a_path_that_is_nothing_is_refused(tmp_path):
    with pytest.raises((DataError, OSError)):
        read_stored(tmp_path / "missing", tmp_path / "index")


def test_strokes_of_the_test_are_not_those_of_the_training():
    world = stroke_world(SIZE, seed=3)
    assert world.train is None  # what the recipe says, which is the split "train"
    assert world.test.split == "test"
    assert "synthetic" in world.name


def test_drawings_check_themselves():
    blank = np.zeros((2, 32, 32), np.uint8)
    with pytest.raises(ShapeError, match="1 names"):
        Drawings(blank, np.arange(2), ("a",), "here")
    with pytest.raises(ShapeError, match="float32"):
        Drawings(blank.astype(np.float32), np.arange(2), ("a", "b"), "here")
    drawings = Drawings(blank, np.arange(2), ("a", "b"), "here", shift=1)
    assert drawings.read(1, seed=3)[0].shape == (1, 32, 32)
    assert drawings.source(1) == "here, sample 1"
    with pytest.raises(IndexError):
        drawings.read(2, seed=0)
