"""Results arranged for a report: panels of systems, paired differences, means over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.result import (
    Result,
    RunInfo,
    TarPoint,
    far_key,
    read_result,
    without_paths,
)
from qmargin.metrics.bootstrap import Difference, interval, paired_difference
from qmargin.report.numbers import MINUS, MISSING, cleaned, number, spread_digits

MOST_PAIRS = 15  # beyond, only pairs with the first system or the leader
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Entry:
    """One system on one protocol; ``label`` is unique in its panel, ``colour`` in the report."""

    result: Result
    label: str
    colour: int

    def point_at(self, far: float | None) -> TarPoint | None:
        """The operating point at this target, None if it was not asked for."""
        return next((p for p in self.result.measures.tar if p.far_target == far), None)

    def observed(self, far: float | None) -> float | None:
        """TAR at a FAR, or the EER where that is None."""
        if far is None:
            return self.result.measures.eer.value
        point = self.point_at(far)
        return None if point is None else point.tar

    @cached_property
    def score_digits(self) -> int:
        """Digits after the point that the spread of the scores asks for."""
        return spread_digits(self.result.histogram.edges, 0, 9) + 3

    def score_text(self, score: float | None, digits: int | None = None) -> str:
        """A score, or a threshold, with digits for the spread of the scores."""
        if score is None or math.isinf(score):
            return number(score)
        return f"{score:.{digits or self.score_digits}f}".replace("-", MINUS)

    def drawn(self, far: float | None) -> NDArray[np.float64] | None:
        """The same in every replicate, NaN where it could not be measured."""
        replicates = self.result.replicates
        if replicates is None:
            return None
        values = replicates.eer if far is None else replicates.tar.get(far_key(far), ())
        return np.array(values, dtype=np.float64) if values else None  # None becomes NaN


def _fars(entries: Iterable[Entry]) -> tuple[float, ...]:
    """Every target FAR of the entries, the largest first."""
    points = (point for entry in entries for point in entry.result.measures.tar)
    return tuple(sorted({point.far_target for point in points}, reverse=True))


def _headline_far(entries: Sequence[Entry], wanted: float | None = None) -> float | None:
    """The wanted FAR, or the strictest that all measured, with enough false accepts if possible."""

    def is_measured(far: float, accepted: tuple[str, ...]) -> bool:
        points = [entry.point_at(far) for entry in entries]
        return all(point is not None and point.status in accepted for point in points)

    if wanted is not None and is_measured(wanted, ("ok", "few")):
        return wanted
    choices = ((far, status) for status in (("ok",), ("ok", "few")) for far in _fars(entries)[::-1])
    return next((far for far, status in choices if is_measured(far, status)), None)


@dataclass(frozen=True)
class Panel:
    """The systems that were tried on the same trials, the ``index``-th set of them."""

    title: str
    entries: tuple[Entry, ...]
    index: int = 0
    headline: float | None = None  # FAR that the verdict should be about

    @property
    def fars(self) -> tuple[float, ...]:
        """Every target FAR of the panel, the largest first."""
        return _fars(self.entries)

    @cached_property
    def headline_far(self) -> float | None:
        """The FAR of the verdict."""
        return _headline_far(self.entries, self.headline)

    @property
    def rules(self) -> list[str]:
        """Rules by which thresholds were chosen; TARs of different rules are not comparable."""
        return sorted({cleaned(entry.result.protocol.rule) for entry in self.entries})

    def leader(self) -> Entry:
        """The system with the largest TAR at the headline FAR, or else the smallest EER."""
        return self.best(self.headline_far)

    def best(self, far: float | None) -> Entry:
        """The system with the largest TAR at a FAR, or the smallest EER where that is None."""
        sign = -1.0 if far is None else 1.0
        return max(self.entries, key=lambda entry: sign * (entry.observed(far) or 0.0))

    @cached_property
    def differences(self) -> list[PairedDifference]:
        """Paired differences at the usual level."""
        return paired_differences(self)

    def has_winner(self, far: float | None) -> bool:
        """Whether the best system is ahead of every other by more than chance."""
        best = self.best(far).label
        pairs = [made.seen_from(best) for made in self.differences if made.far == far]
        shown = [made.reading == "first is better" for made in pairs if made.first == best]
        return len(shown) == len(self.entries) - 1 > 0 and all(shown)


def load_panels(
    paths: Sequence[str | Path], *, headline: float | None = None, keep_paths: bool = False
) -> list[Panel]:
    """Read results and arrange them; absolute paths become file names unless ``keep_paths``."""
    if not paths:
        raise ConfigError("a report needs at least 1 result, got 0: name a result.json")
    results = [_checked(read_result(path), path) for path in paths]
    return arrange(results if keep_paths else map(without_paths, results), headline=headline)


def _checked(result: Result, path: str | Path) -> Result:
    """Refuse what cannot be drawn: a result may have been edited, or made by another program."""
    det, histogram, points = result.det, result.histogram, result.measures.tar
    rates = [*det.far, *det.frr, result.measures.eer.value]
    rates += [point.tar for point in points if point.tar is not None]
    lengths = {
        "det": (len(det.far), len(det.frr), len(det.threshold)),
        "histogram": (len(histogram.edges) - 1, len(histogram.genuine), len(histogram.impostor)),
    }
    if (band := det.band) is not None:
        lengths["det.band"] = (len(band.far), len(band.low), len(band.high))
        rates += [*band.far, *band.low, *band.high]

    def check(is_fine: bool, problem: str) -> None:
        if not is_fine:
            raise DataError(f"{path}: {problem}: evaluate the scores again")

    for name, found in lengths.items():
        check(len(set(found)) == 1, f"the columns of {name} have the lengths {found}")
    for point in points:
        check(0.0 < point.far_target < 1.0, f"a target FAR is {point.far_target}, outside (0, 1)")
    for rate in rates:
        check(0.0 <= rate <= 1.0, f"a rate is {rate}, outside [0, 1]")
    sizes = (result.protocol.num_genuine, result.protocol.num_impostors)
    check(min(sizes) >= 1, "the protocol has no trials of a kind")
    return result


def arrange(results: Iterable[Result], *, headline: float | None = None) -> list[Panel]:
    """Panels of results on the same trials, in the order given.

    Results under one name are told apart by the seed of their run, or by a number, and so are
    panels of one protocol.
    """
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        protocol = result.protocol
        counts = (protocol.name, protocol.num_genuine, protocol.num_impostors)
        trials = counts if protocol.data_sha256 is None else (protocol.data_sha256,)
        groups.setdefault(trials, []).append(result)
    titles = list(map(_title, groups.values()))
    colours: dict[tuple[str, int], int] = {}
    panels = []
    for index, (title, group) in enumerate(zip(titles, groups.values(), strict=True)):
        same = [own for own, other in zip(groups.values(), titles, strict=True) if other == title]
        if len(same) > 1:
            seeds = [found.pop() for own in same if len(found := set(map(seed_of, own))) == 1]
            place = titles[:index].count(title)
            has_seeds = None not in seeds and len(set(seeds)) == len(same)
            title += f", seed {seeds[place]}" if has_seeds else f", trial set {place + 1}"
        panels.append(Panel(title, _entries(group, colours), index, headline))
    return panels


def _title(group: Sequence[Result]) -> str:
    """The name of the protocol; results on the same trials may call it differently."""
    names = {cleaned(result.protocol.name) for result in group}
    return names.pop() if len(names) == 1 else f"{group[0].protocol.num_trials:,} common trials"


def _entries(group: Sequence[Result], colours: dict[tuple[str, int], int]) -> tuple[Entry, ...]:
    """Entries of a panel under distinct labels; new systems get the next colour."""
    found: dict[str, Entry] = {}
    seen: Counter[str] = Counter()
    for result in group:
        name = label = name_of(result)
        number = seen[name]
        seen[name] += 1
        colour = colours.setdefault((name, number), len(colours))
        own = [other for other in group if name_of(other) == name]
        if len(own) > 1 and have_distinct_seeds(own):
            label = f"{name}, seed {seed_of(result)}"
        elif number:
            label = f"{name} ({number + 1})"
        while label in found:
            number += 1
            label = f"{name} ({number + 1})"
        found[label] = Entry(result, label, colour)
    return tuple(found.values())


def name_of(result: Result) -> str:
    """Name of the system, as it is shown."""
    return cleaned(result.system.name) or "unnamed"


def seed_of(result: Result) -> int | None:
    """Seed of the training run; None if the run is unknown."""
    return None if result.run is None else result.run.seed


def have_distinct_seeds(results: Sequence[Result]) -> bool:
    """Whether the seeds of all runs are known and differ."""
    return len({*map(seed_of, results)} - {None}) == len(results)


def margin_of(run: RunInfo) -> tuple[str, str]:
    """Kinds and values of the margins of a run, such as ``prior + angular`` and ``0.1 + 0.05``."""
    values = ("?" if margin.value is None else f"{margin.value:g}" for margin in run.margins)
    return " + ".join(cleaned(margin.kind) for margin in run.margins), " + ".join(values)


# -- paired differences ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedDifference:
    """First minus second: a TAR at ``far``, or the EER where that is None."""

    first: str
    second: str
    far: float | None
    difference: float
    interval: tuple[float, float]
    p_value: float
    adjusted: float  # with Holm's correction for all pairs of the same measure

    def seen_from(self, label: str) -> PairedDifference:
        """The same difference with ``label`` as the first of the two."""
        if label == self.first:
            return self
        ends, difference = (-self.interval[1], -self.interval[0]), -self.difference
        first, second = self.second, self.first
        return replace(self, first=first, second=second, difference=difference, interval=ends)

    @property
    def is_shown(self) -> bool:
        """Whether the systems differ by more than chance."""
        low, high = self.interval
        return self.adjusted < SIGNIFICANT and not low <= 0.0 <= high

    @property
    def reading(self) -> str:
        """What the difference says, in words."""
        if not self.is_shown:
            return "no difference shown"
        is_first = (self.difference > 0.0) == (self.far is not None)  # a smaller EER is better
        return "first is better" if is_first else "second is better"


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method, in the given order.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def paired_differences(panel: Panel, level: float = 0.95) -> list[PairedDifference]:
    """Every pair of systems with common replicates, at each FAR and for the EER.

    Runs of one arm, which differ in their seed, are not compared with each other.
    """
    pairs = [pair for pair in combinations(panel.entries, 2) if not _is_one_arm(*pair)]
    if len(pairs) > MOST_PAIRS:
        wanted = (panel.entries[0].label, panel.leader().label)
        pairs = [pair for pair in pairs if {entry.label for entry in pair} & {*wanted}]
    pairs = [pair for pair in pairs if are_paired(*pair)]
    found = []
    for far in [*panel.fars, None]:
        family = [
            PairedDifference(
                *(a.label, b.label, far, made.difference),
                *((made.low, made.high), made.p_value, made.p_value),
            )
            for a, b in pairs
            if (made := _mean_difference([a], [b], far, level)) is not None
        ]
        adjusted = holm([made.p_value for made in family])
        found += [replace(made, adjusted=p) for made, p in zip(family, adjusted, strict=True)]
    return found


def _is_one_arm(first: Entry, second: Entry) -> bool:
    a, b = first.result.run, second.result.run
    return a is not None and b is not None and a.arm == b.arm and a.seed != b.seed


def are_paired(first: Entry, second: Entry) -> bool:
    """Whether two results drew the same subjects over the same trials."""

    def draws(entry: Entry) -> tuple[object, ...] | None:
        protocol, replicates = entry.result.protocol, entry.result.replicates
        if replicates is None or protocol.data_sha256 is None:
            return None
        trials = (protocol.data_sha256, protocol.rule)
        return (*trials, replicates.subjects_sha256, replicates.seed)

    return draws(first) is not None and draws(first) == draws(second)


def _mean_draws(entries: Sequence[Entry], far: float | None) -> NDArray[np.float64] | None:
    """Mean over runs in every replicate; None unless all runs have as many replicates."""
    drawn = [values for entry in entries if (values := entry.drawn(far)) is not None]
    if len(drawn) < len(entries) or len(set(map(len, drawn))) != 1:
        return None
    return np.asarray(np.mean(drawn, axis=0))


def _mean_difference(
    first: Sequence[Entry], second: Sequence[Entry], far: float | None, level: float
) -> Difference | None:
    """Difference of means over runs; None where a run, or too many replicates, have no value."""
    sides = (first, second)
    observed = [[entry.observed(far) for entry in side] for side in sides]
    a, b = (_mean_draws(side, far) for side in sides)
    if a is None or b is None or len(a) != len(b) or any(None in side for side in observed):
        return None
    means = [float(np.mean(np.array(side, dtype=float))) for side in observed]
    try:
        return paired_difference(means[0], means[1], a, b, level=level)
    except ProtocolError:
        return None


# -- means over seeds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeats:
    """Systems of one protocol, each with the results of its runs in the order of their seeds."""

    title: str
    fars: tuple[float, ...]
    systems: dict[str, tuple[Entry, ...]]
    headline: float | None = None  # FAR that the verdict should be about

    @property
    def measures(self) -> tuple[float | None, ...]:
        """Columns of a table: the FARs of TARs, and None for the EER."""
        return (*self.fars, None)

    @cached_property
    def headline_far(self) -> float | None:
        """The FAR of the verdict."""
        entries = [entry for group in self.systems.values() for entry in group]
        return _headline_far(entries, self.headline)

    def values(self, name: str, far: float | None) -> list[float]:
        """TARs at a FAR, or EERs where that is None, of the runs in which they are known."""
        found = (entry.observed(far) for entry in self.systems[name])
        return [value for value in found if value is not None]

    def ranked(self, far: float | None) -> list[str]:
        """Names from best to worst by their means; what was not measured every time is left out."""
        means = {
            name: float(np.mean(self.values(name, far)))
            for name, entries in self.systems.items()
            if len(self.values(name, far)) == len(entries)
        }
        return sorted(means, key=lambda name: means[name], reverse=far is not None)

    def has_winner(self, far: float | None) -> bool:
        """Whether the best mean is ahead of every other by more than chance."""
        best, *others = self.ranked(far) or [""]
        made = [difference_of_means(self, best, name, far) for name in others]
        shown = [d is not None and (d.high < 0.0 if far is None else d.low > 0.0) for d in made]
        return len(shown) == len(self.systems) - 1 > 0 and all(shown)


def find_repeats(panels: Sequence[Panel], *, experiment: str | None = None) -> list[Repeats]:
    """Every protocol on which a system has results of several runs.

    Runs of one arm with different seeds belong together; where the run is unknown, results under
    one name do. With the title of an experiment all results are its own, whatever each seed tests.
    """
    families: dict[tuple[str, object], dict[tuple[bool, str], list[Entry]]] = {}
    for entry in (entry for panel in panels for entry in panel.entries):
        protocol, run = entry.result.protocol, entry.result.run
        family = (protocol.name, (protocol.kind, protocol.rule, protocol.scoring))
        family = family if experiment is None else (experiment, (None, "", None))
        arm = (False, name_of(entry.result)) if run is None else (True, run.arm)
        families.setdefault(family, {}).setdefault(arm, []).append(entry)
    found = []
    for (title, _), arms in families.items():
        systems: dict[str, tuple[Entry, ...]] = {}
        for (has_run, _), entries in arms.items():
            results = [entry.result for entry in entries]
            if has_run and not have_distinct_seeds(results):
                continue  # several evaluations of one run
            name = label = name_of(results[0])
            while label in systems:
                label = f"{name} ({len(systems) + 1})"
            systems[label] = tuple(sorted(entries, key=lambda entry: seed_of(entry.result) or 0))
        if experiment is not None or any(len(entries) > 1 for entries in systems.values()):
            fars = _fars(entry for entries in systems.values() for entry in entries)
            found.append(Repeats(cleaned(title), fars, systems, panels[0].headline))
    return found


def interval_of_mean(
    repeats: Repeats, name: str, far: float | None, *, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of a system's mean over runs, of subjects, not seeds; None if unknown."""
    drawn = _mean_draws(repeats.systems[name], far)
    try:
        return None if drawn is None else interval(drawn, level)
    except ProtocolError:
        return None


def difference_of_means(
    repeats: Repeats, first: str, second: str, far: float | None, *, level: float = 0.95
) -> Difference | None:
    """First minus second, over all runs, with a paired bootstrap over subjects.

    Runs are paired by their seeds and measured on the same draws of subjects; None where a pair has
    no common draws.
    """
    a, b = repeats.systems[first], repeats.systems[second]
    if [seed_of(entry.result) for entry in a] != [seed_of(entry.result) for entry in b]:
        return None
    is_paired = all(are_paired(*pair) for pair in zip(a, b, strict=True))
    return _mean_difference(a, b, far, level) if is_paired else None


def spread(values: Sequence[float], digits: int = 2, *, sign: str = "±") -> str:
    """Mean and sample standard deviation in per cent, such as ``60.0 ± 14.1``."""
    if not values:
        return MISSING
    mean = f"{100.0 * float(np.mean(values)):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} {sign} {100.0 * float(np.std(values, ddof=1)):.{digits}f}"
