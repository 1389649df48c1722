"""Audio files to mono samples at one rate, with headers checked before anything is decoded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import BackendError, ConfigError, CorruptSample, DataError
from qmargin.files import open_regular

if TYPE_CHECKING:
    from soundfile import SoundFile


SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif")
RATES = (1_000, 768_000)
MAX_CHANNELS = 16
MAX_SECONDS = 4 * 3600.0
MAX_SAMPLES = 1 << 28  # decoded at once: 4.6 hours at 16 kHz
LEAST_SAMPLES = 1_680  # at 16 kHz: nine frames, the fewest that speaker networks take
_BLOCK_VALUES = 1 << 22  # of all channels
_EXACT_SEEK = ("WAV", "WAVEX", "FLAC", "AIFF", "RF64", "W64")
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF)  # left by programs that write to a pipe
_OGG_TAIL = 1 << 17  # a page has at most 65,307 bytes
_LARGEST_TERM = 2_000  # largest terms of the ratio of two rates, which limit the length of filters

Samples = NDArray[np.float32]
Source = str | Path | bytes


class AudioInfo(NamedTuple):
    """Facts in the header of an audio file."""

    sample_rate: int
    num_channels: int
    num_samples: int  # per channel
    container: str  # such as "WAV" or "OGG"


Span = Callable[[AudioInfo], tuple[int, int]]


def read_info(source: Source) -> AudioInfo:
    """Header of a file or of encoded bytes, or ``CorruptSample``; nothing is decoded."""
    with _opened(source, MAX_SECONDS) as (_, info):
        return info


def repeated(samples: Samples) -> Samples:
    """Repeat a waveform at 16 kHz that is too short for a speaker network.

    Examples:
        >>> len(repeated(np.zeros(1_000, np.float32))), len(repeated(np.zeros(1_700, np.float32)))
        (2000, 1700)
    """
    return np.tile(samples, -(-LEAST_SAMPLES // len(samples)))


def decode_audio(
    source: Source,
    *,
    sample_rate: int = 16000,  # of the result; polyphase filters change that of the file
    span: Span | None = None,  # of the file to decode, counted in its own rate; None for all
    speed: float = 1.0,  # play the samples faster by this factor, which also changes the pitch
    max_seconds: float = MAX_SECONDS,  # longer files are refused by their header
) -> Samples:
    """Mono samples ``[n]`` in [-1, 1] of a file or of encoded bytes; channels are averaged.

    Raises ``CorruptSample`` if the content does not match the header, or a sample is not finite.
    """
    with _opened(source, max_seconds) as (file, info):
        start, stop = (0, info.num_samples) if span is None else span(info)
        if not 0 <= start < stop <= info.num_samples:
            raise ConfigError(f"span is {start} to {stop}; there are {info.num_samples} samples")
        if stop - start > MAX_SAMPLES:
            found = f"{stop - start:,} samples; at most {MAX_SAMPLES:,} are decoded at once"
            raise CorruptSample(f"{found}, cut the recording")
        mono = _mono(file, info, start, stop)
    if not np.isfinite(mono).all():
        raise CorruptSample("some samples are NaN or infinite")
    return change_rate(np.ascontiguousarray(mono), played_rate(info, speed), sample_rate)


def _mono(file: SoundFile, info: AudioInfo, start: int, stop: int) -> Samples:
    """Mean of the channels over a range of samples; memory follows the content, not the header."""
    at = 0
    if info.container in _EXACT_SEEK:  # seeking in the others is slow or inexact
        at = file.seek(start)
    most = max(1, _BLOCK_VALUES // info.num_channels)
    parts, found = [], 0
    while at < stop:
        block = file.read(min(most, stop - at), dtype="float32", always_2d=True)
        if not len(block):
            break
        wanted = block[max(0, start - at) :]
        at += len(block)
        found += len(wanted)
        is_mono = wanted.shape[1] == 1
        parts.append(wanted[:, 0] if is_mono else wanted.mean(axis=1, dtype=np.float32))
    if found != stop - start:
        decoded = f"{found} of {stop - start} samples could be decoded"
        raise CorruptSample(f"{decoded}; the file is truncated")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def change_rate(samples: Samples, old: float | Fraction, new: float | Fraction) -> Samples:
    """Samples ``[n]`` of rate ``old`` at rate ``new``: ``ceil(n * new / old)`` of them.

    A ratio with large terms is replaced by the nearest with terms up to 2,000, which is off by less
    than one part in a million for any two rates of audio.

    Examples:
        >>> change_rate(np.zeros(441, dtype=np.float32), 44100, 16000).shape
        (160,)
    """
    ratio = Fraction(new) / Fraction(old)
    if max(ratio.numerator, ratio.denominator) > _LARGEST_TERM:
        ratio = ratio.limit_denominator(_LARGEST_TERM)
    if ratio == 1 or not len(samples):
        return samples
    from scipy.signal import resample_poly

    taps = _low_pass(max(ratio.numerator, ratio.denominator))
    changed: Samples = resample_poly(samples, ratio.numerator, ratio.denominator, window=taps)
    return changed.astype(np.float32, copy=False)


def played_rate(info: AudioInfo, speed: float) -> Fraction:
    """Rate that makes a file sound ``speed`` times as fast: exact, so that 1.1 stays 11/10."""
    if not 0.1 <= speed <= 10.0:
        raise ConfigError(f"speed is {speed}; it must be in [0.1, 10]")
    return info.sample_rate * Fraction(str(speed))


@lru_cache(maxsize=64)
def _low_pass(factor: int) -> NDArray[np.float64]:
    from scipy.signal import firwin

    half = 10 * factor  # ten zero crossings on each side
    taps: NDArray[np.float64] = firwin(2 * half + 1, 1.0 / factor, window=("kaiser", 5.0))
    return taps


def check_decoder() -> None:
    """Return the package soundfile; raise if it is missing."""
    try:
        import soundfile  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: the library that it wraps is missing
        found = f"the package soundfile, which reads audio, cannot be imported ({error})"
        raise BackendError(f"{found}; install it with: pip install soundfile") from error


@contextmanager
def _opened(source: Source, max_seconds: float) -> Iterator[tuple[SoundFile, AudioInfo]]:
    check_decoder()
    import soundfile

    given: Any = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as stream:
            _check_container(stream)
        with soundfile.SoundFile(given) as file:
            info = AudioInfo(file.samplerate, file.channels, file.frames, file.format)
            _check_info(info, max_seconds)
            yield file, info
    except CorruptSample:
        raise
    except (OSError, DataError) as error:  # DataError: a pipe, a device or a folder
        reason = getattr(error, "strerror", None) or error
        raise CorruptSample(f"the file cannot be opened: {reason}") from error
    except soundfile.LibsndfileError as error:
        raise CorruptSample(f"it is not audio, or damaged: {error.error_string}") from error


def _check_info(info: AudioInfo, max_seconds: float) -> None:
    (low, high), rate, channels = RATES, info.sample_rate, info.num_channels
    if not low <= rate <= high:
        raise CorruptSample(f"the header says {rate:,} Hz; it must be in [{low:,}, {high:,}]")
    if not 1 <= channels <= MAX_CHANNELS:
        raise CorruptSample(f"the header says {channels} channels; most are {MAX_CHANNELS}")
    if info.num_samples < 1:
        raise CorruptSample("the file has no samples")
    seconds = info.num_samples / rate
    if seconds > max_seconds:
        raise CorruptSample(
            f"the header says {seconds:,.0f} s; at most {max_seconds:,.0f} are read"
        )


def _check_container(stream: BinaryIO) -> None:
    """Raise if the file is shorter than its container says, which decoders do not report."""
    size = stream.seek(0, io.SEEK_END)
    if size == 0:
        raise CorruptSample("the file has zero bytes")
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        _check_riff(stream, size)
    elif head[:4] == b"OggS":
        _check_ogg(stream, size)


def _check_riff(stream: BinaryIO, size: int) -> None:
    place = 12
    while place + 8 <= size:
        stream.seek(place)
        header = stream.read(8)
        length = int.from_bytes(header[4:], "little")
        place += 8
        if header[:4] == b"data":
            if length not in _UNKNOWN_SIZES and place + length > size:
                said = f"the header promises {length:,} bytes and {size - place:,} are there"
                raise CorruptSample(f"{said}; the file is truncated")
            return
        place += length + length % 2  # chunks start at even places
    raise CorruptSample("a WAV file without samples; it is truncated")


def _check_ogg(stream: BinaryIO, size: int) -> None:
    stream.seek(max(0, size - _OGG_TAIL))
    tail = stream.read()
    start = tail.rfind(b"OggS\x00")
    page = tail[start:] if start >= 0 else b""
    is_whole = len(page) >= 27 and len(page) >= 27 + page[26]
    is_whole = is_whole and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
    if not is_whole or not page[5] & 4:
        raise CorruptSample("an Ogg file without its last page; it is truncated")
