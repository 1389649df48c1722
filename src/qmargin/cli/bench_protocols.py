"""``qmargin bench protocols``: an evaluation of the size of IJB-C, from files to a result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.cli.tables import output_console, print_table
from qmargin.errors import BackendError, ConfigError
from qmargin.files import write_atomically

WORKER = "qmargin.cli.bench_protocols_worker"
GIB = 2.0**30


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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run_bench_protocols)


def run_bench_protocols(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options: dict[str, Any] = vars(arguments).copy()
    del options["run"]
    json_path = options.pop("json")
    run_protocols_benchmark(ProtocolsBenchmark(**options), json_path=json_path)


def run_protocols_benchmark(
    settings: ProtocolsBenchmark, *, json_path: Path | None = None
) -> dict[str, Any]:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    with tempfile.TemporaryDirectory(prefix="qmargin-bench-") as folder:
        job = {**asdict(settings), "folder": folder}
        run_worker(WORKER, {**job, "step": "make"})
        found = run_worker(WORKER, {**job, "step": "measure"})
    rows = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    print_table(
        output_console(),
        f"{settings.images:,} embeddings of {settings.dim}, {settings.templates:,} templates, "
        f"{settings.pairs:,} pairs, {settings.replicates} replicates; peak of the process "
        f"{found['peak_bytes'] / GIB:.2f} GiB",
        ["step", "s"],
        [
            *rows,
            ["in all", f"{found['total_seconds']:.1f}"],
            ["in all, of processors", f"{found['cpu_seconds']:.1f}"],
        ],
    )
    if json_path is not None:
        write_record(json_path, asdict(settings), found)
    return found


def write_record(path: Path, settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Write settings, machine and numbers as JSON."""
    machine = {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
    }
    record = {"settings": settings, "machine": machine, **found}
    write_atomically(path, (json.dumps(record, indent=2) + "\n").encode())


def run_worker(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a step of a benchmark in a process of its own, and return what it found."""
    finished = subprocess.run(
        [sys.executable, "-m", module, json.dumps(job)], capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or ["killed"])[-1]
        raise BackendError(f"the step {job['step']!r} failed ({reason}); try smaller sizes")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result
