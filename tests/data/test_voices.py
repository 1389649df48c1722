"""Speech as its parameters say: measured from the signal, the same everywhere, fit for training."""

import hashlib

import numpy as np
import pytest
import torch
from scipy.signal import lfilter

from qmargin.data import voices
from qmargin.data.audio import decode_audio
from qmargin.data.open import open_audio
from qmargin.data.people import People
from qmargin.data.speech import open_speech
from qmargin.data.voices import FRAME, RATE, Speaker, Voices, open_voices, spoken
from qmargin.errors import ConfigError
from qmargin.models.features import FilterBank

KEY = np.array([7], np.uint64)


def speaker(**changes):
    plain = {
        "formants": np.ones(5),
        "vowels": np.ones((7, 5)),
        "bandwidths": voices.BANDWIDTHS,
        "tilt": 0.52,
        "rate": 3.0,
    }
    steady = {"pitch_range": 0.05, "jitter": 0.0, "shimmer": 0.0, "breath": 0.0, "sibilants": 1.0}
    return Speaker(**{"pitch": 120.0, **plain, **steady, **changes})


def vowels(signal, tracks, length=640):
    """Pieces of steady, loud voice, and the frames of their middles."""
    for frame in range(8, len(tracks.voice) - 8):
        near = slice(frame - 6, frame + 7)
        middle = frame * FRAME
        piece = signal[middle - length // 2 : middle + length // 2]
        is_steady = np.ptp(tracks.formants[near, :2], axis=0).max() < 40.0
        if len(piece) == length and tracks.voice[near].min() > 0.8 and is_steady:
            yield frame, piece


@pytest.mark.parametrize("pitch", [95.0, 130.0, 210.0])
def test_pitch_is_that_of_the_speaker(pitch):
    who = speaker(pitch=pitch)
    tracks, signal = voices._composed(who, 5.0, KEY), spoken(who, 5.0, KEY)
    errors = []
    for frame, piece in vowels(signal, tracks):
        correlation = np.correlate(piece, piece, "full")[len(piece) - 1 :]
        low, high = int(RATE / 320), int(RATE / 70)
        period = low + int(np.argmax(correlation[low:high]))
        errors.append(abs(RATE / period / tracks.pitch[frame] - 1.0))
    assert len(errors) > 50
    assert np.median(errors) < 0.02


@pytest.mark.parametrize("tract", [0.9, 1.0, 1.15])
def test_formants_are_those_of_the_vocal_tract(tract):
    who = speaker(formants=np.full(5, tract), pitch=100.0)
    tracks, signal = voices._composed(who, 5.0, KEY), spoken(who, 5.0, KEY)
    found, wanted = [], []
    for frame, piece in vowels(signal, tracks):
        windowed = lfilter([1.0, -0.9], 1.0, piece) * np.hamming(len(piece))
        lags = np.correlate(windowed, windowed, "full")[len(piece) - 1 :][:19]
        table = lags[np.abs(np.subtract.outer(np.arange(18), np.arange(18)))]
        roots = np.roots([1.0, *-np.linalg.solve(table, lags[1:])])
        sharp = roots[(roots.imag > 0.0) & (np.abs(roots) > 0.9)]
        peaks = np.sort(np.angle(sharp) * RATE / (2 * np.pi))
        found.append([peaks[np.argmin(np.abs(peaks - f))] for f in tracks.formants[frame, :3]])
        wanted.append(tracks.formants[frame, :3])
    errors = np.abs(np.array(found) / np.array(wanted) - 1.0)
    assert np.median(errors, axis=0).max() < 0.05


def test_speakers_differ_and_relatives_sound_alike():
    people = [Voices(3000, 1).speaker(label) for label in range(3000)]
    tracts = np.array([who.formants for who in people])
    assert 0.05 < tracts[:, 2].std() < 0.12
    families = People(3000, 1).families(np.arange(3000))  # of the same world
    first = np.flatnonzero((families[:-1] == families[1:]) & (families[:-1] >= 0))
    near, far = (np.abs(tracts[first] - tracts[(first + step) % 3000]).mean() for step in (1, 40))
    assert len(first) > 100 and near < 0.85 * far
    pitches = np.array([who.pitch for who in people])
    assert (np.quantile(pitches, 0.05) > 75.0, np.quantile(pitches, 0.95) < 300.0) == (True, True)


def test_samples_are_the_same_on_every_machine():
    found = hashlib.sha256()
    for index in (0, 11, 999):
        found.update(Voices(100, 10, seed=2).waveform(index).tobytes())
    assert found.hexdigest()[:16] == "6ccce2bdb9ac34ec"


def test_a_folder_of_voices_is_read_as_speech(tmp_path):
    made = Voices(3, 2, shortest=2.2, longest=3.0)
    made.write(tmp_path / "train")
    recordings = open_audio(tmp_path / "train")
    assert (len(recordings), recordings.num_classes) == (6, 3)
    dataset = open_speech(tmp_path / "train", speed_perturbation=False, as_features=True)
    features, label = dataset.read(5, seed=0)
    assert (tuple(features.shape), label) == ((200, 80), 2)
    samples = decode_audio(made.encoded(0), sample_rate=RATE)
    np.testing.assert_allclose(samples * 32768, made.waveform(0), atol=1e-3)
    energies = FilterBank()(torch.from_numpy(samples.copy())[None])[0]
    assert energies.std(0).mean() > 1.0  # syllables come and go


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"num_classes": 0}, "num_classes"),
        ({"split": "dev"}, "split"),
        ({"difficulty": -1.0}, "difficulty"),
        ({"shortest": 5.0, "longest": 4.0}, "5.0"),
        ({"longest": 90.0}, "90.0"),
        ({"shortest": 0.1}, "0.1"),
        ({"samples_per_class": 0}, "samples_per_class"),
        ({"in_memory": True, "num_classes": 1_000_000}, "set in_memory to false"),
    ],
)
def test_what_cannot_be_spoken_is_refused(given, key):
    with pytest.raises(ConfigError, match=key):
        Voices(**{"num_classes": 10, "samples_per_class": 2, **given})


def test_speakers_and_utterances_that_there_are_not_are_refused():
    voices = Voices(10, 2)
    for label in (-1, 10):
        with pytest.raises(IndexError, match=r"a label is outside \[0, 10\)"):
            voices.speaker(label)
    with pytest.raises(IndexError, match="sample 20 of 20"):
        voices.sample_id(20)


@pytest.mark.parametrize("share", [-0.1, 2.0, float("nan")])
def test_an_impossible_share_is_refused_without_noise_too(share):
    with pytest.raises(ConfigError, match="augment is"):
        open_voices(4, augment=share)
