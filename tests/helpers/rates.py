"""Verification metrics word for word, with whole numbers and fractions: slow and obvious."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

INF = math.inf


def plain_points(
    genuine: Sequence[float], impostor: Sequence[float]
) -> list[tuple[float, int, int]]:
    """Threshold, false accepts and false rejects at each distinct score, then accepting nothing."""
    genuine, impostor = [float(g) for g in genuine], [float(x) for x in impostor]
    points = [
        (t, sum(x >= t for x in impostor), sum(g < t for g in genuine))
        for t in sorted({*genuine, *impostor})
    ]
    end = math.nan if INF in {*genuine, *impostor} else INF
    return [*points, (end, 0, len(genuine))]


def plain_tar_at_far(
    genuine: Sequence[float], impostor: Sequence[float], far: float
) -> tuple[float, float]:
    """TAR and the achieved FAR by the k + 1 rule."""
    descending = sorted((float(x) for x in impostor), reverse=True)
    k = max(k for k in range(len(descending) + 1) if k / len(descending) <= far)
    if k == len(descending):
        return 1.0, 1.0
    boundary = descending[k]
    accepted = sum(float(g) > boundary for g in genuine)
    return accepted / len(genuine), sum(x > boundary for x in descending) / len(descending)


def plain_eer(genuine: Sequence[float], impostor: Sequence[float]) -> float:
    """Crossing of the diagonal on the polyline, in exact fractions."""
    points = [
        (Fraction(false_accepts, len(impostor)), Fraction(false_rejects, len(genuine)))
        for _, false_accepts, false_rejects in plain_points(genuine, impostor)
    ]
    for (far, frr), (next_far, next_frr) in pairwise(points):
        if frr < far and next_frr >= next_far:
            share = (far - frr) / ((far - frr) + (next_frr - next_far))
            return float(frr + share * (next_frr - frr))
    raise AssertionError("the first point accepts everything, the last nothing")


def plain_min_dcf(genuine: Sequence[float], impostor: Sequence[float], p_target: float) -> float:
    """Least normalised cost over all points."""
    prior = Fraction(p_target)
    costs = [
        prior * Fraction(rejects, len(genuine)) + (1 - prior) * Fraction(accepts, len(impostor))
        for _, accepts, rejects in plain_points(genuine, impostor)
    ]
    return float(min(costs) / min(prior, 1 - prior))


def plain_min_cllr(genuine: Sequence[float], impostor: Sequence[float]) -> float:
    """Cost after the isotonic posterior, which is the largest of the least means of ranges."""
    values = sorted({*map(float, genuine), *map(float, impostor)})
    hits = [sum(float(g) == value for g in genuine) for value in values]
    sizes = [
        hit + sum(float(x) == value for x in impostor)
        for hit, value in zip(hits, values, strict=True)
    ]
    cost = 0.0
    for i in range(len(values)):
        posterior = max(
            min(
                Fraction(sum(hits[a : b + 1]), sum(sizes[a : b + 1])) for b in range(i, len(values))
            )
            for a in range(i + 1)
        )
        if hits[i] and posterior < 1:
            ratio = posterior / (1 - posterior) * Fraction(len(impostor), len(genuine))
            cost += hits[i] / len(genuine) * math.log2(1 + 1 / ratio)
        if sizes[i] - hits[i] and posterior > 0:
            ratio = posterior / (1 - posterior) * Fraction(len(impostor), len(genuine))
            cost += (sizes[i] - hits[i]) / len(impostor) * math.log2(1 + ratio)
    return cost / 2


def score_sets(num_random: int = 3) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Genuine and impostor scores that are easy, tied, infinite, lopsided or far apart in size."""
    rng = np.random.default_rng(7)
    sets = {
        "one each": ([1.0], [0.0]),
        "one each, tied": ([1.0], [1.0]),
        "all equal": ([0.5] * 7, [0.5] * 12),
        "separated": ([3.0, 4.0, 5.0], [0.0, 1.0, 2.0, 2.0]),
        "reversed": ([0.0, 1.0], [2.0, 3.0, 4.0]),
        "all infinite": ([INF, -INF, INF], [INF, -INF, -INF, -INF]),
        "infinite ends": ([INF, 0.5, -INF, 0.25, INF], [-INF, 0.25, 0.3, INF, -INF, 0.1]),
        "impostors at infinity": ([0.5, 0.6, 0.7], [INF, INF, INF, 0.1]),
        "one outlier": ([1e300, *rng.normal(1, 1, 20)], [-1e300, *rng.normal(0, 1, 30)]),
        "whole range": ([1.7e308, 0.0, 1.0], [-1.7e308, 0.5, 1.0]),
        "one ulp": ([1.0, np.nextafter(1.0, 2.0)], [1.0, np.nextafter(1.0, 0.0), 1.0]),
        "denormal": ([5e-324, 1e-323, 0.0], [0.0, 5e-324, 0.0, -5e-324]),
    }
    for index in range(num_random):
        genuine = rng.normal(1.0, 1.0, int(rng.integers(1, 60)))
        impostor = rng.normal(0.0, 1.0, int(rng.integers(1, 90)))
        sets[f"normal {index}"] = (genuine, impostor)
        sets[f"ties {index}"] = (np.round(genuine * 2) / 2, np.round(impostor * 2) / 2)
        sets[f"heavy tails {index}"] = (np.exp(9 * genuine), -np.exp(9 * impostor))
    return {name: (np.array(g, float), np.array(x, float)) for name, (g, x) in sets.items()}
