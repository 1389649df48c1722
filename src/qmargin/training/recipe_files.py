"""Recipes as YAML, and settings from a command line: typed, and refused where unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, get_args, get_origin

import yaml

from qmargin.errors import ConfigError, DataError
from qmargin.files import open_regular
from qmargin.training.fields import Option, check_known, hints_of, optional_of
from qmargin.training.loss_part import LossPart
from qmargin.training.recipe import Recipe

MAX_BYTES = 100_000  # a recipe has about two thousand
MAX_VALUES = 5000
MAX_LENGTH = 10_000  # of one of them; paths have at most 4096
MAX_ALIASES = 10
MAX_DEPTH = 20
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text that has line breaks or control characters in escapes: YAML would fold them."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def to_dict(part: Any) -> dict[str, Any]:
    """A recipe, or a part of one, as dictionaries, lists and scalars."""
    return {entry.name: _plain(getattr(part, entry.name)) for entry in fields(part)}


def to_yaml(recipe: Recipe) -> str:
    """A recipe as text that ``from_yaml`` reads back into an equal one.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> from_yaml(to_yaml(debug())) == debug()
        True
    """
    text = yaml.dump(
        to_dict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return f"# sha256 of what decides the outcome: {recipe.sha256}\n{text}"


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from dictionaries; what is missing has its default, what is unknown is refused."""
    built: Recipe = _build(Recipe, values, "")
    return built


def from_yaml(text: str) -> Recipe:
    """Read a recipe from YAML: plain values only, few aliases, no key twice.

    Raises:
        ConfigError: With the place, the value and what is known there.
    """
    values = _load(text)
    if not isinstance(values, dict):
        raise ConfigError(
            f"the recipe is {short(values)}; give keys and values, as in 'name: mine'"
        )
    return from_dict(values)


def read_recipe(path: Path | str) -> Recipe:
    """Read a recipe from a YAML file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give the name of a recipe or a YAML file"
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {path.stat().st_size:,} bytes and a recipe at most {MAX_BYTES:,}; "
            "this is another kind of file"
        )
    try:
        return from_yaml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save it as such ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def apply_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A recipe with settings such as ``loss.margin=0.3``, each of the type of its field.

    All are applied before anything is checked, so that two that belong together may come in any
    order. ``loss.preset=arcface`` replaces the whole loss; other settings of it change the preset.
    ``null`` clears an optional value or section, a list is ``[7, 13]``.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> apply_settings(debug(), ["loss.margin=0.3", "optimizer.lr=1e-3"]).optimizer.lr
        0.001
    """
    values = to_dict(recipe)
    pairs = [_split(setting) for setting in settings]
    # A preset first: what else is set of the loss is meant for it.
    for key, text in sorted(pairs, key=lambda pair: pair[0] != "loss.preset"):
        if key == "loss.preset":
            values["loss"] = {"preset": text}
        else:
            _set(values, Recipe, key, text)
    return from_dict(values)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _build(kind: Any, values: Any, where: str) -> Any:
    """A part, or the recipe itself, from a dictionary; ``where`` is its section."""
    section = where or "the recipe"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section} is {short(values)}; give keys and values")
    hints = hints_of(kind)
    for name in values:
        check_known(
            name if isinstance(name, str) else repr(name),
            [*hints, *_extra_keys(kind)],
            f"a key of {section}",
        )
    if "preset" in values:
        return _located(section, LossPart.from_preset, _read_values(hints, values))
    missing = [
        entry.name
        for entry in fields(kind)
        if entry.name not in values and entry.default is entry.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{section} has no {', '.join(missing)}; give a value")
    read = _read_values(hints, values)
    return kind(**read) if not where else _located(where, kind, read)


def _extra_keys(kind: Any) -> tuple[str, ...]:
    """Keys that are read and never written."""
    return ("preset",) if kind is LossPart else ()


def _read_values(hints: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in values.items():
        hint = optional_of(hints.get(name, str))
        if is_dataclass(hint) and value is not None:
            read[name] = _build(hint, value, name)
        elif hint is float and isinstance(value, str) and _NUMBER.fullmatch(value):
            read[name] = float(value)  # YAML 1.1 takes 1e-3, without a point, for a text
        else:
            read[name] = value
    return read


def _located(where: str, make: Any, values: dict[str, Any]) -> Any:
    """Build, and name the section in an error."""
    try:
        return make(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _split(setting: str) -> tuple[str, str]:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"the setting {short(setting)} has no value; write it as key=value")
    return key.strip(), text.strip()


def _set(values: dict[str, Any], kind: Any, key: str, text: str) -> None:
    """Put the value that a text means under a dotted key."""
    *sections, last = key.split(".")
    where: dict[str, Any] = values
    walked: list[str] = []
    hint: Any = kind
    for name in sections:
        hint = _inner(hint, name, walked)
        walked.append(name)
        if where.get(name) is None:
            where[name] = {}
        where = where[name]
    hint = _inner(hint, last, walked)
    if is_dataclass(hint) or get_origin(hint) is dict:
        if text not in ("null", "none", "None"):
            raise ConfigError(f"{key} is a section; set a key inside it, as in {key}.NAME=VALUE")
        where[last] = {} if get_origin(hint) is dict else None
    else:
        where[last] = _meaning(text, hint)


def _inner(hint: Any, name: str, walked: list[str]) -> Any:
    """Annotation of what is under a name."""
    section = ".".join(walked) or "the recipe"
    if get_origin(hint) is dict:
        return get_args(hint)[1]
    if not is_dataclass(hint):
        raise ConfigError(f"{section} is a value and has nothing inside; drop .{name}")
    hints = hints_of(hint)
    homes = [] if walked or name in hints else _homes(hint, name)
    if homes:
        raise ConfigError(f"the recipe has no {name!r} of its own; did you mean {homes[0]}?")
    check_known(name, [*hints, *_extra_keys(hint)], f"a key of {section}")
    return optional_of(hints[name])


def _homes(kind: Any, name: str) -> list[str]:
    """Dotted keys of the sections that have a key of this name."""
    parts = {section: optional_of(hint) for section, hint in hints_of(kind).items()}
    return [
        f"{section}.{name}"
        for section, part in parts.items()
        if is_dataclass(part) and name in (*hints_of(part), *_extra_keys(part))
    ]


def _meaning(text: str, hint: Any) -> Any:
    """What a text means where a value of this annotation is expected."""
    if text in ("null", "none", "None"):
        return None
    if hint is str or get_origin(hint) is Literal:
        return text
    value = _load(text)
    if hint == Option and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def _load(text: str) -> Any:
    """Plain values from YAML; anything that could be costly or ambiguous is refused."""
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_keys(node, set())
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())
        raise ConfigError(f"the YAML cannot be read ({message}); mend it there") from error


def _check_events(text: str) -> None:
    """Caps, before anything is built."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"the text has {len(text):,} characters; the most is {MAX_BYTES:,}")
    depth = num_aliases = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if number > MAX_VALUES:
            raise ConfigError(f"the YAML has over {MAX_VALUES} keys and values; a recipe has 100")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LENGTH:
            raise ConfigError(
                f"a value of the YAML has {len(event.value):,} characters; the most is "
                f"{MAX_LENGTH:,}"
            )
        num_aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if num_aliases > MAX_ALIASES:
            raise ConfigError(f"the YAML has over {MAX_ALIASES} aliases; write the values out")
        if depth > MAX_DEPTH:
            raise ConfigError(f"the YAML is over {MAX_DEPTH} levels deep; a recipe has three")


def _check_keys(node: Any, seen: set[int]) -> None:
    """Refuse a key that is given twice, of which YAML would silently take the last."""
    if node is None or id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            _check_keys(inner, seen)
        return
    keys: set[str] = set()
    for key, inner in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                raise ConfigError(f"the key {short(key.value)} is given twice; keep one of them")
            keys.add(key.value)
        _check_keys(key, seen)
        _check_keys(inner, seen)
