"""Frozen dataclasses to JSON and back, checked against their annotations.

Infinities are the strings ``"inf"`` and ``"-inf"``; a NaN becomes None, which only fields that may
be None take back. A key that a dataclass does not know is ignored: later versions can add some.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from qmargin.errors import DataError

_INFINITIES = {"inf": math.inf, "-inf": -math.inf}


def encode(value: Any, where: str) -> Any:
    """What ``json.dumps`` takes with ``allow_nan=False``.

    Args:
        value: A dataclass, or something that its fields may hold.
        where: Named in errors.

    Examples:
        >>> encode((1.5, float("inf"), None, float("nan")), "values")
        [1.5, 'inf', None, None]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(getattr(value, field.name), f"{where}.{field.name}")
            for field in fields(value)
        }
    if isinstance(value, dict):
        return {str(key): encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item, where) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return _encode_float(float(value))
    raise DataError(f"{where} holds a {type(value).__name__}, which JSON cannot: use a number")


def _encode_float(value: float) -> float | str | None:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None if math.isnan(value) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def decode(kind: Any, value: Any, where: str) -> Any:
    """An object of the annotated type ``kind`` from parsed JSON.

    Args:
        kind: A dataclass, ``str``, ``int``, ``float``, a tuple, a dict, or one of them or None.
        value: What ``json.loads`` returned.
        where: Named in errors, with the path inside.

    Examples:
        >>> decode(tuple[float, ...], [1, "-inf"], "values")
        (1.0, -inf)
        >>> decode(int | None, "many", "count")
        Traceback (most recent call last):
        ...
        qmargin.errors.DataError: count is 'many', not an integer
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return decode(kind, value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), value, where, "an object")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_record(kind: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, where, "an object")
    hints, found = _hints(kind), {}
    for field in fields(kind):
        if field.name in value:
            found[field.name] = decode(
                hints[field.name], value[field.name], _inside(where, field.name)
            )
        elif field.default is MISSING:
            raise DataError(f"{_inside(where, field.name)} is missing: evaluate the scores again")
    return kind(**found)


def _inside(where: str, name: str) -> str:
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), value, where, "a list")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    _expect(len(value) == len(arguments), value, where, f"a list of {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _decode_scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float:
        if isinstance(value, str) and value in _INFINITIES:
            return _INFINITIES[value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _expect(is_number, value, where, "a number")
        try:
            found = float(value)
        except OverflowError:  # an integer of hundreds of digits
            found = math.inf
        _expect(math.isfinite(found), value, where, "a number that a float64 holds")
        return found
    if kind is int:
        _expect(type(value) is int, value, where, "an integer")
    else:
        _expect(isinstance(value, str), value, where, "a text")
    return value


def _expect(is_right: bool, value: Any, where: str, wanted: str) -> None:
    if not is_right:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise DataError(f"{where} is {shown}, not {wanted}")
