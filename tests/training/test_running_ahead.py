"""A host that launches a whole step before it looks at it: on one GPU, and here by force."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.runs import FaultyIdentities, events, fragile_recipe, saved_files, tiny_recipe
from qmargin.data.order import GlobalOrder
from qmargin.heads.classifier import MarginClassifier
from qmargin.training.checkpoint import step_name
from qmargin.training.loop import train
from qmargin.training.recipe import ModelPart
from qmargin.training.session import Session

SETTINGS = ("run.max_steps=6", "head.path=sparse")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "runs_ahead", True)


def test_the_same_bits_by_both_ways(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(fragile_recipe(*SETTINGS), tmp_path / "plain", device="cpu")
    request.getfixturevalue("ahead")
    train(fragile_recipe(*SETTINGS), tmp_path / "ahead", device="cpu")
    verify, calls = MarginClassifier.verify, []

    def sometimes(head: MarginClassifier) -> bool:
        calls.append(head.is_verified)
        if not head.is_verified and len(calls) % 2:  # as if the lists had been too short
            head.discard()
            return False
        return verify(head)

    monkeypatch.setattr(MarginClassifier, "verify", sometimes)
    train(fragile_recipe(*SETTINGS), tmp_path / "again", device="cpu")
    assert True in calls and False in calls
    plain = saved_files(tmp_path / "plain", 6)
    assert plain == saved_files(tmp_path / "ahead", 6) == saved_files(tmp_path / "again", 6)


@pytest.mark.gpu
def test_an_input_that_is_not_finite_is_skipped_on_a_gpu(tmp_path: Path) -> None:
    bad = int(GlobalOrder(3200, seed=0, batch_size=64).batch(5)[7])
    for name, steps in (("before", 5), ("after", 6)):
        recipe = fragile_recipe(f"run.max_steps={steps}", "head.path=sparse")
        dataset = FaultyIdentities([bad], float("nan"))
        outcome = train(recipe, tmp_path / name, dataset=dataset, device="cuda")
    assert (outcome.step, outcome.num_skipped) == (6, 1)
    (skip,) = events(tmp_path / "after", "skip")
    assert skip["step"] == 5 and f"sample-{bad}" in skip["samples"]  # the norm spoils them all
    assert saved_files(tmp_path / "before", 5) == saved_files(tmp_path / "after", 6)


@pytest.mark.gpu
def test_a_gpu_ends_where_it_ends_without_running_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.cuda.is_available()
    train(fragile_recipe(*SETTINGS), tmp_path / "ahead", device="cuda")
    monkeypatch.setattr(Session, "runs_ahead", False)
    train(fragile_recipe(*SETTINGS), tmp_path / "plain", device="cuda")
    assert saved_files(tmp_path / "ahead", 6) == saved_files(tmp_path / "plain", 6)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pictures_go_on_where_they_stopped(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizers take weights, gradients and momenta of one layout only."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = ["precision.channels_last=true", "run.save_every_steps=3", "run.max_steps=6"]
    if kind == "adamw":
        settings += ["optimizer.kind=adamw", "optimizer.lr=1e-3", "head.update=torch"]
    recipe = tiny_recipe(*settings, "data.options.shape=[3, 16, 16]")
    whole = replace(recipe, model=ModelPart("small_conv", recipe.model.embedding_dim))
    train(whole, tmp_path / "whole", device=device)
    train(whole, tmp_path / "halves", device=device)
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-000006")
    train(whole, tmp_path / "halves", device=device, resume=True)
    if device == "cpu":
        assert saved_files(tmp_path / "halves", 6) == saved_files(tmp_path / "whole", 6)
    halves, once = (saved_tensors(tmp_path / name, 6) for name in ("halves", "whole"))
    assert halves.keys() == once.keys()
    for name, values in once.items():  # kernels of a GPU may add in any order
        size = float(values.abs().max())
        torch.testing.assert_close(halves[name], values, rtol=0, atol=1e-4 * size, msg=name)


def saved_tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / step_name(step)
    return {
        f"{path.name}: {name}": values
        for path in sorted(folder.glob("*.safetensors"))
        for name, values in load_file(path).items()
    }
