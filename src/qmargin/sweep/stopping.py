"""Early stopping by the median rule: a trial that is behind most others need not go on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qmargin.sweep.validation import is_better
from qmargin.training.hooks import Hook, HookState
from qmargin.training.journal import JOURNAL

FEWEST_OTHERS = 3  # trials that have come as far; with fewer, nobody is stopped


class StoppedEarly(Exception):
    """A trial that its hook ended."""

    def __init__(self, step: int, metrics: dict[str, float], median: float) -> None:
        super().__init__(f"behind the median, {median:.4g}, of the others at step {step}")
        self.step, self.metrics = step, metrics


class MedianRule:
    """A hook around another: raises ``StoppedEarly`` where the best value so far is behind.

    It is compared with the median, over the other trials, of their best values up to the same step.
    Journals of the others are read from their folders, so that trials need not run at the same
    time or in one process.

    Args:
        hook: Whose metrics are judged.
        measure: Of its metrics.
        folder: Of this trial; the others are beside it.
        grace: Steps before which nobody is stopped.
    """

    def __init__(self, hook: Hook, measure: str, folder: Path, *, grace: int = 0) -> None:
        self.hook, self.measure, self.folder, self.grace = hook, measure, folder, grace

    def __call__(self, state: HookState) -> dict[str, float]:
        """Metrics of the inner hook."""
        metrics = self.hook(state)
        if state.step < self.grace:
            return metrics
        own = [*_values(self.folder, self.measure, state.step), metrics[self.measure]]
        others = list(self._others(state.step))
        if len(others) >= FEWEST_OTHERS:
            median = statistics.median(others)
            if is_better(self.measure, median, best(self.measure, own)):
                raise StoppedEarly(state.step, metrics, median)
        return metrics

    def _others(self, step: int) -> Iterator[float]:
        """The best values of those that were measured at this step."""
        for other in sorted(self.folder.parent.iterdir()):
            if other.name == self.folder.name:
                continue
            steps = [event["step"] for event in validations(other)]
            if step in steps:
                yield best(self.measure, _values(other, self.measure, step))


def best(measure: str, values: Sequence[float]) -> float:
    """The best of some values.

    Examples:
        >>> best("eer", [0.3, 0.1]), best("tar@0.001", [0.3, 0.1])
        (0.1, 0.3)
    """
    found = values[0]
    for value in values[1:]:
        found = value if is_better(measure, value, found) else found
    return found


def validations(folder: Path) -> list[dict[str, Any]]:
    """Validation events in the journal of a trial; a line that is being written is left out."""
    path = folder / JOURNAL
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == "validation":
            events.append(event)
    return events


def _values(folder: Path, measure: str, step: int) -> list[float]:
    events = [event for event in validations(folder) if event["step"] <= step]
    return [event["metrics"][measure] for event in events if measure in event["metrics"]]
