"""Where the numbers come from: protocol, fingerprints of files, and what the system is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qmargin.evaluation.result import Result
from qmargin.report.det import swatch
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, cleaned, joined, name_of, tag, text_of
from qmargin.report.numbers import count
from qmargin.report.systems import Entry, Panel

_NAMES = {
    "alpha": ("alpha", "loss.alpha"),
    "scale": ("scale", "loss.scale", "s"),
    "margin": ("margin", "loss.margin", "m"),
}


@dataclass(frozen=True)
class LossSettings:
    """The three numbers of the paper's tables; None where the card does not say."""

    alpha: float | None = None
    scale: float | None = None
    margin: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether the card says any of them."""
        return any(value is not None for value in (self.alpha, self.scale, self.margin))


def loss_settings(card: Mapping[str, str] | None) -> LossSettings:
    """Alpha, scale and margin as a model card gives them.

    Examples:
        >>> loss_settings({"loss": "Q-Margin", "alpha": "1.25", "s": "35"})
        LossSettings(alpha=1.25, scale=35.0, margin=None)
    """
    lowered = {key.strip().lower(): value for key, value in (card or {}).items()}
    found = {}
    for field, names in _NAMES.items():
        texts = [lowered[name] for name in names if name in lowered]
        found[field] = _finite(texts[0]) if texts else None
    return LossSettings(**found)


def protocol_block(panel: Panel) -> Html:
    """Facts of each result of a panel: how it was measured, from which files, by what."""
    return joined(_facts(entry, is_open=i == 0) for i, entry in enumerate(panel.entries))


def _facts(entry: Entry, *, is_open: bool) -> Html:
    result = entry.result
    title = tag("summary", swatch(entry.colour), name_of(entry.label))
    parts = [_definitions(_protocol_facts(result)), _sources(result)]
    if result.system.model_card:
        parts += [tag("h5", "Model card"), _definitions(list(result.system.model_card.items()))]
    else:
        parts.append(tag("p", "This result has no model card.", class_="hint"))
    return tag("details", title, *parts, open=is_open, class_="facts-of")


def _protocol_facts(result: Result) -> list[tuple[str, str]]:
    protocol, interval = result.protocol, result.protocol.interval
    how = interval.method
    if interval.method.endswith("bootstrap"):
        how += f", {count(interval.num_replicates)} replicates, seed {interval.seed}"
    if interval.method != "none":
        how += f", level {interval.level:g}"
    facts = [
        ("Protocol", protocol.name),
        ("Rule for thresholds", protocol.rule),
        ("Trials", count(protocol.num_trials)),
        ("Genuine", count(protocol.num_genuine)),
        ("Impostor", count(protocol.num_impostors)),
        ("Subjects", "unknown" if protocol.num_subjects is None else count(protocol.num_subjects)),
        ("Intervals", how),
        ("Evaluated", result.created),
        ("Command", result.command),
        ("qmargin", result.qmargin),
        ("Trials, SHA-256", result.trials_sha256 or "unknown, the trials have no keys"),
    ]
    if interval.note:
        facts.insert(7, ("Note", interval.note))
    facts += [("Note on the trials", note) for note in result.notes]
    return facts


def _definitions(facts: list[tuple[str, str]]) -> Html:
    rows = [tag("div", tag("dt", cleaned(key)), tag("dd", text_of(value))) for key, value in facts]
    return tag("dl", *rows, class_="definitions")


def _sources(result: Result) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", cleaned(source.role), scope="row"),
            tag("td", text_of(source.path), class_="left"),
            tag("td", tag("code", cleaned(source.sha256)), class_="left"),
        )
        for source in result.sources
    ]
    return data_table(("<Role", "<File", "<SHA-256"), rows)


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
