"""Recordings made by tests, and real speech where it is at hand."""

import io
from pathlib import Path

import numpy as np
import soundfile

from helpers.pictures import shared_data

FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}


def tone(seconds: float = 1.0, *, rate: int = 16000, hertz: float = 440.0) -> np.ndarray:
    """A quiet tone, rounded to 16 bits so that lossless formats return it exactly."""
    wave = 0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return (np.rint(wave * 32768) / 32768).astype(np.float32)


def encoded(samples: np.ndarray, suffix: str = "wav", *, rate: int = 16000) -> bytes:
    container, subtype = FORMATS[suffix]
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=container, subtype=subtype)
    return buffer.getvalue()


def speaker_folders(root: Path, *, speakers: int = 3, each: int = 2, suffix: str = "wav") -> Path:
    """A folder per speaker with tones of different pitch."""
    for speaker in range(speakers):
        for number in range(each):
            path = root / f"id{speaker}" / "video" / f"{number:05d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            hertz = 200.0 + 100.0 * speaker + 7.0 * number
            path.write_bytes(encoded(tone(0.5 + 0.1 * number, hertz=hertz), suffix))
    return root


def real_speech() -> Path:
    """The folder of 60 speakers, or a skip with a message where it is absent."""
    return shared_data("audiomnist60")
