"""Records against a folder of the same images, the loader, the index."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import (
    Job,
    Tables,
    add_outputs,
    benchmark_options,
    peak_bytes,
    run_in_process,
    write_record,
)
from qmargin.data.images import encode_image
from qmargin.data.open import open_images, open_index
from qmargin.data.readers.recordio import RecordWriter, pack_payload
from qmargin.data.stored import ImageDataset
from qmargin.errors import ConfigError

WORKER = "benchmarks.data"
MIB = 2.0**20
PACKAGES = ("numpy", "torch", "pillow", "simplejpeg")  # whose versions matter


@dataclass(frozen=True)
class DataBenchmark:
    """What to measure; the fields are the command's options."""

    images: int = 4000
    records: int = 1_000_000
    record_bytes: int = 1000
    batch: int = 128
    workers: int = 2
    repeats: int = 3
    decoder: str = "pillow"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("images", "batch", "workers", "repeats", "record_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch > self.images:
            raise ConfigError(f"batch is {self.batch} of {self.images} images; pass fewer")
        if self.records < 0:
            raise ConfigError(f"records is {self.records}; pass 0 to index none")


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "data",
        help="records against a folder of the same images, the loader, the index",
        description="Make faces of noise and store them as RecordIO and as a folder; read both in "
        "order and at random, in turns; compare the loader with a bare loop that decodes; index "
        "many records in a fresh process.",
    )
    defaults = DataBenchmark()
    add = parser.add_argument
    add("--images", type=int, default=defaults.images, help="112 x 112 JPEGs to make")
    add("--records", type=int, default=defaults.records, help="records to index; 0: none")
    add("--record-bytes", type=int, default=defaults.record_bytes, help="of each of them")
    add("--batch", type=int, default=defaults.batch, help="of the loader")
    add("--workers", type=int, default=defaults.workers, help="of the loader and of the bare loop")
    add("--repeats", type=int, default=defaults.repeats, help="turns; medians are shown")
    add("--decoder", choices=("pillow", "simplejpeg"), default=defaults.decoder, help="of JPEGs")
    add("--seed", type=int, default=defaults.seed, help="seed of images and order")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "data")
    run_data_benchmark(DataBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_data_benchmark(
    settings: DataBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Measure, print the tables and write the numbers to ``json_path`` if it is given."""
    tables = tables or Tables()
    with tempfile.TemporaryDirectory() as folder:
        reading = run_worker(settings, "reading", folder)
        tables.show(
            "reading",
            f"{settings.images:,} JPEGs of {reading['mean_bytes']:.0f} bytes on average, medians "
            f"of {settings.repeats} turns, samples per second",
            ["read", "records", "folder", "records / folder"],
            [
                [name, f"{records:,.0f}", f"{files:,.0f}", f"{records / files:.2f}"]
                for name, (records, files) in reading["rates"].items()
            ],
        )
        loading = run_worker(settings, "loading", folder)
        _print_loading(tables, settings, loading)
        indexing = run_worker(settings, "indexing", folder) if settings.records else None
    if indexing is not None:
        tables.show(
            "indexing",
            f"index of {settings.records:,} records of {settings.record_bytes:,} bytes",
            ["", "value"],
            [
                ["seconds", f"{indexing['seconds']:.1f}"],
                ["records per second", f"{settings.records / indexing['seconds']:,.0f}"],
                ["peak of the process, MiB", f"{indexing['peak_bytes'] / MIB:.0f}"],
                ["of which before indexing", f"{indexing['before_bytes'] / MIB:.0f}"],
                ["size of the index, MiB", f"{indexing['index_bytes'] / MIB:.0f}"],
            ],
        )
    if json_path is not None:
        found = {"reading": reading, "loading": loading, "indexing": indexing}
        write_record(json_path, asdict(settings), found, PACKAGES)


def _print_loading(tables: Tables, settings: DataBenchmark, loading: dict[str, Any]) -> None:
    bare_rate, bare_cpu = loading["bare"]
    rows = [
        [
            name,
            f"{rate:,.0f}",
            f"{rate / bare_rate:.2f}",
            f"{cpu:.0f}",
            f"{bare_cpu / cpu:.2f}" if cpu else "-",
        ]
        for name, (rate, cpu) in (
            ("bare loop that decodes", loading["bare"]),
            ("loader: decode, flip, batch", loading["loader"]),
        )
    ]
    tables.show(
        "loading",
        f"batches of {settings.batch} by {settings.workers} processes, {settings.decoder}; memory "
        f"{loading['first_bytes'] / MIB:.0f} MiB after half an epoch and "
        f"{loading['last_bytes'] / MIB:.0f} MiB after two",
        ["", "samples / s", "of bare", "CPU us / sample", "of bare"],
        rows,
    )


def run_worker(settings: DataBenchmark, part: str, folder: str) -> dict[str, Any]:
    """What a fresh process measured."""
    job = {**asdict(settings), "part": part, "folder": folder}
    return run_in_process(WORKER, job, what=f"measuring {part}", remedy="try fewer images")


PER_IDENTITY = 20
WARM_UP = 12  # steps: more than workers read ahead
MEMORY_EVERY = 8  # steps: looking costs time too


def measure_reading(job: Job) -> dict[str, Any]:
    """Samples per second of both layouts: bytes and pictures, in order and at random."""
    folder = Path(job["folder"])
    total = make_images(job, folder)
    datasets = [
        open_images(folder / name, decoder=job["decoder"]) for name in ("train.rec", "faces")
    ]
    orders = {
        "in order": np.arange(job["images"]),
        "at random": np.random.default_rng(job["seed"]).permutation(job["images"]),
    }
    rates = {}
    for what in ("bytes", "pictures"):
        for name, order in orders.items():
            times: list[list[float]] = [[], []]
            for _ in range(job["repeats"]):
                for place, dataset in enumerate(datasets):  # in turns: a slow spell meets both
                    read = dataset.read if what == "bytes" else dataset.decode
                    times[place].append(_seconds(read, order.tolist()))
            medians = [statistics.median(values) for values in times]
            rates[f"{what}, {name}"] = [job["images"] / seconds for seconds in medians]
    return {"rates": rates, "mean_bytes": total / job["images"]}


def _seconds(read: Callable[[int], object], order: Iterable[int]) -> float:
    start = time.perf_counter()
    for row in order:
        read(row)
    return time.perf_counter() - start


def make_images(job: Job, folder: Path) -> int:
    """Store the same JPEGs as records and as a folder; returns their bytes."""
    random = np.random.default_rng(job["seed"])
    total = 0
    with RecordWriter(folder / "train.rec") as writer:
        for number in range(job["images"]):
            data = noise_face(random)
            total += len(data)
            label = number // PER_IDENTITY
            writer.write(number, pack_payload(label, data))
            path = folder / "faces" / f"{label:07d}" / f"{number % PER_IDENTITY:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return total


def noise_face(random: np.random.Generator) -> bytes:
    """A JPEG with about as many bytes as one of a face: smooth shapes and some grain."""
    from PIL import Image

    coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((112, 112), Image.Resampling.BICUBIC)
    grain = random.normal(0.0, 6.0, (112, 112, 3))
    pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
    return encode_image(pixels, quality=90)


class Pace(NamedTuple):
    """How fast samples came, and what they cost all processes together."""

    samples_per_second: float
    cpu_microseconds: float  # per sample; other work on the machine changes it little


def measure_loading(job: Job) -> dict[str, Any]:
    """The loader against bare loops in as many processes, in turns; and memory of two epochs."""
    dataset = open_images(Path(job["folder"]) / "train.rec", decoder=job["decoder"])
    memory: list[int] = []
    paces: dict[str, list[Pace]] = {"bare": [], "loader": []}
    for _ in range(job["repeats"]):  # in turns: a slow spell meets both
        paces["bare"].append(_bare_pace(dataset, job["workers"]))
        memory = []
        paces["loader"].append(_loader_pace(dataset, job, memory))
    return {
        **{
            kind: [statistics.median(values) for values in zip(*found, strict=True)]
            for kind, found in paces.items()
        },
        "first_bytes": memory[len(memory) // 4],
        "last_bytes": memory[-1],
    }


def _bare_pace(dataset: ImageDataset, num_processes: int) -> Pace:
    """Processes that do nothing but read and decode."""
    context = multiprocessing.get_context("fork")
    lines = [context.Barrier(num_processes + 1) for _ in range(3)]
    processes = [
        context.Process(target=_decode_part, args=(dataset, number, num_processes, lines))
        for number in range(num_processes)
    ]
    for process in processes:
        process.start()
    lines[0].wait()
    used, start = _cpu_seconds(), time.perf_counter()
    lines[1].wait()
    seconds, used = time.perf_counter() - start, _cpu_seconds() - used
    lines[2].wait()
    for process in processes:
        process.join()
    return Pace(len(dataset) / seconds, 1e6 * used / len(dataset))


def _decode_part(dataset: ImageDataset, first: int, step: int, lines: list[Any]) -> None:
    rows = np.random.default_rng(0).permutation(len(dataset))[first::step].tolist()
    lines[0].wait()
    for row in rows:  # in a random order, as a loader reads them
        dataset.decode(row)
    lines[1].wait()
    lines[2].wait()  # until its times have been read


def _loader_pace(dataset: ImageDataset, job: Job, memory: list[int]) -> Pace:
    """The loader over two epochs; the memory of all processes goes to a list now and then."""
    from qmargin.data.faces import FaceImages
    from qmargin.data.loader import build_loader
    from qmargin.data.order import GlobalOrder

    order = GlobalOrder(len(dataset), seed=job["seed"], batch_size=job["batch"])
    num_steps = 2 * order.steps_per_epoch
    # A stream without an end: workers are as far ahead after the last step as before the first.
    with build_loader(FaceImages(dataset), order, num_workers=job["workers"]) as stream:
        for _ in range(WARM_UP):
            next(stream)
        used, start = _cpu_seconds(), time.perf_counter()
        for step in range(num_steps):
            next(stream)
            if step % MEMORY_EVERY == 0:
                memory.append(_resident_bytes())
        seconds, used = time.perf_counter() - start, _cpu_seconds() - used
    num_samples = num_steps * job["batch"]
    return Pace(num_samples / seconds, 1e6 * used / num_samples)


def _processes() -> list[int]:
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]


def _cpu_seconds() -> float:
    """Time that this process and its children have spent."""
    ticks = 0
    for number in _processes():
        text = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> int:
    """Memory of this process and of its children; what they share counts for each."""
    pages = 0
    for number in _processes():
        pages += int(Path(f"/proc/{number}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_indexing(job: Job) -> dict[str, Any]:
    """Seconds and memory of the index of many small records."""
    path = Path(job["folder"], "many.rec")
    image = b"\xff\xd8\xff" + bytes(max(0, job["record_bytes"] - 3))
    with RecordWriter(path) as writer:
        for number in range(job["records"]):
            writer.write(number, pack_payload(number // PER_IDENTITY, image))
    before = peak_bytes()
    start = time.perf_counter()
    index = open_index(path)
    assert index.path is not None
    seconds = time.perf_counter() - start
    assert len(index) == job["records"]
    return {
        "seconds": seconds,
        "before_bytes": before,
        "peak_bytes": peak_bytes(),
        "index_bytes": index.path.stat().st_size,
    }


PARTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "reading": measure_reading,
    "loading": measure_loading,
    "indexing": measure_indexing,
}


def main() -> None:
    """Measure the part that the job asks for."""
    job: Job = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(PARTS[job["part"]](job)))


if __name__ == "__main__":
    main()
