"""``qmargin demo``: five losses on synthetic stroke identities, from training to a report."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from qmargin.cli.options import named_path


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "demo",
        help="train five losses on synthetic identities and compare them",
        description="Train ArcFace, CosFace, EntMax, SparseMax and Q-Margin by one recipe on "
        "synthetic stroke identities, test all pairs of other identities, and write a report. On "
        "two CPU cores it takes at most six minutes. Interrupted and run again, it goes on.",
    )
    add = parser.add_argument
    add(
        "--out",
        type=named_path,
        default=Path("qmargin-demo"),
        metavar="DIR",
        help="folder of the demo",
    )
    add("--seeds", type=int, default=1, metavar="N", help="repetitions in other worlds (1)")
    add(
        "--losses",
        nargs="+",
        metavar="NAME",
        help="of arcface cosface entmax sparsemax q_margin (all)",
    )
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="for all five losses and one seed (the standard length, shorter only where six "
        "minutes would not do)",
    )
    add(
        "--data",
        type=named_path,
        metavar="PATH",
        help="pictures instead of synthetic ones: a folder with one folder per identity, or "
        "another layout of `qmargin train`, or an NPZ file",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (auto)")
    parser.set_defaults(run=run, resumes=True)


def run(arguments: argparse.Namespace) -> None:
    """Run the demo; a signal ends it with the status of that signal, after saving."""
    from qmargin.demo.losses import LOSSES
    from qmargin.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        out=arguments.out,
        losses=tuple(LOSSES) if arguments.losses is None else tuple(arguments.losses),
        seeds=arguments.seeds,
        minutes=arguments.minutes,
        device=arguments.device,
        data=arguments.data,
        command="qmargin " + shlex.join(sys.argv[1:]),
    )
    run_demo(options)
