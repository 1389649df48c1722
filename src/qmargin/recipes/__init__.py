"""Recipes of complete runs, as functions that return a ``Recipe``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qmargin.registry import recipes, register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import LossPart, Recipe

    Builder = Callable[[], Recipe]

__all__ = ["get_recipe", "list_recipes", "register_recipe"]

START = ("faces_tiny", "speakers_tiny", "debug")
"""Recipes that a newcomer needs."""


def get_recipe(name: str) -> Recipe:
    """Return a built-in or registered recipe by name.

    Examples:
        >>> get_recipe("debug").data.kind
        'synthetic'
    """
    recipe: Recipe = recipes.get(name)()
    return recipe


def list_recipes() -> dict[str, str]:
    """Names that ``get_recipe`` knows, each with a line that describes it."""
    return recipes.describe()


def group_recipes(described: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Recipes by the headings of a list, those that a newcomer needs first."""
    from qmargin.recipes.face import FACE_RECIPES
    from qmargin.recipes.speaker import SPEAKER_RECIPES

    start = "Start here: minutes on a CPU"
    own = "Your own folder, with larger networks"
    faces = "Faces: the paper's tables and other collections"
    speakers = "Speakers: the paper's table and other collections"
    added = "Added by your packages"
    groups: dict[str, dict[str, str]] = {
        start: {name: described[name] for name in START if name in described},
        **{heading: {} for heading in (own, faces, speakers, added)},
    }
    for name, line in described.items():
        if name in START:
            continue
        is_face, is_speaker = name in FACE_RECIPES, name in SPEAKER_RECIPES
        if (is_face or is_speaker) and name.startswith(("faces_", "speakers_")):
            heading = own
        else:
            heading = faces if is_face else speakers if is_speaker else added
        groups[heading][name] = line
    return {heading: group for heading, group in groups.items() if group}


def add_recipe(
    found: dict[str, Builder], name: str, line: str, build: Builder, settings: Sequence[str]
) -> None:
    """Register a variant of the recipe of ``build``; ``line`` describes it in lists."""

    def made() -> Recipe:
        from qmargin.training.recipe_files import apply_settings

        return apply_settings(build(), [f"name={name}", *settings])

    made.__doc__ = f"{line}\n\nNot run end to end with this package."
    found[name] = made
    register_recipe(name, made)


class Loss(NamedTuple):
    """A row of a table: a preset of ``qmargin.losses.presets`` with the row's numbers."""

    title: str
    preset: str
    scale: float
    margin: float
    alpha: float | None = None

    def describe(self, note: str) -> str:
        """The numbers in words."""
        order = "" if self.alpha is None else f"alpha {self.alpha:g}, "
        text = f"{self.title}, {order}scale {self.scale:g}, margin {self.margin:g}"
        return f"{text} ({note})." if note else f"{text}."

    def build(self) -> LossPart:
        """The part of a recipe; presets without an alpha take none."""
        from qmargin.training.recipe import LossPart

        order = {} if self.alpha is None else {"alpha": self.alpha}
        return LossPart.from_preset(self.preset, scale=self.scale, margin=self.margin, **order)
