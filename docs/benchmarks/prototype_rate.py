"""What a larger learning rate of the prototypes does.

Run `python docs/benchmarks/prototype_rate.py`. It trains the demo's network on synthetic strokes as
the studies `demo` and `strokes-1m` do while they search, the second with fewer classes, and
measures other identities. Two trainings at a time take a quarter of an hour on a CPU.
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

MANY: dict[str, Setting] = {
    "arcface": (1.0, 16.0, 0.05),
    "cosface": (1.0, 32.0, 0.4),
    "entmax": (1.5, 4.0, 0.2),
    "sparsemax": (2.0, 1.0, 0.1),
    "q_margin": (1.25, 10.0, 0.3),
}
FEW: dict[str, Setting] = {"cosface": (1.0, 16.0, 0.3), "q_margin": (1.25, 4.0, 0.4)}
CASES = [
    *(("1,000 of 20", key, setting) for key, setting in MANY.items()),
    *(("20,000 of 2", key, setting) for key, setting in FEW.items()),
]
RATIOS = (1.0, 20.0)
MEASURES = {"tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴", "tar@1e-05": "10⁻⁵"}


def material_of(case: str, folder: Path) -> PictureMaterial:
    """Strokes of a study; a million classes cut down to as many as a CPU can train."""
    study = find_study("demo" if case.endswith(" 20") else "strokes-1m")
    if study.name != "demo":
        size = study.size._replace(num_classes=20_000, epochs=3, batch_size=82, width=16)
        study = replace(study, size=size, search_epochs=size.epochs, dtype="fp32")
    return PictureMaterial(study, None, folder / study.name, is_search=True)


def measured(
    folder: Path, case: str, key: str, setting: Setting, ratio: float, epochs: int | None = None
) -> TrialResult:
    """One training, and its numbers on validation identities."""
    material = material_of(case, folder)
    loss = with_setting(key, setting)
    recipe = material.study.recipe(
        loss, seed=SEARCH_SEED, epochs=material.study.search_epochs, path=None
    )
    run = replace(recipe.run, epochs=epochs or recipe.run.epochs)
    recipe = replace(recipe, head=replace(recipe.head, lr_ratio=ratio), run=run)
    return trained(material, recipe, folder)


def main() -> None:
    """Print a table."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        for case in dict.fromkeys(case for case, _, _ in CASES):
            material_of(case, folder).prepare([SEARCH_SEED])
        running = [
            [pool.submit(measured, folder, *case, ratio) for ratio in RATIOS] for case in CASES
        ]
        fars = MEASURES.values()
        heads = [f"TAR % at {far}, ratio {ratio:g}" for far in fars for ratio in RATIOS]
        sys.stdout.write(f"| classes and samples | loss | {' | '.join(heads)} |\n")
        sys.stdout.write(f"| --- | --- |{' ---: |' * len(heads)}\n")
        for (case, key, _), both in zip(CASES, running, strict=True):
            found = [result.result().metrics for result in both]
            cells = [f"{100 * one[measure]:.1f}" for measure in MEASURES for one in found]
            sys.stdout.write(f"| {case} | {SYSTEMS[key].title} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
