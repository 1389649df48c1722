"""What a batch norm at the end of a network does for a sparse loss.

Run `python docs/benchmarks/batch_norm.py omniglot32.npz`, or give a folder that `qmargin data get
omniglot` made. It trains CosFace and SparseMax as the study of Omniglot does while it searches
(3,040 classes, 8 epochs, other alphabets to measure), with a smaller network, on a CPU. Two
trainings at a time take a quarter of an hour.
"""

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

LOSSES: dict[str, Setting] = {"cosface": (1.0, 16.0, 0.4), "sparsemax": (2.0, 3.0, 0.1)}
EPOCHS = 8
VARIANTS = 40  # of each picture
MEASURES = {"eer": "EER %", "tar@0.01": "TAR % at 1 %", "tar@0.001": "TAR % at 10⁻³"}


def material_of(path: Path, folder: Path, *, batch_norm: bool) -> PictureMaterial:
    """Characters of the study and their quarter turns, with a smaller network in its recipes."""
    study = find_study("omniglot")
    network = {"network": "stroke_net", "width": 32, "depth": 1, "batch_norm": batch_norm}
    size = study.size._replace(epochs=VARIANTS, **network)
    study = replace(study, size=size, has_mirrors=False, alike=None, lr=5e-3, dtype="fp32")
    return PictureMaterial(study, path, folder / "data", is_search=True)


def measured(path: Path, folder: Path, key: str, *, batch_norm: bool) -> TrialResult:
    """One training, and its numbers on validation identities."""
    material = material_of(path, folder, batch_norm=batch_norm)
    recipe = material.study.recipe(
        with_setting(key, LOSSES[key]),
        seed=SEARCH_SEED,
        epochs=EPOCHS,
        path=material.training_path,
    )
    return trained(material, recipe, folder)


def main() -> None:
    """Print a table."""
    path = Path(sys.argv[1])
    cases = [(key, batch_norm) for batch_norm in (False, True) for key in LOSSES]
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        material_of(path, folder, batch_norm=False).prepare([SEARCH_SEED])
        running = [
            pool.submit(measured, path, folder, key, batch_norm=batch_norm)
            for key, batch_norm in cases
        ]
        heads = ["loss", "batch norm", *MEASURES.values()]
        sys.stdout.write(f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * len(MEASURES)}\n")
        for (key, batch_norm), result in zip(cases, running, strict=True):
            metrics = result.result().metrics
            cells = [SYSTEMS[key].title, "yes" if batch_norm else "no"]
            cells += [f"{100 * metrics[measure]:.2f}" for measure in MEASURES]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
