"""Filter banks against kaldi-native-fbank, and what a chunk costs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Tables, add_outputs, benchmark_options, write_record
from qmargin.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qmargin.data.speech import SpeechDataset


RATE = 16000
WITHIN_DB = 65.0  # of the loudest bin of a frame; below it, float32 transforms differ by rounding
PACKAGES = ("torch", "numpy", "scipy", "soundfile", "kaldi-native-fbank")  # whose versions matter


@dataclass(frozen=True)
class FeaturesBenchmark:
    """What to measure; the fields are the command's options."""

    audio: str | None = None
    utterances: int = 64
    seconds: float = 2.015
    repeats: int = 9
    threads: int = 1
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.utterances, self.repeats, self.threads) < 1 or self.seconds < 0.025:
            raise ConfigError(
                f"utterances={self.utterances}, repeats={self.repeats}, threads={self.threads} and "
                f"seconds={self.seconds:g} must be at least 1, 1, 1 and 0.025: pass more"
            )


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``features`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "features",
        help="filter banks against kaldi-native-fbank, and the stages of reading a chunk",
        description="Time batched filter banks and kaldi-native-fbank called per utterance on the "
        "same waveforms, in turns, with their largest difference; with --audio, also what reading "
        "and augmenting a chunk costs.",
    )
    defaults = FeaturesBenchmark()
    add = parser.add_argument
    add("--audio", metavar="PATH", help="a folder or list of speech (default: made-up waveforms)")
    add("--utterances", type=int, default=defaults.utterances, help="in a batch")
    add("--seconds", type=float, default=defaults.seconds, help="of each utterance")
    add("--repeats", type=int, default=defaults.repeats, help="timed turns; medians are shown")
    add("--threads", type=int, default=defaults.threads, help="of torch, on a CPU")
    add("--device", default=defaults.device, help="of the batched filter banks: cpu or cuda")
    add("--seed", type=int, default=defaults.seed, help="of what is made up or drawn")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "features")
    run_features_benchmark(FeaturesBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_features_benchmark(
    settings: FeaturesBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Measure, print the tables and write the numbers to ``json_path`` if it is given."""
    import torch

    from qmargin.training.distributed import find_device

    find_device(settings.device)  # one that is not there is refused before anything is made
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        waveforms = made_up(settings) if settings.audio is None else cut(settings)
        banks = time_banks(settings, waveforms)
        stages = {} if settings.audio is None else time_stages(settings)
    finally:
        torch.set_num_threads(before)
    _print(tables or Tables(), settings, banks, stages)
    if json_path is not None:
        write_record(json_path, asdict(settings), {"banks": banks, "stage_ms": stages}, PACKAGES)


def made_up(settings: FeaturesBenchmark) -> NDArray[np.float32]:
    """Noise with the slope of speech's spectrum, and pauses: ``[utterances, samples]``."""
    import numpy as np

    generator = np.random.default_rng(settings.seed)
    shape = (settings.utterances, round(settings.seconds * RATE))
    noise = np.cumsum(generator.standard_normal(shape), axis=1)
    noise -= noise.mean(axis=1, keepdims=True)
    envelope = 0.05 + np.sin(np.linspace(0.0, 20.0, shape[1])) ** 2
    scaled: NDArray[np.float32] = (0.5 * envelope * noise / np.abs(noise).max()).astype(np.float32)
    return scaled


def cut(settings: FeaturesBenchmark) -> NDArray[np.float32]:
    """The beginnings of utterances that are spread over a collection; short ones are tiled."""
    import numpy as np

    from qmargin.data.open import open_audio
    from qmargin.data.speech import tiled

    assert settings.audio is not None
    collection = open_audio(settings.audio)
    chosen = np.linspace(0, len(collection) - 1, settings.utterances).astype(int).tolist()
    return np.stack([tiled(collection[i][0], round(settings.seconds * RATE)) for i in chosen])


def time_banks(settings: FeaturesBenchmark, waveforms: NDArray[np.float32]) -> dict[str, Any]:
    """Seconds per pass over the batch of every contender, and how far apart they are."""
    import torch

    from qmargin.models.features import FilterBank

    bank = FilterBank().to(settings.device)
    batch = torch.from_numpy(waveforms).to(settings.device)
    wait = torch.cuda.synchronize if batch.is_cuda else _nothing

    def batched() -> None:
        bank(batch)
        wait()

    def one_by_one() -> None:
        for row in batch:
            bank(row[None])
        wait()

    contenders: dict[str, Callable[[], object]] = {
        f"FilterBank, batched on {settings.device}": batched,
        f"FilterBank, one by one on {settings.device}": one_by_one,
    }
    results: dict[str, Any] = {}
    if find_spec("kaldi_native_fbank") is not None:
        contenders["kaldi-native-fbank"] = lambda: [kaldi_features(row) for row in waveforms]
        ours = bank(batch).cpu().numpy()
        results["differences"] = _differences(ours, [kaldi_features(row) for row in waveforms])
    with torch.inference_mode():
        seconds = _in_turns(contenders, settings.repeats)
    return {"audio_seconds": waveforms.size / RATE, "seconds": seconds, **results}


def kaldi_features(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features ``[frames, 80]`` of one utterance by kaldi-native-fbank."""
    import kaldi_native_fbank
    import numpy as np

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = "hamming"
    options.mel_opts.num_bins = 80
    options.energy_floor = 0.0
    stream = kaldi_native_fbank.OnlineFbank(options)
    stream.accept_waveform(RATE, samples * np.float32(32768.0))
    stream.input_finished()
    return np.stack([stream.get_frame(place) for place in range(stream.num_frames_ready)])


def _differences(ours: NDArray[np.float32], theirs: list[NDArray[np.float32]]) -> dict[str, float]:
    import numpy as np

    difference = np.abs(ours - np.stack(theirs))
    depth = (ours.max(axis=2, keepdims=True) - ours) * (10.0 / np.log(10.0))
    return {
        "largest": float(difference.max()),
        "largest_heard": float(difference[depth <= WITHIN_DB].max()),
        "share_above_1e-3": float((difference > 1e-3).mean()),
        "median": float(np.median(difference)),
    }


def time_stages(settings: FeaturesBenchmark) -> dict[str, float]:
    """Milliseconds per chunk on one core: decoding, and what every further stage adds to it."""
    from qmargin.data.open import open_audio
    from qmargin.data.speech import SPEEDS, RoomSimulator, SpeechAugmentation, SpeechDataset

    assert settings.audio is not None
    collection = open_audio(settings.audio)
    rooms = SpeechAugmentation(1.0, responses=RoomSimulator())
    few = SpeechAugmentation(1.0, responses=RoomSimulator(num_rooms=8))
    datasets = {
        "decode and cut": SpeechDataset(collection, speeds=(1.0,)),
        "+ speed": SpeechDataset(collection, speeds=SPEEDS[1:]),
        "+ simulated room": SpeechDataset(collection, speeds=(1.0,), augmentation=rooms),
        "+ one of 8 rooms": SpeechDataset(collection, speeds=(1.0,), augmentation=few),
        "+ dither": SpeechDataset(collection, speeds=(1.0,), dither=1.0),
        "+ filter banks": SpeechDataset(collection, speeds=(1.0,), as_features=True),
    }
    readers: dict[str, Callable[[], object]] = {
        name: _reader(dataset, settings) for name, dataset in datasets.items()
    }
    seconds = _in_turns(readers, settings.repeats)
    times = {name: 1e3 * value / settings.utterances for name, value in seconds.items()}
    base = times["decode and cut"]
    return {name: value - base if name[0] == "+" else value for name, value in times.items()}


def _reader(dataset: SpeechDataset, settings: FeaturesBenchmark) -> Callable[[], None]:
    def read() -> None:
        for number in range(settings.utterances):
            dataset.read(number * 7919 % len(dataset), settings.seed + number)

    return read


def _in_turns(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians; turns make a slow spell of the machine meet everyone."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def _print(
    tables: Tables, settings: FeaturesBenchmark, banks: dict[str, Any], stages: dict[str, float]
) -> None:
    audio, seconds = banks["audio_seconds"], banks["seconds"]
    slowest = seconds.get("kaldi-native-fbank")
    tables.show(
        "banks",
        f"80 log-mel bins of {settings.utterances} utterances of {settings.seconds:g} s, "
        f"{settings.threads} threads, medians of {settings.repeats} turns",
        ["by", "ms per batch", "x real time", "x kaldi-native-fbank"],
        [
            [
                name,
                f"{1e3 * value:.1f}",
                f"{audio / value:,.0f}",
                f"{slowest / value:.1f}" if slowest else "not installed",
            ]
            for name, value in seconds.items()
        ],
    )
    if "differences" in banks:
        found = banks["differences"]
        tables.show(
            "differences",
            "differences from kaldi-native-fbank",
            ["median", f"largest within {WITHIN_DB:g} dB", "largest", "share above 1e-3"],
            [
                [
                    f"{found['median']:.1e}",
                    f"{found['largest_heard']:.1e}",
                    f"{found['largest']:.1e}",
                    f"{found['share_above_1e-3']:.1e}",
                ]
            ],
        )
    if stages:
        rows = [[name, f"{value:.2f}"] for name, value in stages.items()]
        tables.show("stages", "reading one chunk on one core", ["stage", "ms"], rows)
