"""Trainings that differ in their seed alone: means, deviations, and differences of means.

Results under one name on the same trials are repetitions of a training, and so are results under
one name whose protocols differ in nothing but ``seed N``, as in the demo, where every seed has
identities of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qmargin.errors import ProtocolError
from qmargin.metrics.bootstrap import interval
from qmargin.metrics.comparison import Difference, paired_difference
from qmargin.report.comparison import are_paired, observed_value, replicate_values
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, cleaned, joined, name_of, tag
from qmargin.report.numbers import MISSING, power, probability, signed
from qmargin.report.operating import Cell
from qmargin.report.systems import Entry, Panel

_SEED = re.compile(r",?\s*\bseed \d+")


@dataclass(frozen=True)
class Repeats:
    """Systems of one protocol, each with the results of its trainings in order."""

    title: str
    fars: tuple[float, ...]
    systems: dict[str, tuple[Entry, ...]]

    @property
    def num_repeats(self) -> int:
        """Of the system that has most."""
        return max(len(entries) for entries in self.systems.values())

    def values(self, name: str, far: float | None) -> list[float]:
        """TARs at a FAR, or EERs where that is None, of the trainings in which they are known."""
        found = (observed_value(entry, far) for entry in self.systems[name])
        return [value for value in found if value is not None]

    @property
    def measures(self) -> tuple[float | None, ...]:
        """Columns of a table: the FARs of TARs, and None for the EER."""
        return (*self.fars, None)

    def cells(self, name: str, *, sign: str = "±") -> list[Cell]:
        """Mean and deviation of every measure, the best mean marked."""
        return [
            Cell(spread(self.values(name, far), sign=sign), is_best=name in self.ranked(far)[:1])
            for far in self.measures
        ]

    def ranked(self, far: float | None) -> list[str]:
        """Names from best to worst by their means; what was not measured every time is left out."""
        means = {
            name: float(np.mean(self.values(name, far)))
            for name, entries in self.systems.items()
            if len(self.values(name, far)) == len(entries)
        }
        return sorted(means, key=lambda name: means[name], reverse=far is not None)


def find_repeats(panels: Sequence[Panel]) -> list[Repeats]:
    """Every protocol in which a system was trained more than once."""
    families: dict[str, list[Panel]] = {}
    for panel in panels:
        name = cleaned(panel.first.protocol.name)
        shared = _SEED.sub("", name).strip() or name
        families.setdefault(shared, []).append(panel)
    found = [_repeats(title, members) for title, members in families.items()]
    return [repeats for repeats in found if repeats.num_repeats > 1]


def _repeats(title: str, panels: Sequence[Panel]) -> Repeats:
    systems: dict[str, list[Entry]] = {}
    for panel in panels:
        for entry in panel.entries:
            systems.setdefault(cleaned(entry.result.system.name) or "unnamed", []).append(entry)
    fars = sorted({far for panel in panels for far in panel.fars}, reverse=True)
    return Repeats(title, tuple(fars), {name: tuple(group) for name, group in systems.items()})


def interval_of_mean(
    repeats: Repeats, name: str, far: float | None, *, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of a system's mean over trainings. It is about subjects, not about seeds.

    None where a training has no draws, or too many in which the measure is undefined.
    """
    drawn = [replicate_values(entry, far) for entry in repeats.systems[name]]
    if any(values is None for values in drawn):
        return None
    try:
        return interval(np.mean(np.array(drawn, dtype=float), axis=0), level)
    except ProtocolError:
        return None


def difference_of_means(
    repeats: Repeats, first: str, second: str, far: float | None, *, level: float = 0.95
) -> Difference | None:
    """First minus second, over all trainings, with a paired bootstrap over subjects.

    Trainings are paired in their order; in each pair both systems are measured on the same draws of
    subjects. The interval is about subjects, not about seeds: how far trainings differ is what
    their deviation says. None where a pair has no common draws.
    """
    sides = [repeats.systems[name] for name in (first, second)]
    if len(sides[0]) != len(sides[1]):
        return None
    if not all(are_paired(*pair) for pair in zip(*sides, strict=True)):
        return None
    observed = [[observed_value(entry, far) for entry in side] for side in sides]
    drawn = [[replicate_values(entry, far) for entry in side] for side in sides]
    if any(None in side for side in observed) or any(v is None for side in drawn for v in side):
        return None
    a, b = (float(np.mean(np.array(side, dtype=float))) for side in observed)
    values = [np.mean(np.array(side, dtype=float), axis=0) for side in drawn]
    try:
        return paired_difference(a, b, values[0], values[1], level=level)
    except ProtocolError:
        return None


def spread(values: Sequence[float], digits: int = 2, *, sign: str = "±") -> str:
    """Mean and sample deviation in per cent.

    Examples:
        >>> spread([0.5, 0.7], 1), spread([0.5]), spread([])
        ('60.0 ± 14.1', '50.00', '-')
    """
    if not values:
        return MISSING
    mean = 100.0 * float(np.mean(values))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} {sign} {100.0 * float(np.std(values, ddof=1)):.{digits}f}"


def repeats_block(repeats: Repeats, level: float = 0.95) -> Html:
    """Means and deviations, and how the best at the strictest FAR compares with the others."""
    head = ["System", "Trainings", *(f"TAR % at {power(far)}" for far in repeats.fars), "EER %"]
    rows = []
    for name, entries in repeats.systems.items():
        cells = [
            tag("td", tag("b", cell.text) if cell.is_best else cell.text)
            for cell in repeats.cells(name)
        ]
        start = [tag("th", name_of(name), scope="row"), tag("td", str(len(entries)))]
        rows.append(tag("tr", *start, *cells))
    caption = f"{repeats.title}: mean and deviation over trainings; best mean in bold"
    return joined([data_table(head, rows, caption), _differences(repeats, level)])


def _differences(repeats: Repeats, level: float) -> Html:
    rows = []
    for far in repeats.fars:
        ranked = repeats.ranked(far)
        for rival in ranked[1:]:
            made = difference_of_means(repeats, ranked[0], rival, far, level=level)
            if made is not None:
                rows.append(_difference_row(ranked[0], rival, far, made))
    if not rows:
        return Html("")
    head = ["<Measure", "<Best", "<Other", "Difference", "Interval", "p"]
    caption = "Best mean minus the others, in percentage points"
    words = (
        f"Paired bootstrap over subjects of the means, {100 * level:g} % intervals; p-values are "
        "two-sided and not corrected for their number."
    )
    body = joined([data_table(head, rows, caption), tag("p", words, class_="hint")])
    return tag("details", tag("summary", "Differences of means"), body)


def _difference_row(best: str, rival: str, far: float, made: Difference) -> Html:
    return tag(
        "tr",
        tag("th", f"TAR at {power(far)}", scope="row"),
        tag("td", name_of(best), class_="left"),
        tag("td", name_of(rival), class_="left"),
        tag("td", signed(100 * made.difference)),
        tag("td", f"{signed(100 * made.low)} to {signed(100 * made.high)}"),
        tag("td", probability(made.p_value)),
    )
