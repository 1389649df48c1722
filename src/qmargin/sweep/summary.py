"""Trials of the same point with other seeds, taken together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qmargin.sweep.axes import Point, effective_margin
from qmargin.sweep.trial import TrialResult
from qmargin.sweep.validation import EER, far_of, is_better
from qmargin.training.recipe import Recipe


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds; a single seed has no deviation."""

    mean: float
    deviation: float | None
    number: int


@dataclass(frozen=True)
class PointSummary:
    """One row of the table.

    Attributes:
        point: One value of every axis.
        recipe: Of its first seed.
        results: Of all seeds that ended, in the order of seeds.
        num_wanted: Seeds that were asked for.
    """

    point: Point = field(hash=False)
    recipe: Recipe
    results: tuple[TrialResult, ...]
    num_wanted: int

    @property
    def is_complete(self) -> bool:
        """Whether every seed was trained to its end."""
        finished = [result for result in self.results if result.state == "finished"]
        return len(finished) == self.num_wanted

    @property
    def note(self) -> str:
        """What a reader has to know; empty for a complete row."""
        counts = {
            state: sum(result.state == state for result in self.results)
            for state in ("stopped early", "failed")
        }
        missing = self.num_wanted - len(self.results)
        texts = [f"{number} {state}" for state, number in counts.items() if number]
        return ", ".join(texts + ([f"{missing} missing"] if missing else []))

    @property
    def gap(self) -> float | None:
        """The effective margin."""
        return effective_margin(self.recipe)

    def spread(self, measure: str) -> Spread | None:
        """Of a measure over the seeds that have one; None if none has."""
        values = [r.metrics[measure] for r in self.results if measure in r.metrics]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Summary:
    """All rows of a sweep."""

    rows: tuple[PointSummary, ...]
    measure: str

    @property
    def measures(self) -> list[str]:
        """TARs with growing strictness, then the EER; those that any row has."""
        found = {name for row in self.rows for result in row.results for name in result.metrics}
        tars = sorted((name for name in found if far_of(name)), key=lambda name: -_far(name))
        return tars + ([EER] if EER in found else [])

    def best(self, measure: str | None = None) -> PointSummary | None:
        """The complete row with the best mean; None where there is none."""
        name = measure or self.measure
        chosen: tuple[float, PointSummary] | None = None
        for row in self.rows:
            spread = row.spread(name)
            if spread is None or not row.is_complete:
                continue
            if chosen is None or is_better(name, spread.mean, chosen[0]):
                chosen = spread.mean, row
        return None if chosen is None else chosen[1]


def by_point(
    points: Iterable[tuple[Point, Recipe]], results: Sequence[TrialResult], num_wanted: int
) -> tuple[PointSummary, ...]:
    """Rows in the order of the points."""
    rows = []
    for point, recipe in points:
        own = sorted((r for r in results if r.point == point), key=lambda result: result.seed)
        rows.append(PointSummary(point, recipe, tuple(own), num_wanted))
    return tuple(rows)


def _far(name: str) -> float:
    far = far_of(name)
    return math.inf if far is None else far
