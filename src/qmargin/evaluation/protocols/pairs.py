"""Pairs of image files from any list: embedded once each, scored by cosine, measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.columns import numbered_lines
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import EvaluationOptions, StageProgress, evaluate_scores
from qmargin.evaluation.result import Measure, Result, Source
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import score_trials
from qmargin.evaluation.trials import TrialKeys, TrialList, check_pairs, read_trials
from qmargin.files import Guard, sha256_of
from qmargin.metrics.folds import kfold_accuracy


@dataclass(frozen=True)
class PairTrials:
    """A list of pairs, and the fold of every pair where the list has folds, ``[n]``."""

    trials: TrialList
    folds: NDArray[np.int64] | None


def read_pair_trials(path: str | Path, *, extension: str = "jpg") -> PairTrials:
    """Read LFW's ``pairs.txt``, a CSV file with the header ``a,b,label``, or any trial list.

    Args:
        path: The list.
        extension: Of the images that ``pairs.txt`` numbers.

    Raises:
        DataError: A line cannot be read, or a pair occurs twice.
    """
    from qmargin.data.readers.pairs import read_pairs

    path = Path(path)
    if not _is_pair_list(path):
        return PairTrials(read_trials(path), None)
    pairs = read_pairs(path, extension=extension)
    keys = TrialKeys.from_names(pairs.first, pairs.second)

    def where(row: int) -> str:
        return f"{path}, pair {row + 1}"

    counts = check_pairs(keys, pairs.is_genuine, where)
    source = Source(str(path), sha256_of(path), "trials")
    trials = TrialList(keys, pairs.is_genuine, source, where=where, pair_counts=counts)
    return PairTrials(trials, pairs.folds)


def _is_pair_list(path: Path) -> bool:
    """Whether the first line is the header of such a CSV file, or counts as LFW's has."""
    from qmargin.data.readers.pairs import FIRST, LABEL, SECOND

    first = next(numbered_lines(path), None)
    if first is None:
        raise DataError(f"{path} is empty: give lines of two images and a label")
    text = first[1].decode("utf-8", "replace").lower()
    if path.suffix.lower() in (".csv", ".tsv"):
        cells = {cell.strip() for cell in text.replace("\t", ",").split(",")}
        return all(cells & set(names) for names in (FIRST, SECOND, LABEL))
    words = text.split()
    return len(words) <= 2 and all(word.isdigit() for word in words)


def evaluate_pairs(
    embeddings: Embeddings,
    trials: TrialList,
    options: EvaluationOptions | None = None,
    *,
    scores: str | Path,
    folds: NDArray[np.int64] | None = None,
    restart: bool = False,
    guard: Guard | None = None,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Verification of pairs by the cosine of their embeddings.

    Args:
        embeddings: One for every name of the list.
        trials: The list, with labels.
        options: What to measure.
        scores: Where the table of scores is written.
        folds: Fold of every pair; adds the accuracy at thresholds of the other folds.
        restart: Throw away a part of the scores that other inputs made.
        guard: Decides whether an existing table is replaced; None for always.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        DataError: The list has no labels, or a name has no embedding.
    """
    if trials.is_genuine is None:
        raise DataError(f"{trials.source.path} has no labels: give a list of pairs that has them")
    scored = None if progress is None else partial(progress, "scoring")
    path = score_trials(
        embeddings, trials, out=scores, restart=restart, guard=guard, progress=scored
    )
    score_set = read_scores(path, trials=trials)
    score_set = replace(score_set, sources=(*score_set.sources, embeddings.source))
    options = replace(options or EvaluationOptions(), kind="pairs", scoring="cosine")
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    if folds is None:
        return result
    found = kfold_accuracy(score_set.scores, score_set.is_genuine, folds=folds)
    name = f"{len(found.accuracies)}-fold accuracy"
    return result.with_extra(
        {name: Measure(found.mean, found.std, "thresholds of the other folds")}
    )
