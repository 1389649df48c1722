"""Systems compared on the same trials: paired differences, and means over the seeds of an arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ProtocolError
from qmargin.evaluation.result import Result, far_key
from qmargin.metrics.bootstrap import Difference, interval, paired_difference
from qmargin.report.numbers import MISSING, cleaned
from qmargin.report.systems import Entry, Panel, name_of, seeds_of

MOST_PAIRS = 15  # beyond, only pairs with the first system
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class PairedDifference:
    """First minus second: a TAR at ``far``, or the EER where that is None.

    ``adjusted`` is the p-value with Holm's correction for all pairs of the same measure.
    """

    first: str
    second: str
    far: float | None
    difference: float
    interval: tuple[float, float]
    p_value: float
    adjusted: float

    def seen_from(self, label: str) -> PairedDifference:
        """The same difference with ``label`` as the first of the two."""
        if label == self.first:
            return self
        low, high = self.interval
        return replace(
            self,
            first=self.second,
            second=self.first,
            difference=-self.difference,
            interval=(-high, -low),
        )

    @property
    def is_shown(self) -> bool:
        """Whether the systems differ by more than chance."""
        low, high = self.interval
        return self.adjusted < SIGNIFICANT and not low <= 0.0 <= high


def reading(made: PairedDifference) -> str:
    """What a difference says, in words."""
    if not made.is_shown:
        return "no difference shown"
    is_first = (made.difference > 0.0) == (made.far is not None)  # a smaller EER is better
    return "first is better" if is_first else "second is better"


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method, in the given order.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def paired_differences(panel: Panel, level: float = 0.95) -> list[PairedDifference]:
    """Every pair of systems with common replicates, at each FAR and for the EER.

    Runs of one arm, which differ in their seed, are not compared with each other.
    """
    pairs = [pair for pair in combinations(panel.entries, 2) if not _is_one_arm(*pair)]
    if len(pairs) > MOST_PAIRS:
        pairs = [pair for pair in pairs if pair[0] is panel.entries[0]]
    pairs = [pair for pair in pairs if are_paired(*pair)]
    found = []
    for far in [*panel.fars, None]:
        family = [made for pair in pairs if (made := _paired(*pair, far, level)) is not None]
        adjusted = holm([made.p_value for made in family])
        found += [replace(made, adjusted=p) for made, p in zip(family, adjusted, strict=True)]
    return found


def _is_one_arm(first: Entry, second: Entry) -> bool:
    a, b = first.result.run, second.result.run
    return a is not None and b is not None and a.arm == b.arm and a.seed != b.seed


def _paired(
    first: Entry, second: Entry, far: float | None, level: float
) -> PairedDifference | None:
    made = _difference([first], [second], far, level)
    if made is None:
        return None
    ends, p_value = (made.low, made.high), made.p_value
    return PairedDifference(
        first.label, second.label, far, made.difference, ends, p_value, adjusted=p_value
    )


def are_paired(first: Entry, second: Entry) -> bool:
    """Whether two results drew the same subjects over the same trials."""
    a, b = first.result.replicates, second.result.replicates
    one, other = first.result.protocol, second.result.protocol
    if a is None or b is None or one.data_sha256 is None:
        return False
    return (one.data_sha256, one.rule, a.subjects_sha256, a.seed) == (
        other.data_sha256,
        other.rule,
        b.subjects_sha256,
        b.seed,
    )


def _difference(
    first: Sequence[Entry], second: Sequence[Entry], far: float | None, level: float
) -> Difference | None:
    """Difference of means over runs; None where a run, or too many replicates, have no value."""
    observed = [[observed_value(entry, far) for entry in side] for side in (first, second)]
    drawn = [[replicate_values(entry, far) for entry in side] for side in (first, second)]
    if any(None in side for side in observed) or any(v is None for side in drawn for v in side):
        return None
    if len({len(values) for side in drawn for values in side if values is not None}) != 1:
        return None
    a, b = (float(np.mean(np.array(side, dtype=float))) for side in observed)
    values = [np.mean(np.array(side, dtype=float), axis=0) for side in drawn]
    try:
        return paired_difference(a, b, values[0], values[1], level=level)
    except ProtocolError:
        return None


def observed_value(entry: Entry, far: float | None) -> float | None:
    """TAR at a FAR, or EER where that is None, on the trials as they are."""
    if far is None:
        return entry.result.measures.eer.value
    point = entry.point_at(far)
    return None if point is None else point.tar


def replicate_values(entry: Entry, far: float | None) -> NDArray[np.float64] | None:
    """The same in every replicate, NaN where it could not be measured."""
    replicates = entry.result.replicates
    if replicates is None:
        return None
    values = replicates.eer if far is None else replicates.tar.get(far_key(far), ())
    return np.array(values, dtype=np.float64) if values else None  # None becomes NaN


@dataclass(frozen=True)
class Repeats:
    """Systems of one protocol, each with the results of its runs in the order of their seeds."""

    title: str
    fars: tuple[float, ...]
    systems: dict[str, tuple[Entry, ...]]

    @property
    def num_repeats(self) -> int:
        """Of the system that has most."""
        return max(len(entries) for entries in self.systems.values())

    @property
    def measures(self) -> tuple[float | None, ...]:
        """Columns of a table: the FARs of TARs, and None for the EER."""
        return (*self.fars, None)

    @cached_property
    def headline_far(self) -> float | None:
        """The strictest FAR that every run measured, with enough false accepts if possible."""
        entries = [entry for group in self.systems.values() for entry in group]
        for accepted in (("ok",), ("ok", "few")):
            for far in sorted(self.fars):
                points = [entry.point_at(far) for entry in entries]
                if all(point is not None and point.status in accepted for point in points):
                    return far
        return None

    def values(self, name: str, far: float | None) -> list[float]:
        """TARs at a FAR, or EERs where that is None, of the runs in which they are known."""
        found = (observed_value(entry, far) for entry in self.systems[name])
        return [value for value in found if value is not None]

    def ranked(self, far: float | None) -> list[str]:
        """Names from best to worst by their means; what was not measured every time is left out."""
        means = {
            name: float(np.mean(self.values(name, far)))
            for name, entries in self.systems.items()
            if len(self.values(name, far)) == len(entries)
        }
        return sorted(means, key=lambda name: means[name], reverse=far is not None)


class _Family(NamedTuple):
    """Results that belong into one table of means."""

    name: str
    kind: str | None
    rule: str
    scoring: str | None


def find_repeats(panels: Sequence[Panel], *, title: str | None = None) -> list[Repeats]:
    """Every protocol on which a system has results of several runs.

    Runs of one arm with different seeds belong together; where the run is unknown, results under
    one name do. With a title, all results are of one experiment, whatever its seeds are tested on.
    """
    families: dict[_Family, dict[tuple[bool, str], list[Entry]]] = {}
    for panel in panels:
        for entry in panel.entries:
            protocol, run = entry.result.protocol, entry.result.run
            family = _Family(protocol.name, protocol.kind, protocol.rule, protocol.scoring)
            family = family if title is None else _Family(title, None, "", None)
            arm = (False, name_of(entry.result)) if run is None else (True, run.arm)
            families.setdefault(family, {}).setdefault(arm, []).append(entry)
    found = [_repeats(family, list(arms.values())) for family, arms in families.items()]
    return [one for one in found if one.systems and (title is not None or one.num_repeats > 1)]


def _repeats(family: _Family, arms: Sequence[list[Entry]]) -> Repeats:
    systems: dict[str, tuple[Entry, ...]] = {}
    for entries in arms:
        results = [entry.result for entry in entries]
        if results[0].run is not None and seeds_of(results) is None:
            continue  # several evaluations of one run
        name = label = name_of(results[0])
        while label in systems:
            label = f"{name} ({len(systems) + 1})"
        systems[label] = tuple(sorted(entries, key=_seed))
    points = (p for group in systems.values() for e in group for p in e.result.measures.tar)
    fars = sorted({point.far_target for point in points}, reverse=True)
    return Repeats(cleaned(family.name), tuple(fars), systems)


def _seed(entry: Entry) -> int:
    return 0 if entry.result.run is None else entry.result.run.seed


def interval_of_mean(
    repeats: Repeats, name: str, far: float | None, *, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of a system's mean over runs. It covers subjects, not seeds.

    None where a run has no replicates, or too many in which the measure is undefined.
    """
    drawn = [replicate_values(entry, far) for entry in repeats.systems[name]]
    known = [values for values in drawn if values is not None]
    if len(known) < len(drawn) or len(set(map(len, known))) != 1:
        return None
    try:
        return interval(np.mean(np.array(drawn, dtype=float), axis=0), level)
    except ProtocolError:
        return None


def difference_of_means(
    repeats: Repeats, first: str, second: str, far: float | None, *, level: float = 0.95
) -> Difference | None:
    """First minus second, over all runs, with a paired bootstrap over subjects.

    Runs are paired by their seeds; in each pair both systems are measured on the same draws of
    subjects. The interval covers subjects; the standard deviation of the means covers seeds. None
    where a pair has no common draws.
    """
    sides = [repeats.systems[name] for name in (first, second)]
    if [_known_seed(e.result) for e in sides[0]] != [_known_seed(e.result) for e in sides[1]]:
        return None
    if not all(are_paired(*pair) for pair in zip(*sides, strict=True)):
        return None
    return _difference(sides[0], sides[1], far, level)


def _known_seed(result: Result) -> int | None:
    return None if result.run is None else result.run.seed


def spread(values: Sequence[float], digits: int = 2, *, sign: str = "±") -> str:
    """Mean and sample standard deviation in per cent.

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
