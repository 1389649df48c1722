"""Many short strings in two buffers: a million paths without a million objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


class PackedStrings:
    """An immutable list of strings that workers share without copying it.

    Python counts references inside every string object, so that reading a list of them in a forked
    worker copies its memory page by page. Two buffers are read and never written.

    Args:
        strings: Any strings.

    Examples:
        >>> names = PackedStrings(["id1/a.wav", "", "id2/ü.wav"])
        >>> len(names), names[2], list(names)[0]
        (3, 'id2/ü.wav', 'id1/a.wav')
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, strings: Iterable[str]) -> None:
        parts = [string.encode("utf-8", "surrogateescape") for string in strings]
        self._text = b"".join(parts)
        self._ends: NDArray[np.int64] = np.fromiter(
            accumulate(map(len, parts)), dtype=np.int64, count=len(parts)
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        index %= len(self)
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers."""
        return len(self._text) + self._ends.nbytes
