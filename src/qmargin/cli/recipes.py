"""``qmargin recipes``: the runs that have a name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.errors import ConfigError

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

_ENDINGS = (".yaml", ".yml")


def add_recipes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "recipes",
        help="list the recipes that `qmargin train` knows by name",
        description="List recipes by name. `qmargin train NAME --print-recipe` writes one out.",
    )
    parser.set_defaults(run=run_recipes)


def run_recipes(arguments: argparse.Namespace) -> None:
    """Write one line per recipe."""
    from qmargin.recipes import list_recipes

    described = list_recipes()
    width = max(map(len, described))
    for name, description in described.items():
        sys.stdout.write(f"{name:{width}}  {description}\n")


def load_recipe(name_or_file: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe by its name, or from a YAML file, with settings such as ``loss.margin=0.3``.

    Examples:
        >>> load_recipe("debug", ["loss.margin=0.3"]).loss.margin
        0.3
    """
    from qmargin.recipes import get_recipe
    from qmargin.training.recipe_files import apply_settings, read_recipe

    path = Path(name_or_file)
    is_file = path.suffix.lower() in _ENDINGS or len(path.parts) > 1
    if is_file and not path.exists():
        raise ConfigError(
            f"there is no file {name_or_file}; name one, or a recipe that `qmargin recipes` lists"
        )
    recipe = read_recipe(path) if is_file else get_recipe(name_or_file)
    return apply_settings(recipe, settings)
