"""The paper's own numbers, copied from its tables; TAR in percent, None where it has a dash."""

from __future__ import annotations

from typing import NamedTuple

Values = tuple[float | None, ...]


class Row(NamedTuple):
    """A setting and what the paper reports for it."""

    loss: str
    alpha: float  # 1 for ArcFace and CosFace, for which the paper has a dash
    scale: float
    margin: float
    values: Values

    @property
    def setting(self) -> tuple[str, float, float, float]:
        """What rows are found by."""
        return self.loss, self.alpha, self.scale, self.margin


class Reported(NamedTuple):
    """A method of another paper."""

    method: str
    data: str
    backbone: str
    venue: str
    values: Values


Columns = tuple[tuple[str, tuple[str, ...]], ...]  # headings, each with what is below it
IJB: Columns = (("IJB-B", ("1e-4", "1e-5")), ("IJB-C", ("1e-4", "1e-5")))
DEVELOPMENT = ("LFW", "CFP-FP", "AgeDB-30", "CALFW", "CPLFW")  # TAR at FAR 1e-3
FACE_COLUMNS: Columns = (("Benchmarks", DEVELOPMENT), *IJB)
SPEAKER_COLUMNS: Columns = (("TAR@FAR on VoxCeleb1-H", ("1e-3", "1e-4")),)

REPORTED = (
    Reported("AdaFace", "WF4M", "R-100", "CVPR22", (96.03, None, 97.39, None)),
    Reported("PartialFC (0.3)", "WF42M", "R-100", "CVPR22", (96.47, None, 97.82, 96.46)),
    Reported("CAFace + AdaFace", "WF4M", "R-100", "NeurIPS22", (95.53, 92.29, 97.30, 95.96)),
    Reported("F²C", "WF42M", "R-100", "CVPR22", (None, None, 97.31, None)),
    Reported("QAFace", "MS1MV2", "ResNet†", "WACV23", (95.67, None, 97.20, None)),
    Reported("CurricularFace", "MS1MV2", "R-100", "CVPR20", (94.80, None, 96.10, None)),
    Reported("MagFace", "MS1MV2", "R-100", "CVPR21", (94.51, 90.36, 95.97, 94.08)),
    Reported("ElasticFace", "MS1MV2", "R-100", "CVPR22", (95.43, None, 96.65, None)),
    Reported("UniFace", "WF42M", "R-200", "ICCV23", (None, None, 97.91, 96.68)),
    Reported("TopoFR", "WF42M", "R-200", "NeurIPS24", (None, None, 98.01, 97.10)),
)
REIMPLEMENTED = (
    Row("ArcFace", 1.0, 64.0, 0.5, (96.09, 92.26, 97.54, 95.70)),
    Row("CosFace", 1.0, 64.0, 0.5, (96.05, 93.15, 97.49, 95.82)),
    Row("EntMax", 1.25, 64.0, 0.5, (96.13, 93.06, 97.55, 96.11)),
    Row("SparseMax", 2.0, 1.9, 0.2, (95.50, 91.84, 97.12, 95.28)),
    Row("Q-Margin", 1.25, 35.0, 0.2, (96.44, 93.67, 97.78, 96.35)),
)


def _face(loss: str, alpha: float, scale: float, margin: float, *values: float) -> Row:
    return Row(loss, alpha, scale, margin, values)


FACE = (
    _face("ArcFace", 1, 32, 0.5, 99.88, 99.36, 98.35, 96.15, 94.90, 95.75, 91.69, 97.42, 95.36),
    _face("ArcFace", 1, 64, 0.5, 99.85, 99.36, 98.43, 96.18, 94.73, 96.09, 92.26, 97.54, 95.70),
    _face("CosFace", 1, 32, 0.5, 99.87, 99.24, 98.22, 96.03, 94.77, 95.81, 92.50, 97.41, 95.52),
    _face("CosFace", 1, 64, 0.5, 99.82, 99.20, 98.28, 96.08, 94.52, 96.05, 93.15, 97.49, 95.82),
    _face("Q-Margin", 1.25, 10, 0.2, 99.87, 99.39, 98.42, 96.25, 94.87, 96.08, 92.95, 97.62, 95.91),
    _face("Q-Margin", 1.25, 10, 0.5, 99.87, 99.36, 98.33, 96.15, 94.80, 96.03, 91.79, 97.55, 95.72),
    _face("Q-Margin", 1.25, 20, 0.2, 99.85, 99.34, 98.45, 96.22, 94.90, 96.21, 92.95, 97.58, 95.91),
    _face("Q-Margin", 1.25, 20, 0.5, 99.83, 99.36, 98.30, 96.17, 94.80, 96.02, 92.45, 97.57, 95.92),
    _face("Q-Margin", 1.25, 32, 0.2, 99.87, 99.36, 98.57, 96.15, 94.83, 96.30, 93.38, 97.76, 96.35),
    _face("Q-Margin", 1.25, 32, 0.5, 99.85, 99.34, 98.33, 96.13, 94.68, 96.05, 92.67, 97.51, 96.00),
    _face("Q-Margin", 1.25, 35, 0.2, 99.83, 99.39, 98.57, 96.08, 94.78, 96.44, 93.67, 97.78, 96.35),
    _face("Q-Margin", 1.5, 10, 0.2, 99.85, 99.33, 98.28, 96.22, 94.65, 95.86, 92.26, 97.48, 95.64),
    _face("Q-Margin", 1.5, 10, 0.5, 99.87, 99.29, 98.15, 96.08, 94.42, 95.56, 91.65, 97.07, 95.04),
    _face("Q-Margin", 1.5, 20, 0.2, 99.83, 99.30, 98.00, 96.15, 94.42, 95.71, 91.85, 97.21, 95.59),
    _face("Q-Margin", 1.5, 20, 0.5, 99.83, 99.29, 98.27, 96.17, 94.58, 95.86, 92.94, 97.38, 95.92),
    _face("Q-Margin", 1.5, 32, 0.2, 99.85, 99.29, 98.30, 96.10, 94.67, 96.04, 92.15, 97.49, 95.93),
    _face("Q-Margin", 1.5, 32, 0.5, 99.85, 99.37, 98.35, 96.12, 94.70, 95.99, 92.27, 97.43, 95.76),
)
SEEDS = Row(  # the mean of three seeds
    "Q-Margin", 1.25, 32.0, 0.2, (99.83, 99.35, 98.51, 96.13, 94.87, 96.38, 93.43, 97.77, 96.34)
)
SEEDS_DEVIATION = (0.03, 0.02, 0.06, 0.02, 0.04, 0.07, 0.05, 0.01, 0.02)
SPEAKER = (
    Row("ArcFace", 1.0, 32.0, 0.2, (86.62, 72.08)),
    Row("CosFace", 1.0, 32.0, 0.2, (86.68, 70.61)),
    Row("EntMax", 2.0, 5.0, 0.1, (84.71, 74.37)),
    Row("EntMax", 1.75, 5.0, 0.1, (87.69, 74.08)),
    Row("Q-Margin", 1.75, 5.0, 0.1, (87.02, 74.60)),
    Row("Q-Margin", 1.5, 10.0, 0.1, (87.91, 72.96)),
)
THROUGHPUT = {  # samples a second on eight GPUs
    "ArcFace": 2005.13,
    "Q-Margin 1 %": 1978.07,
    "Q-Margin 5 %": 1900.26,
    "Q-Margin 100 %": 1466.45,
}
