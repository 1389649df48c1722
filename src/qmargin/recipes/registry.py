"""Recipes by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from qmargin.errors import ConfigError
from qmargin.recipes.debug import debug
from qmargin.recipes.face import FACE_RECIPES
from qmargin.recipes.speaker import SPEAKER_RECIPES

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

_RECIPES: dict[str, Callable[[], Recipe]] = {
    "debug": debug,
    **FACE_RECIPES,
    **SPEAKER_RECIPES,
}


def register_recipe(name: str, builder: Callable[[], Recipe]) -> None:
    """Make ``get_recipe(name)`` call ``builder``.

    Args:
        name: Not yet taken; a name of the command line, so without a slash or a file's ending.
        builder: Returns the recipe; the first line of its docstring describes it in lists.
    """
    if name in _RECIPES:
        raise ConfigError(f"a recipe {name!r} is registered already; choose another name")
    if not name.replace("-", "_").isidentifier():
        raise ConfigError(f"a recipe's name is {name!r}; use letters, digits, - and _")
    if not (builder.__doc__ or "").strip():
        raise ConfigError(f"the recipe {name!r} has no docstring to describe it; write one line")
    _RECIPES[name] = builder


def get_recipe(name: str) -> Recipe:
    """Build a recipe.

    Examples:
        >>> get_recipe("debug").data.kind
        'synthetic'
    """
    if name not in _RECIPES:
        close = get_close_matches(name, _RECIPES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "nothing is like it;"
        raise ConfigError(f"no recipe {name!r}, {hint} `qmargin recipes` lists all")
    return _RECIPES[name]()


def list_recipes() -> dict[str, str]:
    """Names that ``get_recipe`` knows, each with a line that describes it.

    Examples:
        >>> list_recipes()["debug"]
        'Synthetic identities and a small network: Q-Margin end to end on a CPU in a minute.'
    """
    return {name: (builder.__doc__ or "").split("\n")[0] for name, builder in _RECIPES.items()}
