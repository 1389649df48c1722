"""``load_model``: embeddings of everything that holds an image, and decisions."""

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from helpers.model_directories import SIZE, make_model, pictures, write_pictures
from helpers.results import synthetic_result
from qmargin.data.detector import EYES_AND_NOSE, Face, why_no_detector
from qmargin.errors import (
    BackendError,
    ConfigError,
    CorruptSample,
    DataError,
    ProtocolError,
    ShapeError,
)
from qmargin.evaluation.model import Model, cosine, load_model
from qmargin.evaluation.model_inputs import InputReader
from qmargin.evaluation.thresholds import AffineMap, thresholds_of, write_thresholds
from qmargin.models.card import ModelCard
from qmargin.models.directory import THRESHOLDS, write_model
from qmargin.models.registry import create_backbone, list_backbones, register_backbone


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model(tmp_path / "m")
    return tmp_path / "m"


def with_thresholds(directory: Path, threshold: float | None, **changes: object) -> Model:
    card = load_model(directory).card
    made = thresholds_of(
        synthetic_result(card=card.to_texts()),
        weights_sha256=card.weights_sha256,
        result_sha256="ab" * 32,
    )
    points = tuple(replace(point, threshold=threshold) for point in made.points)
    write_thresholds(directory / THRESHOLDS, replace(made, points=points, **changes))
    return load_model(directory)


def test_paths_pillow_images_and_arrays_give_the_same(directory: Path, tmp_path: Path) -> None:
    model, images = load_model(directory), pictures(5)
    paths = write_pictures(tmp_path / "faces", images)
    expected = model.embed(images)
    assert expected.shape == (5, 8)
    assert expected.dtype == np.float32
    for inputs in (
        list(images),
        paths,
        [str(path) for path in paths],
        [Image.fromarray(image) for image in images],
    ):
        np.testing.assert_array_equal(model.embed(inputs), expected)
    np.testing.assert_allclose(model.embed(images, batch_size=2), expected, atol=1e-6)


def test_embeddings_are_the_networks_of_normalised_rgb(directory: Path) -> None:
    model, images = load_model(directory), pictures(3)
    inputs = (torch.tensor(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    expected = model.backbone(inputs)
    np.testing.assert_allclose(model.embed(images), expected.numpy(), atol=1e-6)
    flipped = model.backbone(inputs.flip(3))
    found = model.embed(images, flip="sum")
    np.testing.assert_allclose(found, (expected + flipped).numpy(), atol=1e-6)
    np.testing.assert_allclose(found, model.embed(images[:, :, ::-1], flip="sum"), atol=1e-6)


def test_grey_and_transparent_files_become_rgb(directory: Path, tmp_path: Path) -> None:
    grey = Image.fromarray(pictures(1)[0]).convert("L")
    grey.save(tmp_path / "grey.png")
    model = load_model(directory)
    expected = model.embed([grey.convert("RGB")])
    np.testing.assert_array_equal(model.embed([tmp_path / "grey.png"]), expected)
    np.testing.assert_array_equal(model.embed([grey.convert("RGBA")]), expected)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (["missing.png"], FileNotFoundError, r"missing\.png"),
        ("one.png", ConfigError, r"give a list"),
        (np.zeros((2, SIZE, SIZE, 3)), ShapeError, "sample 0 is a float64 array"),
        (np.zeros((2, SIZE, SIZE), np.uint8), ShapeError, r"give RGB uint8 \[H, W, 3\]"),
        (np.zeros((1, 8, SIZE, 3), np.uint8), DataError, "sample 0 has 16 x 8 pixels"),
    ],
)
def test_bad_inputs_are_named(
    directory: Path, inputs: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(directory, fit="exact").embed(inputs)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\xff\xd8\xff\xe0 cut"])
def test_corrupt_files_are_named(directory: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.jpg").write_bytes(content)
    with pytest.raises(CorruptSample, match=r"bad\.jpg' cannot be read"):
        load_model(directory).embed([tmp_path / "bad.jpg"])


def test_a_bomb_is_refused_by_its_header(directory: Path, tmp_path: Path) -> None:
    Image.new("1", (8_000, 8_000)).save(tmp_path / "bomb.png")
    with pytest.raises(CorruptSample, match="8000 x 8000"):
        load_model(directory).embed([tmp_path / "bomb.png"])


def test_images_of_another_size_can_be_resized(directory: Path) -> None:
    wide = np.zeros((1, 32, 48, 3), np.uint8)
    wide[:, :, 5:43] = (10, 200, 90)  # the middle square, and what its filter reaches
    found = load_model(directory, fit="resize").embed(wide)
    expected = np.full((1, SIZE, SIZE, 3), (10, 200, 90), np.uint8)
    np.testing.assert_allclose(found, load_model(directory).embed(expected), atol=1e-6)
    with pytest.raises(ConfigError, match="auto, exact, resize, align"):
        load_model(directory, fit="stretch")


def test_embeddings_that_are_not_finite_are_an_error(directory: Path) -> None:
    model = load_model(directory)

    def spoil(network: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(0, torch.tensor([1]), torch.nan)

    model.backbone.register_forward_hook(spoil)
    with pytest.raises(DataError, match="sample 1 is not finite"):
        model.embed(pictures(3))
    with pytest.raises(DataError, match="sample 1 is not finite"):
        model.embed(pictures(5), batch_size=4)


def test_a_score_without_thresholds_has_no_decision(directory: Path) -> None:
    first, second = pictures(2)
    model = load_model(directory)
    found = model.verify(first, second)
    left, right = model.embed([first, second]).astype(np.float64)
    assert found.score == pytest.approx(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
    assert (found.far, found.threshold, found.is_same, found.llr) == (None,) * 4
    with pytest.raises(ConfigError, match="small has none"):
        model.verify(first, second, far=1e-3)


def test_the_decision_is_at_the_threshold(directory: Path) -> None:
    first, second = pictures(2)
    score = load_model(directory).verify(first, second).score
    for threshold, decision in (
        (score, True),
        (float(np.nextafter(score, 2)), False),
        (-1.0, True),
        (None, False),
    ):
        found = with_thresholds(directory, threshold).verify(first, second, far=1e-3)
        assert (found.is_same, found.threshold, found.far) == (decision, threshold, 1e-3)
    with pytest.raises(ProtocolError, match="FAR 1e-09"):
        load_model(directory).verify(first, second, far=1e-9)


def test_the_ratio_is_that_of_the_calibration(directory: Path) -> None:
    first, second = pictures(2)
    model = with_thresholds(directory, 0.5, calibration=AffineMap(10.0, -3.0))
    found = model.verify(first, second)
    assert found.llr == pytest.approx(10.0 * found.score - 3.0)
    assert with_thresholds(directory, 0.5, calibration=None).verify(first, second).llr is None


def test_samples_are_embedded_as_the_evaluation_did(directory: Path) -> None:
    first, second = pictures(2)
    model = with_thresholds(directory, 0.5, flip="sum")
    expected = cosine(*model.embed([first, second], flip="sum"))
    assert model.verify(first, second).score == pytest.approx(expected)
    assert expected != pytest.approx(cosine(*model.embed([first, second])), abs=1e-6)


def test_thresholds_of_other_weights_are_refused(directory: Path, tmp_path: Path) -> None:
    with_thresholds(directory, 0.5)
    make_model(tmp_path / "other", seed=1)
    (tmp_path / "other" / THRESHOLDS).write_bytes((directory / THRESHOLDS).read_bytes())
    with pytest.raises(DataError, match="add its own thresholds"):
        load_model(tmp_path / "other")


def test_models_of_arrays_take_floats(tmp_path: Path) -> None:
    backbone = create_backbone("small_mlp", embedding_dim=4, input_dim=6)
    card = ModelCard("vectors", "arrays", (6,), "small_mlp", 4, options={"input_dim": 6})
    write_model(tmp_path / "m", weights=backbone.state_dict(), card=card, recipe="")
    model = load_model(tmp_path / "m")
    assert model.embed(np.ones((3, 6))).shape == (3, 4)
    with pytest.raises(ShapeError, match=r"shape \[5\] each and the model takes \[6\]"):
        model.embed(np.ones((3, 5)))
    with pytest.raises(ConfigError, match="only images have a mirror image"):
        model.embed(np.ones((3, 6)), flip="sum")


def test_a_zero_vector_has_no_cosine() -> None:
    with pytest.raises(DataError, match="no direction"):
        cosine(np.zeros(3), np.ones(3))


def test_nothing_at_all_has_no_embeddings(directory: Path) -> None:
    assert load_model(directory).embed([]).shape == (0, 8)


class Moments(nn.Module):
    """Stands for a speaker network: waveforms ``[B, samples]`` of any length to ``[B, d]``."""

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, embedding_dim))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        moments = torch.stack([samples.mean(1), samples.square().mean(1), samples.amax(1)], 1)
        return moments @ self.weight


@pytest.fixture
def listener(tmp_path: Path) -> Model:
    if "moments" not in list_backbones():
        register_backbone("moments", Moments)
    card = ModelCard("voice", "audio", (), "moments", 4)
    write_model(tmp_path / "v", weights=Moments(4).state_dict(), card=card, recipe="")
    return load_model(tmp_path / "v")


def test_recordings_are_embedded_one_by_one(listener: Model, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = [np.random.default_rng(n).uniform(-0.9, 0.9, 4000 + n) for n in (0, 1000)]
    for number, values in enumerate(samples):
        soundfile.write(tmp_path / f"{number}.wav", values, 16_000, subtype="FLOAT")
    found = listener.embed([tmp_path / "0.wav", tmp_path / "1.wav"])
    np.testing.assert_allclose(found, listener.embed(samples), atol=1e-5)
    expected = listener.backbone(torch.tensor(samples[1], dtype=torch.float32)[None])
    np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-5)
    assert listener.verify(tmp_path / "0.wav", samples[0]).score == pytest.approx(1.0)


def test_bad_recordings_are_named(listener: Model, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "bad.wav").write_bytes(b"")
    with pytest.raises(CorruptSample, match=r"bad\.wav' cannot be read"):
        listener.embed([tmp_path / "bad.wav"])
    for samples in (np.zeros((2, 100)), np.zeros(100, np.int16), np.zeros(0)):
        with pytest.raises(ShapeError, match="sample 0 is a"):
            listener.embed([samples])
    assert listener.embed([np.ones(5)]).shape == (1, 4)  # repeated until a network can take it


class OneFace:
    """Stands for the detector: one face, upright, in the middle of whatever it is shown."""

    def find(self, image: np.ndarray) -> list[Face]:
        if not image.any():
            return []
        centre = np.array([image.shape[1], image.shape[0]]) / 2
        points = (np.array(EYES_AND_NOSE) - 56) * image.shape[0] / 112 + centre
        return [Face((0, 0, 1, 1), 1.0, points)]


def test_photos_are_aligned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmargin.data.detector.FaceDetector", OneFace)
    photo = np.full((40, 60, 3), (10, 200, 90), np.uint8)
    face = np.full((SIZE, SIZE, 3), (10, 200, 90), np.uint8)
    model = load_model(directory)
    np.testing.assert_allclose(model.embed([photo]), model.embed([face]), atol=1e-6)
    with pytest.raises(DataError, match="no face was found in sample 1"):
        model.embed([photo, np.zeros_like(photo)])
    with pytest.raises(DataError, match="no face was found"):
        load_model(directory, fit="align").embed([np.zeros_like(face)])


def test_a_missing_detector_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmargin.data.detector.why_no_detector", lambda: "dlib-bin is missing")
    with pytest.raises(BackendError, match="dlib-bin is missing"):
        load_model(directory).embed(pictures(1, size=40))


def test_a_real_face_is_found_and_aligned(directory: Path) -> None:
    """A portrait four times its size, as a photo, comes back to where it was."""
    if why_no_detector() is not None:
        pytest.skip(f"no face detector: {why_no_detector()}")
    root = Path(__file__).parents[3] / "shared" / "data"
    archive = Path(os.environ.get("QMARGIN_DATA", root)) / "congress_faces" / "images.zip"
    if not archive.is_file():
        pytest.skip(f"real portraits are not at {archive}; name their folder with QMARGIN_DATA")
    with zipfile.ZipFile(archive) as file:
        name = sorted(name for name in file.namelist() if name.endswith(".jpg"))[0]
        portrait = Image.open(io.BytesIO(file.read(name))).convert("RGB")
    card = replace(load_model(directory).card, input_shape=(3, 112, 112))
    large = np.array(portrait.resize((448, 448)))
    photo = np.pad(large, ((60, 60), (90, 30), (0, 0)), mode="edge")
    batch = InputReader(card, fit="align").read([photo])
    found = batch[0].permute(1, 2, 0).numpy()
    assert np.corrcoef(found.ravel(), np.array(portrait).ravel())[0, 1] > 0.9
