"""What a report draws: the histogram, the reliability of calibrated scores, the hardest trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError, ProtocolError
from qmargin.evaluation.keys import TrialKeys
from qmargin.evaluation.result import (
    CalibrationCurve,
    Hardest,
    HardPair,
    Histogram,
    Reliability,
)
from qmargin.evaluation.score_files import ScoreSet
from qmargin.metrics.checks import pieces
from qmargin.metrics.llr import Calibration, calibrate

Floats = NDArray[np.float64]
HISTOGRAM_BINS = 64
RELIABILITY_BINS = 20


def score_histogram(genuine: Floats, impostor: Floats) -> Histogram:
    """Counts of the finite scores in bins of equal width.

    Examples:
        >>> histogram = score_histogram(np.array([1.0, 1.0]), np.array([0.0]))
        >>> len(histogram.edges), histogram.genuine[-1], histogram.impostor[0]
        (65, 2, 1)
    """
    low, high = _range([genuine, impostor])
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    counts = []
    for side in (genuine, impostor):
        found = np.zeros(HISTOGRAM_BINS, np.int64)
        for piece in pieces(side):
            found += np.histogram(piece[np.isfinite(piece)], bins=edges)[0]
        counts.append(found.tolist())
    return Histogram(tuple(edges.tolist()), tuple(counts[0]), tuple(counts[1]))


def counted_histogram(genuine: Floats, impostor: Floats, counts: NDArray[np.int64]) -> Histogram:
    """The same where impostors are known as counts at scores, all of them finite.

    Examples:
        >>> histogram = counted_histogram(np.ones(2), np.array([0.0, 0.5]), np.array([9, 0]))
        >>> histogram.genuine[-1], histogram.impostor[0], sum(histogram.impostor)
        (2, 9, 9)
    """
    impostor, counts = impostor[counts > 0], counts[counts > 0]
    plain = score_histogram(genuine, impostor)
    places = np.digitize(impostor, plain.edges[1:-1])
    found = np.zeros(HISTOGRAM_BINS, np.int64)
    np.add.at(found, places, counts)
    return Histogram(plain.edges, plain.genuine, tuple(found.tolist()))


def _range(sides: list[Floats]) -> tuple[float, float]:
    """Smallest and largest finite score, a little apart even where they are the same."""
    finite = (piece[np.isfinite(piece)] for side in sides for piece in pieces(side))
    ends = [(float(piece.min()), float(piece.max())) for piece in finite if len(piece)]
    low = min((end[0] for end in ends), default=0.0)
    high = max((end[1] for end in ends), default=0.0)
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-9):
        return low, high
    margin = 0.5 * max(abs(low), 1.0)
    return low - margin, high + margin


def calibration_curve(genuine: Floats, impostor: Floats) -> CalibrationCurve | None:
    """The affine map to log-likelihood ratios and how it fits; None where there is no such map.

    There is none when a threshold separates all trials, or when a score is infinite.
    """
    try:
        calibration = calibrate(genuine, impostor, prior=0.5)
    except (ProtocolError, DataError):
        return None
    reliability = _reliability(calibration, genuine, impostor)
    return CalibrationCurve(calibration.scale, calibration.offset, reliability)


def _reliability(calibration: Calibration, genuine: Floats, impostor: Floats) -> Reliability:
    """Predicted against observed shares, both labels weighing the same."""
    edges = np.linspace(0.0, 1.0, RELIABILITY_BINS + 1)
    shares, sums, counts = [], [], np.zeros(RELIABILITY_BINS, dtype=np.int64)
    for side in (genuine, impostor):
        found, total = np.zeros(RELIABILITY_BINS, np.int64), np.zeros(RELIABILITY_BINS)
        for piece in pieces(side):
            posterior = 0.5 * (1.0 + np.tanh(0.5 * calibration.apply(piece)))
            place = (posterior * RELIABILITY_BINS).astype(np.int64)
            np.minimum(place, RELIABILITY_BINS - 1, out=place)
            found += np.bincount(place, minlength=RELIABILITY_BINS)
            np.add.at(total, place, posterior)
        counts += found
        shares.append(found / len(side))
        sums.append(total / len(side))
    totals = shares[0] + shares[1]
    has_trials = totals > 0
    predicted = np.divide(sums[0] + sums[1], totals, where=has_trials, out=np.full_like(totals, 0))
    observed = np.divide(shares[0], totals, where=has_trials, out=np.full_like(totals, 0))
    return Reliability(
        tuple(edges.tolist()),
        _where(predicted, has_trials),
        _where(observed, has_trials),
        tuple(counts.tolist()),
    )


def _where(values: Floats, is_known: NDArray[np.bool_]) -> tuple[float | None, ...]:
    pairs = zip(values.tolist(), is_known.tolist(), strict=True)
    return tuple(value if known else None for value, known in pairs)


def hardest_trials(score_set: ScoreSet, number: int) -> Hardest | None:
    """The highest impostors and the lowest genuine trials; ties go by the order of the names.

    None when the trials have no names, or none are asked for.
    """
    keys, scores, is_genuine = score_set.keys, score_set.scores, score_set.is_genuine
    if keys is None or number == 0:
        return None
    return Hardest(
        _first(keys, scores, np.flatnonzero(~is_genuine), -1.0, number),
        _first(keys, scores, np.flatnonzero(is_genuine), 1.0, number),
    )


def _first(
    keys: TrialKeys, scores: Floats, rows: NDArray[np.int64], sign: float, number: int
) -> tuple[HardPair, ...]:
    """The rows with the smallest signed score."""
    signed = sign * scores[rows]
    if number < len(rows):  # all of a tie at the last place, so that names decide
        limit = np.partition(signed, number - 1)[number - 1]
        rows, signed = rows[signed <= limit], signed[signed <= limit]
    order = np.lexsort((keys.test[rows], keys.enrol[rows], signed))[:number]
    return tuple(HardPair(*keys.trial(int(row)), float(scores[row])) for row in rows[order])
