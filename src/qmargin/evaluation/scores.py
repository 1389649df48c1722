"""Score files that any tool made: text tables in the usual column orders, and NPZ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    find_layout,
    line_of_row,
    read_columns,
)
from qmargin.evaluation.result import Source
from qmargin.evaluation.trials import (
    NO_COUNTS,
    PairCounts,
    SubjectColumns,
    TrialKeys,
    TrialList,
    Where,
    check_pairs,
    checked_keys,
    match_rows,
    subject_columns,
    trials_sha256,
)
from qmargin.files import Progress, open_regular, sha256_of

FORMATS = ("auto", "csv", "tsv", "npz", *SCORE_LAYOUTS)


@dataclass(frozen=True)
class ScoreSet:
    """Scored trials.

    Attributes:
        scores: float64 ``[n]``, never NaN; infinities are scores.
        is_genuine: bool ``[n]``.
        keys: Enrol and test names, None when the file has none.
        subjects: Who is on each side, None when the file does not say.
        sources: The files.
        where: Row to "file, line n", for messages.
        pair_counts: Mirrored pairs and samples compared with themselves.
    """

    scores: NDArray[np.float64]
    is_genuine: NDArray[np.bool_]
    keys: TrialKeys | None
    sources: tuple[Source, ...]
    subjects: SubjectColumns | None = None
    where: Where = field(default=str, repr=False, compare=False)
    pair_counts: PairCounts = NO_COUNTS

    def __len__(self) -> int:
        return len(self.scores)

    def trials_sha256(self) -> str | None:
        """The same for the same trials and labels in any order; None without names."""
        return None if self.keys is None else trials_sha256(self.keys, self.is_genuine)


@dataclass(frozen=True)
class RawScores:
    """A score file as it is: labels and names may be missing."""

    scores: NDArray[np.float64]
    is_genuine: NDArray[np.bool_] | None
    keys: TrialKeys | None
    source: Source
    subjects: SubjectColumns | None
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
    maybe the others. The order is found out; a file that can be read in two ways is refused. A
    quote before a name such as ``'=1+1``, which ``score_trials`` writes, is removed.

    Args:
        path: The score file.
        trials: The list that was scored; every one of its trials needs a score.
        format: One of ``FORMATS``.
        ignore_extra: Skip scores of pairs that are not in ``trials`` instead of refusing them.
        progress: Called with the bytes read and the bytes of the file.

    Raises:
        DataError: A score is NaN or no number, a label is not known, a pair occurs twice or has
            both labels, a trial has no score; the message names file and line.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "scores.txt"
        >>> _ = path.write_text("ann1 ann2 0.8 target\nann1 bob1 0.1 nontarget\n")
        >>> read_scores(path).scores.tolist()
        [0.8, 0.1]
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known: choose one of {', '.join(FORMATS)}")
    if format == "npz" or (format == "auto" and _is_zip(path)):
        raw = _read_npz(path)
    else:
        raw = _read_text(path, format, progress)
    if trials is not None:
        return join_trials(raw, trials, ignore_extra=ignore_extra)
    if raw.is_genuine is None:
        raise DataError(f"{path} has no labels: give the trial list that has them (--trials)")
    return ScoreSet(
        raw.scores,
        raw.is_genuine,
        raw.keys,
        (raw.source,),
        raw.subjects,
        raw.where,
        raw.pair_counts,
    )


def _is_zip(path: str | Path) -> bool:
    with open_regular(path) as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


def _read_text(path: str | Path, format: str, progress: Progress | None) -> RawScores:
    layout = find_layout(path, SCORE_LAYOUTS, required=("score",), format=format)
    columns = read_columns(path, layout, progress)

    def where(row: int) -> str:
        return f"{path}, line {line_of_row(path, layout, row)}"

    keys, counts = None, NO_COUNTS
    if "enrol" in layout.columns:
        keys, counts = checked_keys(columns, where, is_table=True)
    return RawScores(
        scores=columns.arrays["score"],
        is_genuine=columns.arrays.get("label"),
        keys=keys,
        source=Source(str(path), columns.sha256, "scores"),
        subjects=subject_columns(columns, layout, where),
        where=where,
        pair_counts=counts,
    )


def join_trials(raw: RawScores, trials: TrialList, *, ignore_extra: bool = False) -> ScoreSet:
    """Scores in the order of a trial list, with its labels."""
    if raw.keys is None:
        raise DataError(
            f"{raw.source.path} has no names to find the trials of {trials.source.path}"
        )
    rows = match_rows(trials.keys, raw.keys)
    if (rows < 0).any():
        row = int(np.argmax(rows < 0))
        enrol, test = trials.keys.trial(row)
        raise DataError(
            f"{trials.where(row)}: the trial {enrol!r} {test!r} has no score in {raw.source.path}"
        )
    if not ignore_extra and len(rows) < len(raw.scores):
        _refuse_extra(raw, trials, rows)
    is_genuine = _joined_labels(raw, trials, rows)
    subjects = trials.subjects
    if subjects is None and raw.subjects is not None:
        given = raw.subjects
        subjects = replace(given, enrol=given.enrol[rows], test=given.test[rows])
    sources = (raw.source, trials.source)
    return ScoreSet(
        raw.scores[rows],
        is_genuine,
        trials.keys,
        sources,
        subjects,
        trials.where,
        trials.pair_counts,
    )


def _refuse_extra(raw: RawScores, trials: TrialList, rows: NDArray[np.int64]) -> None:
    is_extra = np.ones(len(raw.scores), dtype=bool)
    is_extra[rows] = False
    row = int(np.argmax(is_extra))
    assert raw.keys is not None
    enrol, test = raw.keys.trial(row)
    raise DataError(
        f"{raw.where(row)}: the pair {enrol!r} {test!r} is not in {trials.source.path} "
        f"({int(is_extra.sum()):,} such scores): remove them or pass --ignore-extra"
    )


def _joined_labels(raw: RawScores, trials: TrialList, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    own = None if raw.is_genuine is None else raw.is_genuine[rows]
    if trials.is_genuine is None:
        if own is None:
            raise DataError(f"neither {raw.source.path} nor {trials.source.path} has labels")
        return own
    if own is not None and (own != trials.is_genuine).any():
        row = int(np.argmax(own != trials.is_genuine))
        raise DataError(
            f"{trials.where(row)} and {raw.where(int(rows[row]))} give the same trial "
            "different labels: one of the files is wrong"
        )
    return trials.is_genuine


def _read_npz(path: str | Path) -> RawScores:
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
