"""``qmargin train``: a recipe, by name or from a file, and what to do with it."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
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


_NO_FOLDER = "--out is missing; name the folder of this run, as in --out runs/mine"


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train by a recipe: a name of `qmargin recipes`, or a YAML file as "
        "--print-recipe writes it. With --resume the recipe stored in DIR is used, and none need "
        "be named. For several GPUs: torchrun --nproc-per-node 8 -m qmargin train "
        "RECIPE --out DIR.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add("recipe", metavar="NAME_OR_FILE", nargs="?", help="name of a recipe, or a .yaml file")
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
    add(
        "--index-dir",
        type=Path,
        metavar="DIR",
        help="folder for the index of the data, instead of beside it: data.index_dir (none)",
    )
    add(
        "--allow-changes",
        action="store_true",
        help="resume with the named recipe and settings even if they change the outcome",
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
    recipe = _find_recipe(arguments)
    if arguments.index_dir is not None:
        recipe = replace(recipe, data=replace(recipe.data, index_dir=str(arguments.index_dir)))
    if arguments.print_recipe:
        from qmargin.training.recipe_files import to_yaml

        sys.stdout.write(to_yaml(recipe))
        return
    if arguments.out is None and not arguments.dry_run:
        raise ConfigError(_NO_FOLDER)
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


def _find_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe to train by: of a run that goes on the stored one, with the settings given."""
    resume = arguments.resume_from or arguments.resume
    named = load_recipe(arguments.recipe, arguments.settings) if arguments.recipe else None
    if arguments.allow_changes and not resume:
        raise ConfigError("--allow-changes is for a run that goes on; add --resume, or drop it")
    if not resume or (named is not None and arguments.allow_changes):
        if named is None:
            raise ConfigError(
                "the recipe is missing; name one that `qmargin recipes` lists, or a .yaml file"
            )
        return named
    if arguments.out is None:
        raise ConfigError(_NO_FOLDER)
    from qmargin.training.recipe_changes import diff
    from qmargin.training.recipe_files import apply_settings
    from qmargin.training.starting import recipe_to_train, stored_recipe

    stored = stored_recipe(arguments.out, resume=resume)
    if stored is None:
        return recipe_to_train(named, arguments.out, resume=resume)
    recipe = apply_settings(stored, arguments.settings)
    if named is not None and (lines := diff(recipe, named)) and _is_first():
        sys.stderr.write(
            f"the stored recipe is used; {arguments.recipe} differs: {'; '.join(lines)} "
            "(--allow-changes to use it)\n"
        )
    return recipe


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"  # the others would say the same


def _train(recipe: Recipe, arguments: argparse.Namespace) -> None:
    from qmargin.training.loop import train
    from qmargin.training.signals import exit_status

    outcome = train(
        recipe,
        arguments.out,
        resume=arguments.resume_from or arguments.resume,
        allow_changes=arguments.allow_changes,
        device=arguments.device,
        trackers=arguments.trackers,
    )
    if outcome.signal:
        if _is_first():
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
