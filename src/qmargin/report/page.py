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

from qmargin.evaluation.result import HardPair, ProtocolInfo, Result, RunInfo
from qmargin.files import MADE_BY
from qmargin.report.comparison import (
    PairedDifference,
    Repeats,
    difference_of_means,
    find_repeats,
    interval_of_mean,
)
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
)
from qmargin.report.plots import (
    det_geometry,
    gauge,
    group_scale,
    histogram_chart,
    path_data,
    rate_or_bound,
    reliability_chart,
    support_chart,
    whisker_scale,
)
from qmargin.report.systems import NUM_COLOURS, Entry, Panel, margin_of
from qmargin.report.table import Column, Table
from qmargin.report.tables import (
    difference_table,
    group_table,
    mean_difference_table,
    other_table,
    repeats_table,
    spread_table,
    sufficiency_table,
    tar_table,
    threshold_table,
)

MOST_SHOWN = 12  # hardest pairs of each kind
SIGNS = (  # of systems, beside the colour, around the origin
    "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0 -5 0Z",
    "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "M0 -5.5L5.5 4.5H-5.5Z",
    "M0 -6L6 0L0 6L-6 0Z",
    "M0 5.5L5.5 -4.5H-5.5Z",
    "M-5 -2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
    "M0 -6L5.7 -1.9L3.5 4.9H-3.5L-5.7 -1.9Z",
    "M-6 -3H6V3H-6Z",
)


@dataclass(frozen=True)
class PageContent:
    """What goes on a page; ``differences`` has a list for each panel."""

    title: str
    panels: Sequence[Panel]
    differences: Sequence[list[PairedDifference]]
    level: float = 0.95
    media: MediaFolder | None = None
    journals: Sequence[Journal] = ()


def render_page(content: PageContent) -> str:
    """The whole page as text."""
    style, script = _asset("page.css"), _asset("page.js")
    plots = [det_geometry(panel) for panel in content.panels]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=content.title,
            made_by=MADE_BY,
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            verdicts=_verdicts(content),
            views=_views(content, {"det": lambda panel: plots[panel.index]}),
            det_data=[plot.data for plot in plots],
        )
    )


@cache
def _environment() -> Environment:
    """Templates that escape every text and print no control characters."""
    environment = Environment(
        loader=PackageLoader("qmargin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters.update(
        short=cleaned,
        count=count,
        power=power,
        place="{:.1f}".format,
        path=lambda points: Markup(path_data(points)),  # numbers alone
        outline=_outline,
        series=lambda colour: f"c{colour % NUM_COLOURS}",
        stroke=_stroke,
        sign=lambda colour: SIGNS[colour % len(SIGNS)],
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _printable(value: Any) -> Any:
    """Clean every text that is not markup; it may come from a file of others."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return cleaned(value, LONGEST_TEXT) if is_text else value


def _outline(band: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    upper = [(x, high) for x, _, high in band]
    return upper + [(x, low) for x, low, _ in reversed(band)]


def _stroke(colour: int) -> str:
    """Classes of a system's line; beyond the colours, dashes tell systems apart."""
    dash = f" dash{colour // NUM_COLOURS % 3}" if colour >= NUM_COLOURS else ""
    return f"c{colour % NUM_COLOURS}{dash}"


def _asset(name: str) -> str:
    return (files("qmargin.report") / "templates" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing may be fetched; only this style and this script count, known by their hashes."""

    def fingerprint(text: str) -> str:
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"

    rules = (
        "default-src 'none'",
        f"style-src {fingerprint(style)}",
        f"script-src {fingerprint(script)}",
        "img-src data:",
        "media-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _views(
    content: PageContent, blocks: Mapping[str, Callable[[Panel], Any]]
) -> dict[str, list[tuple[str, Any]]]:
    """What the sections of the page show: by key, headings and views; no views, no section."""
    panels, pairs, level = content.panels, content.differences, content.level
    blocks = {
        **blocks,
        "data": _data,
        "scores": _scores,
        "points": _points,
        "pairs": lambda panel: _pairs(panel, pairs[panel.index], level),
        "groups": _groups,
        "hardest": lambda panel: _hardest(panel, content.media),
        "calibration": _calibration,
        "protocol": lambda panel: [_facts(entry) for entry in panel.entries],
    }
    views: dict[str, list[tuple[str, Any]]] = {
        key: [
            (panel.title if len(panels) > 1 else "", view)
            for panel in panels
            if (view := block(panel))
        ]
        for key, block in blocks.items()
    }
    views["repeats"] = [("", _repeats(found, level)) for found in find_repeats(panels)]
    views["sparsity"] = [("", _sparsity(content.journals))] if content.journals else []
    return views


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


def _verdicts(content: PageContent) -> list[Verdict]:
    """Of every protocol: of means where systems have several runs, else of single results."""
    repeated = find_repeats(content.panels)
    found = [_mean_verdict(repeats, content.level) for repeats in repeated]
    covered = {id(e) for repeats in repeated for group in repeats.systems.values() for e in group}
    for panel, differences in zip(content.panels, content.differences, strict=True):
        if not all(id(entry) in covered for entry in panel.entries):
            found.append(_verdict(panel, differences))
    return found


def _verdict(panel: Panel, differences: Sequence[PairedDifference]) -> Verdict:
    leader, far = panel.leader(), panel.headline_far()
    point = None if far is None else leader.point_at(far)
    start = (panel.title, panel.first.protocol, leader.label)
    if far is None or point is None:
        return Verdict(*start, percent(leader.result.measures.eer.value), None)
    interval = leader.result.protocol.interval
    shown = percent_interval(point.interval).replace("\u2013", " to ")
    how = f"{100 * interval.level:g} % interval, {interval.method}" if shown else "no interval"
    facts = (
        (f"{shown} %" if shown else MISSING, how),
        (MISSING if point.far is None else power(point.far), "achieved FAR"),
        (count(point.false_accepts), f"false accepts, {count(point.allowed)} allowed"),
        (number(point.threshold), "threshold"),
    )
    rivals = [
        made.seen_from(leader.label)
        for made in differences
        if made.far == far and leader.label in (made.first, made.second)
    ]
    verdict = Verdict(*start, percent(point.tar), far, facts, has_rivals=len(panel.entries) > 1)
    if not rivals:
        return verdict
    nearest = min(rivals, key=lambda made: made.difference)
    return replace(
        verdict,
        rival=nearest.second,
        lead=_lead(nearest.difference, nearest.interval, nearest.adjusted),
        is_ahead=nearest.is_shown and nearest.difference > 0.0,
    )


def _mean_verdict(repeats: Repeats, level: float) -> Verdict:
    far = repeats.headline_far
    ranked = repeats.ranked(far)
    leader = ranked[0]
    values = repeats.values(leader, far)
    verdict = Verdict(
        repeats.title,
        repeats.systems[leader][0].result.protocol,
        leader,
        percent(statistics.fmean(values)),
        far,
        has_rivals=len(ranked) > 1,
        num_runs=sum(map(len, repeats.systems.values())),
    )
    if far is None:
        return verdict
    ends = interval_of_mean(repeats, leader, far, level=level)
    shown = percent_interval(ends).replace("\u2013", " to ")
    about = f"{100 * level:g} % interval of the mean over subjects" if shown else "no interval"
    facts = [(f"{shown} %" if shown else MISSING, about)]
    if len(values) > 1:
        deviation = f"{100 * statistics.stdev(values):.2f} points"
        facts.append((deviation, f"standard deviation over {len(values)} seeds"))
    made = {name: difference_of_means(repeats, leader, name, far, level=level) for name in ranked}
    rivals = {name: found for name, found in made.items() if found is not None and name != leader}
    verdict = replace(verdict, facts=facts)
    if not rivals:
        return verdict
    rival = min(rivals, key=lambda name: rivals[name].difference)
    nearest = rivals[rival]
    return replace(
        verdict,
        rival=rival,
        lead=_lead(nearest.difference, (nearest.low, nearest.high), nearest.p_value),
        is_ahead=nearest.low > 0.0,
    )


def _lead(difference: float, interval: tuple[float, float], p_value: float) -> str:
    low, high = (signed(100 * end) for end in interval)
    words = f"p = {probability(p_value)}".replace("= <", "<")
    return f"{signed(100 * difference)} points (interval {low} to {high}, {words})"


# -- sections -------------------------------------------------------------------------------------


def _repeats(repeats: Repeats, level: float) -> dict[str, Any]:
    return {
        "means": repeats_table(repeats),
        "differences": mean_difference_table(repeats, level),
    }


def _data(panel: Panel) -> dict[str, Any]:
    table, allowed = sufficiency_table(panel)
    return {"table": table, "allowed": allowed, "gauges": list(map(gauge, allowed))}


def _scores(panel: Panel) -> list[tuple[Entry, Any]]:
    far = panel.headline_far()
    found = []
    for entry in panel.entries:
        point = None if far is None else entry.point_at(far)
        threshold = None if point is None else point.threshold
        found.append((entry, histogram_chart(entry.result.histogram, threshold)))
    return found


def _points(panel: Panel) -> dict[str, Any]:
    return {
        "entries": panel.entries,
        "tars": tar_table(panel),
        "thresholds": threshold_table(panel),
        "others": other_table(panel),
    }


def _pairs(panel: Panel, differences: Sequence[PairedDifference], level: float) -> dict[str, Any]:
    """Differences at the headline FAR, all others folded away."""
    if not differences:
        problem = "One system only: give several results on the same trials to compare them."
        if len(panel.entries) > 1:
            problem = (
                "These systems cannot be compared in pairs: they need the same trials, subjects, "
                "rule and seed, and replicates (evaluate with --replicates)."
            )
        return {"problem": problem, "tables": []}
    headline = panel.headline_far()
    measure = "EER" if headline is None else f"TAR at FAR {power(headline)}"
    titles = (
        f"Difference of {measure} in percentage points, first minus second",
        "Differences in percentage points, first minus second",
    )
    tables = []
    for is_folded, title in enumerate(titles):
        found = [made for made in differences if (made.far != headline) == bool(is_folded)]
        if found:
            table = difference_table(found, title, level=level)
            table = replace(table, notes=()) if is_folded else table  # the first one has it
            scale = whisker_scale(made.interval for made in found)
            tables.append((table, found, scale, bool(is_folded)))
    return {"problem": "", "tables": tables}


def _groups(panel: Panel) -> list[dict[str, Any]]:
    """The audit of each system that has one, with the places of its dots."""
    views = []
    for entry in panel.entries:
        audit = entry.result.groups
        if audit is None:
            continue
        match = [rate_or_bound(row.fmr, row.num_impostors) for row in audit.rows]
        miss = [rate_or_bound(row.fnmr, row.num_genuine) for row in audit.rows]
        across, beside = group_scale([*match, audit.far_target]), group_scale(miss)
        views.append(
            {
                "entry": entry,
                "rows": audit.rows,
                "table": group_table(audit),
                "spreads": spread_table(audit),
                "target": across(audit.far_target),
                "match": [None if rate is None else across(rate) for rate in match],
                "miss": [None if rate is None else beside(rate) for rate in miss],
            }
        )
    return views


def _hardest(panel: Panel, media: MediaFolder | None) -> dict[str, Any] | None:
    """Pairs of the leading system first, those of others folded away."""
    leader = panel.leader()
    systems = []
    for entry in (leader, *(entry for entry in panel.entries if entry is not leader)):
        hardest = entry.result.hardest
        if hardest is not None:
            kinds = (
                (
                    "False accepts: impostor pairs with the highest scores",
                    _hard_pairs(hardest.false_accepts, media),
                ),
                (
                    "False rejects: genuine pairs with the lowest scores",
                    _hard_pairs(hardest.false_rejects, media),
                ),
            )
            systems.append({"entry": entry, "kinds": kinds})
    return {"systems": systems, "has_media": media is not None} if systems else None


def _hard_pairs(pairs: Sequence[HardPair], media: MediaFolder | None) -> list[dict[str, Any]]:
    shown = pairs[:MOST_SHOWN]
    digits = digits_to_differ(pair.score for pair in shown)
    return [
        {
            "score": number(pair.score, digits),
            "sides": [
                (key, None if media is None else media.embedded(key))
                for key in (pair.enrol, pair.test)
            ],
        }
        for pair in shown
    ]


def _sparsity(journals: Sequence[Journal]) -> dict[str, Any]:
    """All runs in one drawing, and their numbers in a table."""
    rows = []
    for journal in journals:
        means = [value for value in journal.mean if value is not None]
        peaks = [value for value in journal.largest if value is not None]
        largest = count(int(max(peaks))) if peaks else MISSING
        if peaks and journal.num_classes:
            largest += f" ({100 * max(peaks) / journal.num_classes:.3g} %)"
        rows.append((journal.name, number(means[-1]) if means else MISSING, largest))
    heads = ("Mean at the end", "Largest of all steps")
    names = [journal.name for journal in journals]
    return {
        "plot": support_chart(journals),
        "names": names,
        "entries": [{"colour": colour, "label": name} for colour, name in enumerate(names)],
        "table": Table("", (Column("Run", "left"), *map(Column, heads)), tuple(rows)),
    }


def _calibration(panel: Panel) -> list[tuple[Entry, Any, str]]:
    charts = []
    for entry in panel.entries:
        found, measures = entry.result.calibration, entry.result.measures
        if found is not None:
            sign = "+" if found.offset >= 0.0 else "\u2212"
            words = (
                f"Cllr {number(measures.cllr.value)}, minCllr {number(measures.min_cllr.value)}; "
                f"LLR = {number(found.scale)} \u00d7 score {sign} {number(abs(found.offset))}"
            )
            charts.append((entry, reliability_chart(found.reliability), words))
    return charts


# -- protocol, files and run ----------------------------------------------------------------------


def _facts(entry: Entry) -> dict[str, Any]:
    result = entry.result
    return {
        "entry": entry,
        "facts": _protocol_facts(result),
        "sources": result.sources,
        "run": [] if result.run is None else _run_facts(result.run),
        "card": list((result.system.model_card or {}).items()),
    }


def _protocol_facts(result: Result) -> list[tuple[str, str]]:
    protocol, interval = result.protocol, result.protocol.interval
    how = interval.method
    if interval.method.endswith("bootstrap"):
        how += f", {count(interval.num_replicates)} replicates, seed {interval.seed}"
    if interval.method != "none":
        how += f", level {interval.level:g}"
    mirrored = {"sum": "added", "none": "not used"}
    facts = (
        ("Protocol", protocol.name),
        ("Kind", protocol.kind),
        ("Scoring", protocol.scoring),
        ("Mirror images", mirrored.get(protocol.flip or "")),
        ("Pooling", protocol.pooling),
        ("Rule for thresholds", protocol.rule),
        ("Trials", count(protocol.num_trials)),
        ("Genuine", count(protocol.num_genuine)),
        ("Impostor", count(protocol.num_impostors)),
        ("Subjects", "unknown" if protocol.num_subjects is None else count(protocol.num_subjects)),
        ("Intervals", how),
        ("Note", interval.note),
        ("Evaluated", result.created),
        ("Command", result.command),
        ("qmargin", result.qmargin),
        ("Trials, SHA-256", protocol.data_sha256 or "unknown, the trials have no keys"),
        *(("Note on the trials", note) for note in result.notes),
    )
    return [(name, text) for name, text in facts if text]


def _run_facts(run: RunInfo) -> list[tuple[str, str]]:
    kinds, values = margin_of(run)
    divergence = run.divergence if run.alpha is None else f"{run.divergence} {run.alpha:g}"
    facts: tuple[tuple[str, Any], ...] = (
        ("Arm", run.title if run.title == run.arm else f"{run.title} ({run.arm})"),
        ("Divergence", divergence),
        ("Margin", f"{kinds} {values}".strip()),
        ("Scale", None if run.scale is None else f"{run.scale:g}"),
        ("Seed", str(run.seed)),
        ("Epochs", None if run.epochs is None else f"{run.epochs:g}"),
        ("Steps", None if run.steps is None else count(run.steps)),
        ("Classes", None if run.num_classes is None else count(run.num_classes)),
        ("Training time", None if run.train_seconds is None else f"{run.train_seconds:,.0f} s"),
        ("Device", run.device),
        ("Recipe, SHA-256", run.recipe_sha256),
        ("Weights, SHA-256", run.checkpoint_sha256),
        ("Trained with qmargin", run.code_version),
    )
    return [(name, text) for name, text in facts if text]
