"""How fast synthetic people and voices are made, on one core."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Tables, add_outputs, benchmark_options, write_record
from qmargin.data.people import People
from qmargin.data.voices import Voices
from qmargin.errors import ConfigError

PACKAGES = ("numpy",)  # whose versions matter
PER_IDENTITY = 10


@dataclass(frozen=True)
class SyntheticBenchmark:
    """What to measure; the fields are the command's options."""

    portraits: int = 640
    utterances: int = 20
    repeats: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("portraits", "utterances", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``synthetic`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "synthetic",
        help="portraits of synthetic people and speech of synthetic speakers, on one core",
        description="Draw portraits of 64 and 112 pixels and synthesise utterances, in turns, in "
        "one process with one thread.",
    )
    defaults = SyntheticBenchmark()
    add = parser.add_argument
    add("--portraits", type=int, default=defaults.portraits, help="of each size")
    add("--utterances", type=int, default=defaults.utterances, help="of 2 to 6 seconds")
    add("--repeats", type=int, default=defaults.repeats, help="timed turns; medians are shown")
    add("--seed", type=int, default=defaults.seed, help="of people and speakers")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "synthetic")
    run_synthetic_benchmark(SyntheticBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_synthetic_benchmark(
    settings: SyntheticBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    count = -(-max(settings.portraits, settings.utterances) // PER_IDENTITY)
    rows = np.arange(settings.portraits)
    faces = {size: People(count, PER_IDENTITY, seed=settings.seed, size=size) for size in (64, 112)}
    voices = Voices(count, PER_IDENTITY, seed=settings.seed)
    spoken = np.arange(settings.utterances)
    seconds_spoken = len(voices.waveforms(spoken)) / voices.sample_rate

    def draw(size: int) -> Callable[[], object]:
        return lambda: faces[size].images(rows)

    contenders: dict[str, tuple[Callable[[], object], float, str]] = {
        "portraits of 64 x 64": (draw(64), settings.portraits, "portraits"),
        "portraits of 112 x 112": (draw(112), settings.portraits, "portraits"),
        "speech at 16 kHz": (lambda: voices.waveforms(spoken), seconds_spoken, "s of speech"),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(settings.repeats + 1):
        for name, (make, _, _) in contenders.items():
            began = time.perf_counter()
            make()
            if turn:  # the first one fills caches
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rates = {name: contenders[name][1] / seconds for name, seconds in medians.items()}
    (tables or Tables()).show(
        "synthetic",
        f"one core, medians of {settings.repeats} turns",
        ["what", "made", "ms", "a second"],
        [
            [name, f"{made:,.0f} {unit}", f"{1e3 * medians[name]:.0f}", f"{rates[name]:,.0f}"]
            for name, (_, made, unit) in contenders.items()
        ],
    )
    if json_path is not None:
        write_record(json_path, asdict(settings), {"seconds": medians, "rates": rates}, PACKAGES)
