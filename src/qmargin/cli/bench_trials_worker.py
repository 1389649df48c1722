"""The measurement of ``qmargin bench trials``, in a process of its own: its memory is its own.

Reads a job as JSON from the first argument and writes the result as JSON to standard output. The
inputs are made by another such process, so that making them leaves no trace in the memory's peak.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from qmargin.cli.bench_metrics_worker import peak_bytes
from qmargin.evaluation.embed_folder import write_embedding_file
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.trials import Scoring, evaluate_speakers
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials

Job: TypeAlias = dict[str, Any]
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
    found: dict[tuple[int, int], bool] = {}
    while len(found) < job["trials"]:
        is_same = len(found) < job["trials"] // 2
        first = np.asarray(random.integers(0, count, job["trials"]))
        second = np.asarray(random.integers(0, count, job["trials"]))
        if is_same:  # the speaker is the number modulo the number of speakers
            second = second - second % num_speakers + first % num_speakers
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if b < count and a < b and (a % num_speakers == b % num_speakers) == is_same:
                found[a, b] = is_same
            if len(found) == (job["trials"] // 2 if is_same else job["trials"]):
                break
    return [(a, b, is_same) for (a, b), is_same in found.items()]


def measure_trials(job: Job) -> Job:
    """Seconds of every step from files to a result, and the process's peak memory."""
    folder, seconds = Path(job["folder"]), {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name] = time.perf_counter() - began
        began = time.perf_counter()

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


def main() -> None:
    """Run the job of the command line."""
    job = json.loads(sys.argv[1])
    if job["step"] == "make":
        make_trials(job)
        sys.stdout.write("{}\n")
    else:
        sys.stdout.write(json.dumps(measure_trials(job)) + "\n")


if __name__ == "__main__":
    main()
