"""What the parts of a recipe share: values checked against annotations, names against what exists.

Every message starts with the field's name, so that a reader of files can put the section before it.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from reprlib import repr as short
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qmargin.errors import ConfigError

Scalar = str | int | float | bool
Option = Scalar | tuple[Scalar, ...]
"""A value of an option: a scalar, or a short list of them, such as a shape."""

LARGEST_INTEGER = 2**63 - 1
"""In either direction: of counts, seeds and everything that becomes a number of torch."""

_PLAIN = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}


def hints_of(part: Any) -> dict[str, Any]:
    """Annotations of the fields of a dataclass, as types."""
    hints = get_type_hints(part)
    return {field.name: hints[field.name] for field in fields(part)}


def check_fields(part: Any) -> None:
    """Bring every field of a frozen dataclass into the type of its annotation, or refuse it."""
    for name, hint in hints_of(type(part)).items():
        object.__setattr__(part, name, as_type(getattr(part, name), hint, name))


def as_type(value: object, hint: Any, name: str) -> Any:
    """The value in the type of an annotation; ``ConfigError`` if it is something else.

    A whole number is a number, a list is a tuple; a truth value is never a number.

    Examples:
        >>> as_type(1, float, "lr"), as_type([7, 13], tuple[float, ...], "milestones")
        (1.0, (7.0, 13.0))
    """
    if hint == Option:
        return _as_option(value, name)
    kind = get_origin(hint)
    if kind in (Union, types.UnionType):
        return _as_optional(value, hint, name)
    if kind is Literal:
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {short(value)}; give one of {', '.join(get_args(hint))}")
        check_known(value, get_args(hint), name)
        return value
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {short(value)}; give a list")
        return tuple(as_type(entry, get_args(hint)[0], f"an entry of {name}") for entry in value)
    if kind is dict:
        return _as_options(value, get_args(hint)[1], name)
    if is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise ConfigError(f"{name} is {short(value)}; give a {getattr(hint, '__name__', hint)}")
        return value
    return _as_plain(value, hint, name)


def optional_of(hint: Any) -> Any:
    """The type inside ``T | None``; any other annotation unchanged."""
    if get_origin(hint) not in (Union, types.UnionType) or hint == Option:
        return hint
    members = [member for member in get_args(hint) if member is not types.NoneType]
    return members[0] if len(members) == 1 else hint


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Refuse a name that is not known, with the nearest that is.

    Examples:
        >>> check_known("cosin", ["step", "cosine"], "kind")
        Traceback (most recent call last):
        qmargin.errors.ConfigError: kind is 'cosin', did you mean 'cosine'? known are step, cosine
    """
    known = list(known)
    if name in known:
        return
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "nothing is like it;"
    raise ConfigError(f"{what} is {short(name)}, {hint} known are {', '.join(known) or 'none'}")


def check_options(
    options: Mapping[str, object],
    taker: Callable[..., object],
    what: str,
    *,
    given: tuple[str, ...] = (),
) -> None:
    """Refuse options that a function does not take by name, and a function that needs more.

    Args:
        options: By name.
        taker: Function or class that will get them.
        what: Names an option in the error.
        given: Arguments that it gets from elsewhere, and not from the options.
    """
    parameters = inspect.signature(taker).parameters.values()
    wanted = [parameter for parameter in parameters if parameter.name not in given]
    for name in options:
        check_known(name, [parameter.name for parameter in wanted], what)
    for parameter in wanted:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"{what} is missing: {parameter.name} has no default, give a value")


def check_at_least(part: object, low: float, *names: str) -> None:
    """Refuse fields below a limit; None passes."""
    for name in names:
        value = getattr(part, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} is {value:g}; it must be at least {low:g}")


def check_positive(part: object, *names: str) -> None:
    """Refuse fields that are not above zero; None passes."""
    for name in names:
        value = getattr(part, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value:g}; it must be above 0")


def check_at_most(part: object, high: float, *names: str) -> None:
    """Refuse fields above a limit; None passes."""
    for name in names:
        value = getattr(part, name)
        if value is not None and value > high:
            raise ConfigError(f"{name} is {value:g}; it must be at most {high:.15g}")


def check_below(part: object, high: float, *names: str) -> None:
    """Refuse fields that are negative, or at or above a limit; None passes."""
    for name in names:
        value = getattr(part, name)
        if value is not None and not 0 <= value < high:
            raise ConfigError(f"{name} is {value:g}; it must be in [0, {high:g})")


def _check_size(value: object, name: str) -> None:
    """Refuse an integer that no number of torch can hold; its digits may be without end."""
    if isinstance(value, Integral) and abs(int(value)) > LARGEST_INTEGER:
        bits = int(value).bit_length()
        text = str(value) if bits < 100 else f"a whole number of {bits} bits"
        raise ConfigError(f"{name} is {text}; it must be at most {LARGEST_INTEGER}")


def _as_plain(value: object, hint: Any, name: str) -> Any:
    _check_size(value, name)
    is_bool = isinstance(value, bool)
    if (hint is bool and is_bool) or (hint is str and isinstance(value, str)):
        return value
    if hint is int and isinstance(value, Integral) and not is_bool:
        return int(value)
    if hint is float and isinstance(value, Real) and not is_bool and math.isfinite(value):
        return float(value)
    raise ConfigError(f"{name} is {short(value)}; give {_PLAIN[hint]}")


def _as_optional(value: object, hint: Any, name: str) -> Any:
    inner = optional_of(hint)
    if value is None:
        return None
    return as_type(value, inner, name)


def _as_options(value: object, hint: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {short(value)}; give names and values")
    for key in value:
        if not isinstance(key, str) or not key.isidentifier():
            raise ConfigError(f"{name} has the key {short(key)}; keys are names")
    return {key: as_type(value[key], hint, f"{name}.{key}") for key in sorted(value)}


def _as_option(value: object, name: str) -> Option:
    if isinstance(value, list | tuple):
        return tuple(_as_scalar(entry, f"an entry of {name}") for entry in value)
    return _as_scalar(value, name)


def _as_scalar(value: object, name: str) -> Scalar:
    _check_size(value, name)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, str | int | float | bool) and is_finite:
        return value
    raise ConfigError(
        f"{name} is {short(value)}; give a text, a finite number, true or false, or a list of them"
    )
