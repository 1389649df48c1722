"""Scores from an NPZ file, which numbers rows where a text file numbers lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.npz import NpzFile, open_npz
from qmargin.errors import DataError
from qmargin.evaluation.columns import Growing, SplitScores
from qmargin.evaluation.keys import NO_COUNTS, KeyTable, TrialKeys
from qmargin.evaluation.layouts import HEADER_NAMES, LABEL_WORDS, LABELS
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import RawScores
from qmargin.evaluation.trials import SubjectColumns, check_pairs
from qmargin.files import sha256_of


def read_npz_scores(path: str | Path) -> RawScores:
    """Scores of an NPZ file: ``genuine`` and ``impostor``, or ``scores`` and its companions."""
    source = Source(str(path), sha256_of(path), "scores")
    with open_npz(path) as npz:
        if {"genuine", "impostor"} <= npz.shapes.keys():
            return _two_arrays(path, npz, source)
        named: dict[str, str] = {}
        for name in npz.shapes:
            known = HEADER_NAMES.get(name.lower())
            if known in named:
                raise DataError(
                    f"{path} has two arrays for {known!r}: remove {name!r} or the other"
                )
            if known is not None:
                named[known] = name
        if "score" not in named:
            raise DataError(
                f"{path} has the arrays {', '.join(npz.shapes) or 'none'}: it needs genuine and "
                "impostor, or scores and labels"
            )
        return _columns(path, npz, named, source)


def _two_arrays(path: str | Path, npz: NpzFile, source: Source) -> RawScores:
    names = ("genuine", "impostor")
    for name in names:
        _check_scores(path, name, npz.shapes[name], npz.dtypes[name])
    sizes = [npz.shapes[name][0] for name in names]

    def where(row: int) -> str:
        name, at = ("genuine", row) if row < sizes[0] else ("impostor", row - sizes[0])
        return f"{path}, {name}[{at}]"

    scores, end = np.empty(sum(sizes)), 0
    for name in names:
        for piece in _score_pieces(path, npz, name, name):
            scores[end : end + len(piece)] = piece
            end += len(piece)
    return RawScores(scores, np.repeat([True, False], sizes), None, source, None, where)


def _columns(path: str | Path, npz: NpzFile, named: dict[str, str], source: Source) -> RawScores:
    shapes = {known: npz.shapes[name] for known, name in named.items()}
    _check_scores(path, "scores", shapes["score"], npz.dtypes[named["score"]])
    for known, shape in shapes.items():
        if shape != shapes["score"]:
            raise DataError(
                f"{path}: {known} has the shape {shape}, but there are {shapes['score'][0]} scores"
            )

    def where(row: int) -> str:
        return f"{path}, row {row}"

    scores = _score_pieces(path, npz, named["score"], "scores")
    if named.keys() == {"score", "label"}:
        split = SplitScores()
        for piece, labels in zip(scores, _label_pieces(path, npz, named["label"]), strict=True):
            split.append(piece, labels)
        return RawScores(*split.arrays(), None, source, None, where)
    keys = _pair(path, npz, named, "enrol", "test")
    all_labels = None
    if "label" in named:
        all_labels = _joined(_label_pieces(path, npz, named["label"]), np.bool_)
    trial_keys = None if keys is None else TrialKeys.from_codes(*keys)
    counts = NO_COUNTS if trial_keys is None else check_pairs(trial_keys, all_labels, where)
    subjects = _pair(path, npz, named, "enrol_subject", "test_subject")
    return RawScores(
        _joined(scores, np.float64),
        all_labels,
        trial_keys,
        source,
        None if subjects is None else SubjectColumns(tuple(subjects[0]), *subjects[1:]),
        where,
        counts,
    )


def _joined(pieces: Iterator[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    column = Growing(dtype)
    for piece in pieces:
        column.append(piece)
    return column.array()


def _check_scores(
    path: str | Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    if len(shape) != 1 or dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {name} has {len(shape)} dimensions of {dtype}, "
            "but scores are one dimension of numbers"
        )


def _score_pieces(
    path: str | Path, npz: NpzFile, name: str, shown: str
) -> Iterator[NDArray[np.float64]]:
    start = 0
    for piece in npz.pieces(name):
        scores = piece.astype(np.float64)
        if np.isnan(scores).any():
            row = start + int(np.argmax(np.isnan(scores)))
            raise DataError(
                f"{path}, {shown}[{row}]: the score is NaN: no trial may be without a score"
            )
        yield scores
        start += len(scores)


def _label_pieces(path: str | Path, npz: NpzFile, name: str) -> Iterator[NDArray[np.bool_]]:
    start = 0
    for piece in npz.pieces(name):
        yield _labels(path, piece, start)
        start += len(piece)


def _labels(path: str | Path, array: NDArray[Any], start: int) -> NDArray[np.bool_]:
    if array.dtype.kind == "b":
        return array.astype(np.bool_)
    distinct, inverse = np.unique(array, return_inverse=True)
    words = [_word(value).lower() for value in distinct.tolist()]
    for place, word in enumerate(words):
        if word not in LABELS:
            row = start + int(np.argmax(inverse == place))
            label = distinct.tolist()[place]
            raise DataError(f"{path}, row {row}: the label {label!r} is not one of {LABEL_WORDS}")
    return np.array([LABELS[word] for word in words], dtype=bool)[inverse]


def _word(value: Any) -> bytes:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, bytes) else str(value).encode()


def _pair(
    path: str | Path, npz: NpzFile, named: dict[str, str], first: str, second: str
) -> tuple[list[str], NDArray[np.int32], NDArray[np.int32]] | None:
    """Distinct names and the codes of two columns; None without them."""
    given = [name for name in (first, second) if name in named]
    if not given:
        return None
    if len(given) == 1:
        raise DataError(f"{path} has {given[0]} only: give both {first} and {second}")
    table = KeyTable()
    codes = [
        _joined(
            (table.codes([_word(value) for value in piece.tolist()]) for piece in pieces), np.int32
        )
        for pieces in (npz.pieces(named[name]) for name in given)
    ]
    try:
        names = [name.decode("utf-8") for name in table.names]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the name {error.object!r} is not UTF-8: convert it") from error
    return names, codes[0], codes[1]
