"""Uploaded files to samples: limits, decoding by the package's readers, and checks."""

from __future__ import annotations

import base64
import binascii
import copy
import threading
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from qmargin.data.images import MAX_PIXELS, encode_image
from qmargin.errors import BackendError, ConfigError, DataError
from qmargin.evaluation.model import SAMPLE_RATE, Inputs, Model
from qmargin.models.features import FilterBank

MEBIBYTE = 1 << 20
SILENCE = 1e-3  # largest sample of a silent recording, 60 dB below full scale
MOST_COLUMNS = 600  # of the drawing of a filter bank
NUM_PEAKS = 400  # of the drawing of a waveform
KINDS = {"images": "pictures", "audio": "recordings"}
_A = {"images": "a picture", "audio": "a recording"}
FORMATS = {
    "images": "a JPEG, PNG, WebP, BMP or PPM file",
    "audio": "a WAV, FLAC, Ogg, MP3 or AIFF file",
}
_PICTURES = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG", "PNG"), (b"BM", "BMP"), (b"P6", "PPM"))
_SOUNDS = ((b"fLaC", "FLAC"), (b"OggS", "Ogg"), (b"ID3", "MP3"), (b"FORM", "AIFF"))


@dataclass(frozen=True)
class Limits:
    """Limits of inputs."""

    upload_bytes: int = 32 * MEBIBYTE  # of a request
    pixels: int = MAX_PIXELS
    seconds: float = 60.0
    batch: int = 64  # files of a request

    def __post_init__(self) -> None:
        for name in ("upload_bytes", "pixels", "seconds", "batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"the limit {name} is {getattr(self, name)}; give more than 0")


class Sample(NamedTuple):
    """A decoded file, on request with its view by the model."""

    array: NDArray[Any]  # [H, W, 3] uint8, or [n] float32
    shown: dict[str, Any] | None


class Reader:
    """Decodes base64 texts; every thread has its own face detector."""

    def __init__(self, model: Model, limits: Limits, *, fit: str = "auto") -> None:
        self.card, self.limits, self.fit = model.card, limits, fit
        if self.card.modality not in KINDS:
            raise ConfigError(
                f"{self.card.name} takes {self.card.modality}, not files; serve a model "
                "of pictures or of recordings"
            )
        # The reader's limit is stricter; a warning would reveal an input.
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._local = threading.local()
        banks = (part for part in model.backbone.modules() if isinstance(part, FilterBank))
        found = copy.deepcopy(next(banks, None))  # the model's own may be on a GPU
        self._bank = (found or FilterBank(subtract_mean=True)).cpu().eval()
        self.new_inputs()  # refuses an unknown fit at once
        self.note = self._without_detector()

    def _without_detector(self) -> str | None:
        """Which pictures cannot be used because no faces can be found; None if all can."""
        if self.card.modality != "images" or self.fit not in ("auto", "align"):
            return None
        from qmargin.data.alignment import why_no_detector

        reason, size = why_no_detector(), self.card.input_shape[-1]
        if reason is None:
            return None
        remedy = f"{reason}; install the extra qmargin[detector], or start with --fit resize"
        if self.fit == "align":
            raise BackendError(f"--fit align finds the face in every picture, and {remedy}")
        return f"only pictures of {size} x {size} pixels can be used: {remedy}"

    def new_inputs(self) -> Inputs:
        """Decoder of one thread."""
        limits = self.limits
        return Inputs(self.card, fit=self.fit, max_pixels=limits.pixels, max_seconds=limits.seconds)

    def read(self, text: str, name: str, *, show: bool = False) -> Sample:
        """The sample in a base64 text; errors say ``name``."""
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(
                f"{name} is not base64 ({error}); encode the bytes of the file"
            ) from error
        return self.read_bytes(content, name, show=show)

    def read_bytes(self, content: bytes, name: str, *, show: bool = False) -> Sample:
        """The same for the content of a file."""
        if not content:
            raise DataError(f"{name} has zero bytes; give {FORMATS[self.card.modality]}")
        other = next(kind for kind in KINDS if kind != self.card.modality)
        found = format_of(content)
        if found is not None and found[0] == other:
            raise DataError(
                f"{name} is {_A[other]} ({found[1]}) and {self.card.name} compares "
                f"{KINDS[self.card.modality]}; give {FORMATS[self.card.modality]}"
            )
        if not hasattr(self._local, "inputs"):
            self._local.inputs = self.new_inputs()
        try:
            array = self._local.inputs.sample(content, name)
        except BackendError as error:
            raise BackendError(f"{name} cannot be used: {self.note}") from error
        self._check_content(array, name)
        return Sample(array, self._shown(array) if show else None)

    def _check_content(self, array: NDArray[Any], name: str) -> None:
        """Refuse silent or single-coloured inputs, which a network would embed, too."""
        if self.card.modality == "audio":
            loudest = float(np.abs(array).max())
            if loudest < SILENCE:
                raise DataError(
                    f"{name} is silent: its largest sample is {loudest:.2g} of full scale, and at "
                    f"least {SILENCE:g} is needed; check the microphone and record again"
                )
        elif (array == array[0, 0]).all():
            colour = ", ".join(map(str, array[0, 0].tolist()))
            raise DataError(f"{name} has a single colour ({colour}); choose a picture of a face")

    def _shown(self, array: NDArray[Any]) -> dict[str, Any]:
        if self.card.modality == "images":
            return {"image": _png(array)}
        with torch.inference_mode():
            bank = self._bank(torch.from_numpy(array)[None])[0].numpy()  # [frames, bins]
        return {
            "seconds": round(len(array) / SAMPLE_RATE, 3),
            "peaks": _peaks(array),
            "filter_bank": _png(_grey(bank)),
        }


def format_of(content: bytes) -> tuple[str, str] | None:
    """Modality and format of a file by its first bytes; None for others."""
    if content[:4] == b"RIFF":
        return {b"WAVE": ("audio", "WAV"), b"WEBP": ("images", "WebP")}.get(content[8:12])
    for modality, known in (("images", _PICTURES), ("audio", _SOUNDS)):
        for start, name in known:
            if content.startswith(start):
                return modality, name
    return None


def _png(pixels: NDArray[np.uint8]) -> str:
    return base64.b64encode(encode_image(pixels, format="PNG")).decode("ascii")


def _peaks(samples: NDArray[np.float32]) -> list[list[float]]:
    """Smallest and largest sample of each of ``NUM_PEAKS`` parts."""
    parts = np.array_split(samples, min(NUM_PEAKS, len(samples)))
    return [[round(float(part.min()), 4), round(float(part.max()), 4)] for part in parts]


def _grey(bank: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Energies ``[frames, bins]`` as a picture, low frequencies at the bottom."""
    parts = np.array_split(bank, min(MOST_COLUMNS, len(bank)))
    columns = np.stack([part.mean(axis=0) for part in parts], axis=1)[::-1]  # [bins, columns]
    low, high = np.percentile(columns, (5.0, 99.5))
    shares = np.clip((columns - low) / max(float(high - low), 1e-6), 0.0, 1.0)
    picture: NDArray[np.uint8] = np.rint(255.0 * shares).astype(np.uint8)
    return picture
