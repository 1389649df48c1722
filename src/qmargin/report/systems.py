"""Results arranged for a report: who is compared with whom, under which name and colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, RunInfo, TarPoint, read_result, without_paths
from qmargin.report.numbers import cleaned

NUM_COLOURS = 8


@dataclass(frozen=True)
class Entry:
    """One system on one protocol; ``label`` is unique in its panel, ``colour`` in the report."""

    result: Result
    label: str
    colour: int

    def point_at(self, far: float) -> TarPoint | None:
        """The operating point at this target, None if it was not asked for."""
        return next((p for p in self.result.measures.tar if p.far_target == far), None)


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
        points = (point for entry in self.entries for point in entry.result.measures.tar)
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

    def leader(self) -> Entry:
        """The system with the largest TAR at the headline FAR, or else the smallest EER."""
        far = self.headline_far()
        if far is None:
            return min(self.entries, key=lambda entry: entry.result.measures.eer.value)
        return max(self.entries, key=lambda entry: _tar_or_zero(entry, far))


def load_panels(
    paths: Sequence[str | Path], *, headline: float | None = None, keep_paths: bool = False
) -> list[Panel]:
    """Read results and arrange them by trials, in the order given.

    A system has the same colour in every panel. Results under one name on the same trials are told
    apart by the seed of their run, or by a number. Absolute paths become names of files unless
    ``keep_paths``.
    """
    if not paths:
        raise ConfigError("a report needs at least 1 result, got 0: name a result.json")
    results = [_checked(read_result(path), path) for path in paths]
    if not keep_paths:
        results = list(map(without_paths, results))
    return arrange(results, headline=headline)


def arrange(results: Sequence[Result], *, headline: float | None = None) -> list[Panel]:
    """Panels of results that were read already."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(_trials_of(result), []).append(result)
    colours: dict[tuple[str, int], int] = {}
    panels = []
    for index, group in enumerate(groups.values()):
        names = [name_of(result) for result in group]
        entries: list[Entry] = []
        for place, result in enumerate(group):
            key = names[place], names[:place].count(names[place])
            own = [other for other in group if name_of(other) == names[place]]
            label = _label(result, own, key[1], {entry.label for entry in entries})
            entries.append(Entry(result, label, colours.setdefault(key, len(colours))))
        panels.append(Panel(_title(entries), tuple(entries), index, headline))
    return _with_distinct_titles(panels)


def name_of(result: Result) -> str:
    """Name of the system, as it is shown."""
    return cleaned(result.system.name) or "unnamed"


def seeds_of(results: Sequence[Result]) -> list[int] | None:
    """Seeds of the runs behind results; None if one is unknown or occurs twice."""
    seeds = [result.run.seed for result in results if result.run is not None]
    return seeds if len(set(seeds)) == len(results) else None


def _label(result: Result, own: Sequence[Result], number: int, taken: set[str]) -> str:
    """Name of a system that no other result of the panel has; ``own`` are those of its name."""
    name = label = name_of(result)
    if len(own) > 1 and result.run is not None and seeds_of(own) is not None:
        label = f"{name}, seed {result.run.seed}"
    elif number:
        label = f"{name} ({number + 1})"
    while label in taken:
        number += 1
        label = f"{name} ({number + 1})"
    return label


def _with_distinct_titles(panels: list[Panel]) -> list[Panel]:
    """Tell panels of one protocol apart by the seed of their runs, or by a number."""
    found = []
    for panel in panels:
        same = [other for other in panels if other.title == panel.title]
        seeds = [_common_seed(other) for other in same]
        place = same.index(panel)
        if len(same) > 1 and None not in seeds and len(set(seeds)) == len(same):
            panel = replace(panel, title=f"{panel.title}, seed {seeds[place]}")
        elif len(same) > 1:
            panel = replace(panel, title=f"{panel.title}, trial set {place + 1}")
        found.append(panel)
    return found


def _common_seed(panel: Panel) -> int | None:
    """Seed of all runs of a panel; None if they differ or one is unknown."""
    seeds = {None if e.result.run is None else e.result.run.seed for e in panel.entries}
    return seeds.pop() if len(seeds) == 1 else None


def margin_of(run: RunInfo) -> tuple[str, str]:
    """Kinds and values of the margins of a run.

    Examples:
        >>> from qmargin.evaluation.result import MarginInfo
        >>> margins = (MarginInfo("prior", 0.1), MarginInfo("angular", 0.05))
        >>> margin_of(RunInfo("", "sum", "Sum", "alpha", 1.25, margins, 32.0, 0))
        ('prior + angular', '0.1 + 0.05')
    """
    values = ("?" if margin.value is None else f"{margin.value:g}" for margin in run.margins)
    return " + ".join(cleaned(margin.kind) for margin in run.margins), " + ".join(values)


def _title(entries: Sequence[Entry]) -> str:
    """The name of the protocol; results on the same trials may call it differently."""
    names = {cleaned(entry.result.protocol.name) for entry in entries}
    if len(names) == 1:
        return names.pop()
    return f"{entries[0].result.protocol.num_trials:,} common trials"


def _trials_of(result: Result) -> tuple[object, ...]:
    protocol = result.protocol
    if protocol.data_sha256 is not None:
        return (protocol.data_sha256,)
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
    for point in result.measures.tar:
        if not 0.0 < point.far_target < 1.0:
            raise DataError(
                f"{path}: a target FAR is {point.far_target}, outside (0, 1): evaluate with --fars "
                "inside"
            )
    tars = [point.tar for point in result.measures.tar if point.tar is not None]
    for rate in [*rates, *tars, result.measures.eer.value]:
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
