"""One self-contained page: everything inline, nothing fetched, only its own script may run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from qmargin.files import MADE_BY
from qmargin.report.charts import histogram_chart, reliability_chart, support_chart
from qmargin.report.comparison import PairedDifference, comparison_block
from qmargin.report.det import det_data, det_figure, swatch
from qmargin.report.groups import groups_block
from qmargin.report.hardest import hardest_block
from qmargin.report.journal import Journal
from qmargin.report.layout import data_table
from qmargin.report.markup import Html, cleaned, joined, json_block, name_of, tag
from qmargin.report.media import MediaFolder
from qmargin.report.model_card import protocol_block
from qmargin.report.numbers import MISSING, count, number
from qmargin.report.operating import operating_block
from qmargin.report.repeats import find_repeats, repeats_block
from qmargin.report.systems import Panel
from qmargin.report.verdict import sufficiency_block, verdict_block

EMPTY = Html("")


@dataclass(frozen=True)
class PageContent:
    """What goes on a page; ``differences`` has a list for each panel."""

    title: str
    panels: Sequence[Panel]
    differences: Sequence[list[PairedDifference]]
    level: float = 0.95
    media: MediaFolder | None = None
    journals: Sequence[Journal] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page; left out when its body is empty."""

    key: str
    title: str
    short: str  # in the navigation
    about: str = ""
    body: Html = EMPTY


SECTIONS = (
    Section(
        "repeats",
        "Repeated trainings",
        "Repeats",
        "Results under one name on the same trials, or on trials that differ in their seed alone.",
    ),
    Section("data", "Is there enough data", "Data"),
    Section(
        "det",
        "Detection error trade-off",
        "DET",
        "Lower left is better. Filled signs are the operating points of the table, hollow ones "
        "rest on fewer than 30 false accepts. Move over the plot, or use the arrow keys, to read "
        "values out.",
    ),
    Section(
        "scores",
        "Scores",
        "Scores",
        "Each kind of pair as shares of its own count; the dashed line is the threshold of the "
        "verdict's FAR.",
    ),
    Section("points", "Operating points", "Operating points"),
    Section("pairs", "Paired comparison", "Pairs"),
    Section(
        "groups",
        "Groups",
        "Groups",
        "False match and false non-match rates at one threshold for all. Dots lie on a "
        "logarithmic scale, the upright line marks the target FAR, a hollow dot is the bound 3/n "
        "of a group without a single error.",
    ),
    Section("hardest", "Hardest errors", "Errors"),
    Section(
        "sparsity",
        "Sparsity of the training",
        "Sparsity",
        "Classes with a posterior above zero: the mean over the samples of a step (line) and the "
        "largest (dashes). At alpha 1 all classes are active.",
    ),
    Section(
        "calibration",
        "Calibration",
        "Calibration",
        "Observed share of genuine pairs over the predicted one, at even odds, once scores are "
        "made into log-likelihood ratios (LLR). On the dotted line they mean what they say.",
    ),
    Section("protocol", "Protocol, files and model card", "Protocol"),
)


def render_page(content: PageContent) -> str:
    """The whole page as text."""
    style, script = _asset("page.css"), _asset("page.js")
    sections = [section for section in _sections(content) if section.body]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=MADE_BY),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", cleaned(content.title)),
        tag("style", Html(style)),
    )
    verdicts = joined(
        verdict_block(panel, found)
        for panel, found in zip(content.panels, content.differences, strict=True)
    )
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#det", class_="skip"),
        _header(content, sections),
        tag("main", tag("section", verdicts, id="verdict"), *map(_written, sections)),
        tag("footer", "Made by qmargin. Accept if and only if score ≥ threshold."),
        json_block("det-data", [det_data(panel) for panel in content.panels]),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _sections(content: PageContent) -> list[Section]:
    """Every section in the order of the page, with its body or without."""
    panels, pairs = content.panels, content.differences
    blocks: dict[str, Callable[[Panel], Html]] = {
        "data": sufficiency_block,
        "det": det_figure,
        "scores": _histograms,
        "points": operating_block,
        "pairs": lambda panel: comparison_block(panel, pairs[panel.index], content.level),
        "groups": groups_block,
        "hardest": lambda panel: hardest_block(panel, content.media),
        "calibration": _calibrations,
        "protocol": protocol_block,
    }
    bodies = {key: _per_panel(panels, block) for key, block in blocks.items()}
    repeats = find_repeats(panels)
    bodies["repeats"] = joined(repeats_block(found, content.level) for found in repeats)
    bodies["sparsity"] = _support(content.journals)
    return [replace(section, body=bodies[section.key]) for section in SECTIONS]


def _per_panel(panels: Sequence[Panel], block: Callable[[Panel], Html]) -> Html:
    bodies = [(panel, body) for panel in panels if (body := block(panel))]
    if len(panels) == 1:
        return joined(body for _, body in bodies)
    return joined(
        joined([tag("h3", name_of(panel.title)), tag("div", body)]) for panel, body in bodies
    )


def _histograms(panel: Panel) -> Html:
    far = panel.headline_far()
    charts = []
    for entry in panel.entries:
        point = None if far is None else entry.point_at(far)
        threshold = None if point is None else point.threshold
        title = tag("figcaption", swatch(entry.colour), name_of(entry.label), class_="who")
        drawing = histogram_chart(entry.result.histogram, threshold, entry.colour, entry.label)
        charts.append(tag("figure", title, drawing))
    keys = tag(
        "p",
        tag("span", class_="key impostor"),
        " impostor; genuine in the colour of the system ",
        tag(
            "button", "Logarithmic", type="button", aria_pressed="false", class_="log needs-script"
        ),
        class_="keys",
    )
    return tag("div", keys, tag("div", *charts, class_="charts"), class_="histograms")


def _calibrations(panel: Panel) -> Html:
    charts = []
    for entry in panel.entries:
        found, metrics = entry.result.calibration, entry.result.metrics
        if found is None:
            continue
        title = tag("figcaption", swatch(entry.colour), name_of(entry.label), class_="who")
        words = (
            f"Cllr {number(metrics.cllr.value)}, minCllr {number(metrics.min_cllr.value)}; "
            f"LLR = {number(found.scale)} \u00d7 score {_sign(found.offset)} "
            f"{number(abs(found.offset))}"
        )
        drawing = reliability_chart(found.reliability, entry.colour, entry.label)
        charts.append(tag("figure", title, drawing, tag("p", words, class_="hint")))
    return tag("div", *charts, class_="charts") if charts else Html("")


def _sign(value: float) -> str:
    return "+" if value >= 0.0 else "\u2212"


def _support(journals: Sequence[Journal]) -> Html:
    """All trainings in one drawing, and their numbers in a table."""
    if not journals:
        return EMPTY
    head = ["<Training", "Mean at the end", "Largest of all steps"]
    rows = []
    for colour, journal in enumerate(journals):
        means = [value for value in journal.mean if value is not None]
        peaks = [value for value in journal.largest if value is not None]
        largest = count(int(max(peaks))) if peaks else MISSING
        if peaks and journal.num_classes:
            largest += f" ({100 * max(peaks) / journal.num_classes:.3g} %)"
        cells = (number(means[-1]) if means else MISSING, largest)
        name = tag("span", swatch(colour), name_of(journal.name), class_="who")
        rows.append(tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells)))
    return tag("div", support_chart(journals), data_table(head, rows), class_="support")


def _header(content: PageContent, sections: Sequence[Section]) -> Html:
    links = [tag("a", section.short, href=f"#{section.key}") for section in sections]
    toggle = tag(
        "button", "Dark", type="button", id="theme", class_="needs-script", aria_label="Dark theme"
    )
    bar = tag("div", tag("h1", cleaned(content.title)), toggle, class_="bar")
    return tag("header", bar, tag("nav", *links, aria_label="Sections"))


def _written(section: Section) -> Html:
    about = tag("p", section.about, class_="about") if section.about else Html("")
    heading = tag("h2", section.title, id=f"{section.key}-title")
    return tag(
        "section",
        heading,
        about,
        section.body,
        id=section.key,
        aria_labelledby=f"{section.key}-title",
    )


def _asset(name: str) -> str:
    return (files("qmargin.report") / "assets" / name).read_text(encoding="utf-8")


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
