"""Complete runs, as functions that return a ``Recipe``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qmargin.registry import recipes, register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

__all__ = ["get_recipe", "list_recipes", "register_recipe"]

Run = TypeVar("Run")


def get_recipe(name: str) -> Recipe:
    """Build a recipe.

    Examples:
        >>> get_recipe("debug").data.kind
        'synthetic'
    """
    recipe: Recipe = recipes.get(name)()
    return recipe


def list_recipes() -> dict[str, str]:
    """Names that ``get_recipe`` knows, each with a line that describes it.

    Examples:
        >>> list_recipes()["debug"]
        'Synthetic identities and a small network: Q-Margin end to end on a CPU in a minute.'
    """
    return recipes.describe()


def builder(
    name: str, run: Run, build: Callable[[str, Run], Recipe], *, line: str
) -> Callable[[], Recipe]:
    """A function for the registry that builds a run's recipe; ``line`` describes it in lists."""

    def made() -> Recipe:
        return build(name, run)

    made.__doc__ = f"{line}\n\nNot run end to end with this package."
    return made


class Loss(NamedTuple):
    """A row of a table: a preset of ``qmargin.losses.presets`` with the row's numbers."""

    title: str
    preset: str
    scale: float
    margin: float
    alpha: float | None = None

    def describe(self) -> str:
        """The numbers in words."""
        order = "" if self.alpha is None else f"alpha {self.alpha:g}, "
        return f"{self.title}, {order}scale {self.scale:g}, margin {self.margin:g}"

    @property
    def numbers(self) -> dict[str, float]:
        """For ``LossPart.from_preset``; presets without an alpha take none."""
        order = {} if self.alpha is None else {"alpha": self.alpha}
        return {"scale": self.scale, "margin": self.margin, **order}
