"""Recipe hashes and the numbers of tiny runs are as they were, to the last bit on one machine.

``python tests/test_reference_values.py`` writes the values anew. They change only with an entry
under Numerics in the changelog.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as a script

from helpers.runs import losses as losses_of
from helpers.runs import tiny_recipe
from helpers.sweeps import small_sweep
from helpers.tiny_demo import options_for, patch_demo
from qmargin.demo.losses import BY_DEVICE
from qmargin.demo.recipe import SIZES, demo_recipe
from qmargin.demo.run import run_demo
from qmargin.evaluation.result import Result, read_result
from qmargin.recipes import get_recipe, list_recipes
from qmargin.study import studies
from qmargin.study.run import StudyOptions, run_study
from qmargin.sweep.run import TRIALS, run_sweep
from qmargin.training.loop import train

FILE = Path(__file__).parent / "reference_values.json"
CLOSE = 5e-3  # on another kind of machine: sums are rounded elsewhere, and training amplifies that
RUNS = {
    "q_margin": (),
    "arcface": ("loss.preset=arcface",),
    "chunked": ("head.path=chunked",),
    "dense": ("head.path=dense",),
    "sampled": ("head.path=sampled",),
    "torch": ("head.update=torch",),
}


def machine() -> str:
    """What the last bits depend on."""
    return f"torch {torch.__version__.partition('+')[0]}, numpy {np.__version__}, " + (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )


def recipe_hashes() -> dict[str, str]:
    made = {name: get_recipe(name).sha256 for name in list_recipes() if name != "mine"}
    for device, losses in BY_DEVICE.items():
        for key, loss in losses.items():
            made[f"demo {device} {key}"] = demo_recipe(loss, seed=0, size=SIZES[device]).sha256
    return made


def numbers_of(result: Result) -> dict[str, float]:
    found = {f"tar@{point.far_target:g}": point.tar for point in result.metrics.tar}
    found |= {"eer": result.metrics.eer.value, "cllr": result.metrics.cllr.value}
    for point in result.metrics.tar:
        found |= dict(zip((f"low@{point.far_target:g}", f"high@{point.far_target:g}"),
                          point.interval or (None, None), strict=True))  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def training_losses(folder: Path) -> dict[str, float]:
    found = {}
    for name, settings in RUNS.items():
        recipe = tiny_recipe("data.num_workers=0", *settings)
        train(recipe, folder / name, device="cpu")
        found |= {f"{name} step {step}": loss for step, loss in losses_of(folder / name).items()}
    return found


def demo_numbers(folder: Path) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch_demo(patch)
        run_demo(options_for(folder))
    return {
        f"{path.parent.name} {name}": value
        for path in sorted(folder.glob("seed-*/*/result.json"))
        for name, value in numbers_of(read_result(path)).items()
    }


def sweep_numbers(folder: Path) -> dict[str, float]:
    run_sweep(small_sweep(folder, "loss.margin=0.1,0.2", "loss.scale=16,32"))
    rows = [json.loads(line) for line in (folder / TRIALS).read_text().splitlines()]
    return {
        " ".join([*(f"{key}={text}" for key, text in sorted(row["point"].items())), name]): value
        for row in rows
        for name, value in row["metrics"].items()
    }


def study_numbers(folder: Path) -> dict[str, float]:
    from study.test_study import TINY, TINY_GRID

    study = studies.Study(
        "reference", "tiny strokes", "strokes", TINY, search_epochs=1, grid=TINY_GRID,
        measure="tar@0.001", finalists=1, num_views=2,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qmargin.study.pictures.VALIDATION_IDS", 110)
        patch.setattr("qmargin.study.pictures.VALIDATION_SAMPLES", 4)
        losses = ("arcface", "q_margin")
        run_study(StudyOptions(study, folder, seeds=1, losses=losses, device="cpu"))
    return {
        f"{path.parent.name} {path.stem} {name}": value
        for path in sorted((folder / "final").glob("*/*.json"))
        if path.stem in ("evaluation", "normalised")
        for name, value in numbers_of(read_result(path)).items()
    }


PARTS = {
    "training": training_losses,
    "demo": demo_numbers,
    "sweep": sweep_numbers,
    "study": study_numbers,
}


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_recipe_hashes_are_unchanged() -> None:
    assert recipe_hashes() == stored()["recipes"]


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
@pytest.mark.parametrize(
    "part", ["training", "demo", "sweep", pytest.param("study", marks=pytest.mark.slow)]
)
def test_numbers_are_unchanged(part: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = PARTS[part](tmp_path)
    finally:
        torch.set_num_threads(threads)
    expected = stored()[part]
    assert found.keys() == expected.keys()
    if machine() == stored()["machine"]:
        changed = {
            key: (found[key], value) for key, value in expected.items() if found[key] != value
        }
        assert not changed
    else:
        for key, value in expected.items():
            assert math.isclose(found[key], value, rel_tol=CLOSE, abs_tol=0.05), key


def main() -> None:
    torch.set_num_threads(1)
    values: dict[str, Any] = {"machine": machine(), "recipes": recipe_hashes()}
    for name, collect in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            values[name] = collect(Path(folder))
    FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
