"""The journal of a training: how many classes stayed active, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qmargin.errors import DataError

MOST_POINTS = 300  # of a line in the drawing


@dataclass(frozen=True)
class Journal:
    """Support sizes over steps; ``num_steps`` were read, fewer may be kept for drawing."""

    name: str
    steps: tuple[float, ...]
    mean: tuple[float | None, ...]
    largest: tuple[float | None, ...]
    num_steps: int
    num_classes: int | None = None


def read_journal(path: str | Path) -> Journal:
    """Read ``journal.jsonl``: an object per line with ``step`` and the support's mean and maximum.

    Lines without a support size are passed over. A last line without its end is what a stopped
    training leaves behind, and is passed over as well; any other line that is not JSON is an error.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    rows, num_classes = [], None
    for index, line in enumerate(lines):
        record = _parsed(line, path, index + 1, is_last=index == len(lines) - 1)
        if record is None:
            continue
        row = tuple(_number(record, key) for key in ("step", "support_mean", "support_max"))
        if row[0] is not None and (row[1] is not None or row[2] is not None):
            rows.append((row[0], row[1], row[2]))
        classes = _number(record, "num_classes")
        num_classes = num_classes if classes is None else int(classes)
    if not rows:
        raise DataError(
            f"{path} has 0 lines with a step and a support_mean or support_max, at least 1 is "
            "needed: give the journal of a training that records its support"
        )
    rows.sort(key=lambda row: row[0])
    return _thinned(path.stem, rows, num_classes)


def _parsed(line: bytes, path: Path, number: int, *, is_last: bool) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if is_last:
            return None
        raise DataError(f"{path}, line {number} is not JSON ({error}): remove it") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number} is not a JSON object: remove it")
    return record


def _number(record: dict[str, Any], key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _thinned(
    name: str, rows: Sequence[tuple[float, float | None, float | None]], num_classes: int | None
) -> Journal:
    """Average means and keep maxima within equal runs of steps, so that no peak is lost."""
    width = math.ceil(len(rows) / MOST_POINTS)
    blocks = [rows[start : start + width] for start in range(0, len(rows), width)]
    means = [[row[1] for row in block if row[1] is not None] for block in blocks]
    peaks = [[row[2] for row in block if row[2] is not None] for block in blocks]
    return Journal(
        name=name,
        steps=tuple(block[-1][0] for block in blocks),
        mean=tuple(sum(values) / len(values) if values else None for values in means),
        largest=tuple(max(values, default=None) for values in peaks),
        num_steps=len(rows),
        num_classes=num_classes,
    )
