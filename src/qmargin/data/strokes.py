"""Stroke identities: synthetic open-set images for the demo, tests and studies of scale.

An identity is a number that draws a small program of pen strokes. A sample is that program drawn
by another hand. Nothing is stored: two million identities cost as much as two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.order import check_count, check_samples, derived_seed
from qmargin.data.pen import (
    NUM_CONTROLS,
    NUM_STEPS,
    Floats,
    Keys,
    along,
    inked,
    joined_keys,
    normals,
    uniforms,
)
from qmargin.errors import ConfigError, ShapeError

SPLITS = ("train", "validation", "test")
SPLIT_SIZE = 1 << 40  # identities of a split: the numbers of two splits never meet
BATCH = 512  # pictures that are drawn at once: their factors stay in the cache
MOST_STROKES = 4
FEWEST_STROKES = 2

# What programs look like; the paper reaches from -1 to 1.
REACH = 0.75  # of control points from the middle
SHORTEST, LONGEST = 0.2, 0.65  # from one control point to the next
BEND = 4.0  # radians that a stroke may turn at a control point, from one side to the other
GOES_ON = 0.4  # of strokes, starting where the last one ended

# How far hands differ at difficulty 1, in deviations of a bell curve. Chosen on validation
# identities: the demo's network has an equal error rate of a few percent.
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
class StrokeIdentities:
    """Images of pen strokes; the identity is in the strokes, everything else is the hand.

    A hand moves control points, slants, turns and stretches the whole, presses more or less, uses a
    thicker or thinner pen, lifts it for a moment, and leaves a noisy picture. Identities of the
    three splits are disjoint. All of it is synthetic: it says nothing about faces or voices.

    Args:
        num_classes: Number of identities, at most ``SPLIT_SIZE``.
        samples_per_class: Samples of each; sample ``i`` belongs to identity
            ``i // samples_per_class``.
        size: Pixels of a side.
        seed: Another seed is another world of identities.
        split: ``"train"``, ``"validation"`` or ``"test"``.
        difficulty: Multiplies every way in which hands differ; 0 is a printing press.
        shift: Pixels by which a reading may move a sample, as augmentations do; 0 for none.
        in_memory: Draw all samples at the first reading and keep them.

    Examples:
        >>> dataset = StrokeIdentities(2_000_000, 5)
        >>> image, label = dataset.read(9_999_999, seed=0)
        >>> list(image.shape), label, dataset.sample_id(9_999_999)
        ([1, 32, 32], 1999999, 'identity-1999999/sample-4')
        >>> dataset.images(np.arange(3)).shape
        (3, 32, 32)
    """

    num_classes: int
    samples_per_class: int
    size: int = 32
    seed: int = 0
    split: str = "train"
    difficulty: float = 1.0
    shift: int = 0
    in_memory: bool = False
    _kept: dict[str, NDArray[np.uint8]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        check_count(self.num_classes, "num_classes", low=1)
        check_count(self.samples_per_class, "samples_per_class", low=1)
        check_count(self.size, "size", low=8)
        check_count(self.shift, "shift")
        if self.num_classes > SPLIT_SIZE:
            raise ConfigError(
                f"num_classes is {self.num_classes}; at most {SPLIT_SIZE} fit a split"
            )
        if self.split not in SPLITS:
            raise ConfigError(f"split is {self.split!r}; give one of {', '.join(SPLITS)}")
        if not 0.0 <= self.difficulty < math.inf:
            raise ConfigError(f"difficulty is {self.difficulty}; it must be finite and at least 0")
        if self.shift >= self.size:
            raise ConfigError(f"shift is {self.shift}, not below the size {self.size}; lower it")

    def __len__(self) -> int:
        return self.num_classes * self.samples_per_class

    @property
    def labels(self) -> NDArray[np.int64]:
        """Identity of each sample, ``[n]``."""
        check_samples(self.num_classes, self.samples_per_class)
        return np.repeat(np.arange(self.num_classes), self.samples_per_class)

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        """The sample in [0, 1], ``[1, size, size]`` float32, moved by ``seed``; its identity."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        images, labels = self.read_many(np.array([index]), [seed])
        return torch.from_numpy(images[0]), int(labels[0])

    def read_many(
        self, indices: NDArray[np.integer], seeds: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """What ``read`` gives for each of some samples, ``[n, 1, size, size]`` and ``[n]``."""
        pictures = self._stored()[indices] if self.in_memory else self.images(indices)
        return as_inputs(pictures, self.shift, seeds), indices // self.samples_per_class

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples as they are, without augmentation: ``[n, size, size]``, 255 is full ink."""
        indices = np.asarray(indices)
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"a sample is outside [0, {len(self)})")
        pictures = np.empty((len(indices), self.size, self.size), dtype=np.uint8)
        for start in range(0, len(indices), BATCH):
            part = slice(start, start + BATCH)
            pictures[part] = self._drawn(indices[part])
        return pictures

    def kept_in(self, file: Path) -> StrokeIdentities:
        """The same samples, read from a file of all pictures, which processes can share."""
        pictures = np.load(file, mmap_mode="r")
        wanted = (len(self), self.size, self.size)
        if pictures.shape != wanted or pictures.dtype != np.uint8:
            raise ShapeError(
                f"{file} has {pictures.dtype} of shape {list(pictures.shape)}; these identities "
                f"need uint8 {list(wanted)}: remove the file"
            )
        kept = replace(self, in_memory=True)
        kept._kept["images"] = pictures
        return kept

    def sample_id(self, index: int) -> str:
        """Identity and number of a sample."""
        label, number = divmod(index, self.samples_per_class)
        return f"identity-{label}/sample-{number}"

    def source(self, index: int) -> str:
        """Labels are computed, not written anywhere."""
        return f"stroke identities of seed {self.seed}, {self.split}, sample {index}"

    def _stored(self) -> NDArray[np.uint8]:
        if "images" not in self._kept:
            self._kept["images"] = self.images(np.arange(len(self)))
        return self._kept["images"]

    def _drawn(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Some samples; each depends on its identity, its number and the seed alone."""
        identities, numbers = np.divmod(indices.astype(np.int64), self.samples_per_class)
        identities += SPLIT_SIZE * SPLITS.index(self.split)
        worlds = np.full(len(indices), derived_seed(self.seed), dtype=np.uint64)
        programs = joined_keys(worlds, identities)
        hands = joined_keys(programs, numbers)
        controls, has_ink = _program(programs)
        points, widths, amounts = _by_hand(controls, has_ink, hands, self.difficulty)
        widths = widths * np.float32(self.size / 32)
        pictures = inked(points, widths, amounts, size=self.size)
        return _developed(pictures, hands, self.difficulty)


def _program(keys: Keys) -> tuple[Floats, NDArray[np.bool_]]:
    """Control points ``[n, strokes, NUM_CONTROLS, 2]``, and which strokes an identity has."""
    draws = uniforms(keys, 1 + MOST_STROKES * (1 + 2 * NUM_CONTROLS))
    choices = MOST_STROKES - FEWEST_STROKES + 1
    numbers = FEWEST_STROKES + (draws[:, 0] * np.float32(choices)).astype(np.int64)
    draws = draws[:, 1:].reshape(len(keys), MOST_STROKES, -1)
    goes_on, starts = draws[:, :, :1] < np.float32(GOES_ON), draws[:, :, 1:3]
    controls = np.empty((len(keys), MOST_STROKES, NUM_CONTROLS, 2), dtype=np.float32)
    controls[:, :, 0] = (starts * np.float32(2.0) - np.float32(1.0)) * np.float32(REACH)
    controls[:, :, 1:] = _walks(draws[:, :, 3:])
    for stroke in range(MOST_STROKES):
        if stroke:  # the pen may not have been lifted since the last one
            end = controls[:, stroke - 1, -1]
            controls[:, stroke, 0] = np.where(goes_on[:, stroke], end, controls[:, stroke, 0])
        controls[:, stroke, 1:] += controls[:, stroke, :1]
    return _folded(controls), np.arange(MOST_STROKES) < numbers[:, None]


def _walks(draws: Floats) -> Floats:
    """Ways from the first control point to the others, ``[n, strokes, NUM_CONTROLS - 1, 2]``.

    Args:
        draws: ``[n, strokes, 2 * (NUM_CONTROLS - 1)]`` in [0, 1).
    """
    turns, lengths = np.split(draws, 2, axis=2)
    turns = (turns - np.float32(0.5)) * np.float32(BEND)
    turns[:, :, 0] *= np.float32(2.0 * math.pi / BEND)  # the first step goes anywhere
    directions = np.cumsum(turns, axis=2)
    lengths = np.float32(SHORTEST) + lengths * np.float32(LONGEST - SHORTEST)
    steps = np.empty((*draws.shape[:2], NUM_CONTROLS - 1, 2), dtype=np.float32)
    np.multiply(np.cos(directions), lengths, out=steps[..., 0])
    np.multiply(np.sin(directions), lengths, out=steps[..., 1])
    return np.cumsum(steps, axis=2)


def _folded(places: Floats) -> Floats:
    """Places that went past an edge, mirrored at it."""
    reach = np.float32(REACH)
    turned = np.mod(places + reach, 4 * reach) - 2 * reach
    folded: Floats = reach - np.abs(turned)
    return folded


def _by_hand(
    controls: Floats, has_ink: NDArray[np.bool_], keys: Keys, difficulty: float
) -> tuple[Floats, Floats, Floats]:
    """Points, widths and ink of programs as some hands draw them."""
    n, amount = len(keys), np.float32(difficulty)
    noise = normals(keys, _NUM_SHAPE + 8 + MOST_STROKES) * amount
    jitter = noise[:, :_NUM_SHAPE].reshape(controls.shape)
    whole, per_stroke = noise[:, _NUM_SHAPE : _NUM_SHAPE + 8], noise[:, _NUM_SHAPE + 8 :]
    points = along(controls + np.float32(JITTER) * jitter)  # [n, strokes, NUM_STEPS, 2]
    points = points.reshape(n, MOST_STROKES * NUM_STEPS, 2) @ _frames(whole)
    points += np.float32(MOVE) * whole[:, None, 4:6]
    widths = np.float32(WIDTH) * np.exp(np.float32(WIDTH_SPREAD) * whole[:, 6])
    pressure = np.exp(np.float32(PRESSURE_SPREAD) * (whole[:, 7:8] + per_stroke))
    lifted = _lifted(keys, difficulty)  # [n, strokes, NUM_STEPS]
    amounts = np.where(has_ink, pressure, np.float32(0.0))[:, :, None] * np.float32(INK)
    amounts = np.where(lifted, np.float32(0.0), amounts)
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


def _developed(pictures: Floats, keys: Keys, difficulty: float) -> NDArray[np.uint8]:
    """Pixels with the noise of a camera, as bytes."""
    n, size = len(pictures), pictures.shape[1]
    grain = normals(joined_keys(keys, np.ones(1, np.int64)), size * size)
    pictures = pictures * np.float32(255.0)
    pictures += grain.reshape(n, size, size) * np.float32(255.0 * NOISE * difficulty)
    np.clip(np.rint(pictures, out=pictures), 0.0, 255.0, out=pictures)
    return pictures.astype(np.uint8)


def as_inputs(pictures: NDArray[np.uint8], shift: int, seeds: Sequence[int]) -> NDArray[np.float32]:
    """Pictures in [0, 1], ``[n, 1, size, size]``, each moved by its seed."""
    if shift:
        pictures = moved(pictures, shift, seeds)
    return pictures[:, None] * np.float32(1.0 / 255.0)


def moved(pictures: NDArray[Any], shift: int, seeds: Sequence[int]) -> NDArray[Any]:
    """Pictures moved by up to ``shift`` pixels each way; blank paper comes in."""
    width, (count, size, _) = 2 * shift + 1, pictures.shape
    down, across = np.divmod(np.asarray(seeds, dtype=np.int64) % (width * width), width)
    framed = np.zeros((count, size + 2 * shift, size + 2 * shift), dtype=pictures.dtype)
    framed[:, shift : shift + size, shift : shift + size] = pictures
    windows = np.lib.stride_tricks.sliding_window_view(framed, (size, size), (1, 2))
    chosen: NDArray[Any] = windows[np.arange(count), down, across]
    return chosen
