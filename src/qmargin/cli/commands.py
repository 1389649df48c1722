"""Every command of ``qmargin``; torch is imported by the command that needs it."""

from __future__ import annotations

import argparse

import qmargin
from qmargin.cli.completion import add_completion
from qmargin.cli.data import add_data
from qmargin.cli.demo import add_demo
from qmargin.cli.doctor import add_doctor
from qmargin.cli.embed import add_embed
from qmargin.cli.evaluate import add_evaluate
from qmargin.cli.export import add_export
from qmargin.cli.options import Parser
from qmargin.cli.paper import add_paper
from qmargin.cli.recipes import add_recipes
from qmargin.cli.report import add_report
from qmargin.cli.study import add_study
from qmargin.cli.sweep import add_sweep
from qmargin.cli.train import add_train
from qmargin.cli.verify import add_verify


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
    add_demo(commands)
    add_train(commands)
    add_sweep(commands)
    add_study(commands)
    add_recipes(commands)
    add_doctor(commands)
    add_evaluate(commands)
    add_report(commands)
    add_paper(commands)
    add_data(commands)
    add_embed(commands)
    add_verify(commands)
    add_export(commands)
    add_completion(commands)
    return parser
