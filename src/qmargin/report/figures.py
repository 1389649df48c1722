"""Figures as SVG and PDF, for papers; the only file that imports matplotlib."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qmargin.files import MADE_BY, write_atomically
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import cleaned, digits_to_differ, number, rate_text
from qmargin.report.plots import NUM_COLOURS, det_geometry, rate_or_bound
from qmargin.report.systems import Entry, Panel, margin_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qmargin.evaluation.result import RunInfo

COLOURS = (
    *("#0a6ab5", "#cf4f08", "#007d5c", "#ad3f86"),
    *("#8f6900", "#2b86c0", "#4d5763", "#8a3b2a"),
)
MARKERS = "os^DvPph"
DASHES: Any = (  # as on the page
    *("-", "--", ":", "-."),
    *((0, (6, 2, 1.5, 2, 1.5, 2)), (0, (3, 1.5)), (0, (9, 3)), (0, (6, 1.5, 3, 1.5))),
)
SHADE: Any = {"color": "0.5", "alpha": 0.12, "lw": 0}
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
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


@contextmanager
def figure_style() -> Iterator[None]:
    """Settings under which figures are drawn; names may be in any script."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def draw_figures(panels: Sequence[Panel], media: MediaFolder | None) -> dict[str, bytes]:
    """All figures that the results allow, by file name."""
    files: dict[str, bytes] = {}
    with figure_style():
        for index, panel in enumerate(panels):
            suffix = "" if len(panels) == 1 else f"-{index + 1}"
            drawn = {
                "det": det_plot(panel),
                "sensitivity": sensitivity_plot(panel),
                "identities": identities_plot(panel),
                "time": time_plot(panel),
                "groups": groups_plot(panel),
                "hardest": None if media is None else hardest_plot(panel.leader(), media),
            }
            for name, figure in drawn.items():
                if figure is not None:
                    files |= figure_files(figure, f"{name}{suffix}")
    return files


def det_plot(panel: Panel) -> Figure:
    """DET curves with bands on probit axes, shaded where false accepts are few."""
    figure, axes = _blank(5.2, 4.2)
    det = det_geometry(panel)
    for curve in det.curves:
        look = _look(curve.entry)
        across, up = zip(*curve.line, strict=True) if curve.line else ((), ())
        line: Any = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 1.5}
        axes.plot(across, up, **line)
        if curve.band:
            axes.fill_between(*zip(*curve.band, strict=True), color=look["color"], alpha=0.12, lw=0)
        for x, y, is_hollow in curve.signs:
            _dot(axes, curve.entry, x, y, is_hollow=is_hollow)
    for end in det.few:
        axes.axvspan(det.box.left, end, **SHADE)
    axes.set(xlim=(det.box.left, det.box.right), ylim=(det.box.bottom, det.box.top))
    axes.set_xticks([tick.place for tick in det.bottom], [tick.label for tick in det.bottom])
    axes.set_yticks([tick.place for tick in det.left], [tick.label for tick in det.left])
    axes.tick_params(axis="x", labelsize="small")  # as far apart as on the page
    axes.set(xlabel="False accept rate", ylabel="False reject rate")
    axes.grid(color="0.9", linewidth=0.6)
    _legend(axes, panel.entries)
    return figure


def _look(entry: Entry) -> dict[str, Any]:
    """Colour, marker and dashes of a system."""
    return {
        "color": COLOURS[entry.colour % NUM_COLOURS],
        "marker": MARKERS[entry.colour % len(MARKERS)],
        "linestyle": DASHES[(entry.colour + entry.colour // NUM_COLOURS) % len(DASHES)],
    }


def _dot(axes: Any, entry: Entry, x: float, y: float, *, is_hollow: bool) -> None:
    look = _look(entry)
    face = "white" if is_hollow else look["color"]
    dot: Any = {"color": look["color"], "markersize": 5, "markerfacecolor": face}
    axes.plot([x], [y], marker=look["marker"], **dot)


def sensitivity_plot(panel: Panel) -> Figure | None:
    """TAR over scale, a line for each divergence and margin; None if runs are unknown."""
    far = panel.headline_far
    lines: dict[str, list[LinePoint]] = {}
    for entry in panel.entries:
        run, tar = entry.result.run, None if far is None else entry.observed(far)
        if run is None or run.scale is None or tar is None:
            continue
        lines.setdefault(_loss_name(run), []).append((run.scale, 100.0 * tar, None))
    if far is None or len({place for points in lines.values() for place, _, _ in points}) < 2:
        return None
    return lines_plot({"Scale": lines}, f"TAR % at FAR {rate_text(far)}")


def identities_plot(panel: Panel) -> Figure | None:
    """TAR over the number of training identities; None without runs that differ in it.

    A line for each loss at the headline's FAR; where all runs have one loss, for each FAR.
    """
    far = panel.headline_far
    known = [(entry, run) for entry in panel.entries if (run := entry.result.run) is not None]
    runs = [(entry, run, run.num_classes) for entry, run in known if run.num_classes]
    if far is None or len({count for _, _, count in runs}) < 3:
        return None
    has_one_loss = len({(_loss_name(run), run.scale) for _, run, _ in runs}) == 1
    lines: dict[str, list[LinePoint]] = {}
    for entry, run, count in runs:
        for one in panel.fars if has_one_loss else [far]:
            name = f"FAR {rate_text(one)}" if has_one_loss else _loss_name(run)
            tar = entry.observed(one)
            if tar is not None:
                lines.setdefault(name, []).append((count, 100.0 * tar, None))
    ylabel = "TAR %" if has_one_loss else f"TAR % at FAR {rate_text(far)}"
    return lines_plot({"Training identities": lines}, ylabel)


def time_plot(panel: Panel) -> Figure | None:
    """TAR over training seconds, a line for each run; None without runs measured in training."""
    far = panel.headline_far
    lines: dict[str, list[LinePoint]] = {}
    for entry in panel.entries if far is not None else ():
        if points := entry.progress(far):
            lines[_short(entry.label)] = [(s, 100.0 * tar, None) for s, tar in points]
    if far is None or not lines:
        return None
    return lines_plot({"Training, s": lines}, f"TAR % at FAR {rate_text(far)}")


def _loss_name(run: RunInfo) -> str:
    kinds, values = margin_of(run)
    order = cleaned(run.divergence) if run.alpha is None else f"\u03b1 = {run.alpha:g}"
    return _short(f"{kinds} margin {values}, {order}")


def lines_plot(
    panels: Mapping[str, Lines], ylabel: str, *, beyond: Mapping[str, float] | None = None
) -> Figure:
    """Lines by what they are drawn over, side by side with a common height and legend.

    ``beyond`` has, by panel, the number from which on the background is shaded.
    """
    figure, grid = _blank(2.2 + 3.4 * len(panels), 3.6, columns=len(panels))
    cells = list(grid.flat) if len(panels) > 1 else [grid]
    for axes, (name, lines) in zip(cells, panels.items(), strict=True):
        for index, points in enumerate(lines.values()):
            places = sorted(points, key=lambda point: point[0])
            look = {"color": COLOURS[index % NUM_COLOURS], "marker": MARKERS[index % len(MARKERS)]}
            axes.plot([x for x, _, _ in places], [y for _, y, _ in places], **look, linewidth=1.2)
            spread = [(x, y - deviation, y + deviation) for x, y, deviation in places if deviation]
            if spread:
                axes.vlines(*zip(*spread, strict=True), color=look["color"], linewidth=0.8)
        axes.set(xlabel=name)
        numbers = [x for points in lines.values() for x, _, _ in points]
        if min(numbers) > 0.0 and max(numbers) > WIDE * min(numbers):
            _log_ticks(axes, "{:g}".format)
        axes.grid(color="0.9", linewidth=0.6)
        edges = axes.get_xlim()
        if beyond and name in beyond and edges[1] > beyond[name]:
            axes.axvspan(beyond[name], edges[1], **SHADE)
            axes.set_xlim(edges)
    for axes in cells[1:]:
        axes.sharey(cells[0])
        axes.tick_params(labelleft=False)
    cells[0].set(ylabel=ylabel)
    style: Any = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    names = list(next(iter(panels.values())))
    _plain_text(figure.legend(cells[0].get_lines(), names, **style).get_texts())
    return figure


def write_lines(
    stem: Path,
    panels: Mapping[str, Lines],
    ylabel: str,
    *,
    beyond: Mapping[str, float] | None = None,
) -> list[Path]:
    """``lines_plot`` in files; returns them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with figure_style():
        files = figure_files(lines_plot(panels, ylabel, beyond=beyond), stem.name)
    for name, content in files.items():
        write_atomically(stem.with_name(name), content)
    return [stem.with_name(name) for name in files]


def groups_plot(panel: Panel) -> Figure | None:
    """FMR and FNMR of each group and system; None without groups."""
    audits = {entry.label: audit.rows for entry in panel.entries if (audit := entry.result.groups)}
    if not audits:
        return None
    entries = [entry for entry in panel.entries if entry.label in audits]
    names = list(dict.fromkeys(row.group for rows in audits.values() for row in rows))
    figure, axes = _blank(6.4, 1.2 + 0.28 * len(names), columns=2)
    for entry in entries:
        for row in audits[entry.label]:
            rates = ((row.fmr, row.num_impostors), (row.fnmr, row.num_genuine))
            for side, (rate, trials) in zip(axes, rates, strict=True):
                place = rate_or_bound(rate, trials)
                if place is not None:
                    _dot(side, entry, place, names.index(row.group), is_hollow=rate == 0.0)
    for side, title in zip(axes, ("False match rate", "False non-match rate"), strict=True):
        side.set(xlabel=title, ylim=[len(names) - 0.5, -0.5])
        _log_ticks(side, rate_text)
        side.set_yticks(range(len(names)), [_short(name) for name in names])
        _plain_text(side.get_yticklabels())
        side.grid(axis="y", color="0.9", linewidth=0.6)
    axes[1].set_yticklabels([])
    _legend(axes[1], entries)
    return figure


def _log_ticks(axes: Any, label: Callable[[float], str]) -> None:
    """Make the axis across logarithmic, with a few round ticks: more over a short range."""
    axes.set(xscale="log")
    axes.minorticks_off()
    low, high = axes.get_xlim()
    steps = "1" if high >= 100.0 * low else "1 2 5"
    steps = "1 1.5 2 3 4 6 8" if high < 3.0 * low else steps
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    rates = [float(f"{step}e{exponent}") for exponent in exponents for step in steps.split()]
    ticks = [rate for rate in rates if low <= rate <= high] or [math.sqrt(low * high)]
    axes.set_xticks(ticks, list(map(label, ticks)))


def hardest_plot(entry: Entry, media: MediaFolder) -> Figure | None:
    """Genuine pairs with the lowest scores, impostors with the highest; None without images."""
    hardest = entry.result.hardest
    if hardest is None:
        return None
    grids = []
    for name, all_pairs in (
        ("Genuine", hardest.false_rejects),
        ("Impostor", hardest.false_accepts),
    ):
        drawn = [(pair, images_of((pair.enrol, pair.test), media)) for pair in all_pairs]
        grids.append((name, [(pair, images) for pair, images in drawn if images][:MOST_PAIRS]))
    most = max(len(pairs) for _, pairs in grids)
    if most == 0:
        return None
    figure, axes = _blank(1.3 * most + 0.3, 4.4, columns=most, rows=4)
    cells = axes.reshape(4, most)
    for cell in cells.flat:
        cell.axis("off")
    for block, (name, pairs) in enumerate(grids):
        digits = digits_to_differ((pair.score for pair, _ in pairs), 3)
        for column, (pair, images) in enumerate(pairs):
            for side, image in enumerate(images):
                cells[2 * block + side][column].imshow(image)
            cells[2 * block][column].set_title(f"{name}, {number(pair.score, digits)}", fontsize=7)
    return figure


def images_of(keys: Sequence[str], media: MediaFolder) -> list[Any]:
    """Pictures of both sides of a pair; none unless both have one."""
    found = [media.medium(key) for key in keys]
    is_shown = all(medium.kind == "image" for medium in found)
    return [medium.image() for medium in found] if is_shown else []


def _blank(width: float, height: float, *, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure without pyplot, so that nothing is kept and no window is opened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def _legend(axes: Any, entries: Sequence[Entry]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_look(entry)) for entry in entries]
    names = [_short(entry.label) for entry in entries]
    _plain_text(axes.legend(handles, names, frameon=False, fontsize=8).get_texts())


def _short(name: str) -> str:
    """A name, shortened to leave space for the drawing."""
    return cleaned(name, LONGEST_LABEL)


def _plain_text(texts: Sequence[Any]) -> None:
    """Escape dollar signs in a name."""
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
