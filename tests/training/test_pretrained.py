"""Runs whose backbone starts with weights from a file, or from a model directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.runs import tiny_recipe
from qmargin.errors import ConfigError
from qmargin.evaluation.exporting import export_run
from qmargin.files import sha256_of
from qmargin.models.directory import BACKBONE
from qmargin.training.build import build_backbone
from qmargin.training.loop import train
from qmargin.training.process import Process
from qmargin.training.session import build_session


def other_backbone() -> nn.Module:
    """With weights that the recipe's seed does not give."""
    return build_backbone(tiny_recipe("seed=77"))


def in_file(folder: Path, kind: str) -> Path:
    weights = {name: value.clone() for name, value in other_backbone().state_dict().items()}
    if kind == "safetensors":
        save_file(weights, folder / "w.safetensors")
        return folder / "w.safetensors"
    if kind == "checkpoint":
        torch.save({"state_dict": {f"module.{key}": weights[key] for key in weights}}, folder / "w")
        return folder / "w"
    train(tiny_recipe("seed=77", "run.max_steps=1", "optimizer.lr=1e-30"), folder / "run")
    export_run(folder / "run", folder / "model")
    return folder / "model"


@pytest.mark.parametrize("kind", ["safetensors", "checkpoint", "directory"])
def test_a_backbone_starts_with_the_weights_of_a_file(kind: str, tmp_path: Path) -> None:
    path = in_file(tmp_path, kind)
    session = build_session(tiny_recipe(f"model.weights={path}"), Process())
    for name, value in other_backbone().named_parameters():
        torch.testing.assert_close(session.backbone.get_parameter(name), value, rtol=0, atol=1e-12)
    read = path / BACKBONE if kind == "directory" else path
    assert session.weights_sha256 == sha256_of(read)


def test_the_hash_is_in_the_journal_and_a_resumed_run_needs_no_file(tmp_path: Path) -> None:
    path = in_file(tmp_path, "safetensors")
    digest = sha256_of(path)
    settings = ("run.max_steps=4", "run.save_every_steps=2", f"model.weights={path}")
    train(tiny_recipe(*settings), tmp_path / "out", device="cpu")
    lines = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    (start,) = [record for record in map(json.loads, lines) if record["event"] == "start"]
    assert start["weights_sha256"] == digest
    path.unlink()
    outcome = train(tiny_recipe(*settings), tmp_path / "out", device="cpu", resume=True)
    assert outcome.step == 4
    with pytest.raises(ConfigError, match="there is no file"):
        train(tiny_recipe(*settings), tmp_path / "fresh", device="cpu")


def _other_shape(folder: Path) -> Path:
    weights = other_backbone().state_dict()
    name = next(name for name, value in weights.items() if value.dim() == 2)
    save_file({**weights, name: torch.zeros(3, 5)}, folder / "w.safetensors")
    return folder / "w.safetensors"


def _code(folder: Path) -> Path:
    torch.save({"state_dict": Dangerous()}, folder / "w.pt")
    return folder / "w.pt"


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must never be printed",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_other_shape, r"1 of another shape: .* \[3, 5\] instead of"),
        (_code, "is not opened"),
        (lambda folder: folder, "no model directory"),
        (lambda folder: folder / "none", "there is no file"),
    ],
)
def test_what_does_not_fit_is_refused(
    make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(f"model.weights={make(tmp_path)}")
    with pytest.raises(ConfigError, match=message):
        build_session(recipe, Process())
    assert "never" not in capsys.readouterr().out
