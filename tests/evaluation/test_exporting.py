"""From a training run to a model directory, and thresholds into it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.model_directories import make_model
from helpers.results import synthetic_result, write_results
from helpers.runs import tiny_recipe
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.evaluation.exporting import add_thresholds, export_run, input_of
from qmargin.evaluation.model import load_model
from qmargin.evaluation.thresholds import read_thresholds
from qmargin.models.directory import RECIPE, THRESHOLDS, load_backbone, read_card
from qmargin.training.checkpoint import newest, read_backbone
from qmargin.training.loop import train
from qmargin.training.recipe_files import read_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    recipe = tiny_recipe(
        "run.max_steps=4", "run.save_every_steps=2", "run.average_last=2", "run.ema_decay=0.5"
    )
    train(recipe, folder, device="cpu")
    return folder


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_backbone(directory)[0].state_dict()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_run_becomes_a_model(run: Path, tmp_path: Path) -> None:
    card = export_run(run, tmp_path / "m", facts={"licence": "CC0"})
    found = newest(run / "checkpoints").checkpoint
    assert equal(weights_of(tmp_path / "m"), read_backbone(found))
    assert card == read_card(tmp_path / "m")
    assert (card.modality, card.input_shape, card.embedding_dim) == ("arrays", (32,), 32)
    recipe = read_recipe(tmp_path / "m" / RECIPE)
    assert card.facts["recipe_sha256"] == recipe.sha256
    assert card.facts["checkpoint_sha256"] == found.sha256
    assert card.facts["step"] == "4"
    assert (card.facts["alpha"], card.facts["licence"]) == ("1.25", "CC0")
    assert "consent" in card.facts["intended_use"]
    assert load_model(tmp_path / "m").embed(np.ones((2, 32))).shape == (2, 32)


def test_a_run_is_read_as_if_it_were_exported(run: Path, tmp_path: Path) -> None:
    card = export_run(run, tmp_path / "m")
    model = load_model(run)
    now = model.card.facts.pop("exported")  # each says when it was made
    assert now >= card.facts.pop("exported")
    assert model.card == card
    inputs = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    assert np.array_equal(model.embed(inputs), load_model(tmp_path / "m").embed(inputs))


def test_other_weights_of_a_run(run: Path, tmp_path: Path) -> None:
    all_weights = []
    for weights in ("last", "average", "ema"):
        card = export_run(run, tmp_path / weights, weights=weights, name=weights)
        assert (card.name, card.facts["weights"]) == (weights, weights)
        all_weights.append(weights_of(tmp_path / weights))
    assert not equal(all_weights[0], all_weights[1])
    assert not equal(all_weights[1], all_weights[2])
    steps = sorted((run / "checkpoints").iterdir())
    export_run(steps[0], tmp_path / "first")
    assert not equal(weights_of(tmp_path / "first"), all_weights[0])


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint"):
        export_run(tmp_path, tmp_path / "m")
    with pytest.raises(ConfigError, match="one of last, average, ema"):
        export_run(run, tmp_path / "m", weights="best")
    short = tmp_path / "short"
    train(tiny_recipe("run.max_steps=1"), short, device="cpu")
    with pytest.raises(ConfigError, match=r"average\.safetensors does not exist"):
        export_run(short, tmp_path / "m", weights="average")
    weights = short / "checkpoints" / "step-000001" / "backbone.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        export_run(short, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_images_and_computed_data_have_their_shapes() -> None:
    recipe = tiny_recipe("data.options.shape=[3, 16, 16]")
    assert input_of(recipe) == ("images", (3, 16, 16))
    pictures = tiny_recipe("data.kind=images", "data.path=faces", "data.options=null")
    assert input_of(pictures) == ("images", (3, 112, 112))
    small = tiny_recipe(
        "data.kind=images", "data.path=a", "data.options=null", "data.options.size=48"
    )
    assert input_of(small) == ("images", (3, 48, 48))
    sounds = tiny_recipe("data.kind=audio", "data.path=voices", "data.options=null")
    assert input_of(sounds) == ("audio", ())


def test_thresholds_come_from_a_result(run: Path, tmp_path: Path) -> None:
    card = export_run(run, tmp_path / "m")
    own = synthetic_result(card=card.to_texts(), protocol="LFW")
    other = synthetic_result(card={"weights_sha256": "ab" * 32})
    paths = write_results(tmp_path / "results", own, other)
    thresholds = add_thresholds(tmp_path / "m", paths[0])
    assert read_thresholds(tmp_path / "m" / THRESHOLDS) == thresholds
    assert read_card(tmp_path / "m").facts["tar_at_far_0.001"].endswith(" on LFW")
    found = load_model(tmp_path / "m").verify(np.ones(32), np.ones(32), far=1e-3)
    assert found.is_same
    assert found.score == pytest.approx(1.0)
    with pytest.raises(DataError, match="evaluate this model"):
        add_thresholds(tmp_path / "m", paths[1])
    assert read_thresholds(tmp_path / "m" / THRESHOLDS) == thresholds


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ("used", None, "sum"),
        ("not used", None, "none"),
        ("used", "sum", "sum"),
        (None, "sum", "sum"),
        ("unknown", "none", "none"),
        (None, None, "does not say whether mirror images"),
        ("unknown", None, "does not say whether mirror images"),
        ("used", "none", "was made with flip sum, not none"),
    ],
)
def test_images_are_embedded_as_in_the_evaluation(
    tmp_path: Path, said: str | None, asked: str | None, expected: str
) -> None:
    facts = make_model(tmp_path / "m").to_texts()
    if said is not None:
        facts["mirror images"] = said
    (path,) = write_results(tmp_path / "results", synthetic_result(card=facts))
    if expected in ("none", "sum"):
        assert add_thresholds(tmp_path / "m", path, flip=asked).flip == expected
        assert load_model(tmp_path / "m").thresholds.flip == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            add_thresholds(tmp_path / "m", path, flip=asked)
        assert not (tmp_path / "m" / THRESHOLDS).exists()
