"""How long to train on Omniglot.

Run `python docs/benchmarks/epochs.py omniglot32.npz`. It trains losses of the study `omniglot` on a
part of its training characters for some numbers of epochs, and measures the rest of them. Meant for
a GPU: the longest training takes minutes there and hours on a CPU.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from qmargin.study.pictures import PictureMaterial
from qmargin.study.studies import SEARCH_SEED, SYSTEMS, Setting, find_study, with_setting
from qmargin.sweep.trial import Trial, TrialResult, run_trial

# What each chose in a search of eight epochs.
LOSSES: dict[str, Setting] = {
    "arcface": (1.0, 11.0, 0.05),
    "cosface": (1.0, 23.0, 0.4),
    "q_margin": (1.5, 3.3, 0.4),
}
EPOCHS = (10, 20, 40)
MEASURES = {"eer": "EER %", "tar@0.01": "TAR % at 1 %", "tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴"}


def material_of(data: Path, folder: Path) -> PictureMaterial:
    """The search of the study, with a variant of each picture for every epoch."""
    study = find_study("omniglot")
    study = replace(study, size=study.size._replace(epochs=max(EPOCHS)))
    return PictureMaterial(study, data, folder / "data", is_search=True)


def measured(
    data: Path, folder: Path, key: str, setting: Setting, epochs: int, device: str
) -> TrialResult:
    """One training, and its numbers on validation characters."""
    material = material_of(data, folder)
    loss, path = with_setting(key, setting), material.training_path
    recipe = material.study.recipe(loss, seed=SEARCH_SEED, epochs=epochs, path=path)
    trial = Trial({}, recipe, folder / f"{key}-{epochs}")
    result = run_trial(trial, material, device=device)
    if result.state != "finished":
        raise RuntimeError(f"{key}: {result.error}")
    return result


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=9)
    options = parser.parse_args()
    cases = [(key, setting, epochs) for key, setting in LOSSES.items() for epochs in sorted(EPOCHS)]
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        material_of(options.data, Path(name)).prepare([SEARCH_SEED])
        running = [
            pool.submit(measured, options.data, Path(name), *case, options.device) for case in cases
        ]
        sys.stdout.write(f"| loss | epochs | {' | '.join(MEASURES.values())} |\n")
        sys.stdout.write(f"| --- |{' ---: |' * (1 + len(MEASURES))}\n")
        for (key, _, epochs), one in zip(cases, running, strict=True):
            found = one.result().metrics
            cells = [f"{100 * found[measure]:.2f}" for measure in MEASURES]
            sys.stdout.write(f"| {SYSTEMS[key].title} | {epochs} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
