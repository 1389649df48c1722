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
from helpers.results import some_run, synthetic_result, write_results
from helpers.runs import tiny_recipe
from qmargin.data.alignment import EYES_AND_NOSE, Face, why_no_detector
from qmargin.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    CorruptSample,
    DataError,
    ProtocolError,
    ShapeError,
)
from qmargin.evaluation import export
from qmargin.evaluation.model import Inputs, cosine, load_model
from qmargin.evaluation.result import Source, run_info
from qmargin.models import create_backbone, list_backbones, register_backbone
from qmargin.models import directory as model_files
from qmargin.training.checkpoint import newest, read_backbone
from qmargin.training.loop import train
from qmargin.training.recipe_files import read_recipe


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path / "m")
    return tmp_path / "m"


def with_thresholds(directory, threshold, **changes):
    card = load_model(directory).card
    made = export.thresholds_of(
        synthetic_result(card=card.to_texts()),
        weights_sha256=card.weights_sha256,
        result_sha256="ab" * 32,
    )
    points = tuple(replace(point, threshold=threshold) for point in made.points)
    export.write_thresholds(
        directory / model_files.THRESHOLDS, replace(made, points=points, **changes)
    )
    return load_model(directory)


def test_paths_pillow_images_and_arrays_give_the_same(directory, tmp_path):
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
    assert model.embed([]).shape == (0, 8)


def test_embeddings_are_the_networks_of_normalised_rgb(directory):
    model, images = load_model(directory), pictures(3)
    inputs = (torch.tensor(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    expected = model.backbone(inputs)
    np.testing.assert_allclose(model.embed(images), expected.numpy(), atol=1e-6)
    flipped = model.backbone(inputs.flip(3))
    found = model.embed(images, flip="sum")
    np.testing.assert_allclose(found, (expected + flipped).numpy(), atol=1e-6)
    np.testing.assert_allclose(found, model.embed(images[:, :, ::-1], flip="sum"), atol=1e-6)


def test_grey_and_transparent_files_become_rgb(directory, tmp_path):
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
def test_bad_inputs_are_named(directory, inputs, error, message):
    with pytest.raises(error, match=message):
        load_model(directory, fit="exact").embed(inputs)


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", b"\xff\xd8\xff\xe0 cut", "bomb"]
)
def test_corrupt_files_are_named(directory, tmp_path, content):
    path = tmp_path / "bad.png"
    if content == "bomb":
        Image.new("1", (8_000, 8_000)).save(path)
    else:
        path.write_bytes(content)
    with pytest.raises(CorruptSample, match=r"bad\.png' cannot be read"):
        load_model(directory).embed([path])


def test_images_of_another_size_can_be_resized(directory):
    wide = np.zeros((1, 32, 48, 3), np.uint8)
    wide[:, :, 5:43] = (10, 200, 90)  # the middle square, and what its filter reaches
    found = load_model(directory, fit="resize").embed(wide)
    expected = np.full((1, SIZE, SIZE, 3), (10, 200, 90), np.uint8)
    np.testing.assert_allclose(found, load_model(directory).embed(expected), atol=1e-6)
    with pytest.raises(ConfigError, match="auto, exact, resize, align"):
        load_model(directory, fit="stretch")


def test_embeddings_that_are_not_finite_are_an_error(directory):
    model = load_model(directory)

    def spoil(network, inputs, output):
        return output.index_fill(0, torch.tensor([1]), torch.nan)

    model.backbone.register_forward_hook(spoil)
    with pytest.raises(DataError, match="sample 1 is not finite"):
        model.embed(pictures(5), batch_size=4)


def test_a_score_without_thresholds_has_no_decision(directory):
    model, images = load_model(directory), pictures(2)
    found = model.verify(*images)
    left, right = model.embed(images).astype(np.float64)
    assert found.score == pytest.approx(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
    assert (found.far, found.threshold, found.is_same, found.llr) == (None,) * 4
    with pytest.raises(ConfigError, match="small has none"):
        model.verify(*images, far=1e-3)
    with pytest.raises(DataError, match="no direction"):
        cosine(np.zeros(3), np.ones(3))


def test_the_decision_is_at_the_threshold_and_the_ratio_that_of_the_calibration(directory):
    images = pictures(2)
    score = load_model(directory).verify(*images).score
    above = float(np.nextafter(score, 2))
    for threshold, decision in ((score, True), (above, False), (-1.0, True), (None, False)):
        found = with_thresholds(directory, threshold).verify(*images, far=1e-3)
        assert (found.is_same, found.threshold, found.far) == (decision, threshold, 1e-3)
    with pytest.raises(ProtocolError, match="FAR 1e-09"):
        load_model(directory).verify(*images, far=1e-9)
    model = with_thresholds(directory, 0.5, calibration=export.AffineMap(10.0, -3.0))
    assert model.verify(*images).llr == pytest.approx(10.0 * score - 3.0)
    assert with_thresholds(directory, 0.5, calibration=None).verify(*images).llr is None


def test_samples_are_embedded_as_the_evaluation_did(directory):
    images = pictures(2)
    model = with_thresholds(directory, 0.5, flip="sum")
    expected = cosine(*model.embed(images, flip="sum"))
    assert model.verify(*images).score == pytest.approx(expected)
    assert expected != pytest.approx(cosine(*model.embed(images)), abs=1e-6)


def test_thresholds_of_other_weights_are_refused(directory, tmp_path):
    with_thresholds(directory, 0.5)
    make_model(tmp_path / "other", seed=1)
    (tmp_path / "other" / model_files.THRESHOLDS).write_bytes(
        (directory / model_files.THRESHOLDS).read_bytes()
    )
    with pytest.raises(DataError, match="add its own thresholds"):
        load_model(tmp_path / "other")


def test_models_of_arrays_take_floats(tmp_path):
    backbone = create_backbone("small_mlp", embedding_dim=4, input_dim=6)
    card = model_files.ModelCard(
        "vectors", "arrays", (6,), "small_mlp", 4, options={"input_dim": 6}
    )
    model_files.write_model(tmp_path / "m", weights=backbone.state_dict(), card=card, recipe="")
    model = load_model(tmp_path / "m")
    assert model.embed(np.ones((3, 6))).shape == (3, 4)
    with pytest.raises(ShapeError, match=r"\[5\].* \[6\]"):
        model.embed(np.ones((3, 5)))
    with pytest.raises(ConfigError, match="only images have a mirror image"):
        model.embed(np.ones((3, 6)), flip="sum")


class Moments(nn.Module):
    """Stands for a speaker network: waveforms ``[B, samples]`` of any length to ``[B, d]``."""

    def __init__(self, embedding_dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, embedding_dim))

    def forward(self, samples):
        moments = torch.stack([samples.mean(1), samples.square().mean(1), samples.amax(1)], 1)
        return moments @ self.weight


@pytest.fixture
def listener(tmp_path):
    if "moments" not in list_backbones():
        register_backbone("moments", Moments)
    card = model_files.ModelCard("voice", "audio", (), "moments", 4)
    model_files.write_model(tmp_path / "v", weights=Moments(4).state_dict(), card=card, recipe="")
    return load_model(tmp_path / "v")


def test_recordings_are_embedded_one_by_one(listener, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    samples = [np.random.default_rng(n).uniform(-0.9, 0.9, 4000 + n) for n in (0, 1000)]
    for number, values in enumerate(samples):
        soundfile.write(tmp_path / f"{number}.wav", values, 16_000, subtype="FLOAT")
    found = listener.embed([tmp_path / "0.wav", tmp_path / "1.wav"])
    np.testing.assert_allclose(found, listener.embed(samples), atol=1e-5)
    expected = listener.backbone(torch.tensor(samples[1], dtype=torch.float32)[None])
    np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-5)
    assert listener.verify(tmp_path / "0.wav", samples[0]).score == pytest.approx(1.0)


def test_bad_recordings_are_named(listener, tmp_path):
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

    def find(self, image):
        if not image.any():
            return []
        centre = np.array([image.shape[1], image.shape[0]]) / 2
        points = (np.array(EYES_AND_NOSE) - 56) * image.shape[0] / 112 + centre
        return [Face((0, 0, 1, 1), 1.0, points)]


def test_photos_are_aligned(directory, monkeypatch):
    monkeypatch.setattr("qmargin.data.alignment.FaceDetector", OneFace)
    photo = np.full((40, 60, 3), (10, 200, 90), np.uint8)
    face = np.full((SIZE, SIZE, 3), (10, 200, 90), np.uint8)
    model = load_model(directory)
    np.testing.assert_allclose(model.embed([photo]), model.embed([face]), atol=1e-6)
    with pytest.raises(DataError, match="no face was found in sample 1"):
        model.embed([photo, np.zeros_like(photo)])
    with pytest.raises(DataError, match="no face was found"):
        load_model(directory, fit="align").embed([np.zeros_like(face)])


def test_a_real_face_is_found_and_aligned(directory):
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
    batch = Inputs(card, fit="align").read([photo])
    found = batch[0].permute(1, 2, 0).numpy()
    assert np.corrcoef(found.ravel(), np.array(portrait).ravel())[0, 1] > 0.9


OURS, OTHERS = "ab" * 32, "cd" * 32


def made(*, is_trusted=False, **changes):
    own = synthetic_result(num_impostors=2000, card={"weights_sha256": OURS})
    hashes = {"weights_sha256": OURS, "result_sha256": OTHERS}
    return export.thresholds_of(
        replace(own, **changes), **hashes, flip="sum", is_trusted=is_trusted
    )


def test_points_are_those_that_could_be_measured(tmp_path):
    thresholds, path = made(), tmp_path / "thresholds.json"
    assert [point.far_target for point in thresholds.points] == [1e-2, 1e-3]
    assert thresholds.at(0.001) == thresholds.points[1]
    with pytest.raises(ProtocolError, match=r"FAR 1e-05 .* 2,000 impostor .* 0\.01, 0\.001"):
        thresholds.at(1e-5)
    for each in (thresholds, replace(thresholds, calibration=None)):
        export.write_thresholds(path, each)
        assert export.read_thresholds(path) == each
    with pytest.raises(ConfigError, match="one of none, sum"):
        replace(thresholds, flip="twice")


def system_of(weights):
    return replace(synthetic_result().system, model_card={"weights_sha256": weights})


def test_a_result_of_another_model_is_refused():
    assert made(system=system_of(OURS))
    assert made(run=some_run(checkpoint_sha256=OURS))
    for changes in ({"run": some_run(checkpoint_sha256=OTHERS)}, {"system": system_of(OTHERS)}):
        for is_trusted in (False, True):
            with pytest.raises(DataError, match="cdcdcdcdcdcd"):
                made(is_trusted=is_trusted, **changes)


@pytest.mark.parametrize("card", [None, {"loss": "Q-Margin"}])
def test_a_result_that_names_no_model_needs_trust(card):
    system = synthetic_result("someone", card=card).system
    with pytest.raises(DataError, match=r"'someone'.* does not name the weights.*--trust-result"):
        made(system=system)
    assert made(is_trusted=True, system=system).weights_sha256 == OURS


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [  # of which thresholds mean nothing for the plain cosine of two samples
        ({"sources": (Source("a", "b", "cohort"),)}, DataError, "changed by a cohort"),
        ({"sources": (Source("a", "b", "center"),)}, DataError, "changed by a center"),
        (
            {"protocol": replace(synthetic_result().protocol, pooling="norms kept")},
            DataError,
            "compared templates",
        ),
        (
            {"measures": synthetic_result(num_impostors=20).measures},
            ProtocolError,
            "no FAR could be measured",
        ),
    ],
)
def test_other_comparisons_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        made(**changes)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "qmargin-thresholds", "version": 2}', "[" * 100_000]
)
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "thresholds.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"thresholds\.json"):
        export.read_thresholds(path)
    export.write_thresholds(path, made())
    text = path.read_text().replace('"far_target": 0.01', '"far_target": LOW')
    for value, message in (('"low"', r"points\[0\]\.far_target is 'low'"), ("NaN", "NaN")):
        path.write_text(text.replace("LOW", value))
        with pytest.raises(DataError, match=message):
            export.read_thresholds(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    recipe = tiny_recipe(
        "run.max_steps=4", "run.save_every_steps=2", "run.average_last=2", "run.ema_decay=0.5"
    )
    train(recipe, folder, device="cpu")
    return folder


def weights_of(directory):
    return model_files.load_backbone(directory)[0].state_dict()


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_run_becomes_a_model(run, tmp_path):
    card = export.export_run(run, tmp_path / "m")
    found = newest(run / "checkpoints").checkpoint
    assert equal(weights_of(tmp_path / "m"), read_backbone(found))
    assert card == model_files.read_card(tmp_path / "m")
    assert (card.modality, card.input_shape, card.embedding_dim) == ("arrays", (32,), 32)
    recipe = read_recipe(tmp_path / "m" / model_files.RECIPE)
    assert card.facts["recipe_sha256"] == recipe.sha256
    assert card.facts["checkpoint_sha256"] == found.sha256
    assert card.facts["step"] == "4"
    assert card.facts["alpha"] == "1.25"
    assert "consent" in card.facts["intended_use"]
    model = load_model(tmp_path / "m")
    assert model.embed(np.ones((2, 32))).shape == (2, 32)
    expected = run_info(recipe, steps=4, num_classes=found.manifest.num_classes)
    assert model.run == replace(expected, checkpoint_sha256=card.weights_sha256)


def test_a_run_is_read_as_if_it_were_exported(run, tmp_path):
    card = export.export_run(run, tmp_path / "m")
    model = load_model(run)
    now = model.card.facts.pop("exported")  # each says when it was made
    assert now >= card.facts.pop("exported")
    assert model.card == card
    assert model.run == load_model(tmp_path / "m").run
    inputs = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    assert np.array_equal(model.embed(inputs), load_model(tmp_path / "m").embed(inputs))


def test_a_damaged_run_record_is_named(run, tmp_path):
    export.export_run(run, tmp_path / "m")
    path = tmp_path / "m" / "run.json"
    for content in ("", "[]", '{"seed": 0}', " " * 2_000_000):
        path.write_text(content)
        with pytest.raises(DataError, match=r"run\.json"):
            load_model(tmp_path / "m")
    path.unlink()
    assert load_model(tmp_path / "m").run is None


def test_other_weights_of_a_run(run, tmp_path):
    all_weights = []
    for weights in ("last", "average", "ema"):
        card = export.export_run(run, tmp_path / weights, weights=weights, name=weights)
        assert (card.name, card.facts["weights"]) == (weights, weights)
        all_weights.append(weights_of(tmp_path / weights))
    assert not equal(all_weights[0], all_weights[1])
    assert not equal(all_weights[1], all_weights[2])
    steps = sorted((run / "checkpoints").iterdir())
    export.export_run(steps[0], tmp_path / "first")
    assert not equal(weights_of(tmp_path / "first"), all_weights[0])


def test_what_is_not_there_is_said(run, tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint"):
        export.export_run(tmp_path, tmp_path / "m")
    with pytest.raises(ConfigError, match="one of last, average, ema"):
        export.export_run(run, tmp_path / "m", weights="best")
    short = tmp_path / "short"
    train(tiny_recipe("run.max_steps=1"), short, device="cpu")
    with pytest.raises(ConfigError, match=r"average\.safetensors does not exist"):
        export.export_run(short, tmp_path / "m", weights="average")
    weights = short / "checkpoints" / "step-000001" / "backbone.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        export.export_run(short, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.options.shape=[3, 16, 16]"], ("images", (3, 16, 16))),
        (["data.kind=images", "data.path=a", "data.options=null"], ("images", (3, 112, 112))),
        (
            ["data.kind=images", "data.path=a", "data.options=null", "data.options.size=48"],
            ("images", (3, 48, 48)),
        ),
        (["data.kind=audio", "data.path=a", "data.options=null"], ("audio", ())),
    ],
)
def test_images_and_computed_data_have_their_shapes(settings, expected):
    assert export.input_of(tiny_recipe(*settings)) == expected


def test_thresholds_come_from_a_result(run, tmp_path):
    card = export.export_run(run, tmp_path / "m")
    own = synthetic_result(card=card.to_texts(), protocol="LFW")
    other = synthetic_result(card={"weights_sha256": "ab" * 32})
    paths = write_results(tmp_path / "results", own, other)
    thresholds = export.add_thresholds(tmp_path / "m", paths[0])
    assert export.read_thresholds(tmp_path / "m" / model_files.THRESHOLDS) == thresholds
    assert model_files.read_card(tmp_path / "m").facts["tar_at_far_0.001"].endswith(" on LFW")
    found = load_model(tmp_path / "m").verify(np.ones(32), np.ones(32), far=1e-3)
    assert found.is_same
    assert found.score == pytest.approx(1.0)
    with pytest.raises(DataError, match="evaluate this model"):
        export.add_thresholds(tmp_path / "m", paths[1])
    assert export.read_thresholds(tmp_path / "m" / model_files.THRESHOLDS) == thresholds


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ("sum", None, "sum"),
        ("none", None, "none"),
        ("sum", "sum", "sum"),
        (None, "sum", "sum"),
        (None, None, "does not say whether mirror images"),
        ("sum", "none", "was made with flip sum, not none"),
    ],
)
def test_images_are_embedded_as_in_the_evaluation(tmp_path, said, asked, expected):
    result = synthetic_result(card=make_model(tmp_path / "m").to_texts())
    result = replace(result, protocol=replace(result.protocol, flip=said))
    (path,) = write_results(tmp_path / "results", result)
    if expected in ("none", "sum"):
        assert export.add_thresholds(tmp_path / "m", path, flip=asked).flip == expected
        assert load_model(tmp_path / "m").thresholds.flip == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            export.add_thresholds(tmp_path / "m", path, flip=asked)
        assert not (tmp_path / "m" / model_files.THRESHOLDS).exists()


def test_a_missing_detector_is_said(directory, monkeypatch):
    monkeypatch.setattr("qmargin.data.alignment.why_no_detector", lambda: "dlib-bin is missing")
    with pytest.raises(BackendError, match="dlib-bin is missing"):
        load_model(directory).embed(pictures(1, size=40))
