"""The journal of a training run: active classes, satisfied rows, posteriors and gaps by step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qmargin.errors import DataError

MOST_POINTS = 300  # of a line in the drawing
OUTCOMES = ("satisfied_share", "target_posterior", "cosine_gap")  # means over the rows of a step


@dataclass(frozen=True)
class Journal:
    """Numbers over steps; ``num_steps`` were read, fewer may be kept for drawing.

    ``outcomes`` has the means of ``OUTCOMES`` by name, None where a step has none.
    """

    name: str
    steps: tuple[float, ...]
    mean: tuple[float | None, ...]
    largest: tuple[float | None, ...]
    num_steps: int
    num_classes: int | None = None
    outcomes: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    reach: float | None = None  # at the end: the gap of zero loss


def read_journal(path: str | Path) -> Journal:
    """Read ``journal.jsonl``: an object per line with ``step`` and the support's mean and maximum.

    ``OUTCOMES`` and ``reach`` are optional.

    Lines without a support size are skipped, as is an incomplete last line, which a stopped run
    leaves; any other line that is not JSON is an error. Long runs are divided into equal spans of
    steps, with the average of means and the maximum of maxima, so that no peak is lost.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    rows: list[tuple[float, tuple[float | None, ...]]] = []
    num_classes = reach = None
    for index, line in enumerate(lines):
        try:
            record = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if index == len(lines) - 1:
                break
            raise DataError(f"{path}, line {index + 1} is not JSON ({error}): remove it") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {index + 1} is not a JSON object: remove it")
        step = _number(record, "step")
        found = tuple(_number(record, key) for key in ("support_max", "support_mean", *OUTCOMES))
        if step is not None and found[:2] != (None, None):
            rows.append((step, found))
            reach = _number(record, "reach")
        num_classes = _number(record, "num_classes") or num_classes
    if not rows:
        wanted = "a step and a support_mean or support_max"
        raise DataError(f"{path} has 0 lines with {wanted}: give the journal of a training run")
    rows.sort(key=lambda row: row[0])
    width = math.ceil(len(rows) / MOST_POINTS)
    blocks = [rows[start : start + width] for start in range(0, len(rows), width)]
    columns = [list(zip(*(found for _, found in block), strict=True)) for block in blocks]
    largest, mean, *outcomes = zip(*map(_summary, columns), strict=True)
    return Journal(
        name=path.stem,
        steps=tuple(block[-1][0] for block in blocks),
        mean=mean,
        largest=largest,
        num_steps=len(rows),
        num_classes=None if num_classes is None else int(num_classes),
        outcomes=dict(zip(OUTCOMES, outcomes, strict=True)),
        reach=reach,
    )


def _summary(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Largest number of the first column and means of the others, None of no numbers."""
    known = [[value for value in column if value is not None] for column in columns]
    means = [sum(values) / len(values) if values else None for values in known[1:]]
    return [max(known[0], default=None), *means]


def _number(record: dict[str, Any], key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
