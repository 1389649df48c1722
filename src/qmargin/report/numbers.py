"""How numbers and names are written, on the page and in the tables."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

LONGEST_NAME = 120  # characters of a name that are shown
LONGEST_TEXT = 2000  # of a note, a path or a command
NOT_MEASURABLE = "not measurable"
MISSING = "-"
_MOST_DIGITS = 17  # tell any two numbers apart
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def cleaned(text: str, longest: int = LONGEST_NAME) -> str:
    """Make a text printable: no control, override or surrogate characters, not too long.

    Characters that would move the text around them, end a line or break the encoding are replaced
    by a sign that shows something was there.

    Examples:
        >>> cleaned("speaker" + chr(0x202E) + "7")
        'speaker\ufffd7'
    """
    signs = (
        "\ufffd" if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else sign
        for sign in text[: longest + 1]
    )
    shown = "".join(signs)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def percent(rate: float | None, digits: int = 2) -> str:
    """A rate in per cent, without the sign.

    Examples:
        >>> percent(0.96354), percent(None)
        ('96.35', '-')
    """
    return MISSING if rate is None else f"{100.0 * rate:.{digits}f}"


def percent_interval(interval: tuple[float, float] | None) -> str:
    r"""Both ends of an interval of rates in per cent.

    Examples:
        >>> ascii(percent_interval((0.9591, 0.9672)))
        "'95.91\\u201396.72'"
    """
    if interval is None:
        return ""
    return "\u2013".join(f"{100.0 * end:.2f}" for end in interval)


def signed(value: float, digits: int = 2) -> str:
    r"""A difference with its sign, a true minus.

    Examples:
        >>> signed(0.5), ascii(signed(-0.5))
        ('+0.50', "'\\u22120.50'")
    """
    return f"{value:+.{digits}f}".replace("-", "\u2212")


def number(value: float | None, digits: int = 4) -> str:
    """A score, a threshold or a cost with so many significant digits.

    Examples:
        >>> number(0.41234567), number(float("inf")), number(12345.678)
        ('0.4123', '∞', '12346')
    """
    if value is None:
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value != 0.0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def digits_to_differ(values: Iterable[float | None], least: int = 4, *, form: str = "g") -> int:
    """Digits, at least so many, at which numbers that differ look different.

    Args:
        values: The numbers.
        least: Digits that are shown in any case.
        form: ``"g"`` for significant digits, ``"f"`` for those after the point.

    Examples:
        >>> digits_to_differ([0.5, 0.25]), digits_to_differ([0.9999991, 0.9999992])
        (4, 7)
        >>> digits_to_differ([0.00001, 0.00002], form="f")
        5
    """
    distinct = {value for value in values if value is not None and math.isfinite(value)}
    for digits in range(least, _MOST_DIGITS):
        if len({f"{value:.{digits}{form}}" for value in distinct}) == len(distinct):
            return digits
    return _MOST_DIGITS


def power(rate: float) -> str:
    """A small rate as people write it: a power of ten, or a multiple of one.

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


def count(value: int) -> str:
    """A count with its thousands marked.

    Examples:
        >>> count(15658489)
        '15,658,489'
    """
    return f"{value:,}"


def probability(value: float) -> str:
    """A p-value, never rounded to zero.

    Examples:
        >>> probability(0.0316), probability(1e-5)
        ('0.032', '< 0.001')
    """
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def short_count(value: float) -> str:
    """A round count for the side of a drawing.

    Examples:
        >>> short_count(100.0), short_count(25_000), short_count(1e6)
        ('100', '25k', '1M')
    """
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"
