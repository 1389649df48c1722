"""Whether there are enough trials to answer, and intervals for a plain proportion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.operating import num_allowed

Status = Literal["ok", "few", "not measurable"]
ENOUGH_FALSE_ACCEPTS = 30  # below this a rate is uncertain by more than a third


@dataclass(frozen=True)
class Sufficiency:
    """Whether a false acceptance rate can be measured, and how well.

    Attributes:
        status: ``"ok"``; ``"few"`` with fewer than 30 false accepts allowed; or
            ``"not measurable"`` when not even one is.
        allowed: False accepts that the rate allows.
        message: One sentence for a reader.
    """

    status: Status
    allowed: int
    message: str


def sufficiency(far: float, num_impostors: int) -> Sufficiency:
    """Whether ``num_impostors`` trials can measure a false acceptance rate of ``far``.

    Examples:
        >>> sufficiency(1e-5, 15_658_489)
        Sufficiency(status='ok', allowed=156, message='156 false accepts are allowed')
        >>> sufficiency(1e-4, 275_488).status
        'few'
        >>> sufficiency(1e-6, 3_000).message
        'not measurable: 3,000 impostor trials resolve no FAR below 3.3e-04'
    """
    if num_impostors < 1:
        raise ProtocolError(
            f"there are {num_impostors} impostor trials, a FAR needs at least 1: add impostors"
        )
    allowed = num_allowed(far, num_impostors)
    if allowed == 0:
        message = (
            f"not measurable: {num_impostors:,} impostor trials resolve no FAR below "
            f"{1 / num_impostors:.1e}"
        )
        return Sufficiency("not measurable", 0, message)
    noun = "false accept is" if allowed == 1 else "false accepts are"
    if allowed < ENOUGH_FALSE_ACCEPTS:
        message = f"only {allowed} {noun} allowed, fewer than {ENOUGH_FALSE_ACCEPTS}"
        return Sufficiency("few", allowed, message)
    return Sufficiency("ok", allowed, f"{allowed:,} {noun} allowed")


def rule_of_three(num_trials: int) -> float:
    """Upper end of the 95 % interval of a rate when no error was seen: ``3 / n``, at most 1.

    Examples:
        >>> rule_of_three(3000)
        0.001
    """
    if num_trials < 1:
        raise ProtocolError(f"there are {num_trials} trials, a bound needs at least 1: add trials")
    return min(1.0, 3.0 / num_trials)


def wilson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion of independent trials.

    Trials that share a subject are not independent: this interval is then too narrow, see
    `bootstrap`.

    Examples:
        >>> low, high = wilson(8, 10)
        >>> round(low, 4), round(high, 4)
        (0.4902, 0.9433)
    """
    check_level(level)
    if trials < 1:
        raise ProtocolError(f"there are {trials} trials, an interval needs at least 1: add trials")
    if not 0 <= successes <= trials:
        raise DataError(
            f"{successes} successes in {trials} trials are impossible: "
            f"give a number from 0 to {trials}"
        )
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half  # rounding must not leave the exact ends
    high = 1.0 if successes == trials else centre + half
    return low, high


def check_level(level: float) -> None:
    """Refuse a confidence level outside (0, 1)."""
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level={level!r} is outside (0, 1): give 0.95 for a 95 % interval")
