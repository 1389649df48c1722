"""Scores from an NPZ file, which numbers rows where a text file numbers lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.keys import NO_COUNTS, KeyTable, TrialKeys
from qmargin.evaluation.layouts import HEADER_NAMES, LABEL_WORDS, LABELS
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import RawScores
from qmargin.evaluation.trials import SubjectColumns, check_pairs
from qmargin.files import sha256_of


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """Every array of an NPZ file; pickled objects are refused."""
    with Path(path).open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except Exception as error:  # damage shows as errors of zlib, struct, zipfile and others
            reason = " ".join(str(error).split())[:200]
            if "allow_pickle" in reason:  # NumPy's advice is to trust the file
                reason = "it is no archive of arrays, or holds pickled objects, which may be code"
            raise DataError(f"{path} is not an NPZ file of plain arrays ({reason})") from error


def read_npz_scores(path: str | Path) -> RawScores:
    """Scores of an NPZ file: ``genuine`` and ``impostor``, or ``scores`` and its companions."""
    arrays = read_npz(path)
    source = Source(str(path), sha256_of(path), "scores")
    if {"genuine", "impostor"} <= arrays.keys():
        return _two_arrays(path, arrays, source)
    named: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        known = HEADER_NAMES.get(name.lower())
        if known in named:
            raise DataError(f"{path} has two arrays for {known!r}: remove {name!r} or the other")
        if known is not None:
            named[known] = array
    if "score" not in named:
        raise DataError(
            f"{path} has the arrays {', '.join(arrays) or 'none'}: it needs genuine and impostor, "
            "or scores and labels"
        )
    return _columns(path, named, source)


def _two_arrays(path: str | Path, arrays: dict[str, NDArray[Any]], source: Source) -> RawScores:
    parts = [_scores(path, name, arrays[name]) for name in ("genuine", "impostor")]
    sizes = [len(part) for part in parts]

    def where(row: int) -> str:
        name, at = ("genuine", row) if row < sizes[0] else ("impostor", row - sizes[0])
        return f"{path}, {name}[{at}]"

    is_genuine = np.repeat([True, False], sizes)
    return RawScores(np.concatenate(parts), is_genuine, None, source, None, where)


def _columns(path: str | Path, named: dict[str, NDArray[Any]], source: Source) -> RawScores:
    scores = _scores(path, "scores", named["score"])
    for name, array in named.items():
        if array.shape != scores.shape:
            raise DataError(
                f"{path}: {name} has the shape {array.shape}, but there are {len(scores)} scores"
            )

    def where(row: int) -> str:
        return f"{path}, row {row}"

    keys = _pair(path, named, "enrol", "test")
    labels = _labels(path, named["label"]) if "label" in named else None
    trial_keys = None if keys is None else TrialKeys.from_codes(*keys)
    counts = NO_COUNTS if trial_keys is None else check_pairs(trial_keys, labels, where)
    subjects = _pair(path, named, "enrol_subject", "test_subject")
    return RawScores(
        scores,
        labels,
        trial_keys,
        source,
        None if subjects is None else SubjectColumns(tuple(subjects[0]), *subjects[1:]),
        where,
        counts,
    )


def _scores(path: str | Path, name: str, array: NDArray[Any]) -> NDArray[np.float64]:
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {name} has {array.ndim} dimensions of {array.dtype}, "
            "but scores are one dimension of numbers"
        )
    scores = array.astype(np.float64)
    if np.isnan(scores).any():
        row = int(np.argmax(np.isnan(scores)))
        raise DataError(f"{path}, {name}[{row}]: the score is NaN: no trial may be without a score")
    return scores


def _labels(path: str | Path, array: NDArray[Any]) -> NDArray[np.bool_]:
    if array.dtype.kind == "b":
        return array.astype(np.bool_)
    distinct, inverse = np.unique(array, return_inverse=True)
    words = [_word(value).lower() for value in distinct.tolist()]
    for place, word in enumerate(words):
        if word not in LABELS:
            row = int(np.argmax(inverse == place))
            label = distinct.tolist()[place]
            raise DataError(f"{path}, row {row}: the label {label!r} is not one of {LABEL_WORDS}")
    return np.array([LABELS[word] for word in words], dtype=bool)[inverse]


def _word(value: Any) -> bytes:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, bytes) else str(value).encode()


def _pair(
    path: str | Path, named: dict[str, NDArray[Any]], first: str, second: str
) -> tuple[list[str], NDArray[np.int32], NDArray[np.int32]] | None:
    """Distinct names and the codes of two columns; None without them."""
    given = [name for name in (first, second) if name in named]
    if not given:
        return None
    if len(given) == 1:
        raise DataError(f"{path} has {given[0]} only: give both {first} and {second}")
    table = KeyTable()
    codes = [table.codes([_word(value) for value in named[name].tolist()]) for name in given]
    try:
        names = [name.decode("utf-8") for name in table.names]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the name {error.object!r} is not UTF-8: convert it") from error
    return names, codes[0], codes[1]
