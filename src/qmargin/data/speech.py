"""Chunks of speech for training: cut, speed-perturbed and augmented, by one seed per sample."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.audio import (
    SUFFIXES,
    AudioInfo,
    Samples,
    Span,
    change_rate,
    check_decoder,
    decode_audio,
    played_rate,
)
from qmargin.data.index import Texts
from qmargin.data.open import open_audio
from qmargin.data.order import MAX_BYTES
from qmargin.data.stored import AudioDataset, check_several
from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.models.features import FULL_SCALE, FilterBank, subtract_mean

SPEED_OF_SOUND = 343.0  # m/s
_OVERSAMPLING = 8  # images fall on a grid this much finer, then the response is low-passed
_HIGH_PASS_HZ = 50.0  # mirrors of equal sign add up to an offset that no room has
MOST_ROOMS = 4096  # that are kept, at about 20 kB each
_WALL_GAP = 0.3  # metres that sources and microphones keep from walls


@dataclass(frozen=True)
class Room:
    """A box with one source and one microphone."""

    size: tuple[float, float, float]  # length, width and height in metres
    source: tuple[float, float, float]  # position in it
    microphone: tuple[float, float, float]
    reverberation_s: float  # in which sound fades by 60 dB (RT60), after Eyring's formula

    def __post_init__(self) -> None:
        for name in ("source", "microphone"):
            place = getattr(self, name)
            if not all(0.0 < at < edge for at, edge in zip(place, self.size, strict=True)):
                raise ConfigError(f"{name} is at {place}, outside a room of {self.size} metres")
        if not 0.0 < self.reverberation_s < math.inf:
            raise ConfigError(f"reverberation_s is {self.reverberation_s}; it must be above 0")

    @property
    def reflection(self) -> float:
        """Share of the pressure that every wall reflects, at most 0.99.

        Eyring: ``RT60 = 0.161 V / (-S ln(1 - a))`` with volume, surface and absorbed share of the
        energy; the pressure's share is ``sqrt(1 - a)``.
        """
        x, y, z = self.size
        surface = 2.0 * (x * y + y * z + x * z)
        return min(0.99, math.exp(-0.0805 * x * y * z / (surface * self.reverberation_s)))


def room_response(
    room: Room, *, sample_rate: int = 16000, seconds: float | None = None
) -> NDArray[np.float32]:
    """Impulse response ``[n]`` of a room, starting when the source sounds.

    Pressure, with the direct sound at ``distance / 343 m/s`` and of height about ``1 / (4 pi
    distance)``. It is as long as the room's reverberation, or ``seconds``.
    """
    from scipy.signal import butter, resample_poly, sosfilt

    seconds = room.reverberation_s if seconds is None else seconds
    num_samples = max(1, round(seconds * sample_rate))
    distance, gain = _images(room, reach=seconds * SPEED_OF_SOUND)
    fine_rate = sample_rate * _OVERSAMPLING
    places = np.rint(distance * (fine_rate / SPEED_OF_SOUND)).astype(np.int64)
    fine = np.bincount(places, weights=gain, minlength=num_samples * _OVERSAMPLING)
    fine = fine[: num_samples * _OVERSAMPLING].astype(np.float64)
    coarse = resample_poly(fine, 1, _OVERSAMPLING) * _OVERSAMPLING  # heights survive the filter
    sections = butter(2, _HIGH_PASS_HZ, "highpass", fs=sample_rate, output="sos")
    filtered: NDArray[np.float64] = sosfilt(sections, coarse)
    return filtered.astype(np.float32)


def _images(room: Room, *, reach: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances and gains of all images within ``reach`` metres of the microphone.

    Along one axis the images of a source at ``s`` in a box of length ``L`` are at ``2 n L + s``
    after ``2 |n|`` reflections and at ``2 n L - s`` after ``|2 n - 1|``.
    """
    squares, bounces = [], []
    for size, source, microphone in zip(room.size, room.source, room.microphone, strict=True):
        turns = np.arange(-math.ceil(reach / (2 * size)) - 1, math.ceil(reach / (2 * size)) + 2)
        offsets = np.concatenate([2 * turns * size + source, 2 * turns * size - source])
        counts = np.concatenate([2 * np.abs(turns), np.abs(2 * turns - 1)])
        square = (offsets - microphone) ** 2
        near = square <= reach**2
        squares.append(square[near])
        bounces.append(counts[near])
    flat = squares[0][:, None] + squares[1][None, :]  # images in the plane of the floor
    count = bounces[0][:, None] + bounces[1][None, :]
    inside = flat <= reach**2
    flat, count = flat[inside], count[inside]
    total = (flat[:, None] + squares[2][None, :]).ravel()
    walls = (count[:, None] + bounces[2][None, :]).ravel()
    inside = total <= reach**2
    distance = np.sqrt(total[inside])
    table = room.reflection ** np.arange(int(walls.max(initial=0)) + 1)
    return distance, table[walls[inside]] / (4.0 * math.pi * np.maximum(distance, 0.01))


@dataclass(frozen=True)
class RoomSimulator:
    """Draw and simulate rooms: an endless set of impulse responses, or a fixed number.

    With ``num_rooms``, each room is simulated once per process and then kept; zero simulates a new
    room every time, which takes tens of milliseconds.
    """

    length: tuple[float, float] = (3.0, 10.0)  # range of length and width in metres
    height: tuple[float, float] = (2.5, 4.0)
    reverberation_s: tuple[float, float] = (0.15, 0.45)  # range of RT60
    sample_rate: int = 16000
    num_rooms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_rooms <= MOST_ROOMS:
            raise ConfigError(f"num_rooms is {self.num_rooms}; it must be in [0, {MOST_ROOMS:,}]")
        for name, low in (("length", 1.0), ("height", 1.0), ("reverberation_s", 0.01)):
            given: Sequence[float] = getattr(self, name)
            if len(given) != 2 or not low <= given[0] <= given[1] < math.inf:
                raise ConfigError(f"{name} is {given}; give two rising numbers of at least {low}")

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """The response of a room drawn from the generator."""
        if self.num_rooms:
            return _numbered_response(self, int(generator.integers(self.num_rooms)))
        return room_response(self.draw_room(generator), sample_rate=self.sample_rate)

    def draw_room(self, generator: np.random.Generator) -> Room:
        """A room with a source and a microphone somewhere in it."""
        width, depth = generator.uniform(*self.length, size=2)
        size = (float(width), float(depth), float(generator.uniform(*self.height)))
        sx, sy, sz, mx, my, mz = (
            float(generator.uniform(_WALL_GAP, edge - _WALL_GAP)) for edge in size * 2
        )
        time = float(generator.uniform(*self.reverberation_s))
        return Room(size, (sx, sy, sz), (mx, my, mz), reverberation_s=time)


@lru_cache(maxsize=MOST_ROOMS)
def _numbered_response(simulator: RoomSimulator, number: int) -> NDArray[np.float32]:
    """The response of a numbered room; it is shared and read-only."""
    room = simulator.draw_room(np.random.default_rng(number))
    return room_response(room, sample_rate=simulator.sample_rate)


SNR_DB = {"noise": (0.0, 15.0), "speech": (10.0, 30.0), "music": (5.0, 15.0)}


class ResponseSource(Protocol):
    """Impulse responses by draw: files, or simulated rooms."""

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """One response ``[n]``."""
        ...


def span_at(place: float, num_samples: int, sample_rate: int, speed: float = 1.0) -> Span:
    """A span of a file that lasts ``num_samples`` at ``sample_rate``, or all of a shorter file.

    ``place`` in [0, 1) says where it begins, between the first and the last possible sample.
    """

    def span(info: AudioInfo) -> tuple[int, int]:
        ratio = played_rate(info, speed) / sample_rate
        wanted = -(-num_samples * ratio.numerator // ratio.denominator)
        start = int(place * max(1, info.num_samples - wanted + 1))
        return start, min(info.num_samples, start + wanted)

    return span


def tiled(samples: Samples, num_samples: int) -> Samples:
    """Repeat samples to a length of ``num_samples``.

    Examples:
        >>> tiled(np.array([1, 2, 3], dtype=np.float32), 7).tolist()
        [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]
    """
    repeats = -(-num_samples // len(samples))
    return (samples if repeats == 1 else np.tile(samples, repeats))[:num_samples]


class Noises:
    """Recordings to mix in, in folders ``noise``, ``speech`` and ``music`` as in MUSAN.

    ``babble`` recordings of ``speech`` are mixed into one before they are added.
    """

    def __init__(self, folder: str | Path, *, sample_rate: int = 16000, babble: int = 1) -> None:
        self.sample_rate, self.babble = sample_rate, babble
        if babble < 1:
            raise ConfigError(f"babble is {babble}; it must be at least 1")
        found = {kind: _audio_files(Path(folder) / kind) for kind in sorted(SNR_DB)}
        self.files = {kind: Texts.of(names) for kind, names in found.items() if names}
        if not self.files:
            kinds = ", ".join(sorted(SNR_DB))
            raise DataError(f"{folder} has no audio in folders {kinds}; give MUSAN's own folder")

    def draw(self, num_samples: int, generator: np.random.Generator) -> tuple[Samples, float]:
        """Noise ``[num_samples]`` of a random kind, and a random ratio in dB."""
        kinds = sorted(self.files)
        kind = kinds[int(generator.integers(len(kinds)))]
        snr = float(generator.uniform(*SNR_DB[kind]))
        noise = self._one(kind, num_samples, generator)
        for _ in range(self.babble - 1 if kind == "speech" else 0):
            noise = noise + self._one(kind, num_samples, generator)
        return noise, snr

    def _one(self, kind: str, num_samples: int, generator: np.random.Generator) -> Samples:
        names = self.files[kind]
        path = names[int(generator.integers(len(names)))]
        span = span_at(generator.random(), num_samples, self.sample_rate)
        try:
            return tiled(decode_audio(path, sample_rate=self.sample_rate, span=span), num_samples)
        except CorruptSample as error:
            raise CorruptSample(f"noise {path}: {error}") from error


class ResponseFiles:
    """Impulse responses in files of a folder and those below it; channels are averaged."""

    def __init__(self, folder: str | Path, *, sample_rate: int = 16000) -> None:
        self.sample_rate = sample_rate
        self.files = Texts.of(_audio_files(Path(folder)))
        if not len(self.files):
            raise DataError(f"{folder} has no impulse responses; give a folder with audio files")

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """One response ``[n]``."""
        path = self.files[int(generator.integers(len(self.files)))]
        try:
            return decode_audio(path, sample_rate=self.sample_rate)
        except CorruptSample as error:
            raise CorruptSample(f"impulse response {path}: {error}") from error


def _audio_files(folder: Path) -> list[str]:
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


@dataclass(frozen=True)
class SpeechAugmentation:
    """Reverberation or noise for a share of the samples; with both given, half of them get each."""

    probability: float = 0.6  # share of the samples that are changed
    noises: Noises | None = None
    responses: ResponseSource | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"probability is {self.probability}; it must be in [0, 1]")
        if self.noises is None and self.responses is None:
            raise ConfigError("an augmentation needs noises or responses; give one or both")

    def __call__(self, samples: Samples, generator: np.random.Generator) -> Samples:
        """Samples ``[n]``, changed or unchanged; changed samples have a peak of one."""
        is_changed, is_reverberant = generator.random(2) < (self.probability, 0.5)
        if not is_changed:
            return samples
        if self.responses is not None and (is_reverberant or self.noises is None):
            samples = reverberate(samples, self.responses.draw(generator))
        elif self.noises is not None:
            samples = add_noise(samples, *self.noises.draw(len(samples), generator))
        peak = float(np.abs(samples).max())
        return samples if peak == 0.0 else samples / np.float32(peak)


@dataclass(frozen=True)
class SpectrumMasks:
    """SpecAugment: spans of frames and of bins set to zero, the mean of normalised features."""

    probability: float = 0.6  # share of the samples that are masked
    num_time: int = 1  # spans of frames
    max_frames: int = 10  # their greatest length
    num_bins: int = 1  # spans of bins
    max_bins: int = 8  # their greatest width

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"probability is {self.probability}; it must be in [0, 1]")
        for name in ("num_time", "max_frames", "num_bins", "max_bins"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def spans(
        self, shape: Sequence[int], generator: np.random.Generator
    ) -> list[tuple[int, int, int]]:
        """Spans ``(axis, start, stop)`` for features ``[frames, bins]``; empty if not masked."""
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


SPEEDS = (1.0, 0.9, 1.1)
_MOST_THREADS = 8
_BLOCK = 256  # recordings between two checks of the memory


class AudioMemory:
    """Every recording at its sample rate in memory; forked workers share the arrays.

    An undecodable recording raises when it is read, as from its file, so that it is counted and
    replaced in the same way. More than ``max_bytes`` is refused.
    """

    def __init__(self, recordings: AudioDataset, *, max_bytes: int = MAX_BYTES) -> None:
        self.sample_rate = recordings.sample_rate
        self._held: list[Samples | str] = []
        self.nbytes = 0

        def decoded(index: int) -> Samples | str:
            try:
                return recordings[index][0]
            except CorruptSample as error:
                return str(error)

        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for start in range(0, len(recordings), _BLOCK):
                block = range(start, min(start + _BLOCK, len(recordings)))
                self._held += pool.map(decoded, block)
                self.nbytes = sum(item.nbytes for item in self._held if not isinstance(item, str))
                if self.nbytes > max_bytes:
                    taken, most = self.nbytes / 2**30, max_bytes / 2**30
                    raise ConfigError(
                        f"{len(self._held):,} of {len(recordings):,} recordings take {taken:.1f} "
                        f"GiB and at most {most:.1f} are held; set in_memory to false"
                    )

    def __len__(self) -> int:
        return len(self._held)

    def cut(self, index: int, *, span: Span, speed: float = 1.0) -> Samples:
        """A span of a recording, as ``decode_audio`` gives it from a file of this rate."""
        samples = self._held[index]
        if isinstance(samples, str):
            raise CorruptSample(samples)
        info = AudioInfo(self.sample_rate, 1, len(samples), "memory")
        start, stop = span(info)
        return change_rate(samples[start:stop], played_rate(info, speed), self.sample_rate)


class SpeechSource(Protocol):
    """Recordings with speakers: ``AudioDataset`` or ``Voices``."""

    @property
    def num_classes(self) -> int:
        """Number of speakers."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """Speaker of each recording, ``[n]``."""
        ...

    @property
    def sample_rate(self) -> int:
        """Sample rate of decoded ``encoded`` recordings."""
        ...

    def __len__(self) -> int: ...

    def encoded(self, index: int) -> Path | bytes:
        """Path or bytes to decode."""
        ...

    def sample_id(self, index: int) -> str:
        """Name of a recording."""
        ...

    def source(self, index: int) -> str:
        """Where the label of a recording is written."""
        ...


class SpeechMemory(Protocol):
    """Samples that need no decoding."""

    def cut(self, index: int, *, span: Span, speed: float = 1.0) -> Samples:
        """A span of a recording, as ``decode_audio`` gives it from a file of its rate."""
        ...


class SpeechDataset:
    """Chunks of equal length of recordings.

    A sample is a random chunk; a shorter utterance is tiled. All random choices (speed, place of
    the chunk, noise or room, dither, masks) depend only on the seed of the read.

    With several speeds, each speed has its own classes: speaker ``i`` at the speed with
    number ``j`` has label ``j * num_speakers + i``, so that there are three times as many classes.

    Chunks have ``num_frames`` frames of the filter bank. ``dither`` is the deviation of noise added
    last, in steps of 16-bit audio. ``as_features`` gives mean-normalised filter banks
    ``[frames, bins]``, which can have ``masks``, instead of waveforms ``[n]``. More
    ``classes_per_speaker`` than speeds are for a classifier that was trained at more speeds.
    ``memory`` has the samples of the same recordings.
    """

    def __init__(
        self,
        recordings: SpeechSource,
        *,
        num_frames: int = 200,
        speeds: Sequence[float] = SPEEDS,
        augmentation: SpeechAugmentation | None = None,
        dither: float = 0.0,
        as_features: bool = False,
        masks: SpectrumMasks | None = None,
        bank: FilterBank | None = None,
        classes_per_speaker: int | None = None,
        memory: SpeechMemory | None = None,
    ) -> None:
        self.recordings, self.speeds = recordings, tuple(speeds)
        self.memory = memory
        self.augmentation, self.dither = augmentation, dither
        self.bank = FilterBank(recordings.sample_rate) if bank is None else bank.eval()
        self.as_features, self.masks = as_features, masks
        self.classes_per_speaker = classes_per_speaker or len(self.speeds)
        if num_frames < 1:
            raise ConfigError(f"num_frames is {num_frames}; it must be at least 1")
        if not self.speeds or len(set(self.speeds)) < len(self.speeds):
            raise ConfigError(f"speeds are {self.speeds}; give one or more, each once")
        if self.classes_per_speaker < len(self.speeds):
            given = f"classes_per_speaker is {classes_per_speaker}"
            raise ConfigError(
                f"{given} and there are {len(self.speeds)} speeds; each needs a class"
            )
        if masks is not None and not as_features:
            raise ConfigError("masks are of features; set as_features, or mask on the device")
        if self.bank.sample_rate != recordings.sample_rate:
            rates = f"{self.bank.sample_rate} Hz and the recordings give {recordings.sample_rate}"
            raise ConfigError(f"the filter bank is for {rates} Hz; make them agree")
        self.num_samples = self.bank.num_samples(num_frames)
        for speed in self.speeds:  # check the speeds before the first sample
            played_rate(AudioInfo(16000, 1, 1, "WAV"), speed)

    def __len__(self) -> int:
        return len(self.recordings)

    @property
    def num_classes(self) -> int:
        """Speakers times the classes of each."""
        return self.recordings.num_classes * self.classes_per_speaker

    @property
    def labels(self) -> NDArray[Any] | None:
        """Labels, or None where they depend on the speed that is drawn."""
        return self.recordings.labels if len(self.speeds) == 1 else None

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """A chunk and its label, as the seed decides, or ``CorruptSample``."""
        generator = np.random.default_rng(seed)
        turn = int(generator.integers(len(self.speeds)))
        label = turn * self.recordings.num_classes + int(self.recordings.labels[index])
        rate, speed = self.recordings.sample_rate, self.speeds[turn]
        span = span_at(generator.random(), self.num_samples, rate, speed)
        if self.memory is None:
            source = self.recordings.encoded(index)
            samples = decode_audio(source, sample_rate=rate, span=span, speed=speed)
        else:
            samples = self.memory.cut(index, span=span, speed=speed)
        samples = tiled(samples, self.num_samples)
        if self.augmentation is not None:
            samples = self.augmentation(samples, generator)
        if self.dither > 0.0:
            noise = generator.standard_normal(len(samples), dtype=np.float32)
            samples = samples + np.float32(self.dither / FULL_SCALE) * noise
        waveform = torch.from_numpy(np.ascontiguousarray(samples))
        if not self.as_features:
            return waveform, label
        features = subtract_mean(self.bank(waveform[None]))[0]
        if self.masks is not None:
            for axis, start, stop in self.masks.spans(features.shape, generator):
                features.narrow(axis, start, stop - start).zero_()
        return features, label

    def sample_id(self, index: int) -> str:
        """The utterance's key."""
        return self.recordings.sample_id(index)

    def source(self, index: int) -> str:
        """Where the utterance and its speaker are named."""
        return self.recordings.source(index)


def build_augmentation(
    augment: float,
    *,
    noise_path: str | None,
    babble: int,
    response_path: str | None,
    simulate_rooms: bool,
    num_rooms: int,
    sample_rate: int,
) -> SpeechAugmentation | None:
    """Noise and rooms by the options of a recipe; None for neither."""
    if not 0.0 <= augment <= 1.0:
        raise ConfigError(f"augment is {augment}; give a share from 0 to 1")
    if simulate_rooms and response_path is not None:
        raise ConfigError(f"response_path is {response_path!r}, simulate_rooms is set; choose one")
    responses: ResponseSource | None = None
    if simulate_rooms:
        responses = RoomSimulator(sample_rate=sample_rate, num_rooms=num_rooms)
    elif response_path is not None:
        responses = ResponseFiles(response_path, sample_rate=sample_rate)
    noises = None
    if noise_path is not None:
        noises = Noises(noise_path, sample_rate=sample_rate, babble=babble)
    if noises is None and responses is None:
        return None
    return SpeechAugmentation(augment, noises, responses)


def open_speech(
    path: str | Path,
    *,
    root: str | None = None,  # folder that relative paths in a list start from
    split: str | None = None,  # rows of a CSV to take
    index_dir: str | None = None,  # folder of indices, instead of beside the data
    verify: bool = False,  # compare every utterance with the checksum in its index
    min_seconds: float = 0.0,  # leave out shorter utterances, by the durations in the index
    in_memory: bool = False,  # decode everything once, and keep it; for a few hours
    num_frames: int = 200,  # of a chunk; 200 frames are 2.015 s
    speed_perturbation: bool = True,  # speeds 1, 0.9 and 1.1, with three times the classes
    keep_speed_classes: bool = False,  # without the speeds, to fine-tune what was trained with them
    augment: float = 0.6,  # share of the samples with noise or reverberation, where given
    noise_path: str | None = None,  # folder in MUSAN's layout
    babble: int = 1,  # recordings of speech that are mixed into one noise
    response_path: str | None = None,  # folder of impulse responses
    simulate_rooms: bool = False,  # draw impulse responses from simulated rooms instead
    num_rooms: int = 0,  # of these; zero for a new one every time
    dither: float = 1.0,  # in steps of 16-bit audio
    as_features: bool = False,  # filter banks instead of waveforms
    mask_probability: float = 0.0,  # share of the samples with masked features
    num_bins: int = 80,  # of the filter bank
    window: str = "hamming",
    sample_rate: int = 16000,  # of all recordings after resampling
) -> SpeechDataset:
    """The training set of a recipe, from a path and plain options."""
    check_decoder()
    augmentation = build_augmentation(
        augment,
        noise_path=noise_path,
        babble=babble,
        response_path=response_path,
        simulate_rooms=simulate_rooms,
        num_rooms=num_rooms,
        sample_rate=sample_rate,
    )
    recordings = open_audio(
        path,
        root=root,
        split=split,
        sample_rate=sample_rate,
        index_dir=index_dir,
        verify=verify,
        indexed=min_seconds > 0.0,
    )
    check_several(recordings.num_classes, path)
    if min_seconds > 0.0:
        errors = recordings.index.texts("error")
        is_kept = recordings.index.seconds() >= min_seconds
        if errors is not None:  # a corrupt one is replaced and counted when it is read
            is_kept |= np.diff(errors.ends, prepend=0) > 0
        if not is_kept.any():
            found = f"no recording of {recordings.index.root} is that long"
            raise ConfigError(f"min_seconds is {min_seconds:g} and {found}; lower it")
        if not is_kept.all():
            recordings = recordings.subset(np.flatnonzero(is_kept))
    return SpeechDataset(
        recordings,
        num_frames=num_frames,
        speeds=SPEEDS if speed_perturbation else SPEEDS[:1],
        classes_per_speaker=len(SPEEDS) if keep_speed_classes else None,
        augmentation=augmentation,
        dither=dither,
        as_features=as_features,
        masks=SpectrumMasks(mask_probability) if mask_probability > 0.0 else None,
        bank=FilterBank(sample_rate, num_bins, window),
        memory=AudioMemory(recordings) if in_memory else None,
    )
