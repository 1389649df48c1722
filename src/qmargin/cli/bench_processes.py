"""What benchmarks share that measure in processes of their own, so that memory is theirs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qmargin.cli.tables import output_console, print_table
from qmargin.cli.versions import installed_version
from qmargin.errors import BackendError
from qmargin.files import write_atomically

GIB = 2.0**30


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
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
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
        worker: Module of both steps, see ``bench_worker``.
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
