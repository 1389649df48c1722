"""What AS-norm does with the prototypes of the head as its cohort.

Run `qmargin demo --out DIR`, then `python docs/benchmarks/prototype_norm.py DIR`. It takes the
trainings with seed 0 and measures all pairs of validation identities, by cosines and by AS-norm.
"""

import sys
from pathlib import Path

from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.embed import embed_pictures
from qmargin.demo.losses import LOSSES
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.scoring import nearest_moments
from qmargin.training.checkpoint import open_checkpoint, read_prototypes, read_recipe
from qmargin.training.recipe_files import from_yaml

FARS = {1e-4: "10⁻⁴", 1e-5: "10⁻⁵"}
NEAREST = (None, 10, 50, 300)  # None for cosines


def row_of(folder: Path) -> list[str]:
    """TARs of a training: for each FAR by cosines, and by the nearest prototypes."""
    checkpoint = open_checkpoint(max((folder / "checkpoints").glob("step-*")))
    recipe = from_yaml(read_recipe(checkpoint))
    dataset = StrokeIdentities(500, 10, seed=recipe.seed, split="validation")
    unit = unit_rows(embed_pictures(recipe, checkpoint.path, dataset))
    cohort = unit_rows(read_prototypes(checkpoint))
    found = []
    for count in NEAREST:
        moments = None if count is None else nearest_moments(unit, cohort, count, "prototypes")
        found.append(evaluate_all_pairs(unit, dataset.labels, FARS, moments=moments).tar)
    return [f"{100 * tar[place].tar:.1f}" for place in range(len(FARS)) for tar in found]


def main() -> None:
    """Print a table."""
    names = ["cosines", *(f"{count} nearest" for count in NEAREST if count)]
    heads = [f"TAR % at {far}, {name}" for far in FARS.values() for name in names]
    sys.stdout.write(f"| loss | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}\n")
    for key, loss in LOSSES.items():
        folder = Path(sys.argv[1]) / "seed-0" / key
        if folder.exists():
            sys.stdout.write(f"| {loss.title} | {' | '.join(row_of(folder))} |\n")


if __name__ == "__main__":
    main()
