"""Which network to train on Omniglot, on what, and for how long.

Run `python docs/benchmarks/omniglot_recipe.py omniglot32.npz`. It trains losses of the study
`omniglot` on a part of its training alphabets, and measures the others. Meant for a GPU: the
longest training takes minutes there and hours on a CPU.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from trainings import trained

from qmargin.study.pictures import PictureMaterial
from qmargin.study.studies import SEARCH_SEED, Setting, find_study, with_setting
from qmargin.sweep.trial import TrialResult

# What each chose in a search of eight epochs.
LOSSES: dict[str, Setting] = {
    "cosface": (1.0, 23.0, 0.4),
    "q_margin": (1.5, 3.3, 0.4),
}
VARIANTS = 20  # of each picture, whatever the length of a training
SAMPLES = 20  # of each validation character, so that 10⁻⁵ of the impostors are some
COPIES: dict[str, dict[str, Any]] = {
    "turned": {"has_mirrors": False, "alike": None},
    "and mirrored": {"has_mirrors": True, "alike": None},
    "and distinct": {"has_mirrors": True, "alike": 0.9},
}
MEASURES = {"tar@0.01": "1 %", "tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴", "tar@1e-05": "10⁻⁵"}


class Case(NamedTuple):
    """A recipe; networks have two blocks at a resolution."""

    network: str
    width: int
    copies: str
    epochs: int
    lr: float = 5e-3


CASES = (
    Case("stroke_net", 64, "turned", 20),
    Case("stroke_net", 64, "turned", 40),
    Case("stroke_resnet", 32, "turned", 20),
    Case("stroke_resnet", 64, "turned", 20),
    Case("stroke_resnet", 64, "and mirrored", 10),
    Case("stroke_resnet", 64, "and distinct", 12),
    Case("stroke_resnet", 64, "and distinct", 12, 2e-3),
    Case("stroke_resnet", 64, "and distinct", 16, 2e-3),
    Case("stroke_resnet", 64, "and distinct", 20, 2e-3),
)


def material_of(data: Path, folder: Path, case: Case) -> PictureMaterial:
    """The search of the study, with another network and other copies of the characters."""
    study = find_study("omniglot")
    size = study.size._replace(
        network=case.network,
        width=case.width,
        depth=2,
        batch_norm=case.network == "stroke_net",
        epochs=VARIANTS,
        samples_test=SAMPLES,
    )
    study = replace(study, size=size, **COPIES[case.copies])
    return PictureMaterial(study, data, folder / "data", is_search=True)


def measured(data: Path, folder: Path, case: Case, key: str, device: str) -> TrialResult:
    """One training, and its numbers on validation alphabets."""
    material = material_of(data, folder, case)
    loss, path = with_setting(key, LOSSES[key]), material.training_path
    recipe = material.study.recipe(loss, seed=SEARCH_SEED, epochs=case.epochs, path=path)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=case.lr))
    return trained(material, recipe, folder / case.copies, device=device)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=16)
    options = parser.parse_args()
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        folder = Path(name)
        for copies in COPIES:
            case = next(case for case in CASES if case.copies == copies)
            material_of(options.data, folder, case).prepare([SEARCH_SEED])
        longest = sorted(CASES, key=lambda case: case.epochs, reverse=True)
        running = {
            (case, key): pool.submit(measured, options.data, folder, case, key, options.device)
            for case in longest
            for key in LOSSES
        }
        tars = [f"{title} at {far}" for far in MEASURES.values() for title in ("CosFace", "Q")]
        sys.stdout.write(f"| network | width | copies | epochs | rate | {' | '.join(tars)} |\n")
        sys.stdout.write(f"| --- | ---: | --- |{' ---: |' * (2 + len(tars))}\n")
        for case in CASES:
            found = [running[case, key].result().metrics for key in LOSSES]
            cells = [f"`{case.network}`", *map(str, case[1:4]), f"{case.lr:g}"]
            cells += [f"{100 * one[measure]:.2f}" for measure in MEASURES for one in found]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
