"""One self-contained page: everything inline, nothing fetched, only its own script may run.

Jinja2 templates in ``templates/`` hold the markup and escape every text; this module decides what
they show.
"""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qmargin.evaluation.result import HardPair, ProtocolInfo
from qmargin.files import MADE_BY
from qmargin.report import plots, tables
from qmargin.report.journal import Journal
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import (
    LONGEST_TEXT,
    MISSING,
    cleaned,
    count,
    digits_to_differ,
    number,
    percent,
    percent_interval,
    power,
    probability,
    signed,
    signed_interval,
)
from qmargin.report.systems import (
    Entry,
    PairedDifference,
    Panel,
    Repeats,
    difference_of_means,
    find_repeats,
    interval_of_mean,
    margin_of,
)
from qmargin.report.table import Column, Table

MOST_SHOWN = 12  # hardest pairs of each kind


def render_page(
    title: str,
    panels: Sequence[Panel],
    differences: Sequence[list[PairedDifference]],
    *,
    level: float = 0.95,
    media: MediaFolder | None = None,
    journals: Sequence[Journal] = (),
) -> str:
    """The whole page as text; ``differences`` has a list for each panel."""
    style, script = (
        (files("qmargin.report") / "templates" / name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    repeats = find_repeats(panels)
    dets = [plots.det_geometry(panel) for panel in panels]
    blocks: dict[str, Callable[[Panel], Any]] = {
        "data": lambda panel: (*tables.sufficiency_table(panel), plots.gauge),
        "det": lambda panel: dets[panel.index],
        "scores": _scores,
        "points": lambda panel: (
            panel.entries,
            tables.tar_table(panel),
            tables.threshold_table(panel),
            tables.other_table(panel),
        ),
        "pairs": lambda panel: _pairs(panel, differences[panel.index], level),
        "groups": lambda panel: [_groups(e) for e in panel.entries if e.result.groups is not None],
        "hardest": lambda panel: _hardest(panel, media),
        "calibration": lambda panel: [
            (entry, plots.reliability_chart(found.reliability), found)
            for entry in panel.entries
            if (found := entry.result.calibration) is not None
        ],
        "protocol": lambda panel: panel.entries,
    }
    views: dict[str, list[tuple[str, Any]]] = {}  # headings and views; no views, no section
    for key, block in blocks.items():
        found = [(panel.title if len(panels) > 1 else "", block(panel)) for panel in panels]
        views[key] = [(heading, view) for heading, view in found if view]
    views["repeats"] = [
        ("", (tables.repeats_table(each), tables.mean_difference_table(each, level)))
        for each in repeats
    ]
    views["sparsity"] = [("", _sparsity(journals))] if journals else []
    # A protocol's verdict is about means where its systems have several runs.
    covered = {id(e) for each in repeats for group in each.systems.values() for e in group}
    verdicts = [_mean_verdict(each, level) for each in repeats] + [
        _verdict(panel, differences[panel.index])
        for panel in panels
        if not all(id(entry) in covered for entry in panel.entries)
    ]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            made_by=MADE_BY,
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            verdicts=verdicts,
            views=views,
            det_data=[det.data for det in dets],
        )
    )


@cache
def _environment() -> Environment:
    """Templates that escape every text and print no control characters."""

    def printable(value: Any) -> Any:
        """Clean every text that is not markup; it may come from a file of others."""
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return cleaned(value, LONGEST_TEXT) if is_text else value

    def outline(band: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
        return [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]

    environment = Environment(
        loader=PackageLoader("qmargin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printable,
    )
    environment.globals.update(num_colours=plots.NUM_COLOURS, margin_of=margin_of)
    environment.filters.update(
        short=cleaned,
        count=count,
        power=power,
        number=number,
        place="{:.1f}".format,
        path=lambda points: Markup(plots.path_data(points)),  # numbers alone
        outline=outline,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _policy(style: str, script: str) -> str:
    """Nothing may be fetched; only this style and this script count, known by their hashes."""
    style, script = (
        base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        for text in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )


# -- verdict --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Which system leads, by what number, and whether the data can carry it."""

    title: str
    protocol: ProtocolInfo
    leader: str
    value: str
    far: float | None
    facts: Sequence[tuple[str, str]] = ()
    rival: str = ""
    lead: str = ""
    is_ahead: bool = False
    has_rivals: bool = False
    num_runs: int = 1


def _verdict(panel: Panel, differences: Sequence[PairedDifference]) -> Verdict:
    """Of single results."""
    leader, far = panel.leader(), panel.headline_far
    protocol, point = leader.result.protocol, leader.point_at(far)
    start = (panel.title, panel.entries[0].result.protocol, leader.label)
    if far is None or point is None:
        return Verdict(*start, percent(leader.result.measures.eer.value), None)
    how = f"{100 * protocol.interval.level:g} % interval, {protocol.interval.method}"
    facts = (
        _interval_fact(point.interval, how),
        (MISSING if point.far is None else power(point.far), "achieved FAR"),
        (count(point.false_accepts), f"false accepts, {count(point.allowed)} allowed"),
        (number(point.threshold), "threshold"),
    )
    rivals = {}
    for made in (made.seen_from(leader.label) for made in differences if made.far == far):
        if made.first == leader.label:
            is_ahead = made.is_shown and made.difference > 0.0
            rivals[made.second] = (made.difference, made.interval, made.adjusted, is_ahead)
    verdict = Verdict(*start, percent(point.tar), far, facts, has_rivals=len(panel.entries) > 1)
    return _with_rival(verdict, rivals)


def _mean_verdict(repeats: Repeats, level: float) -> Verdict:
    """Of means over runs."""
    far = repeats.headline_far
    leader, *others = repeats.ranked(far)
    values = repeats.values(leader, far)
    verdict = Verdict(
        *(repeats.title, repeats.systems[leader][0].result.protocol, leader),
        *(percent(statistics.fmean(values)), far),
        has_rivals=bool(others),
        num_runs=sum(map(len, repeats.systems.values())),
    )
    if far is None:
        return verdict
    how = f"{100 * level:g} % interval of the mean over subjects"
    facts = [_interval_fact(interval_of_mean(repeats, leader, far, level=level), how)]
    if len(values) > 1:
        deviation = f"{100 * statistics.stdev(values):.2f} points"
        facts.append((deviation, f"standard deviation over {len(values)} seeds"))
    rivals = {}
    for name in others:
        if made := difference_of_means(repeats, leader, name, far, level=level):
            ends = (made.low, made.high)
            rivals[name] = (made.difference, ends, made.p_value, made.low > 0.0)
    return _with_rival(replace(verdict, facts=facts), rivals)


def _interval_fact(ends: tuple[float, float] | None, how: str) -> tuple[str, str]:
    if ends is None:
        return MISSING, "no interval"
    return f"{percent_interval(ends, ' to ')} %", how


def _with_rival(
    verdict: Verdict, rivals: Mapping[str, tuple[float, tuple[float, float], float, bool]]
) -> Verdict:
    """Add the nearest rival, of each the difference, its interval, its p-value and the verdict."""
    if not rivals:
        return verdict
    rival = min(rivals, key=lambda name: rivals[name][0])
    difference, ends, p_value, is_ahead = rivals[rival]
    words = f"p = {probability(p_value)}".replace("= <", "<")
    lead = f"{signed(100 * difference)} points (interval {signed_interval(*ends)}, {words})"
    return replace(verdict, rival=rival, lead=lead, is_ahead=is_ahead)


# -- sections -------------------------------------------------------------------------------------


def _scores(panel: Panel) -> list[tuple[Entry, Any]]:
    found = []
    for entry in panel.entries:
        point = entry.point_at(panel.headline_far)
        threshold = None if point is None else point.threshold
        found.append((entry, plots.histogram_chart(entry.result.histogram, threshold)))
    return found


def _pairs(panel: Panel, differences: Sequence[PairedDifference], level: float) -> dict[str, Any]:
    """Differences at the headline FAR, all others folded away."""
    headline = panel.headline_far
    measure = "EER" if headline is None else f"TAR at FAR {power(headline)}"
    found = []
    for is_folded, start in ((False, f"Difference of {measure}"), (True, "Differences")):
        own = [made for made in differences if (made.far != headline) == is_folded]
        if own:
            title = f"{start} in percentage points, first minus second"
            table = tables.difference_table(own, title, level=level)
            table = replace(table, notes=()) if is_folded else table  # the first one has it
            found.append(
                (table, own, plots.whisker_scale(made.interval for made in own), is_folded)
            )
    return {"tables": found, "num_systems": len(panel.entries)}


def _groups(entry: Entry) -> dict[str, Any]:
    """The audit of a system, with the places of its dots."""
    audit = entry.result.groups
    assert audit is not None
    match = [plots.rate_or_bound(row.fmr, row.num_impostors) for row in audit.rows]
    miss = [plots.rate_or_bound(row.fnmr, row.num_genuine) for row in audit.rows]
    across, beside = plots.group_scale([*match, audit.far_target]), plots.group_scale(miss)
    return {
        "entry": entry,
        "rows": audit.rows,
        "table": tables.group_table(audit),
        "spreads": tables.spread_table(audit),
        "target": across(audit.far_target),
        "match": [None if rate is None else across(rate) for rate in match],
        "miss": [None if rate is None else beside(rate) for rate in miss],
    }


def _hardest(panel: Panel, media: MediaFolder | None) -> dict[str, Any] | None:
    """Pairs of the leading system first, those of others folded away."""

    def shown(pairs: Sequence[HardPair]) -> list[tuple[str, Any]]:
        """Score and both sides of the hardest pairs."""
        found, digits = [], digits_to_differ(pair.score for pair in pairs[:MOST_SHOWN])
        for pair in pairs[:MOST_SHOWN]:
            sides = [(key, media and media.embedded(key)) for key in (pair.enrol, pair.test)]
            found.append((number(pair.score, digits), sides))
        return found

    leader = panel.leader()
    systems = []
    for entry in sorted(panel.entries, key=lambda entry: entry is not leader):
        if (hardest := entry.result.hardest) is not None:
            kinds = {
                "False accepts: impostor pairs with the highest scores": hardest.false_accepts,
                "False rejects: genuine pairs with the lowest scores": hardest.false_rejects,
            }
            systems.append((entry, [(title, shown(pairs)) for title, pairs in kinds.items()]))
    return {"systems": systems, "has_media": media is not None} if systems else None


def _sparsity(journals: Sequence[Journal]) -> dict[str, Any]:
    """All runs in one drawing, and their numbers in a table."""
    rows = []
    for journal in journals:
        means = [value for value in journal.mean if value is not None]
        peaks = [value for value in journal.largest if value is not None]
        largest = count(int(max(peaks))) if peaks else MISSING
        if peaks and journal.num_classes:
            largest += f" ({100 * max(peaks) / journal.num_classes:.3g} %)"
        rows.append((journal.name, number(means[-1] if means else None), largest))
    heads = (Column("Run", "left"), Column("Mean at the end"), Column("Largest of all steps"))
    names = [journal.name for journal in journals]
    return {
        "plot": plots.support_chart(journals),
        "names": names,
        "entries": [{"colour": colour, "label": name} for colour, name in enumerate(names)],
        "table": Table("", heads, tuple(rows)),
    }
