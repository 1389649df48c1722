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

from helpers.experiments import TINY_DEMO, run, small_sweep
from helpers.runs import losses as losses_of
from helpers.runs import tiny_recipe
from qmargin.evaluation.result import Result, read_result
from qmargin.experiments.experiment import Experiment, Search, TestProtocol
from qmargin.experiments.named import Size, drawn_recipe, grid_arms
from qmargin.experiments.named.demo import DEMO_SETTINGS, demo_experiment
from qmargin.experiments.run import NORMALISED, RESULT
from qmargin.experiments.worlds import Made
from qmargin.recipes import get_recipe, list_recipes
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
    cpu, lines = platform.machine(), Path("/proc/cpuinfo")
    if lines.exists():  # libraries choose by the model, not by its instructions alone
        models = [line for line in lines.read_text().splitlines() if line.startswith("model name")]
        cpu = " ".join([cpu, *(line.partition(":")[2].strip() for line in models[:1])])
    return f"torch {torch.__version__.partition('+')[0]}, numpy {np.__version__}, " + (
        f"{cpu} {torch.backends.cpu.get_cpu_capability()}"
    )


def recipe_hashes() -> dict[str, str]:
    made = {name: get_recipe(name).sha256 for name in list_recipes() if name != "mine"}
    for device in DEMO_SETTINGS["people"]:
        demo = demo_experiment(device)
        for key, arm in demo.arms.items():
            recipe = demo.run_recipe(key, arm.points[0], seed=0, is_search=False)
            made[f"demo {device} {key}"] = recipe.sha256
    return made


def numbers_of(result: Result) -> dict[str, float]:
    found = {f"tar@{point.far_target:g}": point.tar for point in result.measures.tar}
    found |= {"eer": result.measures.eer.value, "cllr": result.measures.cllr.value}
    for point in result.measures.tar:
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


def arm_of(path: Path) -> str:
    return path.parent.name.partition("-seed")[0]


def demo_numbers(folder: Path) -> dict[str, float]:
    experiment = demo_experiment("cpu", size=TINY_DEMO).with_arms(["cosface", "q_margin"])
    finished, _ = run(experiment, folder)
    return {
        f"{arm_of(path)} {name}": value
        for path in finished.paths[RESULT]
        for name, value in numbers_of(read_result(path)).items()
    }


def sweep_numbers(folder: Path) -> dict[str, float]:
    finished, _ = run(small_sweep("loss.margin=0.1,0.2", "loss.scale=16,32"), folder)
    return {
        " ".join([*(f"{key}={text}" for key, text in sorted(one.point.items())), name]): value
        for one in finished.rounds[0]
        for name, value in one.outcomes[0].measures.items()
    }


def study_numbers(folder: Path) -> dict[str, float]:
    """A search with finalists, and both protocols; both losses try settings of Q-Margin."""
    size = Size(
        num_classes=12, samples_per_class=8, epochs=2, batch_size=32, width=4, depth=0,
        embedding_dim=16,
    )  # fmt: skip
    alpha, scale, _ = DEMO_SETTINGS["people"]["cpu"]["q_margin"]
    grid = {key: [(alpha, scale, m) for m in (0.1, 0.2)] for key in ("arcface", "q_margin")}
    experiment = Experiment(
        "reference",
        drawn_recipe(size),
        grid_arms(grid, sampled=False),
        Made(110, 4, 110, 4),
        "tiny strokes",
        TestProtocol(views=2, normalise=True),
        Search(measure="tar@0.001", settings=("run.epochs=1",), finalists=1),
        seeds=(0,),
    )
    finished, _ = run(experiment, folder)
    names = {RESULT: "evaluation", NORMALISED: "normalised"}
    return {
        f"{arm_of(path)}-0 {stem} {name}": value
        for file, stem in names.items()
        for path in finished.paths[file]
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


def test_recipe_hashes_are_unchanged():
    assert recipe_hashes() == stored()["recipes"]


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
@pytest.mark.parametrize(
    "part", ["training", "demo", "sweep", pytest.param("study", marks=pytest.mark.slow)]
)
def test_numbers_are_unchanged(part, tmp_path):
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
