"""The measurement of ``qmargin bench protocols``, in a process of its own: see ``bench_worker``."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from qmargin.cli.bench_worker import Job, Laps, found, run_job
from qmargin.evaluation.embed import map_embeddings, write_embeddings
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols import templates as protocol
from qmargin.evaluation.protocols.ijb_release import read_ijb

NOISE = 6.0  # of an image, in lengths of its subject's vector: scores of both kinds overlap
_LINES = 1 << 18


def make_release(job: Job) -> None:
    """Write lists and embeddings of a release of the given size, without images."""
    folder = Path(job["folder"])
    (folder / "meta").mkdir()
    random = np.random.default_rng(job["seed"])
    num_templates, num_gallery = job["templates"], job["subjects"]
    template = np.concatenate(
        [np.arange(num_templates), random.integers(0, num_templates, job["images"] - num_templates)]
    )
    media = np.asarray(random.integers(0, 5, job["images"]))
    detector = np.asarray(random.uniform(0.5, 1.0, job["images"]))
    names = [f"{row}.jpg" for row in range(job["images"])]
    lists = {"face_tid_mid": [], "name_5pts_score": []}  # type: dict[str, list[str]]
    for row, name in enumerate(names):
        lists["face_tid_mid"].append(f"{name} {template[row]} {media[row]}\n")
        lists["name_5pts_score"].append(f"{name} {'1 2 ' * 5}{detector[row]:.4f}\n")
    for name, lines in lists.items():
        (folder / "meta" / f"ijbc_{name}.txt").write_text("".join(lines))
    subject = np.append(
        np.arange(num_gallery), random.integers(0, num_gallery, num_templates - num_gallery)
    )
    _write_pairs(folder / "meta" / "ijbc_template_pair_label.txt", subject, job)
    images = _SyntheticImages(subject[template], job)
    out = folder / "embeddings.safetensors"
    write_embeddings(images, images, out, keys=names, model_id="synthetic", batch_size=1024)


def _write_pairs(path: Path, subject: Any, job: Job) -> None:
    """Every probe with its gallery template, then distinct pairs of others in a scattered order."""
    num_gallery, num_probes = job["subjects"], job["templates"] - job["subjects"]
    probes = np.arange(num_gallery, job["templates"])
    total = num_gallery * num_probes
    step = int(0.618 * total) | 1
    while math.gcd(step, total) != 1:
        step += 2
    with path.open("w") as file:
        file.writelines(f"{subject[probe]} {probe} 1\n" for probe in probes)
        left, first = job["pairs"] - num_probes, 0
        while left > 0 and first < total:
            codes = np.arange(first, min(first + _LINES, total)) * step % total
            enrol, test = codes // num_probes, probes[codes % num_probes]
            keep = np.flatnonzero(subject[test] != enrol)[:left]
            rows = zip(enrol[keep].tolist(), test[keep].tolist(), strict=True)
            file.writelines(f"{a} {b} 0\n" for a, b in rows)
            left, first = left - len(keep), first + _LINES


class _SyntheticImages:
    """Images that are their own number, and a model that knows their embeddings."""

    def __init__(self, subject: Any, job: Job) -> None:
        self._subject, self._seed = subject, int(job["seed"])
        random = np.random.default_rng(self._seed + 1)
        self._centres = random.standard_normal((job["subjects"], job["dim"]), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._subject)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.array([index], "<u4").view(np.uint8)[None, None, :3], -1

    def embed(self, images: Any) -> Any:
        """Embeddings of numbered images: the subject's vector plus noise."""
        numbers = images.reshape(-1, 3).astype(np.int64) @ np.array([1, 256, 65536])
        random = np.random.default_rng([self._seed, int(numbers[0])])
        centres = self._centres[self._subject[numbers]]
        noise = random.standard_normal(centres.shape, dtype=np.float32)
        return centres + np.float32(NOISE) * noise


def measure_release(job: Job) -> Job:
    """Seconds of every step from files to a result, and the process's peak memory."""
    folder, lap = Path(job["folder"]), Laps()
    release = read_ijb(folder)
    lap("read lists of images")
    embeddings = map_embeddings(folder / "embeddings.safetensors")
    lap("read embeddings")
    templates = protocol.pool_templates(embeddings.matrix, release.rows)
    del embeddings
    lap("pool templates")
    pairs = release.pairs()
    lap("read pairs")
    progress, laps = _stage_laps()
    options = EvaluationOptions(fars=protocol.IJB_FARS, num_replicates=job["replicates"])
    result = protocol.evaluate_templates(templates, pairs, options, progress=progress)
    total = time.perf_counter() - lap.began
    lap.seconds["score pairs"] = laps["scoring"]
    lap.seconds["measure, with intervals"] = total - laps["scoring"]
    return found(lap.seconds, result)


def _stage_laps() -> tuple[StageProgress, dict[str, float]]:
    """A progress callback that notes how long after the beginning each stage was last heard of."""
    laps: dict[str, float] = {}
    began = time.perf_counter()

    def note(stage: str, done: int, total: int) -> None:
        laps[stage] = time.perf_counter() - began

    return note, laps


if __name__ == "__main__":
    run_job(make_release, measure_release)
