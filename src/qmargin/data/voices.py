"""Voices: synthesised speech of synthetic speakers.

A speaker is a vector that sets pitch, vocal tract and manner of speaking. An utterance is a random
sequence of syllables: pulses of the glottis and of noise ring in the resonances of the vocal tract,
and the sum is recorded by a microphone in a room. Only sums, products, quotients and roots are
used, which every machine rounds alike, so that the samples are the same everywhere.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.audio import AudioInfo, Samples, Span, change_rate, played_rate
from qmargin.data.order import MAX_BYTES, check_samples, derived_seed
from qmargin.data.people import People, kin_lists, set_by_traits, traits_of
from qmargin.data.speech import (
    SPEEDS,
    SpectrumMasks,
    SpeechDataset,
    build_augmentation,
)
from qmargin.data.strokes import Keys, joined_keys, normals, uniforms
from qmargin.data.synthetic import SPLITS, SyntheticDataset, check_world, numbers_in_world
from qmargin.errors import ConfigError, ShapeError
from qmargin.models.features import FULL_SCALE, FilterBank

Doubles = NDArray[np.float64]

RATE = 16_000
FRAME = 80  # samples between two values of a track: 5 ms
VOICED_LENGTH = 400  # samples that a pulse of the glottis rings
NOISE_LENGTH = 48
NOISE_STEP = 5  # samples between two pulses of noise
NUM_FORMANTS = 5

# Formants in Hz for a vocal tract of 17 cm: a, e, i, o, u, schwa, ae.
VOWELS = np.array(
    [
        (730, 1220, 2500, 3400, 4300),
        (530, 1840, 2500, 3400, 4300),
        (290, 2250, 2950, 3550, 4400),
        (500, 900, 2450, 3350, 4250),
        (320, 800, 2300, 3300, 4250),
        (500, 1450, 2450, 3400, 4300),
        (660, 1700, 2450, 3400, 4300),
    ],
    np.float64,
)
# Formants, then strength of the voice, strength of the noise and its pitch in Hz.
CONSONANTS = np.array(
    [
        (250, 1100, 2250, 3300, 4250, 0.30, 0.00, 1500),  # m
        (250, 1550, 2450, 3300, 4250, 0.30, 0.00, 1500),  # n
        (350, 1050, 2700, 3300, 4250, 0.45, 0.00, 1500),  # l
        (300, 1500, 2500, 3400, 4300, 0.02, 0.00, 1500),  # a stop, as in "t"
        (300, 900, 2300, 3400, 4300, 0.02, 0.00, 1500),  # a stop, as in "p"
        (320, 1700, 2600, 3400, 4300, 0.02, 0.45, 5200),  # s
        (320, 1800, 2500, 3400, 4300, 0.02, 0.40, 3100),  # sh
        (320, 1100, 2300, 3400, 4300, 0.02, 0.16, 4200),  # f
        (300, 1600, 2500, 3400, 4300, 0.25, 0.22, 4900),  # z
    ],
    np.float64,
)
BANDWIDTHS = np.array([70.0, 90.0, 130.0, 190.0, 260.0])  # Hz
MANNERS = {  # base and deviation of what traits set
    "pitch": (0.0, 0.20),  # octaves from one of PITCHES
    "pitch_range": (0.13, 0.04),  # octaves
    "tract": (1.0, 0.055),  # factor of all formants
    "f1": (1.0, 0.0455),  # factors of one formant
    "f2": (1.0, 0.0455),
    "f3": (1.0, 0.039),
    "f4": (1.0, 0.039),
    "f5": (1.0, 0.039),
    "bandwidth": (1.0, 0.16),  # factor
    "tilt": (0.52, 0.06),  # level of a formant relative to the one below
    "jitter": (0.008, 0.004),  # of a period
    "shimmer": (0.08, 0.03),  # of a level
    "breath": (0.05, 0.03),
    "rate": (4.6, 0.5),  # syllables per second
    "sibilants": (1.0, 0.09),  # factor of the pitch of noise
}
ACCENT = 0.10  # deviation of the first formants of each vowel, as factors
NUM_ACCENTED = 3  # formants
ACCENTS = {
    f"vowel{vowel}-f{n + 1}": (1.0, ACCENT)
    for vowel in range(len(VOWELS))
    for n in range(NUM_ACCENTED)
}
PITCHES = (118.0, 205.0)  # Hz of low and high voices
HIGH_TRACT = 1.12  # factor of the formants of high voices
CHANNEL_TAPS = 9
NUM_ECHOES = 6
LEVEL = 0.08  # root mean square of a recording
# Differences between recordings of a speaker at difficulty 1: small in most, large in a few.
USUAL, WORST = 0.5, 2.0  # factors of the next three
CHANNEL = 0.16  # of the taps of a microphone
ROOM = 0.35  # of echoes
MOOD = 0.03  # octaves of the pitch
SNR = (2.0, 100.0)  # ratio of amplitudes of speech and noise: worst and best


class Speaker(NamedTuple):
    """Voice of a speaker."""

    pitch: float  # Hz
    pitch_range: float  # octaves
    formants: Doubles  # factors, [NUM_FORMANTS]
    vowels: Doubles  # factors of each vowel, [len(VOWELS), NUM_FORMANTS]
    bandwidths: Doubles  # Hz, [NUM_FORMANTS]
    tilt: float
    jitter: float
    shimmer: float
    breath: float
    rate: float  # syllables per second
    sibilants: float


@dataclass(frozen=True)
class Voices(SyntheticDataset):
    """Utterances of synthetic speakers, 16-bit at 16 kHz.

    As among ``People``, a tenth of the speakers have relatives in the data, who sound alike. Each
    recording has its own microphone, room and noise. Speakers of the three splits are disjoint.

    Examples:
        >>> voices = Voices(1_000_000, 10)
        >>> samples = voices.waveform(9_999_999)
        >>> samples.dtype, 2.0 <= len(samples) / voices.sample_rate <= 6.0
        (dtype('int16'), True)
    """

    num_classes: int
    samples_per_class: int
    seed: int = 0  # a different seed gives different speakers
    split: str = "train"  # or "validation" or "test"
    difficulty: float = 1.0  # factor of the differences between recordings; 0 for clean speech
    shortest: float = 2.0  # seconds of an utterance
    longest: float = 6.0
    in_memory: bool = False  # keep synthesised utterances
    _kept: dict[int, NDArray[np.int16]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    sample_rate: ClassVar[int] = RATE

    def __post_init__(self) -> None:
        self._check_counts()
        check_world(self.num_classes, self.split, self.difficulty)
        if not 0.5 <= self.shortest <= self.longest <= 60.0:
            raise ConfigError(
                f"utterances last from {self.shortest} to {self.longest} s; give lengths in order, "
                "from 0.5 to 60"
            )
        if self.in_memory:
            num_bytes = RATE * (self.shortest + self.longest) * len(self)  # two of each sample
            if num_bytes > MAX_BYTES:
                raise ConfigError(
                    f"{len(self):,} utterances take about {num_bytes / 2**30:.1f} GiB and at most "
                    f"{MAX_BYTES / 2**30:.1f} are held; set in_memory to false"
                )

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Speaker of each utterance, ``[n]``."""
        check_samples(self.num_classes, self.samples_per_class)
        return np.repeat(np.arange(self.num_classes), self.samples_per_class)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Number of samples up to the end of each utterance, ``[n]``."""
        lengths = [int(self._seconds(self._key(index)) * RATE) for index in range(len(self))]
        return np.cumsum(np.array(lengths, np.int64))

    def speaker(self, label: int) -> Speaker:
        """Voice of a speaker."""
        number = numbers_in_world(self._checked_labels(np.array([label])), self.split)
        world = np.uint64(derived_seed(self.seed))
        traits, _ = traits_of(world, number)
        traits = traits.astype(np.float64)
        found = set_by_traits(traits, MANNERS, 0x76)
        manner = {name: float(values[0]) for name, values in found.items()}
        accent = set_by_traits(traits, ACCENTS, 0x61)
        vowels = np.ones_like(VOWELS)
        vowels[:, :NUM_ACCENTED] = np.reshape([v[0] for v in accent.values()], (len(VOWELS), -1))
        is_high = bool(uniforms(joined_keys(np.array([world]), number), 1)[0, 0] < 0.5)
        tract = manner["tract"] * (HIGH_TRACT if is_high else 1.0)
        return Speaker(
            pitch=PITCHES[is_high] * float(_power_of_two(np.array(manner["pitch"]))),
            pitch_range=max(manner["pitch_range"], 0.02),
            formants=tract * np.array([manner[f"f{n + 1}"] for n in range(NUM_FORMANTS)]),
            vowels=np.maximum(vowels, 0.7),
            bandwidths=BANDWIDTHS * max(manner["bandwidth"], 0.5),
            tilt=min(max(manner["tilt"], 0.3), 0.75),
            jitter=max(manner["jitter"], 0.0),
            shimmer=max(manner["shimmer"], 0.0),
            breath=max(manner["breath"], 0.0),
            rate=max(manner["rate"], 2.0),
            sibilants=manner["sibilants"],
        )

    def waveform(self, index: int) -> NDArray[np.int16]:
        """The recording of an utterance, ``[samples]``."""
        label = self._label(index)
        if index in self._kept:
            return self._kept[index]
        key = self._key(index)
        speaker = self.speaker(label)
        mood = MOOD * self.difficulty * _spreads(key)[3] * float(normals(key, 1)[0, 0])
        speaker = speaker._replace(pitch=speaker.pitch * float(_power_of_two(np.array(mood))))
        clean = spoken(speaker, self._seconds(key), key)
        samples = _recorded(clean, key, self.difficulty)
        if self.in_memory:
            self._kept[index] = samples
        return samples

    def waveforms(self, indices: NDArray[np.integer]) -> NDArray[np.int16]:
        """Utterances, one after the other."""
        return np.concatenate([self.waveform(int(index)) for index in indices])

    def cut(self, index: int, *, span: Span, speed: float = 1.0) -> Samples:
        """A span of an utterance in [-1, 1], as ``decode_audio`` gives it from a file."""
        samples = self.waveform(index)
        info = AudioInfo(RATE, 1, len(samples), "memory")
        start, stop = span(info)
        part = samples[start:stop].astype(np.float32) * np.float32(1.0 / FULL_SCALE)
        return change_rate(part, played_rate(info, speed), RATE)

    def kept_in(self, file: Path) -> Voices:
        """The same utterances, read from a file of all samples, which processes can share."""
        samples = np.load(file, mmap_mode="r")
        if samples.shape != (int(self.ends[-1]),) or samples.dtype != np.int16:
            found = f"{file} has {samples.dtype} {list(samples.shape)}"
            raise ShapeError(f"{found}; int16 [{self.ends[-1]}] is needed: remove the file")
        kept = replace(self, in_memory=True)
        kept._kept.update(enumerate(np.split(samples, self.ends[:-1])))
        return kept

    def encoded(self, index: int) -> bytes:
        """An utterance as a WAV file."""
        data = self.waveform(index).astype("<i2").tobytes()
        about = (b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", len(data))
        return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", *about) + data

    def write(self, folder: str | Path) -> None:
        """Write one folder of WAV files per speaker."""
        for index in range(len(self)):
            path = Path(folder) / f"{self.sample_id(index)}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.encoded(index))

    def sample_id(self, index: int) -> str:
        """Split, speaker and number, so that names differ between splits."""
        label, number = self._label(index), index % self.samples_per_class
        return f"{self.split}-speaker-{label}/utterance-{number}"

    def _seconds(self, key: Keys) -> float:
        return self.shortest + float(uniforms(key, 1)[0, 0]) * (self.longest - self.shortest)

    def _key(self, index: int) -> Keys:
        world = np.array([derived_seed(self.seed, SPLITS.index(self.split))], np.uint64)
        label, number = divmod(index, self.samples_per_class)
        return joined_keys(joined_keys(world, np.array([label])), np.array([number]))


class VoiceChunks(SpeechDataset):
    """Chunks of synthetic utterances; ``options`` are those of ``SpeechDataset``."""

    recordings: Voices

    def __init__(self, voices: Voices, **options: Any) -> None:
        super().__init__(voices, memory=voices, **options)
        self._options = options

    def pair_lists(self, indices: NDArray[np.integer]) -> dict[str, NDArray[np.int64]]:
        """Lists of the pairs of some utterances, as those of ``People``."""
        voices = self.recordings
        people = People(voices.num_classes, 1, seed=voices.seed, split=voices.split)
        return kin_lists(people, voices.labels[indices])

    def kept_in(self, file: Path) -> VoiceChunks:
        """The same chunks of utterances in a file, see ``Voices.kept_in``."""
        return VoiceChunks(self.recordings.kept_in(file), **self._options)

    def held_out(
        self, split: str, num_classes: int, samples_per_class: int, *, is_whole: bool
    ) -> VoiceChunks:
        """Other speakers from the same generator, for evaluation, without augmentation.

        Whole utterances are repeated to the length of the longest.
        """
        voices = replace(
            self.recordings,
            num_classes=num_classes,
            samples_per_class=samples_per_class,
            split=split,
        )
        plain = {"num_frames": self._options["num_frames"], "speeds": SPEEDS[:1]}
        plain |= {name: self._options[name] for name in ("as_features", "bank")}
        if is_whole:
            plain["num_frames"] = self.bank.num_frames(int(voices.longest * RATE))
        return VoiceChunks(voices, **plain)


def open_voices(
    num_classes: int,  # of the classifier: speakers, three times as many with speed_perturbation
    *,
    samples_per_class: int = 20,  # utterances of a speaker
    seed: int = 0,  # a different seed gives different speakers
    split: str = "train",  # or "validation" or "test"
    difficulty: float = 1.0,  # factor of the differences between recordings; 0 for clean speech
    shortest: float = 2.0,  # seconds of an utterance
    longest: float = 6.0,
    in_memory: bool = True,  # keep synthesised utterances
    num_frames: int = 200,  # of a chunk; 200 frames are 2.015 s
    speed_perturbation: bool = False,  # speeds 1, 0.9 and 1.1, each with its own classes
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
) -> VoiceChunks:
    """The training set of a recipe with synthetic speakers, from plain options."""
    speeds = SPEEDS if speed_perturbation else SPEEDS[:1]
    if num_classes % len(speeds):
        raise ConfigError(
            f"num_classes is {num_classes}; with speed_perturbation every speaker has "
            f"{len(speeds)} classes, give a multiple of {len(speeds)}"
        )
    voices = Voices(
        num_classes // len(speeds),
        samples_per_class,
        seed=seed,
        split=split,
        difficulty=difficulty,
        shortest=shortest,
        longest=longest,
        in_memory=in_memory,
    )
    return VoiceChunks(
        voices,
        num_frames=num_frames,
        speeds=speeds,
        augmentation=build_augmentation(
            augment,
            noise_path=noise_path,
            babble=babble,
            response_path=response_path,
            simulate_rooms=simulate_rooms,
            num_rooms=num_rooms,
            sample_rate=RATE,
        ),
        dither=dither,
        as_features=as_features,
        masks=SpectrumMasks(mask_probability) if mask_probability > 0.0 else None,
        bank=FilterBank(RATE, num_bins, window),
    )


class _Tracks(NamedTuple):
    """Tracks of an utterance, with a value every ``FRAME`` samples."""

    formants: Doubles  # Hz, [frames, NUM_FORMANTS]
    voice: Doubles
    noise: Doubles
    noise_pitch: Doubles  # Hz
    pitch: Doubles  # Hz


def spoken(speaker: Speaker, seconds: float, key: Keys) -> Doubles:
    """A clean utterance, ``[samples]``; ``key`` is ``[1]``."""
    tracks = _composed(speaker, seconds, key)
    total = int(seconds * RATE)
    out = np.zeros(total + VOICED_LENGTH)
    grid = np.arange(len(tracks.pitch), dtype=np.float64)

    # A pulse of the glottis wherever the phase passes a whole number.
    phase = np.cumsum(tracks.pitch * (FRAME / RATE))
    count = int(phase[-1])
    bell = normals(joined_keys(key, np.array([2])), 2 * count + 2)[0].astype(np.float64)
    places = _between(np.arange(1, count) + speaker.jitter * bell[1:count], phase, grid * FRAME)
    at = np.unique(places[places < total].astype(np.int64))  # pulses of one sample would be lost
    level = _between(at / FRAME, grid, tracks.voice)
    level = level * (1.0 + speaker.shimmer * bell[count : count + len(at)])
    levels = level[:, None] * _falling(speaker.tilt)
    formants = _between(at / FRAME, grid, tracks.formants)
    _ring(out, at, levels, formants, speaker.bandwidths, VOICED_LENGTH)

    # Pulses of random strength are noise: of fricatives, and of breath.
    at = np.arange(0, total, NOISE_STEP)
    bell = normals(joined_keys(key, np.array([3])), len(at))[0].astype(np.float64)
    places = at / FRAME
    hiss = _between(places, grid, tracks.noise) * bell
    is_heard = np.abs(hiss) > 0.0
    centres = _between(places, grid, tracks.noise_pitch)[is_heard, None] * np.array([1.0, 1.25])
    levels = hiss[is_heard, None] * np.array([1.0, 0.6])
    width = np.array([900.0, 900.0])
    _ring(out, at[is_heard], levels, np.minimum(centres, 7600.0), width, NOISE_LENGTH)
    breath = speaker.breath * _between(places, grid, tracks.voice) * bell
    levels = breath[::2, None] * np.array([1.0, 0.8, 0.6])
    formants = _between(places[::2], grid, tracks.formants[:, 1:4])
    _ring(out, at[::2], levels, formants, np.full(3, 300.0), 3 * NOISE_LENGTH)
    return out[:total]


def _composed(speaker: Speaker, seconds: float, key: Keys) -> _Tracks:
    """Syllables of a consonant and a vowel, with pauses, until the time is over."""
    count = int(seconds * speaker.rate * 2.0) + 8
    chance = uniforms(joined_keys(key, np.array([0])), 5 * count).reshape(count, 5)
    bell = normals(joined_keys(key, np.array([1])), 2 * count).reshape(count, 2).astype(np.float64)
    vowels = (VOWELS * speaker.vowels)[(chance[:, 0] * np.float32(len(VOWELS))).astype(np.int64)]
    consonants = CONSONANTS[(chance[:, 1] * np.float32(len(CONSONANTS))).astype(np.int64)]
    length = (0.75 + 0.5 * chance[:, 2].astype(np.float64)) / speaker.rate
    share = 0.30 + 0.15 * chance[:, 3].astype(np.float64)  # of the consonant
    is_heard = chance[:, 4] >= 0.08  # otherwise a pause
    ends = np.cumsum(length)
    starts = ends - length
    # Knots: the middle of the consonant, the beginning and the end of the vowel.
    knots = [starts + 0.5 * share * length, starts + (share + 0.12) * length, ends - 0.15 * length]
    targets = np.stack([consonants[:, :NUM_FORMANTS], vowels, vowels], 1)
    targets = targets * (1.0 + 0.03 * bell[:, None, :1])  # syllables vary
    voice = np.stack([consonants[:, NUM_FORMANTS], 1.0 * is_heard, 0.9 * is_heard], 1)
    noise = np.zeros((count, 3))
    noise[:, 0] = consonants[:, NUM_FORMANTS + 1] * is_heard
    frames = np.arange(int(seconds * RATE) // FRAME + 2, dtype=np.float64)
    places: Doubles = frames * (FRAME / RATE)
    flat = np.stack(knots, 1).reshape(-1)
    octaves = _between(places, ends, speaker.pitch_range * bell[:, 1]) - 0.06 * places
    syllables = np.minimum(np.searchsorted(ends, places), count - 1)
    return _Tracks(
        _between(places, flat, targets.reshape(-1, NUM_FORMANTS)) * speaker.formants,
        _between(places, flat, voice.reshape(-1)),
        _between(places, flat, noise.reshape(-1)),
        consonants[syllables, NUM_FORMANTS + 2] * speaker.sibilants,
        speaker.pitch * _power_of_two(octaves),
    )


def _ring(
    out: Doubles,
    at: NDArray[np.int64],
    levels: Doubles,
    centres: Doubles,
    widths: Doubles,
    length: int,
) -> None:
    """Add pulses at distinct samples that ring in resonators, ``[pulses, resonators]``.

    ``out`` is as long as the last pulse rings.
    """
    radius = _exponential(widths * (-math.pi / RATE))
    first = np.ascontiguousarray((2.0 * radius * _cosine(centres * (2.0 * math.pi / RATE))).T)
    second = (-radius * radius)[:, None]
    now = np.ascontiguousarray((levels * (1.0 - radius)).T)
    before, product, total = np.zeros_like(now), np.empty_like(now), np.empty_like(now[0])
    steps = np.unique(np.diff(at))
    is_regular = len(steps) == 1  # samples in a slice are found faster than by their numbers
    for place in range(length):
        np.copyto(total, now[0])
        for resonator in now[1:]:  # in this order on every machine
            total += resonator
        if is_regular:
            out[at[0] + place : at[-1] + place + 1 : steps[0]] += total
        else:
            out[at + place] += total
        before *= second
        before += np.multiply(first, now, out=product)
        now, before = before, now


def _recorded(clean: Doubles, key: Keys, difficulty: float) -> NDArray[np.int16]:
    """An utterance through a microphone and a room, with noise."""
    bell = normals(joined_keys(key, np.array([4])), CHANNEL_TAPS)[0].astype(np.float64)
    chance = uniforms(joined_keys(key, np.array([5])), 2 * NUM_ECHOES + 1)[0].astype(np.float64)
    channel, room, hiss = (difficulty * spread for spread in _spreads(key)[:3])
    heard = clean.copy()
    for delay in range(1, CHANNEL_TAPS):
        heard[delay:] += (CHANNEL * channel * bell[delay] / delay) * clean[:-delay]
    for echo in range(NUM_ECHOES):
        delay = int(80 + 1200 * chance[echo])
        weight = ROOM * room * (2.0 * chance[NUM_ECHOES + echo] - 1.0) / (1.0 + delay / 400.0)
        heard[delay:] += weight * clean[:-delay]
    level = math.sqrt(math.fsum((heard * heard).tolist()) / len(heard)) + 1e-9
    share = (hiss - difficulty * USUAL) / (WORST - USUAL)  # from 0 to the difficulty
    ratio = difficulty / SNR[1] + (1.0 / SNR[0] - 1.0 / SNR[1]) * share
    noise = normals(joined_keys(key, np.array([6])), len(heard))[0].astype(np.float64)
    noise[1:] += 0.9 * chance[-2] * noise[:-1]  # its colour
    heard = heard + level * ratio * noise
    gain = 32767.0 * LEVEL / level * max(1.0 + 0.3 * difficulty * bell[0], 0.2)
    samples: NDArray[np.int16] = np.rint(heard * gain).clip(-32768.0, 32767.0).astype(np.int16)
    return samples


def _spreads(key: Keys) -> tuple[float, ...]:
    """Factors of microphone, room, noise and mood of a recording, from ``USUAL`` to ``WORST``."""
    chance = uniforms(joined_keys(key, np.array([7])), 4)[0].astype(np.float64)
    return tuple(USUAL + (WORST - USUAL) * value * value * value * value for value in chance)


def _between(places: Doubles, knots: Doubles, values: Doubles) -> Doubles:
    """Values at some places, on straight lines between knots; ``values`` is ``[knots, ...]``."""
    right = np.clip(np.searchsorted(knots, places, side="right"), 1, len(knots) - 1)
    left = right - 1
    share = np.clip((places - knots[left]) / (knots[right] - knots[left]), 0.0, 1.0)
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    found: Doubles = values[left] + share * (values[right] - values[left])
    return found


def _falling(ratio: float) -> Doubles:
    """Levels of formants: each is weaker than the one below, with the other sign."""
    levels = [1.0]
    for _ in range(1, NUM_FORMANTS):
        levels.append(-ratio * levels[-1])
    return np.array(levels)


def _cosine(angles: Doubles) -> Doubles:
    """Sine of angles in [0, pi], by its series around pi / 2."""
    x = angles - math.pi / 2
    square, series = x * x, np.ones_like(x)
    for number in range(9, 0, -1):
        series = 1.0 - square * series * (1.0 / (2 * number * (2 * number + 1)))
    return -x * series


def _exponential(values: Doubles) -> Doubles:
    """Of numbers between -3 and 3."""
    total = np.ones_like(values)
    for divisor in range(24, 0, -1):
        total = 1.0 + values * total * (1.0 / divisor)
    return total


def _power_of_two(octaves: Doubles) -> Doubles:
    return _exponential(octaves * 0.6931471805599453)
