"""``qmargin train``: a recipe, by name or from a file, and what to do with it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError, QMarginError, RankError

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

EXIT_CODES = """exit status:
  0    the run is complete
  1    an error that nobody foresaw, with its traceback
  2    refused, or stopped by one of the run's own checks; the last line says why
  75   another rank was lost or failed; start again with --resume
  130  stopped by Ctrl-C after saving; go on with --resume
  143  stopped by SIGTERM after saving; go on with --resume
"""


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train by a recipe: a name of `qmargin recipes`, or a YAML file as "
        "--print-recipe writes it. For several GPUs: torchrun --nproc-per-node 8 -m qmargin train "
        "RECIPE --out DIR.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add("recipe", metavar="NAME_OR_FILE", help="name of a recipe, or a .yaml file")
    add("--out", type=Path, metavar="DIR", help="folder of checkpoints, journal and status")
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the recipe, as in loss.margin=0.3; may be repeated",
    )
    add("--resume", action="store_true", help="go on from the newest good checkpoint in DIR")
    add(
        "--resume-from",
        type=Path,
        metavar="CHECKPOINT",
        help="go on from this checkpoint of DIR; later ones are set aside",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (auto)")
    add(
        "--track",
        dest="trackers",
        action="append",
        default=[],
        metavar="NAME",
        help="also send numbers to tensorboard or wandb; may be repeated",
    )
    _add_modes(parser)
    parser.set_defaults(run=run_train)


def _add_modes(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--print-recipe",
        action="store_true",
        help="write the recipe, with all settings applied, as YAML and stop",
    )
    modes.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, take two steps, report memory and time, write nothing, and stop",
    )


def run_train(arguments: argparse.Namespace) -> None:
    """Print the recipe, try it, or train by it."""
    recipe = load_recipe(arguments.recipe, arguments.settings)
    if arguments.print_recipe:
        from qmargin.training.recipe_files import to_yaml

        sys.stdout.write(to_yaml(recipe))
        return
    if arguments.out is None and not arguments.dry_run:
        raise ConfigError("--out is missing; name the folder of this run, as in --out runs/mine")
    try:
        if arguments.dry_run:
            _rehearse(recipe, arguments)
        else:
            _train(recipe, arguments)
    except QMarginError as error:
        _show_origin(error)
        if isinstance(error, RankError):
            from qmargin.training.heartbeat import EXIT_RANK_LOST

            sys.stderr.write(f"qmargin: error: {error}\n")
            raise SystemExit(EXIT_RANK_LOST) from error
        raise


def _train(recipe: Recipe, arguments: argparse.Namespace) -> None:
    from qmargin.training.loop import train
    from qmargin.training.signals import exit_status

    outcome = train(
        recipe,
        arguments.out,
        resume=arguments.resume_from or arguments.resume,
        device=arguments.device,
        trackers=arguments.trackers,
    )
    if outcome.signal:
        if os.environ.get("RANK", "0") == "0":  # the others would say the same
            sys.stderr.write("go on with --resume\n")
        raise SystemExit(exit_status(outcome.signal))


def _rehearse(recipe: Recipe, arguments: argparse.Namespace) -> None:
    from qmargin.training.rehearsal import rehearse

    rehearsal = rehearse(recipe, device=arguments.device)
    if rehearsal.rank == 0:
        sys.stdout.write("\n".join(rehearsal.lines()) + "\n")


def _show_origin(error: BaseException) -> None:
    """Write the traceback of what happened in a data worker or on another rank, if that was it."""
    from qmargin.data.loader import WorkerTraceback
    from qmargin.training.agreement import RemoteTraceback

    if isinstance(error.__cause__, WorkerTraceback | RemoteTraceback):
        sys.stderr.write(f"{error.__cause__}\n")
