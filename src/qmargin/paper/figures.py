"""The paper's DET curves."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

from qmargin.demo.losses import LOSSES
from qmargin.files import write_atomically
from qmargin.paper import numbers
from qmargin.paper.captions import points_of_paper, write_captions
from qmargin.paper.measured import measured_in
from qmargin.paper.runs import Request, loss_of, results_for
from qmargin.paper.scale import scale_of
from qmargin.report.figures import det_plot, has_matplotlib
from qmargin.report.systems import Panel, load_panels
from qmargin.report.write import ReportOptions, write_report

LARGEST_FAR = 1e-2  # curves with a band begin there


def figure_det_face(request: Request) -> list[Path]:
    """DET curves of the five losses."""
    results = results_for(request, list(LOSSES.values()), far=LARGEST_FAR)
    points = points_of_paper(numbers.REIMPLEMENTED, numbers.IJB)
    return _det(request.out / "figure-det-face", results, points)


def figure_det_speaker(request: Request) -> list[Path]:
    """DET curves of the settings for speakers."""
    losses = [loss_of(row) for row in numbers.SPEAKER]
    results = results_for(request, losses, far=LARGEST_FAR)
    points = points_of_paper(numbers.SPEAKER, numbers.SPEAKER_COLUMNS)
    return _det(request.out / "figure-det-speaker", results, points)


def _det(folder: Path, results: Sequence[Path], points: str) -> list[Path]:
    """A page with the curves, a caption, and figures for print where matplotlib is installed."""
    panels = load_panels(results)
    about = "; ".join(panel.title for panel in panels)
    options = ReportOptions(title=f"DET curves, for the paper's figure: {about}", has_figures=False)
    written = write_report(results, folder, options)
    drawn = write_det(panels, folder) if has_matplotlib() else []
    caption = (
        "False accept and false reject rates. Here, at another scale than the paper's: "
        f"{scale_of(measured_in(results))}. {points}"
    )
    captions = write_captions(folder / folder.name, [path.name for path in drawn], caption)
    return [*written, *drawn, *captions]


def write_det(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Curves of every panel as SVG and PDF, with what they are about above them."""
    written = []
    for index, panel in enumerate(panels):
        suffix = "" if len(panels) == 1 else f"-{index + 1}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in any script
            figure = det_plot(panel)
            figure.axes[0].set_title(panel.title, fontsize=9, parse_math=False)
            for kind, date in (("svg", "Date"), ("pdf", "CreationDate")):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, metadata={date: None})
                written.append(folder / f"det{suffix}.{kind}")
                write_atomically(written[-1], buffer.getvalue())
    return written
