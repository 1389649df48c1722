"""Lists of pairs of images: LFW's ``pairs.txt``, and CSV files with two names and a label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.lists import column_of, read_rows
from qmargin.errors import DataError
from qmargin.files import open_text

FIRST = ("a", "first", "path1", "image1", "enrol")
SECOND = ("b", "second", "path2", "image2", "test")
LABEL = ("label", "is_genuine", "same", "issame", "target")
_WORDS = {
    **dict.fromkeys(("1", "true", "target", "genuine", "same", "yes"), True),
    **dict.fromkeys(("0", "false", "nontarget", "impostor", "different", "no", "-1"), False),
}
_Pair = tuple[str, str, bool]


@dataclass(frozen=True)
class PairList:
    """Pairs of names in the order of their list."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    is_genuine: NDArray[np.bool_]  # [n]
    folds: NDArray[np.int64] | None = None  # [n], where the list has folds

    def __len__(self) -> int:
        return len(self.first)


def read_pairs(path: str | Path, *, extension: str = "jpg") -> PairList:
    """Pairs of a list; ``.csv`` and ``.tsv`` files have a header, others are as LFW's.

    Images that ``pairs.txt`` numbers get the extension: ``Ada 2`` is ``Ada/Ada_0002.jpg``.
    """
    path = Path(path)
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    pairs, folds = _csv(path) if is_csv else _lfw(path, extension)
    if not pairs:
        raise DataError(f"{path} has no pairs; a CSV names its columns a,b,label in its first line")
    first, second, labels = zip(*pairs, strict=True)
    return PairList(first, second, np.array(labels, dtype=np.bool_), folds)


def _csv(path: Path) -> tuple[list[_Pair], NDArray[np.int64] | None]:
    pairs, folds = [], []
    for line, row in read_rows(path):
        word = row[column_of(path, row, LABEL)].strip().lower()
        if word not in _WORDS:
            raise DataError(f"{path}, line {line}: the label {word[:40]!r} is not 0 or 1")
        names = (row[column_of(path, row, FIRST)], row[column_of(path, row, SECOND)])
        pairs.append((*names, _WORDS[word]))
        if "fold" in row:
            fold = row["fold"].strip()
            if not _is_count(fold):
                raise DataError(f"{path}, line {line}: the fold {fold[:40]!r} is not a number")
            folds.append(int(fold))
    return pairs, np.array(folds, dtype=np.int64) if folds else None


def _lfw(path: Path, extension: str) -> tuple[list[_Pair], NDArray[np.int64] | None]:
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
    pairs = [
        _lfw_pair(words, extension, f"{path}, line {number}")
        for number, words in enumerate(lines[start:], start + 1)
        if words
    ]
    if start and len(pairs) != 2 * num_folds * per_fold:
        said = f"its first line promises {num_folds} folds of 2 x {per_fold}"
        raise DataError(f"{path} has {len(pairs)} pairs and {said}; it is cut off or was edited")
    folds = np.arange(len(pairs)) // (2 * per_fold) if start and num_folds > 1 else None
    return pairs, folds


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9


def _lfw_pair(words: list[str], extension: str, where: str) -> _Pair:
    """``name 1 2`` is a genuine pair, ``name 1 other 2`` an impostor pair."""
    if len(words) == 3:
        words = [words[0], words[1], words[0], words[2]]
        is_genuine = True
    else:
        is_genuine = False
    if len(words) != 4 or not all(map(_is_count, words[1::2])):
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a pair of LFW's pairs.txt")
    a, b = (
        f"{name}/{name}_{int(number):04d}.{extension}"
        for name, number in zip(words[::2], words[1::2], strict=True)
    )
    return a, b, is_genuine
