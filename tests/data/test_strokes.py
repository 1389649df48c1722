"""Stroke identities: drawn from numbers alone, alone or among others, in worlds that never meet."""

import time

import numpy as np
import pytest
import torch

from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.samples import check_labels
from qmargin.data.strokes import (
    NUM_CONTROLS,
    NUM_STEPS,
    StrokeIdentities,
    along,
    inked,
    joined_keys,
    normals,
    uniforms,
)
from qmargin.data.synthetic import SPLITS
from qmargin.errors import ConfigError
from qmargin.training.build import build_dataset
from qmargin.training.recipe import DataPart, LossPart, ModelPart, OptimizerPart, Recipe, RunPart


def test_a_picture_is_the_same_alone_and_among_thousands():
    dataset = StrokeIdentities(2_000_000, 10, seed=3)
    indices = np.random.default_rng(0).integers(0, len(dataset), 1100)
    together = dataset.images(indices)
    for place in (0, 1, 511, 512, 1099):
        assert np.array_equal(dataset.images(indices[place : place + 1])[0], together[place])
    assert np.array_equal(dataset.images(indices[::-1]), together[::-1])


def test_samples_of_an_identity_are_alike_and_identities_are_not():
    dataset = StrokeIdentities(100, 2, seed=1)
    pictures = dataset.images(np.arange(200)).astype(float).reshape(200, 16, 2, 16, 2)
    coarse = pictures.mean(axis=(2, 4)).reshape(100, 2, -1)
    coarse -= coarse.mean(axis=(0, 1))
    coarse /= np.linalg.norm(coarse, axis=2, keepdims=True)
    scores = coarse[:, 0] @ coarse[:, 1].T
    own, others = np.diag(scores).mean(), scores[~np.eye(100, dtype=bool)].mean()
    assert own > 0.35  # pixels alone tell something,
    assert others < 0.05
    assert (scores.argmax(axis=1) == np.arange(100)).mean() < 0.98  # and not everything


def test_hands_differ_by_the_difficulty():
    """A printing press makes equal samples; a wilder hand makes less alike ones."""
    press = StrokeIdentities(5, 4, difficulty=0.0).images(np.arange(20)).reshape(5, 4, -1)
    assert (press == press[:, :1]).all()
    assert not (press[0, 0] == press[1, 0]).all()

    def spread(difficulty: float) -> float:
        made = StrokeIdentities(40, 4, difficulty=difficulty).images(np.arange(160))
        return float(made.reshape(40, 4, -1).astype(float).std(axis=1).mean())

    assert spread(0.5) < spread(1.0) < spread(1.5)


def test_worlds_and_splits_share_no_identity():
    """The first identities of every split and of another seed, printed by a press, all differ."""
    options = {"samples_per_class": 1, "difficulty": 0.0}
    sets = [StrokeIdentities(300, split=split, **options) for split in SPLITS]
    sets.append(StrokeIdentities(300, seed=1, **options))
    drawn = np.concatenate([made.images(np.arange(300)) for made in sets])
    assert len(np.unique(drawn.reshape(len(drawn), -1), axis=0)) == 1200


def test_reading_gives_floats_and_moves_by_the_seed_alone():
    dataset = StrokeIdentities(10, 3, shift=2)
    image, label = dataset.read(17, seed=5)
    assert image.dtype == torch.float32
    assert image.shape == (1, 32, 32)
    assert label == 5
    assert image.min() >= 0.0
    assert image.max() <= 1.0
    assert torch.equal(image, dataset.read(17, seed=5)[0])
    readings = {dataset.read(17, seed=seed)[0].numpy().tobytes() for seed in range(200)}
    assert len(readings) == 25  # five places each way
    still = StrokeIdentities(10, 3)
    plain = torch.from_numpy(still.images(np.array([17]))[0]).float() / 255
    torch.testing.assert_close(still.read(17, seed=5)[0][0], plain, rtol=0, atol=1e-6)
    assert torch.equal(still.read(17, seed=5)[0], still.read(17, seed=6)[0])


def test_kept_samples_are_the_drawn_ones():
    kept, drawn = (StrokeIdentities(6, 3, shift=1, in_memory=value) for value in (True, False))
    for index in (0, 7, 17):
        assert torch.equal(kept.read(index, seed=9)[0], drawn.read(index, seed=9)[0])


@pytest.mark.parametrize("size", [16, 48])
def test_other_sizes_show_the_same_drawing(size):
    small = StrokeIdentities(1, 1, size=size, difficulty=0.0).images(np.array([0]))[0] / 255
    usual = StrokeIdentities(1, 1, difficulty=0.0).images(np.array([0]))[0] / 255
    places = np.minimum(((np.arange(size) + 0.5) * 32 / size).astype(int), 31)
    sampled = usual[np.ix_(places, places)]
    assert np.corrcoef(small.ravel(), sampled.ravel())[0, 1] > 0.7


def test_millions_cost_nothing_before_they_are_read():
    began = time.process_time()
    dataset = StrokeIdentities(1 << 40, 1 << 20)
    image, label = dataset.read(len(dataset) - 1, seed=0)
    assert time.process_time() - began < 0.5
    assert label == (1 << 40) - 1
    assert image.any()


def test_the_loader_and_recipes_take_them():
    recipe = Recipe(
        name="strokes",
        data=DataPart("strokes", batch_size=8, num_classes=6, options={"samples_per_class": 4}),
        model=ModelPart("stroke_net", embedding_dim=16),
        loss=LossPart.from_preset("cosface"),
        optimizer=OptimizerPart(lr=0.1),
        run=RunPart(epochs=1),
        seed=7,
    )
    dataset = build_dataset(recipe)
    assert dataset == StrokeIdentities(6, 4, seed=7)
    check_labels(dataset)
    with build_loader(dataset, GlobalOrder(24, seed=0, batch_size=8), stop_step=1) as stream:
        assert next(stream).inputs.shape == (8, 1, 32, 32)
    with pytest.raises(ConfigError, match=r"data\.options\.splits.*'split'"):
        wrong = DataPart("strokes", 8, num_classes=6, options={"splits": "test"})
        build_dataset(Recipe(**{**vars(recipe), "data": wrong}))
    with pytest.raises(ConfigError, match="strokes data has none"):
        DataPart("strokes", 8, path="somewhere", num_classes=6)
    with pytest.raises(ConfigError, match="num_classes is missing"):
        DataPart("strokes", 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_classes": 0}, "num_classes is 0"),
        ({"samples_per_class": 0}, "samples_per_class is 0"),
        ({"num_classes": (1 << 40) + 1}, "1099511627776"),
        ({"size": 4}, "size is 4"),
        ({"split": "dev"}, "split is 'dev'; give one of train, validation, test"),
        ({"difficulty": float("nan")}, "difficulty is nan"),
        ({"difficulty": -1.0}, "difficulty is -1.0"),
        ({"shift": 32}, "shift is 32, not below the size 32"),
    ],
)
def test_impossible_settings_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        StrokeIdentities(**{"num_classes": 3, "samples_per_class": 2, **options})


def test_samples_out_of_range_are_refused():
    dataset = StrokeIdentities(3, 2)
    for index in (-1, 6):
        with pytest.raises(IndexError):
            dataset.read(index, seed=0)
        with pytest.raises(IndexError):
            dataset.images(np.array([0, index]))
    assert dataset.images(np.arange(0)).shape == (0, 32, 32)


def test_a_stroke_passes_through_its_control_points():
    controls = np.random.default_rng(0).normal(size=(3, NUM_CONTROLS, 2)).astype(np.float32)
    points = along(controls)
    assert (NUM_STEPS - 1) % (NUM_CONTROLS - 1) == 0
    every = (NUM_STEPS - 1) // (NUM_CONTROLS - 1)
    np.testing.assert_allclose(points[:, ::every], controls, atol=1e-5)


def test_ink_is_where_the_pen_touched():
    points = np.array([[[-1.0 + 2 * 5.5 / 32, -1.0 + 2 * 20.5 / 32]]], dtype=np.float32)
    ones = np.ones((1, 1), dtype=np.float32)
    (picture,) = inked(points, np.array([0.8], dtype=np.float32), ones, size=32)
    assert np.unravel_index(picture.argmax(), picture.shape) == (20, 5)
    assert picture[20, 5] == pytest.approx(1 - np.exp(-1.0), rel=1e-5)
    assert not inked(points, np.array([0.8], dtype=np.float32), 0 * ones, size=32).any()


def test_draws_are_uniform_and_normal_and_do_not_repeat():
    keys = joined_keys(np.full(1000, 5, dtype=np.uint64), np.arange(1000))
    flat = uniforms(keys, 50)
    assert flat.min() >= 0.0 and flat.max() < 1.0
    assert abs(flat.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(flat[:, 0], flat[:, 1])[0, 1]) < 0.1
    assert len(np.unique(flat[:, 0])) > 990
    bell = normals(keys, 50)
    assert abs(bell.mean()) < 0.02
    assert abs(bell.std() - 1.0) < 0.02
    assert np.abs(bell).max() < 3.5


@pytest.mark.parametrize("in_memory", [False, True])
def test_many_samples_are_each_as_read_alone(in_memory):
    dataset = StrokeIdentities(40, 3, shift=2, in_memory=in_memory)
    indices, seeds = np.array([7, 110, 7, 0]), [5, 2**62 + 11, 6, 0]
    images, labels = dataset.read_many(indices, seeds)
    for image, label, index, seed in zip(images, labels, indices.tolist(), seeds, strict=True):
        alone, own = dataset.read(index, seed)
        assert torch.equal(torch.from_numpy(image), alone) and label == own
