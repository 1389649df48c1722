"""Data of experiments: identities are disjoint, read without augmentation, refused in words."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.pictures import jpeg, shared_data, write_folder, write_manifest
from helpers.recordings import speaker_folders
from qmargin.data.drawings import Drawings, variants_of
from qmargin.data.strokes import StrokeIdentities
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import ConfigError, DataError
from qmargin.experiments.named import Size, drawn_recipe, get_experiment
from qmargin.experiments.pictures import StoredPictures, read_pictures
from qmargin.experiments.worlds import (
    SHIFT,
    Drawn,
    Made,
    SomeIdentities,
    Stored,
    draw_to,
    held_out,
    names_in,
    part_of,
    plain_recipe,
    stored_in,
)
from qmargin.recipes import get_recipe
from qmargin.training.build import build_dataset
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.signals import SIGNALS, Interrupted, StopRequest

SIZE = Size(num_classes=12, samples_per_class=8, epochs=2, batch_size=8, width=4, depth=0)
RECIPE = drawn_recipe(SIZE)


def names_of(dataset: Drawings) -> set[str]:
    return {dataset.sample_id(row).split("/")[0] for row in range(len(dataset))}


def small_faces() -> Recipe:
    return apply_settings(get_recipe("faces_r18_arcface"), ["data.options.size=16"])


def stored_npz(folder: Path, **changes: object) -> str:
    draws = np.random.default_rng(0)
    arrays = {
        "images": draws.integers(0, 255, (60, 32, 32), dtype=np.uint8),
        "label": np.repeat(np.arange(20), 3),
        "split": np.repeat(np.arange(20) >= 12, 3).astype(np.int8),
    }
    arrays.update(changes)  # type: ignore[arg-type]
    path = folder / "drawn.npz"
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


# -- made -----------------------------------------------------------------------------------------


def test_synthetic_identities_are_other_ones_without_augmentation() -> None:
    recipe, seeds = get_recipe("debug"), set()
    for is_search in (True, False):
        other = Made().measured(recipe, is_search=is_search)
        assert isinstance(other, SyntheticIdentities) and other.augmentation == 0.0
        assert torch.equal(other.read(3, seed=1)[0], other.read(3, seed=2)[0])
        seeds.add(other.seed)
    train = build_dataset(recipe)
    assert isinstance(train, SyntheticIdentities) and len(seeds | {train.seed}) == 3


def test_strokes_are_drawn_once_and_measured_in_other_splits(tmp_path: Path) -> None:
    world, request = Made(5, 2, 6, 3), StopRequest()
    recipe = replace(RECIPE, seed=5)
    assert world.train(recipe, is_search=False) is None
    drawn = world.prepare(tmp_path, [recipe, RECIPE], is_search=False, request=request)
    assert len(list(tmp_path.glob("strokeidentities-*.npy"))) == 4  # to train and to test
    train = drawn.train(recipe, is_search=False)
    assert isinstance(train, StrokeIdentities)
    expected = StrokeIdentities(12, 8, seed=5, shift=SHIFT)
    for row in (0, 95):
        assert torch.equal(train.read(row, seed=3)[0], expected.read(row, seed=3)[0])
    for is_search, split, count in ((True, "validation", 10), (False, "test", 18)):
        other = drawn.measured(recipe, is_search=is_search)
        assert isinstance(other, StrokeIdentities) and len(other) == count
        assert (other.split, other.shift, other.seed) == (split, 0, 5)


def test_identities_of_the_data_are_drawn_once_for_all_seeds(tmp_path: Path) -> None:
    data = replace(RECIPE.data, options={**RECIPE.data.options, "seed": 7})
    recipes = [replace(RECIPE, data=data, seed=seed) for seed in range(3)]
    drawn = Made(5, 2, 6, 3).prepare(tmp_path, recipes, is_search=False, request=StopRequest())
    assert len(list(tmp_path.iterdir())) == 2
    tested = [drawn.measured(recipe, is_search=False) for recipe in recipes]
    assert all(isinstance(one, StrokeIdentities) and one.seed == 7 for one in tested)
    plain = Made(5, 2, 6, 3).measured(recipes[0], is_search=False)
    rows = np.arange(18)
    for one in tested:
        read = one.read_many(rows, [0] * 18)[0]
        assert np.array_equal(read, plain.read_many(rows, [0] * 18)[0])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_pictures_are_drawn_leaves_none(tmp_path: Path, number: int) -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), number)
        blocks = [partial(np.zeros, (1, 2, 2), np.uint8)] * 2
        with pytest.raises(Interrupted):
            draw_to(tmp_path / "drawn.npy", (2, 2, 2), blocks, request=request)
    assert not list(tmp_path.iterdir())


# -- small grey pictures --------------------------------------------------------------------------


def test_a_split_of_the_data_is_kept(tmp_path: Path) -> None:
    world = Drawn(stored_npz(tmp_path), budget=36 * 5, most_test=12).opened()
    recipe = world.adapt(RECIPE, is_search=False)
    assert recipe.run.epochs == 5 and recipe.data.num_classes is None
    train = world.train(recipe, is_search=False)
    test = world.measured(recipe, is_search=False)
    assert isinstance(train, Drawings) and train.shift == SHIFT
    assert names_of(train) == {f"class-{label}" for label in range(12)}
    assert names_of(test) < {f"class-{label}" for label in range(12, 20)}
    assert len(test) == 12 and test.labels.tolist() == np.repeat(np.arange(4), 3).tolist()
    stored = read_pictures(Path(world.path))
    row = stored.names.index(test.sample_id(5))
    assert np.array_equal(test.images(np.array([5]))[0], stored.pictures[row])


def test_look_alikes_are_left_out_of_what_is_measured_alone(tmp_path: Path) -> None:
    world = Drawn(stored_npz(tmp_path)).opened()
    clear = replace(world, distinct=0.5)
    for is_search in (True, False):
        every = world.measured(RECIPE, is_search=is_search)
        some = clear.measured(RECIPE, is_search=is_search)
        kept = every.distinct(0.5)
        assert some.num_classes == len(kept)
        rows = np.isin(every.labels, kept)
        assert np.array_equal(some.pictures, every.pictures[rows])
        train = [one.train(RECIPE, is_search=is_search) for one in (world, clear)]
        assert len(train[0]) == len(train[1])
    assert clear.record["distinct"] == 0.5


def test_without_a_split_identities_are_divided_by_the_seed(tmp_path: Path) -> None:
    world = Drawn(stored_npz(tmp_path, split=None)).opened()
    halves = []
    for seed in (0, 1):
        recipe = replace(RECIPE, seed=seed)
        train = world.train(recipe, is_search=False)
        assert isinstance(train, Drawings)
        trained, tested = names_of(train), names_of(world.measured(recipe, is_search=False))
        assert not trained & tested and (len(trained), len(tested)) == (12, 8)
        halves.append(trained)
    assert halves[0] != halves[1] and world.differs(RECIPE)
    assert not replace(world, seed=3).differs(RECIPE)


def test_a_search_holds_out_training_identities(tmp_path: Path) -> None:
    world = Drawn(stored_npz(tmp_path), seed=0, turns=True).opened()
    parts = [world._parts(0, is_search=is_search) for is_search in (True, False)]
    classes = [(train.num_classes, test.num_classes) for train, test in parts]
    assert classes == [(4 * 10, 2), (4 * 12, 8)]
    seen = [{picture.tobytes() for picture in part.pictures} for pair in parts for part in pair]
    assert not seen[0] & seen[1] and not seen[2] & seen[3] and seen[1] <= seen[2]


def test_whole_alphabets_are_held_out(tmp_path: Path) -> None:
    labels, groups = np.repeat(np.arange(30), 2), np.arange(30) // 3
    images = StrokeIdentities(30, 2).images(np.arange(60))
    changes = {"images": images, "label": labels, "split": labels >= 24}
    path = stored_npz(tmp_path, **changes, alphabet=groups.astype(np.uint8))
    train, measured = Drawn(path, seed=1).opened()._parts(0, is_search=True)
    assert (train.num_classes, measured.num_classes) == (18, 6)  # at least a fifth of 24
    kept, held = held_out(range(24), groups, 0.2)
    assert sorted(kept + held) == list(range(24))
    assert not {int(groups[label]) for label in kept} & {int(groups[label]) for label in held}
    with pytest.raises(DataError, match="24 training identities"):
        held_out(range(24), np.zeros(24, np.int64), 0.2)
    folders = tmp_path / "folders"
    for label in range(30):
        part = "test" if label >= 24 else "train"
        folder = folders / part / f"Alphabet_{groups[label]}-character{label:02d}"
        folder.mkdir(parents=True)
        for row in np.flatnonzero(labels == label):
            Image.fromarray(images[row]).save(folder / f"{row}.png")
    found = read_pictures(folders).groups
    assert found is not None and found.tolist() == groups.tolist()
    (folders / "test" / "Alphabet_9-character29").rename(folders / "test" / "someone")
    assert read_pictures(folders).groups is None


def test_variants_are_drawn_once_and_shared(tmp_path: Path) -> None:
    world = Drawn(stored_npz(tmp_path), warp=1.0, num_variants=2, turns=True).opened()
    recipe, request = world.adapt(RECIPE, is_search=False), StopRequest()
    made = world.prepare(tmp_path / "data", [recipe], is_search=False, request=request)
    (drawn,) = (tmp_path / "data").glob("*.npy")
    written = drawn.stat().st_mtime_ns
    made.prepare(tmp_path / "data", [recipe], is_search=False, request=request)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "data").glob("*.npy")] == [written]
    train = made.train(recipe, is_search=False)
    assert isinstance(train, Drawings) and isinstance(train.variants, np.memmap)
    assert np.array_equal(train.variants, variants_of(train.pictures, 1.0, 2))
    with pytest.raises(DataError, match="has 144 pictures to train on"):
        big = replace(recipe, data=replace(recipe.data, batch_size=500))
        world.prepare(tmp_path / "data", [big], is_search=False, request=request)


def test_first_samples_of_each_identity() -> None:
    labels = np.array([2, 0, 0, 1, 0, 2, 3])
    pictures = np.arange(7, dtype=np.uint8)[:, None, None]
    stored = StoredPictures(pictures, labels, tuple("abcdefg"), "x", is_ink=True)
    kept = part_of(stored, [2, 0, 1], None, 2)
    assert kept.names == ("a", "f", "b", "c", "d") and kept.labels.tolist() == [0, 0, 1, 1, 2]
    assert kept.pictures.ravel().tolist() == [0, 5, 1, 2, 3]
    assert part_of(stored, [3, 0, 1], 4).names == ("g", "b", "c", "e")


def test_image_folders_are_read_in_grey_and_corrupt_ones_counted(tmp_path: Path) -> None:
    folder = tmp_path / "faces"
    for name, value in (("ann", 40), ("bob", 90), ("cat", 140), ("dan", 100)):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (50, 40), (value, value, value)).save(folder / name / f"{number}.png")
    stored = read_pictures(folder)
    assert stored.pictures[:, 5, 5].tolist() == [40, 40, 90, 90, 140, 140, 100, 100]
    assert not stored.is_ink and not any("ann" in name for name in stored.names)
    assert sorted(path.name for path in tmp_path.rglob("*.qmindex")) == []
    (folder / "ann" / "1.png").write_bytes(b"junk")
    stored = read_pictures(folder)
    assert len(stored.labels) == 7 and stored.note.startswith("1 of 8 images in ")
    for path in folder.rglob("*.png"):
        Image.new("I;16", (40, 40)).save(path)
    with pytest.raises(DataError, match="8 of 8 images"):
        read_pictures(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": np.repeat(np.arange(20), 2)}, "40 labels"),
        ({"images": None, "packed4": np.zeros((60, 100), np.uint8)}, "packed4 of uint8"),
        ({"label": np.array("a")}, "label of <U1"),
        ({"label": np.zeros((60, 1), int)}, r"shape \[60, 1\]"),
        ({"label": np.repeat(np.arange(20.0), 3)}, "label of float64"),
        ({"split": np.zeros(59, int)}, "split of 59 numbers for 60 pictures"),
        ({"split": np.full(60, 2)}, "2 among them"),
        ({"split": np.arange(60) % 2}, "20 identities in both splits"),
        ({"alphabet": np.zeros(20)}, "alphabet of float64"),
        ({"alphabet": np.zeros(5, int)}, r"shape \[5\], and labels from 0 to 19"),
        ({"label": None, "labels": np.zeros(60, int)}, "needs label"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_pictures(Path(stored_npz(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": np.arange(60), "split": None}, "has 2 pictures"),
        ({"split": np.ones(60, np.int8)}, "0 identities to train and 20 to test"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    world = Drawn(stored_npz(tmp_path, **changes), budget=100).opened()
    with pytest.raises(DataError, match=words):
        world.adapt(RECIPE, is_search=False)


def test_omniglot_has_the_classes_that_its_experiment_says() -> None:
    experiment = get_experiment("omniglot", data=shared_data("omniglot32"))
    train, test = experiment.world._parts(0, is_search=False)
    assert train.num_classes == experiment.recipe.data.num_classes == 6368
    assert test.num_classes == 609 and len(test) == 6090  # without 50 of 659 that look alike
    every = replace(experiment.world, distinct=None)._parts(0, is_search=False)[1]
    assert every.num_classes == 659


# -- pictures and recordings of the readers -------------------------------------------------------


def test_stored_pictures_are_held_out_by_identity(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("test", 4)):
        labels = [n for n in range(count) for _ in range(3)]
        images = [jpeg(number) for number in range(len(labels))]
        write_folder(tmp_path / part, images, [n + 100 * (part == "test") for n in labels])
    world = Stored(str(tmp_path / "train"), str(tmp_path / "test"), 0.25).opened()
    recipe = world.adapt(small_faces(), is_search=True)
    train = world.train(recipe, is_search=True)
    validation = world.measured(recipe, is_search=True)
    assert train is not None and (len(train), train.num_classes) == (18, 6)
    assert (len(validation), validation.num_classes) == (6, 2)
    assert not {train.sample_id(row) for row in range(18)} & {
        validation.sample_id(row) for row in range(6)
    }
    for dataset in (train, validation):
        assert dataset.labels is not None
        read = [dataset.read(row, seed=0)[1] for row in range(len(dataset))]
        assert read == dataset.labels.tolist() and set(read) == set(range(dataset.num_classes))
    assert world.train(recipe, is_search=False) is None
    assert len(world.measured(recipe, is_search=False)) == 12
    assert world.check(recipe) == ""
    both = replace(world, test_path=world.train_path)
    with pytest.raises(DataError, match=r"8 identities are in .* such as 'person0'"):
        both.check(recipe)


def test_identities_without_names_are_not_compared(tmp_path: Path) -> None:
    paths = [write_manifest(tmp_path / p, [jpeg(n) for n in range(4)], [0, 0, 1, 1]) for p in "ab"]
    world = Stored(str(paths[0]), str(paths[1])).opened()
    recipe = world.adapt(small_faces(), is_search=False)
    assert "not checked" in world.check(recipe)
    with pytest.raises(DataError, match="2 identities are in"):
        replace(world, test_path=world.train_path).check(recipe)


def test_speeds_of_recordings_stay_classes_of_their_own(tmp_path: Path) -> None:
    speaker_folders(tmp_path, speakers=5, each=2)
    recipe = get_recipe("audiomnist_r34_arcface")
    recipe = replace(recipe, data=replace(recipe.data, path=str(tmp_path), options={}))
    dataset = build_dataset(recipe)  # at three speeds
    names = names_in(stored_in(dataset))
    some = SomeIdentities(dataset, [3, 1])
    assert len(names) == 5 and dataset.labels is None and some.labels is None
    assert (len(some), some.num_classes) == (4, 6)
    for row in range(len(some)):
        for seed in range(8):
            inputs, label = some.read(row, seed)
            turn, identity = divmod(label, 2)
            expected, old = dataset.read(int(some._rows[row]), seed)
            assert torch.equal(inputs, expected)  # type: ignore[arg-type]
            assert old == turn * 5 + [3, 1][identity]


def test_validation_data_may_have_a_place_of_their_own() -> None:
    recipe = get_recipe("faces_r18_q_margin")
    with pytest.raises(ConfigError, match="and training both use"):
        Stored(validation=("data.path=data/faces",)).measured(recipe, is_search=True)
    with pytest.raises(ConfigError, match=r"'loss\.margin=0\.1'"):
        Stored(validation=("loss.margin=0.1",))
    with pytest.raises(ConfigError, match="validation is 1"):
        Stored(validation=1.0)
    part = plain_recipe(recipe, ["data.path=data/other"]).data
    assert part.path == "data/other" and part.options == {"flip": 0.0}
    speech = plain_recipe(get_recipe("speakers_r34_q_margin_a150"), ["data.options.split=dev"])
    assert speech.data.options["augment"] == 0.0 and speech.data.options["split"] == "dev"


def test_worlds_refuse_recipes_of_other_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.kind is 'images'"):
        Made().adapt(small_faces(), is_search=False)
    with pytest.raises(ConfigError, match="generates its data"):
        Stored(str(tmp_path), str(tmp_path)).adapt(get_recipe("debug"), is_search=False)
    with pytest.raises(DataError, match=r"data\.test is .*missing"):
        Stored(str(tmp_path), str(tmp_path / "missing")).opened()
    few = write_folder(tmp_path / "few", [jpeg(n) for n in range(3)], [0, 1, 2])
    recipe = apply_settings(small_faces(), [f"data.path={few}"])
    with pytest.raises(DataError, match="has 3 identities"):
        Stored(str(few), None, 0.9).train(recipe, is_search=True)
