"""Cosine scores of trials, in blocks, in float64, resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.resuming import ResumableFile
from qmargin.evaluation.trials import TrialList
from qmargin.files import Guard, Progress, escape_formula
from qmargin.metrics.normalise import Moments, cohort_moments

Floats = NDArray[np.float64]
SCORES_MARK = "enrol\ttest\tscore"  # its first line: other programs may write the same
_COHORT_BLOCK = 1024  # rows whose cohort scores are held at once


@dataclass(frozen=True)
class CohortNorm:
    """Adaptive score normalisation (AS-norm) by a cohort of other subjects.

    Attributes:
        cohort: One embedding per cohort member; the mean of a subject's embeddings is usual.
        top_n: How many of the highest cohort scores make the mean and the deviation.
    """

    cohort: Embeddings
    top_n: int = 300


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

    A run that was killed goes on where its last block ended, and the finished file is the same,
    byte for byte. Scores are written in full precision and do not depend on ``block``. A quote
    goes before a name that a spreadsheet would take for a formula; ``read_scores`` removes it.

    Args:
        embeddings: One for every name in ``trials``.
        trials: What to compare.
        out: The file to write.
        norm: AS-norm by a cohort; plain cosines without it.
        center: Its mean is subtracted from every embedding first, the cohort's too.
        block: Trials between two records of progress.
        restart: Throw away a part that other inputs or options made.
        guard: Decides whether an existing ``out`` is replaced; None for always.
        progress: Called with the trials done and their number.

    Raises:
        DataError: A name has no embedding, or one of length zero; the message names the line.
    """
    if block < 1:
        raise ConfigError(f"block={block} is below 1: give at least 1")
    rows = _rows_of(embeddings, trials)
    mean = _mean(center, embeddings)
    unit = _unit(embeddings, rows, mean)
    moments = None if norm is None else norm_moments(unit, norm, mean)
    cells = name_cells(trials.keys.names)
    fingerprint = _fingerprint(embeddings, trials, norm, center)
    with ResumableFile(out, fingerprint, restart=restart, guard=guard) as file:
        for start in range(file.num_done, len(trials), block):
            stop = min(start + block, len(trials))
            enrol, test = trials.keys.enrol[start:stop], trials.keys.test[start:stop]
            scores = np.sum(unit[enrol] * unit[test], axis=1)
            if moments is not None:
                scores = 0.5 * (moments.apply(scores, enrol) + moments.apply(scores, test))
            header = score_header(trials) if start == 0 else ""
            text = header + score_lines(trials, cells, scores, slice(start, stop))
            file.append(text.encode("utf-8"), stop - start)
            if progress is not None:
                progress(stop, len(trials))
        file.finish()
    return Path(out)


def _rows_of(embeddings: Embeddings, trials: TrialList) -> NDArray[np.int64]:
    """Row of the embedding of every name of the trials."""
    position = {key: row for row, key in enumerate(embeddings.keys)}
    names = trials.keys.names
    rows = np.array([position.get(name, -1) for name in names], dtype=np.int64)
    if (rows < 0).any():
        is_missing = rows < 0
        first = int(np.argmax(is_missing[trials.keys.enrol] | is_missing[trials.keys.test]))
        missing = next(name for name in trials.keys.trial(first) if name not in position)
        raise DataError(
            f"{trials.where(first)}: {missing!r} has no embedding in {embeddings.source.path} "
            f"({int(is_missing.sum()):,} of {len(names):,} names have none)"
        )
    return rows


def _mean(center: Embeddings | None, embeddings: Embeddings) -> Floats | None:
    if center is None:
        return None
    _check_width(center, embeddings.embedding_dim)
    return np.asarray(center.matrix.mean(axis=0, dtype=np.float64))


def _check_width(other: Embeddings, width: int) -> None:
    if other.embedding_dim != width:
        raise ShapeError(
            f"{other.source.path} has embeddings of width {other.embedding_dim}, but the trials' "
            f"have {width}: use embeddings of the same model"
        )


def _unit(embeddings: Embeddings, rows: NDArray[np.int64], mean: Floats | None) -> Floats:
    """Unit vectors ``[len(rows), d]``."""
    matrix = embeddings.matrix[rows].astype(np.float64)
    if mean is not None:
        matrix -= mean
    largest = np.abs(matrix).max(axis=1, keepdims=True)
    if (largest == 0).any():
        key = embeddings.keys[rows[int(np.argmin(largest))]]
        raise DataError(
            f"{embeddings.source.path}: the embedding of {key!r} is zero, so it has no direction"
        )
    matrix /= largest  # squares of very small or large values leave the range of float64
    matrix /= np.sqrt(np.sum(matrix * matrix, axis=1, keepdims=True))
    return matrix


def norm_moments(unit: Floats, norm: CohortNorm, mean: Floats | None = None) -> Moments:
    """Mean and deviation of each row's ``top_n`` highest cosines to the cohort."""
    cohort, top_n = norm.cohort, norm.top_n
    if not 2 <= top_n <= len(cohort):
        raise ConfigError(
            f"top_n={top_n} is not from 2 to {len(cohort)}, the size of the cohort in "
            f"{cohort.source.path}"
        )
    _check_width(cohort, unit.shape[1])
    others = _unit(cohort, np.arange(len(cohort)), mean)
    return nearest_moments(unit, others, top_n, str(cohort.source.path))


def nearest_moments(unit: Floats, others: Floats, top_n: int, name: str) -> Moments:
    """Mean and deviation of each row's ``top_n`` highest cosines to a cohort, in blocks.

    Args:
        unit: Rows of length one, ``[n, d]``.
        others: The cohort, likewise, ``[C, d]``.
        top_n: How many count.
        name: Of the cohort, for the messages.
    """
    parts = [
        cohort_moments(unit[start : start + _COHORT_BLOCK] @ others.T, name, top_n)
        for start in range(0, len(unit), _COHORT_BLOCK)
    ]
    means, deviations = zip(*parts, strict=True)
    return Moments(np.concatenate(means), np.concatenate(deviations))


def name_cells(names: Sequence[str]) -> list[str]:
    """Names as a score table has them.

    Raises:
        DataError: A table cannot hold one of them.
    """
    for name in names:
        if name != name.strip() or any(character in name for character in '\t\r\n"'):
            raise DataError(
                f"the name {name!r} has a quote, a tab, a line end or spaces around it, which a "
                "score table cannot hold: rename it"
            )
    return list(map(escape_formula, names))


def _fingerprint(
    embeddings: Embeddings, trials: TrialList, norm: CohortNorm | None, center: Embeddings | None
) -> str:
    decisive = {
        "embeddings": _content(embeddings),
        "trials": [trials.source.sha256, trials.trials_sha256()],
        "cohort": None if norm is None else [_content(norm.cohort), norm.top_n],
        "center": None if center is None else _content(center),
    }
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _content(embeddings: Embeddings) -> str:
    """Hash of what was read: that of a script file says nothing about its archives."""
    digest = hashlib.sha256(json.dumps([str(embeddings.matrix.dtype), embeddings.keys]).encode())
    digest.update(np.ascontiguousarray(embeddings.matrix).tobytes())
    return digest.hexdigest()


def score_header(trials: TrialList) -> str:
    """The first line of a score table."""
    return SCORES_MARK + ("\n" if trials.is_genuine is None else "\tlabel\n")


def score_lines(trials: TrialList, cells: Sequence[str], scores: Floats, rows: slice) -> str:
    """Some lines of a score table.

    Args:
        trials: All trials.
        cells: Of ``name_cells``.
        scores: Of the wanted rows.
        rows: Which trials.
    """
    keys = trials.keys
    columns = [
        [cells[code] for code in keys.enrol[rows].tolist()],
        [cells[code] for code in keys.test[rows].tolist()],
        list(map(repr, scores.tolist())),
    ]
    if trials.is_genuine is not None:
        columns.append(["1" if label else "0" for label in trials.is_genuine[rows].tolist()])
    return "\n".join([*map("\t".join, zip(*columns, strict=True)), ""])
