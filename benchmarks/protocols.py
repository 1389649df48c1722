"""An evaluation of the size of IJB-C, from files to a result."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    Job,
    Laps,
    Tables,
    add_outputs,
    benchmark_options,
    found,
    run_evaluation_benchmark,
    run_job,
)
from qmargin.errors import ConfigError
from qmargin.evaluation.embed import write_embeddings
from qmargin.evaluation.embeddings import map_embeddings
from qmargin.evaluation.evaluate import EvaluationOptions, StageProgress
from qmargin.evaluation.protocols import ijb as protocol
from qmargin.evaluation.protocols.ijb import read_ijb

SUBJECT = "protocols"
PACKAGES = ("numpy", "scipy")  # whose versions matter


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


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``protocols`` to the subjects of ``python -m benchmarks``."""
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
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, SUBJECT)
    run_protocols_benchmark(ProtocolsBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_protocols_benchmark(
    settings: ProtocolsBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> dict[str, Any]:
    """Measure, print the table and write the numbers to ``json_path`` if it is given."""
    title = (
        f"{settings.images:,} embeddings of {settings.dim}, {settings.templates:,} templates, "
        f"{settings.pairs:,} pairs, {settings.replicates} replicates"
    )
    return run_evaluation_benchmark(
        SUBJECT, asdict(settings), title, json_path=json_path, tables=tables
    )


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
