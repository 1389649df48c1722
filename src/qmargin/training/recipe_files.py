"""Recipes as dictionaries, YAML files and settings of a command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError
from qmargin.schema import (
    decode_settings,
    dump_yaml,
    encode,
    hints_of,
    load_yaml,
    read_text,
    set_value,
    split_setting,
)
from qmargin.training.loss_part import LossPart
from qmargin.training.recipe import Recipe


def to_dict(part: Any) -> dict[str, Any]:
    """A recipe, or a part of one, as dictionaries, lists and scalars."""
    values: dict[str, Any] = encode(part, "recipe")
    return values


def to_yaml(recipe: Recipe) -> str:
    """A recipe as text that ``from_yaml`` reads back into an equal one.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> from_yaml(to_yaml(debug())) == debug()
        True
    """
    return f"# sha256 of what decides the outcome: {recipe.sha256}\n{dump_yaml(to_dict(recipe))}"


def from_dict(values: Any) -> Recipe:
    """A recipe from dictionaries; what is missing has its default, what is unknown is refused.

    Raises:
        ConfigError: With the key, the value and what is known there.
    """
    recipe: Recipe = decode_settings(Recipe, values)
    return recipe


def from_yaml(text: str) -> Recipe:
    """Read a recipe from YAML: plain values only, few aliases, no key twice."""
    return from_dict(load_yaml(text))


def read_recipe(path: Path | str) -> Recipe:
    """Read a recipe from a YAML file."""
    text = read_text(path)
    try:
        return from_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def apply_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A recipe with settings such as ``loss.margin=0.3``, each of the type of its field.

    All are applied before anything is checked, so that two that belong together may come in any
    order. ``loss.preset=arcface`` replaces the whole loss, ``loss.margin={prior: 0.1}`` and
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
    pairs = [split_setting(setting) for setting in settings]
    forms = [pair for pair in pairs if _is_form(*pair)]
    # A preset first: what else is set of the loss is meant for it.
    for key, text in sorted(forms, key=lambda pair: pair[0] != "loss.preset"):
        values["loss"] = _with_form(values["loss"], key, text)
    for key, text in pairs:
        if (key, text) not in forms:
            set_value(values, Recipe, key, text)
    return from_dict(values)


_REPLACED = {  # what a form of the loss replaces, besides its own key
    "loss.preset": tuple(hints_of(LossPart)),
    "loss.divergence": ("alpha", "divergence_options"),
    "loss.margin": ("margin_kind", "options", "plus"),
}


def _is_form(key: str, text: str) -> bool:
    """Whether a setting is a way of writing a loss, and not a value of one field."""
    return key in ("loss.preset", "loss.divergence") or (
        key == "loss.margin" and text.startswith(("[", "{"))
    )


def _with_form(loss: Mapping[str, Any], key: str, text: str) -> dict[str, Any]:
    name = key.removeprefix("loss.")
    kept = {field: value for field, value in loss.items() if field not in _REPLACED[key]}
    given = text if name == "preset" else load_yaml(text)
    try:
        return LossPart.expand({**kept, name: given})
    except ConfigError as error:
        raise ConfigError(f"loss.{error}") from error
