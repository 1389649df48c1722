"""Systems compared in pairs, from the same bootstrap replicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ProtocolError
from qmargin.evaluation.result import far_key
from qmargin.metrics.comparison import paired_difference
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, joined, name_of, tag
from qmargin.report.numbers import power, probability, signed
from qmargin.report.systems import Entry, Panel

MOST_PAIRS = 15  # beyond, only pairs with the first system


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


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down method, in the given order.

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
    """Every pair of systems with common replicates, at each FAR and for the EER."""
    pairs = list(combinations(panel.entries, 2))
    if len(pairs) > MOST_PAIRS:
        pairs = [pair for pair in pairs if pair[0] is panel.entries[0]]
    pairs = [pair for pair in pairs if are_paired(*pair)]
    found = []
    for far in [*panel.fars, None]:
        family = [made for pair in pairs if (made := _difference(*pair, far, level)) is not None]
        adjusted = holm([made.p_value for made in family])
        found += [replace(made, adjusted=p) for made, p in zip(family, adjusted, strict=True)]
    return found


def comparison_block(panel: Panel, differences: list[PairedDifference], level: float) -> Html:
    """Differences at the headline FAR as a drawing, all others in a table below."""
    if not differences:
        return tag("p", _why_none(panel), class_="hint")
    headline = panel.headline_far()
    main = [made for made in differences if made.far == headline]
    others = [made for made in differences if made.far != headline]
    caption = (
        f"Difference of TAR at FAR {power(headline)} in percentage points, first minus second"
        if headline is not None
        else "Difference of EER in percentage points, first minus second"
    )
    parts = [_table(main, caption)]
    if others:
        rest = _table(others, "In percentage points, first minus second", has_measure=True)
        parts.append(tag("details", tag("summary", "Other operating points and the EER"), rest))
    parts.append(
        tag(
            "p",
            f"Paired bootstrap over subjects, {100 * level:g} % intervals; p-values are two-sided "
            "and corrected for the number of pairs (Holm). The same subjects are drawn for both "
            "systems, so what they have in common cancels.",
            class_="hint",
        )
    )
    return joined(parts)


def are_paired(first: Entry, second: Entry) -> bool:
    """Whether two results drew the same subjects over the same trials."""
    a, b = first.result.replicates, second.result.replicates
    if a is None or b is None or first.result.trials_sha256 is None:
        return False
    return (
        first.result.trials_sha256 == second.result.trials_sha256
        and a.subjects_sha256 == b.subjects_sha256
        and a.seed == b.seed
        and first.result.protocol.rule == second.result.protocol.rule
    )


def _difference(
    first: Entry, second: Entry, far: float | None, level: float
) -> PairedDifference | None:
    """One measure of two systems; None where one of them, or too many replicates, have no value."""
    observed = [observed_value(entry, far) for entry in (first, second)]
    values = [replicate_values(entry, far) for entry in (first, second)]
    if observed[0] is None or observed[1] is None or values[0] is None or values[1] is None:
        return None
    if len(values[0]) != len(values[1]):
        return None
    try:
        made = paired_difference(observed[0], observed[1], values[0], values[1], level=level)
    except ProtocolError:
        return None
    return PairedDifference(
        first=first.label,
        second=second.label,
        far=far,
        difference=made.difference,
        interval=(made.low, made.high),
        p_value=made.p_value,
        adjusted=made.p_value,
    )


def observed_value(entry: Entry, far: float | None) -> float | None:
    """TAR at a FAR, or EER where that is None, on the trials as they are."""
    if far is None:
        return entry.result.metrics.eer.value
    point = entry.point_at(far)
    return None if point is None else point.tar


def replicate_values(entry: Entry, far: float | None) -> NDArray[np.float64] | None:
    """The same in every replicate, NaN where it could not be measured."""
    replicates = entry.result.replicates
    if replicates is None:
        return None
    values = replicates.eer if far is None else replicates.tar.get(far_key(far), ())
    return np.array(values, dtype=np.float64) if values else None  # None becomes NaN


def _why_none(panel: Panel) -> str:
    if len(panel.entries) < 2:
        return "One system only: give several results on the same trials to compare them."
    return (
        "These systems cannot be compared in pairs: they need the same trials, subjects, rule and "
        "seed, and replicates (evaluate with --replicates)."
    )


def _table(found: list[PairedDifference], caption: str, *, has_measure: bool = False) -> Html:
    head = ["<First", "<Second", "Difference", "", "Interval", "p", "<Reading"]
    if has_measure:
        head.insert(0, "<Measure")
    reach = max([abs(end) for made in found for end in made.interval] + [1e-9])
    rows = [_row(made, reach, has_measure) for made in found]
    return data_table(head, rows, caption)


def _row(made: PairedDifference, reach: float, has_measure: bool) -> Html:
    low, high = made.interval
    measure = "EER" if made.far is None else f"TAR at {power(made.far)}"
    first = name_of(made.first)
    start = [tag("th", measure, scope="row"), tag("td", first, class_="left")]
    return tag(
        "tr",
        *(start if has_measure else [tag("th", first, scope="row")]),
        tag("td", name_of(made.second), class_="left"),
        tag("td", signed(100 * made.difference)),
        tag("td", _whisker(made, reach), class_="wide"),
        tag("td", f"{signed(100 * low)} to {signed(100 * high)}"),
        tag("td", probability(made.adjusted)),
        tag("td", reading(made), class_="left reading"),
    )


def reading(made: PairedDifference) -> str:
    """What a difference says, in words."""
    low, high = made.interval
    if made.adjusted >= 0.05 or low <= 0.0 <= high:
        return "no difference shown"
    is_first = (made.difference > 0.0) == (made.far is not None)  # a smaller EER is better
    return "first is better" if is_first else "second is better"


def _whisker(made: PairedDifference, reach: float) -> Html:
    def place(value: float) -> float:
        return 100.0 + 94.0 * value / reach

    low, high = (place(end) for end in made.interval)
    kind = "unsure" if reading(made) == "no difference shown" else "sure"
    return tag(
        "svg",
        tag("path", d="M100 0V18", class_="gauge-mark"),
        tag("path", d=f"M{low:.1f} 9H{high:.1f}", class_=f"whisker {kind}"),
        tag("circle", cx=f"{place(made.difference):.1f}", cy=9, r=4, class_=f"whisker-dot {kind}"),
        viewBox="0 0 200 18",
        class_="gauge-drawing",
        aria_hidden="true",
    )
