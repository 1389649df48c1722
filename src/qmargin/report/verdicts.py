"""Verdicts in words, the same on the terminal, on the page and in the results of an experiment."""

from __future__ import annotations

from qmargin.metrics.operating import sufficiency
from qmargin.report.numbers import one_in, out_of, probability, rate_text, signed
from qmargin.report.systems import POWER, PairedDifference, Repeats, spread

ONE_RUN = "one seed: training variance is not in the interval"


def plain_text(far: float, tar: float, num_impostors: int) -> str:
    """Both errors at a threshold, for people who know no rates."""
    accepted = one_in(far, num_impostors, "impostor")
    refused = out_of(1.0 - tar, "genuine attempts")
    return f"{accepted} is accepted, and {refused} are refused."


def effect_text(made: PairedDifference) -> str:
    """A difference with its interval, its p-value and the detectable difference."""
    points = "EER" if made.far is None else "TAR"
    low, high = (signed(100 * end) for end in made.interval)
    p_value = f"p = {probability(made.adjusted)}".replace("= <", "<")
    if made.is_primary:
        p_value += ", primary comparison"
    elif made.num_compared > 1:
        p_value += f", corrected for {made.num_compared} comparisons"
    alone = "" if made.num_runs > 1 else f"; {ONE_RUN}"
    return (
        f"{signed(100 * made.difference)} points of {points} ({low} to {high}; logit "
        f"{signed(made.logit)}; {p_value}{alone}); {100 * made.detectable:.2f} points would have "
        f"been shown with {100 * POWER:g} % power"
    )


def planned_verdicts(repeats: Repeats, far: float | None, *, bold: str = "{}") -> list[str]:
    """A sentence for each comparison that was fixed beforehand, at a FAR."""
    lines = []
    for focus, rival in repeats.planned(far):
        made = repeats.difference(focus, rival, far)
        if made is None:
            continue
        word = "ties with"
        if made.is_shown:
            word = "is ahead of" if made.reading == "first is better" else "is behind"
        values = [spread(repeats.values(name, far)) for name in (focus, rival)]
        sentence = (
            f"{focus} {bold.format(word)} {rival}: {effect_text(made)}; {values[0]} against "
            f"{values[1]} %."
        )
        if far is not None:
            protocol = repeats.systems[focus][0].result.protocol
            enough = sufficiency(far, protocol.num_impostors)
            few = "" if enough.status == "ok" else f" The number is rough: {enough.message}."
            sentence = f"At FAR {rate_text(far)}, {sentence}{few}"
        lines.append(sentence)
    return lines
