"""What the demo trains and tests on: stroke identities, or pictures from a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qmargin.data.drawings import Drawings
from qmargin.data.order import derived_seed
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.evaluate import Pictures
from qmargin.demo.recipe import SHIFT, Size
from qmargin.demo.stored import Stored
from qmargin.errors import DataError

if TYPE_CHECKING:
    from qmargin.data.samples import Dataset

TRAIN_SHARE = 0.6  # of the identities, where the data does not say which ones


@dataclass(frozen=True)
class World:
    """Data of one seed; identities of training and test are disjoint.

    Attributes:
        train: None for what the recipe itself describes.
        test: Whose pairs are tested.
        size: As far as the data allows.
        name: Of the protocol.
        is_ink: Whether 255 is ink, and pictures are shown inverted.
    """

    train: Dataset | None
    test: Pictures
    size: Size
    name: str
    is_ink: bool = True


def stroke_world(size: Size, seed: int) -> World:
    """Synthetic identities."""
    test = StrokeIdentities(size.num_test, size.samples_test, seed=seed, split="test")
    return World(None, test, size, f"synthetic stroke identities, seed {seed}")


def stored_world(stored: Stored, size: Size, seed: int) -> World:
    """Pictures of a path, divided by their identities; no more of them than the plan reads.

    Raises:
        DataError: There are too few identities to train and test.
    """
    order = sorted(set(stored.labels.tolist()), key=lambda label: derived_seed(seed, label))
    if stored.is_test is None:
        split = round(TRAIN_SHARE * len(order))
        train, test = order[:split], order[split:]
    else:
        tested = set(stored.labels[stored.is_test].tolist())
        train = [label for label in order if label not in tested]
        test = [label for label in order if label in tested]
    if len(train) < 2 or len(test) < 2:
        raise DataError(
            f"{stored.origin} has {len(train)} identities to train and {len(test)} to test; at "
            "least 2 of each are needed"
        )
    if np.bincount(stored.labels)[test].max() < 2:
        raise DataError(
            f"no identity of {stored.origin} that is tested has two pictures, and a genuine pair "
            "needs two; give more pictures of each"
        )
    budget = size.total_steps * size.batch_size
    learned = part_of(stored, train, budget, shift=SHIFT)
    epochs = max(1, round(budget / len(learned)))
    return World(
        train=learned,
        test=part_of(stored, test, size.num_test * size.samples_test),
        size=size._replace(
            num_classes=learned.num_classes,
            epochs=epochs,
            batch_size=min(size.batch_size, len(learned)),
        ),
        name=f"{Path(stored.origin).name}, seed {seed}",
        is_ink=stored.is_ink,
    )


def part_of(
    stored: Stored, labels: Sequence[int], most: int | None = None, *, shift: int = 0
) -> Drawings:
    """Samples of some identities, as many whole identities as ``most`` samples allow."""
    counts = np.bincount(stored.labels)
    kept = list(labels)
    if most is not None:
        totals = np.cumsum(counts[kept])
        kept = kept[: max(2, int(np.searchsorted(totals, most, side="right")))]
    numbers = np.full(len(counts), -1)
    numbers[kept] = np.arange(len(kept))
    rows = np.flatnonzero(numbers[stored.labels] >= 0)
    rows = rows[np.argsort(numbers[stored.labels[rows]], kind="stable")]
    return Drawings(
        pictures=stored.pictures[rows],
        labels=numbers[stored.labels[rows]],
        names=tuple(stored.names[row] for row in rows),
        origin=stored.origin,
        shift=shift,
    )
