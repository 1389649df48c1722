"""Chunks of speech for training: cut, sped up, augmented, all from one seed per sample."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.audio import AudioInfo, Samples, Span, change_rate, decode_audio, played_rate
from qmargin.data.open import open_audio
from qmargin.data.speech_augment import (
    Noises,
    ResponseFiles,
    ResponseSource,
    RoomSimulator,
    SpectrumMasks,
    SpeechAugmentation,
    span_at,
    tiled,
)
from qmargin.data.stored import AudioDataset
from qmargin.errors import ConfigError, CorruptSample
from qmargin.models.features import FULL_SCALE, FilterBank, subtract_mean

SPEEDS = (1.0, 0.9, 1.1)
MAX_BYTES = 16 << 30  # of samples in memory
_MOST_THREADS = 8
_BLOCK = 256  # recordings between two looks at the memory


class AudioMemory:
    """Every recording at its sample rate in memory; forked workers share the arrays.

    What cannot be decoded raises when it is asked for, as it does from its file, so that it is
    counted and replaced in the same way. More than ``max_bytes`` is refused.
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


class SpeechDataset:
    """Chunks of equal length of recordings.

    A sample is a random chunk; a shorter utterance is tiled. What is drawn for it (its speed, the
    place of the chunk, noise or a room, dither, masks) follows from the seed of the reading alone.

    With several speeds each of them makes speakers of its own: speaker ``i`` at the speed with
    number ``j`` has label ``j * num_speakers + i``, so that there are three times as many classes.

    Args:
        recordings: With their speakers.
        num_frames: Length of a chunk in frames of the filter bank.
        speeds: Drawn from with equal chances; ``(1.0,)`` for none.
        augmentation: Noise and reverberation.
        dither: Standard deviation of noise that is added last, in steps of 16-bit audio.
        as_features: Give mean-normalised filter banks ``[frames, bins]`` instead of waveforms
            ``[n]``; waveforms leave that work to the device that trains.
        masks: Of the features; needs ``as_features``.
        bank: The filter bank that chunks are cut for and features are computed with.
        classes_per_speaker: At least the number of speeds, which it is without it; more to go on
            with a classifier that was trained at more speeds.
        memory: The samples of the same recordings, where they are held in memory.
    """

    def __init__(
        self,
        recordings: AudioDataset,
        *,
        num_frames: int = 200,
        speeds: Sequence[float] = SPEEDS,
        augmentation: SpeechAugmentation | None = None,
        dither: float = 0.0,
        as_features: bool = False,
        masks: SpectrumMasks | None = None,
        bank: FilterBank | None = None,
        classes_per_speaker: int | None = None,
        memory: AudioMemory | None = None,
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
        for speed in self.speeds:  # a speed out of range must not wait for the first sample
            played_rate(AudioInfo(16000, 1, 1, "WAV"), speed)

    def __len__(self) -> int:
        return len(self.recordings)

    @property
    def num_classes(self) -> int:
        """Speakers times the classes of each."""
        return self.recordings.num_classes * self.classes_per_speaker

    @property
    def labels(self) -> NDArray[np.int32] | None:
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


def open_speech(
    path: str | Path,
    *,
    root: str | None = None,
    split: str | None = None,
    index_dir: str | None = None,
    verify: bool = False,
    min_seconds: float = 0.0,
    in_memory: bool = False,
    num_frames: int = 200,
    speed_perturbation: bool = True,
    keep_speed_classes: bool = False,
    augment: float = 0.6,
    noise_path: str | None = None,
    babble: int = 1,
    response_path: str | None = None,
    simulate_rooms: bool = False,
    num_rooms: int = 0,
    dither: float = 1.0,
    as_features: bool = False,
    mask_probability: float = 0.0,
    num_bins: int = 80,
    window: str = "hamming",
    sample_rate: int = 16000,
) -> SpeechDataset:
    """The training set of a recipe, from a path and plain options.

    Args:
        path: See ``open_audio``.
        root: Folder that relative paths in a list start from.
        split: Rows of a CSV to take.
        index_dir: Folder of indices, instead of beside the data.
        verify: Compare every utterance with the checksum in its index, which is made where it is
            missing.
        min_seconds: Leave out utterances that are shorter, by the durations in the index; shorter
            ones than a chunk that are left are tiled.
        in_memory: Decode everything once, and keep it; for collections of a few hours.
        num_frames: Length of a chunk; 200 frames are 2.015 s.
        speed_perturbation: Speeds 1, 0.9 and 1.1, with three times the classes.
        keep_speed_classes: Without the perturbation, keep the classes that it makes: to fine-tune
            what was trained with it.
        augment: Share of the samples with noise or reverberation, where any of both is given.
        noise_path: Folder in MUSAN's layout.
        babble: Recordings of speech that are mixed into one before they are added as noise.
        response_path: Folder of impulse responses.
        simulate_rooms: Draw impulse responses from simulated rooms instead.
        num_rooms: How many of these there are; zero for a new one every time, see
            ``RoomSimulator``.
        dither: See ``SpeechDataset``.
        as_features: Give filter banks instead of waveforms.
        mask_probability: Share of the samples with masked features.
        num_bins: Of the filter bank.
        window: Of the filter bank.
        sample_rate: That everything is brought to.
    """
    if simulate_rooms and response_path is not None:
        raise ConfigError(
            f"response_path is {response_path!r} and simulate_rooms is set; choose one"
        )
    responses: ResponseSource | None = None
    if simulate_rooms:
        responses = RoomSimulator(sample_rate=sample_rate, num_rooms=num_rooms)
    elif response_path is not None:
        responses = ResponseFiles(response_path, sample_rate=sample_rate)
    noises = None
    if noise_path is not None:
        noises = Noises(noise_path, sample_rate=sample_rate, babble=babble)
    augmentation = None
    if noises is not None or responses is not None:
        augmentation = SpeechAugmentation(augment, noises, responses)
    recordings = open_audio(
        path,
        root=root,
        split=split,
        sample_rate=sample_rate,
        index_dir=index_dir,
        verify=verify,
        indexed=min_seconds > 0.0,
    )
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
