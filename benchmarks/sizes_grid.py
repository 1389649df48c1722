"""Every path over batches, classes, dimensions and supports: data for the cost model of ``auto``.

Cells are taken in a random order until the time is up, so that a short run covers the grid too.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import qmargin
from benchmarks.common import command_line
from benchmarks.head import memory_reason, step_stats
from benchmarks.sizes import (
    DENSE_BYTES,
    MARGIN,
    MOST_DENSE_BYTES,
    WARM_CALLS,
    Entrant,
    Size,
    Stage,
    build_head,
    failure,
)
from benchmarks.sizes_page import VERSION
from benchmarks.timing import BURST, clean_up, describe_machine, median, once_ms
from qmargin.files import write_atomically
from qmargin.heads.matrix import fits
from qmargin.heads.paths import Chunked, Dense, Sparse, StepPath

TURNS = 3
SLOW_MS = 20.0  # of a step that is warmed up by two calls and timed alone
SETTINGS = ((1.25, 35.0), (1.25, 20.0), (1.25, 10.0), (1.25, 5.0), (1.5, 5.0), (1.0, 64.0))
AXES = {  # samples, classes, dimensions
    "cuda": ((128, 512, 1024), (1_000, 6_000, 18_000, 93_000, 360_000, 1_000_000), (128, 512)),
    "cpu": ((8, 32), (300, 2_000), (16,)),
}


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    size: Size
    alpha: float
    scale: float

    @property
    def loss(self) -> qmargin.MarginLoss:
        """Q-Margin, or ArcFace for alpha 1."""
        if self.alpha == 1.0:
            return qmargin.arcface(scale=self.scale)
        return qmargin.q_margin(alpha=self.alpha, scale=self.scale, margin=MARGIN)

    def paths(self) -> dict[str, StepPath]:
        """By a name that says how the step is taken: one matrix, lists, blocks, all cosines."""
        if self.alpha == 1.0:
            return {"matrix": Chunked(), "chunked": Chunked(matrix_logits=0), "dense": Dense()}
        return {
            "matrix": Sparse(),
            "lists": Sparse(matrix_logits=0),
            "chunked": Chunked(),
            "dense": Dense(),
        }


def all_cells(device: torch.device, seed: int) -> list[Cell]:
    """The grid in a random order."""
    rows, classes, dims = AXES["cpu" if device.type == "cpu" else "cuda"]
    cells = [
        Cell(Size(k, d, b), *setting)
        for b, k, d, setting in itertools.product(rows, classes, dims, SETTINGS)
    ]
    random.Random(seed).shuffle(cells)
    return cells


def run_grid(
    device: torch.device,
    json_path: Path,
    *,
    seconds: float,
    seed: int = 0,
    commit: str | None = None,
) -> dict[str, Any]:
    """Time cell after cell, and write all rows to ``json_path`` every few cells."""
    cells, start = all_cells(device, seed), time.perf_counter()
    record: dict[str, Any] = {
        "subject": "sizes-grid",
        "version": VERSION,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": describe_machine(device, commit),
        "margin": MARGIN,
        "num_cells": len(cells),
        "left_out": len(cells),
        "rows": [],
    }

    def save() -> None:
        write_atomically(json_path, (json.dumps(record, indent=1) + "\n").encode())

    gc.collect()
    gc.freeze()  # collecting between cells looks at what is new, not at all of PyTorch
    try:
        for done, cell in enumerate(cells, 1):
            record["rows"] += measure_cell(cell, device, seed)
            record["left_out"] = len(cells) - done
            elapsed = time.perf_counter() - start
            if done % 10 == 0 or elapsed > seconds:
                sys.stderr.write(f"{done} of {len(cells)} cells, {elapsed:.0f} s\n")
                sys.stderr.flush()
                save()
            if elapsed > seconds:
                break
    finally:
        gc.unfreeze()
        save()
    sys.stdout.write(f"{len(record['rows'])} rows, {record['left_out']} cells left out\n")
    return record


def measure_cell(cell: Cell, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row for each path, in turns."""
    size, entrants, rows = cell.size, {}, []
    base = {**asdict(size), "alpha": cell.alpha, "scale": cell.scale}
    try:
        stage = Stage(size, device, seed)
    except Exception as error:  # this size is too large; others are not
        return [{**base, "path": "all", "failed": failure(error)}]
    calls: dict[str, int] = {}
    for name, path in cell.paths().items():
        try:
            entrant = _entrant(stage, cell, name, path)
            if entrant is not None:
                calls[name] = _warm(entrant, device)
                entrants[name] = entrant
        except Exception as error:  # said in its row
            rows.append({**base, "path": name, "failed": failure(error)})
    times: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(TURNS):
        for name, entrant in entrants.items():
            times[name].append(once_ms(entrant.step, device, calls[name]))
    for name, entrant in entrants.items():
        assert entrant.head is not None
        stats = step_stats(entrant.head) or {}
        rows.append(
            {
                **base,
                "path": name,
                "ms": median(times[name]),
                "candidates": stats.get("num_candidates"),
                "support": stats.get("support_mean"),
                "taken": stats.get("path"),
                "num_overflowed": stats.get("num_overflowed"),
            }
        )
    entrants.clear()
    clean_up()
    return rows


def _entrant(stage: Stage, cell: Cell, name: str, path: StepPath) -> Entrant | None:
    """A head with its optimizer; None for a path that does not exist, or does not fit, here."""
    size = stage.size
    if name == "dense":
        needed = DENSE_BYTES * size.num_logits
        if needed > MOST_DENSE_BYTES or memory_reason(needed, stage.device) is not None:
            return None
    entrant = build_head(stage, loss=cell.loss, path=path)
    assert entrant.head is not None
    if name == "matrix" and not fits(entrant.head, path.name, size.rows):
        return None
    return entrant


def _warm(entrant: Entrant, device: torch.device) -> int:
    """Call the step some times; how many calls a turn has."""
    entrant.step()
    found = once_ms(entrant.step, device, 1)
    if found > SLOW_MS:
        return 1
    for _ in range(WARM_CALLS - 2):
        entrant.step()
    return BURST if device.type == "cuda" else 1
