"""Drawings to train on, to choose settings by, and to test; read from a path, or made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.data.drawings import Drawings, variants_of
from qmargin.data.order import derived_seed
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.embed import embed_pictures
from qmargin.demo.evaluate import Facts, Pictures, evaluate_pictures
from qmargin.demo.recipe import SHIFT
from qmargin.demo.run import say
from qmargin.demo.stored import INDEX, Stored, read_stored
from qmargin.demo.worlds import part_of
from qmargin.errors import DataError
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.result import Result
from qmargin.evaluation.scoring import nearest_moments
from qmargin.files import replacing, write_atomically
from qmargin.metrics.normalise import Moments
from qmargin.study.pool import in_processes
from qmargin.study.studies import Study
from qmargin.sweep.trial import Trial
from qmargin.sweep.validation import TrialData
from qmargin.training.checkpoint import open_checkpoint, read_prototypes
from qmargin.training.folders import list_steps
from qmargin.training.recipe import Recipe
from qmargin.training.signals import StopRequest
from qmargin.training.starting import CHECKPOINTS

VALIDATION_SHARE = 0.2  # of the training identities, while settings are chosen
VALIDATION = 0x57D4  # tells that choice of identities from others
VALIDATION_IDS, VALIDATION_SAMPLES = 500, 10
BY_PROTOTYPES = "scores normalised by prototypes"
NEAREST = 50  # of the prototypes: on strokes 10 are too few, and 300 are no better
MAX_COHORT = 10_000  # prototypes
DIGEST = "pictures.blake2b"  # of the pictures of a path
_BLOCK = 1 << 16  # pictures that a process draws at a time


@dataclass(frozen=True)
class PictureMaterial:
    """See ``Material``.

    Attributes:
        study: What is studied.
        path: Of pictures; None for stroke identities.
        folder: Of pictures that were drawn, and of the index of a path.
        is_search: Hold out training identities; otherwise the test's.
    """

    study: Study
    path: Path | None
    folder: Path
    is_search: bool

    def __call__(self, recipe: Recipe) -> TrialData:
        """Training data, and those to measure."""
        views = self.study.num_views
        if self.study.kind == "strokes":
            return TrialData(self._strokes(recipe.seed), self._drawn(recipe.seed), views)
        train, measured = self._divided()
        train = replace(train, shift=SHIFT)
        if self.study.warp:
            train = replace(train, variants=np.load(self._warps(train), mmap_mode="r"))
        return TrialData(measured, train, views)

    @property
    def training_path(self) -> str | None:
        """For the record: the pictures are given to the training."""
        return None if self.path is None else str(self.path.resolve())

    def prepare(self, seeds: Sequence[int], request: StopRequest | None = None) -> None:
        """Draw what trials share, once; refuse pictures that cannot be divided, or are others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path is None:
            for seed in seeds:
                self._draw_strokes(seed, request)
            return
        stored = read_stored(self.path, self.folder / INDEX)
        self._check_same(stored)
        train, test = identities(stored)
        if min(len(train), len(test)) < 2:
            raise DataError(
                f"{self.path} has {len(train)} identities to train and {len(test)} to test; give a "
                "folder with train/ and test/, or an NPZ file with split, and at least 2 of each"
            )
        learned, _ = self._parts(stored)
        if len(learned) < self.study.size.batch_size:
            raise DataError(
                f"{self.path} has {len(learned)} pictures to train on and a step of "
                f"{self.study.name} takes {self.study.size.batch_size}; give more"
            )
        if seeds and self.study.warp:
            self._draw_warps(learned, request)

    def _check_same(self, stored: Stored) -> None:
        """Trainings are told apart by the path of their data, so that has to stay the same."""
        record = self.folder / DIGEST
        if not record.exists():
            write_atomically(record, stored.digest.encode())
            if stored.note:
                say(stored.note)
        elif record.read_text() != stored.digest:
            raise DataError(
                f"{self.path} has other pictures than the trainings in {self.folder.parent} had; "
                "choose another --out"
            )

    def evaluate(self, trial: Trial, facts: Facts, device: str) -> tuple[Result, Result]:
        """All pairs of test identities, by cosines, and by AS-norm with prototypes as cohort."""
        seed = trial.recipe.seed
        dataset: Pictures = (
            self._strokes(seed) if self.study.kind == "strokes" else self._divided()[1]
        )
        if self.study.kind == "strokes" and self.study.world is None:
            facts = replace(facts, protocol=f"{facts.protocol}, seed {seed}")  # other identities
        checkpoint = next(iter(list_steps(trial.folder / CHECKPOINTS).values()))
        views = self.study.num_views
        embeddings = embed_pictures(
            trial.recipe, checkpoint, dataset, num_views=views, device=device
        )
        plain = evaluate_pictures(embeddings, dataset, facts, device=device)
        checked = open_checkpoint(checkpoint, check=False)  # the embeddings are of it
        cohort = unit_rows(read_prototypes(checked, at_most=MAX_COHORT).numpy())
        nearest = min(NEAREST, len(cohort))
        moments = [
            nearest_moments(unit_rows(view), cohort, nearest, "prototypes")
            for view in np.split(embeddings, views, axis=1)
        ]
        norm = Moments(*(np.mean(parts, axis=0) for parts in zip(*moments, strict=True)))
        facts = replace(facts, protocol=f"{facts.protocol}, {BY_PROTOTYPES}")
        return plain, evaluate_pictures(embeddings, dataset, facts, moments=norm, device=device)

    def _strokes(self, seed: int) -> StrokeIdentities:
        size, world = self.study.size, self._world(seed)
        if self.is_search:
            return StrokeIdentities(
                VALIDATION_IDS, VALIDATION_SAMPLES, seed=world, split="validation"
            )
        return StrokeIdentities(size.num_test, size.samples_test, seed=world, split="test")

    def _train(self, seed: int) -> StrokeIdentities:
        size = self.study.size
        return StrokeIdentities(
            size.num_classes, size.samples_per_class, seed=self._world(seed), shift=SHIFT
        )

    def _drawn(self, seed: int) -> StrokeIdentities:
        return self._train(seed).kept_in(self._file(seed))

    def _world(self, seed: int) -> int:
        return seed if self.study.world is None else self.study.world

    def _file(self, seed: int) -> Path:
        return self.folder / f"strokes-{self._world(seed)}.npy"

    def _draw_strokes(self, seed: int, request: StopRequest | None) -> None:
        train = self._train(seed)
        rows = np.arange(len(train))
        blocks = [
            partial(train.images, rows[start : start + _BLOCK])
            for start in range(0, len(train), _BLOCK)
        ]
        shape = (len(train), train.size, train.size)
        draw_to(self._file(seed), shape, blocks, request=request)

    def _warps(self, train: Drawings) -> Path:
        """File of as many variants of each picture as a final training has epochs."""
        digest = hashlib.blake2b(train.pictures.tobytes(), digest_size=8).hexdigest()
        return self.folder / f"warps-{self.study.warp:g}-{self.study.size.epochs}-{digest}.npy"

    def _draw_warps(self, train: Drawings, request: StopRequest | None) -> None:
        pictures, count = train.pictures, self.study.size.epochs
        step = max(1, _BLOCK // count)
        blocks = [
            partial(
                variants_of, pictures[start : start + step], self.study.warp, count, first=start
            )
            for start in range(0, len(pictures), step)
        ]
        shape = (len(pictures), count, *pictures.shape[1:])
        draw_to(self._warps(train), shape, blocks, request=request)

    def _divided(self) -> tuple[Drawings, Drawings]:
        """Training drawings, and those of the held-out or the test identities."""
        assert self.path is not None
        return self._parts(read_stored(self.path, self.folder / INDEX))

    def _parts(self, stored: Stored) -> tuple[Drawings, Drawings]:
        train, test = identities(stored)
        if self.is_search:
            train, test = held_out(train, stored.groups)
        learned, measured = part_of(stored, train), part_of(stored, test)
        if self.study.has_turns:
            mirrors, alike = self.study.has_mirrors, self.study.alike
            learned = learned.with_turns(has_mirrors=mirrors, alike=alike)
        return learned, first_samples(measured, self.study.size.samples_test)


def first_samples(drawings: Drawings, count: int) -> Drawings:
    """At most so many samples of each identity; samples of an identity stand together."""
    starts = np.searchsorted(drawings.labels, drawings.labels)
    rows = np.flatnonzero(np.arange(len(drawings)) - starts < count)
    return replace(
        drawings,
        pictures=drawings.pictures[rows],
        labels=drawings.labels[rows],
        names=tuple(drawings.names[row] for row in rows),
    )


def identities(stored: Stored) -> tuple[list[int], list[int]]:
    """Labels to train and to test, in an order that does not depend on names or numbers."""
    tested = set() if stored.is_test is None else set(stored.labels[stored.is_test].tolist())
    order = sorted(set(stored.labels.tolist()), key=_drawn_order)
    return [one for one in order if one not in tested], [one for one in order if one in tested]


def held_out(train: Sequence[int], groups: NDArray[np.int64] | None) -> tuple[list[int], list[int]]:
    """Labels that a search is trained on, and about a fifth of them that it holds out.

    Where labels have groups, whole groups are held out: those of the test are others, too, and a
    network learns what the members of a group have in common.
    """
    least = VALIDATION_SHARE * len(train)
    if groups is None:
        split = len(train) - round(least)
        return list(train[:split]), list(train[split:])
    chosen: set[int] = set()
    for group in sorted(set(groups[list(train)].tolist()), key=_drawn_order):
        if len(chosen) < least:
            chosen |= {label for label in train if groups[label] == group}
    kept = [label for label in train if label not in chosen]
    if not kept:
        raise DataError(
            f"all {len(train)} identities to train on are of one group, and settings are chosen on "
            "another; give more data"
        )
    return kept, [label for label in train if label in chosen]


def _drawn_order(number: int) -> int:
    return derived_seed(VALIDATION, number)


def draw_to(
    file: Path,
    shape: tuple[int, ...],
    blocks: Sequence[Callable[[], NDArray[np.uint8]]],
    *,
    request: StopRequest | None = None,
) -> None:
    """Draw blocks of pictures into a file, one after the other, with all cores; if it is not there.

    Args:
        file: That processes can share.
        shape: Of all blocks together.
        blocks: Each draws some of the pictures; sent to processes.
        request: A signal ends it, and leaves no file.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        pictures = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        start = 0
        for block in in_processes(_drawn, blocks, jobs=os.cpu_count() or 1, request=request):
            pictures[start : start + len(block)] = block
            start += len(block)
        pictures.flush()


def _drawn(block: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return block()
