"""Cosine scores of trials, or their AS-norm, in float64, as resumable tables."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.all_pairs import exact_scores, unit_rows
from qmargin.evaluation.columns import first_row
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.resumable import ResumableFile
from qmargin.evaluation.trials import TrialList
from qmargin.files import Guard, Progress, escape_formula, replacing, sha256_of
from qmargin.metrics.normalise import Moments, cohort_moments

Floats = NDArray[np.float64]
SCORES_MARK = "enrol\ttest\tscore"  # its first line: other programs may write the same
_COHORT_BLOCK = 1024  # rows whose cohort scores are held at once
_COHORT_PART = 256  # of these, rows that one thread sorts
_MOST_THREADS = 8
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class CohortNorm:
    """Adaptive score normalisation (AS-norm) by a cohort of other subjects."""

    cohort: Embeddings  # the mean of a subject's embeddings is usual
    top_n: int = 300  # of the highest cohort scores, for the mean and the deviation


class TrialSides(NamedTuple):
    """Data for scoring trials: one row for every name."""

    unit: Floats  # directions of the centred embeddings, [names, d]
    lengths: Floats  # their lengths, [names]
    moments: Moments | None  # of their cohort scores; None for plain cosines

    def scores(self, enrol: NDArray[np.int32], test: NDArray[np.int32]) -> Floats:
        """Scores of pairs of names; each depends on its two names only."""
        scores = exact_scores(self.unit, enrol.astype(np.intp), test.astype(np.intp))
        if self.moments is None:
            return scores
        return 0.5 * (self.moments.apply(scores, enrol) + self.moments.apply(scores, test))


def trial_sides(
    embeddings: Embeddings,
    trials: TrialList,
    *,
    center: Embeddings | None = None,
    norm: CohortNorm | None = None,
    progress: Progress | None = None,
) -> TrialSides:
    """Embeddings of the names of trials, less the mean of ``center``, and their cohort moments."""
    position = {key: row for row, key in enumerate(embeddings.keys)}
    rows = np.array([position.get(name, -1) for name in trials.keys.names], dtype=np.int64)
    refuse_missing(trials, rows < 0, f"embedding in {embeddings.source.path}")
    matrix, unit = _centred(embeddings, rows, center)
    with np.errstate(over="ignore"):
        lengths = np.sqrt(np.sum(matrix * matrix, axis=1))
    moments = None if norm is None else norm_moments(unit, norm, center, progress)
    return TrialSides(unit, lengths, moments)


def refuse_missing(trials: TrialList, is_missing: NDArray[np.bool_], what: str) -> None:
    """Refuse names of trials without ``what``; the message names the first line."""
    if is_missing.any():
        keys = trials.keys
        first = int(np.argmax(is_missing[keys.enrol] | is_missing[keys.test]))
        sides = (int(keys.enrol[first]), int(keys.test[first]))
        name = keys.names[next(side for side in sides if is_missing[side])]
        raise DataError(
            f"{trials.where(first)}: {name!r} has no {what} "
            f"({int(is_missing.sum()):,} of {len(keys.names):,} names have none)"
        )


def score_trials(
    embeddings: Embeddings,
    trials: TrialList,
    *,
    out: str | Path,
    norm: CohortNorm | None = None,
    center: Embeddings | None = None,
    block: int = 8192,
    restart: bool = False,
    guard: Guard | None = None,
    progress: Progress | None = None,
) -> Path:
    """Score every trial and write ``out``: a table with the columns enrol, test, score, label.

    After an interruption, call it again: it continues after the last complete block, and the
    finished file is the same, byte for byte. Scores are written in full precision and do not depend
    on ``block``. A quote precedes a name that a spreadsheet would take for a formula;
    ``read_scores`` removes it.

    Args:
        embeddings: One for every name in ``trials``.
        trials: Pairs to compare.
        out: The file to write.
        norm: AS-norm by a cohort; plain cosines without it.
        center: Its mean is subtracted from every embedding first, the cohort's too.
        block: Trials between two records of progress.
        restart: Discard a partial file of other inputs or options.
        guard: Decides whether an existing file is replaced; None to always replace it.
        progress: Called with the trials done and their number.
    """
    if block < 1:
        raise ConfigError(f"block={block} is below 1: give at least 1")
    sides = trial_sides(embeddings, trials, center=center, norm=norm)
    cells = _name_cells(trials.keys.names)
    decisive = {
        "embeddings": _content(embeddings),
        "trials": [trials.source.sha256, trials.trials_sha256()],
        "cohort": None if norm is None else [_content(norm.cohort), norm.top_n],
        "center": None if center is None else _content(center),
    }
    fingerprint = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    with ResumableFile(out, fingerprint, restart=restart, guard=guard) as file:
        for start in range(file.num_done, len(trials), block):
            rows = slice(start, min(start + block, len(trials)))
            scores = sides.scores(trials.keys.enrol[rows], trials.keys.test[rows])
            text = _table(trials, cells, scores, rows)
            file.append(text.encode("utf-8"), len(scores))
            if progress is not None:
                progress(rows.stop, len(trials))
        file.finish()
    return Path(out)


def _centred(
    embeddings: Embeddings, rows: NDArray[np.int64] | slice, center: Embeddings | None
) -> tuple[Floats, Floats]:
    """Rows less the mean of ``center``, and their directions, ``[n, d]`` each."""
    path, matrix = embeddings.source.path, embeddings.matrix[rows].astype(np.float64)
    if center is not None:
        _check_width(center, embeddings.embedding_dim, path)
        matrix -= center.matrix.mean(axis=0, dtype=np.float64)
    row = first_row(~matrix.any(axis=1))
    if row is not None:
        key = np.array(embeddings.keys, dtype=object)[rows][row]
        raise DataError(
            f"{path}: the embedding of {key!r} is zero or the subtracted mean: remove it"
        )
    return matrix, unit_rows(matrix)


def _check_width(other: Embeddings, width: int, path: str) -> None:
    if other.embedding_dim != width:
        raise ShapeError(
            f"{other.source.path} has embeddings of width {other.embedding_dim}, but {path} has "
            f"{width}: use one model"
        )


def norm_moments(
    unit: Floats,
    norm: CohortNorm,
    center: Embeddings | None = None,
    progress: Progress | None = None,
) -> Moments:
    """Mean and deviation of each row's ``top_n`` highest cosines to the cohort."""
    cohort = norm.cohort
    _check_width(cohort, unit.shape[1], "the list")
    _, others = _centred(cohort, slice(None), center)
    return nearest_moments(unit, others, norm.top_n, f"the cohort {cohort.source.path}", progress)


def nearest_moments(
    unit: Floats, others: Floats, top_n: int, name: str, progress: Progress | None = None
) -> Moments:
    """Mean and deviation of each row's ``top_n`` highest cosines to a cohort, in blocks.

    Args:
        unit: Rows of length one, ``[n, d]``.
        others: The cohort, likewise, ``[C, d]``.
        top_n: Number of highest cosines, from 2 to ``C``.
        name: Name of the cohort, for messages.
        progress: Called with the rows done and their number.
    """
    if progress is not None:
        progress(0, len(unit))
    if not 2 <= top_n <= len(others):
        raise ConfigError(f"top_n={top_n} is not from 2 to {len(others)}, the size of {name}")
    work = partial(cohort_moments, name=name, top_n=top_n)
    found: list[Moments] = []
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, len(unit), _COHORT_BLOCK):
            scores = unit[start : start + _COHORT_BLOCK] @ others.T  # on all cores; sorting is not
            firsts = range(0, len(scores), _COHORT_PART)
            found += pool.map(work, [scores[first : first + _COHORT_PART] for first in firsts])
            if progress is not None:
                progress(min(start + _COHORT_BLOCK, len(unit)), len(unit))
    means, deviations = zip(*found, strict=True)
    return Moments(np.concatenate(means), np.concatenate(deviations))


def _name_cells(names: Sequence[str]) -> list[str]:
    """Names as a score table has them; ``DataError`` for one that a table cannot hold."""
    for name in names:
        if name != name.strip() or any(character in name for character in '\t\r\n"'):
            raise DataError(
                f"the name {name!r} has a quote, tab, line end or outer space: rename it"
            )
    return list(map(escape_formula, names))


def _content(embeddings: Embeddings) -> str:
    """Hash of the vectors that were read: that of a script file does not cover its archives."""
    digest = hashlib.sha256(json.dumps([str(embeddings.matrix.dtype), embeddings.keys]).encode())
    digest.update(np.ascontiguousarray(embeddings.matrix).tobytes())
    return digest.hexdigest()


def _table(trials: TrialList, cells: Sequence[str], scores: Floats, rows: slice) -> str:
    """Some lines of a score table, with its header before the first."""
    keys, header = trials.keys, SCORES_MARK
    columns = [
        [cells[code] for code in keys.enrol[rows].tolist()],
        [cells[code] for code in keys.test[rows].tolist()],
        list(map(repr, scores.tolist())),
    ]
    if trials.is_genuine is not None:
        header += "\tlabel"
        columns.append(["1" if label else "0" for label in trials.is_genuine[rows].tolist()])
    lines = map("\t".join, zip(*columns, strict=True))
    return "\n".join([*([header] if rows.start == 0 else []), *lines, ""])


def write_scores(
    path: str | Path, trials: TrialList, scores: Floats, *, guard: Guard | None = None
) -> None:
    """Write a table with the columns enrol, test, score and label, in full precision."""
    cells = _name_cells(trials.keys.names)
    with replacing(Path(path)) as temporary:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for start in range(0, len(scores), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                file.write(_table(trials, cells, scores[rows], rows))
        if guard is not None:
            guard.check_content(Path(path), sha256_of(temporary))
