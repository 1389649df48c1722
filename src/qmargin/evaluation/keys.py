"""Trial keys as numbers: pairs that occur twice, trials that two files share."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int32]
Pairs = NDArray[np.int64]


class KeyTable:
    """Numbers names in the order in which they are met.

    Examples:
        >>> table = KeyTable()
        >>> table.codes([b"ann", b"bob", b"ann"]).tolist()
        [0, 1, 0]
        >>> table.names
        [b'ann', b'bob']
    """

    def __init__(self) -> None:
        self._codes: defaultdict[bytes, int] = defaultdict(count().__next__)

    def codes(self, column: Sequence[bytes]) -> Codes:
        """The number of every name of a column, ``[n]``."""
        return np.fromiter(map(self._codes.__getitem__, column), np.int32, count=len(column))

    @property
    def names(self) -> list[bytes]:
        """Names by their number."""
        return list(self._codes)


@dataclass(frozen=True)
class TrialKeys:
    """Enrol and test names of trials; ``names`` are distinct, sorted, and all in use.

    Examples:
        >>> keys = TrialKeys.from_names(["ann", "bob"], ["bob", "cat"])
        >>> keys.names, keys.enrol.tolist(), keys.test.tolist()
        (('ann', 'bob', 'cat'), [0, 1], [1, 2])
    """

    names: tuple[str, ...]
    enrol: Codes  # [n]
    test: Codes  # [n]

    @classmethod
    def from_names(cls, enrol: Sequence[str], test: Sequence[str]) -> TrialKeys:
        """Keys of trials given name by name."""
        table = KeyTable()
        codes = [table.codes([name.encode("utf-8") for name in column]) for column in (enrol, test)]
        names = [name.decode("utf-8") for name in table.names]
        return cls.from_codes(names, codes[0], codes[1])

    @classmethod
    def from_codes(cls, names: Sequence[str], enrol: Codes, test: Codes) -> TrialKeys:
        """Keys of trials given as positions in ``names``, which may be unsorted and partly unused.

        Names have to be distinct.
        """
        is_used = np.zeros(len(names), dtype=bool)
        is_used[enrol] = True
        is_used[test] = True
        used = np.flatnonzero(is_used)
        order = sorted(used.tolist(), key=names.__getitem__)
        rank = np.zeros(len(names), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return cls(tuple(names[index] for index in order), rank[enrol], rank[test])

    def __len__(self) -> int:
        return len(self.enrol)

    def pairs(self) -> Pairs:
        """One number per trial, the same exactly when both names are; sorted as the names are."""
        return self.enrol.astype(np.int64) * len(self.names) + self.test

    def unordered_pairs(self) -> Pairs:
        """One number per trial, the same exactly when its two names are, in whichever order."""
        low, high = np.minimum(self.enrol, self.test), np.maximum(self.enrol, self.test)
        return low.astype(np.int64) * len(self.names) + high

    def trial(self, row: int) -> tuple[str, str]:
        """Names of one trial."""
        return self.names[self.enrol[row]], self.names[self.test[row]]

    def take(self, rows: NDArray[np.int64]) -> TrialKeys:
        """The same names, other trials."""
        return TrialKeys.from_codes(self.names, self.enrol[rows], self.test[rows])


class PairCounts(NamedTuple):
    """Trials that are allowed and tell less than others.

    Attributes:
        num_mirrored: Pairs that occur in both orders, as ``a b`` and ``b a``.
        num_self: Trials of a sample with itself.
    """

    num_mirrored: int
    num_self: int


NO_COUNTS = PairCounts(0, 0)


def repeated_rows(pairs: Pairs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ``(earlier, later)`` of pairs that occur more than once, one entry per repetition.

    Examples:
        >>> repeated_rows(np.array([5, 7, 9, 7, 5]))
        (array([0, 1]), array([4, 3]))
    """
    ordered = np.sort(pairs)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    place = np.minimum(np.searchsorted(repeated, pairs), len(repeated) - 1)
    rows = np.flatnonzero(repeated[place] == pairs)  # few: they alone are put in order
    rows = rows[np.argsort(pairs[rows], kind="stable")]
    is_same = pairs[rows[1:]] == pairs[rows[:-1]]
    return rows[:-1][is_same], rows[1:][is_same]


def first_duplicate(pairs: Pairs) -> tuple[int, int] | None:
    """Rows ``(first, again)`` of the earliest repetition of a pair, or None.

    Examples:
        >>> first_duplicate(np.array([5, 7, 9, 7, 5]))
        (1, 3)
    """
    earlier, later = repeated_rows(pairs)
    if not len(later):
        return None
    place = int(np.argmin(later))
    return int(earlier[place]), int(later[place])


def trials_sha256(keys: TrialKeys, is_genuine: NDArray[np.bool_]) -> str:
    """A fingerprint of the set of trials and labels, whatever their order."""
    order = np.argsort(keys.pairs(), kind="stable")
    digest = hashlib.sha256()
    for name in keys.names:
        content = name.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    for column in (keys.enrol, keys.test):
        digest.update(column[order].astype("<i4").tobytes())
    digest.update(is_genuine[order].astype(np.uint8).tobytes())
    return digest.hexdigest()


def match_rows(wanted: TrialKeys, given: TrialKeys) -> NDArray[np.int64]:
    """For every wanted trial its row among the given ones, or -1.

    Examples:
        >>> wanted = TrialKeys.from_names(["a", "b"], ["b", "a"])
        >>> match_rows(wanted, TrialKeys.from_names(["z", "b"], ["b", "a"])).tolist()
        [-1, 1]
    """
    position = {name: index for index, name in enumerate(given.names)}
    translate = np.array([position.get(name, -1) for name in wanted.names], dtype=np.int64)
    enrol, test = translate[wanted.enrol], translate[wanted.test]
    pairs = np.where((enrol < 0) | (test < 0), -1, enrol * len(given.names) + test)
    known = given.pairs()
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known, pairs, sorter=order), len(known) - 1)
    rows = order[place]
    return np.where(known[rows] == pairs, rows, -1)
