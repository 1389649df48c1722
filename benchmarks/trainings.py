"""What a setting does, by training small networks and measuring other identities.

Two runs at a time take a quarter of an hour on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qmargin import hardness
from qmargin.cli.options import named_path
from qmargin.data.strokes import StrokeIdentities
from qmargin.evaluation.all_pairs import evaluate_all_pairs, unit_rows
from qmargin.evaluation.scoring import nearest_moments
from qmargin.experiments.experiment import TITLES, Experiment, Search
from qmargin.experiments.measure import embed_dataset, load_backbone
from qmargin.experiments.named import Setting, Size, drawn_recipe, get_experiment, loss_arm
from qmargin.experiments.runner import RunOptions, complete
from qmargin.experiments.search import Tried
from qmargin.experiments.worlds import Drawn, Made
from qmargin.training.checkpoint import open_checkpoint, read_prototypes, read_recipe
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings, from_yaml

# Learning rates of the prototypes.
MANY: dict[str, Setting] = {
    "arcface": (1.0, 16.0, 0.05),
    "cosface": (1.0, 32.0, 0.4),
    "entmax": (1.5, 4.0, 0.2),
    "sparsemax": (2.0, 1.0, 0.1),
    "q_margin": (1.25, 10.0, 0.3),
}
FEW: dict[str, Setting] = {"cosface": (1.0, 16.0, 0.3), "q_margin": (1.25, 4.0, 0.4)}
SIZES = {
    "1,000 of 20": Size(),
    "20,000 of 2": Size(
        num_classes=20_000, samples_per_class=2, epochs=3, batch_size=82, embedding_dim=64,
        batch_norm=True,
    ),
}  # fmt: skip
CASES = {"1,000 of 20": MANY, "20,000 of 2": FEW}
RATIOS = (1.0, 20.0)
STROKE_MEASURES = {"tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴", "tar@1e-05": "10⁻⁵"}
# Hardness of the negatives.
CASE, EPOCHS = "20,000 of 2", 2
HARDNESS_SETTINGS: list[tuple[str, Setting]] = [
    *(("cosface", (1.0, scale, 0.3)) for scale in (10.0, 16.0, 24.0)),
    *(("q_margin", (1.25, scale, 0.4)) for scale in (1.0, 2.0, 4.0, 7.0)),
    *(("sparsemax", (2.0, scale, 0.1)) for scale in (0.001, 0.006, 0.03, 0.3)),
]
# A batch norm at the end of the network.
BATCH_NORM_LOSSES: dict[str, Setting] = {"cosface": (1.0, 16.0, 0.4), "sparsemax": (2.0, 3.0, 0.1)}
BATCH_NORM_EPOCHS = 8
VARIANTS = 40  # of each picture
CHARACTER_MEASURES = {"eer": "EER %", "tar@0.01": "TAR % at 1 %", "tar@0.001": "TAR % at 10⁻³"}
# AS-norm by prototypes.
FARS = {1e-4: "10⁻⁴", 1e-5: "10⁻⁵"}
NEAREST = (None, 10, 50, 300)  # None for cosines


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add four subjects to ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "prototype-rate",
        help="what a larger learning rate of the prototypes does",
        description="Train the demo's network on synthetic strokes as demo-search and strokes-1m "
        "do while they search, the second with fewer classes, and measure other identities.",
    )
    parser.set_defaults(run=run_prototype_rate)
    parser = subjects.add_parser(
        "hardness",
        help="losses of several scales, beside the hardness of their negatives",
        description="Train losses of several alphas and scales on 20,000 synthetic stroke "
        "identities of two samples for two epochs and measure other identities.",
    )
    parser.set_defaults(run=run_hardness)
    parser = subjects.add_parser(
        "batch-norm",
        help="what a batch norm at the end of a network does for a sparse loss",
        description="Train CosFace and SparseMax as the experiment omniglot does while it searches "
        "(3,040 classes, 8 epochs, other alphabets to measure), with a smaller network, on a CPU.",
    )
    data = "omniglot32.npz, or a folder that `qmargin data get omniglot` made"
    parser.add_argument("data", type=named_path, help=data)
    parser.set_defaults(run=run_batch_norm)
    parser = subjects.add_parser(
        "prototype-norm",
        help="what AS-norm does with the prototypes of the head as its cohort",
        description="Take the runs of a demo with seed 0 and measure all pairs of validation "
        "identities, by cosines and by AS-norm.",
    )
    parser.add_argument("demo", type=named_path, metavar="DIR", help="of `qmargin demo --out DIR`")
    parser.set_defaults(run=run_prototype_norm)


def trained(experiment: Experiment, *settings: str, jobs: int = 2) -> list[Tried]:
    """What the runs of a search measured on validation identities."""
    made = replace(experiment, recipe=apply_settings(experiment.recipe, settings))
    with TemporaryDirectory() as folder:
        options = RunOptions(("cpu",), jobs=jobs, search_only=True, say=lambda text: None)
        finished = complete(made, folder, options)
    return list(finished.rounds[-1])


def on_strokes(case: str, arms: Mapping[str, Sequence[Setting]], **size: Any) -> Experiment:
    """Losses on stroke identities; two samples each stand for a million classes."""
    made = SIZES[case]._replace(**size)
    recipe = drawn_recipe(made, data_seed=0 if case == CASE else None)
    losses = {name: loss_arm(name, points) for name, points in arms.items()}
    return Experiment(case.replace(" ", "-"), recipe, losses, Made(500, 10), search=Search())


def write_row(cells: Sequence[str]) -> None:
    """Print a row of a table."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def rates(tried: Tried, measures: Mapping[str, str], digits: int = 1) -> list[str]:
    """Measures of a run in per cent."""
    found = tried.outcomes[0].measures
    return [f"{100 * found[measure]:.{digits}f}" for measure in measures]


def run_prototype_rate(arguments: argparse.Namespace) -> None:
    """Print a table."""
    fars = STROKE_MEASURES.values()
    heads = [f"TAR % at {far}, ratio {ratio:g}" for far in fars for ratio in RATIOS]
    write_row(["classes and samples", "loss", *heads])
    sys.stdout.write(f"| --- | --- |{' ---: |' * len(heads)}\n")
    for case, losses in CASES.items():
        experiment = on_strokes(case, {key: [setting] for key, setting in losses.items()})
        found = [trained(experiment, f"head.lr_ratio={ratio:g}") for ratio in RATIOS]
        for row in zip(*found, strict=True):
            cells = [rates(one, STROKE_MEASURES) for one in row]
            both = [cell for pair in zip(*cells, strict=True) for cell in pair]
            write_row([case, TITLES[row[0].arm], *both])


def run_hardness(arguments: argparse.Namespace) -> None:
    """Print a table."""
    grid: dict[str, list[Setting]] = {}
    for key, setting in HARDNESS_SETTINGS:
        grid.setdefault(key, []).append(setting)
    fars = [f"TAR % at {far}" for far in STROKE_MEASURES.values()]
    write_row(["loss", "alpha", "scale", "hardness", "classes with a gradient", *fars])
    sys.stdout.write(f"| --- |{' ---: |' * (4 + len(fars))}\n")
    for one in trained(on_strokes(CASE, grid, epochs=EPOCHS)):
        loss = one.recipe.loss
        assert loss.alpha is not None
        found = hardness(
            loss.alpha,
            loss.scale,
            num_classes=SIZES[CASE].num_classes,
            embedding_dim=SIZES[CASE].embedding_dim,
        )
        cells = [f"{loss.alpha:g}", f"{loss.scale:g}", f"{found.mean:.2f}", f"{found.support:,.0f}"]
        write_row([TITLES[one.arm], *cells, *rates(one, STROKE_MEASURES)])


def on_characters(path: Path, recipe: Recipe, **options: Any) -> Experiment:
    """Losses on characters and their quarter turns, in the search of ``omniglot``."""
    experiment = get_experiment("omniglot", data=path)
    assert isinstance(experiment.world, Drawn)
    world = replace(experiment.world, mirrors=False, alike=None, **options)
    return replace(experiment, recipe=recipe, world=world, search=Search())


def run_batch_norm(arguments: argparse.Namespace) -> None:
    """Print a table."""
    write_row(["loss", "batch norm", *CHARACTER_MEASURES.values()])
    sys.stdout.write(f"| --- | --- |{' ---: |' * len(CHARACTER_MEASURES)}\n")
    arms = {name: loss_arm(name, [setting]) for name, setting in BATCH_NORM_LOSSES.items()}
    for batch_norm in (False, True):
        size = Size(
            epochs=BATCH_NORM_EPOCHS, batch_size=512, width=32, depth=1, batch_norm=batch_norm
        )
        experiment = on_characters(arguments.data, drawn_recipe(size), num_variants=VARIANTS)
        for one in trained(replace(experiment, arms=arms)):
            cells = [TITLES[one.arm], "yes" if batch_norm else "no"]
            write_row([*cells, *rates(one, CHARACTER_MEASURES, 2)])


def prototype_norm_row(folder: Path) -> list[str]:
    """TARs of a run: for each FAR by cosines, and by the nearest prototypes."""
    checkpoint = open_checkpoint(max((folder / "checkpoints").glob("step-*")))
    recipe = from_yaml(read_recipe(checkpoint))
    dataset = StrokeIdentities(500, 10, seed=recipe.seed, split="validation")
    found = embed_dataset(load_backbone(recipe, checkpoint.path), dataset, batch=500)
    unit, cohort = unit_rows(found.matrix), unit_rows(read_prototypes(checkpoint))
    tars = []
    for count in NEAREST:
        moments = None if count is None else nearest_moments(unit, cohort, count, "prototypes")
        tars.append(evaluate_all_pairs(unit, dataset.labels, FARS, moments=moments).tar)
    return [f"{100 * tar[place].tar:.1f}" for place in range(len(FARS)) for tar in tars]


def run_prototype_norm(arguments: argparse.Namespace) -> None:
    """Print a table."""
    names = ["cosines", *(f"{count} nearest" for count in NEAREST if count)]
    heads = [f"TAR % at {far}, {name}" for far in FARS.values() for name in names]
    write_row(["loss", *heads])
    sys.stdout.write(f"| --- |{' ---: |' * len(heads)}\n")
    for name, title in TITLES.items():
        for folder in sorted(arguments.demo.glob(f"runs/{name}-seed0-*")):
            write_row([title, *prototype_norm_row(folder)])
