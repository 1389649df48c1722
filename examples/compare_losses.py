"""Five losses on one synthetic open-set verification task, in under a minute on two cores.

A small network learns to embed noisy samples of some identities and is tested on all pairs of
samples of *other* identities. The task shows how an experiment is written in Python and that all
five losses train; it says nothing about which of them is best for faces or voices.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from qmargin.evaluation.result import Result
from qmargin.experiments.experiment import Experiment, from_mapping
from qmargin.experiments.runner import run_experiment
from qmargin.report.table import Column, Number, Table

FARS = (1e-2, 1e-3)
ARMS = {  # the settings published for speaker verification, which also has few identities
    "arcface": {"loss.preset": "arcface_speaker"},
    "cosface": {"loss.preset": "cosface_speaker"},
    "entmax": {"loss.preset": "entmax_speaker"},
    "sparsemax": {"scale": 5.0, "margin": 0.1},
    "q_margin": {"loss.preset": "q_margin_speaker"},
}


def make_experiment(steps: int, seed: int) -> Experiment:
    """The comparison, as a YAML file for ``qmargin compare`` would have it."""
    return from_mapping(
        {
            "name": "five-losses",
            "recipe": "debug",
            "set": {"run.max_steps": steps, "optimizer.lr": 0.05},
            "data": {"num_test": 300, "samples_test": 8},
            "arms": ARMS,
            "seeds": [seed],
            "protocol": {"far": list(FARS), "replicates": 0},
        }
    )


def make_table(results: list[Result], title: str) -> Table:
    """A row for each loss."""
    columns = (
        Column("loss", align="left"),
        *(Column(f"TAR % at FAR {far:g}", best="max") for far in FARS),
        Column("EER %", best="min"),
        Column("train s"),
    )
    rows: list[tuple[str | int | Number | None, ...]] = []
    for result in results:
        tars = [Number(None if p.tar is None else 100 * p.tar, 1) for p in result.measures.tar]
        seconds = None if result.run is None else result.run.train_seconds
        eer = Number(100 * result.measures.eer.value)
        rows.append((result.system.name, *tars, eer, Number(seconds, 1)))
    return Table(title, columns, tuple(rows))


def main() -> None:
    """Compare the five losses and print a table."""
    parser = argparse.ArgumentParser(description="Five losses on synthetic identities.")
    parser.add_argument("--steps", type=int, default=300, help="training steps per loss")
    parser.add_argument("--seed", type=int, default=0, help="seed of identities and networks")
    parser.add_argument("--out", type=Path, help="folder to keep, with a report (none)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: more threads would wait for each other
    experiment = make_experiment(arguments.steps, arguments.seed)
    with TemporaryDirectory() as folder:
        out = arguments.out or Path(folder)
        results = run_experiment(
            experiment, out, devices=["cpu"], say=lambda text: sys.stderr.write(f"{text}\n")
        )
    title = f"300 test identities, {arguments.steps} steps per loss, seed {arguments.seed}"
    sys.stdout.write(make_table(results, title).to_markdown(level=None))


if __name__ == "__main__":
    main()
