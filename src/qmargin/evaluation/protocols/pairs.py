"""Pairs of image files from any list: embedded once each, scored by cosine, measured."""

from __future__ import annotations

import glob
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.keys import TrialKeys
from qmargin.evaluation.layouts import numbered_lines
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.ijb_release import IMAGE_SIZE, read_inside
from qmargin.evaluation.protocols.measures import Measure, Measured, with_measures
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.scoring import score_trials
from qmargin.evaluation.trials import TrialList, check_pairs, read_trials
from qmargin.files import Guard, is_file, sha256_of
from qmargin.metrics.folds import kfold_accuracy

_LOOK_AT = 20  # names that decide whether a folder is the right one


@dataclass(frozen=True)
class FolderImages:
    """Images of a folder by number, RGB ``size x size``; labels are -1."""

    folder: Path
    names: tuple[str, ...] = field(repr=False)
    size: int = IMAGE_SIZE

    def __post_init__(self) -> None:
        """Refuse a folder that has none of the first images, before a model is asked for any."""
        looked_at = self.names[:_LOOK_AT]
        if not looked_at or any(is_file(self.folder / name) for name in looked_at):
            return
        first = Path(looked_at[0])
        found = sorted(self.folder.glob(f"{glob.escape(str(first.with_suffix('')))}.*"))
        below = sorted(self.folder.glob(f"*/{glob.escape(str(first))}"))
        remedy = "give the folder that the names start in with --images"
        if found:
            remedy = f"there is {found[0].name!r}: pass --extension {found[0].suffix[1:]}"
        elif below:
            place = self.folder / below[0].relative_to(self.folder).parts[0]
            remedy = f"they are in --images {place}"
        raise DataError(
            f"{self.folder} has none of the images of the list, such as {looked_at[0]!r}; {remedy}"
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        from qmargin.data.images import decode_image, resize_image

        image = decode_image(read_inside(self.folder, self.names[index]))
        return resize_image(image, self.size), -1


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
    from qmargin.data.pairs_lists import read_pairs

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
    from qmargin.data.pairs_lists import FIRST, LABEL, SECOND

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
) -> Measured:
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
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    if folds is None:
        return with_measures(result, ())
    found = kfold_accuracy(score_set.scores, score_set.is_genuine, folds=folds)
    name = f"{len(found.accuracies)}-fold accuracy"
    note = "thresholds of the other folds"
    return with_measures(result, (Measure(name, found.mean, found.std, note),))
