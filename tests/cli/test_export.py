"""``qmargin export``: from a run to a directory that verifies, embeds and runs elsewhere."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.commands import run_command
from helpers.model_directories import SIZE, make_model, pictures
from helpers.results import synthetic_result, write_results
from helpers.runs import tiny_recipe
from qmargin.errors import BackendError, ConfigError, DataError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.model import load_model
from qmargin.models import create_backbone, onnx_file
from qmargin.models.directory import CARD, ModelCard, read_card, write_model
from qmargin.models.features import FilterBank
from qmargin.training.checkpoint import newest, read_prototypes
from qmargin.training.loop import train
from qmargin.training.recipe_files import apply_settings

run = partial(run_command, "export")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = apply_settings(
        tiny_recipe(f"data.options.shape=[3, {SIZE}, {SIZE}]", "run.max_steps=2"),
        ["model.options=null", "model.backbone=small_conv", "model.options.width=4"],
    )
    folder = tmp_path_factory.mktemp("runs") / "images"
    train(recipe, folder, device="cpu")
    return folder


def test_a_run_becomes_a_model_of_images(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "m"
    out.parent.mkdir()
    run(trained, "--out", out, "--name", "mine", "--card", "licence=CC0, really = yes")
    assert capsys.readouterr().out == f"{out}\n"
    card = read_card(out)
    assert (card.name, card.facts["licence"]) == ("mine", "CC0, really = yes")
    assert load_model(out).embed(pictures(2)).shape == (2, 32)


def test_thresholds_of_a_result_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = make_model(tmp_path / "m")
    (result,) = write_results(tmp_path / "results", synthetic_result(card=card.to_texts()))
    run(tmp_path / "m", "--result", result, "--flip", "none")
    assert "thresholds at FAR 0.01, 0.001, 0.0001, 1e-05" in capsys.readouterr().out
    assert load_model(tmp_path / "m").verify(*pictures(2), far=1e-3).is_same is not None


def test_an_onnx_file_is_compared_and_in_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    make_model(tmp_path / "m")
    path = tmp_path / "m" / "model.onnx"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"model\.onnx exists"):
        run(tmp_path / "m", "--onnx")
    path.unlink()
    for _ in range(2):  # its own is replaced
        run(tmp_path / "m", "--onnx")
    assert f"{path}: differs from PyTorch by" in capsys.readouterr().out
    card = read_card(tmp_path / "m")
    assert card.facts["onnx_file"] == "model.onnx"
    assert float(card.facts["onnx_max_difference"].split()[0]) <= 1e-5
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["weights_sha256"] == card.weights_sha256
    assert "RGB" in metadata["inputs"]
    images = pictures(3)
    inputs = ((images.astype(np.float32) / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2)
    (found,) = session.run(None, {"inputs": inputs})
    np.testing.assert_allclose(found, load_model(tmp_path / "m").embed(images), atol=1e-5)


@pytest.mark.slow
def test_a_speaker_model_takes_waveforms_or_filter_banks(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    backbone = create_backbone("speaker_resnet18", embedding_dim=8, width=2)
    card = ModelCard("voice", "audio", (), "speaker_resnet18", 8, options={"width": 2})
    write_model(tmp_path / "m", weights=backbone.state_dict(), card=card, recipe="name: made\n")
    run(tmp_path / "m", "--onnx", "--features")
    samples = 0.1 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    expected = load_model(tmp_path / "m").embed([samples[0].numpy()])
    inputs = {"model.onnx": samples, "model-features.onnx": FilterBank(subtract_mean=True)(samples)}
    for name, values in inputs.items():
        session = onnxruntime.InferenceSession(str(tmp_path / "m" / name))
        (found,) = session.run(None, {"inputs": values.numpy()})
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    facts = read_card(tmp_path / "m").facts
    assert facts["onnx_file"] == "model.onnx"
    assert facts["features_onnx_file"] == "model-features.onnx"


def test_filter_banks_are_of_speaker_models(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    with pytest.raises(ConfigError, match="add --onnx"):
        run(tmp_path / "m", "--features")


def test_prototypes_of_a_run_are_a_cohort(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cohort.safetensors"
    run(trained, "--prototypes", path)
    cohort = read_embeddings(path, role="cohort")
    checkpoint = newest(trained / "checkpoints").checkpoint
    assert checkpoint is not None
    rows = read_prototypes(checkpoint)
    assert capsys.readouterr().out == f"{path}: {len(rows)} prototypes\n"
    assert np.array_equal(cohort.matrix, rows.numpy())
    assert len(set(cohort.keys)) == len(rows) == checkpoint.manifest.num_classes
    few = read_prototypes(checkpoint, at_most=3)
    assert 2 <= len(few) <= 3
    assert torch.equal(few[1], rows[-(-len(rows) // 3)])
    run(trained, "--prototypes", path, "--out", tmp_path / "m")
    assert read_card(tmp_path / "m")
    other = tmp_path / "other.npz"
    for option in (["--onnx"], ["--weights", "ema"], ["--flip", "sum"], ["--name", "x"]):
        with pytest.raises(ConfigError, match="--out is missing"):
            run(trained, "--prototypes", other, *option)
    assert not other.exists()
    with pytest.raises(ConfigError, match="has no prototypes"):
        run(tmp_path / "m", "--prototypes", path)
    with pytest.raises(ConfigError, match="no file of embeddings"):
        run(trained, "--prototypes", tmp_path / "cohort.txt")


def test_arguments_that_do_not_fit_are_refused(trained: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    with pytest.raises(ConfigError, match="--out is missing"):
        run(trained)
    with pytest.raises(ConfigError, match="model directory already"):
        run(tmp_path / "m")
    with pytest.raises(ConfigError, match="model directory already"):
        run(tmp_path / "m", "--out", tmp_path / "n", "--onnx")
    before = (tmp_path / "m" / CARD).read_bytes()
    for text in ("licence", "=CC0"):
        with pytest.raises(ConfigError, match="KEY=TEXT"):
            run(tmp_path / "m", "--card", text)
    assert (tmp_path / "m" / CARD).read_bytes() == before
    with pytest.raises(ConfigError, match="is not empty"):
        run(trained, "--out", tmp_path / "m")


def test_a_result_without_weights_needs_trust(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    (result,) = write_results(tmp_path / "results", synthetic_result())
    with pytest.raises(DataError, match="--trust-result"):
        run(tmp_path / "m", "--result", result, "--flip", "none")
    assert not (tmp_path / "m" / "thresholds.json").exists()
    run(tmp_path / "m", "--result", result, "--flip", "none", "--trust-result")
    assert load_model(tmp_path / "m").thresholds is not None


def test_missing_packages_show_before_anything_is_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="onnxruntime"):
        run(trained, "--out", tmp_path / "m", "--onnx")
    assert not (tmp_path / "m").exists()


def test_an_export_can_be_repeated(trained: Path, tmp_path: Path) -> None:
    run(trained, "--out", tmp_path / "m", "--name", "mine")
    before = read_card(tmp_path / "m")
    run(trained, "--out", tmp_path / "m", "--card", "licence=CC0")
    assert read_card(tmp_path / "m") == before.with_facts({"licence": "CC0"})
    with pytest.raises(ConfigError, match="'mine'"):
        run(trained, "--out", tmp_path / "m", "--name", "other")
    make_model(tmp_path / "another")
    with pytest.raises(ConfigError, match="not empty"):
        run(trained, "--out", tmp_path / "another")


def test_prototypes_replace_embeddings_only(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "cohort.npz"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"cohort\.npz exists"):
        run(trained, "--prototypes", path)
    assert path.read_bytes() == b"mine"
    run(trained, "--prototypes", path, "--overwrite")
    run(trained, "--prototypes", path)
