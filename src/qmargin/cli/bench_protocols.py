"""``qmargin bench protocols``: an evaluation of the size of IJB-C, from files to a result."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.cli.bench_processes import benchmark_options, run_evaluation_benchmark
from qmargin.cli.options import new_file
from qmargin.errors import ConfigError

WORKER = "qmargin.cli.bench_protocols_worker"


@dataclass(frozen=True)
class ProtocolsBenchmark:
    """What to measure; the fields are the command's options, and IJB-C's sizes by default."""

    images: int = 469_375
    templates: int = 23_124
    subjects: int = 3_531
    pairs: int = 15_658_489
    dim: int = 512
    replicates: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 < self.subjects < self.templates <= self.images:
            raise ConfigError(
                f"subjects={self.subjects} templates={self.templates} images={self.images} do not "
                "grow: give more images than templates than subjects, at least 2"
            )
        num_probes = self.templates - self.subjects
        if not num_probes < self.pairs <= self.subjects * num_probes:
            raise ConfigError(
                f"pairs={self.pairs} is not above {num_probes}, the genuine ones, and at most "
                f"{self.subjects * num_probes}: give such a number"
            )
        if self.dim < 1 or self.replicates < 0 or self.seed < 0:
            raise ConfigError(
                f"dim={self.dim} replicates={self.replicates} seed={self.seed}: none may be "
                "negative, and dim is at least 1"
            )


def add_bench_protocols(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``protocols`` to the subjects of ``qmargin bench``."""
    parser = subjects.add_parser(
        "protocols",
        help="a synthetic evaluation of the size of IJB-C",
        description="Write the lists and embeddings of a synthetic release into a temporary "
        "folder, then time reading, pooling, scoring and measuring, with the peak memory.",
    )
    defaults = ProtocolsBenchmark()
    add = parser.add_argument
    add("--images", type=int, default=defaults.images, help="embeddings")
    add("--templates", type=int, default=defaults.templates, help="sets of images")
    add("--subjects", type=int, default=defaults.subjects, help="people, one gallery template each")
    add("--pairs", type=int, default=defaults.pairs, help="templates compared, genuine ones too")
    add("--dim", type=int, default=defaults.dim, help="embedding size")
    add("--replicates", type=int, default=defaults.replicates, help="of the bootstrap")
    add("--seed", type=int, default=defaults.seed, help="seed of the embeddings")
    add("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run_bench_protocols)


def run_bench_protocols(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path = benchmark_options(arguments)
    run_protocols_benchmark(ProtocolsBenchmark(**options), json_path=json_path)


def run_protocols_benchmark(
    settings: ProtocolsBenchmark, *, json_path: Path | None = None
) -> dict[str, Any]:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    title = (
        f"{settings.images:,} embeddings of {settings.dim}, {settings.templates:,} templates, "
        f"{settings.pairs:,} pairs, {settings.replicates} replicates"
    )
    return run_evaluation_benchmark(WORKER, asdict(settings), title, json_path)
