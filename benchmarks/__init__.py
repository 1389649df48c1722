"""Benchmarks of a checkout, run as ``python -m benchmarks SUBJECT``; the wheel has none of them.

A subject is a module with ``add_subject``, which adds its options to the parser. What a subject
measures in a process of its own is started as ``python -m benchmarks.SUBJECT JOB``.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from qmargin.cli.options import Parser

MODULES = (
    "loss",
    "head",
    "head_page",
    "sizes",
    "kernels",
    "cpu",
    "metrics",
    "data",
    "features",
    "protocols",
    "trials",
    "synthetic",
    "coverage",
    "train",
    "packing",
    "precision",
    "paths",
    "trainings",
    "omniglot_recipe",
    "scaling",
    "serve",
)


def build_parser() -> argparse.ArgumentParser:
    """Parser of all subjects.

    Examples:
        >>> build_parser().parse_args(["loss", "--alphas", "1.5", "2"]).alphas
        [1.5, 2.0]
    """
    parser: argparse.ArgumentParser = Parser(
        prog="python -m benchmarks", description="Measure speed on this machine."
    )
    subjects = parser.add_subparsers(title="what to measure", metavar="SUBJECT", required=True)
    for name in MODULES:
        import_module(f"benchmarks.{name}").add_subject(subjects)
    return parser
