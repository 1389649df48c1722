"""Numbers that only some protocols have, kept beside what every result has.

They are the entry ``measures`` of ``result.json``, which readers of results may ignore, and lines
of the model card, so that a report shows them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from qmargin.errors import DataError
from qmargin.evaluation.records import decode, encode
from qmargin.evaluation.result import (
    Result,
    read_result,
    result_from_json,
    result_to_json,
    without_paths,
)
from qmargin.files import write_atomically


@dataclass(frozen=True)
class Measure:
    """One number of a protocol.

    Attributes:
        name: What it is, such as ``10-fold accuracy``.
        value: The number.
        std: Spread over the folds, where there are folds.
        note: How it was found.
    """

    name: str
    value: float
    std: float | None = None
    note: str | None = None

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.5f}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.value:.5f}{spread}{note}"


@dataclass(frozen=True)
class Measured:
    """A result, and what its protocol measures besides."""

    result: Result
    measures: tuple[Measure, ...]


def with_measures(result: Result, measures: tuple[Measure, ...]) -> Measured:
    """Both together; the model card of the result gains a line for every measure."""
    lines = {measure.name: str(measure) for measure in measures}
    card = {**(result.system.model_card or {}), **lines}
    system = replace(result.system, model_card=card or None)
    return Measured(replace(result, system=system), measures)


def write_measured(path: str | Path, measured: Measured, *, keep_paths: bool = False) -> None:
    """Write ``result.json`` with the entry ``measures``; other readers see an ordinary result.

    Args:
        path: The file.
        measured: What to write.
        keep_paths: As in ``write_result``.
    """
    result = measured.result if keep_paths else without_paths(measured.result)
    content = result_to_json(result)
    content["measures"] = encode(measured.measures, "measures")
    text = json.dumps(content, allow_nan=False, indent=1)
    result_from_json(json.loads(text), str(path))  # a NaN in the wrong place
    write_atomically(path, (text + "\n").encode("utf-8"))


def read_measured(path: str | Path) -> Measured:
    """Read what ``write_measured`` wrote; a result without measures has none.

    Raises:
        DataError: The file is no result, or its measures are not ours.
    """
    result = read_result(path)
    content = json.loads(Path(path).read_bytes())
    found = decode(tuple[Measure, ...], content.get("measures", []), f"{path}: measures")
    measures = cast("tuple[Measure, ...]", found)
    names = [measure.name for measure in measures]
    if len(set(names)) < len(names):
        raise DataError(f"{path}: measures has a name twice among {names}: evaluate again")
    return Measured(result, measures)
