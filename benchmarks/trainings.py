"""What a setting does, by training small networks and measuring other identities.

Two trainings at a time take a quarter of an hour on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from qmargin import hardness
from qmargin.cli.options import named_path
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.embed import embed_pictures
from qmargin.demo.losses import LOSSES
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.scoring import nearest_moments
from qmargin.study.pictures import PictureMaterial
from qmargin.study.studies import SEARCH_SEED, SYSTEMS, Setting, find_study, with_setting
from qmargin.sweep.trial import Trial, TrialResult, run_trial
from qmargin.training.checkpoint import open_checkpoint, read_prototypes, read_recipe
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import from_yaml

# Learning rates of the prototypes.
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
STROKE_MEASURES = {"tar@0.001": "10⁻³", "tar@0.0001": "10⁻⁴", "tar@1e-05": "10⁻⁵"}
# Hardness of the negatives.
CASE, RATIO, EPOCHS = "20,000 of 2", 20.0, 2
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
        description="Train the demo's network on synthetic strokes as the studies demo and "
        "strokes-1m do while they search, the second with fewer classes, and measure other "
        "identities.",
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
        description="Train CosFace and SparseMax as the study of Omniglot does while it searches "
        "(3,040 classes, 8 epochs, other alphabets to measure), with a smaller network, on a CPU.",
    )
    data = "omniglot32.npz, or a folder that `qmargin data get omniglot` made"
    parser.add_argument("data", type=named_path, help=data)
    parser.set_defaults(run=run_batch_norm)
    parser = subjects.add_parser(
        "prototype-norm",
        help="what AS-norm does with the prototypes of the head as its cohort",
        description="Take the trainings of a demo with seed 0 and measure all pairs of validation "
        "identities, by cosines and by AS-norm.",
    )
    parser.add_argument("demo", type=named_path, metavar="DIR", help="of `qmargin demo --out DIR`")
    parser.set_defaults(run=run_prototype_norm)


def trained(
    material: PictureMaterial, recipe: Recipe, folder: Path, *, device: str = "cpu"
) -> TrialResult:
    """One training, and its numbers on validation identities."""
    result = run_trial(Trial({}, recipe, folder / recipe.sha256), material, device=device)
    if result.state != "finished":
        raise RuntimeError(f"{recipe.name}: {result.error}")
    return result


def stroke_material(case: str, folder: Path) -> PictureMaterial:
    """Strokes of a study; a million classes cut down to as many as a CPU can train."""
    study = find_study("demo" if case.endswith(" 20") else "strokes-1m")
    if study.name != "demo":
        size = study.size._replace(num_classes=20_000, epochs=3, batch_size=82, width=16)
        study = replace(study, size=size, search_epochs=size.epochs, dtype="fp32")
    return PictureMaterial(study, None, folder / study.name, is_search=True)


def trained_on_strokes(
    folder: Path, case: str, key: str, setting: Setting, ratio: float, epochs: int | None = None
) -> TrialResult:
    """One training, and its numbers on validation identities."""
    material = stroke_material(case, folder)
    loss = with_setting(key, setting)
    recipe = material.study.recipe(
        loss, seed=SEARCH_SEED, epochs=material.study.search_epochs, path=None
    )
    run = replace(recipe.run, epochs=epochs or recipe.run.epochs)
    recipe = replace(recipe, head=replace(recipe.head, lr_ratio=ratio), run=run)
    return trained(material, recipe, folder)


def run_prototype_rate(arguments: argparse.Namespace) -> None:
    """Print a table."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        for case in dict.fromkeys(case for case, _, _ in CASES):
            stroke_material(case, folder).prepare([SEARCH_SEED])
        running = [
            [pool.submit(trained_on_strokes, folder, *case, ratio) for ratio in RATIOS]
            for case in CASES
        ]
        fars = STROKE_MEASURES.values()
        heads = [f"TAR % at {far}, ratio {ratio:g}" for far in fars for ratio in RATIOS]
        sys.stdout.write(f"| classes and samples | loss | {' | '.join(heads)} |\n")
        sys.stdout.write(f"| --- | --- |{' ---: |' * len(heads)}\n")
        for (case, key, _), both in zip(CASES, running, strict=True):
            found = [result.result().metrics for result in both]
            cells = [f"{100 * one[measure]:.1f}" for measure in STROKE_MEASURES for one in found]
            sys.stdout.write(f"| {case} | {SYSTEMS[key].title} | {' | '.join(cells)} |\n")


def run_hardness(arguments: argparse.Namespace) -> None:
    """Print a table."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        size = stroke_material(CASE, folder).study.size
        stroke_material(CASE, folder).prepare([SEARCH_SEED])
        running = [
            pool.submit(trained_on_strokes, folder, CASE, key, setting, RATIO, EPOCHS)
            for key, setting in HARDNESS_SETTINGS
        ]
        fars = " | ".join(f"TAR % at {far}" for far in STROKE_MEASURES.values())
        sys.stdout.write(
            f"| loss | alpha | scale | hardness | classes with a gradient | {fars} |\n"
        )
        sys.stdout.write(f"| --- |{' ---: |' * (4 + len(STROKE_MEASURES))}\n")
        for (key, (alpha, scale, _)), result in zip(HARDNESS_SETTINGS, running, strict=True):
            found = hardness(
                alpha, scale, num_classes=size.num_classes, embedding_dim=size.embedding_dim
            )
            cells = [f"{alpha:g}", f"{scale:g}", f"{found.mean:.2f}", f"{found.support:,.0f}"]
            metrics = result.result().metrics
            cells += [f"{100 * metrics[measure]:.1f}" for measure in STROKE_MEASURES]
            sys.stdout.write(f"| {SYSTEMS[key].title} | {' | '.join(cells)} |\n")


def character_material(path: Path, folder: Path, *, batch_norm: bool) -> PictureMaterial:
    """Characters of the study and their quarter turns, with a smaller network in its recipes."""
    study = find_study("omniglot")
    size = study.size._replace(
        epochs=VARIANTS, network="stroke_net", width=32, depth=1, batch_norm=batch_norm
    )
    study = replace(study, size=size, has_mirrors=False, alike=None, lr=5e-3, dtype="fp32")
    return PictureMaterial(study, path, folder / "data", is_search=True)


def trained_on_characters(path: Path, folder: Path, key: str, *, batch_norm: bool) -> TrialResult:
    """One training, and its numbers on validation identities."""
    material = character_material(path, folder, batch_norm=batch_norm)
    recipe = material.study.recipe(
        with_setting(key, BATCH_NORM_LOSSES[key]),
        seed=SEARCH_SEED,
        epochs=BATCH_NORM_EPOCHS,
        path=material.training_path,
    )
    return trained(material, recipe, folder)


def run_batch_norm(arguments: argparse.Namespace) -> None:
    """Print a table."""
    path: Path = arguments.data
    cases = [(key, batch_norm) for batch_norm in (False, True) for key in BATCH_NORM_LOSSES]
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        character_material(path, folder, batch_norm=False).prepare([SEARCH_SEED])
        running = [
            pool.submit(trained_on_characters, path, folder, key, batch_norm=batch_norm)
            for key, batch_norm in cases
        ]
        heads = ["loss", "batch norm", *CHARACTER_MEASURES.values()]
        sys.stdout.write(
            f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * len(CHARACTER_MEASURES)}\n"
        )
        for (key, batch_norm), result in zip(cases, running, strict=True):
            metrics = result.result().metrics
            cells = [SYSTEMS[key].title, "yes" if batch_norm else "no"]
            cells += [f"{100 * metrics[measure]:.2f}" for measure in CHARACTER_MEASURES]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")


def prototype_norm_row(folder: Path) -> list[str]:
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


def run_prototype_norm(arguments: argparse.Namespace) -> None:
    """Print a table."""
    names = ["cosines", *(f"{count} nearest" for count in NEAREST if count)]
    heads = [f"TAR % at {far}, {name}" for far in FARS.values() for name in names]
    sys.stdout.write(f"| loss | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}\n")
    for key, loss in LOSSES.items():
        folder = arguments.demo / "seed-0" / key
        if folder.exists():
            sys.stdout.write(f"| {loss.title} | {' | '.join(prototype_norm_row(folder))} |\n")
