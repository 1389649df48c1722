"""Figures as SVG and PDF, for papers; the only file that imports matplotlib."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qmargin.evaluation.result import HardPair
from qmargin.files import MADE_BY, write_atomically
from qmargin.metrics.sufficiency import ENOUGH_FALSE_ACCEPTS, rule_of_three
from qmargin.report.det import curve_points, det_scales
from qmargin.report.markup import cleaned
from qmargin.report.media import MediaFolder
from qmargin.report.model_card import loss_settings
from qmargin.report.numbers import digits_to_differ, number, power
from qmargin.report.scales import RATES, probit
from qmargin.report.systems import NUM_COLOURS, Entry, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    *("#0a6ab5", "#cf4f08", "#007d5c", "#ad3f86"),
    *("#8f6900", "#2b86c0", "#4d5763", "#8a3b2a"),
)
MARKERS = "os^DvPph"
DASHES: Any = ("-", "--", ":", "-.")
LinePoint: TypeAlias = tuple[float, float, float | None]  # place, height, deviation
Lines: TypeAlias = Mapping[str, Sequence[LinePoint]]  # by name
LONGEST_LABEL = 32  # characters
WIDE = 10.0  # numbers that differ by more are drawn on a logarithmic axis
MOST_PAIRS = 6  # of each kind in the grid
SETTINGS: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,
    "svg.hashsalt": "qmargin",  # the same figure has the same bytes
}


def has_matplotlib() -> bool:
    """Whether figures can be drawn at all."""
    return find_spec("matplotlib") is not None


def draw_figures(panels: Sequence[Panel], media: MediaFolder | None) -> dict[str, bytes]:
    """Files of what the results allow to draw, by name."""
    import matplotlib

    files: dict[str, bytes] = {}
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in any script
        for index, panel in enumerate(panels):
            suffix = "" if len(panels) == 1 else f"-{index + 1}"
            drawn = {
                "det": det_plot(panel),
                "sensitivity": sensitivity_plot(panel),
                "groups": groups_plot(panel),
                "hardest": None if media is None else hardest_plot(panel.leader(), media),
            }
            for name, figure in drawn.items():
                if figure is not None:
                    files.update(figure_files(figure, f"{name}{suffix}"))
    return files


def det_plot(panel: Panel) -> Figure:
    """DET curves with bands on probit axes, shaded where false accepts are few."""
    figure, axes = _blank(5.2, 4.2)
    across, up = det_scales(panel)
    for entry in panel.entries:
        colour = COLOURS[entry.colour % NUM_COLOURS]
        points = [p for p in curve_points(entry) if 0.0 < p.far < 1.0 and 0.0 < p.frr < 1.0]
        line = [probit(p.far) for p in points], [probit(p.frr) for p in points]
        style = DASHES[entry.colour // NUM_COLOURS % len(DASHES)]
        axes.plot(*line, color=colour, linestyle=style, linewidth=1.5)
        _operating_points(axes, entry, colour)
        band = entry.result.det.band
        if band is not None:
            rows = [r for r in zip(band.far, band.low, band.high, strict=True) if 0 < r[0] < 1]
            low, high = ([probit(min(max(r[i], up.low), up.high)) for r in rows] for i in (1, 2))
            axes.fill_between(
                [probit(r[0]) for r in rows], low, high, color=colour, alpha=0.12, lw=0
            )
    largest = max(entry.result.protocol.num_impostors for entry in panel.entries)
    few = min(max(ENOUGH_FALSE_ACCEPTS / largest, across.low), across.high)
    axes.axvspan(probit(across.low), probit(few), color="0.5", alpha=0.12, lw=0)
    axes.set(xlim=[probit(across.low), probit(across.high)], ylim=[probit(up.low), probit(up.high)])
    shown = [rate for rate in across.ticks(RATES) if rate not in (0.002, 0.005, 0.02)]
    axes.set_xticks([probit(rate) for rate in shown], [power(rate) for rate in shown])
    rates = up.ticks(RATES)
    axes.set_yticks([probit(rate) for rate in rates], [f"{100 * rate:.3g} %" for rate in rates])
    axes.set(xlabel="False accept rate", ylabel="False reject rate")
    axes.grid(color="0.9", linewidth=0.6)
    _legend(axes, panel.entries)
    return figure


def _operating_points(axes: Any, entry: Entry, colour: str) -> None:
    for point in entry.result.metrics.tar:
        if point.tar is not None and point.far and 0.0 < point.tar < 1.0:
            place = [probit(point.far)], [probit(1.0 - point.tar)]
            face = colour if point.status == "ok" else "white"
            sign = MARKERS[entry.colour % len(MARKERS)]
            axes.plot(*place, color=colour, marker=sign, markersize=5, markerfacecolor=face)


def sensitivity_plot(panel: Panel) -> Figure | None:
    """TAR over scale, a line for each alpha and margin; None without cards that say them."""
    far = panel.headline_far()
    lines: dict[str, list[tuple[float, float]]] = {}
    for entry in panel.entries:
        card = entry.result.system.model_card or {}
        found, point = loss_settings(card), None if far is None else entry.point_at(far)
        if found.scale is None or point is None or point.tar is None:
            continue
        alpha = "" if found.alpha is None else f", \u03b1 = {found.alpha:g}"
        margin = "" if found.margin is None else f", m = {found.margin:g}"
        name = _short(card.get("loss", entry.label))
        lines.setdefault(f"{name}{alpha}{margin}", []).append((found.scale, 100.0 * point.tar))
    if far is None or sum(len(points) for points in lines.values()) < 2:
        return None
    named = {name: [(x, y, None) for x, y in points] for name, points in lines.items()}
    return lines_plot({"Scale": named}, f"TAR % at FAR {power(far)}")


def lines_plot(
    panels: Mapping[str, Lines], ylabel: str, *, beyond: Mapping[str, float] | None = None
) -> Figure:
    """Lines over numbers, one panel beside the other with a common height and legend.

    Args:
        panels: Lines by the name of what they are drawn over.
        ylabel: Of the height.
        beyond: By panel, the number from which on the ground is shaded.
    """
    figure, grid = _blank(2.2 + 3.4 * len(panels), 3.6, columns=len(panels), squeeze=False)
    cells = list(grid[0])
    for axes, (name, lines) in zip(cells, panels.items(), strict=True):
        for index, points in enumerate(lines.values()):
            _line(axes, points, COLOURS[index % NUM_COLOURS], MARKERS[index % len(MARKERS)])
        axes.set(xlabel=name)
        places = [x for points in lines.values() for x, _, _ in points]
        if min(places) > 0.0 and max(places) > WIDE * min(places):
            axes.set(xscale="log")
            axes.minorticks_off()
            ticks = _rate_ticks(*axes.get_xlim())
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(color="0.9", linewidth=0.6)
        edges = axes.get_xlim()
        if beyond and name in beyond and edges[1] > beyond[name]:
            axes.axvspan(beyond[name], edges[1], color="0.5", alpha=0.12, lw=0)
            axes.set_xlim(edges)
    for axes in cells[1:]:
        axes.sharey(cells[0])
        axes.tick_params(labelleft=False)
    cells[0].set(ylabel=ylabel)
    names = list(next(iter(panels.values())))
    style: Any = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    legend = figure.legend(cells[0].get_lines(), names, **style)
    _plain_text(legend.get_texts())
    return figure


def _line(axes: Any, points: Sequence[LinePoint], colour: str, sign: str) -> None:
    places = sorted(points, key=lambda point: point[0])
    across, up = [x for x, _, _ in places], [y for _, y, _ in places]
    axes.plot(across, up, color=colour, marker=sign, linewidth=1.2)
    spread = [(x, y - deviation, y + deviation) for x, y, deviation in places if deviation]
    if spread:
        axes.vlines(*zip(*spread, strict=True), color=colour, linewidth=0.8)


def write_lines(
    stem: Path,
    panels: Mapping[str, Lines],
    ylabel: str,
    *,
    beyond: Mapping[str, float] | None = None,
) -> list[Path]:
    """``lines_plot`` in files; returns them."""
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        files = figure_files(lines_plot(panels, ylabel, beyond=beyond), stem.name)
    for name, content in files.items():
        write_atomically(stem.with_name(name), content)
    return [stem.with_name(name) for name in files]


def groups_plot(panel: Panel) -> Figure | None:
    """FMR and FNMR of each group and system; None without groups."""
    audits = [(entry, entry.result.groups) for entry in panel.entries if entry.result.groups]
    if not audits:
        return None
    names = list(dict.fromkeys(row.group for _, audit in audits if audit for row in audit.rows))
    figure, axes = _blank(6.4, 1.2 + 0.28 * len(names), columns=2)
    for entry, audit in audits:
        assert audit is not None
        for row in audit.rows:
            height = names.index(row.group)
            _group_dot(axes[0], entry, row.fmr, row.num_impostors, height)
            _group_dot(axes[1], entry, row.fnmr, row.num_genuine, height)
    for side, title in zip(axes, ("False match rate", "False non-match rate"), strict=True):
        side.set(xscale="log", xlabel=title, ylim=[len(names) - 0.5, -0.5])
        side.minorticks_off()
        ticks = _rate_ticks(*side.get_xlim())
        side.set_xticks(ticks, [power(rate) for rate in ticks])
        side.set_yticks(range(len(names)), [_short(name) for name in names])
        _plain_text(side.get_yticklabels())
        side.grid(axis="y", color="0.9", linewidth=0.6)
    axes[1].set_yticklabels([])
    _legend(axes[1], [entry for entry, _ in audits])
    return figure


def _rate_ticks(low: float, high: float) -> list[float]:
    """A few round rates between two: powers of ten, or more of them over a short range.

    Examples:
        >>> _rate_ticks(6e-4, 2.5e-3), _rate_ticks(5e-6, 0.3)
        ([0.001, 0.002], [1e-05, 0.0001, 0.001, 0.01, 0.1])
    """
    steps: tuple[float, ...] = (1.0,)
    if high < 100.0 * low:
        steps = (1.0, 2.0, 5.0)
    if high < 3.0 * low:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    rates = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
    return [rate for rate in rates if low <= rate <= high] or [math.sqrt(low * high)]


def _group_dot(axes: Any, entry: Entry, rate: float | None, trials: int, height: int) -> None:
    """A rate, or a hollow dot at the bound 3/n of a group without errors."""
    if rate is None or trials < 1:
        return
    colour = COLOURS[entry.colour % NUM_COLOURS]
    face = colour if rate > 0.0 else "white"
    place = rate if rate > 0.0 else rule_of_three(trials)
    sign = MARKERS[entry.colour % len(MARKERS)]
    axes.plot([place], [height], color=colour, marker=sign, markersize=5, markerfacecolor=face)


def hardest_plot(entry: Entry, media: MediaFolder) -> Figure | None:
    """Genuine pairs with the lowest scores, impostors with the highest; None without images."""
    hardest = entry.result.hardest
    if hardest is None:
        return None
    kinds = (("Genuine", hardest.false_rejects), ("Impostor", hardest.false_accepts))
    grids = [(name, _image_pairs(pairs, media)) for name, pairs in kinds]
    most = max(len(pairs) for _, pairs in grids)
    if most == 0:
        return None
    figure, axes = _blank(1.3 * most + 0.3, 4.4, columns=most, rows=4)
    cells = [list(row) for row in axes.reshape(4, most)]
    for cell in (cell for row in cells for cell in row):
        cell.axis("off")
    for block, (name, pairs) in enumerate(grids):
        digits = digits_to_differ((pair.score for pair, _ in pairs), 3)
        for column, (pair, images) in enumerate(pairs):
            for side, image in enumerate(images):
                cells[2 * block + side][column].imshow(image)
            cells[2 * block][column].set_title(f"{name}, {number(pair.score, digits)}", fontsize=7)
    return figure


def _image_pairs(pairs: Sequence[HardPair], media: MediaFolder) -> list[tuple[HardPair, list[Any]]]:
    from PIL import Image

    found = []
    for pair in pairs:
        both = [media.medium(key) for key in (pair.enrol, pair.test)]
        if all(medium.kind == "image" for medium in both):
            files = [base64.b64decode(medium.uri.partition(",")[2]) for medium in both]
            found.append((pair, [Image.open(io.BytesIO(content)) for content in files]))
    return found[:MOST_PAIRS]


def _blank(
    width: float, height: float, *, rows: int = 1, columns: int = 1, squeeze: bool = True
) -> tuple[Figure, Any]:
    """A figure without pyplot, so that nothing is kept and no window is opened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=squeeze)


def _legend(axes: Any, entries: Sequence[Entry]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[entry.colour % NUM_COLOURS],
            marker=MARKERS[entry.colour % len(MARKERS)],
            linestyle=DASHES[entry.colour // NUM_COLOURS % len(DASHES)],
        )
        for entry in entries
    ]
    legend = axes.legend(
        handles, [_short(entry.label) for entry in entries], frameon=False, fontsize=8
    )
    _plain_text(legend.get_texts())


def _short(name: str) -> str:
    """A name that leaves room for the drawing."""
    shown = cleaned(name)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def _plain_text(texts: Sequence[Any]) -> None:
    """Dollars in a name are dollars."""
    for text in texts:
        text.set_parse_math(False)


def figure_files(figure: Figure, stem: str) -> dict[str, bytes]:
    """A figure as SVG and PDF, by name; the same figure has the same bytes."""
    files = {}
    for kind, date in (("svg", "Date"), ("pdf", "CreationDate")):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata={date: None, "Creator": MADE_BY})
        files[f"{stem}.{kind}"] = buffer.getvalue()
    return files
