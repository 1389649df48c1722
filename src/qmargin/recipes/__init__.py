"""Complete runs, as functions that return a ``Recipe``."""

from qmargin.recipes.registry import get_recipe, list_recipes, register_recipe

__all__ = ["get_recipe", "list_recipes", "register_recipe"]
