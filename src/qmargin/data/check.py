"""Every sample of a dataset looked at: bytes against checksums, pictures decoded, identities."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.encoded import ImageDataset
from qmargin.data.images import decode_image
from qmargin.errors import CorruptSample
from qmargin.files import Progress

MOST_EXAMPLES = 20
_BLOCK = 64  # samples of one task of a thread
_CHUNK = 1 << 20


class Finding(NamedTuple):
    """A sample and what is wrong with it."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class DataReport:
    """What a dataset holds; lists have the first few, counts have all.

    Args:
        num_samples: Of the index.
        num_classes: Identities.
        num_changed: Samples whose bytes are not those that were indexed.
        num_corrupt: Samples that cannot be read or decoded, changed or not.
        findings: Examples of both.
        num_empty: Identities without a sample.
        num_single: Identities with one sample, which can make no genuine pair.
        num_duplicates: Samples whose bytes another sample has too.
        duplicates: Examples: a sample and its twin.
        num_conflicts: Duplicates under two identities: one of the labels is wrong.
        conflicts: Examples.
        sizes: Width and height of the pictures, and how many have them.
        notes: What was left out of the index.
    """

    num_samples: int
    num_classes: int
    num_changed: int
    num_corrupt: int
    findings: tuple[Finding, ...]
    num_empty: int
    num_single: int
    num_duplicates: int
    duplicates: tuple[tuple[str, str], ...]
    num_conflicts: int
    conflicts: tuple[tuple[str, str], ...]
    sizes: dict[tuple[int, int], int]
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is damaged and no label contradicts another."""
        return not (self.num_changed or self.num_corrupt or self.num_conflicts)


class _Outcome(NamedTuple):
    has_changed: bool
    reason: str | None
    size: tuple[int, int] | None


def check_data(
    dataset: ImageDataset, *, num_threads: int = 2, progress: Progress | None = None
) -> DataReport:
    """Read and decode every sample and compare it with its checksum.

    Args:
        dataset: What ``open_dataset`` gives; of the index that ``open_index`` keeps with
            ``keep_changed``, changes in place are found.
        num_threads: That decode at once.
        progress: Called with the samples done.
    """
    num_changed = num_corrupt = 0
    findings: list[Finding] = []
    sizes: Counter[tuple[int, int]] = Counter()
    for row, outcome in enumerate(_outcomes(dataset, num_threads)):
        num_changed += outcome.has_changed
        num_corrupt += outcome.size is None
        if outcome.size is not None:
            sizes[outcome.size] += 1
        if outcome.reason is not None and len(findings) < MOST_EXAMPLES:
            findings.append(Finding(dataset.sample_id(row), outcome.reason))
        if progress is not None and row % _BLOCK == 0:
            progress(row, len(dataset))
    counts = _class_counts(dataset)
    pairs, num_duplicates = _duplicates(dataset)
    conflicts = [(a, b) for a, b in pairs if dataset.labels[a] != dataset.labels[b]]
    return DataReport(
        num_samples=len(dataset),
        num_classes=dataset.num_classes,
        num_changed=num_changed,
        num_corrupt=num_corrupt,
        findings=tuple(findings),
        num_empty=int(np.count_nonzero(counts == 0)),
        num_single=int(np.count_nonzero(counts == 1)),
        num_duplicates=num_duplicates,
        duplicates=_names(dataset, pairs),
        num_conflicts=len(conflicts),
        conflicts=_names(dataset, conflicts),
        sizes=dict(sizes.most_common()),
        notes=dataset.index.notes,
    )


def _outcomes(dataset: ImageDataset, num_threads: int) -> Iterator[_Outcome]:
    """Outcomes in the order of the samples; a few blocks ahead, so that memory stays small."""
    waiting: deque[Future[list[_Outcome]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for start in range(0, len(dataset), _BLOCK):
            rows = range(start, min(start + _BLOCK, len(dataset)))
            waiting.append(pool.submit(_look_at, dataset, rows))
            if len(waiting) > 4 * num_threads:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _look_at(dataset: ImageDataset, rows: Iterable[int]) -> list[_Outcome]:
    return [_outcome(dataset, row) for row in rows]


def _outcome(dataset: ImageDataset, row: int) -> _Outcome:
    try:
        data = dataset.read(row)
    except CorruptSample as error:
        return _Outcome(False, str(error), None)
    reason = None
    try:
        dataset.check(row, data)
    except CorruptSample as error:
        reason = str(error)
    has_changed = reason is not None
    try:
        height, width = decode_image(data, decoder=dataset.decoder).shape[:2]
    except CorruptSample as error:
        return _Outcome(has_changed, reason or str(error), None)
    return _Outcome(has_changed, reason, (width, height))


def _class_counts(dataset: ImageDataset) -> NDArray[np.int64]:
    counts = np.zeros(dataset.num_classes, dtype=np.int64)
    for start in range(0, len(dataset), _CHUNK):
        block = dataset.labels[start : start + _CHUNK]
        counts += np.bincount(block, minlength=dataset.num_classes)
    return counts


def _duplicates(dataset: ImageDataset) -> tuple[list[tuple[int, int]], int]:
    """Pairs of samples with the same bytes: each later one with the first of its kind.

    Checksum and length come from the index; only samples that share both are read again.
    """
    columns = dataset.index.columns
    key = columns["checksum"].astype(np.uint64) << np.uint64(32)
    key |= columns["length"].astype(np.uint64)
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=key[order[:1]] + np.uint64(1)))
    ends = np.append(starts[1:], len(order))
    pairs = []
    for place in np.flatnonzero(ends - starts > 1).tolist():
        kinds: list[int] = []  # one sample of each content: a checksum may be shared by chance
        for row in order[starts[place] : ends[place]].tolist():
            twin = next((kind for kind in kinds if _same_bytes(dataset, kind, row)), None)
            if twin is None:
                kinds.append(row)
            else:
                pairs.append((twin, row))
    return pairs, len(pairs)


def _same_bytes(dataset: ImageDataset, a: int, b: int) -> bool:
    try:
        return dataset.read(a) == dataset.read(b)
    except CorruptSample:
        return False


def _names(dataset: ImageDataset, pairs: list[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
    return tuple((dataset.sample_id(a), dataset.sample_id(b)) for a, b in pairs[:MOST_EXAMPLES])
