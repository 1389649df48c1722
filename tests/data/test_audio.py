import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers.recordings import FORMATS, encoded, real_speech, tone
from qmargin.data.audio import AudioInfo, change_rate, decode_audio, played_rate, read_info
from qmargin.errors import BackendError, ConfigError, CorruptSample


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("is_file", [False, True])
def test_every_format_gives_the_samples(suffix: str, is_file: bool, tmp_path: Path) -> None:
    samples = tone(1.5)
    source: Path | bytes = encoded(samples, suffix)
    if is_file:
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(source)
        source = path
    info = read_info(source)
    assert (info.sample_rate, info.num_channels, info.num_samples) == (16000, 1, 24000)
    assert info.num_samples == 1.5 * info.sample_rate
    decoded = decode_audio(source)
    assert decoded.dtype == np.float32
    assert decoded.shape == samples.shape
    if suffix in ("wav", "flac"):
        assert np.array_equal(decoded, samples)
    else:
        middle = slice(2000, -2000)
        assert np.corrcoef(decoded[middle], samples[middle])[0, 1] > 0.99


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_span_is_that_part_of_the_whole(suffix: str) -> None:
    content = encoded(tone(1.5), suffix)
    whole = decode_audio(content)
    part = decode_audio(content, span=lambda info: (5000, info.num_samples - 3000))
    assert np.array_equal(part, whole[5000:-3000])


def test_a_span_outside_the_file_is_refused() -> None:
    for span in ((0, 16001), (-1, 5), (7, 7)):
        with pytest.raises(ConfigError, match="16000 samples"):
            decode_audio(encoded(tone()), span=lambda info, span=span: span)


def test_channels_are_averaged() -> None:
    left, right = tone(hertz=300), tone(hertz=500)
    decoded = decode_audio(encoded(np.stack([left, right], axis=1)))
    np.testing.assert_allclose(decoded, (left + right) / 2, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101, 96000])
def test_any_rate_becomes_the_wanted_one(rate: int) -> None:
    decoded = decode_audio(encoded(tone(rate=rate, hertz=1000), rate=rate))
    assert abs(len(decoded) - 16000) <= 1
    expected = 0.3 * np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    middle = slice(1000, 15000)
    np.testing.assert_allclose(decoded[: len(expected)][middle], expected[middle], atol=3e-3)


def test_a_lower_rate_has_no_aliases() -> None:
    high = tone(rate=48000, hertz=10000)  # above half of 16 kHz
    assert np.abs(change_rate(high, 48000, 16000)[500:-500]).max() < 3e-3


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_moves_pitch_and_length(speed: float) -> None:
    samples = tone(2.0, hertz=1000)
    changed = decode_audio(encoded(samples), speed=speed)
    assert len(changed) == np.ceil(len(samples) / speed)
    spectrum = np.abs(np.fft.rfft(changed * np.hanning(len(changed))))
    assert spectrum.argmax() * 16000 / len(changed) == pytest.approx(1000 * speed, abs=1.0)


def test_speeds_are_exact_ratios() -> None:
    info = AudioInfo(16000, 1, 1, "WAV")
    assert played_rate(info, 1.1) == 17600
    for speed in (0.0, -1.0, 11.0, float("nan")):
        with pytest.raises(ConfigError, match="it must be in"):
            played_rate(info, speed)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.002, 0.3, 0.7, 0.97])
def test_truncated_files_are_corrupt(suffix: str, share: float) -> None:
    """Decoders return what is left without a word; we do not."""
    generator = np.random.default_rng(0)
    content = encoded(0.1 * generator.standard_normal(48000).astype(np.float32), suffix)
    with pytest.raises(CorruptSample):
        decode_audio(content[: int(share * len(content))])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "zero bytes"),
        (b"<!DOCTYPE html><html>404</html>", "not audio, or damaged"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "without samples"),
        (encoded(np.zeros(0, dtype=np.float32)), "no samples"),
        (bytes(5000), "not audio, or damaged"),
    ],
)
def test_what_is_not_audio_is_corrupt(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    for source in (content, path):
        with pytest.raises(CorruptSample, match=message):
            decode_audio(source)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_corrupt(bad: float, tmp_path: Path) -> None:
    samples = tone()
    samples[777] = bad
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    with pytest.raises(CorruptSample, match="NaN or infinite"):
        decode_audio(tmp_path / "a.wav")


def wav(*, rate=16000, channels=1, data=bytes(3200), size=-1):
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    size = len(data) if size < 0 else size
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) & 0xFFFFFFFF) + body


def test_absurd_headers_are_refused_before_decoding() -> None:
    assert len(decode_audio(wav())) == 1600
    with pytest.raises(CorruptSample, match="10 Hz"):
        decode_audio(wav(rate=10))
    with pytest.raises(CorruptSample, match="100 channels"):
        decode_audio(wav(channels=100))
    with pytest.raises(CorruptSample, match=r"promises 2,000,000,000 bytes .* 3,200 are there"):
        decode_audio(wav(size=2_000_000_000))
    with pytest.raises(CorruptSample, match="at most 0 are read"):
        decode_audio(wav(), max_seconds=0.05)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_sizes_left_by_programs_that_write_to_a_pipe_are_accepted(size: int) -> None:
    content = wav(data=struct.pack("<1600h", *range(1600)), size=size)
    if size == 0:
        with pytest.raises(CorruptSample, match="no samples"):
            decode_audio(content)
    else:
        assert len(decode_audio(content)) == 1600


def test_without_soundfile_the_message_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BackendError, match="pip install soundfile"):
        decode_audio(b"RIFF")


def test_random_damage_never_raises_anything_else() -> None:
    generator = np.random.default_rng(0)
    for suffix in FORMATS:
        content = encoded(tone(0.3), suffix)
        for _ in range(40):
            damaged = bytearray(content)
            for place in generator.integers(len(content), size=5):
                damaged[place] = int(generator.integers(256))
            with suppress(CorruptSample):
                decode_audio(bytes(damaged), max_seconds=60.0)


def test_real_speech_decodes_to_its_listed_length() -> None:
    folder = real_speech()
    rows = (folder / "utterances.csv").read_text().splitlines()[1::60]
    for row in rows:
        name, _, _, _, count = row.split(",")
        assert len(decode_audio(folder / name)) == int(count)
