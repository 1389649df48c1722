"""Lists of pairs of images: LFW's ``pairs.txt``, and CSV files with two names and a label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.manifest import column_of, read_rows
from qmargin.errors import DataError
from qmargin.files import open_text

FIRST = ("a", "first", "path1", "image1", "enrol")
SECOND = ("b", "second", "path2", "image2", "test")
LABEL = ("label", "is_genuine", "same", "issame", "target")
_WORDS = {
    **dict.fromkeys(("1", "true", "target", "genuine", "same", "yes"), True),
    **dict.fromkeys(("0", "false", "nontarget", "impostor", "different", "no", "-1"), False),
}


@dataclass(frozen=True)
class PairList:
    """Pairs of names in the order of their list.

    Args:
        first: One image of each pair.
        second: The other.
        is_genuine: Whether both show one person, ``[n]``.
        folds: Number of the fold of each pair where the list has folds, ``[n]``.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    is_genuine: NDArray[np.bool_]
    folds: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.first)


def read_pairs(path: str | Path, *, extension: str = "jpg") -> PairList:
    """Pairs of a list; ``.csv`` and ``.tsv`` files have a header, others are as LFW's.

    Args:
        path: Of the list.
        extension: Of the images that ``pairs.txt`` numbers: ``Ada 2`` is ``Ada/Ada_0002.jpg``.

    Raises:
        DataError: A line is not a pair; the message has its number.
    """
    path = Path(path)
    pairs = _csv(path) if path.suffix.lower() in (".csv", ".tsv") else _lfw(path, extension)
    if not len(pairs):
        raise DataError(
            f"{path} has no pairs; give lines of two images and a label, below a first line that "
            "names the columns of a CSV"
        )
    return pairs


def _csv(path: Path) -> PairList:
    first, second, labels, folds = [], [], [], []
    for line, row in read_rows(path):
        first.append(row[column_of(path, row, FIRST)])
        second.append(row[column_of(path, row, SECOND)])
        word = row[column_of(path, row, LABEL)].strip().lower()
        if word not in _WORDS:
            raise DataError(f"{path}, line {line}: the label {word[:40]!r} is not 0 or 1")
        labels.append(_WORDS[word])
        if "fold" in row:
            fold = row["fold"].strip()
            if not _is_count(fold):
                raise DataError(f"{path}, line {line}: the fold {fold[:40]!r} is not a number")
            folds.append(int(fold))
    numbers = np.array(folds, dtype=np.int64) if folds else None
    return PairList(tuple(first), tuple(second), np.array(labels, dtype=np.bool_), numbers)


def _lfw(path: Path, extension: str) -> PairList:
    try:
        with open_text(path) as file:
            lines = [line.split() for line in file.read().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}); convert it") from error
    num_folds, per_fold, start = 1, 0, 0
    if lines and len(lines[0]) in (1, 2) and all(map(_is_count, lines[0])):
        counts = [int(word) for word in lines[0]]
        num_folds, per_fold = counts if len(counts) == 2 else (1, counts[0])
        start = 1
    first, second, labels = [], [], []
    for number, words in enumerate(lines[start:], start + 1):
        if not words:
            continue
        a, b, is_genuine = _lfw_pair(words, extension, f"{path}, line {number}")
        first.append(a)
        second.append(b)
        labels.append(is_genuine)
    if start and len(first) != 2 * num_folds * per_fold:
        raise DataError(
            f"{path} has {len(first)} pairs and its first line promises {num_folds} folds of "
            f"2 x {per_fold}; the file is cut off or was edited"
        )
    folds = np.arange(len(first)) // (2 * per_fold) if start and num_folds > 1 else None
    return PairList(tuple(first), tuple(second), np.array(labels, dtype=np.bool_), folds)


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9


def _lfw_pair(words: list[str], extension: str, where: str) -> tuple[str, str, bool]:
    """``name 1 2`` is a genuine pair, ``name 1 other 2`` an impostor pair."""
    if len(words) == 3 and all(map(_is_count, words[1:])):
        names, numbers, is_genuine = (words[0], words[0]), words[1:], True
    elif len(words) == 4 and all(map(_is_count, words[1::2])):
        names, numbers, is_genuine = (words[0], words[2]), words[1::2], False
    else:
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a pair of LFW's pairs.txt")
    a, b = (
        f"{name}/{name}_{int(number):04d}.{extension}"
        for name, number in zip(names, numbers, strict=True)
    )
    return a, b, is_genuine
