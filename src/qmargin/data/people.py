"""People: drawn portraits of synthetic identities, with families, populations and bad photos.

An identity is a vector that sets the proportions and colours of a face. A sample is that face with
one of its appearances, in a pose, a light and a quality. Nothing is stored: a portrait is a
function of a few hashed numbers. It uses only sums, products, quotients and roots, which every
machine rounds alike, so that the bytes are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.images import encode_image
from qmargin.data.order import check_samples, derived_seed
from qmargin.data.strokes import joined_keys, normals, uniforms
from qmargin.data.synthetic import SPLIT_SIZE, SPLITS, DrawnIdentities
from qmargin.errors import ConfigError

Keys = NDArray[np.uint64]
Floats = NDArray[Any]  # float32: sums and products of it and Python's numbers stay so
Ints = NDArray[np.int64]

NUM_TRAITS = 24  # numbers of an identity
BATCH_PIXELS = 1 << 16  # pixels drawn together: their planes stay in the cache
NUM_LOOKS = 1024  # portraits whose numbers are hashed together

# Similarity of identities.
POPULATIONS = (0.30, 0.20, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03)  # shares
APART = 0.9  # of a population's mean from the origin, in deviations of a trait
BLOCK = 30  # identities with one family of 2 to 4 in the mean: a tenth of all
TWIN_BLOCKS = 22  # one family in this number is a pair of twins: 0.3 % of all identities
KINSHIP = 0.5  # correlation of traits within a family
TWINSHIP = 0.97
MOST_MODES = 3  # appearances of an identity: hair, glasses, beard, age
COUNT_SPREAD = 0.9  # of the logarithm of the number of samples
FEWEST, MOST = 3, 200  # samples of an identity, where numbers differ

# Base and deviation of what traits set, in half heights of a face; x goes right, y down.
SHAPES = {
    "width": (0.76, 0.050),
    "crown": (1.00, 0.045),
    "chin": (1.02, 0.065),
    "squareness": (0.35, 0.22),
    "taper": (0.28, 0.15),
    "eye_x": (0.345, 0.030),
    "eye_y": (-0.05, 0.035),
    "eye_width": (0.165, 0.018),
    "eye_height": (0.082, 0.016),
    "eye_tilt": (0.0, 0.12),
    "iris": (0.073, 0.006),
    "brow_rise": (0.215, 0.028),
    "brow_width": (0.205, 0.025),
    "brow_thickness": (0.036, 0.013),
    "brow_arch": (0.045, 0.030),
    "brow_slope": (0.0, 0.030),
    "nose_y": (0.33, 0.048),
    "nose_width": (0.125, 0.027),
    "nose_shadow": (0.14, 0.05),
    "mouth_y": (0.60, 0.040),
    "mouth_width": (0.255, 0.038),
    "upper_lip": (0.048, 0.016),
    "lower_lip": (0.062, 0.019),
    "ear": (0.125, 0.028),
    "hairline": (-0.60, 0.085),
    "hair_curve": (0.35, 0.25),
    "hair_volume": (0.30, 0.09),
    "skin_tone": (0.0, 0.30),
    "skin_hue": (0.0, 1.0),
    "hair_tone": (0.0, 0.5),
    "hair_hue": (0.0, 1.0),
    "iris_hue": (0.0, 1.0),
    "lip_hue": (0.0, 1.0),
    "mole_x": (0.0, 0.35),
    "mole_y": (0.25, 0.30),
    "mole_size": (0.0, 0.022),
}
TRAITS_PER_SHAPE = 4

# Standard deviations between samples of an identity at difficulty 1.
YAW, PITCH, ROLL = 0.15, 0.08, 0.07  # with heavy tails
ZOOM, SHIFT = 0.04, 0.045
FRAME = 1.36  # half a picture's side, in half heights of a face
EXPRESSION = 0.045  # of smiles
LIGHT, EXPOSURE, CAST = 0.17, 0.12, 0.035
NOISE = 0.05  # of a pixel of the worst quality
OCCLUSION_RATE = 0.25  # of the worst quality
LOW_RESOLUTION = ((0.0, 0.3, 4), (0.3, 0.5, 2))  # factor of the size of pixels between qualities
BLURRED = 0.65  # below this quality

# Branches of the hash.
_FAMILY, _POPULATION, _HABIT, _MODE, _SAMPLE, _COUNT, _SPLIT, _MERGE = range(101, 109)
_GRAIN_SIZE = 1 << 17
COARSEST = max(factor for _, _, factor in LOW_RESOLUTION)
QUARTILES = (0.61, 0.84)  # of qualities: the worst and the best quarter make lists of pairs


@dataclass(frozen=True)
class People(DrawnIdentities):
    """Drawn portraits of synthetic people, ``[3, size, size]`` in [0, 1].

    A tenth of the identities have relatives in the data, who look alike; a few are twins. Eight
    populations of unequal size have different means. An identity has one to three appearances
    (hair, glasses, beard, age). Poses have heavy tails, and the quality of a sample drives its
    resolution, blur, noise and occlusion. Identities of the three splits are disjoint.

    Label noise is for training: samples that show another identity of the data (``flips``) or an
    identity outside the data (``outliers``), and labels with the identity of another label
    (``splits``) or with two identities (``merges``).

    Examples:
        >>> people = People(2_000_000, 20)
        >>> image, label = people.read(39_999_999, seed=0)
        >>> list(image.shape), label, people.sample_id(39_999_999)
        ([3, 64, 64], 1999999, 'identity-1999999/sample-19')
        >>> people.images(np.arange(3)).shape
        (3, 64, 64, 3)
    """

    size: int = 64
    count_spread: float = 0.0  # deviation of log(samples per label); 0.9 is like the web, 0 equal
    flips: float = 0.0  # share of samples
    outliers: float = 0.0
    splits: float = 0.0  # share of labels
    merges: float = 0.0
    mirror: bool = False  # whether a reading may mirror a sample
    poor: float = 0.0  # share of samples with half the quality, in all splits
    smallest = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % COARSEST:
            raise ConfigError(
                f"size is {self.size}; it must be a multiple of {COARSEST}, the largest pixels of "
                f"bad photos: take {self.size // COARSEST * COARSEST} or "
                f"{-(-self.size // COARSEST) * COARSEST}"
            )
        if not 0.0 <= self.count_spread < math.inf:
            raise ConfigError(f"count_spread is {self.count_spread}; give a finite number from 0")
        for name in ("flips", "outliers", "splits", "merges", "poor"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {value}; give a share from 0 to 1")
        if self.flips + self.outliers > 1.0:
            raise ConfigError(
                f"flips and outliers are {self.flips} and {self.outliers}; together at most 1"
            )
        if self.flips and self.num_classes < 2:
            raise ConfigError(
                f"flips is {self.flips} and there is 1 identity; flips show another, give 2 or more"
            )

    @cached_property
    def _ends(self) -> Ints | None:
        """Number of samples up to each label, where labels have different numbers."""
        if not self.count_spread:
            return None
        check_samples(self.num_classes, 1)
        keys = joined_keys(self._keys(self._numbers(np.arange(self.num_classes))), _branch(_COUNT))
        table = _count_table(self.samples_per_class, self.count_spread)
        return np.cumsum(table[(uniforms(keys, 1)[:, 0] * len(table)).astype(np.int64)])

    def __len__(self) -> int:
        return super().__len__() if self._ends is None else int(self._ends[-1])

    @property
    def labels(self) -> Ints:
        """Label of each sample, ``[n]``."""
        if self._ends is None:
            return super().labels
        return np.repeat(np.arange(self.num_classes), np.diff(self._ends, prepend=0))

    def places(self, indices: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Label of each sample, and its number among those of the label."""
        if self._ends is None:
            labels, numbers = np.divmod(np.asarray(indices, np.int64), self.samples_per_class)
            return labels, numbers
        places = np.asarray(indices, np.int64)
        labels = np.searchsorted(self._ends, places, side="right").astype(np.int64)
        return labels, places - np.where(labels > 0, self._ends[labels - 1], 0)

    def identities(self, indices: NDArray[np.integer]) -> Ints:
        """Identity of each sample; without label noise a function of the label."""
        indices = self._checked(indices)
        labels, numbers = self.places(indices)
        shown = self._numbers(labels)
        if self.splits:  # two neighbours show the first of them
            first = labels & ~1
            keys = joined_keys(self._keys(self._numbers(first)), _branch(_SPLIT))
            is_split = uniforms(keys, 1)[:, 0] < np.float32(self.splits)
            shown = np.where(is_split, self._numbers(first), shown)
        if self.merges:  # every second sample shows a stranger, the same for the whole label
            keys = joined_keys(self._keys(self._numbers(labels)), _branch(_MERGE))
            is_merged = (uniforms(keys, 1)[:, 0] < np.float32(self.merges)) & (numbers % 2 == 1)
            shown = np.where(is_merged, self._strangers(labels), shown)
        if self.flips or self.outliers:
            draws = uniforms(self._sample_keys(labels, numbers), 2)
            steps = 1 + (draws[:, 1] * np.float32(self.num_classes - 1)).astype(np.int64)
            others = self._numbers((labels + steps) % self.num_classes)
            shown = np.where(draws[:, 0] < np.float32(self.flips), others, shown)
            is_outlier = draws[:, 0] >= np.float32(1.0 - self.outliers)
            strangers = self._strangers(indices + self.num_classes)
            shown = np.where(is_outlier & (self.outliers > 0.0), strangers, shown)
        return shown

    def families(self, labels: NDArray[np.integer]) -> Ints:
        """Number of each label's family, -1 for people without relatives in the data."""
        return _kin(self._world, self._numbers(self._checked_labels(labels))).family

    def populations(self, labels: NDArray[np.integer]) -> Ints:
        """Number of each label's population, the largest first."""
        numbers = self._numbers(self._checked_labels(labels))
        return _population(self._keys(numbers), _kin(self._world, numbers))

    def qualities(self, indices: NDArray[np.integer]) -> Floats:
        """Quality of each sample: from 0 to 1, of the distribution Beta(5, 2) if none is poor."""
        return _quality(self._sample_keys(*self.places(self._checked(indices))), self.poor)

    def pair_lists(self, indices: NDArray[np.integer]) -> dict[str, Ints]:
        """Lists of the pairs of some samples, see ``measure_lists``."""
        quality = self.qualities(indices)
        bad, good = ((quality < QUARTILES[0]), (quality >= QUARTILES[1]))
        return {
            **kin_lists(self, self._labels_of(indices)),
            "both of low quality": np.where(bad, 0, -1),
            "both of high quality": np.where(good, 0, -1),
        }

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Samples without augmentation, ``[n, size, size, 3]``."""
        identities = self.identities(indices)
        sample_keys = self._sample_keys(*self.places(np.asarray(indices, np.int64)))
        pictures = np.empty((len(identities), self.size, self.size, 3), np.uint8)
        step = max(1, BATCH_PIXELS // self.size**2)
        for start in range(0, len(identities), NUM_LOOKS):
            part = slice(start, start + NUM_LOOKS)
            looks = _Looks(
                self._world, identities[part], sample_keys[part], self.difficulty, self.poor
            )
            for row in range(0, len(identities[part]), step):
                few = looks.part(slice(row, row + step))
                pictures[part][row : row + step] = _portraits(few, self.size)
        return pictures

    def augmented(self, pictures: NDArray[np.uint8], seeds: Sequence[int]) -> Floats:
        """Pictures in [0, 1], ``[n, 3, size, size]``, moved and mirrored by their seeds."""
        given = np.asarray(seeds, np.int64)
        if self.shift:
            width = 2 * self.shift + 1
            down, across = np.divmod(given % (width * width), width)
            edges = ((0, 0), (self.shift, self.shift), (self.shift, self.shift), (0, 0))
            framed = np.pad(pictures, edges, mode="edge")
            windows = np.lib.stride_tricks.sliding_window_view(framed, pictures.shape[1:3], (1, 2))
            pictures = windows[np.arange(len(pictures)), down, across].transpose(0, 2, 3, 1)
        if self.mirror:
            is_mirrored = ((given >> 32) & 1).astype(bool)[:, None, None, None]
            pictures = np.where(is_mirrored, pictures[:, :, ::-1], pictures)
        return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)) * np.float32(1.0 / 255.0)

    def write(self, folder: str | Path) -> None:
        """Write every portrait as a PNG file; folders are named by split and label."""
        for index in range(len(self)):
            path = Path(folder) / f"{self.split}-{self.sample_id(index)}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_image(self.images(np.array([index]))[0], format="PNG"))

    def held_out(self, split: str, num_classes: int, samples_per_class: int) -> DrawnIdentities:
        """Other people from the same generator, with correct labels and without augmentation."""
        plain = replace(
            self, count_spread=0.0, flips=0.0, outliers=0.0, splits=0.0, merges=0.0, mirror=False
        )
        return DrawnIdentities.held_out(plain, split, num_classes, samples_per_class)

    def sample_id(self, index: int) -> str:
        """Label and number of a sample."""
        label, number = self.places(self._checked(np.array([index])))
        return f"identity-{label[0]}/sample-{number[0]}"

    def _labels_of(self, indices: NDArray[np.integer]) -> Ints:
        return self.places(indices)[0]

    @cached_property
    def _world(self) -> np.uint64:
        return np.uint64(derived_seed(self.seed))

    def _strangers(self, numbers: NDArray[np.integer]) -> Ints:
        return np.asarray(numbers, np.int64) + SPLIT_SIZE * (len(SPLITS) + SPLITS.index(self.split))

    def _keys(self, identities: Ints) -> Keys:
        return joined_keys(np.full(len(identities), self._world), identities)

    def _sample_keys(self, labels: Ints, numbers: Ints) -> Keys:
        keys = joined_keys(self._keys(self._numbers(labels)), _branch(_SAMPLE))
        return joined_keys(keys, numbers)


def kin_lists(people: People, labels: NDArray[np.integer]) -> dict[str, Ints]:
    """Lists of the pairs within a family and within a population."""
    return {
        "within a family": people.families(labels),
        "within a population": people.populations(labels),
    }


class _Kin(NamedTuple):
    family: Ints  # -1 for none
    key: Keys  # of the family
    is_twin: NDArray[np.bool_]


def _branch(value: int) -> Ints:
    return np.array([value], np.int64)


def _kin(world: np.uint64, identities: Ints) -> _Kin:
    """Relatives are neighbours: each block of identities has one family."""
    blocks, places = np.divmod(identities, BLOCK)
    keys = joined_keys(joined_keys(np.full(len(blocks), world), _branch(_FAMILY)), blocks)
    draws = uniforms(keys, 3)
    is_twin = draws[:, 0] < np.float32(1.0 / TWIN_BLOCKS)
    sizes = np.where(is_twin, 2, 2 + (draws[:, 1] * np.float32(3.0)).astype(np.int64))
    starts = (draws[:, 2] * np.float32(BLOCK - 3)).astype(np.int64)
    is_member = (places >= starts) & (places < starts + sizes)
    return _Kin(np.where(is_member, blocks, -1), keys, is_twin & is_member)


def _population(keys: Keys, kin: _Kin) -> Ints:
    keys = np.where(kin.family >= 0, kin.key, keys)
    draws = uniforms(joined_keys(keys, _branch(_POPULATION)), 1)[:, 0]
    found: Ints = np.searchsorted(np.cumsum(POPULATIONS)[:-1], draws, side="right")
    return found


def _quality(sample_keys: Keys, poor: float) -> Floats:
    """The second largest of six uniform numbers; half of it where a sample is poor."""
    quality: Floats = np.sort(uniforms(joined_keys(sample_keys, _branch(1)), 6), axis=1)[:, 4]
    if poor:
        is_poor = uniforms(joined_keys(sample_keys, _branch(6)), 1)[:, 0] < np.float32(poor)
        quality = np.where(is_poor, np.float32(0.5) * quality, quality)
    return quality


@cache
def _count_table(mean: int, spread: float) -> Ints:
    """Quantiles of the number of samples: log-normal with this mean, and bounds."""
    middles = (np.arange(4096) + 0.5) / 4096
    normal = NormalDist(math.log(mean) - spread**2 / 2, spread)
    values = [round(math.exp(normal.inv_cdf(p))) for p in middles.tolist()]
    return np.array(values).clip(FEWEST, max(FEWEST, MOST * mean // 20)).astype(np.int64)


@cache
def _mixing(count: int, salt: int) -> tuple[Ints, Floats]:
    """Traits behind each of some numbers, ``[count, TRAITS_PER_SHAPE]``, and their signs."""
    keys = joined_keys(np.full(count, salt, np.uint64), np.arange(count))
    chosen = np.argsort(uniforms(keys, NUM_TRAITS), axis=1, kind="stable")[:, :TRAITS_PER_SHAPE]
    signs = np.where(uniforms(joined_keys(keys, _branch(1)), TRAITS_PER_SHAPE) < 0.5, -0.5, 0.5)
    return chosen, signs.astype(np.float32)


def set_by_traits(
    traits: Floats, table: Mapping[str, tuple[float, float]], salt: int
) -> dict[str, Floats]:
    """Numbers ``[n]`` with the bases and deviations of a table, as mixtures of traits."""
    found = {}
    for (name, (base, deviation)), chosen, signs in zip(
        table.items(), *_mixing(len(table), salt), strict=True
    ):
        total = traits[:, chosen[0]] * signs[0]
        for place in range(1, TRAITS_PER_SHAPE):  # in this order on every machine
            total = total + traits[:, chosen[place]] * signs[place]
        found[name] = base + deviation * total
    return found


def traits_of(world: np.uint64, identities: Ints) -> tuple[Floats, Ints]:
    """Traits of identities, ``[n, NUM_TRAITS]``, and their populations."""
    keys = joined_keys(np.full(len(identities), world), identities)
    kin = _kin(world, identities)
    shared = np.where(kin.is_twin, TWINSHIP, np.where(kin.family >= 0, KINSHIP, 0.0))[:, None]
    shared = shared.astype(np.float32)
    own, family = normals(keys, NUM_TRAITS), normals(kin.key, NUM_TRAITS)
    population = _population(keys, kin)
    means = normals(
        joined_keys(np.full(1, 0x50, np.uint64), np.arange(len(POPULATIONS))), NUM_TRAITS
    )
    traits = np.sqrt(shared) * family + np.sqrt(np.float32(1.0) - shared) * own
    return traits + np.float32(APART) * means[population], population


class _Looks:
    """Content of some portraits: numbers ``[n, 1, 1]`` and colours ``[3, n, 1, 1]``."""

    def __init__(
        self,
        world: np.uint64,
        identities: Ints,
        sample_keys: Keys,
        difficulty: float,
        poor: float,
    ) -> None:
        traits, population = traits_of(world, identities)
        set_by = set_by_traits(traits, SHAPES, 0x5A)
        self.face = {name: _plane(values) for name, values in set_by.items()}
        keys = joined_keys(np.full(len(identities), world), identities)
        modes = uniforms(joined_keys(keys, _branch(_HABIT)), 2)
        self.is_bearded = _plane(modes[:, 1]) < 0.5
        num_modes = 1 + (modes[:, 0] * np.float32(MOST_MODES)).astype(np.int64)
        mode = uniforms(joined_keys(sample_keys, _branch(2)), 1)[:, 0] * num_modes
        mode_keys = joined_keys(joined_keys(keys, _branch(_MODE)), mode.astype(np.int64))
        self.mode = uniforms(mode_keys, 12).T[:, :, None, None]
        self.chance = uniforms(joined_keys(sample_keys, _branch(3)), 24).T[:, :, None, None]
        bell = normals(joined_keys(sample_keys, _branch(4)), 16) * np.float32(difficulty)
        self.bell = bell.T[:, :, None, None]
        self.quality = _quality(sample_keys, poor)
        self.grain_keys = joined_keys(sample_keys, _branch(5))
        self._set_colours(population)

    def part(self, rows: slice) -> _Looks:
        """Some of the portraits."""
        few = copy(self)
        few.face = {name: values[rows] for name, values in self.face.items()}
        for name in ("is_bearded", "quality", "grain_keys"):
            setattr(few, name, getattr(self, name)[rows])
        for name in ("mode", "chance", "bell", "skin", "hair", "iris", "lips"):
            setattr(few, name, getattr(self, name)[:, rows])
        return few

    def _set_colours(self, population: Ints) -> None:
        face, mode = self.face, self.mode
        middle = np.array([0.80, 0.62, 0.30, 0.72, 0.46, 0.88, 0.55, 0.20], np.float32)
        tone = np.clip(_plane(middle[population]) + 0.35 * face["skin_tone"], 0.08, 1.0)
        hue = face["skin_hue"]
        self.skin = _colour(
            0.33 + 0.62 * tone, 0.20 + 0.61 * tone - 0.012 * hue, 0.13 + 0.60 * tone - 0.03 * hue
        )
        light = np.clip(
            0.10 + 0.28 * np.maximum(face["hair_tone"] + 0.6, 0.0) * tone * tone, 0.05, 0.75
        )
        red = np.maximum(face["hair_hue"], 0.0) * 0.25
        hair = _colour(
            light * (1.1 + red) + 0.03, light * 0.83 + 0.025, light * (0.58 - red * 0.6) + 0.02
        )
        grey = 0.60 + 0.28 * mode[4]
        self.hair = np.where(mode[3] < 0.08, _colour(grey, grey, grey), hair)
        hue = face["iris_hue"] + 1.2 * (tone - 0.6)
        kinds = ((0.25, 0.15, 0.08), (0.36, 0.40, 0.22), (0.30, 0.46, 0.60))
        self.iris = np.where(
            hue > 0.7, _flat(kinds[2]), np.where(hue > 0.2, _flat(kinds[1]), _flat(kinds[0]))
        )
        self.lips = (
            self.skin * _flat((0.88, 0.62, 0.62)) + _flat((0.04, -0.02, 0.0)) * face["lip_hue"]
        )


def _plane(values: NDArray[np.floating]) -> Floats:
    return values.astype(np.float32)[:, None, None]


def _colour(*channels: Floats) -> Floats:
    return np.stack(channels)


def _flat(channels: Sequence[float]) -> Floats:
    return np.array(channels, np.float32)[:, None, None, None]


def _unit(values: Floats) -> Floats:
    return np.clip(values, np.float32(0.0), np.float32(1.0), out=values)


def _either(condition: NDArray[np.bool_], yes: float, no: float) -> Floats:
    return np.where(condition, np.float32(yes), np.float32(no))


def _where(condition: Floats) -> Ints:
    """Numbers of the portraits in which something is seen."""
    return np.flatnonzero(condition[:, 0, 0])


def _square(values: Floats) -> Floats:
    return values * values


def _heavy(bell: Floats, deviation: float, most: float) -> Floats:
    """Numbers with this deviation and the tails of a cubic."""
    return np.clip(deviation / 1.6 * (bell + 0.25 * bell * bell * bell), -most, most)


class _Frame:
    """Places of pixels: on the outline of a head, and on its turned face."""

    where: tuple[Any, ...] = (slice(None), slice(None))  # portraits and rows

    def __init__(self, looks: _Looks, size: int) -> None:
        bell = looks.bell
        self.yaw, roll = _heavy(bell[0], YAW, 0.5), _heavy(bell[2], ROLL, 0.45)
        self.pitch = _heavy(bell[1], PITCH, 0.3)
        square = roll * roll
        cosine, sine = 1.0 - square * (0.5 - square / 24.0), roll * (1.0 - square / 6.0)
        zoom = FRAME * (1.0 + ZOOM * bell[3])
        side = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(
            2.0 / size
        ) - np.float32(1.0)
        across, down = side[None, None, :], side[None, :, None]
        self.x = cosine * zoom * across + (sine * zoom * down - SHIFT * bell[4])
        self.y = cosine * zoom * down - (sine * zoom * across + SHIFT * bell[5] + 0.10)
        self.pixels = size / (2.0 * FRAME)  # in half a face
        self.xx = _square(self.x)
        depth = np.maximum(1.0 - self.xx * 1.3 - _square(self.y) * 0.55, -0.3)
        self.u = self.x - self.yaw * depth
        self.v = self.y - self.pitch * depth
        self.side = np.abs(self.u)
        self.slack = 0.5 / self.pixels  # how far an edge reaches out
        self._ends = {  # of every row, in all portraits
            name: (places.min((0, 2)), places.max((0, 2)))
            for name, places in (("y", self.y), ("v", self.v))
        }

    def band(self, middle: Floats | float, reach: Floats | float, by: str = "v") -> _Frame:
        """The rows that have a place within reach of the middle in a portrait."""
        lowest, highest = self._ends[by]
        low, high = np.min(middle - reach), np.max(middle + reach)
        found = np.flatnonzero((highest >= low) & (lowest <= high))
        rows = slice(found[0], found[-1] + 1) if len(found) else slice(0, 0)
        return self._cut((slice(None), rows), (slice(None), rows))

    def only(self, index: Ints) -> _Frame:
        """Some of the portraits."""
        return self._cut((index,), (index, self.where[1]))

    def _cut(self, part: tuple[Any, ...], where: tuple[Any, ...]) -> _Frame:
        cut = copy(self)
        cut.where = where
        for name in ("x", "y", "u", "v", "xx", "side"):
            setattr(cut, name, getattr(self, name)[part])
        return cut

    def edge(self, inside: Floats, steepness: float = 1.0) -> Floats:
        """Coverage of pixels by where a number that changes by 1 in half a face is above 0."""
        inside *= self.pixels * steepness
        inside += 0.5
        return _unit(inside)


def _portraits(looks: _Looks, size: int) -> NDArray[np.uint8]:
    """Portraits ``[n, size, size, 3]``, painted from the front to the back."""
    frame = _Frame(looks, size)
    n = len(frame.x)
    picture = np.zeros((3, n, size, size), np.float32)
    left = np.ones((n, size, size), np.float32)  # share of light that is not absorbed yet
    for where, cover, colour, *shade in _parts(looks, frame):
        cover *= left[where]
        left[where] -= cover
        for each in shade:
            cover *= each
        for channel in range(3):
            picture[(channel, *where)] += cover * colour[channel]
    return _photographed(picture, looks, frame)


def _parts(looks: _Looks, frame: _Frame) -> Iterator[tuple[Any, ...]]:
    """Pixels of everything, their cover, colour and maybe brightness, the nearest first.

    What covers few portraits or rows is drawn on those alone, with a little more than it needs.
    """
    face, mode, chance, bell = looks.face, looks.mode, looks.chance, looks.bell
    x, y, v = frame.x, frame.y, frame.v
    edge, slack, dark = frame.edge, frame.slack, _flat((0.07, 0.06, 0.06))

    some = _where(chance[13] < OCCLUSION_RATE * (1.0 - _plane(looks.quality)))
    if len(some):
        at, drawn = frame.only(some), chance[:, some]
        a, b = drawn[14] * 2.0 - 1.0, drawn[15] * 2.0 - 1.0
        long = np.sqrt(a * a + b * b) + 0.01
        yield (
            at.where,
            edge((a * at.x + b * at.y) / long - 0.35 - 0.5 * drawn[16]),
            drawn[17:20] * 0.8 + 0.1,
        )

    some = _where(mode[0] < 0.22)
    if len(some):  # glasses
        eye_x, eye_y = face["eye_x"][some], face["eye_y"][some]
        at = frame.band(eye_y, 0.25 + slack).only(some)
        from_eye, eye_v = at.side - eye_x, at.v - eye_y
        rim = _square(from_eye * (1 / 0.24)) + _square((eye_v - 0.02) * (1 / 0.175))
        bridge = edge(0.02 - np.abs(eye_v + 0.01)) * (at.side < eye_x - 0.22)
        ring = np.maximum(_unit(1.15 - np.abs(rim - 1.0) * 4.0), bridge)
        yield at.where, ring * 0.9, _flat((1.0, 0.9, 0.8)) * (0.06 + 0.22 * mode[1, some])

    # The shape of the skull bounds hair and skin.
    is_up = y < 0.0
    t = y / np.where(is_up, face["crown"], face["chin"])
    tt = t * t
    square = np.where(is_up, np.float32(0.0), face["squareness"])
    narrow = 1.0 + np.maximum(t, 0.0) * face["taper"]
    inside = (
        1.0
        - _square((x + frame.yaw * 0.15) / face["width"]) * narrow
        - tt * (1.0 - square + square * tt)
    )

    is_long = mode[5] > 0.55
    has_hair = mode[6] > 0.07
    volume = face["hair_volume"] + 0.25 * (mode[9] - 0.4)
    lowest = _either(is_long, 0.75, 0.02) + _either(is_long, 0.3, 0.15) * mode[9]
    hairline = face["hairline"] + 0.28 * (mode[7] - 0.5)
    hairline = hairline + face["hair_curve"] * _square(frame.u - 0.5 * (mode[8] - 0.5))
    start = face["width"] * _either(is_long, 0.80, 0.97) - 0.10 * v * is_long
    sides = np.minimum((frame.side - start) * 2.0, (lowest - v) * 1.5)
    hair = edge(np.maximum(hairline - v, sides), 0.8)
    hair *= edge(inside + volume * _either(y < 0.2, 1.0, 0.3), 0.38)
    hair *= has_hair
    yield frame.where, hair, looks.hair * (0.94 + 0.12 * mode[10])

    raised = face["eye_y"] - face["brow_rise"] - 0.02 * bell[8]
    bent = np.abs(face["brow_arch"]) + np.abs(face["brow_slope"])
    at = frame.band(raised, bent + 1.5 * np.abs(face["brow_thickness"]) + 2.0 * slack)
    along = (at.side - face["eye_x"]) / face["brow_width"]
    arc = at.v - raised - face["brow_arch"] * (along * along - 0.3) + face["brow_slope"] * along
    brow = edge(face["brow_thickness"] * (1.0 - 0.45 * along) - np.abs(arc))
    yield at.where, brow * _unit((1.0 - along * along) * 4.0) * 0.88, looks.hair * 0.72

    opening = face["eye_height"] * np.where(
        chance[6] < 0.04, np.float32(0.25), 1.0 - 0.15 * chance[7]
    )
    wide = 1.3 + 5.0 * slack  # of an eye, whose edges are soft
    reach = wide * (np.abs(opening) + np.abs(face["eye_tilt"]) * face["eye_width"])
    at = frame.band(face["eye_y"], reach)
    from_eye = at.side - face["eye_x"]
    eye_v = at.v - face["eye_y"] + face["eye_tilt"] * from_eye
    white = 1.0 - _square(from_eye / face["eye_width"]) - _square(eye_v / opening)
    lid = _unit(1.0 - np.abs(white) * 2.2) * edge(0.01 - eye_v)
    yield at.where, lid * 0.8, dark
    white = edge(white - 0.08, 0.16)
    gaze = np.copysign(0.03 * bell[9], at.u * bell[9])
    disc = _square(from_eye - gaze) + _square(eye_v + 0.006)
    pupil = _unit(0.9 - disc / _square(face["iris"] * 0.62))
    yield at.where, pupil * white, dark
    yield at.where, edge(1.0 - disc / _square(face["iris"]), 0.06) * white, looks.iris
    yield at.where, white, _flat((0.95, 0.94, 0.93))

    at = frame.band(face["nose_y"], 0.03)
    nostril = _unit(
        1.1
        - _square((at.side - face["nose_width"] * 0.55) * (1 / 0.05))
        - _square((at.v - face["nose_y"]) * (1 / 0.028))
    )
    yield at.where, nostril * 0.7, looks.skin * 0.36

    smile = EXPRESSION * bell[10] + 0.02
    lips = np.maximum(np.abs(face["upper_lip"]), np.abs(face["lower_lip"])) + 0.012
    at = frame.band(face["mouth_y"], lips + 0.12 + 1.1 * np.abs(smile) + 2.0 * slack)
    xx = _square(at.u / face["mouth_width"])
    bow = np.maximum(1.0 - xx, 0.0)
    from_mouth = at.v - face["mouth_y"] + smile * xx
    gap = np.maximum(0.12 * (chance[8] - 0.62), 0.0) * bow
    distance = np.abs(from_mouth)
    mouth = edge(0.012 + gap - distance) * _unit((1.02 - xx) * 4.0)
    shows_teeth = (chance[9] < 0.5) & (chance[8] > 0.75)
    inner = np.where(shows_teeth, _flat((0.92, 0.91, 0.88)), _flat((0.28, 0.08, 0.08)))
    yield at.where, mouth, inner
    thickness = np.where(from_mouth < 0.0, face["upper_lip"], face["lower_lip"])
    yield at.where, edge(thickness * bow + gap - distance) * (xx < 1.0), looks.lips

    head = edge(inside.copy(), 0.38)
    some = _where(looks.is_bearded & (mode[2] < 0.4))
    if len(some):
        at, width, middle = frame.only(some), face["mouth_width"][some], face["mouth_y"][some]
        beard = edge(at.v - 0.42 + 0.5 * at.u * at.u, 0.4)
        hole = 1.0 - _square(at.u / (width * 0.85)) - _square((at.v - middle - 0.02) * (1 / 0.13))
        beard *= 1.0 - edge(hole, 0.15)
        xx = _square(at.u / width)
        moustache = edge(0.045 - np.abs(at.v - middle + 0.11 - 0.12 * xx)) * _unit((1.1 - xx) * 4.0)
        stubble = 0.3 + 0.65 * mode[11, some]
        yield (
            at.where,
            np.maximum(beard, moustache) * head[some] * stubble,
            looks.hair[:, some] * 0.88,
        )

    size = face["mole_size"]
    spot = np.maximum(size, 0.0) + 0.001
    some = _where(size > 0.008)
    if len(some):
        at = frame.band(face["mole_y"][some], 1.3 * spot[some]).only(some)
        apart = _square(at.u - face["mole_x"][some]) + _square(at.v - face["mole_y"][some])
        mole = _unit(1.4 - apart / _square(spot[some]))
        yield at.where, mole * head[at.where], looks.skin[:, some] * 0.45

    at = frame.band(0.28, 0.17)
    cheek = _unit(1.0 - _square((at.side - 0.42) * (1 / 0.2)) - _square((at.v - 0.28) * (1 / 0.16)))
    cheek *= head[at.where]
    yield at.where, cheek * (0.10 + 0.12 * chance[10]), looks.skin * _flat((1.06, 0.72, 0.72))
    yield frame.where, head, looks.skin, _shade(looks, frame, inside)

    at = frame.band(face["eye_y"] + 0.08, 0.2 + slack, "y")
    ear = (
        1.0
        - _square((np.abs(at.x + frame.yaw * 0.3) - face["width"]) / face["ear"])
        - _square((at.y - face["eye_y"] - 0.08) * (1 / 0.19))
    )
    yield at.where, edge(ear, 0.12) * ~is_long, looks.skin * 0.84

    some = _where(is_long & has_hair)
    if len(some):
        at = frame.only(some)
        length = 0.4 + 0.5 * mode[9, some]
        behind = (
            1.0
            - _square(at.x / (face["width"][some] + volume[some] * 0.6))
            - _square((at.y + 0.08 - length * 0.6) / (face["crown"][some] + 0.06 + length * 0.6))
        )
        yield at.where, edge(behind, 0.38), looks.hair[:, some] * 0.68
    at = frame.band(10.55, 10.0 + 2.0 * slack, "y")  # all below the chin
    neck = edge(face["width"] * 0.60 - np.abs(at.x) + np.maximum(at.y - 1.0, 0.0) * 0.4) * edge(
        at.y - 0.55
    )
    neck *= edge(1.22 - at.y - 0.2 * (1.0 - np.abs(at.x)))
    yield at.where, neck, looks.skin * 0.78
    yield frame.where, edge(y - 1.06 - 0.28 * frame.xx), chance[3:6] * 0.7 + 0.08
    grey = (chance[0] + chance[1] + chance[2]) * (1 / 3)
    wall = 0.25 + 0.5 * (0.5 * grey + 0.5 * chance[0:3])
    yield (
        frame.where,
        np.ones_like(x),
        wall,
        1.0 + (chance[11] - 0.5) * 0.5 * x + (chance[12] - 0.5) * 0.5 * y,
    )


def _shade(looks: _Looks, frame: _Frame, inside: Floats) -> Floats:
    """Brightness of the skin: shadows of the nose, of the eyes and of the outline, creases."""
    face, mode, edge, slack = looks.face, looks.mode, frame.edge, frame.slack
    shade = np.ones_like(inside)
    at = frame.band(face["nose_y"] + 0.05, 0.06 + 2.0 * slack)
    below_nose = at.v - face["nose_y"]
    shade[at.where] -= (
        face["nose_shadow"]
        * edge(0.05 - np.abs(below_nose - 0.05), 0.5)
        * edge(face["nose_width"] * 1.2 - at.side, 0.6)
    )
    middle = 0.5 * (face["nose_y"] + face["eye_y"])
    at = frame.band(middle, np.abs(face["nose_y"] - middle) + 0.08)
    bridge = _unit(1.0 - np.abs(at.side - 0.05 - face["nose_width"] * 0.25) * 13.0)
    shade[at.where] -= (
        0.11
        * bridge
        * _unit((face["nose_y"] - at.v) * 3.0)
        * _unit((at.v - face["eye_y"]) * 4.0 + 0.3)
    )
    reach = 0.155 + 0.26 * np.abs(face["eye_tilt"])
    at = frame.band(face["eye_y"], reach)
    from_eye = at.side - face["eye_x"]
    eye_v = at.v - face["eye_y"] + face["eye_tilt"] * from_eye
    shade[at.where] -= 0.10 * _unit(
        1.0 - _square(from_eye * (1 / 0.25)) - _square(eye_v * (1 / 0.15))
    )
    shade -= 0.14 * _unit(1.0 - inside * 3.0)
    at = frame.band(face["nose_y"] + 0.15, 0.18 + slack)
    below_nose = at.v - face["nose_y"]
    crease = _unit(1.0 - np.abs(at.side - face["mouth_width"] * 0.75 - 0.5 * below_nose) * 16.0)
    shade[at.where] -= (
        0.16
        * np.maximum(mode[3] - 0.55, 0.0)
        * crease
        * edge(below_nose + 0.02)
        * edge(0.3 - below_nose)
    )
    return shade


@cache
def _grain() -> Floats:
    return normals(np.array([0x6E], np.uint64), _GRAIN_SIZE).reshape(-1)


def _photographed(picture: Floats, looks: _Looks, frame: _Frame) -> NDArray[np.uint8]:
    """Light, colour cast, resolution, blur and noise; bytes ``[n, size, size, 3]``."""
    bell, quality, size = looks.bell, looks.quality, picture.shape[-1]
    light = 1.0 + LIGHT * bell[11] * frame.x + (0.6 * LIGHT * bell[12] - 0.08) * frame.y
    np.clip(light, 0.35, 1.7, out=light)
    light *= 255.0 * np.maximum(1.0 + EXPOSURE * bell[13], 0.3)
    pictures = np.empty((picture.shape[1], 3, size, size), np.float32)
    for channel in range(3):
        np.multiply(picture[channel], light, out=pictures[:, channel])
        pictures[:, channel] *= 1.0 + CAST * (
            bell[14] if channel == 0 else bell[15] if channel == 2 else 0.0
        )
    for worst, best, factor in LOW_RESOLUTION:
        rows = np.flatnonzero((quality >= worst) & (quality < best))
        if len(rows):
            pictures[rows] = _coarse(pictures[rows], factor)
    rows = np.flatnonzero(quality < BLURRED)
    if len(rows):
        pictures[rows] = _blurred(
            pictures[rows], _plane(0.33 * (1.0 - quality[rows] * (1 / BLURRED)))[:, None]
        )
    noise = (np.float32(1.05) - quality) * np.float32(255.0 * NOISE)
    starts = uniforms(looks.grain_keys, 1)[:, 0] * np.float32(_GRAIN_SIZE - 3 * size * size)
    windows = np.lib.stride_tricks.sliding_window_view(_grain(), 3 * size * size)
    pictures += (
        windows[starts.astype(np.int64)].reshape(pictures.shape) * noise[:, None, None, None]
    )
    np.clip(np.rint(pictures, out=pictures), 0.0, 255.0, out=pictures)
    return pictures.astype(np.uint8).transpose(0, 2, 3, 1)


def _coarse(pictures: Floats, factor: int) -> Floats:
    """Means of blocks of pixels."""
    total = np.zeros_like(pictures[..., ::factor, ::factor])
    for row in range(factor):
        for column in range(factor):
            total += pictures[..., row::factor, column::factor]
    total *= 1.0 / factor**2
    return total.repeat(factor, axis=-1).repeat(factor, axis=-2)


def _blurred(pictures: Floats, amount: Floats) -> Floats:
    """A mean over three pixels each way; ``amount`` is the weight of a neighbour."""
    for axis in (-1, -2):
        before = np.roll(pictures, 1, axis)
        before += np.roll(pictures, -1, axis)
        pictures = pictures * (1.0 - 2.0 * amount) + before * amount
    return pictures
