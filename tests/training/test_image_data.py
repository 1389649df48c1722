"""Images in a recipe: opened by their path, augmented by its options, trained on."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qmargin.data.samples import read_sample
from qmargin.errors import ConfigError, DataError
from qmargin.recipes import get_recipe
from qmargin.training.build import build_dataset
from qmargin.training.loop import train
from qmargin.training.parts import DataPart
from qmargin.training.process import Process
from qmargin.training.recipe import ModelPart, Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.session import build_session
from qmargin.training.step import take_step

NUM_CLASSES, PER_CLASS = 5, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Identities that are colours, one folder each."""
    draw = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        (tmp_path / "faces" / f"person-{label}").mkdir(parents=True)
        base = draw.integers(30, 220, size=3)
        for number in range(PER_CLASS):
            noise = draw.integers(-20, 20, size=(112, 112, 3))
            pixels = np.clip(base + noise, 0, 255).astype(np.uint8)
            pixels[:, :40] //= 2  # so that a mirror image is another image
            name = tmp_path / "faces" / f"person-{label}" / f"{number}.png"
            Image.fromarray(pixels).save(name)
    return tmp_path / "faces"


def recipe_of(folder: Path, *settings: str, **options: Any) -> Recipe:
    recipe = get_recipe("faces_r18_q_margin")
    data = DataPart("images", 4, path=str(folder), options=options)
    return apply_settings(replace(recipe, data=data), settings)


def test_images_are_what_the_networks_take(folder: Path) -> None:
    data = build_dataset(recipe_of(folder, flip=0.0))
    assert (len(data), data.num_classes) == (NUM_CLASSES * PER_CLASS, NUM_CLASSES)
    inputs, label = data.read(5, seed=0)
    assert (inputs.shape, inputs.dtype, label) == ((3, 112, 112), np.uint8, 1)
    with Image.open(folder / data.sample_id(5)) as image:
        assert np.array_equal(inputs.transpose(1, 2, 0), np.asarray(image))


@pytest.mark.parametrize("channels_last", [True, False])
def test_networks_take_floats_of_the_bytes(folder: Path, channels_last: bool) -> None:
    """Workers send bytes; the step scales them on its device, in the layout of the network."""
    seen: list[torch.Tensor] = []
    recipe = recipe_of(
        folder, f"precision.channels_last={str(channels_last).lower()}", flip=0.0, size=32
    )
    recipe = replace(recipe, model=ModelPart("small_conv", 8))
    session = build_session(recipe, Process())
    session.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with session.stream() as batches:
        take_step(session, batches)
    (inputs,) = seen
    indices = session.order.batch(0)
    pixels = np.stack([session.dataset.read(int(index), 0)[0] for index in indices])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert inputs.is_contiguous(memory_format=layout)
    torch.testing.assert_close(inputs, torch.from_numpy(pixels) / 127.5 - 1.0)


def test_options_reach_the_augmentation_and_the_reader(folder: Path) -> None:
    plain = build_dataset(recipe_of(folder, flip=0.0))
    mirrored = build_dataset(recipe_of(folder, flip=1.0))
    assert np.array_equal(mirrored.read(0, 1)[0], plain.read(0, 1)[0][:, :, ::-1])
    swapped = build_dataset(recipe_of(folder, flip=0.0, channels="bgr"))
    assert np.array_equal(swapped.read(0, 1)[0], plain.read(0, 1)[0][::-1])
    small = build_dataset(recipe_of(folder, size=32))
    assert tuple(small.read(0, 1)[0].shape) == (3, 32, 32)
    coarse = build_dataset(recipe_of(folder, flip=0.0, low_resolution=1.0, photometric=1.0))
    assert not np.array_equal(coarse.read(0, 1)[0], plain.read(0, 1)[0])
    assert np.array_equal(coarse.read(0, 1)[0], coarse.read(0, 1)[0])  # of the seed alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flipp": 0.5}, "an option of images data is 'flipp', did you mean 'flip'"),
        ({"flip": 2.0}, r"flip is 2.0; give a number in \[0, 1\]"),
        ({"verify": 1}, r"data.options.verify is 1; give true or false"),
        ({"decoder": "cv2"}, "decoder is 'cv2'"),
        ({"size": 0.5}, r"data.options.size is 0.5; give a whole number"),
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_dataset(recipe_of(folder, **options))


def test_a_path_without_images_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path is '.*nowhere'.*--set data.path=DIR"):
        build_dataset(recipe_of(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        build_dataset(recipe_of(tmp_path / "empty"))


def test_a_recipe_for_other_identities_is_refused(folder: Path) -> None:
    recipe = replace(
        recipe_of(folder, "data.num_classes=7", size=32), model=ModelPart("small_conv", 8)
    )
    with pytest.raises(ConfigError, match=r"num_classes is 7 and the data has 5"):
        build_session(recipe, Process())


@pytest.mark.parametrize("backbone", ["small_conv", "mobilefacenet"])
def test_a_folder_of_photos_is_trained_on(folder: Path, tmp_path: Path, backbone: str) -> None:
    settings = ("run.max_steps=3", "run.log_every=1", "precision.channels_last=true")
    recipe = recipe_of(folder, *settings, photometric=0.5, low_resolution=0.5)
    recipe = replace(recipe, model=ModelPart(backbone, embedding_dim=16))
    outcome = train(recipe, tmp_path / "run", device="cpu")
    assert outcome.step == 3
    assert math.isfinite(outcome.loss)
    assert outcome.num_skipped == 0


def test_a_damaged_photo_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(folder)
    data = build_dataset(recipe)
    name = folder / data.sample_id(0)
    name.write_bytes(name.read_bytes()[:500])
    with caplog.at_level(logging.WARNING):
        sample = read_sample(build_dataset(recipe), 0, seed=0, epoch=0)
    assert sample.index != 0
    assert sample.replaced[0].index == 0
