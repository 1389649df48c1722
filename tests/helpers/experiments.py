"""Small experiments: a recipe of few steps, and few identities to measure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helpers.runs import tiny_recipe
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.experiments.experiment import Experiment, TestProtocol, make_arm, sweep_experiment
from qmargin.experiments.named import Size
from qmargin.experiments.runner import Finished, RunOptions, complete
from qmargin.experiments.worlds import Made
from qmargin.training.recipe import Recipe

TINY_DEMO = Size(
    num_classes=40,
    samples_per_class=4,
    epochs=1,
    batch_size=32,
    width=8,
    depth=0,
    embedding_dim=16,
    num_test=40,
    samples_test=4,
)


@dataclass(frozen=True)
class Few(Made):
    """Validation and test data with 17,400 impostor pairs."""

    def measured(self, recipe: Recipe, *, is_search: bool) -> SyntheticIdentities:
        seed = recipe.seed + (1000 if is_search else 2000)
        return SyntheticIdentities(30, 6, shape=(32,), augmentation=0.0, seed=seed)


def small_sweep(*axes: str, settings: tuple[str, ...] = (), **options: Any) -> Experiment:
    """A sweep over the debug recipe, a few steps each."""
    short = ("run.max_steps=6", "run.save_every_steps=3", *settings)
    return replace(sweep_experiment(tiny_recipe(*short), axes, **options), world=Few())


def small_comparison(*settings: str, **changes: Any) -> Experiment:
    """CosFace chooses from two scales, Q-Margin has its settings; tested with one seed."""
    recipe = tiny_recipe("run.max_steps=6", "run.save_every_steps=3", *settings)
    arms = {
        "cosface": make_arm("cosface", {"scale": [10, 16], "margin": 0.2}),
        "q_margin": make_arm("q_margin", {"scale": 16}),
    }
    made = Experiment(
        "small", recipe, arms, Few(), "small", TestProtocol(num_replicates=20), seeds=(0,)
    )
    return replace(made, **changes)


def run(experiment: Experiment, out: Path, **options: Any) -> tuple[Finished, list[str]]:
    """What was found, and the lines that were printed."""
    said: list[str] = []
    given = {"devices": ("cpu",), "say": said.append, **options}
    return complete(experiment, out, RunOptions(**given)), said


SCRIPT = """
import sys
from pathlib import Path
import torch
from helpers.experiments import run, small_comparison, small_sweep
if __name__ == "__main__":
    torch.set_num_threads(1)
    out, *words = sys.argv[1:]
"""


def start(out: Path, body: str, *words: object) -> subprocess.Popen:
    """A process that runs the indented ``body``, which finds ``out`` and ``words``."""
    script = out.parent / "script.py"
    script.write_text(SCRIPT + body, encoding="utf-8")
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(out), *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_for(pattern: str, folder: Path, process: subprocess.Popen) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
