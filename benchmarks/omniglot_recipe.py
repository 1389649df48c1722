"""Which network to train on Omniglot, on what, and for how long.

Losses of the experiment `omniglot` are trained on a part of its training alphabets and measured on
the others. Meant for a GPU: the longest run takes minutes there and hours on a CPU, where
`--only 0` has the smallest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from qmargin.cli.options import count, named_path
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.experiments.experiment import Experiment, Search
from qmargin.experiments.measure import embed_dataset, load_backbone
from qmargin.experiments.named import Setting, Size, drawn_recipe, get_experiment, loss_arm
from qmargin.experiments.runner import Finished, RunOptions, complete
from qmargin.experiments.worlds import Drawn
from qmargin.training.checkpoint import CHECKPOINTS, list_steps
from qmargin.training.distributed import find_device

# What each chose in a search of eight epochs.
LOSSES: dict[str, Setting] = {
    "cosface": (1.0, 23.0, 0.4),
    "q_margin": (1.5, 3.3, 0.4),
}
VARIANTS = 20  # of each picture, whatever the length of a training
SAMPLES = 20  # of each validation character, so that 10⁻⁵ of the impostors are some
COPIES: dict[str, dict[str, Any]] = {  # of a character
    "turned": {"mirrors": False, "alike": None},
    "turned, distinct": {"mirrors": False, "alike": 0.9},
    "mirrored": {"mirrors": True, "alike": None},
    "mirrored, distinct": {"mirrors": True, "alike": 0.9},
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
        description="Train losses of omniglot on a part of its training alphabets, and "
        "measure the others. Meant for a GPU.",
    )
    add = parser.add_argument
    add("data", type=named_path, help="omniglot32.npz, or what `qmargin data get omniglot` made")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--jobs", type=count, default=16, help="runs at a time")
    add("--only", type=int, nargs="+", metavar="N", help="cases by their places (all of them)")
    parser.set_defaults(run=run)


def experiment_of(data: Path, case: Case) -> Experiment:
    """The search of the experiment, with another network and other copies of the characters."""
    size = Size(
        network=case.network,
        width=case.width,
        depth=2,
        batch_norm=case.network == "stroke_net",
        epochs=case.epochs,
        batch_size=512,
    )
    base = get_experiment("omniglot", data=data)
    assert isinstance(base.world, Drawn)
    world = replace(
        base.world,
        warp=case.warp,
        num_variants=VARIANTS,
        samples_test=SAMPLES,
        **COPIES[case.copies],
    )
    arms = {key: loss_arm(key, [setting]) for key, setting in LOSSES.items()}
    recipe = drawn_recipe(size, lr=case.lr, dtype="bf16")
    return replace(base, recipe=recipe, world=world, arms=arms, search=Search())


def measured(finished: Finished, device: str) -> list[list[list[float]]]:
    """TARs of each run on validation alphabets: by FAR, of one view and of ``TURNS``."""
    rows = []
    for folder in sorted((finished.out / "search").iterdir()):
        recipe = next(one.recipe for one in finished.rounds[0] if folder.name.startswith(one.arm))
        checkpoint = next(iter(list_steps(folder / CHECKPOINTS).values()))
        dataset = finished.experiment.world.measured(recipe, is_search=True)
        backbone = load_backbone(recipe, checkpoint, device=device)
        turned = embed_dataset(backbone, dataset, views=TURNS, device=device)
        straight = turned.matrix[:, : turned.matrix.shape[1] // TURNS]
        found = [
            evaluate_all_pairs(matrix, turned.labels, list(FARS), num_hardest=0, device=device).tar
            for matrix in (straight, turned.matrix)
        ]
        rows.append([[point.tar for point in points] for points in zip(*found, strict=True)])
    return rows


def cells(case: Case, tars: Sequence[Sequence[Sequence[float]]]) -> list[str]:
    """A row: the recipe, and the means over the losses."""
    named = [f"`{case.network}`", *map(str, case[1:4]), f"{case.lr:g}", f"{case.warp:g}"]
    return [*named, *(f"{100 * tar:.2f}" for tar in np.mean(tars, axis=0).ravel())]


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    device = find_device(options.device).type
    cases = CASES if options.only is None else [CASES[place] for place in options.only]
    heads = ["network", "width", "copies", "epochs", "rate", "warp"]
    heads += [f"at {far}{views}" for far in FARS.values() for views in ("", f", {TURNS} turns")]
    sys.stdout.write(f"| {' | '.join(heads)} |\n")
    sys.stdout.write(f"| --- | ---: | --- |{' ---: |' * (len(heads) - 3)}\n")
    for case in cases:
        with TemporaryDirectory() as folder:
            running = RunOptions(
                (device,), jobs=options.jobs, search_only=True, say=lambda text: None
            )
            finished = complete(experiment_of(options.data, case), folder, running)
            sys.stdout.write(f"| {' | '.join(cells(case, measured(finished, device)))} |\n")
            sys.stdout.flush()
