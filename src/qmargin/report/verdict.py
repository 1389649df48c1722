"""The first thing on the page: who leads, by what number, and whether the data can carry it."""

from __future__ import annotations

import math

from qmargin.evaluation.result import TarPoint
from qmargin.metrics.sufficiency import ENOUGH_FALSE_ACCEPTS, rule_of_three, sufficiency
from qmargin.report.comparison import PairedDifference
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, joined, name_of, tag
from qmargin.report.numbers import (
    NOT_MEASURABLE,
    count,
    number,
    percent,
    percent_interval,
    power,
    probability,
    signed,
)
from qmargin.report.systems import Entry, Panel


def verdict_block(panel: Panel, differences: list[PairedDifference]) -> Html:
    """The headline number of a panel with its interval, FAR, false accepts and threshold."""
    leader, far = panel.leader(), panel.headline_far()
    point = None if far is None else leader.point_at(far)
    if far is None or point is None:
        return tag("div", _trials_line(panel), _eer_verdict(leader), class_="verdict")
    headline = tag(
        "p",
        tag("strong", name_of(leader.label)),
        " accepts ",
        tag("strong", f"{percent(point.tar)} %", class_="figure"),
        " of genuine pairs at a false accept rate of ",
        tag("strong", power(far)),
        class_="headline",
    )
    parts = [_trials_line(panel), headline, _facts_of(point, leader)]
    parts.append(_lead_line(panel, differences, leader, far))
    return tag("div", *parts, class_="verdict")


def sufficiency_block(panel: Panel) -> Html:
    """For each target, how many false accepts the impostors allow, against the thirty needed."""
    sizes = sorted({entry.result.protocol.num_impostors for entry in panel.entries})
    rows = [_sufficiency_row(far, size) for size in sizes for far in panel.fars]
    head = ("Target FAR", "False accepts allowed", "<Against 30", "<Verdict")
    words = " or ".join(count(size) for size in sizes)
    table = data_table(head, rows, f"{words} impostor trials: what each FAR can rest on")
    smallest = min(sizes)
    note = tag(
        "p",
        "The smallest FAR that can be measured is ",
        tag("b", power(1.0 / smallest)),
        ". If no impostor at all is accepted, the FAR is below ",
        tag("b", power(rule_of_three(smallest))),
        " with 95 % confidence, not zero.",
        class_="hint",
    )
    return joined([table, note])


def status_badge(status: str, allowed: int) -> Html:
    """A word, not only a colour, for how far a number can be trusted."""
    kind = {"ok": "ok", "few": "warn"}.get(status, "bad")
    words = {
        "ok": "enough",
        "few": f"only {count(allowed)} of {ENOUGH_FALSE_ACCEPTS}",
        NOT_MEASURABLE: NOT_MEASURABLE,
    }
    return tag("span", words.get(status, status), class_=f"badge {kind}")


def _trials_line(panel: Panel) -> Html:
    protocol = panel.first.protocol
    parts = [
        name_of(panel.title),
        f"{count(protocol.num_genuine)} genuine and {count(protocol.num_impostors)} impostor pairs",
    ]
    if protocol.num_subjects is not None:
        parts.append(f"{count(protocol.num_subjects)} subjects")
    return tag("p", joined(parts, " · "), class_="kicker")


def _facts_of(point: TarPoint, entry: Entry) -> Html:
    interval = entry.result.protocol.interval
    shown = percent_interval(point.interval).replace("\u2013", " to ")
    how = f"{100 * interval.level:g} % interval, {interval.method}" if shown else "no interval"
    far = "-" if point.far is None else power(point.far)
    facts = (
        (f"{shown} %" if shown else "-", how),
        (far, "achieved FAR"),
        (count(point.false_accepts), f"false accepts, {count(point.allowed)} allowed"),
        (number(point.threshold), "threshold"),
    )
    return tag(
        "dl",
        *[tag("div", tag("dt", name), tag("dd", value)) for value, name in facts],
        class_="facts",
    )


def _eer_verdict(leader: Entry) -> Html:
    eer = leader.result.metrics.eer
    return tag(
        "p",
        tag("strong", name_of(leader.label)),
        " has an equal error rate of ",
        tag("strong", f"{percent(eer.value)} %", class_="figure"),
        "; no FAR that was asked for is measurable with these trials",
        class_="headline",
    )


def _lead_line(
    panel: Panel, differences: list[PairedDifference], leader: Entry, far: float
) -> Html:
    if len(panel.entries) < 2:
        return Html("")
    rivals = [
        found.seen_from(leader.label)
        for found in differences
        if found.far == far and leader.label in (found.first, found.second)
    ]
    if not rivals:
        return tag(
            "p",
            "Whether it is ahead by more than chance is unknown: there are no paired replicates.",
            class_="lead",
        )
    nearest = min(rivals, key=lambda found: found.difference)
    low, high = nearest.interval
    is_clear = nearest.adjusted < 0.05 and low > 0.0
    p_words = f"p = {probability(nearest.adjusted)}".replace("= <", "<")
    words = "Ahead of " if is_clear else "Not shown to be ahead of "
    return tag(
        "p",
        words,
        tag("b", name_of(nearest.second)),
        f": {signed(100 * nearest.difference)} points (interval {signed(100 * low)} to "
        f"{signed(100 * high)}, {p_words})",
        class_="lead",
    )


def _sufficiency_row(far: float, size: int) -> Html:
    found = sufficiency(far, size)
    return tag(
        "tr",
        tag("th", power(far), scope="row"),
        tag("td", count(found.allowed)),
        tag("td", _gauge(found.allowed), class_="wide"),
        tag("td", status_badge(found.status, found.allowed), class_="left"),
    )


def _gauge(allowed: int) -> Html:
    """A bar on a logarithmic scale from 1 to 1000, with a line at thirty."""
    share = min(math.log10(max(allowed, 1)) / 3.0, 1.0)
    line = math.log10(ENOUGH_FALSE_ACCEPTS) / 3.0
    kind = "enough" if allowed >= ENOUGH_FALSE_ACCEPTS else "short"
    return tag(
        "svg",
        tag("rect", x=0, y=4, width=200, height=6, rx=3, class_="gauge-back"),
        tag("rect", x=0, y=4, width=f"{200 * share:.1f}", height=6, rx=3, class_=f"gauge {kind}"),
        tag("path", d=f"M{200 * line:.1f} 0V14", class_="gauge-mark"),
        viewBox="0 0 200 14",
        class_="gauge-drawing",
        aria_hidden="true",
    )
