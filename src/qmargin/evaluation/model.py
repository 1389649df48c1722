"""``load_model``: a model directory as an object that embeds and verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qmargin.data.audio import MAX_SECONDS
from qmargin.data.images import MAX_PIXELS
from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.export import FLIPS, Thresholds, export_run, read_thresholds
from qmargin.evaluation.result import RunInfo, read_run
from qmargin.files import read_regular
from qmargin.models.directory import (
    PIXELS,
    RUN,
    THRESHOLDS,
    ModelCard,
    is_model_directory,
    load_backbone,
)
from qmargin.training.distributed import find_device

if TYPE_CHECKING:
    from qmargin.data.alignment import FaceDetector


FITS = ("auto", "exact", "resize", "align")
MAX_FILE_BYTES = 256 * 1024**2
SAMPLE_RATE = 16_000
Pixels = NDArray[np.uint8]  # [H, W, 3]


class Inputs:
    """Makes the input batches of a model from samples; ``fit`` as in ``load_model``.

    ``max_pixels`` and ``max_seconds`` refuse larger files by their headers.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        fit: str = "auto",
        max_pixels: int = MAX_PIXELS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        if fit not in FITS:
            raise ConfigError(f"fit is {fit!r}; it must be one of {', '.join(FITS)}")
        self.card, self.fit = card, fit
        self.max_pixels, self.max_seconds = max_pixels, max_seconds

    def sample(self, item: Any, name: str) -> NDArray[Any]:
        """One image ``[H, W, 3]`` or one waveform ``[n]``, as the network sees it.

        ``item`` is a path, the bytes of a file, a Pillow image or an array; errors say ``name``.
        """
        if self.card.modality == "audio":
            return self._waveform(item, name)
        return self._image(item, name)

    def read(self, inputs: Sequence[Any], *, start: int = 0) -> Tensor:
        """Inputs of the network in float32; errors name the file, or count from ``start``."""
        named = [
            (item, repr(str(item)) if isinstance(item, str | Path) else f"sample {number}")
            for number, item in enumerate(inputs, start)
        ]
        if self.card.modality == "audio":  # one at a time: recordings differ in length
            waveforms = [self._waveform(item, name) for item, name in named]
            if len({len(waveform) for waveform in waveforms}) > 1:
                raise ShapeError("recordings of a batch differ in length; embed them one at a time")
            return torch.from_numpy(np.stack(waveforms))
        if self.card.modality == "images":
            from qmargin.data.faces import normalised

            batch = np.stack([self._image(item, name) for item, name in named])  # [B, H, W, 3]
            pixels = normalised(torch.from_numpy(batch.transpose(0, 3, 1, 2).copy()))
            low, high = PIXELS[self.card.pixels]
            return pixels if low == -1.0 else pixels.add_(1.0).mul_((high - low) / 2.0).add_(low)
        return torch.from_numpy(self._arrays(inputs))

    def _arrays(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        shape = list(self.card.input_shape)
        for item in inputs:
            if isinstance(item, str | Path):
                raise ConfigError(
                    f"{item} is a file and the model takes arrays of shape {shape}; "
                    "embed arrays in Python with load_model"
                )
        arrays = [np.asarray(item, np.float32) for item in inputs]
        for array in arrays:
            if list(array.shape) != shape:
                raise ShapeError(f"an input has shape {list(array.shape)}; the model takes {shape}")
        return np.stack(arrays)

    def _image(self, item: Any, name: str) -> Pixels:
        """One image at the model's size, ``[H, W, 3]``."""
        height, width = self.card.input_shape[1:]
        try:
            pixels = self._pixels(item, name)
            if pixels.shape[:2] == (height, width) and self.fit != "align":
                return pixels
            if self.fit == "exact" or height != width:
                raise DataError(
                    f"{name} has {pixels.shape[1]} x {pixels.shape[0]} pixels and the model takes "
                    f"{width} x {height}; align the faces first, or choose another fit for a "
                    "square model"
                )
            del pixels  # of a large photo, one copy at a time
            upright = self._pixels(item, name, upright=True)
        except CorruptSample as error:
            raise CorruptSample(f"{name} cannot be read: {error}") from error
        if self.fit == "resize":
            from qmargin.data.images import resize_image

            return resize_image(upright, height)
        from qmargin.data.alignment import align_found

        faces = self._detector.find(upright)
        if not faces:
            raise DataError(
                f"no face was found in {name}; give a photo with a face towards the camera, or an "
                f"aligned face of {height} x {height} pixels"
            )
        return align_found(upright, faces[0], size=height)  # the largest

    @cached_property
    def _detector(self) -> FaceDetector:
        from qmargin.data.alignment import FaceDetector

        return FaceDetector()

    def _pixels(self, item: Any, name: str, *, upright: bool = False) -> Pixels:
        """An image as RGB uint8, from a file, its bytes, a Pillow image or an array."""
        if isinstance(item, str | Path | bytes):
            from qmargin.data.images import decode_image

            try:
                content = item if isinstance(item, bytes) else read_regular(item, MAX_FILE_BYTES)
            except DataError as error:
                raise CorruptSample(str(error)) from error
            return decode_image(content, upright=upright, max_pixels=self.max_pixels)
        if hasattr(item, "convert") and hasattr(item, "getexif"):
            from PIL import ImageOps

            return np.array((ImageOps.exif_transpose(item) if upright else item).convert("RGB"))
        pixels = np.asarray(item)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ShapeError(
                f"{name} is a {pixels.dtype} array {pixels.shape}; give RGB uint8 [H, W, 3]"
            )
        return pixels

    def _waveform(self, item: Any, name: str) -> NDArray[np.float32]:
        """Samples at 16 kHz; recordings that are too short for a network are repeated."""
        from qmargin.data.audio import decode_audio, repeated

        if isinstance(item, str | Path | bytes):
            try:
                samples = decode_audio(item, sample_rate=SAMPLE_RATE, max_seconds=self.max_seconds)
            except CorruptSample as error:
                raise CorruptSample(f"{name} cannot be read: {error}") from error
        else:
            samples = np.asarray(item)
            if samples.ndim != 1 or samples.dtype.kind != "f" or not samples.size:
                raise ShapeError(
                    f"{name} is a {samples.dtype} array {samples.shape}; give floats [n] at 16 kHz"
                )
        return repeated(samples.astype(np.float32, copy=False))


@dataclass(frozen=True)
class Verification:
    """Outcome of a comparison of two samples."""

    score: float  # cosine of the two embeddings
    far: float | None  # of the requested decision
    threshold: float | None  # scores at or above it are of one identity; None: no score is enough
    is_same: bool | None  # the decision; None where none was requested
    llr: float | None  # natural log-likelihood ratio; None where the model is not calibrated


class Model:
    """A trained network with its card, thresholds and training run, as ``load_model`` reads it."""

    def __init__(
        self,
        backbone: nn.Module,
        card: ModelCard,
        thresholds: Thresholds | None = None,
        run: RunInfo | None = None,
        *,
        fit: str = "auto",
    ) -> None:
        self.backbone, self.card, self.thresholds, self.run = backbone, card, thresholds, run
        self._inputs = Inputs(card, fit=fit)
        tensors = chain(backbone.parameters(), backbone.buffers())
        self._device = next(tensors, torch.empty(0)).device

    @property
    def embedding_dim(self) -> int:
        """``d``."""
        return self.card.embedding_dim

    @torch.inference_mode()
    def embed(
        self, inputs: Any, *, batch_size: int = 64, flip: str = "none"
    ) -> NDArray[np.float32]:
        """Compute embeddings ``[n, d]``, the outputs of the network, not of unit length.

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
        if flip not in FLIPS:
            raise ConfigError(f"flip is {flip!r}; it must be one of {', '.join(FLIPS)}")
        if flip == "sum" and self.card.modality != "images":
            raise ConfigError(
                f"{self.card.name} takes {self.card.modality}; only images have a mirror image"
            )
        if isinstance(inputs, (str, bytes, Path)) or not hasattr(inputs, "__len__"):
            raise ConfigError(f"inputs is a {type(inputs).__name__}; give a list, as in [one]")
        found = np.empty((len(inputs), self.embedding_dim), np.float32)
        step = 1 if self.card.modality == "audio" else batch_size
        for start in range(0, len(inputs), step):
            part = inputs[start : start + step]
            batch = self._inputs.read(part, start=start).to(self._device)
            embeddings: Tensor = self.backbone(batch)
            if flip == "sum":
                embeddings = embeddings + self.backbone(batch.flip(-1))
            rows = embeddings.float().cpu().numpy()
            is_bad = ~np.isfinite(rows).all(axis=1)
            if is_bad.any():
                raise DataError(
                    f"the embedding of sample {start + int(np.argmax(is_bad))} is not finite; look "
                    "at the sample, or at the weights of the model"
                )
            found[start : start + len(rows)] = rows
        return found

    def verify(self, first: Any, second: Any, *, far: float | None = None) -> Verification:
        """Compare two samples, embedded as in the model's own evaluation.

        Args:
            first: One element of the inputs of ``embed``.
            second: A second one.
            far: Decide at the threshold of this false acceptance rate; None not to decide.

        Raises:
            ConfigError: A decision is requested and the model has no thresholds.
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


def load_model(
    directory: str | Path, *, device: torch.device | str = "cpu", fit: str = "auto"
) -> Model:
    """Load a model directory of ``qmargin export``, or the newest weights of a training run.

    Args:
        directory: With ``backbone.safetensors``, ``card.json`` and perhaps ``thresholds.json``; or
            the output folder of ``qmargin train``.
        device: Where the network runs; ``"auto"`` takes a GPU if there is one.
        fit: What to do with images that do not have the model's size: ``"exact"`` refuses them,
            ``"resize"`` scales them if they have the same proportions, ``"align"`` finds and aligns
            the face in every image, whatever its size, and ``"auto"`` does so for images of a
            different size.

    Raises:
        ConfigError: The device cannot be used on this machine.
        DataError: Something in it is damaged or belongs to another model.

    Examples:
        >>> import tempfile
        >>> from qmargin.models.directory import ModelCard, write_model
        >>> from qmargin.models import create_backbone
        >>> card = ModelCard("demo", "images", (3, 32, 32), "small_conv", 8)
        >>> weights = create_backbone("small_conv", embedding_dim=8).state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_model(f"{folder}/demo", weights=weights, card=card, recipe="")
        ...     model = load_model(f"{folder}/demo")
        >>> model.embed(np.zeros((2, 32, 32, 3), np.uint8)).shape
        (2, 8)
    """
    from qmargin.training.checkpoint import CHECKPOINTS

    device = find_device(device)  # before gigabytes are read
    folder = Path(directory)
    if (folder / CHECKPOINTS).is_dir() and not is_model_directory(folder):
        with TemporaryDirectory() as temporary:
            export_run(folder, Path(temporary) / "model")
            return load_model(Path(temporary) / "model", device=device, fit=fit)
    backbone, card = load_backbone(folder, device=device)
    path, run = folder / THRESHOLDS, None
    thresholds = read_thresholds(path) if path.is_file() else None
    if thresholds is not None and thresholds.weights_sha256 != card.weights_sha256:
        raise DataError(
            f"{path} belongs to the weights {thresholds.weights_sha256:.12}... and this model has "
            f"{card.weights_sha256:.12}...; evaluate this model and add its own thresholds"
        )
    if (folder / RUN).is_file():
        run = replace(read_run(folder / RUN), checkpoint_sha256=card.weights_sha256)
    return Model(backbone, card, thresholds, run, fit=fit)


def cosine(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Cosine of two vectors, in float64."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    if norms == 0.0:
        raise DataError("an embedding is zero, which has no direction; check both samples")
    return float(first @ second) / norms
