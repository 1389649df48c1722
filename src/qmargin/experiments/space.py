"""Settings that an experiment tries: lists and ranges of values for keys of a recipe."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qmargin.errors import ConfigError
from qmargin.losses.hardness import scale_of_hardness
from qmargin.losses.margins import PriorMargin
from qmargin.losses.reach import REACH_KINDS, UnreachableError, margin_of_reach
from qmargin.training.recipe import Recipe, flatten, is_under
from qmargin.training.recipe_files import apply_settings

EFFECTIVE = "m_eff"  # effective margin: the cosine gap that a margin adds
HARDNESS = "hardness"  # of the negatives, comparable over alpha and numbers of classes
REACH = "reach"  # cosine gap of a zero loss
DECIDES = {EFFECTIVE: "loss.margin", HARDNESS: "loss.scale", REACH: "loss.margin"}
PRESET = "loss.preset"  # replaces the whole section

Point = dict[str, str]
"""One value of every key, as on the command line."""


@dataclass(frozen=True)
class Values:
    """A list of values of a key."""

    key: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """All numbers between two, both included; for a random or Optuna search."""

    key: str
    low: float
    high: float
    is_log: bool = False


Axis = Values | Range


def value_text(value: Any) -> str:
    """A value of YAML or Python as the text of a setting, such as 16 for 16.0."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return json.dumps(value)


def parse_axis(text: str) -> Axis:
    """Read an axis: ``KEY=V1,V2``, or ``KEY=LOW:HIGH[:log]`` for a search.

    Examples:
        >>> parse_axis("loss.alpha=1.25,1.5")
        Values(key='loss.alpha', texts=('1.25', '1.5'))
        >>> parse_axis("loss.scale=8:64:log")
        Range(key='loss.scale', low=8.0, high=64.0, is_log=True)
    """
    key, equals, rest = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"the axis {text!r} has no values; write it as key=value,value")
    return make_axis(key, rest if ":" in rest else list(_split(rest)))


def make_axis(key: str, value: Any) -> Axis:
    """An axis from a key and a list of values, or a range such as ``"8:64:log"``."""
    if isinstance(value, str) and ":" in value:
        return _range(key, value)
    texts = tuple(value_text(entry).strip() for entry in value)
    if not texts or not all(texts):
        raise ConfigError(f"{key} has an empty value; give at least one value, none of them empty")
    for text in texts:
        if texts.count(text) > 1:
            raise ConfigError(f"{key} has the value {text} twice; keep one of them")
    return Values(key, texts)


def _range(key: str, text: str) -> Range:
    ends, is_log = text.removesuffix(":log").split(":"), text.endswith(":log")
    try:
        low, high = map(float, ends)
    except ValueError as error:
        raise ConfigError(f"the range {text!r} of {key} is not LOW:HIGH or LOW:HIGH:log") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"the range of {key} is {text}; the first number must be the smaller")
    if is_log and low <= 0.0:
        raise ConfigError(f"the range of {key} is {text}; with log it must begin above 0")
    return Range(key, low, high, is_log)


def _split(text: str) -> Iterator[str]:
    """Parts between commas outside brackets."""
    depth, start = 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def check_axes(recipe: Recipe, axes: Sequence[Axis], settings: Sequence[str] = ()) -> None:
    """Refuse axes that contradict each other, a fixed setting of all runs, or the recipe."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is given twice; give all its values in one list")
    for key, decided in DECIDES.items():
        if key in keys and decided in keys:
            raise ConfigError(f"{key} and {decided} are both given; each decides the other")
    if EFFECTIVE in keys and REACH in keys:
        raise ConfigError(f"{EFFECTIVE} and {REACH} are both given; each decides the margin")
    if "seed" in keys:
        raise ConfigError("seed is an axis; say how many seeds instead")
    firsts = {axis.key: axis_text(recipe, axis, _first(axis)) for axis in axes}
    for axis in axes:
        value = flatten(recipe).get(axis.key)
        if isinstance(axis, Range) and isinstance(value, bool | str | tuple):
            raise ConfigError(f"{axis.key} is {value!r} and has no range; list its values")
        # Settings of a margin are checked with their alpha and scale.
        with suppress(UnreachableError):  # other values of the axes may be possible
            with_point(recipe, firsts if axis.key == REACH else {axis.key: firsts[axis.key]})
        decided = "loss" if axis.key == PRESET else DECIDES.get(axis.key, axis.key)
        for setting in settings:
            if is_under(setting.partition("=")[0].strip(), (decided,)):
                why = "is an axis" if decided == axis.key else f"follows from the axis {axis.key}"
                raise ConfigError(f"{setting} is set, and {decided} {why}; leave one of them out")


def _first(axis: Axis) -> Any:
    return axis.low if isinstance(axis, Range) else axis.texts[0]


def reachable(recipe: Recipe, points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Possible points of a grid, and those whose reach is smaller than without a margin.

    Raises:
        ConfigError: No point is left.
    """
    kept: list[Point] = []
    left_out: list[Point] = []
    for point in points:
        try:
            if REACH in point:
                with_point(recipe, point)
            kept.append(point)
        except UnreachableError as error:
            left_out.append(point)
            reason = error
    if not kept:
        raise ConfigError(f"no point of the grid is possible: {reason}") from reason
    return kept, left_out


def check_points(recipe: Recipe, points: Sequence[Point]) -> None:
    """Refuse points that the recipe refuses, and two with the same recipe."""
    owners: dict[str, Point] = {}
    for point in points:
        owner = owners.setdefault(with_point(recipe, point).sha256, point)
        if owner != point:
            raise ConfigError(
                f"{described(owner)} and {described(point)} are the same run; keep one of them"
            )


def described(point: Point) -> str:
    """A point in words, such as ``alpha 1.5, m_eff 0.3``."""
    texts = [f"{key.rpartition('.')[2]} {text}" for key, text in point.items()]
    return ", ".join(texts) or "the recipe as it is"


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Every combination of values; the last axis changes fastest.

    Examples:
        >>> grid([parse_axis("loss.alpha=1.25,1.5"), parse_axis("loss.scale=10")])
        [{'loss.alpha': '1.25', 'loss.scale': '10'}, {'loss.alpha': '1.5', 'loss.scale': '10'}]
    """
    columns = []
    for axis in axes:
        if isinstance(axis, Range):
            raise ConfigError(f"{axis.key} is a range; a grid needs a list of values")
        columns.append([(axis.key, text) for text in axis.texts])
    return [dict(row) for row in itertools.product(*columns)]


def axis_text(recipe: Recipe, axis: Axis, value: Any) -> str:
    """A value of an axis as a setting; from a range, an integer if the recipe has one."""
    if isinstance(axis, Values):
        return str(value)
    is_whole = isinstance(flatten(recipe).get(axis.key), int)
    return str(round(value)) if is_whole else f"{value:.4g}"


def with_point(recipe: Recipe, point: Mapping[str, str], *, seed: int | None = None) -> Recipe:
    """The recipe of a run: ``hardness`` decides the scale, then ``m_eff`` or ``reach`` the margin.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> found = with_point(debug(), {"loss.scale": "32", "m_eff": "0.5"}, seed=3)
        >>> round(found.loss.margin, 4), found.seed
        (0.2012, 3)
    """
    settings = [f"{key}={text}" for key, text in point.items() if key not in DECIDES]
    changed = apply_settings(recipe, settings)
    if HARDNESS in point:
        scale = _scale_of(changed, _number(point, HARDNESS, such_as=3.0))
        changed = replace(changed, loss=replace(changed.loss, scale=scale))
    for key in (EFFECTIVE, REACH):
        if key in point:
            margin = _margin_of(changed, key, _number(point, key, such_as=0.5))
            changed = replace(changed, loss=replace(changed.loss, margin=margin))
    return changed if seed is None else replace(changed, seed=seed)


def _number(point: Mapping[str, str], key: str, *, such_as: float) -> float:
    try:
        return float(point[key])
    except ValueError as error:
        raise ConfigError(f"{key} is {point[key]!r}; give a number, such as {such_as:g}") from error


def _scale_of(recipe: Recipe, hardness: float) -> float:
    classes, dim = recipe.data.num_classes, recipe.model.embedding_dim
    if classes is None:
        raise ConfigError(f"{HARDNESS} is an axis; give data.num_classes, or use loss.scale")
    sizes = {"num_classes": classes, "embedding_dim": dim}
    # Rounded, so that the hash of a run does not depend on the machine's rounding.
    return float(f"{scale_of_hardness(hardness, recipe.loss.order, **sizes):.7g}")


def _margin_of(recipe: Recipe, key: str, gap: float) -> float:
    loss = recipe.loss
    if len(loss.margins) > 1 or loss.class_sources:
        raise ConfigError(f"{key} is an axis and the margin is a sum or per class; use loss.margin")
    if key == REACH and loss.margin_kind in REACH_KINDS:
        return margin_of_reach(gap, loss.order, loss.scale, kind=loss.margin_kind)
    if key == EFFECTIVE and loss.margin_kind == "cosine":
        return gap
    if key == EFFECTIVE and loss.margin_kind == "prior":
        margin = PriorMargin.from_effective(gap, alpha=loss.order, scale=loss.scale).margin
        assert isinstance(margin, float)  # one for all rows
        return margin
    raise ConfigError(f"{key} is an axis and the margin is {loss.margin_kind}; use loss.margin")
