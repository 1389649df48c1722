"""A run that starts with the weights of another one, as fine-tuning does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from qmargin.errors import ConfigError
from qmargin.heads.classifier import MarginClassifier
from qmargin.training.averaging import AVERAGE
from qmargin.training.checkpoint import Checkpoint, newest, open_checkpoint, read_backbone
from qmargin.training.manifest import MANIFEST
from qmargin.training.resharding import read_class_rows
from qmargin.training.starting import CHECKPOINTS
from qmargin.training.state import PROTOTYPES
from qmargin.training.tensor_files import read_tensors


def load_weights_(backbone: nn.Module, head: MarginClassifier, source: str | Path) -> None:
    """Put the backbone of a run, averaged where it wrote an average, and its prototypes in.

    Args:
        backbone: Of the new run.
        head: Of the new run; it takes the rows of its own classes.
        source: Output folder of the other run, or one of its checkpoints, whose own weights are
            taken.

    Raises:
        ConfigError: There is no such run, or its network or number of classes is another.
    """
    source = Path(source).expanduser()
    checkpoint = _checkpoint(source)
    num_classes = checkpoint.manifest.num_classes
    if num_classes != head.num_classes:
        raise ConfigError(
            f"run.start_from {source} has {num_classes:,} classes and this run has "
            f"{head.num_classes:,}; train on the same identities, of speech with "
            "data.options.keep_speed_classes if that run changed speeds"
        )
    average = source / AVERAGE
    weights = read_tensors(average) if average.is_file() else read_backbone(checkpoint)
    rows = read_class_rows(checkpoint, head.shard.start, head.shard.stop)
    try:
        backbone.load_state_dict(weights)
        with torch.no_grad():
            head.prototypes.copy_(rows[PROTOTYPES])
    except RuntimeError as error:
        raise ConfigError(
            f"run.start_from {source} is of another network ({error}); give model the options "
            "that it has there"
        ) from error


def _checkpoint(source: Path) -> Checkpoint:
    if (source / MANIFEST).is_file():
        return open_checkpoint(source)
    found = newest(source / CHECKPOINTS).checkpoint
    if found is None:
        raise ConfigError(
            f"run.start_from is {source}, where no run has saved a checkpoint; give the output "
            "folder of `qmargin train`"
        )
    return found
