"""Every command of ``qmargin``; torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
from functools import partial

import qmargin
from qmargin.cli import data, evaluate_protocols, evaluate_scores
from qmargin.cli.compare import Compare, Demo, Sweep
from qmargin.cli.completion import Completion
from qmargin.cli.doctor import Doctor
from qmargin.cli.embed import Embed
from qmargin.cli.evaluate import add_protocols
from qmargin.cli.export import Export
from qmargin.cli.options import Command, Commands, Parser, add_command
from qmargin.cli.paper import Paper
from qmargin.cli.recipes import List, Recipes
from qmargin.cli.report import Report
from qmargin.cli.serve import Serve
from qmargin.cli.train import Train
from qmargin.cli.verify import Verify

EVALUATIONS: dict[str, type[Command]] = {
    "scores": evaluate_scores.Scores,
    "trials": evaluate_scores.Trials,
    "all-pairs": evaluate_scores.AllPairs,
    "lfw": evaluate_protocols.Lfw,
    "ijb": evaluate_protocols.Ijb,
    "pairs": evaluate_protocols.Pairs,
    "voxceleb": evaluate_protocols.VoxCeleb,
}
COMMANDS: dict[str, type[Command] | dict[str, type[Command]]] = {
    "demo": Demo,
    "train": Train,
    "compare": Compare,
    "sweep": Sweep,
    "recipes": Recipes,
    "list": List,
    "doctor": Doctor,
    "evaluate": EVALUATIONS,
    "report": Report,
    "paper": Paper,
    "data": data.ACTIONS,
    "check-data": data.CheckData,
    "embed": Embed,
    "verify": Verify,
    "serve": Serve,
    "export": Export,
    "completion": Completion,
}
GROUPS = {  # help of groups of commands, and of their subcommands
    "evaluate": ("measure a verification system, with intervals", "what to evaluate", "WHAT"),
    "data": ("get, index and convert images and recordings, align faces", "what to do", "ACTION"),
}


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line.

    Examples:
        >>> build_parser().parse_args(["train", "debug", "--out", "run"]).recipe
        'debug'
    """
    parser = Parser(
        prog="qmargin", description="Alpha-divergence losses with probabilistic margins (Q-Margin)."
    )
    parser.add_argument("--version", action="version", version=f"qmargin {qmargin.__version__}")
    commands: Commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if not isinstance(command, dict):
            add_command(commands, name, command)
            continue
        help, title, metavar = GROUPS[name]
        group = commands.add_parser(name, help=help)
        below: Commands = group.add_subparsers(title=title, metavar=metavar, required=True)
        for inner, part in command.items():
            add_command(below, inner, part)
        if command is EVALUATIONS:
            group.add_extensions = partial(add_protocols, below, EVALUATIONS)
    return parser
