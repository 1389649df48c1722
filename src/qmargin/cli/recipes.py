"""``qmargin recipes`` and ``qmargin list``: list registered names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import Command, argument
from qmargin.errors import ConfigError
from qmargin.registry import KINDS

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Recipes(Command):
    """List the recipes of `qmargin train`, those to start with first.

    `qmargin train NAME --print-recipe` prints a recipe; `qmargin list recipes` is a plain list.
    """

    def run(self) -> None:
        from qmargin.recipes import group_recipes, list_recipes

        described = list_recipes()
        width = max(map(len, described), default=0)
        for number, (heading, group) in enumerate(group_recipes(described).items()):
            sys.stdout.write("\n" * bool(number) + f"{heading}\n")
            _write(group, indent="  ", width=width)


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List registered names: margins, backbones, readers, recipes and others.

    The list includes names that your own packages register.
    """

    kind: str = argument("kind of objects", choices=tuple(sorted(KINDS)))

    def run(self) -> None:
        described = KINDS[self.kind].describe()
        if not described:
            sys.stderr.write(
                f"no {self.kind} are registered besides built-in ones; packages add them by the "
                f"entry points {KINDS[self.kind].group}\n"
            )
        _write(described)


def _write(described: Mapping[str, str], *, indent: str = "", width: int = 0) -> None:
    width = max([width, *map(len, described)])
    for name, description in described.items():
        sys.stdout.write(f"{indent}{name:{width}}  {description}\n")


def load_recipe(name_or_file: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe by its name, or from a YAML file, with settings such as ``loss.margin=0.3``."""
    from qmargin.recipes import get_recipe
    from qmargin.training.recipe_files import apply_settings, read_recipe

    path = Path(name_or_file)
    is_file = path.suffix.lower() in (".yaml", ".yml") or len(path.parts) > 1
    if is_file and not path.exists():
        raise ConfigError(f"there is no file {path}; name one, or a recipe of `qmargin recipes`")
    recipe = read_recipe(path) if is_file else get_recipe(name_or_file)
    return apply_settings(recipe, settings)
