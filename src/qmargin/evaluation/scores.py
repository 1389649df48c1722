"""Score files of any tool: text tables in the usual column orders, and NPZ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.npz import NpzFile, open_npz
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.columns import (
    HEADER_NAMES,
    LABEL_WORDS,
    LABELS,
    SCORE_LAYOUTS,
    Growing,
    KeyTable,
    SplitScores,
    Where,
    find_layout,
    first_row,
    read_columns,
)
from qmargin.evaluation.result import Source
from qmargin.evaluation.trials import (
    NO_COUNTS,
    PairCounts,
    TrialKeys,
    TrialList,
    check_pairs,
    checked_keys,
    match_rows,
    subject_columns,
    trials_sha256,
)
from qmargin.files import Progress, open_regular, sha256_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
FORMATS = ("auto", "csv", "tsv", "npz", *SCORE_LAYOUTS)


@dataclass(frozen=True)
class ScoreSet:
    """Scored trials."""

    scores: Floats  # [n], never NaN; infinities are scores
    is_genuine: Bools  # [n]
    keys: TrialKeys | None  # None when the file has no names
    sources: tuple[Source, ...]
    subjects: TrialKeys | None = None  # None when the file does not name them
    where: Where = field(default=str, repr=False, compare=False)
    pair_counts: PairCounts = NO_COUNTS

    def __len__(self) -> int:
        return len(self.scores)

    def trials_sha256(self) -> str | None:
        """The same for the same trials and labels in any order; None without names."""
        return None if self.keys is None else trials_sha256(self.keys, self.is_genuine)


class _Raw(NamedTuple):
    """Content of a score file; labels and names may be missing."""

    scores: Floats
    is_genuine: Bools | None
    keys: TrialKeys | None
    source: Source
    subjects: TrialKeys | None
    where: Where
    pair_counts: PairCounts = NO_COUNTS


def read_scores(
    path: str | Path,
    *,
    trials: TrialList | None = None,
    format: str = "auto",
    ignore_extra: bool = False,
    progress: Progress | None = None,
) -> ScoreSet:
    r"""Read scores, with their labels from the same file or from a trial list.

    Text files have the columns ``enrol test score label``, ``enrol test label score``,
    ``enrol test score`` (labels come from ``trials``), ``score label`` or ``label score``, or those
    that a header names in any order: ``enrol``, ``test``, ``score``, ``label``, ``enrol_subject``,
    ``test_subject``. NPZ files have ``genuine`` and ``impostor``, or ``scores`` and ``labels`` and
    maybe the others. The order is detected; a file that can be read in two ways is refused. A
    quote before a name such as ``'=1+1``, which ``score_trials`` writes, is removed.

    Args:
        path: The score file.
        trials: The list that was scored; every one of its trials needs a score.
        format: One of ``FORMATS``.
        ignore_extra: Skip scores of pairs that are not in ``trials`` instead of refusing them.
        progress: Called with the bytes read and the bytes of the file.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "scores.txt"
        >>> _ = path.write_text("ann1 ann2 0.8 target\nann1 bob1 0.1 nontarget\n")
        >>> read_scores(path).scores.tolist()
        [0.8, 0.1]
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known: choose one of {', '.join(FORMATS)}")
    raw = _read_npz(path) if format == "npz" or (format == "auto" and _is_zip(path)) else None
    if raw is None:
        layout = find_layout(path, SCORE_LAYOUTS, required=("score",), format=format)
        columns = read_columns(path, layout, progress)
        keys, counts = None, NO_COUNTS
        if "enrol" in columns.arrays:
            keys, counts = checked_keys(columns, is_table=True)
        scores, labels = columns.arrays["score"], columns.arrays.get("label")
        source = Source(str(path), columns.sha256, "scores")
        raw = _Raw(scores, labels, keys, source, subject_columns(columns), columns.where, counts)
    if trials is not None:
        return _join_trials(raw, trials, ignore_extra=ignore_extra)
    if raw.is_genuine is None:
        raise DataError(f"{path} has no labels: give the trial list that has them (--trials)")
    return ScoreSet(raw.scores, raw.is_genuine, raw.keys, (raw.source,), *raw[4:])


def _is_zip(path: str | Path) -> bool:
    with open_regular(path) as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


def _join_trials(raw: _Raw, trials: TrialList, *, ignore_extra: bool) -> ScoreSet:
    """Scores in the order of a trial list, with its labels."""
    path, keys = raw.source.path, trials.keys
    if raw.keys is None:
        raise DataError(f"{path} has no names to find the trials of {trials.source.path}")
    rows = match_rows(keys, raw.keys)
    row = first_row(rows < 0)
    if row is not None:
        enrol, test = keys.trial(row)
        raise DataError(f"{trials.where(row)}: the trial {enrol!r} {test!r} has no score in {path}")
    if not ignore_extra and len(rows) < len(raw.scores):
        is_extra = np.ones(len(raw.scores), dtype=bool)
        is_extra[rows] = False
        row = int(np.argmax(is_extra))
        enrol, test = raw.keys.trial(row)
        raise DataError(
            f"{raw.where(row)}: the pair {enrol!r} {test!r} is not in {trials.source.path} "
            f"({int(is_extra.sum()):,} such scores): remove them or pass --ignore-extra"
        )
    own = None if raw.is_genuine is None else raw.is_genuine[rows]
    is_genuine = own if trials.is_genuine is None else trials.is_genuine
    if is_genuine is None:
        raise DataError(f"neither {path} nor {trials.source.path} has labels")
    row = None if own is None else first_row(own != is_genuine)
    if row is not None:
        raise DataError(
            f"{trials.where(row)} and {raw.where(int(rows[row]))} give the same trial different "
            "labels: one of the files is wrong"
        )
    subjects = trials.subjects
    if subjects is None and raw.subjects is not None:
        subjects = raw.subjects.take(rows)
    sources, counts = (raw.source, trials.source), trials.pair_counts
    return ScoreSet(raw.scores[rows], is_genuine, keys, sources, subjects, trials.where, counts)


def _read_npz(path: str | Path) -> _Raw:
    """Scores of an NPZ file: ``genuine`` and ``impostor``, or ``scores`` and related arrays."""
    source = Source(str(path), sha256_of(path), "scores")
    with open_npz(path) as npz:
        if {"genuine", "impostor"} <= npz.shapes.keys():
            return _read_sides(path, npz, source)
        named: dict[str, str] = {}
        for name in npz.shapes:
            known = HEADER_NAMES.get(name.lower())
            if known in named:
                raise DataError(f"{path} has two arrays for {known!r}: remove {name!r}")
            if known is not None:
                named[known] = name
        if "score" not in named:
            raise DataError(
                f"{path} has the arrays {', '.join(npz.shapes) or 'none'}: it needs genuine and "
                "impostor, or scores and labels"
            )
        length = npz.shapes[named["score"]]
        for known, name in named.items():
            if npz.shapes[name] != length:
                raise DataError(f"{path}: {known} has the shape {npz.shapes[name]}, not {length}")
        return _read_named(path, npz, named, source)


def _read_sides(path: str | Path, npz: NpzFile, source: Source) -> _Raw:
    split = SplitScores()
    for name in ("genuine", "impostor"):
        for piece in _score_pieces(path, npz, name, name):
            split.append(piece, np.full(len(piece), name == "genuine"))
    (num_genuine,) = npz.shapes["genuine"]

    def where(row: int) -> str:
        name, at = ("genuine", row) if row < num_genuine else ("impostor", row - num_genuine)
        return f"{path}, {name}[{at}]"

    return _Raw(*split.arrays(), None, source, None, where)


def _read_named(path: str | Path, npz: NpzFile, named: dict[str, str], source: Source) -> _Raw:
    def where(row: int) -> str:
        return f"{path}, row {row}"

    pieces = _score_pieces(path, npz, named["score"], "scores")
    if named.keys() == {"score", "label"}:
        split = SplitScores()
        for piece, labels in zip(pieces, _label_pieces(npz, named["label"], where), strict=True):
            split.append(piece, labels)
        return _Raw(*split.arrays(), None, source, None, where)
    keys = _pair(path, npz, named, "enrol", "test")
    is_genuine = None
    if "label" in named:
        is_genuine = _joined(_label_pieces(npz, named["label"], where), np.bool_)
    counts = NO_COUNTS if keys is None else check_pairs(keys, is_genuine, where)
    subjects = _pair(path, npz, named, "enrol_subject", "test_subject")
    return _Raw(_joined(pieces, np.float64), is_genuine, keys, source, subjects, where, counts)


def _joined(pieces: Iterator[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    column = Growing(dtype)
    for piece in pieces:
        column.append(piece)
    return column.array()


def _score_pieces(path: str | Path, npz: NpzFile, name: str, shown: str) -> Iterator[Floats]:
    shape, dtype = npz.shapes[name], npz.dtypes[name]
    if len(shape) != 1 or dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {shown} has {len(shape)} dimensions of {dtype}, not one dimension of numbers"
        )
    start = 0
    for piece in npz.pieces(name):
        scores = piece.astype(np.float64)
        row = first_row(np.isnan(scores))
        if row is not None:
            raise DataError(
                f"{path}, {shown}[{start + row}]: the score is NaN: every trial needs a score"
            )
        yield scores
        start += len(scores)


def _label_pieces(npz: NpzFile, name: str, where: Callable[[int], str]) -> Iterator[Bools]:
    start = 0
    for piece in npz.pieces(name):
        if piece.dtype.kind == "b":
            yield piece.astype(np.bool_)
        else:
            distinct, inverse = np.unique(piece, return_inverse=True)
            words = [_word(value).lower() for value in distinct.tolist()]
            row = first_row(np.array([word not in LABELS for word in words])[inverse])
            if row is not None:
                label = distinct.tolist()[inverse[row]]
                raise DataError(
                    f"{where(start + row)}: the label {label!r} is not one of {LABEL_WORDS}"
                )
            yield np.array([LABELS[word] for word in words], dtype=bool)[inverse]
        start += len(piece)


def _word(value: Any) -> bytes:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, bytes) else str(value).encode()


def _pair(
    path: str | Path, npz: NpzFile, named: dict[str, str], first: str, second: str
) -> TrialKeys | None:
    """Names in two columns; None without them."""
    given = [name for name in (first, second) if name in named]
    if not given:
        return None
    if len(given) == 1:
        raise DataError(f"{path} has {given[0]} only: give both {first} and {second}")
    table = KeyTable()

    def codes(name: str) -> NDArray[np.int32]:
        words = (map(_word, piece.tolist()) for piece in npz.pieces(named[name]))
        return _joined((table.codes(list(column)) for column in words), np.int32)

    enrol, test = map(codes, given)
    try:
        names = [name.decode("utf-8") for name in table]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the name {error.object!r} is not UTF-8: convert it") from error
    return TrialKeys.from_codes(names, enrol, test)
