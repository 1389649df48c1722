"""Thresholds for any FAR or FPIR that the model's evaluation can resolve, and what they mean."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from qmargin.errors import ConfigError, ProtocolError
from qmargin.evaluation.export import Thresholds
from qmargin.metrics.operating import sufficiency
from qmargin.report.numbers import one_in, out_of, rate_text

LARGEST_FAR = 0.5  # of the slider
CHOSEN_FAR, CHOSEN_FPIR = 1e-3, 1e-2  # initial rates of the page, or the nearest available ones
MANTISSAS = (1, 1.5, 2, 3, 5, 7)
_CLOSE = 1e-9  # relative: 1e-3 may have been written as 0.001


class Point(NamedTuple):
    """A measured threshold; a threshold of None accepts nothing."""

    far: float
    tar: float
    threshold: float | None


@dataclass(frozen=True)
class Operating:
    """The threshold for one false accept rate."""

    far_target: float
    far: float  # measured, at most the target
    tar: float
    threshold: float | None  # scores at or above it are accepted; None: no score is enough
    note: str  # reason why the rate is rough, or empty
    words: str  # its meaning in plain words

    def accepts(self, score: float) -> bool:
        """Whether a score reaches the threshold."""
        return self.threshold is not None and score >= self.threshold


class Decisions:
    """Operating points of a model's own evaluation.

    Between stored points the one with the next smaller FAR is used, so that the FAR of a decision
    is never above the requested one.
    """

    def __init__(self, thresholds: Thresholds | None, *, fit: str = "auto") -> None:
        self.thresholds = thresholds
        option = "" if fit == "auto" else f" --fit {fit}"
        self.how_to = (
            "The model has no thresholds, so scores cannot be turned into decisions. Evaluate it "
            "on your own data, a folder with a folder for each person: `qmargin evaluate all-pairs "
            f"DIR --model MODEL{option} --out result.json`. Then add the result: `qmargin export "
            "MODEL --result result.json`; a training run also needs --out, the model to make"
        )
        points = [] if thresholds is None else _points_of(thresholds)
        self._points = sorted(points, key=lambda point: (point.far, point.tar))
        stops = [float(f"{mantissa}e{e}") for e in range(-9, 0) for mantissa in MANTISSAS]
        self.stops = [self.at(far) for far in stops if far <= LARGEST_FAR and self._resolves(far)]

    def at(self, far: float) -> Operating:
        """The threshold for a FAR.

        Raises:
            ConfigError: The model has no thresholds, or the rate is invalid.
            ProtocolError: Its evaluation cannot resolve this rate.
        """
        if self.thresholds is None:
            raise ConfigError(self.how_to)
        if not 0.0 < far <= 1.0:
            raise ConfigError(f"far is {far:g}; give a rate above 0 and at most 1")
        impostors = self.thresholds.num_impostors
        if not self._resolves(far):
            raise ProtocolError(
                f"no threshold is known for FAR {rate_text(far)}: the evaluation on "
                f"{self.thresholds.protocol} has {impostors:,} impostor pairs, which resolve no "
                f"rate below {rate_text(self._least)}; choose a larger rate"
            )
        enough = sufficiency(far, impostors)
        place = bisect_right(self._points, far * (1.0 + _CLOSE), key=lambda point: point.far)
        point = self._points[place - 1]
        impostor = one_in(point.far, impostors, "impostor pair")
        genuine = out_of(point.tar, "genuine pairs")
        return Operating(
            far_target=far,
            far=point.far,
            tar=point.tar,
            threshold=point.threshold,
            note="" if enough.status == "ok" else enough.message,
            words=f"In the evaluation this threshold accepts {impostor} and {genuine}",
        )

    def search_at(self, fpir: float, size: int) -> Operating:
        """The threshold of a search among ``size`` samples, for a rate of false identifications.

        A person outside the gallery is identified if one of ``size`` comparisons is accepted. The
        probability of this is at most the sum ``size * FAR``, whether or not the comparisons are
        independent (Boole's inequality). So a FAR of ``fpir / size`` keeps the FPIR at or below its
        target on data like the evaluation's; the FPIR that results is often lower.
        """
        if not 0.0 < fpir <= 1.0:
            raise ConfigError(f"fpir is {fpir:g}; give a rate above 0 and at most 1")
        if self.thresholds is not None and not self._resolves(fpir / size):
            least = rate_text(min(1.0, size * self._least))
            raise ProtocolError(
                f"an FPIR of {rate_text(fpir)} among {size:,} samples needs a FAR of "
                f"{rate_text(fpir / size)}, and the evaluation with "
                f"{self.thresholds.num_impostors:,} impostor pairs resolves none below "
                f"{rate_text(self._least)}; allow an FPIR of {least} or more, use a smaller "
                "gallery, or evaluate on more pairs"
            )
        return self.at(fpir / size)

    @property
    def _least(self) -> float:
        """The smallest FAR that the evaluation resolves."""
        assert self.thresholds is not None
        first = self._points[0].far if self._points else 1.0
        return max(first, 1.0 / self.thresholds.num_impostors)

    def _resolves(self, far: float) -> bool:
        return self.thresholds is not None and far >= self._least * (1.0 - _CLOSE)

    def described(self) -> dict[str, Any] | None:
        """Facts about the evaluation for page and programs; None without one."""
        found = self.thresholds
        if found is None:
            return None
        histogram = found.histogram
        return {
            "protocol": found.protocol,
            "num_genuine": found.num_genuine,
            "num_impostors": found.num_impostors,
            "points": [
                {"far_text": rate_text(stop.far_target), **vars(stop)} for stop in self.stops
            ],
            "histogram": None if histogram is None else vars(histogram),
            "calibration": None if found.calibration is None else vars(found.calibration),
        }


def _points_of(thresholds: Thresholds) -> list[Point]:
    """Points of the stored curve, if any, and measured points, which take precedence."""
    points = []
    if thresholds.det is not None:
        det = thresholds.det
        rows = zip(det.far, det.frr, det.threshold, strict=True)
        points = [Point(far, 1.0 - frr, threshold) for far, frr, threshold in rows]
    return points + [
        Point(point.far, point.tar, point.threshold)
        for point in thresholds.points
        if point.far is not None and point.tar is not None
    ]
