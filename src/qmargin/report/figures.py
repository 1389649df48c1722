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
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import cleaned, digits_to_differ, number, power
from qmargin.report.plots import det_geometry, rate_or_bound
from qmargin.report.systems import NUM_COLOURS, Entry, Panel, margin_of

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
    det = det_geometry(panel)
    for curve in det.curves:
        colour = COLOURS[curve.entry.colour % NUM_COLOURS]
        style = DASHES[curve.entry.colour // NUM_COLOURS % len(DASHES)]
        places = [x for x, _ in curve.line], [y for _, y in curve.line]
        axes.plot(*places, color=colour, linestyle=style, linewidth=1.5)
        if curve.band:
            across, low, high = zip(*curve.band, strict=True)
            axes.fill_between(across, low, high, color=colour, alpha=0.12, lw=0)
        for sign in curve.signs:
            face, marker = "white" if sign.is_hollow else colour, _marker(curve.entry)
            dot: Any = {"color": colour, "markersize": 5, "markerfacecolor": face}
            axes.plot([sign.x], [sign.y], marker=marker, **dot)
    for end in det.few:
        axes.axvspan(det.box.left, end, color="0.5", alpha=0.12, lw=0)
    axes.set(xlim=(det.box.left, det.box.right), ylim=(det.box.bottom, det.box.top))
    axes.set_xticks([tick.place for tick in det.bottom], [tick.label for tick in det.bottom])
    axes.set_yticks([tick.place for tick in det.left], [tick.label for tick in det.left])
    axes.set(xlabel="False accept rate", ylabel="False reject rate")
    axes.grid(color="0.9", linewidth=0.6)
    _legend(axes, panel.entries)
    return figure


def _marker(entry: Entry) -> str:
    return MARKERS[entry.colour % len(MARKERS)]


def sensitivity_plot(panel: Panel) -> Figure | None:
    """TAR over scale, a line for each divergence and margin; None without runs that tell them."""
    far = panel.headline_far()
    lines: dict[str, list[LinePoint]] = {}
    for entry in panel.entries:
        run, point = entry.result.run, None if far is None else entry.point_at(far)
        if run is None or run.scale is None or point is None or point.tar is None:
            continue
        kinds, values = margin_of(run)
        order = cleaned(run.divergence) if run.alpha is None else f"\u03b1 = {run.alpha:g}"
        name = _short(f"{kinds} margin {values}, {order}")
        lines.setdefault(name, []).append((run.scale, 100.0 * point.tar, None))
    scales = {place for points in lines.values() for place, _, _ in points}
    if far is None or len(scales) < 2:
        return None
    return lines_plot({"Scale": lines}, f"TAR % at FAR {power(far)}")


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
    place = rate_or_bound(rate, trials)
    if rate is None or place is None:
        return
    colour = COLOURS[entry.colour % NUM_COLOURS]
    face = colour if rate > 0.0 else "white"
    dot: Any = {"color": colour, "markersize": 5, "markerfacecolor": face}
    axes.plot([place], [height], marker=_marker(entry), **dot)


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
            marker=_marker(entry),
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
