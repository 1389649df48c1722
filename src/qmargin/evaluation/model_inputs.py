"""What a model is given, as a batch of its network's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.files import read_regular
from qmargin.models.card import ModelCard

if TYPE_CHECKING:
    from qmargin.data.detector import FaceDetector

FITS = ("auto", "exact", "resize", "align")
MAX_FILE_BYTES = 256 * 1024**2
SAMPLE_RATE = 16_000
LEAST_SAMPLES = 1_680  # nine frames, the fewest that speaker networks take
Pixels = NDArray[np.uint8]  # [H, W, 3]


class InputReader:
    """Makes batches of what a model is given.

    Args:
        card: Says what the model takes.
        fit: What to do with images of another size; see ``load_model``.
    """

    def __init__(self, card: ModelCard, *, fit: str = "auto") -> None:
        if fit not in FITS:
            raise ConfigError(f"fit is {fit!r}; it must be one of {', '.join(FITS)}")
        self.card, self.fit = card, fit

    def read(self, inputs: Sequence[Any], *, start: int = 0) -> Tensor:
        """Inputs of the network, ``[B, *card.input_shape]`` in float32.

        Args:
            inputs: As ``Model.embed`` takes them.
            start: Number of the first sample, for messages.

        Raises:
            DataError: A sample cannot be read; the message names it.
        """
        if self.card.modality == "arrays":
            return _arrays(inputs, self.card.input_shape)
        names = [_name(item, start + row) for row, item in enumerate(inputs)]
        named = list(zip(inputs, names, strict=True))
        if self.card.modality == "audio":
            return _recordings([_waveform(item, name) for item, name in named])
        from qmargin.data.faces import normalised

        images = np.stack([self._image(item, name) for item, name in named])  # [B, H, W, 3]
        return normalised(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))

    def _image(self, item: Any, name: str) -> Pixels:
        """One image at the model's size, ``[H, W, 3]``."""
        size = self.card.input_shape[1:]
        try:
            pixels = _pixels(item, name)
            if pixels.shape[:2] == size and self.fit != "align":
                return pixels
            if self.fit == "exact" or size[0] != size[1]:
                raise DataError(
                    f"{name} has {pixels.shape[1]} x {pixels.shape[0]} pixels and the model takes "
                    f"{size[1]} x {size[0]}; align the faces first, or choose another fit for a "
                    "square model"
                )
            upright = _pixels(item, name, upright=True)
        except CorruptSample as error:
            raise CorruptSample(f"{name} cannot be read: {error}") from error
        return self._refitted(upright, size[0], name)

    def _refitted(self, pixels: Pixels, size: int, name: str) -> Pixels:
        if self.fit == "resize":
            from qmargin.data.images import resize_image

            return resize_image(pixels, size)
        from qmargin.data.detector import align_found

        faces = self._detector.find(pixels)
        if not faces:
            raise DataError(
                f"no face was found in {name}; give a photo with a face towards the camera, or an "
                f"aligned face of {size} x {size} pixels"
            )
        return align_found(pixels, faces[0], size=size)  # the largest

    @cached_property
    def _detector(self) -> FaceDetector:
        from qmargin.data.detector import FaceDetector

        return FaceDetector()


def _name(item: Any, number: int) -> str:
    return repr(str(item)) if isinstance(item, (str, Path)) else f"sample {number}"


def _pixels(item: Any, name: str, *, upright: bool = False) -> Pixels:
    """An image as RGB uint8, from whatever holds it."""
    if isinstance(item, (str, Path)):
        from qmargin.data.images import decode_image

        return decode_image(_content(Path(item)), upright=upright)
    if hasattr(item, "convert") and hasattr(item, "getexif"):  # a Pillow image
        return _from_pillow(item, upright)
    pixels = np.asarray(item)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ShapeError(
            f"{name} is a {pixels.dtype} array of shape {list(pixels.shape)}; give RGB uint8 "
            "[H, W, 3]"
        )
    return pixels


def _from_pillow(image: Any, upright: bool) -> Pixels:
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image) if upright else image
    return np.array(turned.convert("RGB"))


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except DataError as error:
        raise CorruptSample(str(error)) from error


def _arrays(inputs: Sequence[Any], shape: tuple[int, ...]) -> Tensor:
    for item in inputs:
        if isinstance(item, str | Path):
            raise ConfigError(
                f"the model takes arrays of shape {list(shape)}, and {item} is a file; embed "
                "arrays in Python with load_model"
            )
    batch = np.stack([np.asarray(item, np.float32) for item in inputs])
    if batch.shape[1:] != shape:
        raise ShapeError(
            f"inputs have the shape {list(batch.shape[1:])} each and the model takes {list(shape)}"
        )
    return torch.from_numpy(batch)


def _recordings(waveforms: Sequence[NDArray[np.float32]]) -> Tensor:
    """Waveforms ``[B, samples]``, of which speaker networks make their own filter banks."""
    if len({len(waveform) for waveform in waveforms}) > 1:
        raise ShapeError("the recordings of a batch differ in length; embed them one at a time")
    return torch.from_numpy(np.stack(waveforms))


def _waveform(item: Any, name: str) -> NDArray[np.float32]:
    """Samples at 16 kHz; what is too short for a network is repeated."""
    if isinstance(item, (str, Path)):
        from qmargin.data.audio import decode_audio

        try:
            samples = decode_audio(item, sample_rate=SAMPLE_RATE)
        except CorruptSample as error:
            raise CorruptSample(f"{name} cannot be read: {error}") from error
    else:
        samples = np.asarray(item)
        if samples.ndim != 1 or samples.dtype.kind != "f" or not samples.size:
            raise ShapeError(
                f"{name} is a {samples.dtype} array of shape {list(samples.shape)}; give floating "
                f"samples [n] in [-1, 1] at {SAMPLE_RATE:,} Hz"
            )
    times = -(-LEAST_SAMPLES // len(samples))
    return np.tile(samples.astype(np.float32, copy=False), times)
