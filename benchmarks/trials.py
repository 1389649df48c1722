"""Speaker trials of the size of VoxCeleb1-H, from files to a result."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    Job,
    Laps,
    Tables,
    add_outputs,
    benchmark_options,
    found,
    run_evaluation_benchmark,
    run_job,
)
from qmargin.errors import ConfigError
from qmargin.evaluation.embed import write_embedding_file
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols.speakers import Scoring, evaluate_speakers
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials

SUBJECT = "trials"
PACKAGES = ("numpy", "scipy")  # whose versions matter


@dataclass(frozen=True)
class TrialsBenchmark:
    """What to measure; the fields are the command's options, and VoxCeleb1-H's sizes by default."""

    trials: int = 550_894
    utterances: int = 137_924
    speakers: int = 1_190
    cohort: int = 5_994
    top: int = 300
    dim: int = 256
    replicates: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.speakers <= self.utterances // 2:
            raise ConfigError(
                f"speakers={self.speakers} utterances={self.utterances}: give at least 2 speakers "
                "and 2 utterances of each"
            )
        if not 2 <= self.top <= self.cohort:
            raise ConfigError(f"top={self.top} is not from 2 to cohort={self.cohort}: lower it")
        if not 2 <= self.trials <= self.utterances * (self.utterances // 4):
            raise ConfigError(
                f"trials={self.trials}: give at least 2, and more utterances for more of them"
            )
        if self.dim < 1 or self.replicates < 0 or self.seed < 0:
            raise ConfigError(
                f"dim={self.dim} replicates={self.replicates} seed={self.seed}: none may be "
                "negative, and dim is at least 1"
            )


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``trials`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "trials",
        help="synthetic speaker trials of the size of VoxCeleb1-H, with AS-norm",
        description="Write a list of trials and embeddings into a temporary folder, then time "
        "reading, scoring with AS-norm and measuring, with the peak memory.",
    )
    defaults = TrialsBenchmark()
    add = parser.add_argument
    add("--trials", type=int, default=defaults.trials, help="half of them genuine")
    add("--utterances", type=int, default=defaults.utterances, help="embeddings")
    add("--speakers", type=int, default=defaults.speakers, help="of the utterances")
    add("--cohort", type=int, default=defaults.cohort, help="other speakers, for AS-norm")
    add("--top", type=int, default=defaults.top, help="of the cohort that count")
    add("--dim", type=int, default=defaults.dim, help="embedding size")
    add("--replicates", type=int, default=defaults.replicates, help="of the bootstrap")
    add("--seed", type=int, default=defaults.seed, help="seed of embeddings and trials")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, SUBJECT)
    run_trials_benchmark(TrialsBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_trials_benchmark(
    settings: TrialsBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> dict[str, Any]:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    title = (
        f"{settings.trials:,} trials of {settings.utterances:,} embeddings of {settings.dim}, "
        f"cohort of {settings.cohort:,} (top {settings.top}), {settings.replicates} replicates"
    )
    return run_evaluation_benchmark(
        SUBJECT, asdict(settings), title, json_path=json_path, tables=tables
    )


NOISE = 2.5  # of an utterance, in lengths of its speaker's vector: scores of both kinds overlap
COHORT_STAGE = "comparing with the cohort"


def make_trials(job: Job) -> None:
    """Write a list in the official form, embeddings of its names and those of a cohort."""
    folder, random = Path(job["folder"]), np.random.default_rng(job["seed"])
    count, num_speakers, dim = job["utterances"], job["speakers"], job["dim"]
    speaker = np.arange(count) % num_speakers
    names = [f"id{10_001 + who}/{row // num_speakers:05d}.wav" for row, who in enumerate(speaker)]
    centres = random.standard_normal((num_speakers, dim), dtype=np.float32)
    noise = random.standard_normal((count, dim), dtype=np.float32)
    matrix = centres[speaker] + np.float32(NOISE) * noise
    write_embedding_file(folder / "embeddings.safetensors", names, matrix)
    others = random.standard_normal((job["cohort"], dim), dtype=np.float32)
    cohort = [f"id{90_001 + who}" for who in range(job["cohort"])]
    write_embedding_file(folder / "cohort.safetensors", cohort, others)
    pairs = _pairs(job, random)
    lines = [f"{int(is_same)} {names[a]} {names[b]}\n" for a, b, is_same in pairs]
    (folder / "trials.txt").write_text("".join(lines))


def _pairs(job: Job, random: np.random.Generator) -> list[tuple[int, int, bool]]:
    """Distinct pairs of utterances, half of them of one speaker."""
    count, num_speakers = job["utterances"], job["speakers"]
    pairs: dict[tuple[int, int], bool] = {}
    while len(pairs) < job["trials"]:
        is_same = len(pairs) < job["trials"] // 2
        first = np.asarray(random.integers(0, count, job["trials"]))
        second = np.asarray(random.integers(0, count, job["trials"]))
        if is_same:  # the speaker is the number modulo the number of speakers
            second = second - second % num_speakers + first % num_speakers
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if b < count and a < b and (a % num_speakers == b % num_speakers) == is_same:
                pairs[a, b] = is_same
            if len(pairs) == (job["trials"] // 2 if is_same else job["trials"]):
                break
    return [(a, b, is_same) for (a, b), is_same in pairs.items()]


def measure_trials(job: Job) -> Job:
    """Seconds of every step from files to a result, and the process's peak memory."""
    folder, lap = Path(job["folder"]), Laps()
    trials = read_trials(folder / "trials.txt")
    lap("read trials")
    embeddings = read_embeddings(folder / "embeddings.safetensors")
    cohort = read_embeddings(folder / "cohort.safetensors", role="cohort")
    lap("read embeddings")

    def note(stage: str, done: int, total: int) -> None:
        if stage == COHORT_STAGE and done == total:
            lap("score, with AS-norm")

    result = evaluate_speakers(
        embeddings,
        trials,
        EvaluationOptions(fars=(1e-3, 1e-4), num_replicates=job["replicates"]),
        scoring=Scoring(center=cohort, norm=CohortNorm(cohort, job["top"])),
        progress=note,
    )
    lap("measure, with intervals")
    return found(lap.seconds, result)


if __name__ == "__main__":
    run_job(make_trials, measure_trials)
