"""The axes of a sweep: which settings of a recipe take which values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qmargin.errors import ConfigError
from qmargin.maths.hardness import scale_of_hardness
from qmargin.maths.margins import PriorMargin
from qmargin.training.recipe import Recipe, flatten, is_under
from qmargin.training.recipe_files import apply_settings

EFFECTIVE = "m_eff"
"""An axis of its own: what a margin adds to the cosine gap of a zero loss."""

HARDNESS = "hardness"
"""Another: how hard the negatives are that a loss looks at, whatever alpha and the classes are."""

DECIDES = {EFFECTIVE: "loss.margin", HARDNESS: "loss.scale"}
PRESET, LOSS = "loss.preset", "loss"  # a preset replaces the whole section

Point = dict[str, str]  # one value of every axis, as on the command line


@dataclass(frozen=True)
class Values:
    """Some values of a setting."""

    key: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """All numbers between two, both included, for a search."""

    key: str
    low: float
    high: float
    is_log: bool = False


Axis = Values | Range


def parse_axis(text: str) -> Axis:
    """An axis as the command line has it: ``KEY=V1,V2``, or ``KEY=LOW:HIGH[:log]`` for a search.

    Examples:
        >>> parse_axis("loss.alpha=1.25,1.5")
        Values(key='loss.alpha', texts=('1.25', '1.5'))
        >>> parse_axis("loss.scale=8:64:log")
        Range(key='loss.scale', low=8.0, high=64.0, is_log=True)
    """
    key, equals, rest = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"the axis {text!r} has no values; write it as key=value,value")
    if ":" in rest:
        return _range(key, rest)
    texts = tuple(part.strip() for part in _split(rest))
    if not all(texts):
        raise ConfigError(f"the axis {text!r} has an empty value; write it as key=value,value")
    for value in texts:
        if texts.count(value) > 1:
            raise ConfigError(f"the axis {key} has the value {value} twice; keep one of them")
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
    """At the commas that are not inside brackets."""
    depth, start = 0, 0
    for place, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def check_axes(recipe: Recipe, axes: Sequence[Axis]) -> None:
    """Refuse axes that do not go together, or that the recipe does not know.

    Raises:
        ConfigError: With the nearest key that is known, where one is not.
    """
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"the axis {key} is given twice; give all its values in one")
    for key, decided in DECIDES.items():
        if key in keys and decided in keys:
            raise ConfigError(
                f"{key} and {decided} are both axes; each decides the other, keep one of them"
            )
    if "seed" in keys:
        raise ConfigError("seed is an axis; say how many seeds with --seeds instead")
    for axis in axes:
        if isinstance(axis, Range):
            _check_range(recipe, axis)


def check_settings(axes: Sequence[Axis], settings: Sequence[str]) -> None:
    """Refuse a setting of all trials that an axis replaces in every one of them.

    Args:
        axes: Of the sweep.
        settings: That were applied to its recipe, such as ``loss.scale=16``.

    Raises:
        ConfigError: With both of them.
    """
    for setting in settings:
        key = setting.partition("=")[0].strip()
        for axis in axes:
            decided = LOSS if axis.key == PRESET else DECIDES.get(axis.key, axis.key)
            if is_under(key, (decided,)):
                is_own = decided == axis.key
                why = "is an axis" if is_own else f"follows from the axis {axis.key}"
                raise ConfigError(
                    f"{setting} is set, and {decided} {why} in every trial; leave one of them out"
                )


def _check_range(recipe: Recipe, axis: Range) -> None:
    known = flatten(recipe)
    value = known.get(axis.key)
    if isinstance(value, bool | str | tuple):
        raise ConfigError(f"{axis.key} is {value!r} and has no range; list its values")
    if axis.key not in known:
        with_point(recipe, first_point(recipe, axis))  # refuses what is no key at all


def check_points(recipe: Recipe, points: Sequence[Point]) -> None:
    """Refuse a grid with a point that the recipe refuses, or two that are the same training."""
    owners: dict[str, Point] = {}
    for point in points:
        owner = owners.setdefault(with_point(recipe, point).sha256, point)
        if owner != point:
            raise ConfigError(
                f"{described(owner)} and {described(point)} are the same training; keep one of them"
            )


def described(point: Point) -> str:
    """A point for people.

    Examples:
        >>> described({"loss.alpha": "1.5", "m_eff": "0.3"}), described({})
        ('loss.alpha=1.5, m_eff=0.3', 'the recipe as it is')
    """
    return ", ".join(f"{key}={text}" for key, text in point.items()) or "the recipe as it is"


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Every combination of values, the last axis moving fastest.

    Examples:
        >>> grid([parse_axis("loss.alpha=1.25,1.5"), parse_axis("loss.scale=10")])
        [{'loss.alpha': '1.25', 'loss.scale': '10'}, {'loss.alpha': '1.5', 'loss.scale': '10'}]
    """
    ranges = [axis.key for axis in axes if isinstance(axis, Range)]
    if ranges:
        raise ConfigError(
            f"{ranges[0]} is a range, which a grid cannot visit; list values, or search with "
            "--search optuna"
        )
    lists = [axis for axis in axes if isinstance(axis, Values)]
    columns = [[(axis.key, text) for text in axis.texts] for axis in lists]
    return [dict(row) for row in itertools.product(*columns)]


def first_point(recipe: Recipe, axis: Axis) -> Point:
    """The first value of one axis, or the lower end of a range."""
    if isinstance(axis, Range):
        return {axis.key: as_text(recipe, axis.key, axis.low)}
    return {axis.key: axis.texts[0]}


def as_text(recipe: Recipe, key: str, value: float) -> str:
    """A number of a range as a setting: whole where the recipe has a whole number.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> as_text(debug(), "run.epochs", 5.7), as_text(debug(), "loss.scale", 12.34567)
        ('6', '12.35')
    """
    known = flatten(recipe).get(key)
    return str(round(value)) if isinstance(known, int) else f"{value:.4g}"


def with_point(recipe: Recipe, point: Mapping[str, str], *, seed: int | None = None) -> Recipe:
    """The recipe of a trial.

    Args:
        recipe: Of the sweep.
        point: One value of every axis; ``hardness`` becomes the scale that has it, and then
            ``m_eff`` the margin that asks for this gap.
        seed: Instead of the recipe's own.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> found = with_point(debug(), {"loss.scale": "32", "m_eff": "0.5"}, seed=3)
        >>> round(found.loss.margin, 4), found.seed
        (0.2012, 3)
    """
    settings = [f"{key}={text}" for key, text in point.items() if key not in DECIDES]
    changed = apply_settings(recipe, settings)
    if HARDNESS in point:
        changed = _with_hardness(changed, point[HARDNESS])
    if EFFECTIVE in point:
        changed = _with_effective(changed, point[EFFECTIVE])
    return changed if seed is None else replace(changed, seed=seed)


def _number(key: str, text: str, *, such_as: float) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{key} is {text!r}; give a number, such as {such_as:g}") from error


def _with_hardness(recipe: Recipe, text: str) -> Recipe:
    mean = _number(HARDNESS, text, such_as=3.0)
    num_classes = recipe.data.num_classes
    if num_classes is None:
        raise ConfigError(
            f"{HARDNESS} is an axis and the recipe does not say how many classes there are; give "
            "data.num_classes, or use loss.scale"
        )
    dim = recipe.model.embedding_dim
    scale = scale_of_hardness(mean, recipe.loss.alpha, num_classes=num_classes, embedding_dim=dim)
    return replace(recipe, loss=replace(recipe.loss, scale=scale))


def _with_effective(recipe: Recipe, text: str) -> Recipe:
    loss = recipe.loss
    gap = _number(EFFECTIVE, text, such_as=0.5)
    if loss.margin_kind == "cosine":
        margin = gap
    elif loss.margin_kind == "prior":
        prior = PriorMargin.from_effective(gap, alpha=loss.alpha, scale=loss.scale)
        assert isinstance(prior.margin, float)  # one for all rows
        margin = prior.margin
    else:
        raise ConfigError(
            f"{EFFECTIVE} is an axis and the margin is {loss.margin_kind}; the gap of a prior or "
            "cosine margin is one number, that of others is not, use loss.margin"
        )
    return replace(recipe, loss=replace(loss, margin=margin))


def effective_margin(recipe: Recipe) -> float | None:
    """What a recipe's margin adds to the cosine gap of a zero loss; None if that varies."""
    loss = recipe.loss
    return loss.build_margin(seed=recipe.seed).effective(loss.alpha, loss.scale)
