"""Scores that somebody else computed: text tables in the usual column orders, and NPZ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.columns import line_of_row, read_columns
from qmargin.evaluation.keys import NO_COUNTS, PairCounts, TrialKeys, match_rows, trials_sha256
from qmargin.evaluation.layouts import SCORE_LAYOUTS, find_layout
from qmargin.evaluation.result import Source
from qmargin.evaluation.trials import (
    SubjectColumns,
    TrialList,
    Where,
    checked_keys,
    subject_columns,
)
from qmargin.files import Progress, open_regular

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
        from qmargin.evaluation.npz_scores import read_npz_scores

        raw = read_npz_scores(path)
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
