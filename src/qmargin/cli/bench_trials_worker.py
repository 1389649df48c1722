"""The measurement of ``qmargin bench trials``, in a process of its own: see ``bench_worker``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qmargin.cli.bench_worker import Job, Laps, found, run_job
from qmargin.evaluation.embed_folder import write_embedding_file
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.trials import Scoring, evaluate_speakers
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials

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
