"""The paper's throughput table, from what ``python -m benchmarks head`` measured in a checkout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError, DataError
from qmargin.paper.layout import Group, Table, number
from qmargin.paper.numbers import THROUGHPUT
from qmargin.paper.runs import Request

PART = "end-to-end"
REMEDY = (
    f"in a checkout run `python -m benchmarks head --parts {PART} --json FILE`, then give "
    "--results FILE"
)
NAMES = {
    "ArcFace": "ArcFace, common head",
    "Q-Margin 1 %": "Q-Margin 1 %, paper",
    "Q-Margin 5 %": "Q-Margin 5 %, paper",
    "Q-Margin 100 %": "Q-Margin 100 %, paper",
    "Q-Margin, sparse": "Q-Margin, sparse",
}


def table_throughput(request: Request) -> Table:
    """Samples a second of whole training steps, by a benchmark's file."""
    request.refuse("seeds", "minutes", "data", why="table-throughput times steps on random images")
    if request.results is None:
        raise ConfigError(
            f"--results is not given, and table-throughput needs times of training steps; {REMEDY}"
        )
    record = _read(request.results)
    speeds = {name: _fastest(record["parts"][PART], ours) for name, ours in NAMES.items()}
    return Table(
        name="table-throughput",
        caption=_caption(record),
        groups=(Group("", ("Samples a second",)), Group("", tuple(NAMES))),
        rows=(
            ("here", *map(number, speeds.values())),
            ("here, of ArcFace", *_of_arcface(speeds)),
            None,
            ("paper", *(number(THROUGHPUT.get(name)) for name in NAMES)),
            ("paper, of ArcFace", *_of_arcface(THROUGHPUT)),
        ),
    )


def _fastest(rows: list[dict[str, Any]], name: str) -> float | None:
    """A head's speed, with the optimizer that suits it best; None where it could not be run."""
    found = [row["facts"].get("images_per_s") for row in rows if row["name"] == name]
    return max(filter(None, found), default=None)


def _of_arcface(speeds: Mapping[str, float | None]) -> list[str]:
    """Speeds over that of ArcFace, as they stand in the row above."""
    whole = speeds["ArcFace"]
    return [number(_quotient(speeds.get(name), whole), 3) for name in NAMES]


def _quotient(speed: float | None, whole: float | None) -> float | None:
    return speed / whole if speed and whole else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "not there"
        raise DataError(f"{path} is {found}, and throughput is no part of a result.json; {REMEDY}")
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        rows = record["parts"][PART]
        if not all({"name", "facts"} <= row.keys() for row in rows):
            raise KeyError("name or facts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} has no part {PART} ({error!r}); {REMEDY}") from error
    return record


def _caption(record: dict[str, Any]) -> str:
    found = record["settings"]
    return (
        f"Throughput of whole training steps. Paper: WebFace42M, ResNet-100, batch 1024 on eight "
        f"GPUs. Here, at another scale: random images, {found['backbone']}, batch "
        f"{found['batch']}, {found['classes']:,} identities, {record['machine']['device']}; "
        "compare ratios, which are quotients of the numbers above them. The paper's procedure "
        "keeps the top 1, 5 or 100 % of the logits; the sparse head is this package's own."
    )
