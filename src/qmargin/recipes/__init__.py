"""Complete runs, as functions that return a ``Recipe``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qmargin.registry import recipes, register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import LossPart, Recipe

    Builder = Callable[[], Recipe]

__all__ = ["get_recipe", "list_recipes", "register_recipe"]


def get_recipe(name: str) -> Recipe:
    """Build a recipe.

    Examples:
        >>> get_recipe("debug").data.kind
        'synthetic'
    """
    recipe: Recipe = recipes.get(name)()
    return recipe


def list_recipes() -> dict[str, str]:
    """Names that ``get_recipe`` knows, each with a line that describes it."""
    return recipes.describe()


def add_recipe(
    found: dict[str, Builder], name: str, line: str, build: Builder, settings: Sequence[str]
) -> None:
    """Register what ``build`` returns, with other settings; ``line`` describes it in lists."""

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
