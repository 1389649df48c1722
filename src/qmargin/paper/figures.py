"""The paper's DET curves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from qmargin.demo.losses import LOSSES
from qmargin.paper import numbers
from qmargin.paper.captions import points_of_paper, write_captions
from qmargin.paper.measured import measured_in
from qmargin.paper.runs import Request, loss_of, results_for
from qmargin.paper.scale import scale_of
from qmargin.report.figures import det_plot, figure_files, has_matplotlib
from qmargin.report.systems import Panel, load_panels
from qmargin.report.write import ReportOptions, write_report

LARGEST_FAR = 1e-2  # curves with a band begin there


def figure_det_face(request: Request) -> list[Path]:
    """DET curves of the five losses."""
    results = results_for(request, list(LOSSES.values()), far=LARGEST_FAR)
    points = points_of_paper(numbers.REIMPLEMENTED, numbers.IJB)
    return _det(request, "figure-det-face", results, points)


def figure_det_speaker(request: Request) -> list[Path]:
    """DET curves of the settings for speakers."""
    losses = [loss_of(row) for row in numbers.SPEAKER]
    results = results_for(request, losses, far=LARGEST_FAR)
    points = points_of_paper(numbers.SPEAKER, numbers.SPEAKER_COLUMNS)
    return _det(request, "figure-det-speaker", results, points)


def _det(request: Request, name: str, results: Sequence[Path], points: str) -> list[Path]:
    """A page with the curves, a caption, and figures for print where matplotlib is installed."""
    folder, panels = request.out / name, load_panels(results)
    about = "; ".join(panel.title for panel in panels)
    options = ReportOptions(
        title=f"DET curves, for the paper's figure: {about}",
        has_figures=False,
        overwrite=request.overwrite,
    )
    written = write_report(results, folder, options)
    files = draw_det(panels) if has_matplotlib() else {}
    drawn = request.guard().write_all({folder / name: files[name] for name in files})
    caption = (
        "False accept and false reject rates. Here, at another scale than the paper's: "
        f"{scale_of(measured_in(results))}. {points}"
    )
    captions = write_captions(folder / name, list(files), caption, guard=request.guard())
    return [*written, *drawn, *captions]


def draw_det(panels: Sequence[Panel]) -> dict[str, bytes]:
    """Curves of every panel as SVG and PDF, by name, with what they are about above them."""
    files: dict[str, bytes] = {}
    for index, panel in enumerate(panels):
        suffix = "" if len(panels) == 1 else f"-{index + 1}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in any script
            figure = det_plot(panel)
            figure.axes[0].set_title(panel.title, fontsize=9, parse_math=False)
            files.update(figure_files(figure, f"det{suffix}"))
    return files
