"""Data of an experiment: disjoint identities for training, validation and test.

``Made`` identities come from a recipe itself, ``Stored`` ones are pictures or recordings in the
layouts that ``qmargin train`` reads, and ``Drawn`` ones are small grey pictures held in memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.drawings import Drawings, variants_of
from qmargin.data.faces import FaceImages
from qmargin.data.order import derived_seed
from qmargin.data.samples import Dataset, Input
from qmargin.data.speech import SpeechDataset
from qmargin.data.stored import AudioDataset, StoredSamples
from qmargin.data.synthetic import DrawnIdentities
from qmargin.data.voices import VoiceChunks
from qmargin.errors import ConfigError, DataError
from qmargin.experiments.pictures import StoredPictures, read_pictures
from qmargin.files import replacing
from qmargin.training.build import STORED as STORED_OPTIONS
from qmargin.training.build import build_dataset
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.reporting import duration
from qmargin.training.signals import StopRequest

VALIDATION, TEST = 0x76616C, 0x746573  # seeds of made identities
SYNTHETIC = "All data are synthetic and made by this package: results are about them alone"
HELD_OUT = 0x57D4  # order in which stored identities are held out
TRAIN_SHARE = 0.6  # of stored identities, where the data do not say which ones train
SHIFT = 2  # pixels by which training moves a drawing
PLAIN_IMAGES = {"flip": 0.0}  # augmentations, switched off
PLAIN_SPEECH = {
    "speed_perturbation": False,
    "keep_speed_classes": False,
    "augment": 0.0,
    "dither": 0.0,
    "mask_probability": 0.0,
}
_BLOCK = 1 << 12  # pictures that a process draws at a time
_SPOKEN = 1 << 9  # utterances
BYTES = np.dtype(np.uint8)
Block = Callable[[], NDArray[Any]]
Say = Callable[[str], object]
SECONDS_BETWEEN_LINES = 10.0


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class World:
    """Data of an experiment; can be sent to other processes.

    Methods take ``is_search``: while settings are searched, runs train on the training identities
    without those for validation and are measured on these; otherwise they train on all training
    identities and are measured on the test identities.

    Args:
        folder: Folder of shared files; set by ``prepare``. note: A note on the data for users.
    """

    folder: Path | None = field(default=None, compare=False, kw_only=True)
    note: str = field(default="", compare=False, kw_only=True)

    @property
    def record(self) -> dict[str, Any]:
        """What identifies the data, for the record of an experiment."""
        names = [entry.name for entry in fields(self) if entry.compare]
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in names}}

    @property
    def is_ink(self) -> bool:
        """Whether pictures have bright ink on a dark ground, and are shown inverted."""
        return False

    def differs(self, recipe: Recipe) -> bool:
        """Whether every seed of a recipe has test identities of its own."""
        return False

    def opened(self) -> World:
        """Return the data after opening and checking them."""
        return self

    def adapt(self, recipe: Recipe, *, is_search: bool) -> Recipe:
        """Adapt a recipe to the data; refuse one for other data."""
        raise NotImplementedError

    def prepare(
        self,
        folder: Path,
        recipes: Sequence[Recipe],
        *,
        is_search: bool,
        request: StopRequest,
        say: Say = silent,
    ) -> World:
        """Write files that runs share to a folder; return data that read them.

        ``say`` gets lines of progress if this takes long.
        """
        return self

    def train(self, recipe: Recipe, *, is_search: bool) -> Dataset | None:
        """Training data of a run; None for those of the recipe."""
        return None

    def measured(self, recipe: Recipe, *, is_search: bool) -> Dataset:
        """Validation or test data of a run, without augmentation."""
        raise NotImplementedError

    def check(self, recipe: Recipe) -> str:
        """Refuse identities in both training and test; return notes on what was not checked."""
        return ""


@dataclass(frozen=True)
class Made(World):
    """Synthetic identities of a recipe; the test uses others of the same kind.

    Numbers are those of identities, and of samples of each of them.
    """

    num_validation: int = 200
    samples_validation: int = 10
    num_test: int = 500
    samples_test: int = 10
    note: str = field(default=SYNTHETIC, compare=False, kw_only=True)

    def differs(self, recipe: Recipe) -> bool:
        return "seed" not in recipe.data.options

    def adapt(self, recipe: Recipe, *, is_search: bool) -> Recipe:
        if recipe.data.is_stored:
            raise ConfigError(
                f"data.kind is {recipe.data.kind!r}; give data: {{train: PATH, test: PATH}}"
            )
        return recipe

    def prepare(
        self,
        folder: Path,
        recipes: Sequence[Recipe],
        *,
        is_search: bool,
        request: StopRequest,
        say: Say = silent,
    ) -> Made:
        made = replace(self, folder=folder)
        datasets = [made._kept(build_dataset(recipe)) for recipe in recipes]
        datasets += [made._kept(made._measured(recipe, is_search=is_search)) for recipe in recipes]
        found = {file: dataset for file, dataset in filter(None, datasets) if not file.exists()}
        for number, (file, dataset) in enumerate(found.items(), 1):
            draw: Callable[[NDArray[Any]], NDArray[Any]]
            if isinstance(dataset, VoiceChunks):
                draw, step = dataset.recordings.waveforms, _SPOKEN
                shape: tuple[int, ...] = (int(dataset.recordings.ends[-1]),)
                dtype: np.dtype[Any] = np.dtype(np.int16)
            else:
                draw, dtype = dataset.images, BYTES
                step = _BLOCK
                shape = (len(dataset), *draw(np.arange(0)).shape[1:])
            rows = np.arange(len(dataset))
            blocks = [
                partial(draw, rows[start : start + step]) for start in range(0, len(rows), step)
            ]
            what = f"making data, {number} of {len(found)}"
            draw_to(file, shape, blocks, dtype=dtype, request=request, say=say, what=what)
        return made

    def train(self, recipe: Recipe, *, is_search: bool) -> Dataset | None:
        found = self._kept(build_dataset(recipe))
        return found[1].kept_in(found[0]) if found is not None and found[0].exists() else None

    def measured(self, recipe: Recipe, *, is_search: bool) -> Dataset:
        dataset = self._measured(recipe, is_search=is_search)
        found = self._kept(dataset)
        return found[1].kept_in(found[0]) if found and found[0].exists() else dataset

    def _measured(self, recipe: Recipe, *, is_search: bool) -> Dataset:
        count, samples = self.num_test, self.samples_test
        if is_search:
            count, samples = self.num_validation, self.samples_validation
        dataset, split = build_dataset(recipe), "validation" if is_search else "test"
        if isinstance(dataset, VoiceChunks):
            return dataset.held_out(split, count, samples, is_whole=not is_search)
        if isinstance(dataset, DrawnIdentities):
            return dataset.held_out(split, count, samples)
        seed = derived_seed(recipe.seed, VALIDATION if is_search else TEST)
        options = dict(recipe.data.options)
        options |= {"samples_per_class": samples, "seed": seed, "augmentation": 0.0}
        data = replace(recipe.data, options=options, num_classes=count)
        return build_dataset(replace(recipe, data=data))

    def _kept(self, dataset: Dataset) -> tuple[Path, DrawnIdentities | VoiceChunks] | None:
        """File of the pictures or speech that runs share, and their generator."""
        if self.folder is None or not isinstance(dataset, DrawnIdentities | VoiceChunks):
            return None
        made = dataset.recordings if isinstance(dataset, VoiceChunks) else dataset
        digest = hashlib.sha256(repr(made).encode()).hexdigest()[:12]
        return self.folder / f"{type(made).__name__.lower()}-{digest}.npy", dataset


@dataclass(frozen=True)
class Stored(World):
    """Pictures or recordings in the layouts that ``qmargin train`` reads.

    ``validation`` is the share of the training identities that a search holds out, or settings of
    the data that have others, such as ``("data.path=faces/validation",)``. An empty path is not set
    yet.
    """

    train_path: str | None = None  # None for that of the recipe
    test_path: str | None = None  # None where nothing is tested
    validation: float | tuple[str, ...] = 0.1
    trials: str | None = None  # list, with names relative to its folder; None for all pairs
    budget: int | None = None  # samples that a run reads in total; None for the recipe's epochs

    def __post_init__(self) -> None:
        if isinstance(self.validation, tuple):
            for setting in self.validation:
                if not setting.startswith("data."):
                    raise ConfigError(f"validation has {setting!r}; give data.path=DIR")
        elif not 0.0 < self.validation < 1.0:
            raise ConfigError(f"validation is {self.validation:g}; give a share below 1, or a path")

    def opened(self) -> Stored:
        changes: dict[str, Any] = {}
        for name in ("train_path", "test_path", "trials"):
            given, key = getattr(self, name), name.removesuffix("_path")
            if given == "":
                raise ConfigError(f"data.{key} is missing; give a path, --set data.{key}=PATH")
            if given is not None:
                path = Path(given).expanduser()
                if not path.exists():
                    raise DataError(f"data.{key} is {given}, which does not exist; check the path")
                changes[name] = str(path.resolve())
        return replace(self, **changes)

    def adapt(self, recipe: Recipe, *, is_search: bool) -> Recipe:
        if not recipe.data.is_stored:
            raise ConfigError(
                f"the recipe generates its data ({recipe.data.kind}); leave data.train out"
            )
        if self.train_path is None:
            return recipe
        # counted again: a search trains on a part of them
        recipe = replace(recipe, data=replace(recipe.data, path=self.train_path, num_classes=None))
        if self.budget is None:
            return recipe
        return fitted(recipe, self.budget, len(build_dataset(recipe)))

    def train(self, recipe: Recipe, *, is_search: bool) -> Dataset | None:
        if not is_search or isinstance(self.validation, tuple):
            return None
        dataset = build_dataset(recipe)
        return SomeIdentities(dataset, self.divided(dataset, self.validation)[0])

    def measured(self, recipe: Recipe, *, is_search: bool) -> Dataset:
        if not is_search:
            if self.test_path is None:
                raise ConfigError("data.test is missing; give the path of the test identities")
            return build_dataset(plain_recipe(recipe, [f"data.path={self.test_path}"]))
        if not isinstance(self.validation, tuple):
            dataset = build_dataset(plain_recipe(recipe))
            return SomeIdentities(dataset, self.divided(dataset, self.validation)[1])
        changed = plain_recipe(recipe, self.validation)
        if changed.data == plain_recipe(recipe).data:
            raise ConfigError(
                f"validation and training both use {recipe.data.path}; give other validation data"
            )
        return build_dataset(changed)

    def divided(self, dataset: Dataset, share: float) -> tuple[list[int], list[int]]:
        """Identities that a search trains on and holds out, whatever the order of the data."""
        names = names_in(stored_in(dataset))
        count = max(2, round(share * len(names)))
        if len(names) - count < 2:
            raise DataError(
                f"{self.train_path or 'the data'} has {len(names)} identities, of which a search "
                f"holds out {count}; at least 2 must be left to train on, give more"
            )
        order = sorted(range(len(names)), key=lambda n: derived_seed(HELD_OUT, *names[n].encode()))
        return sorted(order[count:]), sorted(order[:count])

    def check(self, recipe: Recipe) -> str:
        if self.test_path is None:
            return ""
        trained = stored_in(build_dataset(plain_recipe(recipe)))
        tested = stored_in(self.measured(recipe, is_search=False))
        if not (trained.has_names or tested.has_names or trained.index.root == tested.index.root):
            return (
                f"identities of {recipe.data.path} and {self.test_path} have numbers but no names: "
                "whether they are disjoint was not checked"
            )
        both = sorted(set(names_in(trained)) & set(names_in(tested)))
        if both:
            raise DataError(
                f"{len(both)} identities are in {recipe.data.path} and in {self.test_path}, such "
                f"as {both[0]!r}; training and test must not share identities"
            )
        return ""


def fitted(recipe: Recipe, budget: int, count: int) -> Recipe:
    """A recipe for a number of samples, with the epochs that a total number of samples allows."""
    data = replace(recipe.data, batch_size=min(recipe.data.batch_size, count))
    return replace(recipe, data=data, run=replace(recipe.run, epochs=max(1, round(budget / count))))


def plain_recipe(recipe: Recipe, settings: Sequence[str] = ()) -> Recipe:
    """A recipe whose data are read without augmentation, with other settings of the data."""
    part, options = recipe.data, dict(recipe.data.options)
    if part.kind == "images":
        options = {name: options[name] for name in (*STORED_OPTIONS, "size") if name in options}
        options |= PLAIN_IMAGES
    elif part.kind == "audio":
        options |= PLAIN_SPEECH
    data = replace(part, options=options, num_classes=None)
    return apply_settings(replace(recipe, data=data), settings)


def stored_in(dataset: Dataset) -> StoredSamples:
    """The pictures or recordings of a loader's dataset."""
    if isinstance(dataset, FaceImages):
        return dataset.images
    if isinstance(dataset, SpeechDataset) and isinstance(dataset.recordings, AudioDataset):
        return dataset.recordings
    raise ConfigError(f"{type(dataset).__name__} does not name its identities")


def names_in(stored: StoredSamples) -> list[str]:
    """Names of identities, in the order of their labels."""
    return [stored.class_name(number) for number in range(stored.num_classes)]


class SomeIdentities:
    """Samples of some identities of a dataset, which are numbered anew in the order of ``kept``.

    Recordings at several speeds have classes for each speed; these stay apart.
    """

    def __init__(self, dataset: Dataset, kept: Sequence[int]) -> None:
        stored = stored_in(dataset)
        self._dataset, self._num_all, self._num_kept = dataset, stored.num_classes, len(kept)
        self._numbers = np.full(stored.num_classes, -1)
        self._numbers[list(kept)] = np.arange(len(kept))
        self._rows = np.flatnonzero(self._numbers[stored.labels] >= 0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_classes(self) -> int:
        return self._dataset.num_classes // self._num_all * self._num_kept

    @property
    def labels(self) -> NDArray[Any] | None:
        labels = self._dataset.labels
        return None if labels is None else self._numbers[labels[self._rows]]

    def read(self, index: int, seed: int) -> tuple[Input, int]:
        inputs, label = self._dataset.read(int(self._rows[index]), seed)
        turn, identity = divmod(label, self._num_all)
        return inputs, turn * self._num_kept + int(self._numbers[identity])

    def sample_id(self, index: int) -> str:
        return self._dataset.sample_id(int(self._rows[index]))

    def source(self, index: int) -> str:
        return self._dataset.source(int(self._rows[index]))


@dataclass(frozen=True)
class Drawn(World):
    """Small grey pictures of a path, held in memory; see ``read_pictures``."""

    path: str
    seed: int | None = None  # divides identities; None for the seed of each run
    validation: float = 0.2  # share that a search holds out, whole groups where they are known
    budget: int | None = None  # pictures that a run reads in total; None for the recipe's epochs
    most_test: int | None = None  # test pictures
    samples_test: int | None = None  # of an identity
    turns: bool = False  # quarter turns of a training identity count as new identities
    mirrors: bool = False  # so do its mirror images
    alike: float | None = None  # correlation from which two of them are one
    warp: float = 0.0  # distortion of training pictures, see ``variants_of``
    num_variants: int = 16  # distorted variants of each training picture
    distinct: float | None = None  # leaves out test identities that look alike, by this share
    digest: str = ""  # of the pictures; set by ``opened``

    @property
    def is_ink(self) -> bool:
        return _read(self.path).is_ink

    def differs(self, recipe: Recipe) -> bool:
        return self.seed is None

    def opened(self) -> Drawn:
        path = str(Path(self.path).expanduser().resolve())
        _read.cache_clear()
        stored = _read(path)
        return replace(self, path=path, digest=stored.digest, note=stored.note)

    def adapt(self, recipe: Recipe, *, is_search: bool) -> Recipe:
        data = replace(recipe.data, kind="images", path=self.path, num_classes=None, options={})
        if self.budget is None:
            return replace(recipe, data=data)
        count = len(self._parts(recipe.seed, is_search=is_search)[0])
        return fitted(replace(recipe, data=data), self.budget, count)

    def prepare(
        self,
        folder: Path,
        recipes: Sequence[Recipe],
        *,
        is_search: bool,
        request: StopRequest,
        say: Say = silent,
    ) -> Drawn:
        made = replace(self, folder=folder)
        batch = min(recipe.data.batch_size for recipe in recipes)
        for seed in sorted({recipe.seed for recipe in recipes}):
            train, _ = made._parts(seed, is_search=is_search)
            if len(train) < batch:
                raise DataError(
                    f"{self.path} has {len(train)} pictures to train on and a batch takes "
                    f"{batch}; lower data.batch_size"
                )
            if self.warp:
                pictures, count = train.pictures, self.num_variants
                step = max(1, _BLOCK // count)
                blocks = [
                    partial(
                        variants_of, pictures[start : start + step], self.warp, count, first=start
                    )
                    for start in range(0, len(pictures), step)
                ]
                shape = (len(pictures), count, *pictures.shape[1:])
                draw_to(made._variants(train), shape, blocks, request=request, say=say)
        return made

    def train(self, recipe: Recipe, *, is_search: bool) -> Dataset | None:
        train = replace(self._parts(recipe.seed, is_search=is_search)[0], shift=SHIFT)
        if self.warp:
            train = replace(train, variants=np.load(self._variants(train), mmap_mode="r"))
        return train

    def measured(self, recipe: Recipe, *, is_search: bool) -> Drawings:
        return self._parts(recipe.seed, is_search=is_search)[1]

    def _parts(self, seed: int, *, is_search: bool) -> tuple[Drawings, Drawings]:
        """Pictures to train on, and to measure."""
        stored = _read(self.path)
        train, test = divided(stored, seed if self.seed is None else self.seed)
        if is_search:
            train, test = held_out(train, stored.groups, self.validation)
        if self.distinct is not None:
            chosen = part_of(stored, test, None).distinct(self.distinct)
            test = [test[label] for label in chosen]
        learned = part_of(stored, train, self.budget)
        if self.turns:
            learned = learned.with_turns(has_mirrors=self.mirrors, alike=self.alike)
        return learned, part_of(stored, test, self.most_test, self.samples_test)

    def _variants(self, train: Drawings) -> Path:
        assert self.folder is not None  # prepared
        digest = hashlib.blake2b(train.pictures.tobytes(), digest_size=8).hexdigest()
        return self.folder / f"variants-{self.warp:g}-{self.num_variants}-{digest}.npy"


@lru_cache(maxsize=1)
def _read(path: str) -> StoredPictures:
    return read_pictures(Path(path))


def divided(stored: StoredPictures, seed: int) -> tuple[list[int], list[int]]:
    """Labels to train and to test: as the data say, or by a seed."""
    order = sorted(set(stored.labels.tolist()), key=lambda label: derived_seed(seed, label))
    if stored.is_test is None:
        split = round(TRAIN_SHARE * len(order))
        train, test = order[:split], order[split:]
    else:
        tested = set(stored.labels[stored.is_test].tolist())
        train = [label for label in order if label not in tested]
        test = [label for label in order if label in tested]
    if min(len(train), len(test)) < 2:
        raise DataError(
            f"{stored.origin} has {len(train)} identities to train and {len(test)} to test; "
            "give 2 of each"
        )
    if np.bincount(stored.labels)[test].max() < 2:
        raise DataError(f"no test identity of {stored.origin} has 2 pictures; give more of each")
    return train, test


def held_out(
    train: Sequence[int], groups: NDArray[np.int64] | None, share: float
) -> tuple[list[int], list[int]]:
    """Labels that a search trains on, and those that it validates on.

    If labels have groups, whole groups are held out: a network learns the common features of a
    group, and the test also has other groups.
    """
    least = share * len(train)
    if groups is None:
        chosen = set(train[len(train) - max(2, round(least)) :])
    else:
        chosen = set()
        known = set(groups[list(train)].tolist())
        for group in sorted(known, key=lambda one: derived_seed(HELD_OUT, one)):
            if len(chosen) < least:
                chosen |= {label for label in train if groups[label] == group}
    kept = [label for label in train if label not in chosen]
    if len(kept) < 2:
        raise DataError(
            f"of {len(train)} training identities a search holds out {len(chosen)}, and at least 2 "
            "must be left to train on; give more identities or groups"
        )
    return kept, [label for label in train if label in chosen]


def part_of(
    stored: StoredPictures, labels: Sequence[int], most: int | None, each: int | None = None
) -> Drawings:
    """Pictures of some identities: at most ``most`` in total and ``each`` per identity."""
    counts, kept = np.bincount(stored.labels), list(labels)
    if most is not None:
        totals = np.cumsum(counts[kept])
        kept = kept[: max(2, int(np.searchsorted(totals, most, side="right")))]
    numbers = np.full(len(counts), -1)
    numbers[kept] = np.arange(len(kept))
    found = numbers[stored.labels]
    rows = np.argsort(found, kind="stable")[np.count_nonzero(found < 0) :]
    starts = np.searchsorted(found[rows], found[rows])
    if each is not None:
        rows = rows[np.arange(len(rows)) - starts < each]
    names = tuple(stored.names[row] for row in rows)
    return Drawings(stored.pictures[rows], found[rows], names, stored.origin)


def draw_to(
    file: Path,
    shape: tuple[int, ...],
    blocks: Sequence[Block],
    *,
    dtype: np.dtype[Any] = BYTES,
    request: StopRequest,
    say: Say = silent,
    what: str = "making data",
) -> None:
    """Draw blocks of pictures or speech into a file, with all cores, unless it exists.

    A signal stops this and leaves no file.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        pictures = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        start, began = 0, time.monotonic()
        said = began
        for block in _in_processes(blocks, request):
            pictures[start : start + len(block)] = block
            start += len(block)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES and start < shape[0]:
                said, share = time.monotonic(), start / shape[0]
                left = (said - began) * (1.0 - share) / share
                say(f"{what}: {share:.0%}; about {duration(left)} left")
        pictures.flush()


def _in_processes(blocks: Sequence[Block], request: StopRequest) -> Iterator[NDArray[Any]]:
    if len(blocks) == 1:
        yield blocks[0]()
        return
    from qmargin.experiments.slots import follow_parent

    request.obey()  # before processes are started
    jobs = min(len(blocks), os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=follow_parent) as pool:
        try:
            for found in pool.map(_call, blocks):
                request.obey()
                yield found
        finally:
            pool.shutdown(cancel_futures=True)


def _call(block: Block) -> NDArray[Any]:
    return block()
