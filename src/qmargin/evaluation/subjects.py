"""Who is behind the names of the trials, and which group each subject belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.keys import Codes, TrialKeys
from qmargin.evaluation.layouts import Layout, numbered_lines, refuse_semicolons, text_of
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import ScoreSet
from qmargin.files import sha256_of

_HEADS = ("subject", "speaker", "identity", "key", "file", "utterance", "name", "utt", "id")


@dataclass(frozen=True)
class Subjects:
    """Subjects of both sides of every trial.

    Attributes:
        names: Distinct and sorted.
        enrol: Positions in ``names``, ``[n]``.
        test: Positions in ``names``, ``[n]``.
        are_files: Whether nothing is known but the names of the files.
        note: Where the subjects come from.
    """

    names: tuple[str, ...]
    enrol: Codes
    test: Codes
    are_files: bool
    note: str


def find_subjects(
    score_set: ScoreSet, how: str = "auto", mapping: dict[str, str] | None = None
) -> Subjects | None:
    """Subjects of scored trials, or None when the trials have no names at all.

    Args:
        score_set: Scored trials.
        how: ``"auto"``: columns of the file, or else the first folder in which names such as
            ``wav/id10270/video/1.wav`` differ if that agrees with every label, or else the files
            themselves; ``"path"``: these folders; ``"none"``: the files themselves.
        mapping: Subject of every name; goes before ``how``.

    Raises:
        DataError: Subjects contradict a label, or a name has none; the message names the line.
    """
    if mapping is not None:
        return _checked(_mapped(score_set, mapping), score_set)
    if how == "auto" and score_set.subjects is not None:
        given = score_set.subjects
        note = "subjects are columns of the file"
        return _checked(_renumbered(given.names, given.enrol, given.test, note), score_set)
    if score_set.keys is None:
        return None
    if how != "none":
        guess = _from_paths(score_set.keys)
        if how == "path":
            return _checked(_refuse_none(guess, score_set.keys), score_set)
        if guess is not None and _first_contradiction(guess, score_set.is_genuine) is None:
            return guess
    keys = score_set.keys
    note = "subjects are not known: files are drawn instead, so intervals are too narrow"
    return _checked(Subjects(keys.names, keys.enrol, keys.test, True, note), score_set)


def _from_paths(keys: TrialKeys) -> Subjects | None:
    """Subjects by the first folder in which the names differ; None when a name has none."""
    folders = [name.replace("\\", "/").lstrip("/").split("/")[:-1] for name in keys.names]
    levels = zip(*folders, strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))  # such as test/
    if not all(len(folder) > shared for folder in folders):
        return None
    note = "subjects are folders in the names"
    return _of_names(keys, [folder[shared] for folder in folders], note)


def _refuse_none(guess: Subjects | None, keys: TrialKeys) -> Subjects:
    if guess is None:
        name = min(keys.names, key=lambda name: name.count("/"))
        raise DataError(
            f"the name {name!r} has no folder of its own that could be its subject: give a file"
        )
    return guess


def _of_names(keys: TrialKeys, subjects: Sequence[str], note: str) -> Subjects:
    """Subjects from the subject of every name."""
    distinct = sorted(set(subjects))
    position = {subject: place for place, subject in enumerate(distinct)}
    codes = np.array([position[subject] for subject in subjects], dtype=np.int32)
    return Subjects(tuple(distinct), codes[keys.enrol], codes[keys.test], False, note)


def _renumbered(names: Sequence[str], enrol: Codes, test: Codes, note: str) -> Subjects:
    keys = TrialKeys.from_codes(names, enrol, test)
    return Subjects(keys.names, keys.enrol, keys.test, False, note)


def _mapped(score_set: ScoreSet, mapping: dict[str, str]) -> Subjects:
    keys = score_set.keys
    if keys is None:
        raise DataError(f"{score_set.sources[0].path} has no names to find subjects for")
    subjects = [mapping.get(name, "") for name in keys.names]
    if "" in subjects:
        missing = subjects.index("")
        row = int(np.argmax((keys.enrol == missing) | (keys.test == missing)))
        raise DataError(
            f"{score_set.where(row)}: {keys.names[missing]!r} has no subject: add it to the file "
            "of subjects"
        )
    return _of_names(keys, subjects, "subjects are those of the given file")


def _first_contradiction(subjects: Subjects, is_genuine: NDArray[np.bool_]) -> int | None:
    """The first genuine trial of two subjects, or impostor trial of one."""
    is_wrong = (subjects.enrol == subjects.test) != is_genuine
    if subjects.are_files:  # two files of one subject are what a genuine trial is made of
        is_wrong &= ~is_genuine
    return int(np.argmax(is_wrong)) if is_wrong.any() else None


def _checked(subjects: Subjects, score_set: ScoreSet) -> Subjects:
    row = _first_contradiction(subjects, score_set.is_genuine)
    if row is not None:
        label = "genuine" if score_set.is_genuine[row] else "impostor"
        sides = [subjects.names[side[row]] for side in (subjects.enrol, subjects.test)]
        raise DataError(
            f"{score_set.where(row)}: the trial is {label}, but its subjects are {sides[0]!r} and "
            f"{sides[1]!r}: correct the label or the subjects"
        )
    return subjects


def read_mapping(path: str | Path, *, role: str) -> tuple[dict[str, str], Source]:
    """Read two columns: a name and what it belongs to, such as ``utt2spk`` or ``subject,group``.

    A first line such as ``subject,group`` is a header.

    Raises:
        DataError: A line has not two columns, or gives a name again with another value.
    """
    mapping: dict[str, str] = {}
    delimiter: str | None = None
    for place, (number, line) in enumerate(numbered_lines(path)):
        text = text_of(line, f"{path}, line {number}")
        if place == 0:
            delimiter = next((each for each in ("\t", ",") if each in text), None)
        layout = Layout((), delimiter)
        raw = layout.split(line)
        cells = [cell.decode("utf-8") for cell in raw]
        refuse_semicolons(raw, f"{path}, line {number}")
        if place == 0 and cells[0].lower() in _HEADS:
            continue
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{path}, line {number}: {text[:80]!r} is not a name and a {role[:-1]}")
        if mapping.setdefault(cells[0], cells[1]) != cells[1]:
            raise DataError(
                f"{path}, line {number}: {cells[0]!r} is {cells[1]!r}, but was "
                f"{mapping[cells[0]]!r} before: remove one"
            )
    if not mapping:
        raise DataError(f"{path} is empty: it needs lines of a name and a {role[:-1]}")
    return mapping, Source(str(path), sha256_of(path), role)
