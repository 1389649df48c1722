"""The paper's tables: its own numbers, with what was measured here in the same layout.

``paper_table`` fills a ``Layout`` from results, which are matched to rows by the settings of their
loss and gathered over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from qmargin.errors import DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.files import read_regular
from qmargin.report.numbers import power
from qmargin.report.paper_layouts import LAYOUTS, THROUGHPUT, PaperRow, Setting
from qmargin.report.table import CellValue, Column, Number, Section, Table

FARS = (1e-3, 1e-4, 1e-5)
REACHABLE = 2.0  # cosines differ by at most this
BENCHMARK = "python -m benchmarks head --parts end-to-end --json FILE"
MOST_BENCHMARK_BYTES = 10_000_000
_BENCHMARKED = {
    "ArcFace": "ArcFace, common head",
    **{name: f"{name}, paper" for name in list(THROUGHPUT)[1:]},
    "Q-Margin, sparse": "Q-Margin, sparse",
}


@dataclass(frozen=True)
class Measured:
    """One loss on one protocol, with a result for each seed."""

    name: str
    setting: Setting | None
    protocol: str
    results: tuple[Result, ...]

    def tar(self, far: float) -> Number | None:
        """TAR in percent, with its standard deviation over seeds; None if a seed has none."""
        tars = [
            100.0 * point.tar
            for result in self.results
            for point in result.measures.tar
            if point.far_target == far and point.tar is not None
        ]
        if not tars or len(tars) < len(self.results):
            return None
        return Number(mean(tars), deviation=stdev(tars) if len(tars) > 1 else None)

    @property
    def fars(self) -> set[float]:
        """FARs that were asked for."""
        return {point.far_target for result in self.results for point in result.measures.tar}


def find_results(folder: Path) -> list[Path]:
    """Every ``result.json`` below a folder, or the file that was named.

    Raises:
        DataError: There is none.
    """
    found = [folder] if folder.is_file() else sorted(folder.rglob("result.json"))
    if not found:
        raise DataError(
            f"{folder} has no result.json; give a folder of `qmargin compare` or of results of "
            "`qmargin evaluate`"
        )
    return found


def setting_of(result: Result) -> Setting | None:
    """The loss of the model behind a result; None if it is unknown or has several margins."""
    run = result.run
    if run is None or run.alpha is None or run.scale is None or len(run.margins) != 1:
        return None
    (margin,) = run.margins
    if margin.value is None:
        return None
    return Setting(margin.kind, run.alpha, run.scale, margin.value)


def measured_in(paths: Iterable[Path]) -> list[Measured]:
    """Gather results over seeds, by settings of the loss and protocol.

    Runs of one setting that have the same seed are kept apart by their arm, such as ArcFace with
    and without sampled negatives.

    Raises:
        DataError: Two results have the same arm, protocol and seed.
    """
    found = []
    results = map(read_result, paths)
    for same in _grouped(results, lambda one: (setting_of(one) or _name(one), protocol_title(one))):
        arms = _grouped(same, lambda one: one.run.arm if one.run else "")
        for own in [same] if _have_distinct_seeds(same) else arms:
            first = own[0]
            if not _have_distinct_seeds(own):
                raise DataError(
                    f"two results of {_name(first)} on {protocol_title(first)} have the same seed; "
                    "give a folder of one experiment"
                )
            found.append(
                Measured(_name(first), setting_of(first), protocol_title(first), tuple(own))
            )
    return found


def _grouped(results: Iterable[Result], key: Callable[[Result], object]) -> list[list[Result]]:
    groups: dict[object, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return list(groups.values())


def _have_distinct_seeds(results: Sequence[Result]) -> bool:
    """Whether no seed occurs twice; results without a run count as repetitions."""
    seeds = [result.run.seed for result in results if result.run is not None]
    return len(set(seeds)) == len(seeds)


def protocol_title(result: Result) -> str:
    """Name of the trials, and how they were scored unless by cosines."""
    protocol = result.protocol
    is_plain = protocol.scoring in (None, "cosine", "given")
    return protocol.name if is_plain else f"{protocol.name}, {protocol.scoring}"


def _name(result: Result) -> str:
    return result.system.name if result.run is None else result.run.title


def paper_table(name: str, results: Path) -> Table:
    """Fill a table of the paper with what was measured.

    Args:
        name: A key of ``LAYOUTS``, or ``"table-throughput"``.
        results: Folder with ``result.json`` files; for ``table-throughput`` the file of
            ``python -m benchmarks head --parts end-to-end --json FILE``.
    """
    if name == "table-throughput":
        return _throughput_table(results)
    return accuracy_table(name, measured_in(find_results(results)))


def accuracy_table(name: str, found: Sequence[Measured]) -> Table:
    """Rows of the paper with TARs measured for the same setting; other settings come last."""
    layout = LAYOUTS[name]
    matched = [_matches(row, found) for row in layout.rows]
    used = [one for own in matched for one in own]
    others = [] if layout.is_closed else [one for one in found if one not in used]
    used += others
    here = [
        (protocol, far)
        for protocol in dict.fromkeys(one.protocol for one in used)
        for far in FARS
        if any(one.protocol == protocol and far in one.fars for one in used)
    ]
    columns = (
        Column("Loss", "left"),
        *(Column(title, "left") for title in layout.details),
        Column("\u03b1", group=("", "Parameters")),
        Column("s", group=("", "Parameters"), latex="$s$"),
        Column("m", group=("", "Parameters"), latex="$m$"),
        *(Column(power(far), best="max", group=("Here", protocol)) for protocol, far in here),
        *(
            Column(title, best="max", group=("Paper", group))
            for group, titles in layout.headings
            for title in titles
        ),
    )
    num_values = sum(len(titles) for _, titles in layout.headings)

    def cells(row: PaperRow, own: Sequence[Measured]) -> tuple[CellValue, ...]:
        tars = [
            next((one.tar(far) for one in own if one.protocol == protocol), None)
            for protocol, far in here
        ]
        deviations = row.deviations or (None,) * len(row.values)
        values = map(_percent, row.values, deviations)
        details = row.details or ("",) * len(layout.details)
        return (row.loss, *details, *_parameters(row.setting), *tars, *values)

    rows: list[Section | tuple[CellValue, ...]] = []
    if layout.reported:
        rows += [Section("Reported", competes=False), *(cells(row, ()) for row in layout.reported)]
        rows.append(Section("Re-implemented"))
    rows += map(cells, layout.rows, matched)
    if others:
        rows.append(Section("Other settings"))
    for other, setting in dict.fromkeys((one.name, one.setting) for one in others):
        own = [one for one in others if (one.name, one.setting) == (other, setting)]
        rows.append(cells(PaperRow(other, setting, (None,) * num_values), own))
    title = f"{layout.title} ({layout.where})"
    return Table(title, columns, tuple(rows), (*layout.notes, *notes_on(used)), label=name)


def _matches(row: PaperRow, found: Sequence[Measured]) -> list[Measured]:
    """What was measured with the setting of a row, under the row's name or a single other one."""
    own = [one for one in found if one.setting == row.setting]
    names = {one.name for one in own}
    if len(names) > 1:  # such as ArcFace on a sample of the classes
        own = [one for one in own if one.name == row.loss]
    return own


def notes_on(found: Sequence[Measured]) -> list[str]:
    """What the numbers measured here rest on, in sentences."""
    if not found:
        return ["No result has one of these settings."]
    notes = ["Compare with the paper only if data, network and recipe are the paper's."]
    for protocol in dict.fromkeys(one.protocol for one in found):
        own = [one for one in found if one.protocol == protocol]
        counts = [result.protocol.num_impostors for one in own for result in one.results]
        seeds = [len(one.results) for one in own]
        plural = "" if max(seeds) == 1 else "s"
        notes.append(f"{protocol}: {_span(counts)} impostor pairs, {_span(seeds)} seed{plural}.")
        missing = [far for far in FARS if all(one.tar(far) is None for one in own)]
        needed = [power(far) for far in missing if min(counts) < round(1.0 / far)]
        if needed:
            notes.append(f"Too few impostor pairs for FAR {' and '.join(needed)}.")
    runs = [result.run for one in found for result in one.results]
    sizes = [run.num_classes for run in runs if run is not None and run.num_classes is not None]
    if sizes:
        notes.append(f"Trained on {_span(sizes)} identities.")
    beyond = {
        f"{one.setting.loss} ({one.setting.text}) {gap:.2f}": None
        for one in found
        if one.setting and (gap := one.setting.effective_margin) and gap > REACHABLE
    }
    if beyond:
        notes.append(
            f"Effective margins above {REACHABLE:g}, which no embedding reaches: "
            f"{', '.join(beyond)}."
        )
    return notes


def _parameters(setting: Setting | None) -> tuple[CellValue, ...]:
    if setting is None:
        return (None, None, None)
    alpha = None if setting.alpha == 1.0 else f"{setting.alpha:g}"
    return (alpha, f"{setting.scale:g}", f"{setting.margin:g}")


def _percent(value: float | None, deviation: float | None) -> Number | None:
    return None if value is None else Number(value, deviation=deviation)


def _span(counts: Iterable[int]) -> str:
    """The smallest and the largest number.

    Examples:
        >>> _span([1420, 393]), _span([3, 3])
        ('393 to 1,420', '3')
    """
    low, high = min(found := list(counts)), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _throughput_table(path: Path) -> Table:
    record = _read_benchmark(path)
    speeds = {name: _fastest(record, ours) for name, ours in _BENCHMARKED.items()}
    settings, device = record["settings"], record["machine"]["device"]
    return Table(
        "Samples per second of whole training steps (Table 4, tab:throughput)",
        (Column("", "left"), *(Column(name) for name in _BENCHMARKED)),
        (
            ("here", *(Number(speed) for speed in speeds.values())),
            ("here / ArcFace", *_ratios(speeds)),
            Section(),
            ("paper", *(Number(THROUGHPUT.get(name)) for name in _BENCHMARKED)),
            ("paper / ArcFace", *_ratios(THROUGHPUT)),
        ),
        (
            "Paper: WebFace42M, ResNet-100, batch 1024 on eight GPUs.",
            f"Here: random images, {settings['backbone']}, batch {settings['batch']}, "
            f"{settings['classes']:,} identities, {device}.",
            "The paper's procedure keeps the top 1, 5 or 100 % of the logits; the sparse head is "
            "this package's own.",
        ),
        label="table-throughput",
    )


def _fastest(record: Mapping[str, Any], name: str) -> float | None:
    """Speed of a head with the optimizer that suits it best; None if it could not be run."""
    rows = record["parts"]["end-to-end"]
    found = (row["facts"].get("images_per_s") for row in rows if row["name"] == name)
    return max(filter(None, found), default=None)


def _ratios(speeds: Mapping[str, float | None]) -> Iterable[Number]:
    whole = speeds["ArcFace"]
    for name in _BENCHMARKED:
        speed = speeds.get(name)
        yield Number(speed / whole if speed and whole else None, 3)


def _read_benchmark(path: Path) -> dict[str, Any]:
    remedy = f"in a checkout run `{BENCHMARK}` and give --results FILE"
    if not path.is_file():
        found = "a folder" if path.is_dir() else "not there"
        raise DataError(f"{path} is {found}, and throughput is not part of a result.json; {remedy}")
    try:
        record: dict[str, Any] = json.loads(read_regular(path, MOST_BENCHMARK_BYTES))
        rows, size = record["parts"]["end-to-end"], record["settings"]["classes"]
        if not all({"name", "facts"} <= row.keys() for row in rows) or not isinstance(size, int):
            raise KeyError("name, facts or classes")
        _ = record["settings"]["backbone"], record["settings"]["batch"], record["machine"]["device"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} has no part end-to-end ({error!r}); {remedy}") from error
    return record
