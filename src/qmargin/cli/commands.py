"""Every command of ``qmargin``; torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
from functools import partial

import qmargin
from qmargin.cli import evaluate_protocols as protocols
from qmargin.cli.compare import Compare, Demo, Sweep
from qmargin.cli.completion import add_completion
from qmargin.cli.data import add_data
from qmargin.cli.doctor import Doctor
from qmargin.cli.embed import Embed
from qmargin.cli.evaluate import add_protocols
from qmargin.cli.evaluate_scores import AllPairs, Scores, Trials
from qmargin.cli.export import Export
from qmargin.cli.options import Command, Commands, Parser, add_command, add_group
from qmargin.cli.paper import Paper
from qmargin.cli.recipes import List, Recipes
from qmargin.cli.report import Report
from qmargin.cli.train import Train
from qmargin.cli.verify import Verify

EVALUATIONS: dict[str, type[Command]] = {
    "scores": Scores,
    "trials": Trials,
    "all-pairs": AllPairs,
    "lfw": protocols.Lfw,
    "ijb": protocols.Ijb,
    "pairs": protocols.Pairs,
    "voxceleb": protocols.VoxCeleb,
}


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line.

    Examples:
        >>> build_parser().parse_args(["train", "debug", "--out", "run"]).recipe
        'debug'
    """
    parser: argparse.ArgumentParser = Parser(
        prog="qmargin",
        description="Alpha-divergence losses with probabilistic margins (Q-Margin).",
    )
    parser.add_argument("--version", action="version", version=f"qmargin {qmargin.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_command(commands, "demo", Demo)
    add_command(commands, "train", Train)
    add_command(commands, "compare", Compare)
    add_command(commands, "sweep", Sweep)
    add_command(commands, "recipes", Recipes)
    add_command(commands, "list", List)
    add_command(commands, "doctor", Doctor)
    add_evaluate(commands)
    add_command(commands, "report", Report)
    add_command(commands, "paper", Paper)
    add_data(commands)
    add_command(commands, "embed", Embed)
    add_command(commands, "verify", Verify)
    add_command(commands, "export", Export)
    add_completion(commands)
    return parser


def add_evaluate(commands: Commands) -> None:
    """Add ``evaluate`` and all its kinds."""
    help = "measure a verification system, with intervals"
    kinds = add_group(commands, "evaluate", help, title="what to evaluate", metavar="WHAT")
    for name, command in EVALUATIONS.items():
        add_command(kinds, name, command)
    parser = commands.choices["evaluate"]
    if isinstance(parser, Parser):
        parser.add_extensions = partial(add_protocols, kinds, EVALUATIONS)
