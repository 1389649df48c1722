"""Noise, reverberation and masks: what is done to speech, drawn from a generator per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.data.audio import SUFFIXES, AudioInfo, Samples, Span, decode_audio
from qmargin.data.packed import PackedStrings
from qmargin.errors import ConfigError, CorruptSample, DataError

SNR_DB = {"noise": (0.0, 15.0), "speech": (10.0, 30.0), "music": (5.0, 15.0)}


class ResponseSource(Protocol):
    """Impulse responses by draw: files, or simulated rooms."""

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """One response ``[n]``."""
        ...


def random_span(num_samples: int, sample_rate: int, generator: np.random.Generator) -> Span:
    """A span of a file that lasts ``num_samples`` at ``sample_rate``, or all of a shorter file."""
    share = generator.random()

    def span(info: AudioInfo) -> tuple[int, int]:
        wanted = -(-num_samples * info.sample_rate // sample_rate)
        start = int(share * max(1, info.num_samples - wanted + 1))
        return start, min(info.num_samples, start + wanted)

    return span


def tiled(samples: Samples, num_samples: int) -> Samples:
    """The first ``num_samples`` of samples repeated as often as it takes.

    Examples:
        >>> tiled(np.array([1, 2, 3], dtype=np.float32), 7).tolist()
        [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]
    """
    repeats = -(-num_samples // len(samples))
    return (samples if repeats == 1 else np.tile(samples, repeats))[:num_samples]


class Noises:
    """Recordings to mix in, in folders ``noise``, ``speech`` and ``music`` as MUSAN has them.

    Args:
        folder: Has at least one of the three.
        sample_rate: Of what is drawn.
        snr_db: Range of signal-to-noise ratios by folder.
        babble: Recordings of ``speech`` that are mixed into one before they are added.

    Raises:
        DataError: If none of the folders has audio.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sample_rate: int = 16000,
        snr_db: dict[str, tuple[float, float]] | None = None,
        babble: int = 1,
    ) -> None:
        self.sample_rate, self.babble = sample_rate, babble
        ranges = SNR_DB if snr_db is None else snr_db
        if babble < 1:
            raise ConfigError(f"babble is {babble}; it must be at least 1")
        found = {kind: audio_files(Path(folder) / kind) for kind in sorted(ranges)}
        self.files = {kind: PackedStrings(names) for kind, names in found.items() if names}
        self.snr_db = {kind: ranges[kind] for kind in self.files}
        if not self.files:
            kinds = ", ".join(sorted(ranges))
            raise DataError(f"{folder} has no audio in folders {kinds}; give MUSAN's own folder")

    def draw(self, num_samples: int, generator: np.random.Generator) -> tuple[Samples, float]:
        """Noise ``[num_samples]`` of a kind that is drawn first, and a ratio in dB for it."""
        kinds = sorted(self.files)
        kind = kinds[int(generator.integers(len(kinds)))]
        snr = float(generator.uniform(*self.snr_db[kind]))
        noise = self._one(kind, num_samples, generator)
        for _ in range(self.babble - 1 if kind == "speech" else 0):
            noise = noise + self._one(kind, num_samples, generator)
        return noise, snr

    def _one(self, kind: str, num_samples: int, generator: np.random.Generator) -> Samples:
        names = self.files[kind]
        path = names[int(generator.integers(len(names)))]
        span = random_span(num_samples, self.sample_rate, generator)
        try:
            return tiled(decode_audio(path, sample_rate=self.sample_rate, span=span), num_samples)
        except CorruptSample as error:
            raise CorruptSample(f"noise {path}: {error}") from error


class ResponseFiles:
    """Impulse responses in files of any folder structure; the first channel's mean is used.

    Args:
        folder: Searched with all folders below it.
        sample_rate: Of what is drawn.

    Raises:
        DataError: If there is no audio.
    """

    def __init__(self, folder: str | Path, *, sample_rate: int = 16000) -> None:
        self.sample_rate = sample_rate
        self.files = PackedStrings(audio_files(Path(folder)))
        if not len(self.files):
            raise DataError(f"{folder} has no impulse responses; give a folder with audio files")

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """One response ``[n]``."""
        path = self.files[int(generator.integers(len(self.files)))]
        try:
            return decode_audio(path, sample_rate=self.sample_rate)
        except CorruptSample as error:
            raise CorruptSample(f"impulse response {path}: {error}") from error


def audio_files(folder: Path) -> list[str]:
    """Audio files in a folder and below it, by name."""
    return sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def add_noise(samples: Samples, noise: Samples, snr_db: float) -> Samples:
    """Samples with noise of the same length at a ratio of their powers; silence adds nothing."""
    power = float(np.mean(np.square(samples, dtype=np.float64)))
    noise_power = float(np.mean(np.square(noise, dtype=np.float64)))
    if noise_power == 0.0:
        return samples
    gain = np.sqrt(power / noise_power) * 10.0 ** (-snr_db / 20.0)
    return samples + np.float32(gain) * noise


def reverberate(samples: Samples, response: NDArray[np.float32]) -> Samples:
    """Samples as heard through a response of unit energy; the same length, delayed as it delays."""
    from scipy.signal import oaconvolve

    energy = float(np.sum(np.square(response, dtype=np.float64)))
    if energy == 0.0:
        raise CorruptSample("the impulse response is silent")
    unit = (response / np.sqrt(energy)).astype(np.float32)
    heard: Samples = oaconvolve(samples, unit)[: len(samples)]
    return heard.astype(np.float32, copy=False)


def peak_normalised(samples: Samples) -> Samples:
    """Samples with the loudest at one; silence stays."""
    peak = float(np.abs(samples).max())
    return samples if peak == 0.0 else samples / np.float32(peak)


@dataclass(frozen=True)
class SpeechAugmentation:
    """Reverberation or noise, one of them, for a share of the samples.

    Args:
        probability: Share of the samples that are changed.
        noises: Recordings to add.
        responses: Impulse responses, from files or a ``RoomSimulator``. With both given, half of
            the changed samples have one and half the other.
    """

    probability: float = 0.6
    noises: Noises | None = None
    responses: ResponseSource | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"probability is {self.probability}; it must be in [0, 1]")
        if self.noises is None and self.responses is None:
            raise ConfigError("an augmentation needs noises or responses; give one or both")

    def __call__(self, samples: Samples, generator: np.random.Generator) -> Samples:
        """Samples ``[n]``, changed or as they are; changed ones have their peak at one."""
        is_changed, is_reverberant = generator.random(2) < (self.probability, 0.5)
        if not is_changed:
            return samples
        if self.responses is not None and (is_reverberant or self.noises is None):
            return peak_normalised(reverberate(samples, self.responses.draw(generator)))
        assert self.noises is not None  # one of the two is there
        noise, snr = self.noises.draw(len(samples), generator)
        return peak_normalised(add_noise(samples, noise, snr))


@dataclass(frozen=True)
class SpectrumMasks:
    """SpecAugment: spans of frames and of bins set to zero, which is the mean once it is taken off.

    Args:
        probability: Share of the samples that are masked.
        num_time: Spans of frames.
        max_frames: Their greatest length.
        num_bins: Spans of bins.
        max_bins: Their greatest width.
    """

    probability: float = 0.6
    num_time: int = 1
    max_frames: int = 10
    num_bins: int = 1
    max_bins: int = 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"probability is {self.probability}; it must be in [0, 1]")
        for name in ("num_time", "max_frames", "num_bins", "max_bins"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def spans(
        self, shape: Sequence[int], generator: np.random.Generator
    ) -> list[tuple[int, int, int]]:
        """Spans ``(axis, start, stop)`` for features ``[frames, bins]``; none for those spared."""
        if generator.random() >= self.probability:
            return []
        spans = []
        for axis, count, largest in (
            (0, self.num_time, self.max_frames),
            (1, self.num_bins, self.max_bins),
        ):
            for _ in range(count):
                width = min(int(generator.integers(largest + 1)), shape[axis])
                start = int(generator.integers(shape[axis] - width + 1))
                spans.append((axis, start, start + width))
        return spans
