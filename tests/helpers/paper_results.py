"""Results of training runs with given settings of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.results import some_run, synthetic_result
from qmargin.evaluation.result import MarginInfo, Result, write_result
from qmargin.report.paper_layouts import Setting


def run_result(setting: Setting | None, *, seed: int = 0, **options: Any) -> Result:
    """A made-up result, with the run behind it where a setting is given."""
    if setting is None:
        return synthetic_result("unknown", seed=seed, **options)
    run = some_run(
        setting.loss,
        seed,
        alpha=setting.alpha,
        scale=setting.scale,
        margins=(MarginInfo(setting.kind, setting.margin),),
        num_classes=30,
    )
    return synthetic_result(setting.loss, seed=seed, run=run, **options)


def write_run(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder / "result.json", result)
