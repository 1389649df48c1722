"""``qmargin export``, ``embed`` and ``verify``: model directories and what to do with them."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.commands import run_command as run
from helpers.model_directories import SIZE, pictures, write_pictures
from helpers.results import synthetic_result, write_results
from helpers.runs import tiny_recipe
from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.export import add_thresholds
from qmargin.evaluation.model import Verification, load_model
from qmargin.models import create_backbone, onnx_file
from qmargin.models.directory import CARD, ModelCard, read_card, write_model
from qmargin.models.features import FilterBank
from qmargin.training.checkpoint import newest, read_prototypes
from qmargin.training.loop import train
from qmargin.training.recipe_files import apply_settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = apply_settings(
        tiny_recipe(f"data.options.shape=[3, {SIZE}, {SIZE}]", "run.max_steps=2"),
        ["model.options=null", "model.backbone=small_conv", "model.options.width=4"],
    )
    folder = tmp_path_factory.mktemp("runs") / "images"
    train(recipe, folder, device="cpu")
    return folder


def test_a_run_becomes_a_model_once(trained, tmp_path, model, capsys):
    out = tmp_path / "exported"
    run("export", trained, "--out", out, "--name", "mine")
    assert capsys.readouterr().out == f"{out}\n"
    before = read_card(out)
    assert before.name == "mine" and load_model(out).embed(pictures(2)).shape == (2, 32)
    run("export", trained, "--out", out, "--card", "licence=CC0, really = yes")
    assert read_card(out) == before.with_facts({"licence": "CC0, really = yes"})
    with pytest.raises(ConfigError, match="'mine'"):
        run("export", trained, "--out", out, "--name", "other")
    with pytest.raises(ConfigError, match="not empty"):
        run("export", trained, "--out", model)


def test_thresholds_of_a_result_are_added(tmp_path, model, capsys):
    (unknown,) = write_results(tmp_path / "unknown", synthetic_result())
    with pytest.raises(DataError, match="--trust-result"):
        run("export", model, "--result", unknown, "--flip", "none")
    assert not (model / "thresholds.json").exists()
    card = read_card(model).to_texts()
    (result,) = write_results(tmp_path / "results", synthetic_result(card=card))
    run("export", model, "--result", result, "--flip", "none")
    assert "thresholds at FAR 1 %, 0.1 %, 0.01 %, 0.001 %" in capsys.readouterr().out
    assert load_model(model).verify(*pictures(2), far=1e-3).is_same is not None
    run("export", model, "--result", unknown, "--flip", "none", "--trust-result")


def test_an_onnx_file_is_compared_and_in_the_card(model, capsys):
    onnxruntime = [pytest.importorskip(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    path = model / "model.onnx"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"model\.onnx exists"):
        run("export", model, "--onnx")
    path.unlink()
    for _ in range(2):  # its own is replaced
        run("export", model, "--onnx")
    assert f"{path}: differs from PyTorch by" in capsys.readouterr().out
    card = read_card(model)
    assert card.facts["onnx_file"] == "model.onnx"
    assert float(card.facts["onnx_max_difference"].split()[0]) <= 1e-5
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["weights_sha256"] == card.weights_sha256 and "RGB" in metadata["inputs"]
    images = pictures(3)
    inputs = ((images.astype(np.float32) / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2)
    (found,) = session.run(None, {"inputs": inputs})
    np.testing.assert_allclose(found, load_model(model).embed(images), atol=1e-5)


@pytest.mark.slow
def test_a_speaker_model_takes_waveforms_or_filter_banks(tmp_path):
    onnxruntime = [pytest.importorskip(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    backbone = create_backbone("speaker_resnet18", embedding_dim=8, width=2)
    card = ModelCard("voice", "audio", (), "speaker_resnet18", 8, options={"width": 2})
    write_model(tmp_path / "m", weights=backbone.state_dict(), card=card, recipe="name: made\n")
    run("export", tmp_path / "m", "--onnx", "--features")
    samples = 0.1 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    expected = load_model(tmp_path / "m").embed([samples[0].numpy()])
    inputs = {"model.onnx": samples, "model-features.onnx": FilterBank(subtract_mean=True)(samples)}
    for name, values in inputs.items():
        session = onnxruntime.InferenceSession(str(tmp_path / "m" / name))
        (found,) = session.run(None, {"inputs": values.numpy()})
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    facts = read_card(tmp_path / "m").facts
    assert [facts["onnx_file"], facts["features_onnx_file"]] == list(inputs)


def test_prototypes_of_a_run_are_a_cohort(trained, tmp_path, capsys):
    path = tmp_path / "cohort.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"cohort\.safetensors exists"):
        run("export", trained, "--prototypes", path)
    run("export", trained, "--prototypes", path, "--overwrite")
    cohort = read_embeddings(path, role="cohort")
    checkpoint = newest(trained / "checkpoints").checkpoint
    assert checkpoint is not None
    rows = read_prototypes(checkpoint)
    assert capsys.readouterr().out == f"{path}: {len(rows)} prototypes\n"
    assert np.array_equal(cohort.matrix, rows.numpy())
    assert len(set(cohort.keys)) == len(rows) == checkpoint.manifest.num_classes
    few = read_prototypes(checkpoint, at_most=3)
    assert 2 <= len(few) <= 3 and torch.equal(few[1], rows[-(-len(rows) // 3)])
    run("export", trained, "--prototypes", path, "--out", tmp_path / "m")  # our own
    for source, words, named in (
        *(
            (trained, words, "--out is missing")
            for words in ("--onnx", "--weights=ema", "--name=x")
        ),
        (tmp_path / "m", "--prototypes=" + str(path), "without prototypes"),
        (trained, f"--prototypes={tmp_path}/cohort.txt", "cannot hold embeddings"),
    ):
        with pytest.raises(ConfigError, match=named):
            run("export", source, "--prototypes", tmp_path / "other.npz", words)
    assert not (tmp_path / "other.npz").exists()


def test_exports_that_cannot_be_made_are_refused(trained, tmp_path, model, monkeypatch):
    before = (model / CARD).read_bytes()
    for words, named in (
        ((trained,), "--out is missing"),
        ((model,), "model directory already"),
        ((model, "--out", tmp_path / "n", "--onnx"), "model directory already"),
        ((model, "--card", "licence"), "KEY=TEXT"),
        ((model, "--card", "=CC0"), "KEY=TEXT"),
        ((model, "--features"), "add --onnx"),
    ):
        with pytest.raises(ConfigError, match=named):
            run("export", *words)
    assert (model / CARD).read_bytes() == before
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="onnxruntime"):
        run("export", trained, "--out", tmp_path / "new", "--onnx")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["e.safetensors", "e.npz"])
def test_a_folder_becomes_a_private_file_of_embeddings(model, faces, tmp_path, name, capsys):
    out, manifest = tmp_path / name, tmp_path / f"{name}.manifest.csv"
    run("embed", faces, "--model", model, "--out", out, "--flip", "sum", "--batch-size", 4)
    found = read_embeddings(out)
    assert found.keys[:2] == ("id00/0.png", "id00/1.png")
    expected = load_model(model).embed(pictures(20), flip="sum")
    np.testing.assert_allclose(found.matrix, expected, atol=1e-6)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (out, manifest)] == [0o600, 0o600]
    printed = capsys.readouterr().out
    assert printed == f"20 embeddings of 20 files, flip sum\n{out}\n{manifest}\n"


def test_files_that_are_left_out_and_collapse_are_told_of(model, tmp_path, capsys):
    folder = tmp_path / "same"
    write_pictures(folder, np.repeat(pictures(1), 4, axis=0))
    for number in range(7):
        (folder / f"bad\x1b{number}.jpg").write_bytes(b"<html>")
    run("embed", folder, "--model", model, "--out", tmp_path / "e.npz")
    printed = capsys.readouterr()
    assert "4 embeddings of 11 files" in printed.out and "\x1b" not in printed.err
    for part in (r"left out bad\x1b0.jpg: ", "and 2 more, see ", "embeddings have collapsed"):
        assert part in printed.err
    with pytest.raises(DataError, match="4 files cannot be embedded"):
        run("embed", folder, "--model", model, "--out", tmp_path / "f.npz", "--max-corrupt", 3)
    for name, named in {"none/e.npz": "make the folder", "e.pt": r"\.safetensors or"}.items():
        with pytest.raises(ConfigError, match=named):
            run("embed", folder, "--model", model, "--out", tmp_path / name)
    assert not (tmp_path / "f.npz").exists()


def test_verify_without_and_with_thresholds(model, faces, capsys):
    pair = sorted(faces.rglob("*.png"))[:2]
    run("verify", *pair, "--model", model)
    printed = capsys.readouterr().out
    assert f"score     {load_model(model).verify(*pair).score:.4f} (cosine)\n" in printed
    assert "decision  none: the model has no thresholds" in printed
    with pytest.raises(ConfigError, match="small has none"):
        run("verify", *pair, "--model", model, "--far", 0.01)

    result = synthetic_result(card=None, protocol="LFW\x1b[31m")
    paths = write_results(model.parent / "results", result)
    add_thresholds(model, *paths, flip="sum", is_trusted=True)
    run("verify", pair[0], pair[0], "--model", model)
    threshold = load_model(model).thresholds.at(1e-3).threshold
    printed = capsys.readouterr().out
    expected = f"one identity (threshold {threshold:.4f} at FAR 0.1 %, measured on LFW\\x1b[31m)"
    assert "score     1.0000" in printed and expected in printed and "LLR       +" in printed
    with pytest.raises(ProtocolError, match="no threshold was measured at FAR 1e-09"):
        run("verify", *pair, "--model", model, "--far", 1e-9)
    run("verify", *pair, "--model", model, "--far", 0.01, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"score", "far", "threshold", "is_same", "llr"} and found["far"] == 0.01
    assert found["is_same"] == (found["score"] >= found["threshold"])


def test_what_verify_cannot_read_is_named(model, faces, tmp_path):
    pair = sorted(faces.rglob("*.png"))[:2]
    with pytest.raises(DataError, match="not a model directory"):
        run("verify", *pair, "--model", tmp_path)
    pair[1].write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"1\.png' cannot be read"):
        run("verify", *pair, "--model", model)
    (large,) = write_pictures(tmp_path / "large", pictures(1, size=20))
    with pytest.raises(DataError, match="has 20 x 20 pixels"):
        run("verify", large, large, "--model", model, "--fit", "exact")
    run("verify", large, large, "--model", model, "--fit", "resize")


def test_a_score_next_to_its_threshold_has_digits_that_differ(model, monkeypatch, capsys):
    point = SimpleNamespace(status="ok", note=None)
    thresholds = SimpleNamespace(at=lambda far: point, protocol="LFW")
    found = Verification(0.99999991, 1e-3, 0.99999992, False, None)
    near = SimpleNamespace(thresholds=thresholds, verify=lambda *pair, far: found)
    monkeypatch.setattr("qmargin.evaluation.model.load_model", lambda *words, **options: near)
    run("verify", "a.png", "b.png", "--model", model)
    printed = capsys.readouterr().out
    assert "score     0.99999991 " in printed and "threshold 0.99999992 " in printed


def test_a_model_of_arrays_verifies_no_files(tmp_path):
    train(tiny_recipe("run.max_steps=2"), tmp_path / "run", device="cpu")
    (tmp_path / "a.png").write_bytes(b"")
    picture = str(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"a\.png"):
        run("verify", picture, picture, "--model", tmp_path / "run")


@pytest.mark.parametrize("name", ["e.npz", "e.safetensors", "e.npz.manifest.csv"])
def test_embeddings_replace_embeddings_only(model, tmp_path, name):
    write_pictures(tmp_path / "few", pictures(4))
    out = tmp_path / name.removesuffix(".manifest.csv")
    command = ["embed", tmp_path / "few", "--model", model, "--out", out]
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=rf"{name} exists"):
        run(*command)
    assert (tmp_path / name).read_bytes() == b"mine"
    run(*command, "--overwrite")
    run(*command)
