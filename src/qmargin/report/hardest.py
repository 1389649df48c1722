"""The hardest errors: the highest impostors and the lowest genuine pairs, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

from qmargin.evaluation.result import HardPair
from qmargin.report.det import swatch
from qmargin.report.markup import Html, cleaned, joined, name_of, tag
from qmargin.report.media import MediaFolder, Medium
from qmargin.report.numbers import digits_to_differ, number
from qmargin.report.systems import Entry, Panel

MOST_SHOWN = 12  # pairs of each kind


def hardest_block(panel: Panel, media: MediaFolder | None) -> Html:
    """Pairs of the leading system, those of others folded away."""
    leader = panel.leader()
    others = [entry for entry in panel.entries if entry is not leader]
    parts = []
    for entry in (leader, *others):
        if entry.result.hardest is None:
            continue
        title = tag("span", swatch(entry.colour), name_of(entry.label), class_="who")
        body = _both_kinds(entry, media)
        if entry is leader:
            parts.append(joined([tag("h4", title), body]))
        else:
            parts.append(tag("details", tag("summary", title), body))
    if parts and media is None:
        words = "Keys only: build the report with --media ROOT to see or hear the pairs."
        parts.append(tag("p", words, class_="hint"))
    return joined(parts)


def _both_kinds(entry: Entry, media: MediaFolder | None) -> Html:
    hardest = entry.result.hardest
    if hardest is None:
        return Html("")
    kinds = (
        ("False accepts: impostors with the highest scores", hardest.false_accepts),
        ("False rejects: genuine pairs with the lowest scores", hardest.false_rejects),
    )
    lists = [tag("div", tag("h5", title), _pairs(pairs, media)) for title, pairs in kinds]
    return tag("div", *lists, class_="hardest with-media" if media else "hardest")


def _pairs(pairs: Sequence[HardPair], media: MediaFolder | None) -> Html:
    shown = pairs[:MOST_SHOWN]
    if not shown:
        return tag("p", "None were recorded.", class_="hint")
    digits = digits_to_differ(pair.score for pair in shown)
    return tag("ol", *[_pair(pair, media, digits) for pair in shown], class_="pairs")


def _pair(pair: HardPair, media: MediaFolder | None, digits: int) -> Html:
    score = tag("span", number(pair.score, digits), class_="score")
    sides = [_side(key, media) for key in (pair.enrol, pair.test)]
    return tag("li", tag("div", *sides, class_="sides"), score)


def _side(key: str, media: MediaFolder | None) -> Html:
    name = tag("figcaption", name_of(key))
    if media is None:
        return tag("figure", name)
    return tag("figure", _shown(media.embedded(key), key), name)


def _shown(medium: Medium, key: str) -> Html:
    if medium.kind == "image":
        return tag("img", src=medium.uri, alt=cleaned(key))
    if medium.kind == "audio":
        return tag(
            "audio", controls=True, preload="metadata", src=medium.uri, aria_label=cleaned(key)
        )
    return tag("div", medium.problem, class_="absent")
