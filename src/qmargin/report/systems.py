"""Results arranged for a report: who is compared with whom, under which name and colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, TarPoint, read_result, without_paths
from qmargin.report.markup import cleaned

NUM_COLOURS = 8


@dataclass(frozen=True)
class Entry:
    """One system on one protocol; ``label`` is unique in its panel, ``colour`` in the report."""

    result: Result
    label: str
    colour: int

    def point_at(self, far: float) -> TarPoint | None:
        """The operating point at this target, None if it was not asked for."""
        return next((p for p in self.result.metrics.tar if p.far_target == far), None)


@dataclass(frozen=True)
class Panel:
    """The systems that were tried on the same trials, the ``index``-th set of them.

    ``headline`` is the FAR that the verdict should be about; None for the strictest that can be.
    """

    title: str
    entries: tuple[Entry, ...]
    index: int = 0
    headline: float | None = None

    @property
    def first(self) -> Result:
        """A result that speaks for the trials of the panel."""
        return self.entries[0].result

    @property
    def fars(self) -> list[float]:
        """Every target FAR of the panel, the largest first."""
        points = (point for entry in self.entries for point in entry.result.metrics.tar)
        return sorted({point.far_target for point in points}, reverse=True)

    @property
    def rules(self) -> list[str]:
        """Rules by which thresholds were chosen; more than one should not be compared."""
        return sorted({entry.result.protocol.rule for entry in self.entries})

    def headline_far(self) -> float | None:
        """The FAR of the verdict.

        The one that was asked for, or the strictest that every system measured, with enough false
        accepts if possible.
        """
        if self.headline is not None and self._measured(self.headline, ("ok", "few")):
            return self.headline
        for accepted in (("ok",), ("ok", "few")):
            for far in reversed(self.fars):
                if self._measured(far, accepted):
                    return far
        return None

    def _measured(self, far: float, accepted: tuple[str, ...]) -> bool:
        points = [entry.point_at(far) for entry in self.entries]
        return all(p is not None and p.status in accepted for p in points)

    def best_tar(self, far: float) -> float | None:
        """The largest TAR at this target."""
        points = (entry.point_at(far) for entry in self.entries)
        tars = [p.tar for p in points if p is not None and p.tar is not None]
        return max(tars, default=None)

    def leader(self) -> Entry:
        """The system with the largest TAR at the headline FAR, or else the smallest EER."""
        far = self.headline_far()
        if far is None:
            return min(self.entries, key=lambda entry: entry.result.metrics.eer.value)
        return max(self.entries, key=lambda entry: _tar_or_zero(entry, far))


def load_panels(
    paths: Sequence[str | Path], *, headline: float | None = None, keep_paths: bool = False
) -> list[Panel]:
    """Read results and arrange them by trials, in the order given.

    A system has the same colour in every panel. Two results under one name on the same trials are
    told apart by a number. Absolute paths become names of files unless ``keep_paths``.
    """
    if not paths:
        raise ConfigError("a report needs at least 1 result, got 0: name a result.json")
    results = [_checked(read_result(path), path) for path in paths]
    if not keep_paths:
        results = list(map(without_paths, results))
    return arrange(results, headline=headline)


def arrange(results: Sequence[Result], *, headline: float | None = None) -> list[Panel]:
    """Panels of results that were read already."""
    colours: dict[str, int] = {}
    panels: dict[tuple[object, ...], list[Entry]] = {}
    for result in results:
        name = cleaned(result.system.name) or "unnamed"
        entries = panels.setdefault(_trials_of(result), [])
        taken = {entry.label for entry in entries}
        number = 1
        while (label := name if number == 1 else f"{name} ({number})") in taken:
            number += 1
        entries.append(Entry(result, label, colours.setdefault(label, len(colours))))
    made = [
        Panel(_title(entries), tuple(entries), index, headline)
        for index, entries in enumerate(panels.values())
    ]
    return _with_distinct_titles(made)


def _with_distinct_titles(panels: list[Panel]) -> list[Panel]:
    titles = [panel.title for panel in panels]
    return [
        panel
        if titles.count(panel.title) == 1
        else replace(
            panel, title=f"{panel.title}, trial set {titles[:index].count(panel.title) + 1}"
        )
        for index, panel in enumerate(panels)
    ]


def _title(entries: Sequence[Entry]) -> str:
    """The name of the protocol; results on the same trials may call it differently."""
    names = {cleaned(entry.result.protocol.name) for entry in entries}
    if len(names) == 1:
        return names.pop()
    return f"{entries[0].result.protocol.num_trials:,} common trials"


def _trials_of(result: Result) -> tuple[object, ...]:
    protocol = result.protocol
    if result.trials_sha256 is not None:
        return (result.trials_sha256,)
    return protocol.name, protocol.num_genuine, protocol.num_impostors


def _tar_or_zero(entry: Entry, far: float) -> float:
    point = entry.point_at(far)
    return 0.0 if point is None or point.tar is None else point.tar


def _checked(result: Result, path: str | Path) -> Result:
    """Refuse what cannot be drawn: a result may have been edited, or made by another program."""
    det, histogram = result.det, result.histogram
    _same_length(path, "det", len(det.far), len(det.frr), len(det.threshold))
    rates = [*det.far, *det.frr]
    if det.band is not None:
        band = det.band
        _same_length(path, "det.band", len(band.far), len(band.low), len(band.high))
        rates += [*band.far, *band.low, *band.high]
    for point in result.metrics.tar:
        if not 0.0 < point.far_target < 1.0:
            raise DataError(
                f"{path}: a target FAR is {point.far_target}, outside (0, 1): evaluate with --fars "
                "inside"
            )
    tars = [point.tar for point in result.metrics.tar if point.tar is not None]
    for rate in [*rates, *tars, result.metrics.eer.value]:
        if not 0.0 <= rate <= 1.0:
            raise DataError(f"{path}: a rate is {rate}, outside [0, 1]: evaluate the scores again")
    _same_length(
        path, "histogram", len(histogram.edges) - 1, len(histogram.genuine), len(histogram.impostor)
    )
    if min(result.protocol.num_genuine, result.protocol.num_impostors) < 1:
        raise DataError(f"{path}: the protocol has no trials of a kind: evaluate the scores again")
    return result


def _same_length(path: str | Path, name: str, *lengths: int) -> None:
    if len(set(lengths)) != 1:
        raise DataError(
            f"{path}: the columns of {name} have the lengths {lengths}, which must be equal: "
            "evaluate the scores again"
        )
