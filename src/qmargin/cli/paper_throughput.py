"""The paper's throughput table on this machine, by the parts of ``qmargin bench head``."""

from __future__ import annotations

import json
from typing import Any

from qmargin.errors import DataError
from qmargin.paper.layout import Group, Table, number
from qmargin.paper.numbers import THROUGHPUT
from qmargin.paper.runs import Request

PART = "end-to-end"
# What a step is made of, by device; a GPU takes the paper's network and number of identities.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"rows": None, "dim": 512, "classes": 2_059_906, "batch": 512, "repeats": 5},
    "cpu": {"rows": None, "dim": 64, "classes": 50_000, "batch": 64, "repeats": 5},
}
BACKBONES = {"cuda": "iresnet100", "cpu": "small_conv"}
NAMES = {
    "ArcFace": "ArcFace, common head",
    "Q-Margin 1 %": "Q-Margin 1 %, paper",
    "Q-Margin 5 %": "Q-Margin 5 %, paper",
    "Q-Margin 100 %": "Q-Margin 100 %, paper",
    "Q-Margin, sparse": "Q-Margin, sparse",
}


def table_throughput(request: Request) -> Table:
    """Samples a second of whole training steps: measured now, or by a benchmark's file."""
    record = _measured(request) if request.results is None else _read(request)
    rows = {name: _fastest(record["parts"][PART], ours) for name, ours in NAMES.items()}
    here = [number(None if row is None else row["facts"]["images_per_s"]) for row in rows.values()]
    paper = [number(THROUGHPUT.get(name)) for name in NAMES]
    shares = [_share(rows["ArcFace"], row) for row in rows.values()]
    theirs = [number(_of_arcface(THROUGHPUT.get(name)), 3) for name in NAMES]
    return Table(
        name="table-throughput",
        caption=_caption(record),
        groups=(Group("", ("Samples a second",)), Group("", tuple(NAMES))),
        rows=(
            ("here", *here),
            ("here, of ArcFace", *shares),
            None,
            ("paper", *paper),
            ("paper, of ArcFace", *theirs),
        ),
    )


def _fastest(rows: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """A head's row, with the optimizer that suits it best; None where it could not be run."""
    found = [row for row in rows if row["name"] == name and row["ratio"]]
    return min(found, key=lambda row: row["ratio"], default=None)


def _share(arcface: dict[str, Any] | None, row: dict[str, Any] | None) -> str:
    """Speed over ArcFace's, each by its own turns with the backbone: what drifts cancels."""
    return number(arcface["ratio"] / row["ratio"] if arcface and row else None, 3)


def _of_arcface(speed: float | None) -> float | None:
    return None if speed is None else speed / THROUGHPUT["ArcFace"]


def _measured(request: Request) -> dict[str, Any]:
    from qmargin.cli.bench_head import resolve_benchmark, run_head_benchmark
    from qmargin.cli.bench_timing import resolve_device

    device = resolve_device(request.device).type
    options = {
        "device": device,
        "backbone": BACKBONES[device],
        "screen": None,
        "alpha": 1.25,
        "scale": 35.0,
        "margin": 0.2,
        "paths": ("sparse", "paper", "common"),
        "grid": "default",
        "growth_classes": (),
        "seconds": 10.0,
        "seed": 0,
        **SIZES[device],
    }
    bench = resolve_benchmark(options)
    request.out.mkdir(parents=True, exist_ok=True)
    path = request.out / "table-throughput.json"
    report = run_head_benchmark(bench, (PART,), json_path=path, command=request.command)
    return {**report.record, "parts": report.rows}


def _read(request: Request) -> dict[str, Any]:
    assert request.results is not None
    try:
        record: dict[str, Any] = json.loads(request.results.read_bytes())
        rows = record["parts"][PART]
        if not all({"name", "ratio", "facts"} <= row.keys() for row in rows):
            raise KeyError("name, ratio or facts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{request.results} has no part {PART} ({error!r}); give the file that `qmargin bench "
            f"head --parts {PART} --json FILE` writes"
        ) from error
    return record


def _caption(record: dict[str, Any]) -> str:
    found = record["settings"]
    return (
        f"Throughput of whole training steps. Paper: WebFace42M, ResNet-100, batch 1024 on eight "
        f"GPUs. Here, at another scale: random images, {found['backbone']}, batch "
        f"{found['batch']}, {found['classes']:,} identities, {record['machine']['device']}; "
        "compare ratios. The paper's procedure keeps the top 1, 5 or 100 % of the logits; the "
        "sparse head is this package's own."
    )
