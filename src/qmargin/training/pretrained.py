"""A backbone that starts with weights from a file instead of fresh ones."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from qmargin.errors import ConfigError, DataError
from qmargin.files import sha256_of
from qmargin.models.directory import BACKBONE, is_model_directory
from qmargin.models.weights import load_weights_


def load_pretrained_(backbone: nn.Module, source: str | Path) -> str:
    """Put the weights of a file or model directory into a backbone; all of them must fit.

    Args:
        backbone: Of the run.
        source: A model directory, a safetensors file, or a PyTorch checkpoint, which is read
            without running what is in it (``qmargin.models.weights``).

    Returns:
        The SHA-256 of the file, for the record.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it is of another network.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not is_model_directory(path):
            raise ConfigError(
                f"model.weights is {source}, which is no model directory; give one, or a file of "
                "weights; a run is what run.start_from takes"
            )
        path = path / BACKBONE
    try:
        load_weights_(backbone, path)
    except DataError as error:
        raise ConfigError(f"model.weights cannot be used: {error}") from error
    return sha256_of(path)
