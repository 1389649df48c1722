"""``qmargin bench trials``: speaker trials of the size of VoxCeleb1-H, from files to a result."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.cli.bench_processes import benchmark_options, run_evaluation_benchmark
from qmargin.cli.options import new_file
from qmargin.errors import ConfigError

WORKER = "qmargin.cli.bench_trials_worker"


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


def add_bench_trials(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``trials`` to the subjects of ``qmargin bench``."""
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
    add("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run_bench_trials)


def run_bench_trials(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path = benchmark_options(arguments)
    run_trials_benchmark(TrialsBenchmark(**options), json_path=json_path)


def run_trials_benchmark(
    settings: TrialsBenchmark, *, json_path: Path | None = None
) -> dict[str, Any]:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    title = (
        f"{settings.trials:,} trials of {settings.utterances:,} embeddings of {settings.dim}, "
        f"cohort of {settings.cohort:,} (top {settings.top}), {settings.replicates} replicates"
    )
    return run_evaluation_benchmark(WORKER, asdict(settings), title, json_path)
