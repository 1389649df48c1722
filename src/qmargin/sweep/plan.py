"""``sweep.json``: what a folder is the sweep of, so that it can be gone on with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError, DataError
from qmargin.files import write_atomically
from qmargin.sweep.axes import Axis, Point
from qmargin.sweep.trial import TRIAL
from qmargin.sweep.validation import DataSource, choose_measure, num_pairs
from qmargin.training.recipe import FREE, Recipe, is_under
from qmargin.training.recipe_changes import diff
from qmargin.training.recipe_files import from_dict, to_dict

PLAN = "sweep.json"
TRIALS = "trials.jsonl"
FOLDERS = "trials"
FORMAT = "qmargin-sweep"
VERSION = 1
LONGEST_NAME = 100  # characters of a folder, without its hash
MOST_NAMED = 6  # settings that differ, in a message


def find_measure(recipe: Recipe, data: DataSource, measure: str | None) -> str:
    """The measure that was asked for, or the strictest that the validation data allow.

    It builds the validation data, so that what is wrong with them is known before any training.
    """
    labels = data(recipe).validation.labels
    if labels is None:
        raise ConfigError("the validation data do not list their labels; pairs cannot be counted")
    return choose_measure(measure, num_pairs([int(label) for label in labels])[1])


def keep_plan(
    out: Path,
    *,
    recipe: Recipe,
    axes: Sequence[Axis],
    seeds: int,
    search: str,
    measure: str,
    command: str,
) -> None:
    """Write the plan, after a look at the one that is there.

    More values and more seeds may be added to a sweep; its recipe, search and measure stay.
    """
    plan: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "recipe_sha256": recipe.sha256,
        "search": search,
        "measure": measure,
        "seeds": seeds,
        "axes": [asdict(axis) for axis in axes],
        "command": command,
        "recipe": to_dict(recipe),
    }
    path = out / PLAN
    if path.exists():
        known = _read(path)
        if known.get("recipe_sha256") != recipe.sha256:
            raise ConfigError(
                f"{out} holds a sweep of another recipe: {_differences(known, recipe)}; choose "
                "another --out, or the recipe and --set of that sweep"
            )
        for name in ("search", "measure"):
            if known.get(name) != plan[name]:
                raise ConfigError(
                    f"{out} holds a sweep whose {name} is {known.get(name)}, and this one has "
                    f"{plan[name]}; choose another --out"
                )
    write_atomically(path, (json.dumps(plan, indent=1) + "\n").encode())


def _differences(known: dict[str, Any], recipe: Recipe) -> str:
    """The settings by which a stored plan differs, each with its value there and here."""
    try:
        stored = from_dict(known["recipe"])
    except (ConfigError, KeyError) as error:  # of another version of this package, or edited
        return f"its settings in {PLAN} cannot be read, so they cannot be compared ({error})"
    lines = [
        line for line in diff(stored, recipe) if not is_under(line.partition(":")[0], FREE)
    ]  # what decides nothing may differ
    if not lines:
        return f"no setting in {PLAN} differs, so it was edited or is of another version"
    left = len(lines) - MOST_NAMED
    more = f", and {left} more" if left > 0 else ""
    return f"{', '.join(lines[:MOST_NAMED])}{more} (there -> here)"


def known_points(out: Path) -> list[Point]:
    """Points that trials in a folder were begun with."""
    found: list[Point] = []
    for path in sorted((out / FOLDERS).glob(f"*/{TRIAL}")):
        point = _json(path)["point"]
        if point not in found:
            found.append(point)
    return found


def trial_folder(out: Path, point: Point, recipe: Recipe) -> Path:
    """A folder that says what is in it, and is no other trial's.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> name = trial_folder(Path("x"), {"loss.alpha": "1.25"}, debug()).name
        >>> name.rpartition("-")[0]
        'alpha=1.25,seed=0'
    """
    values = [f"{key.rpartition('.')[2]}={text}" for key, text in point.items()]
    name = ",".join([*values, f"seed={recipe.seed}"])
    name = re.sub(r"[^A-Za-z0-9=,._+-]", "_", name)[:LONGEST_NAME]
    return out / FOLDERS / f"{name}-{recipe.sha256[:8]}"


def _read(path: Path) -> dict[str, Any]:
    content = _json(path)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise DataError(f"{path} is not the plan of a sweep; choose another --out")
    return content


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no names and values")
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it, or choose another --out"
        ) from error
    return content
