"""Results arranged for a report: panels of systems, paired differences, means over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

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
from qmargin.metrics.runs import (
    LEAST_PAIRS,
    Estimate,
    Runs,
    difference_over_runs,
    logits,
    mean_over_runs,
    rate_difference,
    rate_of,
)
from qmargin.report.numbers import MINUS, MISSING, cleaned, number, spread_digits

MOST_PAIRS = 15  # beyond, only pairs with the first system or the leader
SIGNIFICANT = 0.05
POWER = 0.8  # of the detectable difference


@dataclass(frozen=True)
class Primary:
    """The comparison that is fixed before any test result is seen: an arm minus its first rival.

    Its p-value is not corrected; those of all other comparisons are corrected together.
    """

    focus: str  # an arm
    rivals: tuple[str, ...]  # other arms; all are reported
    far: float


@dataclass(frozen=True)
class Entry:
    """One system on one protocol; ``label`` is unique in its panel, ``colour`` in the report."""

    result: Result
    label: str
    colour: int

    def point_at(self, far: float | None) -> TarPoint | None:
        """The operating point at this target; None if it was not requested."""
        return next((p for p in self.result.measures.tar if p.far_target == far), None)

    def observed(self, far: float | None) -> float | None:
        """TAR at a FAR, or the EER where that is None."""
        if far is None:
            return self.result.measures.eer.value
        point = self.point_at(far)
        return None if point is None else point.tar

    @cached_property
    def score_digits(self) -> int:
        """Digits after the point for the spread of the scores."""
        return spread_digits(self.result.histogram.edges, 0, 9) + 3

    def score_text(self, score: float | None, digits: int | None = None) -> str:
        """A score, or a threshold, with digits for the spread of the scores."""
        if score is None or math.isinf(score):
            return number(score)
        return f"{score:.{digits or self.score_digits}f}".replace("-", MINUS)

    def progress(self, far: float | None) -> list[tuple[float, float]]:
        """Training seconds and TAR at a FAR, or EER, measured during training."""
        run = self.result.run
        points = () if run is None else run.progress
        known = [(p, p.eer if far is None else p.tar.get(far_key(far))) for p in points]
        return [(p.train_seconds, value) for p, value in known if value is not None]

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


def _headline_far(entries: Sequence[Entry], primary: Primary | None = None) -> float | None:
    """The FAR of the primary comparison if all results have it, or the strictest common one.

    One with enough false accepts is preferred to a stricter one.
    """

    def is_measured(far: float, accepted: tuple[str, ...]) -> bool:
        points = [entry.point_at(far) for entry in entries]
        return all(point is not None and point.status in accepted for point in points)

    if primary is not None and is_measured(primary.far, ("ok", "few")):
        return primary.far
    choices = ((far, status) for status in (("ok",), ("ok", "few")) for far in _fars(entries)[::-1])
    return next((far for far, status in choices if is_measured(far, status)), None)


@dataclass(frozen=True)
class Panel:
    """The systems that were tried on the same trials, the ``index``-th set of them."""

    title: str
    entries: tuple[Entry, ...]
    index: int = 0
    primary: Primary | None = None

    @property
    def fars(self) -> tuple[float, ...]:
        """Every target FAR of the panel, the largest first."""
        return _fars(self.entries)

    @cached_property
    def headline_far(self) -> float | None:
        """The FAR of the verdict."""
        return _headline_far(self.entries, self.primary)

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
        return _has_winner(self.best(far).label, len(self.entries), far, self.differences)


def load_panels(
    paths: Sequence[str | Path], *, primary: Primary | None = None, keep_paths: bool = False
) -> list[Panel]:
    """Read results and arrange them; absolute paths become file names unless ``keep_paths``."""
    if not paths:
        raise ConfigError("a report needs at least 1 result, got 0: name a result.json")
    results = [_checked(read_result(path), path) for path in paths]
    return arrange(results if keep_paths else map(without_paths, results), primary=primary)


def _checked(result: Result, path: str | Path) -> Result:
    """Refuse values that cannot be drawn: a result may be edited or from another program."""
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


def arrange(results: Iterable[Result], *, primary: Primary | None = None) -> list[Panel]:
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
        panels.append(Panel(title, _entries(group, colours), index, primary))
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


# -- differences ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedDifference:
    """First minus second: a TAR at ``far``, or the EER where that is None.

    The two are single results, or means over runs that differ in their seed. It is tested on the
    logit of the rate; the ends of the interval are put back on the scale of rates.
    """

    first: str
    second: str
    far: float | None
    difference: float
    interval: tuple[float, float]
    p_value: float
    adjusted: float  # with Holm's correction for all pairs and measures but the primary one
    logit: float
    logit_interval: tuple[float, float]
    detectable: float  # difference that would have been shown with 80 % power
    num_runs: int  # of the side that has fewer; with 1 the training is not in the interval
    run_share: float | None  # of the variance, that more runs would lower
    num_compared: int  # comparisons that were corrected together; 1 for the primary one
    is_primary: bool

    def seen_from(self, label: str) -> PairedDifference:
        """The same difference with ``label`` as the first of the two."""
        if label == self.first:
            return self
        ends, other = ((-high, -low) for low, high in (self.interval, self.logit_interval))
        return replace(
            self,
            first=self.second,
            second=self.first,
            difference=-self.difference,
            interval=ends,
            logit=-self.logit,
            logit_interval=other,
        )

    @property
    def is_shown(self) -> bool:
        """Whether the systems differ by more than chance."""
        low, high = self.interval
        return self.adjusted < SIGNIFICANT and not low <= 0.0 <= high

    @property
    def reading(self) -> str:
        """The verdict on the difference, in words."""
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


class _Compared(NamedTuple):
    """A difference before it is corrected for the others."""

    first: str
    second: str
    far: float | None
    estimate: Estimate  # of logits
    middle: float  # logit half way between the two
    is_primary: bool


def _corrected(found: Sequence[_Compared], level: float) -> list[PairedDifference]:
    """Differences, with p-values corrected together except for the primary one."""
    corrections = holm([one.estimate.p_value for one in found if not one.is_primary])
    remaining, made = iter(corrections), []
    for one in found:
        estimate = one.estimate
        count = 1 if one.is_primary else len(corrections)
        ends = estimate.interval(level)
        value, low, high, detectable = (
            rate_difference(number, one.middle)
            for number in (
                *(estimate.value, *ends),
                estimate.detectable(1.0 - SIGNIFICANT / count, POWER),
            )
        )
        made.append(
            PairedDifference(
                one.first,
                one.second,
                one.far,
                difference=value,
                interval=(low, high),
                p_value=estimate.p_value,
                adjusted=estimate.p_value if one.is_primary else next(remaining),
                logit=estimate.value,
                logit_interval=ends,
                detectable=detectable,
                num_runs=estimate.num_runs,
                run_share=estimate.run_share,
                num_compared=count,
                is_primary=one.is_primary,
            )
        )
    return made


def _compared(
    systems: Mapping[str, Sequence[Entry]],
    pairs: Iterable[tuple[str, str]],
    fars: Sequence[float | None],
    primary: tuple[Primary | None, float | None],
    level: float,
) -> list[PairedDifference]:
    """Differences of pairs of systems, by every measure; incomparable pairs are left out."""
    plan, headline = primary
    found = []
    for a, b in pairs:
        arms = [_arm_of(systems[name]) for name in (a, b)]
        is_planned = plan is not None and {*arms} == {plan.focus, plan.rivals[0]}
        for far in fars:
            made = _difference(systems[a], systems[b], far)
            if made is not None:
                found.append(_Compared(a, b, far, *made, is_planned and far == headline))
    return _corrected(found, level)


def _arm_of(entries: Sequence[Entry]) -> str | None:
    run = entries[0].result.run
    return None if run is None else run.arm


def paired_differences(panel: Panel, level: float = 0.95) -> list[PairedDifference]:
    """Pairs of single results with common replicates, at each FAR and for the EER.

    Runs of one arm, which differ in their seed, are not compared with each other. Of many pairs,
    those with the first system or the leader are returned; p-values are corrected for all.
    """
    pairs = [pair for pair in combinations(panel.entries, 2) if not _is_one_arm(*pair)]
    names = [(a.label, b.label) for a, b in pairs if are_paired(a, b)]
    arms = Counter(_arm_of([entry]) for entry in panel.entries)
    # one pair of results is the primary comparison, of the first protocol
    is_fixed = panel.primary is not None and panel.index == 0 and max(arms.values()) == 1
    found = _compared(
        {entry.label: [entry] for entry in panel.entries},
        names,
        [*panel.fars, None],
        (panel.primary if is_fixed else None, panel.headline_far),
        level,
    )
    if len(pairs) > MOST_PAIRS:
        wanted = {panel.entries[0].label, panel.leader().label}
        found = [made for made in found if {made.first, made.second} & wanted]
    order = {far: place for place, far in enumerate([*panel.fars, None])}
    return sorted(found, key=lambda made: order[made.far])


def _has_winner(
    best: str, num_systems: int, far: float | None, found: Sequence[PairedDifference]
) -> bool:
    """Whether one system is ahead of every other by more than chance."""
    pairs = [made.seen_from(best) for made in found if made.far == far]
    shown = [made.reading == "first is better" for made in pairs if made.first == best]
    return len(shown) == num_systems - 1 > 0 and all(shown)


def _is_one_arm(first: Entry, second: Entry) -> bool:
    a, b = first.result.run, second.result.run
    return a is not None and b is not None and a.arm == b.arm and a.seed != b.seed


def _drawn_from(entry: Entry) -> tuple[object, ...] | None:
    """The trials of a result and the draws of their subjects; None where they are not known."""
    protocol, replicates = entry.result.protocol, entry.result.replicates
    if replicates is None or protocol.data_sha256 is None:
        return None
    trials = (protocol.data_sha256, protocol.rule)
    return (*trials, replicates.subjects_sha256, replicates.seed, len(replicates.eer))


def are_paired(first: Entry, second: Entry) -> bool:
    """Whether two results drew the same subjects over the same trials."""
    return _drawn_from(first) is not None and _drawn_from(first) == _drawn_from(second)


def _share_subjects(entries: Sequence[Entry]) -> bool:
    return all(are_paired(entries[0], entry) for entry in entries)


def _runs(*sides: Sequence[Entry], far: float | None) -> list[Runs] | None:
    """Logits of a rate in every run and replicate of systems; None where a run lacks them."""
    entries = [entry for side in sides for entry in side]
    observed = {id(entry): entry.observed(far) for entry in entries}
    drawn = {id(e): values for e in entries if (values := e.drawn(far)) is not None}
    lengths = {len(values) for values in drawn.values()}
    if None in observed.values() or len(drawn) < len(observed) or len(lengths) > 1:
        return None
    count = min(entry.result.protocol.num_genuine for entry in entries)
    return [
        Runs(
            logits(np.array([observed[id(e)] for e in side], dtype=np.float64), count),
            logits([drawn[id(e)] for e in side], count),
        )
        for side in sides
    ]


def _num_subjects(entries: Sequence[Entry]) -> int:
    """Test identities of a run; at least two, which a bootstrap needs."""
    known = [n for entry in entries if (n := entry.result.protocol.num_subjects) is not None]
    return max(2, min(known, default=entries[0].result.protocol.num_genuine))


def _difference(
    first: Sequence[Entry], second: Sequence[Entry], far: float | None
) -> tuple[Estimate, float] | None:
    """Difference of mean logits and their middle; None where they cannot be compared.

    Runs of both with the same seeds, if there are enough, are paired. Others are independent, and
    must all have the same test identities.
    """
    seeds = [[seed_of(entry.result) for entry in side] for side in (first, second)]
    has_pairs = seeds[0] == seeds[1] and None not in seeds[0]
    shares_subjects = _share_subjects([*first, *second])
    if not shares_subjects and not (has_pairs and all(map(are_paired, first, second))):
        return None
    both = _runs(first, second, far=far)
    if both is None:
        return None
    count = _num_subjects([*first, *second])
    try:
        made = difference_over_runs(
            *both,
            num_subjects=count,
            shares_subjects=shares_subjects,
            are_paired=has_pairs and len(first) >= LEAST_PAIRS,
        )
    except ProtocolError:  # too few replicates, or no spread
        return None
    return made, float(np.mean([np.mean(one.observed) for one in both]))


# -- means over seeds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeats:
    """Systems of one protocol, each with the results of its runs in the order of their seeds."""

    title: str
    fars: tuple[float, ...]
    systems: dict[str, tuple[Entry, ...]]
    primary: Primary | None = None
    level: float = 0.95
    stands_alone: bool = True  # whether the primary comparison is not corrected for the others

    @property
    def measures(self) -> tuple[float | None, ...]:
        """Columns of a table: the FARs of TARs, and None for the EER."""
        return (*self.fars, None)

    @cached_property
    def headline_far(self) -> float | None:
        """The FAR of the verdict."""
        entries = [entry for group in self.systems.values() for entry in group]
        return _headline_far(entries, self.primary)

    @property
    def has_seeds(self) -> bool:
        """Whether a system has several runs."""
        return any(len(entries) > 1 for entries in self.systems.values())

    def values(self, name: str, far: float | None) -> list[float]:
        """TARs at a FAR, or EERs where that is None, of the runs in which they are known."""
        found = (entry.observed(far) for entry in self.systems[name])
        return [value for value in found if value is not None]

    def ranked(self, far: float | None) -> list[str]:
        """Names from best to worst by their means, without systems that lack a measurement."""
        means = {
            name: float(np.mean(self.values(name, far)))
            for name, entries in self.systems.items()
            if len(self.values(name, far)) == len(entries)
        }
        return sorted(means, key=lambda name: means[name], reverse=far is not None)

    def has_winner(self, far: float | None) -> bool:
        """Whether the best mean is ahead of every other by more than chance."""
        best = (self.ranked(far) or [""])[0]
        return _has_winner(best, len(self.systems), far, self.differences)

    @cached_property
    def differences(self) -> list[PairedDifference]:
        """Every pair of systems by every measure, with p-values that are corrected together."""
        primary = (self.primary if self.stands_alone else None, self.headline_far)
        pairs = combinations(self.systems, 2)
        return _compared(self.systems, pairs, self.measures, primary, self.level)

    def difference(self, first: str, second: str, far: float | None) -> PairedDifference | None:
        """First minus second, over all runs; None where they cannot be compared."""
        for made in self.differences:
            if made.far == far and {made.first, made.second} == {first, second}:
                return made.seen_from(first)
        return None

    def planned(self, far: float | None) -> list[tuple[str, str]]:
        """Pairs of systems that were fixed before the test, the primary one first."""
        if self.primary is None:
            return []
        names = {_arm_of(entries): name for name, entries in self.systems.items()}
        focus = names.get(self.primary.focus)
        rivals = [names[arm] for arm in self.primary.rivals if arm in names]
        known = self.ranked(far)
        return [(focus, rival) for rival in rivals if focus in known and rival in known and focus]

    def interval(self, name: str, far: float | None) -> tuple[float, float] | None:
        """Interval of a system's mean over runs and test identities; None if unknown."""
        entries = self.systems[name]
        runs = _runs(entries, far=far)
        if runs is None:
            return None
        shares, count = _share_subjects(entries), _num_subjects(entries)
        try:
            made = mean_over_runs(runs[0], num_subjects=count, shares_subjects=shares)
        except ProtocolError:
            return None
        low, high = (rate_of(end) for end in made.interval(self.level))
        return low, high


def seconds_to(points: Sequence[tuple[float, float]], tar: float) -> float | None:
    """Training seconds at which a TAR was first reached, by lines between points.

    Examples:
        >>> seconds_to([(10.0, 0.2), (20.0, 0.4)], 0.3), seconds_to([(10.0, 0.2)], 0.3)
        (15.0, None)
    """
    before = (0.0, 0.0)
    for seconds, value in points:
        if value >= tar:
            share = (tar - before[1]) / (value - before[1]) if value > before[1] else 1.0
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return None


def find_repeats(
    panels: Sequence[Panel], *, experiment: str | None = None, level: float = 0.95
) -> list[Repeats]:
    """Every protocol on which a system has results of several runs.

    Runs of one arm with different seeds belong together; where the run is unknown, results under
    one name do. With the title of an experiment, all results belong to it, even if each seed has
    its own test set.
    """
    Key = tuple[str, tuple[str | None, str, str | None]]
    families: dict[Key, dict[tuple[bool, str], list[Entry]]] = {}
    for entry in (entry for panel in panels for entry in panel.entries):
        protocol, run = entry.result.protocol, entry.result.run
        family = (protocol.name, (protocol.kind, protocol.rule, protocol.scoring))
        if experiment is not None:
            family = (experiment, (None, "", protocol.scoring))
        arm = (False, name_of(entry.result)) if run is None else (True, run.arm)
        families.setdefault(family, {}).setdefault(arm, []).append(entry)
    found: list[Repeats] = []
    for (title, (_, _, scoring)), arms in families.items():
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
            name = cleaned(f"{title}, {scoring}" if experiment and found else title)
            found.append(Repeats(name, fars, systems, panels[0].primary, level, not found))
    return found


def spread(values: Sequence[float], digits: int = 2, *, sign: str = "±") -> str:
    """Mean and sample standard deviation in per cent, such as ``60.0 ± 14.1``."""
    if not values:
        return MISSING
    mean = f"{100.0 * float(np.mean(values)):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} {sign} {100.0 * float(np.std(values, ddof=1)):.{digits}f}"
