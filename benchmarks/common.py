"""What benchmarks share: measuring in a process of its own, records, laps, pages.

A worker reads a job as JSON from the first argument and writes the result as JSON to standard
output, so that its memory is its own. Nothing here imports torch: a worker's peak would have it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qmargin.cli.tables import output_console, print_table
from qmargin.cli.versions import installed_version
from qmargin.errors import BackendError
from qmargin.files import write_atomically

if TYPE_CHECKING:
    from qmargin.evaluation.result import Result

ROOT = Path(__file__).parents[1]
GIB = 2.0**30
Job: TypeAlias = dict[str, Any]


def benchmark_options(arguments: argparse.Namespace) -> tuple[dict[str, Any], Path | None]:
    """Parsed options as the settings of a benchmark have them, and the file of ``--json``."""
    options: dict[str, Any] = vars(arguments).copy()
    del options["run"]
    json_path: Path | None = options.pop("json")
    return options, json_path


def run_in_process(module: str, job: dict[str, Any], *, what: str, remedy: str) -> dict[str, Any]:
    """What a fresh process found.

    Args:
        module: That takes the job as JSON and writes what it found as JSON.
        job: For the process.
        what: Is done, for a message.
        remedy: For the same.

    Raises:
        BackendError: The process failed; the message has its last line.
    """
    command = [sys.executable, "-m", module, json.dumps(job)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # whatever the folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or ["killed"])[-1]
        raise BackendError(f"{what} failed ({reason}); {remedy}")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def write_record(
    path: Path, settings: dict[str, Any], found: dict[str, Any], packages: Sequence[str] = ()
) -> None:
    """Write settings, machine, versions of packages and numbers as JSON."""
    machine = {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in packages},
    }
    record = {"settings": settings, "machine": machine, **found}
    write_atomically(path, (json.dumps(record, indent=2) + "\n").encode())


def run_evaluation_benchmark(
    worker: str, settings: dict[str, Any], title: str, json_path: Path | None
) -> dict[str, Any]:
    """Make inputs in one process, measure in another, print a line per step; what was found.

    Args:
        worker: Module of both steps, which calls ``run_job``.
        settings: Of the job.
        title: Of the table.
        json_path: Where the numbers are written, if anywhere.
    """
    with tempfile.TemporaryDirectory(prefix="qmargin-bench-") as folder:
        for step in ("make", "measure"):
            job = {**settings, "folder": folder, "step": step}
            what, remedy = f"the step {step!r}", "try smaller sizes"
            found = run_in_process(worker, job, what=what, remedy=remedy)
    rows = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    rows.append(["in all", f"{found['total_seconds']:.1f}"])
    rows.append(["in all, of processors", f"{found['cpu_seconds']:.1f}"])
    peak = f"peak of the process {found['peak_bytes'] / GIB:.2f} GiB"
    print_table(output_console(), f"{title}; {peak}", ["step", "s"], rows)
    if json_path is not None:
        write_record(json_path, settings, found)
    return found


def peak_bytes() -> int:
    """Largest memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Laps:
    """Seconds of one step after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def __call__(self, name: str) -> None:
        """End a step; the next begins."""
        now = time.perf_counter()
        self.seconds[name], self.began = now - self.began, now


def found(seconds: dict[str, float], result: Result) -> Job:
    """Times, memory, and what was measured on how many trials."""
    return {
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
        "cpu_seconds": time.process_time(),
        "peak_bytes": peak_bytes(),
        "num_genuine": result.protocol.num_genuine,
        "num_impostors": result.protocol.num_impostors,
        "eer": result.metrics.eer.value,
        "tar": {f"{point.far_target:g}": point.tar for point in result.metrics.tar},
    }


def run_job(make: Callable[[Job], None], measure: Callable[[Job], Job]) -> None:
    """Take the step that the command line asks for.

    The inputs are made by one process and measured by another: making them leaves no trace in the
    peak of memory.
    """
    job = json.loads(sys.argv[1])
    made: Job = {}
    if job["step"] == "make":
        make(job)
    else:
        made = measure(job)
    sys.stdout.write(json.dumps(made) + "\n")
