"""The journal of a training run: how many classes stayed active, step by step."""

from __future__ import annotations

import json
import math
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

    Lines without a support size are passed over, and so is a last line without its end, which a
    stopped run leaves behind; any other line that is not JSON is an error. Of long runs, means are
    averaged and maxima kept within equal runs of steps, so that no peak is lost.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    rows, num_classes = [], None
    for index, line in enumerate(lines):
        try:
            record = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if index == len(lines) - 1:
                break
            raise DataError(f"{path}, line {index + 1} is not JSON ({error}): remove it") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {index + 1} is not a JSON object: remove it")
        step, mean, largest = (
            _number(record, key) for key in ("step", "support_mean", "support_max")
        )
        if step is not None and (mean is not None or largest is not None):
            rows.append((step, mean, largest))
        num_classes = _number(record, "num_classes") or num_classes
    if not rows:
        wanted = "a step and a support_mean or support_max"
        raise DataError(f"{path} has 0 lines with {wanted}: give the journal of a training run")
    rows.sort(key=lambda row: row[0])
    width = math.ceil(len(rows) / MOST_POINTS)
    blocks = [rows[start : start + width] for start in range(0, len(rows), width)]
    means = [[mean for _, mean, _ in block if mean is not None] for block in blocks]
    peaks = [[peak for _, _, peak in block if peak is not None] for block in blocks]
    return Journal(
        name=path.stem,
        steps=tuple(block[-1][0] for block in blocks),
        mean=tuple(sum(values) / len(values) if values else None for values in means),
        largest=tuple(max(values, default=None) for values in peaks),
        num_steps=len(rows),
        num_classes=None if num_classes is None else int(num_classes),
    )


def _number(record: dict[str, Any], key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
