import numpy as np
import pytest
import soundfile
import torch

from helpers.recordings import real_speech
from qmargin.errors import ConfigError, ShapeError
from qmargin.models.features import FLOOR, FilterBank, mel_triangles

kaldi = pytest.importorskip("kaldi_native_fbank")
EPSILON = 1e-3
DEPTH = 65 / 10 * np.log(10)  # 65 dB in natural logarithms


def kaldi_features(samples, *, window="hamming", rate=16000, bins=80) -> np.ndarray:
    options = kaldi.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = window
    options.mel_opts.num_bins = bins
    options.energy_floor = 0.0
    stream = kaldi.OnlineFbank(options)
    stream.accept_waveform(rate, samples * np.float32(32768))
    stream.input_finished()
    return np.stack([stream.get_frame(place) for place in range(stream.num_frames_ready)])


def definition(samples: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Kaldi's description of a filter bank, step by step in float64, one frame at a time."""
    rows = []
    for start in range(0, len(samples) - 400 + 1, 160):
        frame = samples[start : start + 400].astype(np.float64) * 32768
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, n=512)) ** 2
        low, high = (1127 * np.log(1 + hertz / 700) for hertz in (20, 8000))
        step = (high - low) / 81
        row = []
        for number in range(80):
            left, centre, right = (low + step * (number + turn) for turn in range(3))
            energy = 0.0
            for point in range(256):
                place = 1127 * np.log(1 + point * 16000 / 512 / 700)
                if left < place <= centre:
                    energy += power[point] * (place - left) / (centre - left)
                elif centre < place < right:
                    energy += power[point] * (right - place) / (right - centre)
            row.append(np.log(max(energy, np.finfo(np.float32).eps)))
        rows.append(row)
    return np.array(rows)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Differences are below 1e-3 wherever a bin is at most 65 dB below the loudest of its frame.

    Below that, a transform in float32 is made of its rounding errors, Kaldi's as well as ours: each
    is up to several 1e-3 away from float64 there. Returns how many entries differ by more.
    """
    assert ours.shape == theirs.shape
    difference = np.abs(ours - theirs)
    is_heard = ours >= ours.max(axis=1, keepdims=True) - DEPTH
    assert difference[is_heard].max() <= EPSILON
    assert difference.max() <= 0.03
    return int((difference > EPSILON).sum())


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_features_follow_the_definition():
    samples = noise(1, 1200) + 0.2  # an offset shows whether the mean is removed
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(400) / 399)
    expected = definition(samples[0].numpy(), window)
    np.testing.assert_allclose(FilterBank()(samples)[0], expected, rtol=0, atol=1e-4)
    double = FilterBank().double()(samples.double())[0]
    np.testing.assert_allclose(double, expected, rtol=0, atol=1e-5)  # constants are float32


@pytest.mark.parametrize(("rate", "bins"), [(16000, 80), (16000, 40), (8000, 40), (22050, 64)])
@pytest.mark.parametrize(
    ("window", "theirs"), [("hamming", "hamming"), ("povey", "povey"), ("hann", "hanning")]
)
def test_noise_has_kaldis_features(window, theirs, rate, bins):
    samples = noise(3, 2 * rate)
    ours = FilterBank(rate, bins, window)(samples).numpy()
    for row, waveform in zip(ours, samples.numpy(), strict=True):
        expected = kaldi_features(waveform, window=theirs, rate=rate, bins=bins)
        assert assert_close(row, expected) <= 2


@pytest.mark.parametrize("window", ["hamming", "povey"])
def test_real_speech_has_kaldis_features(window):
    """All but a few values in a million agree, and in those Kaldi is as far from float64 as we are.

    On all 48,838,160 values, 32 (Hamming) and 61 (Povey) differ by more than 1e-3; 21 and 40 of
    ours, and 17 and 42 of Kaldi's, are further than that from float64.
    """
    bank, wide = FilterBank(window=window), FilterBank(window=window).double()
    count = num_apart = 0
    errors = {"ours": 0, "theirs": 0}
    for path in sorted(real_speech().glob("*/*/A0[0-4].ogg"))[:150]:
        samples, _ = soundfile.read(path, dtype="float32")
        waveform = torch.from_numpy(samples)[None]
        ours, theirs = bank(waveform)[0].numpy(), kaldi_features(samples, window=window)
        num_apart += assert_close(ours, theirs)
        truth = wide(waveform.double())[0].numpy()
        for name, features in (("ours", ours), ("theirs", theirs)):
            errors[name] += int((np.abs(features - truth) > EPSILON).sum())
        count += ours.size
    assert count > 1_000_000
    assert num_apart <= 3e-6 * count
    assert errors["ours"] <= 2 * errors["theirs"] + 4  # rare events: both are a handful


def test_rows_and_parts_do_not_depend_on_each_other():
    """Long waveforms are worked on in blocks of 512 frames."""
    samples, bank = noise(3, 160 * 700 + 400), FilterBank()
    together = bank(samples)
    assert together.shape == (3, 701, 80)
    torch.testing.assert_close(bank(samples[1:2])[0], together[1], rtol=0, atol=1e-5)
    start = 160 * 400
    part = bank(samples[:, start : start + 32240])
    torch.testing.assert_close(together[:, 400 : 400 + 200], part, rtol=0, atol=1e-5)


def test_an_empty_batch_has_no_rows():
    assert FilterBank()(torch.zeros(0, 720)).shape == (0, 3, 80)


@pytest.mark.parametrize("num_samples", [400, 559, 560, 561, 16000, 32240])
def test_frames_lie_inside_the_waveform(num_samples):
    bank = FilterBank()
    expected = len(range(0, num_samples - 400 + 1, 160))
    assert bank.num_frames(num_samples) == expected
    assert bank(noise(1, num_samples)).shape == (1, expected, 80)
    assert bank.num_frames(bank.num_samples(expected)) == expected
    assert bank.num_frames(bank.num_samples(expected) - 1) == expected - 1


def test_silence_is_at_the_floor():
    bank = FilterBank()
    assert bank.state_dict() == {} and not list(bank.parameters())
    features = bank(torch.zeros(1, 1600))
    assert torch.equal(features, torch.full_like(features, np.log(FLOOR)))


def test_autocast_and_half_waveforms_keep_float32_features():
    samples = noise(2, 4000)
    bank = FilterBank()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bank(samples), bank.float()(samples))
    half = samples.half()
    assert torch.equal(bank(half), bank(half.float()))


def test_dither_is_noise_of_the_given_size_in_training_only():
    silence = torch.zeros(4, 160000)
    bank = FilterBank(dither=1.0)
    dithered = bank(silence)
    reference = kaldi_features(np.random.RandomState(0).randn(160000).astype(np.float32) / 32768)
    np.testing.assert_allclose(dithered.mean((0, 1)), reference.mean(0), atol=0.25)
    assert torch.equal(bank.eval()(silence), FilterBank()(silence))


def test_mean_subtraction():
    samples = noise(2, 8000)
    features = FilterBank(subtract_mean=True)(samples)
    torch.testing.assert_close(features.mean(1), torch.zeros(2, 80), rtol=0, atol=1e-5)
    raw = FilterBank()(samples)
    torch.testing.assert_close(features, raw - raw.mean(1, keepdim=True))


def test_gradients_reach_the_waveform():
    bank = FilterBank(num_bins=10).double()
    samples = noise(1, 600).double().requires_grad_()
    assert torch.autograd.gradcheck(bank, samples, atol=1e-4)


def test_the_exported_graph_gives_the_same_features():
    bank = FilterBank().eval()
    dynamic = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("time", min=560)}
    program = torch.export.export(bank, (noise(2, 4000),), dynamic_shapes=(dynamic,))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("conv1d" in name for name in names)
    assert not any("fft" in name for name in names)
    for shape in ((2, 4000), (1, 16000), (5, 777)):
        samples = noise(*shape, seed=1)
        exported = program.module()(samples).numpy()
        for row, expected in zip(exported, bank(samples).numpy(), strict=True):
            assert_close(row, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "kaiser"}, "window is 'kaiser'"),
        ({"num_bins": 0}, "num_bins is 0"),
        ({"num_bins": 400}, "num_bins is 400"),
        ({"sample_rate": 0}, "sample_rate is 0"),
        ({"shift_ms": 0.0}, "frame_shift is 0"),
        ({"frame_ms": 0.01}, "frames have 0 samples"),
        ({"dither": float("nan")}, "dither is nan"),
        ({"high_hz": 9000.0}, "to 9000 Hz"),
        ({"low_hz": 7000.0, "high_hz": -2000.0}, "from 7000 to 6000 Hz"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        FilterBank(**options)


@pytest.mark.parametrize(
    "waveforms",
    [
        torch.zeros(16000),
        torch.zeros(1, 1, 16000),
        torch.zeros(1, 16000).short(),
        torch.zeros(1, 399),  # shorter than a frame
    ],
)
def test_wrong_inputs_are_refused(waveforms):
    with pytest.raises(ShapeError, match="waveforms have"):
        FilterBank()(waveforms)


def test_constants_in_half_precision_are_refused():
    with pytest.raises(ConfigError, match="float16"):
        FilterBank().half()(torch.zeros(1, 400))


def test_triangles_overlap_and_the_highest_point_has_no_weight():
    weights = mel_triangles(20, fft_size=512, sample_rate=16000, low=20, high=8000)
    assert weights.shape == (257, 20)
    assert not weights[256].any()
    inner = weights.sum(1)[(weights > 0).sum(1) == 2]  # between two centres
    torch.testing.assert_close(inner, torch.ones_like(inner))
