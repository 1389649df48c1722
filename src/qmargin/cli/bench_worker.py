"""What the processes of ``qmargin bench protocols`` and ``qmargin bench trials`` share.

Each reads a job as JSON from the first argument and writes the result as JSON to standard output.
The inputs are made by another such process, so that making them leaves no trace in the memory's
peak.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from qmargin.cli.bench_metrics_worker import peak_bytes
from qmargin.evaluation.result import Result

Job: TypeAlias = dict[str, Any]


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
    """Take the step that the command line asks for."""
    job = json.loads(sys.argv[1])
    made: Job = {}
    if job["step"] == "make":
        make(job)
    else:
        made = measure(job)
    sys.stdout.write(json.dumps(made) + "\n")
