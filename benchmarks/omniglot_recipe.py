"""Which network to train on Omniglot, on what, and for how long.

Losses of the study `omniglot` are trained on a part of its training alphabets and measured on the
others. Meant for a GPU: the longest training takes minutes there and hours on a CPU, where
`--only 0` has the smallest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.trainings import trained
from qmargin.cli.options import count, named_path
from qmargin.demo.embed import embed_pictures
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.study.pictures import PictureMaterial
from qmargin.study.studies import SEARCH_SEED, Setting, find_study, with_setting
from qmargin.training.folders import list_steps
from qmargin.training.process import find_device
from qmargin.training.starting import CHECKPOINTS

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
FARS = {1e-3: "10⁻³", 1e-4: "10⁻⁴", 1e-5: "10⁻⁵"}
TURNS = 4  # views of a tested drawing, beside one


class Case(NamedTuple):
    """A recipe; networks have two blocks at a resolution."""

    network: str
    width: int
    copies: str
    epochs: int
    lr: float = 5e-3
    warp: float = 1.0


CASES = (
    Case("stroke_net", 16, "turned", 8),  # minutes on a CPU
    Case("stroke_net", 64, "turned", 20),
    Case("stroke_net", 64, "turned", 40),
    Case("stroke_resnet", 32, "turned", 20),
    Case("stroke_resnet", 64, "turned", 20),
    Case("stroke_resnet", 64, "turned, distinct", 20, 2e-3),
    Case("stroke_resnet", 64, "turned, distinct", 20, 2e-3, 0.6),
    Case("stroke_resnet", 64, "turned, distinct", 28, 2e-3, 0.6),
    Case("stroke_resnet", 96, "turned, distinct", 20, 2e-3),
    Case("stroke_resnet", 64, "mirrored", 10),
    Case("stroke_resnet", 64, "mirrored, distinct", 12),
    Case("stroke_resnet", 64, "mirrored, distinct", 16, 2e-3),
    Case("stroke_resnet", 64, "mirrored, distinct", 16, 2e-3, 0.6),
)


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``omniglot-recipe`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "omniglot-recipe",
        help="which network to train on Omniglot, on what, and for how long",
        description="Train losses of the study omniglot on a part of its training alphabets, and "
        "measure the others. Meant for a GPU.",
    )
    add = parser.add_argument
    add("data", type=named_path, help="omniglot32.npz, or what `qmargin data get omniglot` made")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--jobs", type=count, default=16, help="trainings at a time")
    add("--only", type=int, nargs="+", metavar="N", help="cases by their places (all of them)")
    parser.set_defaults(run=run)


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


def measured(data: Path, folder: Path, case: Case, key: str, device: str) -> list[list[float]]:
    """One training, and its TARs on validation alphabets: by FAR, of one view and of ``TURNS``."""
    material = material_of(data, folder, case)
    loss, path = with_setting(key, LOSSES[key]), material.training_path
    recipe = material.study.recipe(loss, seed=SEARCH_SEED, epochs=case.epochs, path=path)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=case.lr))
    out = folder / f"{case.copies}-{case.warp}"
    trained(material, recipe, out, device=device)
    checkpoint = next(iter(list_steps(out / recipe.sha256 / CHECKPOINTS).values()))
    dataset: Any = material(recipe).validation  # pictures with labels
    turned = embed_pictures(recipe, checkpoint, dataset, num_views=TURNS, device=device)
    straight = turned[:, : turned.shape[1] // TURNS]
    found = [
        evaluate_all_pairs(rows, dataset.labels, list(FARS), num_hardest=0, device=device).tar
        for rows in (straight, turned)
    ]
    return [[point.tar for point in points] for points in zip(*found, strict=True)]


def cells(case: Case, tars: Sequence[Sequence[Sequence[float]]]) -> list[str]:
    """A row: the recipe, and the means over the losses."""
    named = [f"`{case.network}`", *map(str, case[1:4]), f"{case.lr:g}", f"{case.warp:g}"]
    return [*named, *(f"{100 * tar:.2f}" for tar in np.mean(tars, axis=0).ravel())]


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    device = find_device(options.device).type
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        folder = Path(name)
        cases = CASES if options.only is None else [CASES[place] for place in options.only]
        for case in {(case.copies, case.warp): case for case in cases}.values():
            material_of(options.data, folder, case).prepare([SEARCH_SEED])
        longest = sorted(cases, key=lambda case: case.epochs, reverse=True)
        running = {
            (case, key): pool.submit(measured, options.data, folder, case, key, device)
            for case in longest
            for key in LOSSES
        }
        heads = ["network", "width", "copies", "epochs", "rate", "warp"]
        heads += [f"at {far}{views}" for far in FARS.values() for views in ("", f", {TURNS} turns")]
        sys.stdout.write(f"| {' | '.join(heads)} |\n")
        sys.stdout.write(f"| --- | ---: | --- |{' ---: |' * (len(heads) - 3)}\n")
        for case in cases:
            found = [running[case, key].result() for key in LOSSES]
            sys.stdout.write(f"| {' | '.join(cells(case, found))} |\n")
            sys.stdout.flush()
