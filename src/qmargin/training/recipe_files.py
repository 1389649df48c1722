"""Recipes as dictionaries, YAML files and settings of a command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qmargin import schema
from qmargin.errors import ConfigError
from qmargin.training.loss_part import LossPart
from qmargin.training.recipe import Recipe

_REPLACED = {  # keys that a form of the loss replaces, besides its own
    "loss.preset": tuple(schema.hints_of(LossPart)),
    "loss.divergence": ("alpha", "divergence_options"),
    "loss.margin": ("margin_kind", "options", "plus"),
    "loss.reference": (),
}


def to_dict(part: Any) -> dict[str, Any]:
    """A recipe, or a part of one, as dictionaries, lists and scalars."""
    values: dict[str, Any] = schema.encode(part, "recipe")
    return values


def to_yaml(recipe: Recipe) -> str:
    """A recipe as text that ``from_yaml`` reads back into an equal one."""
    text = schema.dump_yaml(to_dict(recipe))
    return f"# sha256 of what decides the outcome: {recipe.sha256}\n{text}"


def from_dict(values: Any) -> Recipe:
    """Build a recipe from dictionaries; missing keys have defaults, unknown keys are refused."""
    recipe: Recipe = schema.decode_settings(Recipe, values)
    return recipe


def from_yaml(text: str) -> Recipe:
    """Read a recipe from YAML: plain values only, few aliases, no key twice."""
    return from_dict(schema.load_yaml(text))


def read_recipe(path: Path | str) -> Recipe:
    """Read a recipe from a YAML file; a ``ConfigError`` names the file and the key."""
    text = schema.read_text(path)
    try:
        return from_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def apply_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A recipe with settings such as ``loss.margin=0.3``, each of the type of its field.

    All are applied before any check, so that dependent settings may come in any order.
    ``loss.preset=arcface`` replaces the whole loss, ``loss.margin={prior: 0.1}`` and
    ``loss.divergence=jensen_shannon`` a part of it; other settings of the loss change what these
    leave. ``null`` clears an optional value or section, a list is ``[7, 13]``.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> apply_settings(debug(), ["loss.margin=0.3", "optimizer.lr=1e-3"]).optimizer.lr
        0.001
        >>> apply_settings(debug(), ["loss.margin=[{prior: 0.1}, {angular: 0.05}]"]).loss.plus
        {'angular': {'margin': 0.05}}
    """
    values = to_dict(recipe)
    pairs = [schema.split_setting(setting) for setting in settings]
    forms = [pair for pair in pairs if _is_form(*pair)]
    # A preset first: other settings of the loss apply to it.
    for key, text in sorted(forms, key=lambda pair: pair[0] != "loss.preset"):
        name = key.removeprefix("loss.")
        loss = {kept: one for kept, one in values["loss"].items() if kept not in _REPLACED[key]}
        given = text if name == "preset" else schema.load_yaml(text)
        try:
            values["loss"] = LossPart.expand({**loss, name: given})
        except ConfigError as error:
            raise ConfigError(f"loss.{error}") from error
    for key, text in pairs:
        if (key, text) not in forms:
            schema.set_value(values, Recipe, key, text)
    return from_dict(values)


def _is_form(key: str, text: str) -> bool:
    """Whether a setting is a way of writing a loss, and not a value of one field."""
    is_margin = key == "loss.margin" and text.startswith(("[", "{"))
    return is_margin or key in ("loss.preset", "loss.divergence", "loss.reference")
