"""``qmargin bench data``: records against a folder of the same images, the loader, the index."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.cli.bench_processes import benchmark_options, run_in_process, write_record
from qmargin.cli.options import new_file
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError

WORKER = "qmargin.cli.bench_data_worker"
MIB = 2.0**20


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


def add_bench_data(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` to the subjects of ``qmargin bench``."""
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
    add("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run_bench_data)


def run_bench_data(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path = benchmark_options(arguments)
    run_data_benchmark(DataBenchmark(**options), json_path=json_path)


def run_data_benchmark(settings: DataBenchmark, *, json_path: Path | None = None) -> None:
    """Measure, print the tables and write the numbers to ``json_path`` if it is given."""
    console = output_console()
    with tempfile.TemporaryDirectory() as folder:
        reading = run_worker(settings, "reading", folder)
        print_table(
            console,
            f"{settings.images:,} JPEGs of {reading['mean_bytes']:.0f} bytes on average, medians "
            f"of {settings.repeats} turns, samples per second",
            ["read", "records", "folder", "records / folder"],
            [
                [name, f"{records:,.0f}", f"{files:,.0f}", f"{records / files:.2f}"]
                for name, (records, files) in reading["rates"].items()
            ],
        )
        loading = run_worker(settings, "loading", folder)
        _print_loading(console, settings, loading)
        indexing = run_worker(settings, "indexing", folder) if settings.records else None
    if indexing is not None:
        print_table(
            console,
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
        write_record(json_path, asdict(settings), found, ("numpy", "torch", "pillow", "simplejpeg"))


def _print_loading(console: Any, settings: DataBenchmark, loading: dict[str, Any]) -> None:
    bare_rate, bare_cpu = loading["bare"]
    rows = [
        [name, f"{rate:,.0f}", f"{rate / bare_rate:.2f}", f"{cpu:.0f}", f"{bare_cpu / cpu:.2f}"]
        for name, (rate, cpu) in (
            ("bare loop that decodes", loading["bare"]),
            ("loader: decode, flip, batch", loading["loader"]),
        )
    ]
    print_table(
        console,
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
