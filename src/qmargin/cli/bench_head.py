"""``qmargin bench head``: every way to take a step of the head, beside the bare products.

The parts are measured one after the other; each prints its table as soon as it is done, and the
JSON file is rewritten after every row, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qmargin.cli.bench_end_to_end import end_to_end
from qmargin.cli.bench_head_errors import errors
from qmargin.cli.bench_head_parts import growth, paths, products, settings
from qmargin.cli.bench_head_steps import HeadBenchmark, dtype_name
from qmargin.cli.bench_head_tables import TABLES, table_cells
from qmargin.cli.bench_timing import Row, clean_up, describe_machine
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError
from qmargin.training.process import find_device

PARTS: dict[str, Callable[[HeadBenchmark], Iterator[Row]]] = {
    "products": products,
    "paths": paths,
    "settings": settings,
    "growth": growth,
    "errors": errors,
    "end-to-end": end_to_end,
}
DEFAULT_PARTS = ("products", "paths", "settings", "errors")
PATH_NAMES = ("sparse", "chunked", "dense", "sampled", "paper", "common")
SHAPES = {"cuda": (1024, 512, 2_059_906), "cpu": (256, 128, 200_000)}  # rows, dim, classes


@dataclass
class Report:
    """Rows so far, and where they go."""

    record: dict[str, Any]
    json_path: Path | None = None
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, part: str, row: Row) -> None:
        """Keep a row, say it on standard error, and save."""
        self.rows.setdefault(part, []).append(row.as_dict())
        result = row.failed or ("" if row.ms is None else f"{row.ms:.2f} ms")
        if row.ratio is not None:
            result += f", ratio {row.ratio:.2f}"
        setting = " ".join(
            f"{name} {row.facts[name]:g}"
            for name in ("alpha", "scale", "classes")
            if name in row.facts
        )
        sys.stderr.write(f"{part}: {', '.join(filter(None, (row.name, row.step, setting)))}: ")
        sys.stderr.write(f"{result}\n")
        sys.stderr.flush()
        if self.json_path is not None:
            text = json.dumps({**self.record, "parts": self.rows}, indent=1)
            self.json_path.write_text(text + "\n", encoding="utf-8")


def resolve_benchmark(options: dict[str, Any]) -> HeadBenchmark:
    """Settings from the command's options; what is not given follows the device."""
    device = find_device(options.pop("device"))
    shape = SHAPES.get(device.type, SHAPES["cuda"])
    for name, default in zip(("rows", "dim", "classes"), shape, strict=True):
        if options[name] is None:
            options[name] = default
    screen = options.pop("screen")
    if screen is None:
        screen = "float32" if device.type == "cpu" else "float16"
    _check_known("path", options["paths"], PATH_NAMES)
    return HeadBenchmark(device=device, screen=getattr(torch, screen), **options)


def run_head_benchmark(
    bench: HeadBenchmark,
    parts: Sequence[str] = DEFAULT_PARTS,
    *,
    json_path: Path | None = None,
    commit: str | None = None,
    command: str = "",
) -> Report:
    """Measure the parts, print a table for each, and write everything to ``json_path``."""
    _check_known("part", parts, PARTS)
    record = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": bench.as_dict(),
        "machine": describe_machine(bench.device, commit),
    }
    report = Report(record, json_path)
    console = output_console()
    for part in dict.fromkeys(parts):
        try:
            for row in PARTS[part](bench):
                report.add(part, row)
        except Exception as error:  # the part could not even begin; the others may
            lines = str(error).splitlines() or [""]
            report.add(part, Row(part, failed=f"{type(error).__name__}: {lines[0]}"))
        clean_up()
        print_table(console, _title(part, bench, record), *table_cells(part, report.rows[part]))
    return report


def _title(part: str, bench: HeadBenchmark, record: dict[str, Any]) -> str:
    """What a table shows, with the settings that its numbers depend on."""
    rows = bench.batch if part == "end-to-end" else bench.rows
    sizes = f"B {rows}, d {bench.dim}"
    if part != "growth":
        sizes += f", k {bench.classes:,}"
    if part == "end-to-end":
        sizes += f", {bench.backbone}"
    screen = f"{dtype_name(bench.screen)} screen, {record['machine']['device']}"
    return f"{TABLES[part].title}: {sizes}, {screen}, medians of up to {bench.repeats} turns"


def _check_known(kind: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {kind} {name!r}; known are {', '.join(known)}")
