"""Formats of numbers and names, for the page and the tables."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from decimal import Decimal

LONGEST_NAME = 120  # characters of a name that are shown
LONGEST_TEXT = 2000  # of a note, a path or a command
NOT_MEASURABLE = "not measurable"
MISSING = "-"
MINUS, DASH = "\u2212", "\u2013"
_MOST_DIGITS = 17  # tell any two numbers apart
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
count = "{:,}".format  # a count with separated thousands


def cleaned(text: str, longest: int = LONGEST_NAME) -> str:
    """Make a text printable: shorten it, and replace control, override and surrogate characters."""
    shown = "".join(
        "\ufffd" if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else sign
        for sign in text[: longest + 1]
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def percent(rate: float | None) -> str:
    """A rate in per cent, without the sign."""
    return MISSING if rate is None else f"{100.0 * rate:.2f}"


def percent_interval(interval: tuple[float, float] | None, between: str = DASH) -> str:
    """Both ends of an interval of rates in per cent; empty without one."""
    return "" if interval is None else between.join(map(percent, interval))


def signed(value: float) -> str:
    """A difference with its sign, a true minus."""
    return f"{value:+.2f}".replace("-", MINUS)


def signed_interval(low: float, high: float) -> str:
    """Both ends of an interval of differences of rates, in percentage points."""
    return f"{signed(100 * low)} to {signed(100 * high)}"


def number(value: float | None, digits: int = 4) -> str:
    """A score, a threshold or a cost with ``digits`` significant digits.

    Examples:
        >>> number(0.41234567), number(12345.678), number(None)
        ('0.4123', '12346', '-')
    """
    if value is None:
        return MISSING
    if value < 0.0:
        return f"{MINUS}{number(-value, digits)}"
    if math.isinf(value):
        return "∞"
    if value != 0.0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def digits_to_differ(values: Iterable[float | None], least: int = 4, *, form: str = "g") -> int:
    """Digits, at least ``least``, at which numbers that differ look different.

    ``form`` is ``"g"`` for significant digits, ``"f"`` for those after the point.

    Examples:
        >>> digits_to_differ([0.9999991, 0.9999992]), digits_to_differ([1e-5, 2e-5], form="f")
        (7, 5)
    """
    distinct = {value for value in values if value is not None and math.isfinite(value)}
    for digits in range(least, _MOST_DIGITS):
        if len({f"{value:.{digits}{form}}" for value in distinct}) == len(distinct):
            return digits
    return _MOST_DIGITS


def rate_text(value: float) -> str:
    """A rate in per cent with three significant digits, as in all reports.

    Examples:
        >>> rate_text(0.05), rate_text(0.932), rate_text(1e-4), rate_text(1e-7), rate_text(0.0)
        ('5 %', '93.2 %', '0.01 %', '0.00001 %', '0 %')
    """
    text = f"{Decimal(f'{100.0 * value:.3g}'):f}"  # of the decimal digits: a float has others
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def one_in(value: float, size: int, whom: str) -> str:
    """A rate of ``size`` trials in plain words, such as one in 1,000.

    Examples:
        >>> one_in(9.996e-5, 10**6, "impostor"), one_in(0.0, 50, "impostor")
        ('1 impostor in 10,000', 'no impostor of 50')
    """
    if value <= 0.0:
        return f"no {whom} of {size:,}"
    return f"1 {whom} in {int(float(f'{1.0 / value:.1e}')):,}"  # two significant digits


def out_of(value: float, whom: str) -> str:
    """A rate in plain words: out of 100, or of a larger round number for small rates.

    Examples:
        >>> out_of(0.538, "genuine attempts"), out_of(0.0038, "genuine attempts")
        ('54 of 100 genuine attempts', '4 of 1,000 genuine attempts')
        >>> out_of(0.0, "genuine attempts"), out_of(0.997, "genuine attempts")
        ('none of the genuine attempts', '997 of 1,000 genuine attempts')
    """
    if value <= 0.0:
        return f"none of the {whom}"
    if value >= 1.0:
        return f"all of the {whom}"
    size = 100
    while not 1.0 <= size * value <= size - 1.0:
        size *= 10
    return f"{round(size * value):,} of {size:,} {whom}"


def spread_digits(values: Iterable[float | None], least: int = 2, most: int = 6) -> int:
    """Digits after the point with which the spread of numbers has two significant ones.

    Examples:
        >>> spread_digits([12.3, 15.8]), spread_digits([99.9912, 99.9934]), spread_digits([1.0])
        (2, 4, 2)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    width = max(known, default=0.0) - min(known, default=0.0)
    return least if width <= 0.0 else min(max(least, 1 - math.floor(math.log10(width))), most)


def power(rate: float) -> str:
    """A small rate as papers write it: a power of ten, or a multiple of one.

    Examples:
        >>> power(1e-4), power(0.05), power(0.0)
        ('10⁻⁴', '5 %', '0')
    """
    if rate == 0.0:
        return "0"
    if rate >= 0.01:
        return f"{100.0 * rate:.3g} %"
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    raised = f"10{str(int(exponent)).translate(_RAISED)}"
    return raised if float(mantissa) == 1.0 else f"{float(mantissa):g}\u00d7{raised}"


def probability(value: float) -> str:
    """A p-value, never rounded to zero."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def short_count(value: float) -> str:
    """A round count for the side of a drawing, such as 25k."""
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"
