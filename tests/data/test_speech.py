"""Chunks of speech: cut, sped up, augmented from a seed; rooms as physics has them."""

import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.recordings import encoded, real_speech, speaker_folders, tone
from qmargin.data.loader import build_loader
from qmargin.data.open import open_audio
from qmargin.data.order import GlobalOrder
from qmargin.data.samples import check_labels, read_sample
from qmargin.data.speech import (
    SNR_DB,
    SPEED_OF_SOUND,
    Noises,
    ResponseFiles,
    Room,
    RoomSimulator,
    SpectrumMasks,
    SpeechAugmentation,
    SpeechDataset,
    add_noise,
    open_speech,
    reverberate,
    room_response,
    tiled,
)
from qmargin.errors import BackendError, ConfigError, CorruptSample, DataError
from qmargin.models.features import FilterBank, subtract_mean


def musan(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for kind, seconds in (("noise", 0.3), ("speech", 3.0), ("music", 5.0)):
        for number in range(2):
            path = root / kind / "part" / f"{number}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            samples = 0.1 * generator.standard_normal(int(seconds * 16000))
            path.write_bytes(encoded(samples.astype(np.float32)))
    return root


def ramps(root: Path, *, seconds: float = 5.0) -> Path:
    """Utterances whose samples say where they are from."""
    count = int(seconds * 16000)
    for speaker in range(2):
        path = root / f"id{speaker}" / "a.wav"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(np.arange(count, dtype=np.float32) / 2**17))
    return root


def test_chunks_are_uniform_parts_of_utterances(tmp_path: Path) -> None:
    dataset = SpeechDataset(open_audio(ramps(tmp_path)), speeds=(1.0,))
    assert dataset.num_samples == 32240
    starts = []
    for seed in range(200):
        chunk, label = dataset.read(1, seed)
        assert (chunk.shape, chunk.dtype, label) == ((32240,), torch.float32, 1)
        places = torch.round(chunk * 2**17 / 4) * 4  # steps of 16-bit audio
        assert (places.diff() >= 0).all()
        starts.append(float(places[0]) / (80000 - 32240))
    low, middle, high = np.quantile(starts, [0.02, 0.5, 0.98])
    assert low < 0.06
    assert 0.4 < middle < 0.6
    assert high > 0.94


def test_short_utterances_are_tiled(tmp_path: Path) -> None:
    dataset = SpeechDataset(open_audio(ramps(tmp_path, seconds=0.5)), speeds=(1.0,))
    chunk, _ = dataset.read(0, 0)
    whole = torch.from_numpy(dataset.recordings[0][0])
    assert torch.equal(chunk, torch.cat([whole] * 5)[:32240])
    assert tiled(np.ones(1, dtype=np.float32), 5).tolist() == [1.0] * 5


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_speeds_make_speakers_of_their_own(rate: int, tmp_path: Path) -> None:
    for speaker in range(3):
        path = tmp_path / f"id{speaker}" / "a.wav"
        path.parent.mkdir()
        path.write_bytes(encoded(tone(4.0, rate=rate, hertz=1000.0), rate=rate))
    dataset = SpeechDataset(open_audio(tmp_path))
    assert dataset.num_classes == 9
    assert dataset.labels is None
    check_labels(dataset)
    counts = np.zeros(3, dtype=int)
    for seed in range(60):
        chunk, label = dataset.read(2, seed)
        turn, speaker = divmod(label, 3)
        assert speaker == 2
        counts[turn] += 1
        spectrum = np.abs(np.fft.rfft(chunk.numpy() * np.hanning(len(chunk))))
        hertz = spectrum.argmax() * 16000 / len(chunk)
        assert hertz == pytest.approx(1000 * (1.0, 0.9, 1.1)[turn], abs=1.0)
    assert counts.min() > 8


def test_labels_are_known_without_speeds(tmp_path: Path) -> None:
    dataset = open_speech(speaker_folders(tmp_path), speed_perturbation=False)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.num_classes == 3
    assert dataset.sample_id(2) == "id1/video/00000.wav"
    assert dataset.source(2).endswith("id1/video/00000.wav")


def test_fine_tuning_keeps_the_classes_of_the_speeds(tmp_path: Path) -> None:
    path = speaker_folders(tmp_path)
    dataset = open_speech(path, speed_perturbation=False, keep_speed_classes=True)
    assert dataset.num_classes == 9
    assert {dataset.read(5, seed)[1] for seed in range(20)} == {2}
    check_labels(dataset)


def full(tmp_path: Path, **options) -> SpeechDataset:
    return open_speech(
        speaker_folders(tmp_path / "wavs"),
        noise_path=str(musan(tmp_path / "musan")),
        simulate_rooms=True,
        augment=0.8,
        num_frames=60,
        **options,
    )


@pytest.mark.parametrize("as_features", [False, True])
def test_a_reading_follows_from_its_seed_alone(as_features: bool, tmp_path: Path) -> None:
    dataset = full(tmp_path, as_features=as_features, mask_probability=0.8 if as_features else 0.0)
    torch.manual_seed(1)
    first = [dataset.read(index, seed)[0] for index in range(6) for seed in range(5)]
    torch.manual_seed(2)
    np.random.seed(5)
    again = [dataset.read(index, seed)[0] for index in range(6) for seed in range(5)]
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert all(torch.isfinite(one).all() for one in first)
    assert len({one.numpy().tobytes() for one in first}) == 30


def test_batches_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    dataset = full(tmp_path)
    order = GlobalOrder(len(dataset), seed=0, batch_size=3)
    batches = []
    for workers in (0, 2):
        with build_loader(dataset, order, stop_step=4, num_workers=workers) as stream:
            batches.append(list(stream))
    for one, two in zip(*batches, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        assert torch.equal(one.labels, two.labels)
        assert one.inputs.shape == (3, 59 * 160 + 400)


def test_a_corrupt_utterance_is_replaced_and_counted(tmp_path: Path) -> None:
    dataset = open_speech(speaker_folders(tmp_path))
    dataset.recordings.path(3).write_bytes(b"<html>")
    dataset.recordings.path(4).unlink()
    for index, reason in ((3, "not audio"), (4, "No such file")):
        sample = read_sample(dataset, index, seed=0, epoch=0)
        assert sample.index not in (3, 4)
        assert reason in sample.replaced[0].reason


def test_dither_has_the_given_size(tmp_path: Path) -> None:
    path = speaker_folders(tmp_path)
    plain = open_speech(path, dither=0.0, speed_perturbation=False)
    noisy = open_speech(path, dither=2.0, speed_perturbation=False)
    difference = 32768 * (noisy.read(0, 7)[0] - plain.read(0, 7)[0])
    assert float(difference.std()) == pytest.approx(2.0, rel=0.03)


def test_features_are_those_of_the_waveform(tmp_path: Path) -> None:
    path = speaker_folders(tmp_path)
    waveform, label = open_speech(path).read(1, 3)
    features, same = open_speech(path, as_features=True).read(1, 3)
    assert features.shape == (200, 80)
    assert same == label
    torch.testing.assert_close(features, subtract_mean(FilterBank()(waveform[None]))[0])


def test_masks_are_spans_of_frames_and_bins(tmp_path: Path) -> None:
    path = speaker_folders(tmp_path)
    plain = open_speech(path, as_features=True)
    masked = open_speech(path, as_features=True, mask_probability=1.0)
    widths = set()
    for seed in range(60):
        zero = (masked.read(0, seed)[0] == 0) & (plain.read(0, seed)[0] != 0)
        frames, bins = zero.all(1).sum().item(), zero.all(0).sum().item()
        assert frames <= 10
        assert bins <= 8
        widths.add((frames, bins))
    assert len({frames for frames, _ in widths}) > 5
    assert len({bins for _, bins in widths}) > 5
    generator = np.random.default_rng(0)
    shares = [bool(SpectrumMasks(0.25).spans((200, 80), generator)) for _ in range(2000)]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("snr", [0.0, 7.0, 30.0])
def test_noise_is_added_at_its_ratio(snr: float) -> None:
    samples = tone()
    noise = np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    mixed = add_noise(samples, noise, snr)
    power = np.mean(samples.astype(float) ** 2) / np.mean((mixed - samples).astype(float) ** 2)
    assert 10 * np.log10(power) == pytest.approx(snr, abs=0.01)
    assert np.array_equal(add_noise(samples, np.zeros_like(noise), snr), samples)


def test_noises_have_their_published_ranges(tmp_path: Path) -> None:
    noises = Noises(musan(tmp_path))
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        noise, snr = noises.draw(20000, generator)
        assert noise.shape == (20000,)
        ratios.append(snr)
    assert SNR_DB == {"noise": (0.0, 15.0), "speech": (10.0, 30.0), "music": (5.0, 15.0)}
    assert min(ratios) < 1.0
    assert max(ratios) > 29.0
    (tmp_path / "more").mkdir()
    (musan(tmp_path / "all") / "speech").rename(tmp_path / "more" / "speech")
    babble = Noises(tmp_path / "more", babble=5)
    loud = [np.var(babble.draw(20000, generator)[0]) for _ in range(20)]
    assert np.mean(loud) == pytest.approx(5 * 0.01, rel=0.8)


def test_reverberation_is_a_truncated_convolution_with_unit_energy() -> None:
    samples = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    response = np.random.default_rng(1).standard_normal(800).astype(np.float32)
    unit = response.astype(float) / np.linalg.norm(response.astype(float))
    expected = np.convolve(samples.astype(float), unit)[:3000]
    np.testing.assert_allclose(reverberate(samples, response), expected, atol=1e-5)
    with pytest.raises(CorruptSample, match="silent"):
        reverberate(samples, np.zeros(10, dtype=np.float32))


def test_a_share_is_augmented_half_by_each_and_has_its_peak_at_one(tmp_path: Path) -> None:
    class Unit:
        def draw(self, generator: np.random.Generator) -> np.ndarray:
            return np.array([0.0, 1.0], dtype=np.float32)  # a delay by one sample

    samples = tone(0.2)
    augmentation = SpeechAugmentation(0.6, Noises(musan(tmp_path)), Unit())
    generator = np.random.default_rng(0)
    kinds = {"same": 0, "delayed": 0, "noisy": 0}
    for _ in range(1000):
        changed = augmentation(samples, generator)
        if changed is samples:
            kinds["same"] += 1
            continue
        assert np.abs(changed).max() == pytest.approx(1.0)
        delayed = np.concatenate([[0.0], samples[:-1]]) / np.abs(samples).max()
        kinds["delayed" if np.allclose(changed, delayed, atol=1e-4) else "noisy"] += 1
    assert kinds["same"] == pytest.approx(400, abs=60)
    assert kinds["delayed"] == pytest.approx(300, abs=60)
    alone = SpeechAugmentation(1.0, responses=Unit())
    assert all(alone(samples, generator) is not samples for _ in range(20))


def test_silence_stays_finite(tmp_path: Path) -> None:
    augmentation = SpeechAugmentation(1.0, Noises(musan(tmp_path)), RoomSimulator())
    for seed in range(6):
        silent = augmentation(np.zeros(8000, dtype=np.float32), np.random.default_rng(seed))
        assert np.isfinite(silent).all()


def test_responses_and_noises_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "room1" / "rir.wav"
    path.parent.mkdir()
    path.write_bytes(encoded(tone(0.1, rate=8000), rate=8000))
    generator = np.random.default_rng(0)
    assert len(ResponseFiles(tmp_path).draw(generator)) == 1600
    noises = Noises(musan(tmp_path / "musan"))
    for file in tmp_path.rglob("*.wav"):
        file.write_bytes(b"broken")
    with pytest.raises(CorruptSample, match=r"impulse response .*\.wav"):
        ResponseFiles(tmp_path).draw(generator)
    with pytest.raises(CorruptSample, match=r"noise .*\.wav: it is not audio"):
        noises.draw(100, generator)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    path = speaker_folders(tmp_path / "wavs")
    make = partial(SpeechDataset, open_audio(path))
    outside = (3.0, 4.0, 1.5)
    for build, words in (
        (lambda: make(num_frames=0), "num_frames is 0"),
        (lambda: make(speeds=(1.0, 1.0)), "speeds are"),
        (lambda: make(speeds=(0.0,)), r"speed is 0\.0"),
        (lambda: make(classes_per_speaker=2), "classes_per_speaker is 2"),
        (lambda: make(masks=SpectrumMasks()), "as_features"),
        (lambda: make(bank=FilterBank(8000, 40)), "8000 Hz and the recordings give 16000"),
        (lambda: open_speech(path, simulate_rooms=True, response_path="a"), "choose one"),
        (lambda: SpeechAugmentation(1.5, responses=RoomSimulator()), r"probability is 1\.5"),
        (SpeechAugmentation, "give one or both"),
        (lambda: SpectrumMasks(max_bins=-1), "max_bins is -1"),
        (lambda: Noises(tmp_path), "MUSAN"),
        (lambda: ResponseFiles(tmp_path / "none"), "no impulse responses"),
        (lambda: Room(ROOM.size, ROOM.source, outside, 0.3), "microphone is at"),
        (lambda: Room(ROOM.size, ROOM.source, ROOM.microphone, 0.0), "reverberation_s is 0"),
        (lambda: RoomSimulator(length=(5, 3)), r"length is \(5, 3\)"),
        (lambda: RoomSimulator(num_rooms=-1), "num_rooms is -1"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            build()


def test_real_speech_makes_batches() -> None:
    dataset = open_speech(real_speech() / "train", simulate_rooms=True)
    assert dataset.num_classes == 120
    order = GlobalOrder(len(dataset), seed=0, batch_size=8)
    with build_loader(dataset, order, stop_step=2) as stream:
        for batch in stream:
            assert batch.inputs.shape == (8, 32240)
            assert not batch.replaced
            features = FilterBank()(batch.inputs)
            assert torch.isfinite(features).all()


ROOM = Room((5.0, 4.0, 3.0), (1.0, 1.0, 1.0), (3.0, 2.0, 1.5), reverberation_s=0.3)


def images_by_mirroring(room: Room, *, order: int) -> list[tuple[float, int]]:
    """Distances and reflections of images, made by mirroring at one wall after another."""
    found = {tuple(round(at, 6) for at in room.source): 0}
    frontier = dict(found)
    for turn in range(1, order + 1):
        fresh = {}
        for place in frontier:
            for axis in range(3):
                for wall in (0.0, room.size[axis]):
                    image = list(place)
                    image[axis] = round(2 * wall - image[axis], 6)
                    if tuple(image) not in found and tuple(image) not in fresh:
                        fresh[tuple(image)] = turn
        found.update(fresh)
        frontier = fresh
    return [(math.dist(place, room.microphone), count) for place, count in found.items()]


def test_early_reflections_are_where_mirrors_put_them() -> None:
    seconds = 0.03
    response = room_response(ROOM, seconds=seconds)
    expected = np.zeros(round(seconds * 16000))
    times = np.arange(len(expected))
    for distance, count in images_by_mirroring(ROOM, order=6):
        delay = distance / SPEED_OF_SOUND * 16000
        if distance < seconds * SPEED_OF_SOUND:
            gain = ROOM.reflection**count / (4 * math.pi * distance)
            expected += gain * np.sinc(times - delay)
    assert np.corrcoef(response, expected)[0, 1] > 0.95
    assert np.abs(response).max() == pytest.approx(np.abs(expected).max(), rel=0.1)


def test_nothing_is_heard_before_the_direct_sound() -> None:
    response = room_response(ROOM)
    arrival = math.dist(ROOM.source, ROOM.microphone) / SPEED_OF_SOUND * 16000
    assert abs(np.abs(response).argmax() - arrival) <= 1
    before = response[: int(arrival) - 12]
    assert np.abs(before).max() < 1e-3 * np.abs(response).max()
    assert abs(response.sum()) < 1e-2 * np.abs(response).sum()  # no offset


@pytest.mark.parametrize("time", [0.2, 0.35, 0.5])
def test_sound_fades_in_the_reverberation_time(time: float) -> None:
    """Schroeder's backward integral falls from -5 to -25 dB in about a third of RT60."""
    room = Room((6.0, 5.0, 3.5), (1.5, 2.0, 1.2), (4.0, 3.1, 1.7), reverberation_s=time)
    energy = np.cumsum(room_response(room, seconds=1.5 * time)[::-1].astype(float) ** 2)[::-1]
    level = 10 * np.log10(energy / energy[0])
    fall = (np.argmax(level < -25) - np.argmax(level < -5)) / 16000
    assert 3 * fall == pytest.approx(time, rel=0.3)


def test_rooms_follow_the_generator() -> None:
    simulator = RoomSimulator()
    first, again = (simulator.draw(np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.dtype == np.float32
    generator = np.random.default_rng(0)
    rooms = [simulator.draw_room(generator) for _ in range(100)]
    assert len({room.size for room in rooms}) == 100
    for room in rooms:
        assert all(3.0 <= side <= 10.0 for side in room.size[:2])
        assert 2.5 <= room.size[2] <= 4.0
        assert 0.15 <= room.reverberation_s <= 0.45
        assert 0.0 <= room.reflection <= 0.99


def test_numbered_rooms_are_simulated_once() -> None:
    simulator = RoomSimulator(reverberation_s=(0.15, 0.16), num_rooms=3)
    drawn = [simulator.draw(np.random.default_rng(seed)) for seed in range(20)]
    assert len({id(response) for response in drawn}) == 3
    again = RoomSimulator(reverberation_s=(0.15, 0.16), num_rooms=3)
    np.testing.assert_array_equal(again.draw(np.random.default_rng(7)), drawn[7])


def test_without_soundfile_nothing_is_opened(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BackendError, match="pip install soundfile"):
        open_speech(tmp_path / "not even looked for")
