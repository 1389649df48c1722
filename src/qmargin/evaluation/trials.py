"""Trials: which pairs to compare, which of them are genuine, and their subjects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.columns import (
    TRIAL_LAYOUTS,
    Codes,
    Columns,
    KeyTable,
    Where,
    find_layout,
    first_row,
    read_columns,
)
from qmargin.evaluation.result import Source
from qmargin.files import Progress, unescape_formula

if TYPE_CHECKING:
    from qmargin.evaluation.scores import ScoreSet

Bools = NDArray[np.bool_]
Pairs = NDArray[np.int64]


@dataclass(frozen=True)
class TrialKeys:
    """Names on both sides of trials; ``names`` are distinct, sorted, and all in use."""

    names: tuple[str, ...]
    enrol: Codes  # [n]
    test: Codes  # [n]

    @classmethod
    def from_names(cls, enrol: Sequence[str], test: Sequence[str]) -> TrialKeys:
        """Keys of trials given name by name."""
        table = KeyTable()
        codes = [table.codes([name.encode("utf-8") for name in column]) for column in (enrol, test)]
        return cls.from_codes([name.decode("utf-8") for name in table], codes[0], codes[1])

    @classmethod
    def from_codes(cls, names: Sequence[str], enrol: Codes, test: Codes) -> TrialKeys:
        """Keys of trials given as positions in distinct names, unsorted and perhaps unused."""
        is_used = np.zeros(len(names), dtype=bool)
        is_used[enrol] = True
        is_used[test] = True
        order = sorted(np.flatnonzero(is_used).tolist(), key=names.__getitem__)
        rank = np.zeros(len(names), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return cls(tuple(names[index] for index in order), rank[enrol], rank[test])

    def __len__(self) -> int:
        return len(self.enrol)

    def pairs(self) -> Pairs:
        """One number per trial, the same exactly when both names are; sorted as the names are."""
        return self.enrol.astype(np.int64) * len(self.names) + self.test

    def trial(self, row: int) -> tuple[str, str]:
        """Names of one trial."""
        return self.names[self.enrol[row]], self.names[self.test[row]]

    def take(self, rows: Pairs) -> TrialKeys:
        """Keys of some of the trials."""
        return TrialKeys.from_codes(self.names, self.enrol[rows], self.test[rows])


class PairCounts(NamedTuple):
    """Counts of trials that are allowed but add little."""

    num_mirrored: int  # pairs that occur in both orders
    num_self: int  # trials of a sample with itself


NO_COUNTS = PairCounts(0, 0)


def repeated_rows(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Rows ``(earlier, later)`` of pairs that occur more than once, one entry per repetition."""
    ordered = np.sort(pairs)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    place = np.minimum(np.searchsorted(repeated, pairs), len(repeated) - 1)
    rows = np.flatnonzero(repeated[place] == pairs)  # few: they alone are put in order
    rows = rows[np.argsort(pairs[rows], kind="stable")]
    is_same = pairs[rows[1:]] == pairs[rows[:-1]]
    return rows[:-1][is_same], rows[1:][is_same]


def trials_sha256(keys: TrialKeys, is_genuine: Bools) -> str:
    """A fingerprint of the set of trials and labels, whatever their order."""
    order = np.argsort(keys.pairs(), kind="stable")
    digest = hashlib.sha256()
    for name in keys.names:
        content = name.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    for column in (keys.enrol, keys.test):
        digest.update(column[order].astype("<i4").tobytes())
    digest.update(is_genuine[order].astype(np.uint8).tobytes())
    return digest.hexdigest()


def match_rows(wanted: TrialKeys, given: TrialKeys) -> Pairs:
    """For every wanted trial its row among the given ones, or -1."""
    position = {name: index for index, name in enumerate(given.names)}
    translate = np.array([position.get(name, -1) for name in wanted.names], dtype=np.int64)
    enrol, test = translate[wanted.enrol], translate[wanted.test]
    pairs = np.where((enrol < 0) | (test < 0), -1, enrol * len(given.names) + test)
    known = given.pairs()
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known, pairs, sorter=order), len(known) - 1)
    rows = order[place]
    return np.where(known[rows] == pairs, rows, -1)


@dataclass(frozen=True)
class TrialList:
    """Trials to score."""

    keys: TrialKeys
    is_genuine: Bools | None  # [n], None when the list has no labels
    source: Source
    subjects: TrialKeys | None = None  # None when the list does not name them
    where: Where = field(default=str, repr=False, compare=False)
    pair_counts: PairCounts = NO_COUNTS

    def __len__(self) -> int:
        return len(self.keys)

    def trials_sha256(self) -> str | None:
        """The same for the same labelled trials in any order; None without labels."""
        return None if self.is_genuine is None else trials_sha256(self.keys, self.is_genuine)


def read_trials(
    path: str | Path, *, format: str = "auto", progress: Progress | None = None
) -> TrialList:
    """Read a trial list.

    The columns are ``enrol test label`` (Kaldi: ``target`` or ``nontarget``), ``label enrol test``
    (VoxCeleb: 1 or 0), ``enrol test``, or those that a header names. The order is detected; a list
    that can be read in two ways is refused.

    Args:
        path: A text file, columns separated by white space, tabs or commas.
        format: A name of ``TRIAL_LAYOUTS``, ``"csv"``, ``"tsv"`` or ``"auto"``.
        progress: Called with the bytes read and the bytes of the file.
    """
    layout = find_layout(path, TRIAL_LAYOUTS, required=("enrol", "test"), format=format)
    columns = read_columns(path, layout, progress)
    keys, counts = checked_keys(columns)
    source = Source(str(path), columns.sha256, "trials")
    subjects = subject_columns(columns)
    return TrialList(keys, columns.arrays.get("label"), source, subjects, columns.where, counts)


def checked_keys(columns: Columns, *, is_table: bool = False) -> tuple[TrialKeys, PairCounts]:
    """Keys of a file's trials, every pair once; a score table may have escaped formulas."""
    enrol, test = columns.arrays["enrol"], columns.arrays["test"]
    names = _decoded(columns.keys, enrol, test, columns.where)
    if is_table:
        plain = list(map(unescape_formula, names))
        if plain != names and len(set(plain)) < len(plain):
            known = set(names)
            pairs = zip(names, plain, strict=True)
            twice = next(pair for pair in pairs if pair[0] != pair[1] and pair[1] in known)
            raise DataError(
                f"{columns.where(0)}: the file names both {twice[0]!r} and {twice[1]!r}, which are "
                "one name in a score table: rename one"
            )
        names = plain
    keys = TrialKeys.from_codes(names, enrol, test)
    return keys, check_pairs(keys, columns.arrays.get("label"), columns.where)


def check_pairs(keys: TrialKeys, is_genuine: Bools | None, where: Where) -> PairCounts:
    """Count mirrored pairs and self-comparisons; refuse duplicates and pairs with both labels."""
    low, high = np.minimum(keys.enrol, keys.test), np.maximum(keys.enrol, keys.test)
    earlier, later = repeated_rows(low.astype(np.int64) * len(keys.names) + high)
    num_self = int(np.count_nonzero(keys.enrol == keys.test))
    if not len(later):
        return PairCounts(0, num_self)
    rows = np.union1d(earlier, later)
    firsts, agains = repeated_rows(keys.pairs()[rows])
    if len(agains):
        place = int(np.argmin(agains))
        first, again = int(rows[firsts[place]]), int(rows[agains[place]])
        enrol, test = keys.trial(again)
        raise DataError(
            f"{where(again)}: the trial {enrol!r} {test!r} is also in {where(first)}: remove one"
        )
    if is_genuine is not None:
        place_of = first_row(is_genuine[earlier] != is_genuine[later])
        if place_of is not None:
            first, again = sorted((int(earlier[place_of]), int(later[place_of])))
            enrol, test = keys.trial(again)
            labels = [_label(is_genuine, row) for row in (again, first)]
            raise DataError(
                f"{where(again)}: the trial {enrol!r} {test!r} is {labels[0]}, but {where(first)} "
                f"has the same pair as {labels[1]}: correct one of the labels"
            )
    return PairCounts(len(later), num_self)


def _label(is_genuine: Bools, row: int) -> str:
    return "genuine" if is_genuine[row] else "impostor"


def _decoded(names: Sequence[bytes], enrol: Codes, test: Codes, where: Where) -> list[str]:
    try:
        return [name.decode("utf-8") for name in names]
    except UnicodeDecodeError as error:
        bad = names.index(error.object)
        row = int(np.argmax((enrol == bad) | (test == bad)))
        raise DataError(
            f"{where(row)}: the name {error.object!r} is not UTF-8: convert the file"
        ) from error


def subject_columns(columns: Columns) -> TrialKeys | None:
    """Subjects of both sides, or None when the file has no such columns."""
    given = [name for name in ("enrol_subject", "test_subject") if name in columns.arrays]
    if not given:
        return None
    if len(given) == 1:
        raise DataError(f"{columns.where(0)}: the file has the column {given[0]} only: give both")
    enrol, test = (columns.arrays[name] for name in given)
    names = _decoded(columns.subjects, enrol, test, columns.where)
    return TrialKeys.from_codes(names, enrol, test)


@dataclass(frozen=True)
class Subjects(TrialKeys):
    """Subjects on both sides of every trial, and their source."""

    note: str = ""
    are_files: bool = False  # only the names of the files are known


def find_subjects(
    score_set: ScoreSet, how: str = "auto", mapping: dict[str, str] | None = None
) -> Subjects | None:
    """Subjects of scored trials, or None when the trials have no names at all.

    Args:
        score_set: Scored trials.
        how: ``"auto"``: columns of the file, or else the first folder in which names such as
            ``wav/id10270/video/1.wav`` differ if that agrees with every label, or else the files
            themselves; ``"path"``: these folders; ``"none"``: the files themselves.
        mapping: Subject of every name; overrides ``how``.
    """
    keys, given = score_set.keys, score_set.subjects
    if mapping is not None:
        found = _mapped(score_set, mapping)
    elif how == "auto" and given is not None:
        note = "subjects are columns of the file"
        found = Subjects(given.names, given.enrol, given.test, note)
    elif keys is None:
        return None
    else:
        folders = folder_subjects(keys.names) if how != "none" else [""]
        if how == "path" and "" in folders:
            name = min(keys.names, key=lambda name: name.count("/"))
            raise DataError(f"the name {name!r} has no folder that can be its subject: give a file")
        if "" not in folders:
            found = _of_names(keys, folders, "subjects are folders in the names")
        if "" in folders or (how == "auto" and _contradiction(found, score_set) is not None):
            note = "subjects are not known: files are resampled, so intervals are too narrow"
            found = Subjects(keys.names, keys.enrol, keys.test, note, are_files=True)
    row = _contradiction(found, score_set)
    if row is not None:
        enrol, test = found.trial(row)
        raise DataError(
            f"{score_set.where(row)}: the trial is {_label(score_set.is_genuine, row)}, but its "
            f"subjects are {enrol!r} and {test!r}: correct the label or the subjects"
        )
    return found


def folder_subjects(names: Sequence[str]) -> list[str]:
    """The first folder in which names differ, of each; empty where a name has none."""
    folders = [name.replace("\\", "/").lstrip("/").split("/")[:-1] for name in names]
    levels = zip(*folders, strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))  # such as test/
    return ["".join(folder[shared : shared + 1]) for folder in folders]


def _of_names(keys: TrialKeys, subjects: Sequence[str], note: str) -> Subjects:
    """Subjects from the subject of every name."""
    distinct, places = np.unique(np.array(subjects, dtype=object), return_inverse=True)
    codes = places.astype(np.int32)
    return Subjects(tuple(distinct), codes[keys.enrol], codes[keys.test], note)


def _mapped(score_set: ScoreSet, mapping: dict[str, str]) -> Subjects:
    keys = score_set.keys
    if keys is None:
        raise DataError(f"{score_set.sources[0].path} has no names to find subjects for")
    subjects = [mapping.get(name, "") for name in keys.names]
    if "" in subjects:
        missing = subjects.index("")
        row = int(np.argmax((keys.enrol == missing) | (keys.test == missing)))
        raise DataError(
            f"{score_set.where(row)}: {keys.names[missing]!r} has no subject: add it to the file"
        )
    return _of_names(keys, subjects, "subjects are those of the given file")


def _contradiction(subjects: Subjects, score_set: ScoreSet) -> int | None:
    """The first genuine trial of two subjects, or impostor trial of one."""
    is_wrong = (subjects.enrol == subjects.test) != score_set.is_genuine
    if subjects.are_files:  # a genuine trial has two files of one subject
        is_wrong &= ~score_set.is_genuine
    return first_row(is_wrong)
