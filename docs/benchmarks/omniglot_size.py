"""Which network to train on Omniglot, and for how long.

Run `python docs/benchmarks/omniglot_size.py omniglot32.npz`. It trains losses of the study
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

from trainings import trained

from qmargin.study.pictures import PictureMaterial
from qmargin.study.studies import SEARCH_SEED, SYSTEMS, Setting, find_study, with_setting
from qmargin.sweep.trial import TrialResult

# What each chose in a search of eight epochs.
LOSSES: dict[str, Setting] = {
    "cosface": (1.0, 23.0, 0.4),
    "q_margin": (1.5, 3.3, 0.4),
}
EPOCHS = (20, 40)
NETWORKS = ((32, 1), (64, 1), (64, 2))  # width and depth
MEASURES = {"eer": "EER %", "tar@0.01": "TAR % at 1 %", "tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴"}


def material_of(data: Path, folder: Path, network: tuple[int, int]) -> PictureMaterial:
    """The search of the study, with a variant of each picture for every epoch."""
    study, (width, depth) = find_study("omniglot"), network
    size = study.size._replace(epochs=max(EPOCHS), width=width, depth=depth)
    study = replace(study, size=size)
    return PictureMaterial(study, data, folder / "data", is_search=True)


def measured(
    data: Path, folder: Path, key: str, network: tuple[int, int], epochs: int, device: str
) -> TrialResult:
    """One training, and its numbers on validation alphabets."""
    material = material_of(data, folder, network)
    loss, path = with_setting(key, LOSSES[key]), material.training_path
    recipe = material.study.recipe(loss, seed=SEARCH_SEED, epochs=epochs, path=path)
    return trained(material, recipe, folder, device=device)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    cases = [(key, network, epochs) for network in NETWORKS for epochs in EPOCHS for key in LOSSES]
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        material_of(options.data, Path(name), NETWORKS[0]).prepare([SEARCH_SEED])
        running = [
            pool.submit(measured, options.data, Path(name), *case, options.device) for case in cases
        ]
        sys.stdout.write(f"| loss | width | depth | epochs | {' | '.join(MEASURES.values())} |\n")
        sys.stdout.write(f"| --- |{' ---: |' * (3 + len(MEASURES))}\n")
        for (key, network, epochs), one in zip(cases, running, strict=True):
            found = one.result().metrics
            cells = [SYSTEMS[key].title, *map(str, (*network, epochs))]
            cells += [f"{100 * found[measure]:.2f}" for measure in MEASURES]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
