"""Short training runs, datasets with faults, and what is left of a run on the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import CorruptSample
from qmargin.models import list_backbones, register_backbone
from qmargin.recipes import get_recipe
from qmargin.training.checkpoint import open_checkpoint, step_name
from qmargin.training.recipe import ModelPart, Recipe
from qmargin.training.recipe_files import apply_settings

MARK = 1e6  # in an input, makes the gradient of the batch infinite


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, is_marked: Tensor) -> Tensor:
        ctx.save_for_backward(is_marked)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (is_marked,) = ctx.saved_tensors
        return torch.where(is_marked, torch.inf, gradient), None


class Fragile(nn.Module):
    """A network with everything that a resume or a skipped step can get wrong: running statistics,
    dropout, and a gradient that overflows on demand.
    """

    def __init__(self, embedding_dim: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 48), nn.BatchNorm1d(48)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(48, embedding_dim)

    def forward(self, vectors: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(vectors.clamp(-9.0, 9.0))).relu())
        return _Explode.apply(self.last(hidden), (vectors == MARK).any())


def tiny_recipe(*settings: str) -> Recipe:
    """The debug recipe, with fewer steps and samples."""
    short = ("run.max_steps=20", "run.save_every_steps=10", "run.log_every=1", "run.keep=9")
    return apply_settings(get_recipe("debug"), (*short, *settings))


def fragile_recipe(*settings: str) -> Recipe:
    """The same with the backbone ``fragile``."""
    if "fragile" not in list_backbones():
        register_backbone("fragile", Fragile)
    recipe = tiny_recipe(*settings)
    return replace(recipe, model=ModelPart("fragile", recipe.model.embedding_dim))


def identities(**changes: Any) -> SyntheticIdentities:
    """The debug recipe's own data."""
    part = get_recipe("debug").data
    return SyntheticIdentities(**{"num_classes": 200, **part.options, **changes})


@dataclass(frozen=True)
class FaultyIdentities:
    """Identities of which some samples are bad."""

    bad: Sequence[int] = ()
    value: float | None = None  # read instead of the sample's own; None for a corrupt sample
    labels_changed: dict[int, int] = field(default_factory=dict)
    error: type[Exception] = CorruptSample
    inner: SyntheticIdentities = field(default_factory=identities)

    @property
    def num_classes(self) -> int:
        return self.inner.num_classes

    @property
    def labels(self) -> np.ndarray:
        labels = self.inner.labels.copy()
        for index, label in self.labels_changed.items():
            labels[index] = label
        return labels

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        inputs, label = self.inner.read(index, seed)
        if index in self.bad:
            if self.value is None:
                raise self.error(f"sample {index} is damaged")
            inputs[0] = self.value
        return inputs, label

    def sample_id(self, index: int) -> str:
        return f"sample-{index}"

    def source(self, index: int) -> str:
        return f"train.lst, row {index}"


def saved_files(out: Path, step: int) -> dict[str, str]:
    """Hash of every file of tensors of a checkpoint."""
    manifest = open_checkpoint(Path(out) / "checkpoints" / step_name(step), check=False).manifest
    return {
        name: entry.sha256
        for name, entry in manifest.files.items()
        if name.endswith(".safetensors")
    }


def events(out: Path, *names: str) -> list[dict[str, Any]]:
    """Events of a journal, those of some kinds if any are named."""
    lines = (Path(out) / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if not names or record["event"] in names]


def losses(out: Path) -> dict[int, float]:
    """Losses by step."""
    return {record["step"]: record["loss"] for record in events(out, "step")}


def status(out: Path) -> dict[str, Any]:
    """The status file."""
    found: dict[str, Any] = json.loads((Path(out) / "status.json").read_text(encoding="utf-8"))
    return found


def wait_for_step(process: Any, out: Path, step: int, errors: Callable[[], str]) -> None:
    """Wait until the journal of a run has a step; fail with its errors if the process ends."""
    deadline, path = time.monotonic() + 60, Path(out) / "journal.jsonl"
    while not path.exists() or f'"step": {step}, "total_steps"' not in path.read_text():
        assert process.poll() is None and time.monotonic() < deadline, errors()
        time.sleep(0.01)
