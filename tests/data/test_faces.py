"""Faces for training: bytes, seeded per sample, and through the loader unchanged."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.pictures import jpeg, picture, write_records
from qmargin.data import open_dataset
from qmargin.data.faces import FaceAugmentation, FaceImages
from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.samples import check_labels
from qmargin.errors import ConfigError

OFF = FaceAugmentation(flip=0.0)


@pytest.fixture
def faces(tmp_path: Path) -> FaceImages:
    images = [jpeg(seed, 32) for seed in range(12)]
    return FaceImages(
        open_dataset(write_records(tmp_path / "a.rec", images, [0, 1, 2] * 4)), size=32
    )


def test_inputs_are_the_pixels_with_the_channels_first(faces: FaceImages) -> None:
    plain = FaceImages(faces.images, size=32, augmentation=OFF)
    inputs, label = plain.read(4, seed=0)
    pixels, _ = faces.images[4]
    assert inputs.dtype == np.uint8
    assert np.array_equal(inputs, pixels.transpose(2, 0, 1))
    assert label == 1


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_half_of_the_seeds_mirror(faces: FaceImages, decoder: str) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg")
    images = open_dataset(faces.images.index.path, decoder=decoder)
    plain, _ = FaceImages(images, size=32, augmentation=OFF).read(0, seed=0)
    mirrored = 0
    for seed in range(400):
        inputs, _ = FaceImages(images, size=32).read(0, seed)
        is_mirrored = np.array_equal(inputs, plain[:, :, ::-1])
        assert is_mirrored or np.array_equal(inputs, plain)
        mirrored += is_mirrored
    assert 160 < mirrored < 240


EVERYTHING = FaceAugmentation(flip=0.5, photometric=1.0, low_resolution=1.0, crop=1.0)


@pytest.mark.parametrize("change", ["photometric", "low_resolution", "crop"])
def test_each_change_follows_the_seed_and_nothing_else(change: str) -> None:
    augmentation = FaceAugmentation(flip=0.0, **{change: 1.0})
    pixels = picture(0, 64)
    results = [augmentation(pixels, seed) for seed in range(20)]
    assert all(np.array_equal(augmentation(pixels, seed), results[seed]) for seed in range(20))
    assert len({result.tobytes() for result in results}) > 15
    assert all(result.shape == pixels.shape and result.dtype == np.uint8 for result in results)
    assert np.array_equal(pixels, picture(0, 64))  # the input is left alone


def test_a_crop_blanks_the_rest() -> None:
    white = np.full((64, 64, 3), 255, dtype=np.uint8)
    shares = [FaceAugmentation(flip=0, crop=1.0)(white, seed).mean() / 255 for seed in range(200)]
    assert 0.15 < min(shares) < 0.3
    assert max(shares) > 0.85


def test_low_resolution_loses_detail() -> None:
    checks = np.kron([[0, 255] * 8, [255, 0] * 8] * 8, np.ones((4, 4)))
    pixels = np.repeat(checks[..., None], 3, axis=2).astype(np.uint8)
    coarse = FaceAugmentation(flip=0, low_resolution=1.0, smallest=0.05)
    assert min(coarse(pixels, seed).std() for seed in range(30)) < 0.2 * pixels.std()


@pytest.mark.parametrize(
    "options",
    [{"flip": 1.5}, {"flip": -0.1}, {"crop": float("nan")}, {"smallest": 0}, {"flip": True}],
)
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        FaceAugmentation(**options)


def test_workers_do_not_change_what_is_read(faces: FaceImages) -> None:
    everything = FaceImages(faces.images, size=32, augmentation=EVERYTHING)
    check_labels(everything)
    order = GlobalOrder(12, seed=3, batch_size=5)
    runs = []
    for num_workers in (0, 2):
        with build_loader(everything, order, stop_step=4, num_workers=num_workers) as stream:
            runs.append([(batch.inputs, batch.labels, batch.ids) for batch in stream])
    for (a, a_labels, a_ids), (b, b_labels, b_ids) in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a_labels, b_labels)
        assert a_ids == b_ids


def test_a_corrupt_image_is_replaced_and_counted(tmp_path: Path) -> None:
    images = [jpeg(seed) for seed in range(6)]
    images[2] = b"<html>"
    faces = FaceImages(open_dataset(write_records(tmp_path / "a.rec", images, [0] * 6)), size=16)
    with build_loader(faces, GlobalOrder(6, seed=0, batch_size=6), stop_step=1) as stream:
        (batch,) = list(stream)
    assert batch.inputs.shape == (6, 3, 16, 16)
    assert [(item.sample_id, item.reason) for item in batch.replaced] == [
        ("record 2", "a web page or other markup, not an image")
    ]
