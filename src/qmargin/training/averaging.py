"""Averages of weights: a moving one during training, and the mean of the last checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from qmargin.errors import CheckpointError, ConfigError, ShapeError
from qmargin.files import replacing
from qmargin.training.checkpoint import open_checkpoint, read_backbone
from qmargin.training.manifest import Checkpoint
from qmargin.training.tensor_files import write_tensors

AVERAGE = "average.safetensors"  # in the folder of a run, at its end
MOVING_AVERAGE = "ema.safetensors"


class MovingAverage:
    """Exponential moving average of a state dict.

    The first update copies; after it ``average = decay * average + (1 - decay) * value``. Tensors
    of floats are averaged, running statistics included, in float32 or better; counters are copied.

    Args:
        decay: Share of the average that an update keeps, at least 0 and below 1.

    Examples:
        >>> average = MovingAverage(decay=0.75)
        >>> average.update({"weight": torch.tensor([0.0])})
        >>> average.update({"weight": torch.tensor([4.0])})
        >>> average.tensors
        {'weight': tensor([1.])}
    """

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay is {decay}; it must be at least 0 and below 1")
        self.decay = float(decay)
        self.num_updates = 0
        self.tensors: dict[str, Tensor] = {}
        self._blend = get_ema_multi_avg_fn(self.decay)

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Take the next values, ``model.state_dict()``, in."""
        self.num_updates += 1
        if not self.tensors:
            self.tensors = {name: _wide(value).clone() for name, value in values.items()}
            return
        _check_alike(self.tensors, values)
        averages, floats = [], []
        for name, value in values.items():
            average = self.tensors[name]
            if average.is_floating_point():
                averages.append(average)
                floats.append(value.detach().to(average.dtype))
            else:
                average.copy_(value)
        if averages:
            self._blend(averages, floats, self.num_updates)

    def state_dict(self) -> dict[str, Any]:
        """A tree for ``CheckpointState.parts``."""
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "tensors": dict(self.tensors),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, device: Any = None) -> None:
        """Go on where ``state_dict`` was called; the decay stays that of this object."""
        self.num_updates = int(state["num_updates"])
        self.tensors = {
            name: tensor.to(device, copy=True) for name, tensor in state["tensors"].items()
        }


def average_checkpoints(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """Mean of the backbones of some checkpoints, accumulated in float64, one at a time.

    Tensors of floats are averaged, running statistics included; counters are those of the last.

    Args:
        checkpoints: In any order, of one model.

    Returns:
        A state dict in the dtypes of the checkpoints.
    """
    if not checkpoints:
        raise ConfigError("no checkpoints were given; an average needs at least one")
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    sums: dict[str, Tensor] = {}
    latest: dict[str, Tensor] = {}
    for checkpoint in ordered:
        latest = read_backbone(checkpoint)
        if not sums:
            sums = {name: torch.zeros_like(value).double() for name, value in latest.items()}
        _check_alike(sums, latest)
        for name, value in latest.items():
            sums[name] += value
    return {
        name: (sums[name] / len(ordered)).to(value.dtype) if value.is_floating_point() else value
        for name, value in latest.items()
    }


def write_weights(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict as one safetensors file that is whole or absent; an old one is replaced.

    Args:
        path: A file such as ``average.safetensors``.
        tensors: A state dict.
    """
    path = Path(path)
    try:
        with replacing(path) as temporary:
            write_tensors(temporary, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); free some space or choose "
            "another folder"
        ) from error


def write_averages(folder: Path, checkpoints: Sequence[Path], moving: MovingAverage | None) -> None:
    """Write what there is of weights for later use: mean of checkpoints, moving average."""
    if checkpoints:
        average = average_checkpoints([open_checkpoint(path) for path in checkpoints])
        write_weights(folder / AVERAGE, average)
    if moving is not None and moving.tensors:
        write_weights(folder / MOVING_AVERAGE, moving.tensors)


def _wide(value: Tensor) -> Tensor:
    """At least float32, where a decay of 0.9999 still moves the average."""
    if value.is_floating_point() and value.itemsize < 4:
        return value.detach().float()
    return value.detach()


def _check_alike(expected: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    changed = expected.keys() ^ values.keys()
    changed |= {
        name
        for name in expected.keys() & values.keys()
        if expected[name].shape != values[name].shape
    }
    if changed:
        raise ShapeError(
            f"{', '.join(sorted(changed)[:3])} differs between the states to average in name or "
            "shape; all of them must come from one model"
        )
