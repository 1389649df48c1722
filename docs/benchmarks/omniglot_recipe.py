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
COPIES: dict[str, dict[str, Any]] = {  # of a character
    "turned": {"has_mirrors": False, "alike": None},
    "turned, distinct": {"has_mirrors": False, "alike": 0.9},
    "mirrored": {"has_mirrors": True, "alike": None},
    "mirrored, distinct": {"has_mirrors": True, "alike": 0.9},
}
MEASURES = {"tar@0.01": "1 %", "tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴", "tar@1e-05": "10⁻⁵"}


class Case(NamedTuple):
    """A recipe; networks have two blocks at a resolution."""

    network: str
    width: int
    copies: str
    epochs: int
    lr: float = 5e-3
    warp: float = 1.0


CASES = (
    Case("stroke_net", 64, "turned", 20),
    Case("stroke_net", 64, "turned", 40),
    Case("stroke_resnet", 32, "turned", 20),
    Case("stroke_resnet", 64, "turned", 20),
    Case("stroke_resnet", 64, "mirrored", 10),
    Case("stroke_resnet", 64, "mirrored, distinct", 12),
    Case("stroke_resnet", 64, "mirrored, distinct", 12, 2e-3),
    Case("stroke_resnet", 64, "mirrored, distinct", 16, 2e-3),
    Case("stroke_resnet", 64, "mirrored, distinct", 20, 2e-3),
    Case("stroke_resnet", 64, "mirrored, distinct", 26, 2e-3),
    Case("stroke_resnet", 64, "mirrored, distinct", 16, 2e-3, 0.6),
    Case("stroke_resnet", 64, "turned, distinct", 20),
    Case("stroke_resnet", 64, "turned, distinct", 20, 5e-3, 0.6),
    Case("stroke_resnet", 64, "turned, distinct", 20, 2e-3),
    Case("stroke_resnet", 64, "turned, distinct", 20, 2e-3, 0.6),
    Case("stroke_resnet", 64, "turned, distinct", 28, 2e-3),
    Case("stroke_resnet", 96, "turned, distinct", 20, 2e-3),
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
    study = replace(study, size=size, warp=case.warp, **COPIES[case.copies])
    return PictureMaterial(study, data, folder / "data", is_search=True)


def measured(data: Path, folder: Path, case: Case, key: str, device: str) -> TrialResult:
    """One training, and its numbers on validation alphabets."""
    material = material_of(data, folder, case)
    loss, path = with_setting(key, LOSSES[key]), material.training_path
    recipe = material.study.recipe(loss, seed=SEARCH_SEED, epochs=case.epochs, path=path)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=case.lr))
    return trained(material, recipe, folder / f"{case.copies}-{case.warp}", device=device)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    options = parser.parse_args()
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        folder, cases = Path(name), CASES[options.first :]
        for case in {(case.copies, case.warp): case for case in cases}.values():
            material_of(options.data, folder, case).prepare([SEARCH_SEED])
        longest = sorted(cases, key=lambda case: case.epochs, reverse=True)
        running = {
            (case, key): pool.submit(measured, options.data, folder, case, key, options.device)
            for case in longest
            for key in LOSSES
        }
        tars = [f"{title} at {far}" for far in MEASURES.values() for title in ("CosFace", "Q")]
        heads = ["network", "width", "copies", "epochs", "rate", "warp", *tars]
        sys.stdout.write(f"| {' | '.join(heads)} |\n")
        sys.stdout.write(f"| --- | ---: | --- |{' ---: |' * (3 + len(tars))}\n")
        for case in cases:
            found = [running[case, key].result().metrics for key in LOSSES]
            cells = [f"`{case.network}`", *map(str, case[1:4]), f"{case.lr:g}", f"{case.warp:g}"]
            cells += [f"{100 * one[measure]:.2f}" for measure in MEASURES for one in found]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
