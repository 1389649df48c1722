"""The part of ``qmargin bench metrics`` that goes from files to a result, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.scoring import score_trials
from qmargin.evaluation.trials import read_trials

Job = dict[str, Any]
Made = TypeVar("Made")
FILES_PER_SUBJECT = 8
EMBEDDING_DIM = 256
GENUINE_SHARE = 0.02
NUM_REPLICATES = 1000


def measure_files(job: Job) -> Job:
    """Seconds of every step from a trial list and embeddings to a result with intervals."""
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
