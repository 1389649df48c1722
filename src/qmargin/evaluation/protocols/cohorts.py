"""Speakers of the training set as a cohort: their mean embeddings, and cosines to the nearest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embeddings import Embeddings
from qmargin.metrics.normalise import Moments, cohort_moments

Floats = NDArray[np.float64]
_BLOCK = 2048  # rows whose cohort scores are held at once
_PART = 256  # of these, rows that one thread sorts
_MOST_THREADS = 8


def speaker_means(
    embeddings: Embeddings, speaker_of: Mapping[str, str] | None = None
) -> Embeddings:
    """One mean embedding per speaker, sorted by name; the usual cohort of AS-norm.

    Args:
        embeddings: Of utterances.
        speaker_of: Speaker of every utterance; without it the first folder in which names differ.

    Raises:
        DataError: An utterance has no speaker.
    """
    speakers = speakers_of(embeddings.keys, speaker_of)
    names = sorted(set(speakers))
    position = {name: place for place, name in enumerate(names)}
    places = np.array([position[speaker] for speaker in speakers])
    order = np.argsort(places, kind="stable")
    starts = np.flatnonzero(np.diff(places[order], prepend=-1))
    sums = np.add.reduceat(embeddings.matrix[order].astype(np.float64), starts, axis=0)
    means = sums / np.bincount(places)[:, None]
    return Embeddings(tuple(names), means, replace(embeddings.source, role="cohort"))


def speakers_of(names: Sequence[str], speaker_of: Mapping[str, str] | None = None) -> list[str]:
    """Speaker of every name, from a mapping or from the first folder in which the names differ.

    Examples:
        >>> speakers_of(["wav/id00012/21Uxsk56VDQ/00001.wav", "wav/id00015/0fijmz4vTVU/00001.wav"])
        ['id00012', 'id00015']
    """
    if speaker_of is None:
        folders = [name.replace("\\", "/").lstrip("/").split("/")[:-1] for name in names]
        levels = zip(*folders, strict=False)
        shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
        found = ["".join(folder[shared : shared + 1]) for folder in folders]
    else:
        found = [speaker_of.get(name, "") for name in names]
    if "" in found:
        raise DataError(
            f"{names[found.index('')]!r} has no speaker: give a file of lines `utterance speaker` "
            "that has it"
        )
    return found


def nearest_moments(unit: Floats, cohort: Floats, *, top_n: int, name: str) -> Moments:
    """Mean and deviation of the ``top_n`` highest cosines of each row to a cohort.

    Args:
        unit: Rows of length one, ``[n, d]``.
        cohort: Rows of length one, ``[C, d]``.
        top_n: How many count, from 2 to ``C``.
        name: Of the cohort, for messages.
    """
    if not 2 <= top_n <= len(cohort):
        raise ConfigError(f"top_n={top_n} is not from 2 to {len(cohort)}, the size of {name}")
    others = np.ascontiguousarray(cohort.T)  # [d, C]
    work = partial(_moments, top_n=top_n, name=name)
    found: list[Moments] = []
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, len(unit), _BLOCK):
            scores = unit[start : start + _BLOCK] @ others  # on all cores; sorting is not
            parts = [scores[first : first + _PART] for first in range(0, len(scores), _PART)]
            found += pool.map(work, parts)
    means, deviations = zip(*found, strict=True)
    return Moments(np.concatenate(means), np.concatenate(deviations))


def _moments(scores: Floats, *, top_n: int, name: str) -> Moments:
    """Moments of the highest of each row, which is left partly sorted."""
    if top_n < scores.shape[1]:
        scores.partition(scores.shape[1] - top_n, axis=1)
    return cohort_moments(scores[:, -top_n:], name)
