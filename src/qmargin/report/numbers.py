"""How numbers are written, on the page and in the tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

NOT_MEASURABLE = "not measurable"
MISSING = "-"
_MOST_DIGITS = 17  # tell any two numbers apart
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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
    return between(interval, "{:.2f}", 100.0)


def between(interval: tuple[float, float] | None, form: str, factor: float = 1.0) -> str:
    r"""Both ends of an interval in a given form, with a dash that is not a minus.

    Examples:
        >>> ascii(between((0.1, 0.25), "{:.3f}"))
        "'0.100\\u20130.250'"
    """
    if interval is None:
        return ""
    return "\u2013".join(form.format(factor * end) for end in interval)


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
    mantissa, exponent = _parts(rate)
    raised = f"10{str(exponent).translate(_RAISED)}"
    return raised if mantissa == "1" else f"{mantissa}\u00d7{raised}"


def latex_power(rate: float) -> str:
    r"""The same for LaTeX.

    Examples:
        >>> latex_power(1e-4), latex_power(2.5e-3)
        ('$10^{-4}$', '$2.5\\times10^{-3}$')
    """
    mantissa, exponent = _parts(rate)
    raised = f"10^{{{exponent}}}"
    return f"${raised}$" if mantissa == "1" else f"${mantissa}\\times{raised}$"


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


def _parts(rate: float) -> tuple[str, int]:
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}", int(exponent)


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
