"""``load_model``: a model directory as an object that embeds and verifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.model_inputs import InputReader
from qmargin.evaluation.thresholds import FLIPS, Thresholds, read_thresholds
from qmargin.models.card import ModelCard
from qmargin.models.directory import THRESHOLDS, is_model_directory, load_backbone
from qmargin.training.process import find_device

BATCH_SIZE = 64


@dataclass(frozen=True)
class Verification:
    """What a comparison of two samples found.

    Attributes:
        score: Cosine of the two embeddings.
        far: False acceptance rate that the decision was asked for; None without a decision.
        threshold: Scores at or above it are of one identity; None if no score is enough.
        is_same: The decision; None where none was asked for.
        llr: Natural log-likelihood ratio of one identity against two; None where the model is not
            calibrated.
    """

    score: float
    far: float | None
    threshold: float | None
    is_same: bool | None
    llr: float | None


class Model:
    """A trained network with what belongs to it.

    Args:
        backbone: In evaluation mode, on its device.
        card: What it is and takes.
        thresholds: From its evaluation, if there was one.
        fit: What to do with images of another size, see ``load_model``.
    """

    def __init__(
        self,
        backbone: nn.Module,
        card: ModelCard,
        thresholds: Thresholds | None = None,
        *,
        fit: str = "auto",
    ) -> None:
        self.backbone, self.card, self.thresholds = backbone, card, thresholds
        self._reader = InputReader(card, fit=fit)
        tensors = chain(backbone.parameters(), backbone.buffers())
        self._device = next(tensors, torch.empty(0)).device

    @property
    def embedding_dim(self) -> int:
        """``d``."""
        return self.card.embedding_dim

    @torch.inference_mode()
    def embed(
        self, inputs: Any, *, batch_size: int = BATCH_SIZE, flip: str = "none"
    ) -> NDArray[np.float32]:
        """Embeddings ``[n, d]`` as the network gives them: not of unit length.

        Args:
            inputs: For images: a list of paths, Pillow images or arrays ``[H, W, 3]``, or one array
                ``[n, H, W, 3]``; RGB, uint8. For audio: a list of paths, or of arrays of samples in
                [-1, 1] at 16 kHz. For arrays: floats ``[n, ...]``.
            batch_size: Samples at a time.
            flip: ``"none"``, or ``"sum"`` to add the embedding of each image's mirror image.

        Raises:
            DataError: A sample cannot be read, or its embedding is not finite; the message names
                it.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        self._check_flip(flip)
        if isinstance(inputs, (str, bytes, Path)) or not hasattr(inputs, "__len__"):
            raise ConfigError(
                f"inputs is a {type(inputs).__name__}; give a list, as in model.embed([one])"
            )
        found = np.empty((len(inputs), self.embedding_dim), np.float32)
        for start, batch in self._batches(inputs, batch_size):
            embeddings = self._forward(batch, flip)
            is_bad = ~np.isfinite(embeddings).all(axis=1)
            if is_bad.any():
                raise DataError(
                    f"the embedding of sample {start + int(np.argmax(is_bad))} is not finite; look "
                    "at the sample, or at the weights of the model"
                )
            found[start : start + len(embeddings)] = embeddings
        return found

    def verify(self, first: Any, second: Any, *, far: float | None = None) -> Verification:
        """Compare two samples, made into embeddings as the model's own evaluation did.

        Args:
            first: One element of what ``embed`` takes.
            second: Another.
            far: Decide at the threshold of this false acceptance rate; None not to decide.

        Raises:
            ConfigError: A decision is asked for and the model has no thresholds.
            ProtocolError: Its evaluation did not measure this rate.
        """
        thresholds = self.thresholds
        if far is not None and thresholds is None:
            raise ConfigError(
                f"a decision at FAR {far:g} needs thresholds and {self.card.name} has none; add "
                "those of an evaluation with `qmargin export DIR --result result.json`"
            )
        point = None if far is None or thresholds is None else thresholds.at(far)
        flip = "none" if thresholds is None else thresholds.flip
        score = cosine(*self.embed([first, second], batch_size=2, flip=flip))
        threshold = None if point is None else point.threshold
        calibration = None if thresholds is None else thresholds.calibration
        return Verification(
            score=score,
            far=far,
            threshold=threshold,
            is_same=None if point is None else threshold is not None and score >= threshold,
            llr=None if calibration is None else calibration.scale * score + calibration.offset,
        )

    def _batches(self, inputs: Sequence[Any], batch_size: int) -> Iterator[tuple[int, Tensor]]:
        if self.card.modality == "audio":
            batch_size = 1  # whole recordings, which differ in length
        for start in range(0, len(inputs), batch_size):
            part = inputs[start : start + batch_size]
            yield start, self._reader.read(part, start=start).to(self._device)

    def _forward(self, batch: Tensor, flip: str) -> NDArray[np.float32]:
        embeddings: Tensor = self.backbone(batch)
        if flip == "sum":
            embeddings = embeddings + self.backbone(batch.flip(-1))
        found: NDArray[np.float32] = embeddings.float().cpu().numpy()
        return found

    def _check_flip(self, flip: str) -> None:
        if flip not in FLIPS:
            raise ConfigError(f"flip is {flip!r}; it must be one of {', '.join(FLIPS)}")
        if flip == "sum" and self.card.modality != "images":
            raise ConfigError(
                f"flip is 'sum' and {self.card.name} takes {self.card.modality}; only images "
                "have a mirror image"
            )


def load_model(
    directory: str | Path, *, device: torch.device | str = "cpu", fit: str = "auto"
) -> Model:
    """Read a model directory, as ``qmargin export`` makes it, or the newest weights of a run.

    Args:
        directory: With ``backbone.safetensors``, ``card.json`` and perhaps ``thresholds.json``; or
            the output folder of ``qmargin train``.
        device: Where the network runs; ``"auto"`` is a GPU where there is one.
        fit: What to do with images of another size than the model's: ``"exact"`` refuses them,
            ``"resize"`` scales them if they have the same proportions, ``"align"`` finds the face
            in every image, of whatever size, and aligns it, and ``"auto"`` does so for those of
            another size.

    Raises:
        ConfigError: The device cannot be used on this machine.
        DataError: Something in it is damaged or belongs to another model.

    Examples:
        >>> import tempfile
        >>> from qmargin.models.card import ModelCard
        >>> from qmargin.models.directory import write_model
        >>> from qmargin.models.registry import create_backbone
        >>> card = ModelCard("demo", "images", (3, 32, 32), "small_conv", 8)
        >>> weights = create_backbone("small_conv", embedding_dim=8).state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_model(f"{folder}/demo", weights=weights, card=card, recipe="")
        ...     model = load_model(f"{folder}/demo")
        >>> model.embed(np.zeros((2, 32, 32, 3), np.uint8)).shape
        (2, 8)
    """
    device = find_device(device)  # before gigabytes are read
    if _is_run(directory):
        return _model_of_run(directory, device=device, fit=fit)
    backbone, card = load_backbone(directory, device=device)
    path = Path(directory) / THRESHOLDS
    thresholds = read_thresholds(path) if path.is_file() else None
    if thresholds is not None and thresholds.weights_sha256 != card.weights_sha256:
        raise DataError(
            f"{path} belongs to the weights {thresholds.weights_sha256:.12}... and this model has "
            f"{card.weights_sha256:.12}...; evaluate this model and add its own thresholds"
        )
    return Model(backbone, card, thresholds, fit=fit)


def _is_run(path: str | Path) -> bool:
    from qmargin.training.starting import CHECKPOINTS

    return (Path(path) / CHECKPOINTS).is_dir() and not is_model_directory(path)


def _model_of_run(run: str | Path, *, device: torch.device | str, fit: str) -> Model:
    """As if it had been exported: the same name and hash of weights."""
    from qmargin.evaluation.exporting import export_run

    with TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        export_run(run, directory)
        return load_model(directory, device=device, fit=fit)


def cosine(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Cosine of two vectors, in float64.

    Examples:
        >>> cosine(np.array([4.0, 0.0]), np.array([3.0, 4.0]))
        0.6
    """
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    if norms == 0.0:
        raise DataError("an embedding is zero, which has no direction; look at the two samples")
    return float(first @ second) / norms
