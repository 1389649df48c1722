"""What each result over all pairs needs scored exactly, and the result once it is.

A plan opens bins; when the pairs in all open bins are scored, the function that it returned gives
the result. ``genuine`` is sorted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import numpy as np

from qmargin.evaluation.pair_blocks import NUM_BINS
from qmargin.evaluation.pair_counts import ImpostorCounts
from qmargin.evaluation.pair_scores import Floats
from qmargin.metrics.checks import just_above
from qmargin.metrics.crossing import Costs, Eer, MinDcf
from qmargin.metrics.curve import DetCurve
from qmargin.metrics.operating import TarAtFar, num_allowed

FLOAT64 = np.dtype(np.float64)


def plan_tar(counts: ImpostorCounts, genuine: Floats, far: float) -> Callable[[], TarAtFar]:
    """Open the rank of the first impostor that is one too many."""
    allowed = num_allowed(far, len(counts))
    if allowed < len(counts):
        counts.open_rank(allowed + 1)

    def answer() -> TarAtFar:
        false_accepts, num_below, threshold = len(counts), 0, -np.inf
        if allowed < len(counts):
            boundary = counts.score_at(allowed + 1)
            false_accepts = int(counts.num_above(np.array([boundary]))[0])
            num_below = int(np.searchsorted(genuine, boundary, side="right"))
            threshold = just_above(boundary, FLOAT64)
        return TarAtFar(
            far_target=far,
            tar=(len(genuine) - num_below) / len(genuine),
            far=false_accepts / len(counts),
            false_accepts=false_accepts,
            threshold=threshold,
            rule="conservative",
            num_genuine=len(genuine),
            num_impostors=len(counts),
        )

    return answer


def plan_eer(counts: ImpostorCounts, genuine: Floats) -> Callable[[], Eer]:
    """Open the bins in which FRR - FAR may change its sign."""
    places, slack = counts.bins.of_scores(genuine), counts.bins.slack

    def excess(false_rejects: int, false_accepts: int) -> int:
        return false_rejects * len(counts) - false_accepts * len(genuine)

    def at_edge(place: int, shift: int) -> int:
        """Excess at the lower edge of a bin, with impostors moved down by some bins."""
        accepts = counts.in_or_above[min(max(place + shift, 0), NUM_BINS)]
        return excess(int(np.searchsorted(places, place)), int(accepts))

    edges = range(NUM_BINS + 1)
    high = min(bisect_left(edges, 0, key=lambda place: at_edge(place, -slack)), NUM_BINS)
    low = max(bisect_left(edges, 0, key=lambda place: at_edge(place, slack)) - 1, 0)
    counts.open_bins(low, high)

    def answer() -> Eer:
        inside = genuine[bisect_left(places, low) : bisect_left(places, high)]
        values = np.unique(np.concatenate([inside, counts.scores_between(low, high)]))
        accepts = counts.num_at_least(values).tolist()
        rejects = np.searchsorted(genuine, values).tolist()
        index = range(len(values))
        last = bisect_left(index, 0, key=lambda i: excess(rejects[i], accepts[i])) - 1
        after = int(np.searchsorted(genuine, values[last], side="right"))
        short = -excess(rejects[last], accepts[last])
        over = excess(after, int(counts.num_above(values[last : last + 1])[0]))
        crossing = rejects[last] * over + after * short
        rate = float(Fraction(crossing, (over + short) * len(genuine)))
        value = float(values[last])
        return Eer(rate, just_above(value, FLOAT64) if over < short else value)

    return answer


def plan_min_dcf(counts: ImpostorCounts, genuine: Floats, p_target: float) -> Callable[[], MinDcf]:
    """Open the bins of genuine scores at which the cost may be least.

    A threshold between two genuine scores can be raised to the next without rejecting more genuine
    pairs, so no other threshold can cost less than these and rejecting everything.
    """
    costs, slack = Costs.of(p_target), counts.bins.slack
    values, below = np.unique(genuine, return_index=True)
    frr = below / len(genuine)
    places = counts.bins.of_scores(values)
    most = counts.in_or_above[np.clip(places - slack, 0, NUM_BINS)]
    least = counts.in_or_above[np.clip(places + 1 + slack, 0, NUM_BINS)]
    limit = min(float(costs.total(frr, most / len(counts)).min()), float(costs.total(1.0, 0.0)))
    kept = np.flatnonzero(costs.total(frr, least / len(counts)) <= limit)
    counts.open_bins(places[kept], places[kept] + 1)

    def answer() -> MinDcf:
        far = counts.num_at_least(values[kept]) / len(counts)
        total = costs.total(frr[kept], far)
        nothing = float(costs.total(1.0, 0.0))
        if nothing < total.min(initial=np.inf):
            return MinDcf(nothing, np.inf, 0.0, 1.0, p_target)
        best = int(np.argmin(total))
        threshold = float(values[kept[best]])
        return MinDcf(
            float(total[best]), threshold, float(far[best]), float(frr[kept[best]]), p_target
        )

    return answer


def plan_det(counts: ImpostorCounts, genuine: Floats) -> Callable[[], DetCurve]:
    """Open the ranks of points evenly spaced on a probit axis, densely where FAR is low."""
    probits = np.concatenate([np.arange(-6.0, -3.0, 0.05), np.arange(-3.0, 3.01, 0.2)])
    fars = [NormalDist().cdf(probit) for probit in probits.tolist()]
    allowed = {0, *(num_allowed(far, len(counts)) for far in fars)}
    ranks = sorted(k + 1 for k in allowed if k < len(counts))
    for rank in (*ranks, len(counts)):
        counts.open_rank(rank)

    def answer() -> DetCurve:
        boundaries = np.unique([counts.score_at(rank) for rank in ranks])
        lowest = min(float(genuine[0]), counts.score_at(len(counts)))
        accepts = counts.num_above(boundaries)
        rejects = np.searchsorted(genuine, boundaries, side="right")
        return DetCurve(
            np.array([lowest, *np.nextafter(boundaries, np.inf), np.inf]),
            np.array([1.0, *(accepts / len(counts)), 0.0]),
            np.array([0.0, *(rejects / len(genuine)), 1.0]),
            len(genuine),
            len(counts),
        )

    return answer
