"""Runs that start with the weights of another one."""

from pathlib import Path

import pytest
import torch

from helpers.runs import tiny_recipe
from qmargin.errors import ConfigError
from qmargin.training.averaging import AVERAGE
from qmargin.training.build import build_backbone, build_head
from qmargin.training.checkpoint import newest, read_backbone
from qmargin.training.loop import train
from qmargin.training.start_weights import load_weights_
from qmargin.training.tensor_files import read_tensors


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    recipe = tiny_recipe("run.max_steps=4", "run.save_every_steps=2", "run.average_last=2")
    train(recipe, folder, device="cpu")
    return folder


def test_a_run_starts_with_the_average_and_the_prototypes(first: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"run.start_from={first}", "optimizer.lr=1e-30", "run.max_steps=1")
    outcome = train(recipe, tmp_path, device="cpu")
    assert outcome.step == 1
    found = newest(tmp_path / "checkpoints").checkpoint
    assert found is not None
    average = read_tensors(first / AVERAGE)
    for name, value in read_backbone(found).items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(value, average[name], rtol=0, atol=1e-12)


def test_a_checkpoint_gives_its_own_weights(first: Path) -> None:
    checkpoint = newest(first / "checkpoints").checkpoint
    assert checkpoint is not None
    recipe = tiny_recipe()
    backbone, head = build_backbone(recipe), build_head(recipe)
    load_weights_(backbone, head, checkpoint.path)
    expected = read_backbone(checkpoint)
    assert all(torch.equal(value, expected[name]) for name, value in backbone.state_dict().items())
    assert head.prototypes.shape == (head.num_classes, recipe.model.embedding_dim)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.num_classes=150"], "has 200 classes and this run has 150"),
        (["model.embedding_dim=8"], "is of another network"),
    ],
)
def test_other_networks_and_classes_are_refused(
    first: Path, settings: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny_recipe(f"run.start_from={first}", *settings), tmp_path, device="cpu")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="where no run has saved a checkpoint"):
        train(tiny_recipe(f"run.start_from={tmp_path / 'none'}"), tmp_path, device="cpu")
