"""Operating points from many scores, a long stream, and files."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import (
    Job,
    Tables,
    add_outputs,
    benchmark_options,
    peak_bytes,
    run_in_process,
    write_record,
)
from qmargin.cli.tables import stage_progress
from qmargin.errors import ConfigError
from qmargin.metrics.eer_dcf import eer, min_dcf
from qmargin.metrics.operating import ImpostorTail, num_allowed, tars_at_fars

WORKER = "benchmarks.metrics"
FARS = (1e-3, 1e-4, 1e-5, 1e-6)
LEAST_LINES = 100
MIB = 2.0**20
PACKAGES = ("numpy", "scipy", "scikit-learn")  # whose versions matter


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


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``metrics`` to the subjects of ``python -m benchmarks``."""
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
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "metrics")
    options["fars"] = tuple(options["fars"])
    run_metrics_benchmark(MetricsBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_metrics_benchmark(
    settings: MetricsBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Measure, print the tables and write the numbers to ``json_path`` if it is given."""
    tables = tables or Tables()
    missing = [] if find_spec("sklearn") else ["scikit-learn: not installed, so not measured"]
    readings = time_readings(settings, ["qmargin"] if missing else ["qmargin", "sklearn"])
    tables.show(
        "readings",
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
        _print_stream(tables, settings, stream)
    files = run_worker(settings, "files") if settings.lines else None
    if files is not None:
        _print_files(tables, settings, files)
    if json_path is not None:
        found = {
            "not_measured": missing,
            "readings": [asdict(reading) for reading in readings],
            "stream": stream,
            "files": files,
        }
        write_record(json_path, asdict(settings), found, PACKAGES)


def time_readings(settings: MetricsBenchmark, names: list[str]) -> list[Reading]:
    """Every contender in turns, so that a slow spell of the machine meets all of them."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    turns = names * settings.repeats
    with stage_progress() as progress:
        for done, name in enumerate(turns):
            progress("reading", done, len(turns))
            results[name].append(run_worker(settings, name))
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


def _print_stream(tables: Tables, settings: MetricsBenchmark, stream: dict[str, Any]) -> None:
    columns = ("tars", "expected", "false_accepts", "allowed")
    rows = zip(settings.fars, *(stream[name] for name in columns), strict=True)
    tables.show(
        "stream",
        f"stream of {settings.stream:,} impostors: {stream['update_seconds']:.1f} s in update, "
        f"{stream['seconds']:.1f} s with making them, peak of the process "
        f"{stream['peak_bytes'] / MIB:.0f} MiB",
        ["FAR", "TAR", "closed form", "false accepts", "allowed"],
        [
            [f"{far:g}", f"{tar:.5f}", f"{expected:.5f}", f"{accepts:,}", f"{allowed:,}"]
            for far, tar, expected, accepts, allowed in rows
        ],
    )


def _print_files(tables: Tables, settings: MetricsBenchmark, files: dict[str, Any]) -> None:
    tables.show(
        "files",
        f"{settings.lines:,} trials of {files['num_files']:,} files and {files['num_subjects']:,} "
        f"subjects, {files['score_file_bytes'] / MIB:.0f} MiB of scores; peak of the process "
        f"{files['peak_bytes'] / MIB:.0f} MiB",
        ["step", "s", "million trials/s"],
        [
            [name, f"{seconds:.2f}", f"{1e-6 * settings.lines / seconds:.2f}"]
            for name, seconds in files["seconds"].items()
        ],
    )


GENUINE_SHIFT = 4.0  # standard deviations between the two kinds of scores
STREAM_STEP = 618_033_989  # visits a stream's values in an order without pattern
GENUINE_STEP = 20  # one genuine score for so many impostors of a stream
MOST_GENUINE = 100_000


def make_scores(job: Job) -> NDArray[Any]:
    """Genuine scores first, then impostors, without leaving a trace in the memory's peak."""
    dtype = np.dtype(job["dtype"])
    scores: NDArray[Any] = np.empty(job["scores"], dtype)
    np.random.default_rng(job["seed"]).standard_normal(dtype=dtype.type, out=scores)
    scores[: job["genuine"]] += dtype.type(GENUINE_SHIFT)
    return scores


def read_with_qmargin(scores: NDArray[Any], job: Job) -> list[float]:
    """TAR at each FAR, EER and minDCF by this package."""
    genuine, impostor = scores[: job["genuine"]], scores[job["genuine"] :]
    tars = [point.tar for point in tars_at_fars(genuine, impostor, job["fars"])]
    cost = min_dcf(genuine, impostor, job["p_target"]).min_dcf
    return [*tars, eer(genuine, impostor).eer, cost]


def read_with_sklearn(scores: NDArray[Any], labels: NDArray[np.bool_], job: Job) -> list[float]:
    """The same by the exact recipe on scikit-learn's full ROC curve."""
    from sklearn.metrics import roc_curve

    far, tar, _ = roc_curve(labels, scores, drop_intermediate=False)
    tars = [float(tar[np.searchsorted(far, limit, side="right") - 1]) for limit in job["fars"]]
    frr = 1.0 - tar
    after = int(np.argmax(far >= frr))
    over, short = far[after] - frr[after], frr[after - 1] - far[after - 1]
    crossing = (far[after - 1] * over + far[after] * short) / (over + short)
    prior = job["p_target"]
    cost = (prior * frr + (1.0 - prior) * far).min() / min(prior, 1.0 - prior)
    return [*tars, float(crossing), float(cost)]


def measure_reading(job: Job) -> Job:
    """Seconds, extra memory and values of one contender."""
    scores = make_scores(job)
    read: Callable[[], list[float]]
    if job["contender"] == "sklearn":
        import_module("sklearn.metrics")  # before the baseline is taken

        labels = np.zeros(len(scores), np.bool_)
        labels[: job["genuine"]] = True
        read = partial(read_with_sklearn, scores, labels, job)
    else:
        read = partial(read_with_qmargin, scores, job)
    baseline = peak_bytes()
    start = time.perf_counter()
    values = read()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "extra_bytes": peak_bytes() - baseline, "values": values}


def measure_stream(job: Job) -> Job:
    """Seconds and memory of a stream of the impostors 0, 1, .. N - 1 in a scattered order."""
    total, size = int(job["stream"]), min(int(job["chunk"]), int(job["stream"]))
    step = STREAM_STEP % total
    while math.gcd(step, total) != 1:
        step += 1
    offsets = (np.arange(size, dtype=np.uint64) * np.uint64(step) % np.uint64(total)).astype("u4")
    tail = ImpostorTail(max(job["fars"]), total)
    update_seconds, start = 0.0, time.perf_counter()
    for first in range(0, total, size):
        values = offsets[: total - first] + np.uint32(first * step % total)
        np.minimum(values, values - np.uint32(total), out=values)  # modulo: the wrong one wraps
        scores = values.astype(np.float64)
        began = time.perf_counter()
        tail.update(scores)
        update_seconds += time.perf_counter() - began
    points = [tail.tar_at_far(stream_genuine(total), far) for far in job["fars"]]
    return {
        "update_seconds": update_seconds,
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak_bytes(),
        "tars": [point.tar for point in points],
        "false_accepts": [point.false_accepts for point in points],
        "expected": [expected_tar(far, total) for far in job["fars"]],
        "allowed": [num_allowed(far, total) for far in job["fars"]],
    }


def stream_genuine(total: int) -> NDArray[np.float64]:
    """Genuine scores half a step above every twentieth of the largest impostors."""
    num_genuine = min(MOST_GENUINE, total // GENUINE_STEP + 1)
    return total - 0.5 - GENUINE_STEP * np.arange(num_genuine, dtype=np.float64)


def expected_tar(far: float, total: int) -> float:
    """TAR of a stream in closed form: impostor number k + 1 is ``total - 1 - k``.

    Examples:
        >>> expected_tar(1e-3, 10**9)
        0.50001
    """
    num_genuine = min(MOST_GENUINE, total // GENUINE_STEP + 1)
    return min(num_genuine, num_allowed(far, total) // GENUINE_STEP + 1) / num_genuine


def main() -> None:
    """Run the job of the command line."""
    job = json.loads(sys.argv[1])
    if job["contender"] == "stream":
        result = measure_stream(job)
    elif job["contender"] == "files":
        result = {**measure_files(job), "peak_bytes": peak_bytes()}
    else:
        result = measure_reading(job)
    sys.stdout.write(json.dumps(result) + "\n")


Made = TypeVar("Made")
FILES_PER_SUBJECT = 8
EMBEDDING_DIM = 256
GENUINE_SHARE = 0.02
NUM_REPLICATES = 1000


def measure_files(job: Job) -> Job:
    """Seconds of every step from a trial list and embeddings to a result with intervals."""
    from qmargin.evaluation.embeddings import read_embeddings
    from qmargin.evaluation.evaluate import EvaluationOptions, evaluate_scores
    from qmargin.evaluation.scores import read_scores
    from qmargin.evaluation.scoring import score_trials
    from qmargin.evaluation.trials import read_trials

    steps: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Made]) -> Made:
        start = time.perf_counter()
        made = work()
        steps[name] = time.perf_counter() - start
        return made

    with TemporaryDirectory() as folder:
        lists, vectors, out = (Path(folder, name) for name in ("trials.txt", "e.npz", "scores.tsv"))
        write_inputs(job, lists, vectors)
        trials = timed("read_trials", lambda: read_trials(lists))
        embeddings = timed("read_embeddings", lambda: read_embeddings(vectors))
        timed("score_trials", lambda: score_trials(embeddings, trials, out=out))
        score_set = timed("read_scores", lambda: read_scores(out))
        timed("trials_sha256", score_set.trials_sha256)
        fars = tuple(job["fars"])
        for number in (0, NUM_REPLICATES):
            options = EvaluationOptions(fars=fars, num_replicates=number, seed=job["seed"])
            name = f"evaluate_scores, {number or 'no'} replicates"
            timed(name, partial(evaluate_scores, score_set, options))
        return {"seconds": steps, "score_file_bytes": out.stat().st_size, **_sizes(job["lines"])}


def _sizes(lines: int) -> dict[str, int]:
    """So many subjects that the trials are a small share of all pairs of files."""
    num_subjects = max(20, math.isqrt(lines))
    return {"num_subjects": num_subjects, "num_files": num_subjects * FILES_PER_SUBJECT}


def write_inputs(job: Job, lists: Path, vectors: Path) -> None:
    """A list of distinct trials in the order of VoxCeleb, and embeddings of its files."""
    sizes, rng = _sizes(job["lines"]), np.random.default_rng(job["seed"])
    num_files = sizes["num_files"]
    subject = np.arange(num_files) // FILES_PER_SUBJECT
    names = np.array([f"id{owner:05d}/{i:07d}.wav" for i, owner in enumerate(subject.tolist())])
    centres = rng.standard_normal((sizes["num_subjects"], EMBEDDING_DIM), np.float32)
    noise = rng.standard_normal((num_files, EMBEDDING_DIM), np.float32)
    np.savez(vectors, keys=names, embeddings=centres[subject] + 2.5 * noise)
    pairs = _pairs(job["lines"], num_files, rng)
    with lists.open("w", encoding="utf-8") as file:
        for enrol, test in pairs.tolist():
            label = int(subject[enrol] == subject[test])
            file.write(f"{label} {names[enrol]} {names[test]}\n")


def _pairs(lines: int, num_files: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Distinct pairs of distinct files, ``[lines, 2]``, a small share of them genuine."""
    num_genuine = max(1, int(GENUINE_SHARE * lines))
    first = rng.integers(num_files, size=4 * num_genuine)
    step = rng.integers(1, FILES_PER_SUBJECT, size=len(first))
    start = first // FILES_PER_SUBJECT * FILES_PER_SUBJECT
    second = start + (first - start + step) % FILES_PER_SUBJECT
    genuine = np.unique(first * num_files + second)[:num_genuine]
    codes = np.unique(rng.integers(num_files * num_files, size=2 * lines))
    enrol, test = np.divmod(codes, num_files)
    others = codes[enrol // FILES_PER_SUBJECT != test // FILES_PER_SUBJECT]
    chosen = np.concatenate([genuine, rng.permutation(others)[: lines - len(genuine)]])
    return np.stack(np.divmod(rng.permutation(chosen), num_files), axis=1)


if __name__ == "__main__":
    main()
