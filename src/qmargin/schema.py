"""Frozen dataclasses from plain data (YAML, JSON, ``key=value``) and back, checked by annotations.

Every error begins with the path of the value, as in ``optimizer.lr``. A dataclass with other forms
declares their keys in ``SHORTHANDS`` and converts them to fields in a class method ``expand``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qmargin.errors import ConfigError, DataError, QMarginError, nearest
from qmargin.files import open_regular

T = TypeVar("T")

Scalar = str | int | float | bool
Option = Scalar | tuple[Scalar, ...]  # a scalar, or a short list of them, such as a shape
Options = dict[str, Option]  # by name; names are identifiers

LARGEST_INTEGER = 2**63 - 1  # in either direction: counts and seeds become numbers of torch
NEW = {"omit_default": True}
"""Metadata of a field that was added later: with its default it is in no file and in no hash."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
_TOO_LARGE = "is too large"
_NULLS = ("null", "none", "None")
_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return super().repr_int(x, level) if bits < 100 else f"an integer of {bits} bits"


short = _Short().repr
"""A short ``repr`` of values of any size, for messages."""


def fields_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a dataclass as they are written: without unused ``NEW`` fields."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if not field.metadata.get("omit_default") or value != _default(field):
            yield field.name, value


def encode(value: Any, where: str) -> Any:
    """Convert values for ``json.dumps`` with ``allow_nan=False``; a NaN becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: encode(item, f"{where}.{name}") for name, item in fields_of(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, where) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return None if math.isnan(value) else float(value)
    raise DataError(f"{where} holds a {type(value).__name__}, which JSON cannot: use a number")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a dataclass by its dotted key; a section that is absent is None."""
    if is_dataclass(value) and not isinstance(value, type):
        inner: Iterable[tuple[str, Any]] = fields_of(value)
    elif isinstance(value, Mapping):
        inner = value.items()
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, item in inner:
        found |= flatten(item, f"{prefix}.{name}" if prefix else name)
    return found


def decode(kind: Any, value: Any, where: str) -> Any:
    """Read a record of a program, of the annotated type ``kind``, from parsed JSON.

    Unknown keys are ignored, because a later version may have added them; ``"inf"`` is a number.
    """
    return _Decoder(DataError).read(kind, value, where)


def decode_settings(kind: Any, value: Any, where: str = "") -> Any:
    """Read user input, such as a YAML file, as an object of the annotated type ``kind``.

    Unknown keys are refused with the nearest known one; integers fit into 64 bits.
    """
    return _Decoder(ConfigError, is_written=True).read(kind, value, where)


def check_fields(part: Any) -> None:
    """Convert every field of a frozen dataclass to the type of its annotation, or raise."""
    for name, hint in hints_of(type(part)).items():
        value = _Decoder(ConfigError).read(hint, getattr(part, name), name)
        object.__setattr__(part, name, value)


@dataclass(frozen=True)
class _Decoder:
    """One decoding; with ``ConfigError`` it is strict about unknown keys and ranges."""

    error: type[QMarginError]
    is_written: bool = False  # a text can be a number: YAML 1.1 takes 1e-3 for a text

    @property
    def is_strict(self) -> bool:
        return self.error is ConfigError

    def read(self, kind: Any, value: Any, where: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
        if origin in (types.UnionType, Union):
            return self._union(arguments, value, where)
        if origin is Literal:
            if not isinstance(value, str):
                self._refuse(value, where, f"one of {', '.join(arguments)}")
            check_known(value, arguments, where, error=self.error)
            return value
        if is_dataclass(kind) and isinstance(kind, type):
            return value if isinstance(value, kind) else self._dataclass(kind, value, where)
        if origin is tuple:
            return self._tuple(arguments, value, where)
        if isinstance(kind, type) and issubclass(kind, tuple):  # a named tuple, from a list
            return kind(*self._tuple(tuple(get_type_hints(kind).values()), value, where))
        if origin is dict:
            return self._dict(kind, value, where)
        return self._scalar(kind, value, where)

    def _union(self, members: tuple[Any, ...], value: Any, where: str) -> Any:
        if value is None and types.NoneType in members:
            return None
        members = tuple(member for member in members if member is not types.NoneType)
        if len(members) == 1:
            return self.read(members[0], value, where)
        exact = _Decoder(self.error)  # a text is a number only where nothing else is expected
        for member in members:
            try:
                return exact.read(member, value, where)
            except self.error as error:
                if _TOO_LARGE in str(error):
                    raise
        wanted = " or ".join(_WANTED.get(member, "a list") for member in members)
        return self._refuse(value, where, wanted)

    def _dataclass(self, kind: type, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            self._refuse(value, where or "the file", "an object of keys and values")
        hints = hints_of(kind)
        shorthands: tuple[str, ...] = getattr(kind, "SHORTHANDS", ())
        known = [*shorthands, *hints]
        for name in value if self.is_strict else ():
            if name not in known:
                text = name if isinstance(name, str) else repr(name)
                place = _inside(where, short(text)[1:-1])
                raise self.error(f"{place} is unknown, {suggest(text, known)}")
        if shorthands:
            expand: Callable[[Mapping[str, Any]], Mapping[str, Any]] = kind.expand  # type: ignore[attr-defined]
            value = self._located(where, lambda: expand(value))
        found = {
            name: self.read(hint, value[name], _inside(where, name))
            for name, hint in hints.items()
            if name in value
        }
        missing = [
            _inside(where, field.name)
            for field in dataclasses.fields(kind)
            if field.name not in found and _default(field) is MISSING
        ]
        if missing:
            raise self.error(f"{', '.join(missing)} is missing; give a value")
        return self._located(where, lambda: kind(**found))

    def _located(self, where: str, make: Callable[[], T]) -> T:
        """Run checks of a dataclass, whose errors begin with the name of a field."""
        try:
            return make()
        except self.error as error:
            if not where:
                raise
            raise self.error(_inside(where, str(error))) from error

    def _tuple(self, arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            self._refuse(value, where, "a list")
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(value) != len(arguments):
            self._refuse(value, where, f"a list of {len(arguments)}")
        pairs = zip(arguments, value, strict=True)
        return tuple(self.read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))

    def _dict(self, kind: Any, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse(value, where, "an object of keys and values")
        for key in value:
            if not isinstance(key, str) or (kind == Options and not key.isidentifier()):
                raise self.error(f"{where} has the key {short(key)}; keys are names")
        inner = get_args(kind)[1]
        return {key: self.read(inner, item, _inside(where, key)) for key, item in value.items()}

    def _scalar(self, kind: Any, value: Any, where: str) -> Any:
        if kind in (bool, str) and isinstance(value, kind):
            return value
        if kind is float and isinstance(value, str):
            if self.is_written and NUMBER.fullmatch(value):
                return float(value)
            if not self.is_strict and value in _INFINITIES:
                return _INFINITIES[value]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if kind in (int, float) and is_number:
            if isinstance(value, Integral):
                if self.is_strict and abs(int(value)) > LARGEST_INTEGER:
                    text = f"{short(int(value))}; the most is {LARGEST_INTEGER}"
                    raise self.error(f"{where} {_TOO_LARGE}: {text}")
                if kind is int:
                    return int(value)
            with suppress(OverflowError):  # an integer of hundreds of digits
                if kind is float and math.isfinite(float(value)):
                    return float(value)
        is_finite = kind is float and (self.is_strict or is_number)
        return self._refuse(value, where, "a finite number" if is_finite else _WANTED[kind])

    def _refuse(self, value: Any, where: str, wanted: str) -> Any:
        raise self.error(f"{where} is {short(value)}, not {wanted}")


def _inside(where: str, name: str) -> str:
    if not where:
        return name
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


hints_of: Callable[[Any], dict[str, Any]] = cache(_hints)
"""Annotations of the fields of a dataclass, as types."""


def _optional_of(hint: Any) -> Any:
    """The type inside ``T | None``; any other annotation unchanged."""
    members = [member for member in get_args(hint) if member is not types.NoneType]
    is_union = get_origin(hint) in (Union, types.UnionType)
    return members[0] if is_union and len(members) == 1 else hint


def suggest(name: str, known: Iterable[str]) -> str:
    """The part of a message that names the nearest known name, and all of them."""
    known = list(known)
    return f"{nearest(name, known)} known are {', '.join(known) or 'none'}".lstrip()


def check_known(
    name: str, known: Iterable[str], what: str, *, error: type[QMarginError] = ConfigError
) -> None:
    """Refuse a name that is not known, with the nearest that is."""
    known = list(known)
    if name not in known:
        raise error(f"{what} is {short(name)}, {suggest(name, known)}")


def check_options(
    options: Mapping[str, object],
    taker: Callable[..., object],
    what: str,
    *,
    given: tuple[str, ...] = (),
) -> None:
    """Refuse options that a function does not take by name, and a function that needs more.

    Errors begin with the key ``what``. Arguments in ``given`` come from elsewhere.
    """
    parameters = inspect.signature(taker).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.name not in given and parameter.kind is not parameter.VAR_KEYWORD
    }
    for name in options:
        if name in given or (name not in wanted and not takes_any):
            raise ConfigError(f"{what}.{name} is unknown, {suggest(name, wanted)}")
    for name, parameter in wanted.items():
        is_needed = parameter.default is parameter.empty
        if is_needed and name not in options and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(f"{what}.{name} is missing; give a value")


def check_range(
    part: object,
    *names: str,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuse fields that are outside their range; None passes."""
    for name in names:
        value = getattr(part, name)
        if value is None or (at_least <= value <= at_most and above < value < below):
            continue
        limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
        wanted = [f"{text} {limit:.15g}" for text, limit in limits.items() if math.isfinite(limit)]
        raise ConfigError(f"{name} is {value:g}; it must be {' and '.join(wanted)}")


# --- YAML ---------------------------------------------------------------------------------------

MAX_BYTES = 100_000  # a recipe has about two thousand
MAX_ALIASES = 10
_MAX_VALUES = 5000
_MAX_LENGTH = 10_000  # of one of them; paths have at most 4096
_MAX_DEPTH = 20


def read_text(path: Path | str) -> str:
    """Text of a small YAML file."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} has over {MAX_BYTES:,} bytes; this is another kind of file")
        return content.decode("utf-8")
    except DataError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save it as such ({error})") from error


def load_yaml(text: str) -> Any:
    """Plain values from YAML; costly or ambiguous input is refused."""
    import yaml

    if len(text) > MAX_BYTES:
        raise ConfigError(f"the text has {len(text):,} characters; the most is {MAX_BYTES:,}")
    try:
        _check_events(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"the YAML cannot be read ({message}); correct it there") from error


def dump_yaml(values: Any) -> str:
    """Plain values as YAML in their own order, which ``load_yaml`` reads back."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes text with line breaks or control characters in escapes: YAML would fold them."""

    def represent(dumper: Any, text: str) -> Any:
        style = None if text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _check_events(text: str) -> None:
    """Caps, before anything is built."""
    import yaml

    depth = num_aliases = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        num_aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        length = len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        for count, most, what in (
            (number, _MAX_VALUES, "keys and values"),
            (length, _MAX_LENGTH, "characters in a value"),
            (num_aliases, MAX_ALIASES, "aliases"),
            (depth, _MAX_DEPTH, "levels"),
        ):
            if count > most:
                raise ConfigError(f"the YAML has over {most:,} {what}; write less")


def _check_nodes(root: Any) -> None:
    """Refuse a key that is given twice; YAML would silently use the last.

    ``8:32`` stays a text, which a range is; YAML 1.1 takes it for a number in base 60.
    """
    import yaml

    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            todo += [part for pair in node.value for part in pair]
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, times in keys.items():
                if times > 1:
                    raise ConfigError(f"the key {short(key)} is given twice; keep one of them")
        elif node.tag.endswith((":int", ":float")) and ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"


# --- key=value ----------------------------------------------------------------------------------


def split_setting(setting: str) -> tuple[str, str]:
    """Key and text of ``key=value``."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"the setting {short(setting)} has no value; write it as key=value")
    return key.strip(), text.strip()


def set_value(values: dict[str, Any], kind: Any, key: str, text: str) -> None:
    """Parse a text and store it under a dotted key of ``values``, the encoded ``kind``.

    ``null`` clears an optional value or section, a list is ``[7, 13]``. Values are checked when the
    dataclass is decoded.
    """
    *sections, last = key.split(".")
    where, walked, hint = values, "", kind
    for name in sections:
        hint = _inner(hint, name, walked)
        walked = _inside(walked, name)
        if where.get(name) is None:
            where[name] = {}
        where = where[name]
    hint = _inner(hint, last, walked)
    is_dict = get_origin(hint) is dict
    if text in _NULLS:
        where[last] = {} if is_dict else None
    elif is_dict or is_dataclass(hint):
        raise ConfigError(f"{key} is a section; set a key inside it, as in {key}.NAME=VALUE")
    elif hint is str or get_origin(hint) is Literal:
        where[last] = text
    else:
        value = load_yaml(text)
        is_number = isinstance(value, str) and NUMBER.fullmatch(value)
        where[last] = float(value) if is_number and (hint == Option or hint is Any) else value


def _inner(hint: Any, name: str, walked: str) -> Any:
    """Annotation of what is under a name; Any for a shorthand."""
    if get_origin(hint) is dict:
        return get_args(hint)[1]
    if not is_dataclass(hint):
        raise ConfigError(f"{walked} is a value and has nothing inside; drop .{name}")
    hints, shorthands = hints_of(hint), getattr(hint, "SHORTHANDS", ())
    if name in shorthands:
        return Any
    if name in hints:
        return _optional_of(hints[name])
    for section, part in hints.items() if not walked else ():
        part = _optional_of(part)
        if is_dataclass(part) and name in (*hints_of(part), *getattr(part, "SHORTHANDS", ())):
            raise ConfigError(f"{name} is not a key; did you mean {section}.{name}?")
    known = suggest(name, [*shorthands, *hints])
    raise ConfigError(f"{_inside(walked, name)} is unknown, {known}")
