"""Interface of datasets, checks of labels, and replacement of corrupt samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qmargin.data.order import check_count, derived_seed, sample_seeds
from qmargin.errors import ConfigError, CorruptSample, DataError

MAX_ATTEMPTS = 32
_CHUNK = 1 << 20
_log = logging.getLogger("qmargin.data")

Input: TypeAlias = Tensor | NDArray[Any]
"""Input of one sample. Arrays are slightly faster to put into a batch."""


class Dataset(Protocol):
    """Samples by index, with everything that a loader and its error messages need."""

    @property
    def num_classes(self) -> int:
        """Number of identities: labels are below it."""
        ...

    @property
    def labels(self) -> NDArray[Any] | None:
        """One label per sample, or ``None`` where they are only known once samples are read."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, seed: int) -> tuple[Input, int]:
        """The sample's input and label, or ``CorruptSample`` if its bytes are damaged.

        Its augmentation depends on ``seed`` only. The input may be read-only.
        """
        ...

    def sample_id(self, index: int) -> str:
        """A name for logs, such as a file name or a key."""
        ...

    def source(self, index: int) -> str:
        """Where the sample's label is written, such as ``train.lst, row 7``."""
        ...


class ReadsMany(Dataset, Protocol):
    """A dataset whose samples are never corrupt, and are read faster together than one by one."""

    def read_many(
        self, indices: NDArray[Any], seeds: Sequence[int]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Inputs and labels, ``[n, ...]`` and ``[n]``, as those of ``read`` for each sample."""
        ...


def reads_many(dataset: Dataset) -> TypeGuard[ReadsMany]:
    """Whether one class defines both ways to read, so that they agree."""
    for kind in type(dataset).__mro__:
        if "read" in vars(kind) or "read_many" in vars(kind):
            return "read" in vars(kind) and "read_many" in vars(kind)
    return False


def check_labels(dataset: Dataset) -> None:
    """Raise ``DataError`` unless every label is an integer in ``[0, num_classes)``.

    The message names the first bad label with its file and row, and how many there are. Floating
    labels are accepted when their values are integers. A dataset without a list of labels passes;
    the loader checks each label as it is read.
    """
    labels = dataset.labels
    if labels is None:
        return
    labels = np.asarray(labels)
    if labels.shape != (len(dataset),):
        found = f"there are labels of shape {list(labels.shape)} for {len(dataset)} samples"
        raise DataError(f"{found}; one label per sample is needed")
    if labels.dtype.kind not in "iuf":
        raise DataError(f"labels have dtype {labels.dtype}; they must be integers")
    first, count = -1, 0
    for start in range(0, len(labels), _CHUNK):
        block = labels[start : start + _CHUNK]
        is_good = (block >= 0) & (block < dataset.num_classes) & (block == np.floor(block))
        bad = np.flatnonzero(~is_good)  # NaN is not good
        if count == 0 and bad.size:
            first = start + int(bad[0])
        count += bad.size
    if count:
        raise DataError(
            f"{_bad_label(dataset, first, labels[first])} ({count} of {len(labels)} labels are "
            "not); correct the list or the number of classes"
        )


def check_label(dataset: Dataset, index: int, label: int) -> None:
    """Raise ``DataError`` unless the label of a sample is valid."""
    if label != int(label) or not 0 <= label < dataset.num_classes:
        raise DataError(_bad_label(dataset, index, label))


def _bad_label(dataset: Dataset, index: int, label: Any) -> str:
    where = f"{dataset.source(index)}: label {label} of sample {dataset.sample_id(index)!r}"
    return f"{where} is not an integer in [0, {dataset.num_classes})"


@dataclass(frozen=True)
class Replacement:
    """A corrupt sample and the reason."""

    index: int
    sample_id: str
    reason: str


@dataclass(slots=True)  # made for every sample, and a frozen one takes three times as long
class Sample:
    """One sample as read: itself, or its replacement."""

    index: int
    inputs: Input
    label: int
    replaced: tuple[Replacement, ...]


def read_sample(dataset: Dataset, index: int, *, seed: int, epoch: int) -> Sample:
    """Read a sample, or, if it is corrupt, another that depends only on seed, epoch and index."""
    return read_seeded(dataset, index, sample_seeds(seed, epoch, np.array([index]))[0])


def read_seeded(dataset: Dataset, index: int, seed: int) -> Sample:
    """Read a sample as ``read_sample`` does, given the seed of this one reading.

    ``DataError`` for a label out of range, or if too many replacements are corrupt themselves.
    """
    replaced: list[Replacement] = []
    place = index
    while len(replaced) < MAX_ATTEMPTS:
        try:
            inputs, label = dataset.read(place, seed)
        except CorruptSample as error:
            replaced.append(Replacement(place, dataset.sample_id(place), str(error)))
            place = derived_seed(seed, len(replaced)) % len(dataset)
        else:
            check_label(dataset, place, label)
            return Sample(place, inputs, int(label), tuple(replaced))
    raise DataError(
        f"sample {dataset.sample_id(index)!r} and {MAX_ATTEMPTS - 1} drawn in its place are all "
        f"corrupt, the last because: {replaced[-1].reason}; check the data"
    )


class CorruptBudget:
    """Count and log the corrupt samples of an epoch, and stop a run with too many.

    The samples of an epoch depend on the order only, so the total count over ranks is the same for
    any number of ranks. A loader checks the count of its rank; a loop over several ranks passes the
    sum of all counts to ``check``.

    A run that starts within an epoch passes this epoch and its count so far.
    """

    def __init__(self, limit: int | None, *, epoch: int = 0, count: int = 0) -> None:
        self.limit = None if limit is None else check_count(limit, "max_corrupt")
        self.epoch = check_count(epoch, "epoch")
        self.count = check_count(count, "the count of corrupt samples")

    def add(self, epoch: int, replaced: Iterable[Replacement]) -> None:
        """Add the corrupt samples of a batch; raise ``DataError`` above the limit."""
        if epoch < self.epoch:
            raise ConfigError(f"epoch {epoch} comes after epoch {self.epoch}; start a new budget")
        if epoch > self.epoch:
            self.epoch, self.count = epoch, 0
        for item in replaced:
            self.count += 1
            _log.warning("corrupt sample %r replaced: %s", item.sample_id, item.reason)
            self.check(self.count, last=item.sample_id)

    def check(self, count: int, *, last: str | None = None) -> None:
        """Raise ``DataError`` when ``count`` corrupt samples are more than the limit allows."""
        if self.limit is not None and count > self.limit:
            where = "" if last is None else f", the last is {last!r}"
            raise DataError(
                f"{count} corrupt samples in epoch {self.epoch}{where}; max_corrupt allows "
                f"{self.limit}: repair the data, or raise max_corrupt"
            )
