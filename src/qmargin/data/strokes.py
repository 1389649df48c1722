"""Stroke identities: synthetic open-set images for tests and large experiments.

An identity is a number that draws a small program of pen strokes. A sample is a random distortion
of its identity's drawing. Nothing is stored: two million identities cost as much as two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.order import GOLDEN, derived_seed, mixed
from qmargin.data.synthetic import DrawnIdentities

Keys = NDArray[np.uint64]
Floats = NDArray[np.float32]
NUM_CONTROLS = 4  # control points of a stroke: a cubic spline
NUM_STEPS = 16  # places at which the pen touches the paper along a stroke
_HALVES_STD = 65536.0 * (4.0 / 12.0) ** 0.5  # of the sum of four uniform 16-bit numbers


def joined_keys(keys: Keys, numbers: NDArray[np.integer]) -> Keys:
    """A key for each pair of a key and a number, ``[n]``."""
    return mixed(keys + mixed((numbers.astype(np.uint64) + np.uint64(1)) * GOLDEN))


def _draws(keys: Keys, count: int) -> Keys:
    """``count`` hashes of every key, ``[n, count]``."""
    return mixed(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)


def uniforms(keys: Keys, count: int) -> Floats:
    """Numbers in [0, 1), ``[n, count]``."""
    return (_draws(keys, count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def normals(keys: Keys, count: int) -> Floats:
    """Numbers of mean 0 and deviation 1 that never exceed 3.5, ``[n, count]``.

    The sum of four uniform numbers, so that distortions are bounded, and no logarithm is needed.
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
    """Points ``[..., NUM_STEPS, 2]`` of splines through ``[..., NUM_CONTROLS, 2]``."""
    weights = _spline()[:, :, None]
    points = weights[:, 0] * controls[..., None, 0, :]
    for index in range(1, NUM_CONTROLS):
        points += weights[:, index] * controls[..., None, index, :]
    return points


def inked(points: Floats, widths: Floats, amounts: Floats, *, size: int) -> Floats:
    """Pictures ``[n, size, size]`` in [0, 1) of a soft pen that touches at some points.

    A touch leaves a Gaussian spot, which is a product of one factor per row and one per column; so
    a picture is the product of two small matrices. Ink is limited to full coverage.

    Points ``[n, P, 2]`` are (across, down) on paper from -1 to 1; widths ``[n]`` are deviations of
    a spot in pixels; amounts ``[n, P]`` are the ink of each touch, 0 where the pen is lifted.
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


BATCH = 512  # pictures that are drawn at once: their factors stay in the cache
MOST_STROKES = 4
FEWEST_STROKES = 2

# Parameters of programs; the paper reaches from -1 to 1.
REACH = 0.75  # of control points from the middle
SHORTEST, LONGEST = 0.2, 0.65  # from one control point to the next
BEND = 4.0  # radians that a stroke may turn at a control point, from one side to the other
GOES_ON = 0.4  # of strokes, starting where the last one ended

# Distortions at difficulty 1, in standard deviations. They were chosen on validation identities, so
# that the demo's network has an equal error rate of a few percent.
JITTER = 0.075  # of a control point
TURN = 0.09  # radians
SLANT = 0.11  # sideways per upwards
STRETCH = 0.075  # of the logarithm of width and height
MOVE = 0.04  # of the whole
WIDTH = 0.7  # of the pen, in pixels at size 32
WIDTH_SPREAD = 0.11  # of its logarithm
INK = 0.9  # of one touch
PRESSURE_SPREAD = 0.19  # of the logarithm of the ink
LIFT_RATE = 0.15  # of strokes, with the pen off for a moment
LIFT_LENGTH = 0.4  # of a stroke, at most
NOISE = 0.06  # of a pixel; full ink is 1

_NUM_SHAPE = MOST_STROKES * NUM_CONTROLS * 2


@dataclass(frozen=True)
class StrokeIdentities(DrawnIdentities):
    """Images of pen strokes; the strokes are the identity, everything else is distortion.

    A distortion moves control points, slants, turns and stretches the whole, changes pressure and
    width of the pen, lifts it for a moment, and adds noise. Identities of the three splits are
    disjoint. The data are synthetic and say nothing about faces or voices.

    Examples:
        >>> dataset = StrokeIdentities(2_000_000, 5)
        >>> image, label = dataset.read(9_999_999, seed=0)
        >>> list(image.shape), label, dataset.sample_id(9_999_999)
        ([1, 32, 32], 1999999, 'identity-1999999/sample-4')
        >>> dataset.images(np.arange(3)).shape
        (3, 32, 32)
    """

    size: int = 32
    smallest = 8
    is_ink = True

    def augmented(self, pictures: NDArray[np.uint8], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Pictures in [0, 1], ``[n, 1, size, size]``, each moved by its seed."""
        return as_inputs(pictures, self.shift, seeds)

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples without augmentation: ``[n, size, size]``, 255 is full ink."""
        indices = self._checked(indices)
        pictures = np.empty((len(indices), self.size, self.size), dtype=np.uint8)
        for start in range(0, len(indices), BATCH):
            part = slice(start, start + BATCH)
            pictures[part] = self._drawn(indices[part])
        return pictures

    def _drawn(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Some samples; each depends only on its identity, its number and the seed."""
        identities, numbers = np.divmod(indices.astype(np.int64), self.samples_per_class)
        identities = self._numbers(identities)
        worlds = np.full(len(indices), derived_seed(self.seed), dtype=np.uint64)
        programs = joined_keys(worlds, identities)
        keys = joined_keys(programs, numbers)
        points, widths, amounts = _distorted(*_program(programs), keys, self.difficulty)
        widths = widths * np.float32(self.size / 32)
        pictures = inked(points, widths, amounts, size=self.size) * np.float32(255.0)
        grain = normals(joined_keys(keys, np.ones(1, np.int64)), self.size * self.size)
        pictures += grain.reshape(pictures.shape) * np.float32(255.0 * NOISE * self.difficulty)
        np.clip(np.rint(pictures, out=pictures), 0.0, 255.0, out=pictures)
        return pictures.astype(np.uint8)


def _program(keys: Keys) -> tuple[Floats, NDArray[np.bool_]]:
    """Control points ``[n, strokes, NUM_CONTROLS, 2]``, and which strokes an identity has."""
    draws = uniforms(keys, 1 + MOST_STROKES * (1 + 2 * NUM_CONTROLS))
    choices = MOST_STROKES - FEWEST_STROKES + 1
    numbers = FEWEST_STROKES + (draws[:, 0] * np.float32(choices)).astype(np.int64)
    draws = draws[:, 1:].reshape(len(keys), MOST_STROKES, -1)
    goes_on, starts = draws[:, :, :1] < np.float32(GOES_ON), draws[:, :, 1:3]
    reach = np.float32(REACH)
    controls = np.empty((len(keys), MOST_STROKES, NUM_CONTROLS, 2), dtype=np.float32)
    controls[:, :, 0] = (starts * np.float32(2.0) - np.float32(1.0)) * reach
    controls[:, :, 1:] = _walks(draws[:, :, 3:])
    for stroke in range(MOST_STROKES):
        if stroke:  # the pen may not have been lifted since the last one
            end = controls[:, stroke - 1, -1]
            controls[:, stroke, 0] = np.where(goes_on[:, stroke], end, controls[:, stroke, 0])
        controls[:, stroke, 1:] += controls[:, stroke, :1]
    # What went past an edge is mirrored at it.
    folded: Floats = reach - np.abs(np.mod(controls + reach, 4 * reach) - 2 * reach)
    return folded, np.arange(MOST_STROKES) < numbers[:, None]


def _walks(draws: Floats) -> Floats:
    """Ways from the first control point to the others, ``[n, strokes, NUM_CONTROLS - 1, 2]``."""
    turns, lengths = np.split(draws, 2, axis=2)
    turns = (turns - np.float32(0.5)) * np.float32(BEND)
    turns[:, :, 0] *= np.float32(2.0 * math.pi / BEND)  # the first step goes anywhere
    directions = np.cumsum(turns, axis=2)
    lengths = np.float32(SHORTEST) + lengths * np.float32(LONGEST - SHORTEST)
    steps = np.empty((*draws.shape[:2], NUM_CONTROLS - 1, 2), dtype=np.float32)
    np.multiply(np.cos(directions), lengths, out=steps[..., 0])
    np.multiply(np.sin(directions), lengths, out=steps[..., 1])
    return np.cumsum(steps, axis=2)


def _distorted(
    controls: Floats, has_ink: NDArray[np.bool_], keys: Keys, difficulty: float
) -> tuple[Floats, Floats, Floats]:
    """Points, widths and ink of programs, each with the distortion of its key."""
    n = len(keys)
    noise = normals(keys, _NUM_SHAPE + 8 + MOST_STROKES) * np.float32(difficulty)
    jitter = noise[:, :_NUM_SHAPE].reshape(controls.shape)
    whole, per_stroke = noise[:, _NUM_SHAPE : _NUM_SHAPE + 8], noise[:, _NUM_SHAPE + 8 :]
    points = along(controls + np.float32(JITTER) * jitter)  # [n, strokes, NUM_STEPS, 2]
    points = points.reshape(n, MOST_STROKES * NUM_STEPS, 2) @ _frames(whole)
    points += np.float32(MOVE) * whole[:, None, 4:6]
    widths = np.float32(WIDTH) * np.exp(np.float32(WIDTH_SPREAD) * whole[:, 6])
    pressure = np.exp(np.float32(PRESSURE_SPREAD) * (whole[:, 7:8] + per_stroke))
    amounts = np.where(has_ink, pressure, np.float32(0.0))[:, :, None] * np.float32(INK)
    amounts = np.where(_lifted(keys, difficulty), np.float32(0.0), amounts)
    return points, widths, amounts.reshape(n, MOST_STROKES * NUM_STEPS)


def _frames(whole: Floats) -> Floats:
    """Turn, slant and stretch of each picture as a matrix, ``[n, 2, 2]``."""
    angle = np.float32(TURN) * whole[:, 0]
    cosine, sine = np.cos(angle), np.sin(angle)
    wide = np.exp(np.float32(STRETCH) * whole[:, 2])
    tall = np.exp(np.float32(STRETCH) * whole[:, 3])
    slant = np.float32(SLANT) * whole[:, 1]
    rows = [
        wide * cosine,
        wide * sine,
        tall * (slant * cosine - sine),
        tall * (slant * sine + cosine),
    ]
    return np.stack(rows, axis=1).reshape(-1, 2, 2)


def _lifted(keys: Keys, difficulty: float) -> NDArray[np.bool_]:
    """Where the pen was off the paper for a moment, ``[n, strokes, NUM_STEPS]``."""
    draws = uniforms(joined_keys(keys, np.zeros(1, np.int64)), 3 * MOST_STROKES)
    draws = draws.reshape(len(keys), 3, MOST_STROKES, 1)
    is_lifted = draws[:, 0] < np.float32(min(1.0, LIFT_RATE * difficulty))
    start = draws[:, 1] * np.float32(NUM_STEPS)
    length = draws[:, 2] * np.float32(LIFT_LENGTH * NUM_STEPS)
    steps = np.arange(NUM_STEPS, dtype=np.float32)
    return is_lifted & (steps >= start) & (steps < start + length)


def as_inputs(pictures: NDArray[np.uint8], shift: int, seeds: Sequence[int]) -> NDArray[np.float32]:
    """Pictures in [0, 1], ``[n, 1, size, size]``, each moved by its seed."""
    if shift:
        pictures = moved(pictures, shift, seeds)
    return pictures[:, None] * np.float32(1.0 / 255.0)


def moved(pictures: NDArray[Any], shift: int, seeds: Sequence[int]) -> NDArray[Any]:
    """Pictures moved by up to ``shift`` pixels each way, padded with blank paper."""
    width, (count, size, _) = 2 * shift + 1, pictures.shape
    down, across = np.divmod(np.asarray(seeds, dtype=np.int64) % (width * width), width)
    framed = np.zeros((count, size + 2 * shift, size + 2 * shift), dtype=pictures.dtype)
    framed[:, shift : shift + size, shift : shift + size] = pictures
    windows = np.lib.stride_tricks.sliding_window_view(framed, (size, size), (1, 2))
    chosen: NDArray[Any] = windows[np.arange(count), down, across]
    return chosen
