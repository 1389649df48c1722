"""Pen strokes drawn on a grid of pixels, many pictures at a time, and the draws they are made from.

Every number is a hash of a key and a counter, and every pixel is computed from its own picture
alone. A picture is therefore the same whether it is drawn alone or among thousands.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Floats = NDArray[np.float32]
NUM_CONTROLS = 4  # control points of a stroke: a cubic spline
NUM_STEPS = 16  # places at which the pen touches the paper along a stroke

_STEP = np.uint64(0x9E3779B97F4A7C15)  # of the splitmix64 generator, with the factors of its mix
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_HALVES_STD = 65536.0 * (4.0 / 12.0) ** 0.5  # of the sum of four uniform 16-bit numbers


def mixed(keys: Keys) -> Keys:
    """A hash of each key: the finaliser of splitmix64, a permutation of 64-bit numbers."""
    mixed = keys ^ (keys >> np.uint64(30))
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> np.uint64(31)
    return mixed


def joined_keys(keys: Keys, numbers: NDArray[np.integer]) -> Keys:
    """A key for each pair of a key and a number, ``[n]``.

    Examples:
        >>> keys = joined_keys(np.zeros(3, np.uint64), np.arange(3))
        >>> len(set(keys.tolist()))
        3
    """
    return mixed(keys + mixed((numbers.astype(np.uint64) + np.uint64(1)) * _STEP))


def _draws(keys: Keys, count: int) -> Keys:
    """``count`` hashes of every key, ``[n, count]``."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * _STEP
    return mixed(keys[:, None] + counters)


def uniforms(keys: Keys, count: int) -> Floats:
    """Numbers in [0, 1), ``[n, count]``."""
    return (_draws(keys, count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def normals(keys: Keys, count: int) -> Floats:
    """Numbers of mean 0 and deviation 1 that never exceed 3.5, ``[n, count]``.

    The sum of four uniform numbers: no hand errs without limit, and no logarithm is taken.

    Examples:
        >>> values = normals(np.arange(4, dtype=np.uint64), 10_000)
        >>> abs(round(float(values.mean()), 1)), round(float(values.std()), 1)
        (0.0, 1.0)
    """
    halves = _draws(keys, count).view(np.uint16).reshape(len(keys), count, 4)
    sums = halves.sum(axis=2, dtype=np.int32)
    values: Floats = (sums - 2 * 65535).astype(np.float32) * np.float32(1.0 / _HALVES_STD)
    return values


@cache
def _spline() -> Floats:
    """Weights of the control points along a stroke, ``[NUM_STEPS, NUM_CONTROLS]``.

    A Catmull-Rom spline; beyond either end the line is continued by the mirrored neighbour.
    """
    places = np.linspace(0.0, NUM_CONTROLS - 1, NUM_STEPS)
    rows = np.zeros((NUM_STEPS, NUM_CONTROLS + 2))  # with one control point beyond each end
    for row, place in zip(rows, places, strict=True):
        segment = min(int(place), NUM_CONTROLS - 2)
        t = place - segment
        row[segment : segment + 4] = [
            -0.5 * t + t**2 - 0.5 * t**3,
            1.0 - 2.5 * t**2 + 1.5 * t**3,
            0.5 * t + 2.0 * t**2 - 1.5 * t**3,
            -0.5 * t**2 + 0.5 * t**3,
        ]
    weights = rows[:, 1:-1].copy()
    weights[:, :2] += rows[:, :1] * [2.0, -1.0]
    weights[:, -2:] += rows[:, -1:] * [-1.0, 2.0]
    return weights.astype(np.float32)


def along(controls: Floats) -> Floats:
    """Points of splines through control points, ``[..., NUM_STEPS, 2]``.

    Args:
        controls: ``[..., NUM_CONTROLS, 2]``.

    Examples:
        >>> line = along(np.array([[0, 0], [1, 1], [2, 2], [3, 3]], dtype=np.float32))
        >>> line.shape, line[0].tolist(), line[-1].tolist()
        ((16, 2), [0.0, 0.0], [3.0, 3.0])
    """
    weights = _spline()[:, :, None]
    points = weights[:, 0] * controls[..., None, 0, :]
    for index in range(1, NUM_CONTROLS):
        points += weights[:, index] * controls[..., None, index, :]
    return points


def inked(points: Floats, widths: Floats, amounts: Floats, *, size: int) -> Floats:
    """Pictures ``[n, size, size]`` in [0, 1) of a soft pen that touches at some points.

    A touch leaves a Gaussian spot, which is a product of one factor per row and one per column; so
    a picture is the product of two small matrices. Paper takes up no more than full ink.

    Args:
        points: ``[n, P, 2]`` places (across, down); the paper is the square from -1 to 1.
        widths: ``[n]`` deviation of a spot in pixels.
        amounts: ``[n, P]`` ink of each touch; 0 where the pen is lifted.
        size: Pixels of a side.
    """
    pixels = np.arange(size, dtype=np.float32)
    factor = (np.float32(1.0) / widths)[:, None, None]
    places = (points + np.float32(1.0)) * np.float32(0.5 * size) - np.float32(0.5)  # in pixels
    across = _spots((places[:, :, 0, None] - pixels) * factor)  # [n, P, size]
    down = _spots((places[:, :, 1, None] - pixels) * factor)
    down *= amounts[:, :, None]
    ink: Floats = np.matmul(down.transpose(0, 2, 1), across)
    np.negative(ink, out=ink)
    np.expm1(ink, out=ink)
    return np.negative(ink, out=ink)


def _spots(distances: Floats) -> Floats:
    np.multiply(distances, distances, out=distances)
    distances *= np.float32(-0.5)
    return np.exp(distances, out=distances)
