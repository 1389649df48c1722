"""``qmargin bench metrics``: operating points from many scores, a long stream, and files."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qmargin.cli.bench_processes import benchmark_options, run_in_process, write_record
from qmargin.cli.options import new_file
from qmargin.cli.tables import output_console, print_table, progress_bar
from qmargin.errors import ConfigError

WORKER = "qmargin.cli.bench_metrics_worker"
FARS = (1e-3, 1e-4, 1e-5, 1e-6)
LEAST_LINES = 100
MIB = 2.0**20


@dataclass(frozen=True)
class MetricsBenchmark:
    """What to measure; the fields are the command's options."""

    scores: int = 10_000_000
    genuine: int = 1_000_000
    fars: tuple[float, ...] = FARS
    p_target: float = 0.01
    dtype: str = "float64"
    repeats: int = 5
    stream: int = 1_000_000_000
    chunk: int = 4_000_000
    lines: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.genuine < self.scores:
            raise ConfigError(
                f"genuine={self.genuine} of scores={self.scores} leaves no impostors: pass fewer"
            )
        if not 0 <= self.stream < 2**31:
            raise ConfigError(f"stream={self.stream} is not in [0, {2**31}): pass 0 for none")
        if self.lines and self.lines < LEAST_LINES:
            raise ConfigError(
                f"lines={self.lines} is below {LEAST_LINES}: pass more, or 0 for no files"
            )
        if min(self.repeats, self.chunk) < 1:
            raise ConfigError(
                f"repeats={self.repeats} and chunk={self.chunk} must both be at least 1: pass more"
            )


@dataclass(frozen=True)
class Reading:
    """Medians of one contender over fresh processes, and what it read."""

    name: str
    seconds: float
    seconds_all: list[float]
    extra_bytes: float
    values: list[float]


def add_bench_metrics(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``metrics`` to the subjects of ``qmargin bench``."""
    parser = subjects.add_parser(
        "metrics",
        help="operating points from many scores against scikit-learn, a long stream, files",
        description="Time TAR at several FARs, EER and minDCF from the same scores by this package "
        "and by scikit-learn's exact ROC curve, with the extra memory of each; stream impostors "
        "through ImpostorTail; then go from a trial list and embeddings to a result.",
    )
    defaults = MetricsBenchmark()
    add = parser.add_argument
    add("--scores", type=int, default=defaults.scores, help="number of all scores")
    add("--genuine", type=int, default=defaults.genuine, help="genuine ones among them")
    add("--fars", type=float, nargs="+", default=list(defaults.fars), help="rates to read TAR at")
    add("--p-target", type=float, default=defaults.p_target, help="prior of minDCF")
    add("--dtype", choices=("float64", "float32"), default=defaults.dtype, help="of the scores")
    add("--repeats", type=int, default=defaults.repeats, help="fresh processes; medians are shown")
    add("--stream", type=int, default=defaults.stream, help="impostors of the stream; 0: none")
    add("--chunk", type=int, default=defaults.chunk, help="scores of one update of the stream")
    add("--lines", type=int, default=defaults.lines, help="trials of the files; 0: none")
    add("--seed", type=int, default=defaults.seed, help="seed of the scores")
    add("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run_bench_metrics)


def run_bench_metrics(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path = benchmark_options(arguments)
    options["fars"] = tuple(options["fars"])
    run_metrics_benchmark(MetricsBenchmark(**options), json_path=json_path)


def run_metrics_benchmark(settings: MetricsBenchmark, *, json_path: Path | None = None) -> None:
    """Measure, print the tables and write the numbers to ``json_path`` if it is given."""
    console = output_console()
    missing = [] if find_spec("sklearn") else ["scikit-learn: not installed, so not measured"]
    readings = time_readings(settings, ["qmargin"] if missing else ["qmargin", "sklearn"])
    print_table(
        console,
        f"TAR at {len(settings.fars)} FARs, EER and minDCF from {settings.scores:,} "
        f"{settings.dtype} scores, medians of {settings.repeats} fresh processes",
        ["by", "ms", "x time", "extra MiB", "x memory", "largest difference"],
        [
            *(_reading_row(reading, readings[0]) for reading in readings),
            *([reason, "", "", "", "", ""] for reason in missing),
        ],
    )
    stream = run_worker(settings, "stream") if settings.stream else None
    if stream is not None:
        _print_stream(console, settings, stream)
    files = run_worker(settings, "files") if settings.lines else None
    if files is not None:
        _print_files(console, settings, files)
    if json_path is not None:
        found = {
            "not_measured": missing,
            "readings": [asdict(reading) for reading in readings],
            "stream": stream,
            "files": files,
        }
        write_record(json_path, asdict(settings), found, ("numpy", "scipy", "scikit-learn"))


def time_readings(settings: MetricsBenchmark, names: list[str]) -> list[Reading]:
    """Every contender in turns, so that a slow spell of the machine meets all of them."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with progress_bar() as progress:
        task = progress.add_task("reading", total=settings.repeats * len(names))
        for _ in range(settings.repeats):
            for name in names:
                results[name].append(run_worker(settings, name))
                progress.advance(task)
    return [_reading(name, runs) for name, runs in results.items()]


def _reading(name: str, runs: list[dict[str, Any]]) -> Reading:
    seconds = [run["seconds"] for run in runs]
    extra = statistics.median(run["extra_bytes"] for run in runs)
    return Reading(name, statistics.median(seconds), seconds, extra, runs[0]["values"])


def run_worker(settings: MetricsBenchmark, contender: str) -> dict[str, Any]:
    """What a fresh process measured of one contender."""
    job = {**asdict(settings), "contender": contender}
    return run_in_process(WORKER, job, what=f"measuring {contender}", remedy="try fewer scores")


def _reading_row(reading: Reading, ours: Reading) -> list[str]:
    pairs = zip(reading.values, ours.values, strict=True)
    difference = max(abs(value - own) for value, own in pairs)
    return [
        reading.name,
        f"{1e3 * reading.seconds:.0f}",
        f"{reading.seconds / ours.seconds:.1f}",
        f"{reading.extra_bytes / MIB:.0f}",
        f"{reading.extra_bytes / max(ours.extra_bytes, 1):.1f}",
        f"{difference:.1e}",
    ]


def _print_stream(console: Any, settings: MetricsBenchmark, stream: dict[str, Any]) -> None:
    columns = ("tars", "expected", "false_accepts", "allowed")
    rows = zip(settings.fars, *(stream[name] for name in columns), strict=True)
    print_table(
        console,
        f"stream of {settings.stream:,} impostors: {stream['update_seconds']:.1f} s in update, "
        f"{stream['seconds']:.1f} s with making them, peak of the process "
        f"{stream['peak_bytes'] / MIB:.0f} MiB",
        ["FAR", "TAR", "closed form", "false accepts", "allowed"],
        [
            [f"{far:g}", f"{tar:.5f}", f"{expected:.5f}", f"{accepts:,}", f"{allowed:,}"]
            for far, tar, expected, accepts, allowed in rows
        ],
    )


def _print_files(console: Any, settings: MetricsBenchmark, files: dict[str, Any]) -> None:
    print_table(
        console,
        f"{settings.lines:,} trials of {files['num_files']:,} files and {files['num_subjects']:,} "
        f"subjects, {files['score_file_bytes'] / MIB:.0f} MiB of scores; peak of the process "
        f"{files['peak_bytes'] / MIB:.0f} MiB",
        ["step", "s", "million trials/s"],
        [
            [name, f"{seconds:.2f}", f"{1e-6 * settings.lines / seconds:.2f}"]
            for name, seconds in files["seconds"].items()
        ],
    )
