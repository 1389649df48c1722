"""One self-contained page: everything is inline, and only its own script may run.

Jinja2 templates in ``templates/`` hold the markup and escape every text; this module prepares their
content.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from qmargin.evaluation.result import HardPair, ProtocolInfo
from qmargin.files import MADE_BY
from qmargin.metrics.operating import ENOUGH_FALSE_ACCEPTS
from qmargin.report import plots, tables
from qmargin.report.journal import OUTCOMES, Journal
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import (
    LONGEST_TEXT,
    MISSING,
    cleaned,
    count,
    digits_to_differ,
    number,
    out_of,
    percent,
    percent_interval,
    rate_text,
)
from qmargin.report.systems import (
    Entry,
    PairedDifference,
    Panel,
    Repeats,
    margin_of,
    name_of,
)
from qmargin.report.table import Column, Table
from qmargin.report.verdicts import ONE_RUN, effect_text, plain_text, planned_verdicts

MOST_SHOWN = 12  # hardest pairs of each kind
NUM_EXAMPLES = 2  # pairs of each kind in the opening
FEW_LETTERS = 16  # of a name that stays on its line
NO_BREAK = "\u00a0"  # a space that stays on its line
EER_FACT = "equal error rate (EER)"


def render_page(
    title: str,
    panels: Sequence[Panel],
    differences: Sequence[list[PairedDifference]],
    *,
    repeats: Sequence[Repeats] = (),
    level: float = 0.95,
    media: MediaFolder | None = None,
    journals: Sequence[Journal] = (),
    data_note: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The whole page as text; ``differences`` has a list for each panel, ``notes`` are cautions."""
    style, script = (
        (files("qmargin.report") / "templates" / name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    whole, repeats = repeats, [each for each in repeats if each.has_seeds]
    # A protocol's verdict is about means where its systems have several runs.
    covered = {id(e) for each in repeats for group in each.systems.values() for e in group}
    single = [panel for panel in panels if not all(id(e) in covered for e in panel.entries)]
    dets = [plots.det_geometry(panel) for panel in panels]
    baselines = [_to_baseline(panel, differences[panel.index], repeats) for panel in panels]
    blocks: dict[str, Callable[[Panel], Any]] = {
        "data": lambda panel: (*tables.sufficiency_table(panel), plots.gauge),
        "det": lambda panel: (dets[panel.index], baselines[panel.index]),
        "scores": _scores,
        "points": lambda panel: (
            panel.entries,
            tables.tar_table(panel),
            tables.threshold_table(panel),
            tables.other_table(panel),
        ),
        "cost": _cost,
        "pairs": lambda panel: (
            _pairs(panel, differences[panel.index], level) if panel in single else None
        ),
        "groups": lambda panel: [_groups(e) for e in _leader_first(panel) if e.result.groups],
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
        ("", (tables.repeats_table(each), tables.mean_difference_table(each))) for each in repeats
    ]
    views["sparsity"] = [("", _sparsity(journals))] if journals else []
    verdicts = [_mean_verdict(each) for each in repeats]
    verdicts += [_verdict(panel, differences[panel.index], whole) for panel in single]
    views["next"] = [(v.title if len(verdicts) > 1 else "", v) for v in verdicts if v.steps]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            made_by=MADE_BY,
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            opening=_opening(panels, media, data_note),
            verdicts=verdicts,
            notes=notes,
            views=views,
            det_data=[det.data for det in dets],
        )
    )


@cache
def _environment() -> Environment:
    """Templates that escape every text and print no control characters."""

    def printable(value: Any) -> Any:
        """Clean every text that is not markup; it may come from untrusted files."""
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
    environment.globals.update(
        num_colours=plots.NUM_COLOURS, few_letters=FEW_LETTERS, margin_of=margin_of
    )
    environment.filters.update(
        short=cleaned,
        count=count,
        rate=rate_text,
        number=number,
        kept=_kept,
        place="{:.1f}".format,
        path=lambda points: Markup(plots.path_data(points)),  # numbers alone
        outline=outline,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _kept(text: str) -> Markup:
    """A sentence whose numbers stay on a line with their units, and names with their hyphens."""
    held = re.sub(r" (?=%)|(?<=\bp) (?=[=<])|(?<=p.[=<]) ", NO_BREAK, cleaned(text, LONGEST_TEXT))
    whole = Markup('<span class="few-letters">{}</span>').format
    return Markup(" ").join(
        whole(word) if "-" in word.strip("-") and len(word) <= FEW_LETTERS else escape(word)
        for word in held.split(" ")
    )


def _policy(style: str, script: str) -> str:
    """Content security policy: nothing is fetched; style and script are allowed by hash."""
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
    """The leading system, its numbers, and whether the data suffice to show it."""

    title: str
    protocol: ProtocolInfo
    leader: str
    value: str
    far: float | None
    words: str  # what the number means, in plain words
    facts: Sequence[tuple[str, str]] = ()
    caution: str = ""  # why the number is rough
    tied: Sequence[str] = ()  # the leader and all systems whose difference to it may be chance
    num_unknown: int = 0  # systems that cannot be compared with the leader
    rival: str = ""
    lead: str = ""
    num_runs: int = 1  # of all systems
    num_seeds: int = 1  # of the leader
    planned: Sequence[str] = ()  # comparisons that were fixed beforehand
    steps: Sequence[str] = ()  # what to do next

    @property
    def is_tie(self) -> bool:
        """Whether others may be as good as the leader."""
        return len(self.tied) > 1


Rivals = Mapping[str, PairedDifference]  # the leader minus each of the others


def _verdict(
    panel: Panel, differences: Sequence[PairedDifference], repeats: Sequence[Repeats]
) -> Verdict:
    """Verdict on single results."""
    leader, far = panel.leader(), panel.headline_far
    protocol, point, eer = leader.result.protocol, leader.point_at(far), leader.result.measures.eer
    start = (panel.title, protocol, leader.label)
    seen = (made.seen_from(leader.label) for made in differences if made.far == far)
    rivals = {made.second: made for made in seen if made.first == leader.label}
    own = [r for r in repeats if any(leader in entries for entries in r.systems.values())]
    planned = [line for one in own for line in planned_verdicts(one, far)]
    how = f"{100 * protocol.interval.level:g} % interval, {protocol.interval.method}"
    if far is None or point is None or point.tar is None or point.far is None:
        facts = [_interval_fact(eer.interval, how)]
        verdict = Verdict(
            *start, percent(eer.value), None, _eer_words(eer.value), facts, planned=planned
        )
        return _with_rivals(verdict, rivals, len(panel.entries) - 1)
    facts = [
        _interval_fact(point.interval, how),
        (f"{percent(eer.value)} %", EER_FACT),
        (rate_text(point.far), "achieved FAR"),
        (count(point.false_accepts), f"false accepts, {count(point.allowed)} allowed"),
        (leader.score_text(point.threshold), "threshold"),
    ]
    words = _words(point.far, point.tar, protocol)
    caution = _caution(panel.entries, far)
    verdict = Verdict(*start, percent(point.tar), far, words, facts, caution, planned=planned)
    verdict = _with_rivals(verdict, rivals, len(panel.entries) - 1)
    use = (
        f"To use {leader.label}, accept a pair if its score is at least {facts[-1][0]}, and set "
        "that threshold again on impostor pairs like those you expect."
    )
    return replace(verdict, steps=(*verdict.steps, use))


def _mean_verdict(repeats: Repeats) -> Verdict:
    """Verdict on means over runs."""
    far = repeats.headline_far
    leader, *others = repeats.ranked(far)
    values, mean_eer = repeats.values(leader, far), statistics.fmean(repeats.values(leader, None))
    entries, mean = repeats.systems[leader], statistics.fmean(values)
    rivals = {n: made for n in others if (made := repeats.difference(leader, n, far)) is not None}
    covers = "seeds and identities" if len(values) > 1 else ONE_RUN
    how = f"{100 * repeats.level:g} % interval of the mean, {covers}"
    facts = [_interval_fact(repeats.interval(leader, far), how)]
    if len(values) > 1:
        deviation = f"{100 * statistics.stdev(values):.2f} points"
        facts.append((deviation, f"standard deviation over {len(values)} seeds"))
    if far is not None:
        facts.append((f"{percent(mean_eer)} %", EER_FACT))
    protocol = entries[0].result.protocol
    verdict = Verdict(
        *(repeats.title, protocol, leader, percent(mean), far),
        _eer_words(mean) if far is None else _words(far, mean, protocol),
        facts,
        _caution([entry for group in repeats.systems.values() for entry in group], far),
        num_runs=sum(map(len, repeats.systems.values())),
        num_seeds=len(values),
        planned=planned_verdicts(repeats, far),
    )
    return _with_rivals(verdict, rivals, len(repeats.systems) - 1)


def _words(far: float, tar: float, protocol: ProtocolInfo) -> str:
    return f"At this threshold {plain_text(far, tar, protocol.num_impostors)}"


def _eer_words(eer: float) -> str:
    return (
        "At the threshold where both errors are equally frequent, "
        f"{out_of(eer, 'impostors')} are accepted and as large a share of genuine attempts refused."
    )


def _caution(entries: Sequence[Entry], far: float | None) -> str:
    """Why a number is rough: its threshold has too few false accepts."""
    points = [point for entry in entries if (point := entry.point_at(far)) is not None]
    fewest = min((point.false_accepts for point in points), default=ENOUGH_FALSE_ACCEPTS)
    if fewest >= ENOUGH_FALSE_ACCEPTS:
        return ""
    return f"rests on {fewest} false accept{'s' * (fewest != 1)}; {ENOUGH_FALSE_ACCEPTS} are needed"


def _interval_fact(ends: tuple[float, float] | None, how: str) -> tuple[str, str]:
    if ends is None:
        return MISSING, "no interval"
    return f"{percent_interval(ends, ' to ')} %", how


def _with_rivals(verdict: Verdict, rivals: Rivals, num_others: int) -> Verdict:
    """Add the comparison with the others: differences, intervals, p-values, order."""
    verdict = replace(verdict, num_unknown=num_others - len(rivals))
    if rivals:
        rival = min(rivals, key=lambda name: abs(rivals[name].difference))
        behind = {name for name, made in rivals.items() if made.reading == "first is better"}
        tied = (verdict.leader, *(name for name in rivals if name not in behind))
        verdict = replace(verdict, rival=rival, lead=effect_text(rivals[rival]), tied=tied)
    return replace(verdict, steps=_steps(verdict, rivals))


def _steps(verdict: Verdict, rivals: Rivals) -> tuple[str, ...]:
    """What to do next, the most urgent first."""
    steps, protocol = [], verdict.protocol
    if verdict.caution and verdict.far is not None:
        steps.append(
            f"Test more impostor pairs: {ENOUGH_FALSE_ACCEPTS} false accepts at FAR "
            f"{rate_text(verdict.far)} need {math.ceil(ENOUGH_FALSE_ACCEPTS / verdict.far):,} "
            f"pairs; there are {protocol.num_impostors:,}."
        )
    if verdict.num_unknown:
        steps.append(
            "Evaluate all systems on the same trials with --replicates: without paired replicates, "
            "a difference may be chance."
        )
    if verdict.is_tie:
        made = rivals[verdict.tied[1]]
        low, high = made.interval
        now = "" if protocol.num_subjects is None else f" (now {protocol.num_subjects:,})"
        more, much = f"test more identities{now}", "four times as many identities halve it"
        if made.run_share is not None and made.run_share > 0.5:
            more, much = (
                f"train with more seeds (now {verdict.num_seeds})",
                f"{100 * made.run_share:.0f} % of its variance comes from training",
            )
        steps.append(
            f"To break the tie, {more}: the interval of the difference to {verdict.tied[1]} is "
            f"{100 * (high - low):.2g} points wide, and {much}."
        )
    elif rivals and not verdict.num_unknown:
        steps.append(
            f"Check the lead of {verdict.leader} on your own data, with settings chosen there."
        )
    if rivals and verdict.num_seeds == 1:
        steps.append(
            "Train each system with several seeds: one run does not show how far runs differ."
        )
    if rivals and verdict.num_seeds > 1 and verdict.is_tie:
        steps.append("Choose among tied systems by time and memory.")
    return tuple(steps)


# -- sections -------------------------------------------------------------------------------------


def _opening(panels: Sequence[Panel], media: MediaFolder | None, note: str) -> dict[str, Any]:
    """The task in plain words, with easy and hard pairs of the first panel's leader."""
    leader = panels[0].leader()
    hardest, protocol = leader.result.hardest, leader.result.protocol
    kinds = {} if media is None or hardest is None else {
        "Easy: one identity": hardest.easy_genuine,
        "Easy: two identities": hardest.easy_impostors,
        "Hard: one identity": hardest.false_rejects,
        "Hard: two identities": hardest.false_accepts,
    }  # fmt: skip
    examples = {title: _shown(leader, _examples(pairs), media) for title, pairs in kinds.items()}
    return {
        "examples": {title: pairs for title, pairs in examples.items() if pairs},
        "protocol": protocol,
        "note": note,
        "num_panels": len(panels),
        "num_systems": len({entry.label for panel in panels for entry in panel.entries}),
    }


def _shown(
    entry: Entry, pairs: Sequence[HardPair], media: MediaFolder | None
) -> list[tuple[str, Any]]:
    """Score and both sides of pairs."""
    found, least = [], entry.score_digits
    digits = digits_to_differ((pair.score for pair in pairs), least, form="f")
    for pair in pairs:
        sides = [(key, media and media.embedded(key)) for key in (pair.enrol, pair.test)]
        found.append((entry.score_text(pair.score, digits), sides))
    return found


def _examples(pairs: Sequence[HardPair]) -> list[HardPair]:
    """A few pairs from different folders, because those of an identity look alike."""
    seen: set[str] = set()
    new: list[HardPair] = []
    others: list[HardPair] = []
    for pair in pairs:
        folders = {key.rpartition("/")[0] or key for key in (pair.enrol, pair.test)}
        (others if folders & seen else new).append(pair)
        seen |= folders
    return [*new, *others][:NUM_EXAMPLES]


def _leader_first(panel: Panel) -> list[Entry]:
    leader = panel.leader()
    return sorted(panel.entries, key=lambda entry: entry is not leader)


def _to_baseline(
    panel: Panel,
    differences: Sequence[PairedDifference],
    repeats: Sequence[Repeats],
) -> tuple[plots.Chart, str, str] | None:
    """Differences of all others to the best softmax loss, or to the leader where there is none.

    Of means over seeds where the panel's systems have several runs.
    """
    means = next(
        (r for r in repeats if any(panel.entries[0] in s for s in r.systems.values())), None
    )
    rows = []
    if means is not None:
        far, first = means.headline_far, {n: group[0] for n, group in means.systems.items()}
        ranked = means.ranked(far)
    else:
        far, first = panel.headline_far, {entry.label: entry for entry in panel.entries}
        sign = 1.0 if far is None else -1.0
        ranked = sorted(first, key=lambda name: sign * (first[name].observed(far) or 0.0))
    if not ranked:
        return None
    softmax = (n for n in ranked if (run := first[n].result.run) is not None and run.alpha == 1.0)
    baseline = next(softmax, ranked[0])
    for name in (name for name in ranked if name != baseline):
        if means is None:
            pairs = (made.seen_from(name) for made in differences if made.far == far)
            found = [d for d in pairs if (d.first, d.second) == (name, baseline)]
        else:
            found = [d for d in [means.difference(name, baseline, far)] if d is not None]
        colour = first[name].colour
        rows += [(name, colour, d.difference, d.interval, d.is_shown) for d in found]
    measure = "EER" if far is None else f"TAR at FAR {rate_text(far)}"
    return (plots.difference_chart(rows, measure), measure, baseline) if rows else None


def _scores(panel: Panel) -> list[tuple[Entry, Any]]:
    found = []
    for entry in panel.entries:
        point = entry.point_at(panel.headline_far)
        threshold = None if point is None else point.threshold
        found.append((entry, plots.histogram_chart(entry.result.histogram, threshold)))
    return found


def _cost(panel: Panel) -> dict[str, Any] | None:
    """Time and memory of training, and TAR over time of runs that were measured in training."""
    table, far = tables.cost_table(panel.entries), panel.headline_far
    systems: dict[str, list[Entry]] = {}
    for entry in panel.entries:
        if far is not None and entry.progress(far):
            systems.setdefault(name_of(entry.result), []).append(entry)
    if far is None or not systems:
        return None if table is None else {"table": table, "plot": None}
    colours = {name: entries[0].colour for name, entries in systems.items()}
    lines = [(colours[n], entry.progress(far)) for n, own in systems.items() for entry in own]
    return {
        "table": table,
        "plot": plots.time_chart(lines, f"TAR at FAR {rate_text(far)}"),
        "times": tables.time_table(systems, far),
        "entries": [{"colour": colour, "label": name} for name, colour in colours.items()],
    }


def _pairs(panel: Panel, differences: Sequence[PairedDifference], level: float) -> dict[str, Any]:
    """Differences at the headline FAR, all others folded away."""
    headline = panel.headline_far
    measure = "EER" if headline is None else f"TAR at FAR {rate_text(headline)}"
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
        "note": audit.note,
        "target": across(audit.far_target),
        "match": [None if rate is None else across(rate) for rate in match],
        "miss": [None if rate is None else beside(rate) for rate in miss],
    }


def _hardest(panel: Panel, media: MediaFolder | None) -> dict[str, Any] | None:
    """Pairs of the leading system first, those of others folded away."""
    systems = []
    for entry in _leader_first(panel):
        if (hardest := entry.result.hardest) is not None:
            kinds = {
                "False accepts: impostor pairs with the highest scores": hardest.false_accepts,
                "False rejects: genuine pairs with the lowest scores": hardest.false_rejects,
            }
            shown = [
                (title, _shown(entry, pairs[:MOST_SHOWN], media)) for title, pairs in kinds.items()
            ]
            systems.append((entry, shown))
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
        ends = (_last(journal.outcomes.get(name, ())) for name in OUTCOMES)
        shown = (*map(number, ends), number(journal.reach))
        rows.append((journal.name, number(means[-1] if means else None), largest, *shown))
    titles = ("Active at the end", "Largest of all steps", "Satisfied", "Target posterior", "Gap")
    heads = (Column("Run", "left"), *map(Column, (*titles, "Reach")))
    # journals of other programs have none of these
    kept = [i for i in range(len(heads)) if i < 3 or any(row[i] != MISSING for row in rows)]
    names = [journal.name for journal in journals]
    return {
        "plot": plots.support_chart(journals),
        "names": names,
        "entries": [{"colour": colour, "label": name} for colour, name in enumerate(names)],
        "outcomes": plots.outcome_charts(journals),
        "table": Table(
            "", tuple(heads[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows)
        ),
    }


def _last(values: Sequence[float | None]) -> float | None:
    """The last known of some values."""
    return next((value for value in reversed(values) if value is not None), None)
