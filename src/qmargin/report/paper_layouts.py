"""The paper's tables as printed: settings, numbers and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from qmargin.report.numbers import power


class Setting(NamedTuple):
    """A loss with one margin; rows and results are matched by it."""

    kind: str  # of the margin: prior, cosine or angular
    alpha: float
    scale: float
    margin: float

    @property
    def loss(self) -> str:
        """Name of the loss in the paper."""
        if self.kind == "angular":
            return {1.0: "ArcFace", 2.0: "SparseMax"}.get(self.alpha, "EntMax")
        return {"prior": "Q-Margin", "cosine": "CosFace"}.get(self.kind, self.kind)

    @property
    def text(self) -> str:
        """The numbers in short form, such as ``s=64, m=0.5``."""
        order = "" if self.alpha == 1.0 else f"\u03b1={self.alpha:g}, "
        return f"{order}s={self.scale:g}, m={self.margin:g}"

    @property
    def effective_margin(self) -> float | None:
        """Cosine gap that the margin adds (M12); None for an angle, where it is not one number.

        Examples:
            >>> round(Setting("prior", 1.25, 35.0, 0.2).effective_margin, 2)
            0.54
        """
        if self.kind == "angular":
            return None
        rate = (self.alpha - 1.0) * self.scale * self.margin if self.kind == "prior" else 0.0
        try:
            return self.margin if rate == 0.0 else self.margin * math.expm1(rate) / rate
        except OverflowError:
            return math.inf


class PaperRow(NamedTuple):
    """A row of a table of the paper: TAR in percent, None where it prints a dash."""

    loss: str
    setting: Setting | None  # None for methods of other papers
    values: tuple[float | None, ...]
    deviations: tuple[float, ...] = ()
    details: tuple[str, ...] = ()


Headings = tuple[tuple[str, tuple[str, ...]], ...]  # groups of columns


@dataclass(frozen=True)
class Layout:
    """A table of accuracies as the paper prints it."""

    where: str  # number and label in the paper
    title: str
    headings: Headings
    rows: tuple[PaperRow, ...]  # settings that the paper trained
    reported: tuple[PaperRow, ...] = ()  # methods that it quotes; they do not compete
    details: tuple[str, ...] = ()  # headings of ``PaperRow.details``
    is_closed: bool = False  # leave out results whose setting is not in ``rows``
    notes: tuple[str, ...] = ()


IJB: Headings = (("IJB-B", (power(1e-4), power(1e-5))), ("IJB-C", (power(1e-4), power(1e-5))))
FACE: Headings = (("FAR 10⁻³", ("LFW", "CFP-FP", "AgeDB-30", "CALFW", "CPLFW")), *IJB)
SPEAKER: Headings = (("VoxCeleb1-H", (power(1e-3), power(1e-4))),)
_KINDS = {"CosFace": "cosine", "Q-Margin": "prior"}  # the others have an angular margin


def _row(loss: str, alpha: float, scale: float, margin: float, *values: float) -> PaperRow:
    return PaperRow(loss, Setting(_KINDS.get(loss, "angular"), alpha, scale, margin), values)


def _reported(loss: str, data: str, backbone: str, venue: str, *values: float | None) -> PaperRow:
    return PaperRow(loss, None, values, details=(data, backbone, venue))


FACE_ROWS = (
    _row("ArcFace", 1, 32, 0.5, 99.88, 99.36, 98.35, 96.15, 94.90, 95.75, 91.69, 97.42, 95.36),
    _row("ArcFace", 1, 64, 0.5, 99.85, 99.36, 98.43, 96.18, 94.73, 96.09, 92.26, 97.54, 95.70),
    _row("CosFace", 1, 32, 0.5, 99.87, 99.24, 98.22, 96.03, 94.77, 95.81, 92.50, 97.41, 95.52),
    _row("CosFace", 1, 64, 0.5, 99.82, 99.20, 98.28, 96.08, 94.52, 96.05, 93.15, 97.49, 95.82),
    _row("Q-Margin", 1.25, 10, 0.2, 99.87, 99.39, 98.42, 96.25, 94.87, 96.08, 92.95, 97.62, 95.91),
    _row("Q-Margin", 1.25, 10, 0.5, 99.87, 99.36, 98.33, 96.15, 94.80, 96.03, 91.79, 97.55, 95.72),
    _row("Q-Margin", 1.25, 20, 0.2, 99.85, 99.34, 98.45, 96.22, 94.90, 96.21, 92.95, 97.58, 95.91),
    _row("Q-Margin", 1.25, 20, 0.5, 99.83, 99.36, 98.30, 96.17, 94.80, 96.02, 92.45, 97.57, 95.92),
    _row("Q-Margin", 1.25, 32, 0.2, 99.87, 99.36, 98.57, 96.15, 94.83, 96.30, 93.38, 97.76, 96.35),
    _row("Q-Margin", 1.25, 32, 0.5, 99.85, 99.34, 98.33, 96.13, 94.68, 96.05, 92.67, 97.51, 96.00),
    _row("Q-Margin", 1.25, 35, 0.2, 99.83, 99.39, 98.57, 96.08, 94.78, 96.44, 93.67, 97.78, 96.35),
    _row("Q-Margin", 1.5, 10, 0.2, 99.85, 99.33, 98.28, 96.22, 94.65, 95.86, 92.26, 97.48, 95.64),
    _row("Q-Margin", 1.5, 10, 0.5, 99.87, 99.29, 98.15, 96.08, 94.42, 95.56, 91.65, 97.07, 95.04),
    _row("Q-Margin", 1.5, 20, 0.2, 99.83, 99.30, 98.00, 96.15, 94.42, 95.71, 91.85, 97.21, 95.59),
    _row("Q-Margin", 1.5, 20, 0.5, 99.83, 99.29, 98.27, 96.17, 94.58, 95.86, 92.94, 97.38, 95.92),
    _row("Q-Margin", 1.5, 32, 0.2, 99.85, 99.29, 98.30, 96.10, 94.67, 96.04, 92.15, 97.49, 95.93),
    _row("Q-Margin", 1.5, 32, 0.5, 99.85, 99.37, 98.35, 96.12, 94.70, 95.99, 92.27, 97.43, 95.76),
)
SPEAKER_ROWS = (
    _row("ArcFace", 1, 32, 0.2, 86.62, 72.08),
    _row("CosFace", 1, 32, 0.2, 86.68, 70.61),
    _row("EntMax", 2, 5, 0.1, 84.71, 74.37),
    _row("EntMax", 1.75, 5, 0.1, 87.69, 74.08),
    _row("Q-Margin", 1.75, 5, 0.1, 87.02, 74.60),
    _row("Q-Margin", 1.5, 10, 0.1, 87.91, 72.96),
)
SOTA_ROWS = tuple(
    row._replace(details=("WF42M", "R-100", ""))
    for row in (
        _row("ArcFace", 1, 64, 0.5, 96.09, 92.26, 97.54, 95.70),
        _row("CosFace", 1, 64, 0.5, 96.05, 93.15, 97.49, 95.82),
        _row("EntMax", 1.25, 64, 0.5, 96.13, 93.06, 97.55, 96.11),
        _row("SparseMax", 2, 1.9, 0.2, 95.50, 91.84, 97.12, 95.28),
        _row("Q-Margin", 1.25, 35, 0.2, 96.44, 93.67, 97.78, 96.35),
    )
)
REPORTED_ROWS = (
    _reported("AdaFace", "WF4M", "R-100", "CVPR22", 96.03, None, 97.39, None),
    _reported("PartialFC (0.3)", "WF42M", "R-100", "CVPR22", 96.47, None, 97.82, 96.46),
    _reported("CAFace + AdaFace", "WF4M", "R-100", "NeurIPS22", 95.53, 92.29, 97.30, 95.96),
    _reported("F²C", "WF42M", "R-100", "CVPR22", None, None, 97.31, None),
    _reported("QAFace", "MS1MV2", "ResNet†", "WACV23", 95.67, None, 97.20, None),
    _reported("CurricularFace", "MS1MV2", "R-100", "CVPR20", 94.80, None, 96.10, None),
    _reported("MagFace", "MS1MV2", "R-100", "CVPR21", 94.51, 90.36, 95.97, 94.08),
    _reported("ElasticFace", "MS1MV2", "R-100", "CVPR22", 95.43, None, 96.65, None),
    _reported("UniFace", "WF42M", "R-200", "ICCV23", None, None, 97.91, 96.68),
    _reported("TopoFR", "WF42M", "R-200", "NeurIPS24", None, None, 98.01, 97.10),
)
SEEDS_ROW = _row(
    "Q-Margin", 1.25, 32, 0.2, 99.83, 99.35, 98.51, 96.13, 94.87, 96.38, 93.43, 97.77, 96.34
)._replace(deviations=(0.03, 0.02, 0.06, 0.02, 0.04, 0.07, 0.05, 0.01, 0.02))
LAYOUTS = {
    "table-sota": Layout(
        "Table 1, tab:sota_comparison",
        "TAR (%) of five losses trained by one recipe, and of published methods",
        IJB,
        SOTA_ROWS,
        REPORTED_ROWS,
        ("Train data", "Backbone", "Venue"),
        notes=("†The original paper does not give the depth.",),
    ),
    "table-face": Layout(
        "Table 2, tab:results-face", "TAR (%) of every configuration on faces", FACE, FACE_ROWS
    ),
    "table-seeds": Layout(
        "Table 3, tab:multiseed",
        "TAR (%) of one configuration, mean ± standard deviation over seeds",
        FACE,
        (SEEDS_ROW,),
        is_closed=True,
    ),
    "table-speaker": Layout(
        "Table 5, tab:results-r34-vox2dev",
        "TAR (%) of every configuration on speakers",
        SPEAKER,
        SPEAKER_ROWS,
    ),
}
THROUGHPUT = {  # samples per second on eight GPUs; Table 4, tab:throughput
    "ArcFace": 2005.13,
    "Q-Margin 1 %": 1978.07,
    "Q-Margin 5 %": 1900.26,
    "Q-Margin 100 %": 1466.45,
}
TABLES = {
    **{name: f"{layout.where}: {layout.title}" for name, layout in LAYOUTS.items()},
    "table-throughput": "Table 4, tab:throughput: samples per second of whole training steps",
}
