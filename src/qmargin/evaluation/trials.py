"""Trials: which pairs to compare, which of them are genuine, and who is behind their names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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
    Layout,
    find_layout,
    line_of_row,
    read_columns,
)
from qmargin.evaluation.result import Source
from qmargin.files import Progress, unescape_formula

if TYPE_CHECKING:
    from qmargin.evaluation.scores import ScoreSet

Pairs = NDArray[np.int64]
Where = Callable[[int], str]


@dataclass(frozen=True)
class TrialKeys:
    """Enrol and test names of trials; ``names`` are distinct, sorted, and all in use.

    Examples:
        >>> keys = TrialKeys.from_names(["ann", "bob"], ["bob", "cat"])
        >>> keys.names, keys.enrol.tolist(), keys.test.tolist()
        (('ann', 'bob', 'cat'), [0, 1], [1, 2])
    """

    names: tuple[str, ...]
    enrol: Codes  # [n]
    test: Codes  # [n]

    @classmethod
    def from_names(cls, enrol: Sequence[str], test: Sequence[str]) -> TrialKeys:
        """Keys of trials given name by name."""
        table = KeyTable()
        codes = [table.codes([name.encode("utf-8") for name in column]) for column in (enrol, test)]
        names = [name.decode("utf-8") for name in table.names]
        return cls.from_codes(names, codes[0], codes[1])

    @classmethod
    def from_codes(cls, names: Sequence[str], enrol: Codes, test: Codes) -> TrialKeys:
        """Keys of trials given as positions in ``names``, which may be unsorted and partly unused.

        Names have to be distinct.
        """
        is_used = np.zeros(len(names), dtype=bool)
        is_used[enrol] = True
        is_used[test] = True
        used = np.flatnonzero(is_used)
        order = sorted(used.tolist(), key=names.__getitem__)
        rank = np.zeros(len(names), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return cls(tuple(names[index] for index in order), rank[enrol], rank[test])

    def __len__(self) -> int:
        return len(self.enrol)

    def pairs(self) -> Pairs:
        """One number per trial, the same exactly when both names are; sorted as the names are."""
        return self.enrol.astype(np.int64) * len(self.names) + self.test

    def unordered_pairs(self) -> Pairs:
        """One number per trial, the same exactly when its two names are, in whichever order."""
        low, high = np.minimum(self.enrol, self.test), np.maximum(self.enrol, self.test)
        return low.astype(np.int64) * len(self.names) + high

    def trial(self, row: int) -> tuple[str, str]:
        """Names of one trial."""
        return self.names[self.enrol[row]], self.names[self.test[row]]

    def take(self, rows: NDArray[np.int64]) -> TrialKeys:
        """The same names, other trials."""
        return TrialKeys.from_codes(self.names, self.enrol[rows], self.test[rows])


class PairCounts(NamedTuple):
    """Trials that are allowed and tell less than others.

    Attributes:
        num_mirrored: Pairs that occur in both orders, as ``a b`` and ``b a``.
        num_self: Trials of a sample with itself.
    """

    num_mirrored: int
    num_self: int


NO_COUNTS = PairCounts(0, 0)


def repeated_rows(pairs: Pairs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ``(earlier, later)`` of pairs that occur more than once, one entry per repetition.

    Examples:
        >>> repeated_rows(np.array([5, 7, 9, 7, 5]))
        (array([0, 1]), array([4, 3]))
    """
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


def first_duplicate(pairs: Pairs) -> tuple[int, int] | None:
    """Rows ``(first, again)`` of the earliest repetition of a pair, or None.

    Examples:
        >>> first_duplicate(np.array([5, 7, 9, 7, 5]))
        (1, 3)
    """
    earlier, later = repeated_rows(pairs)
    if not len(later):
        return None
    place = int(np.argmin(later))
    return int(earlier[place]), int(later[place])


def trials_sha256(keys: TrialKeys, is_genuine: NDArray[np.bool_]) -> str:
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


def match_rows(wanted: TrialKeys, given: TrialKeys) -> NDArray[np.int64]:
    """For every wanted trial its row among the given ones, or -1.

    Examples:
        >>> wanted = TrialKeys.from_names(["a", "b"], ["b", "a"])
        >>> match_rows(wanted, TrialKeys.from_names(["z", "b"], ["b", "a"])).tolist()
        [-1, 1]
    """
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
class SubjectColumns:
    """Who is on each side of the trials, as columns of the file say."""

    names: tuple[str, ...]
    enrol: Codes  # [n]
    test: Codes  # [n]


@dataclass(frozen=True)
class TrialList:
    """Trials to score.

    Attributes:
        keys: Enrol and test names.
        is_genuine: ``[n]``, None when the list has no labels.
        subjects: None when the list does not name them.
        source: The file.
        where: Row to "file, line n", for messages.
        pair_counts: Mirrored pairs and samples compared with themselves.
    """

    keys: TrialKeys
    is_genuine: NDArray[np.bool_] | None
    source: Source
    subjects: SubjectColumns | None = None
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
    (VoxCeleb: 1 or 0), ``enrol test``, or what a header names. The order is found out; a list that
    can be read in two ways is refused.

    Args:
        path: A text file, columns separated by white space, tabs or commas.
        format: A name of ``TRIAL_LAYOUTS``, ``"csv"``, ``"tsv"`` or ``"auto"``.
        progress: Called with the bytes read and the bytes of the file.

    Raises:
        DataError: A line cannot be read, a pair occurs twice, or is genuine in one order and
            impostor in the other; the message names the line.
    """
    layout = find_layout(path, TRIAL_LAYOUTS, required=("enrol", "test"), format=format)
    columns = read_columns(path, layout, progress)

    def where(row: int) -> str:
        return f"{path}, line {line_of_row(path, layout, row)}"

    keys, counts = checked_keys(columns, where)
    source = Source(str(path), columns.sha256, "trials")
    subjects = subject_columns(columns, layout, where)
    return TrialList(keys, columns.arrays.get("label"), source, subjects, where, counts)


def checked_keys(
    columns: Columns, where: Where, *, is_table: bool = False
) -> tuple[TrialKeys, PairCounts]:
    """Keys of a file's trials, every pair once, and what is odd about them.

    Args:
        columns: What was read.
        where: Row to "file, line n".
        is_table: Names may have a quote before them that ``escape_formula`` wrote.
    """
    enrol, test = columns.arrays["enrol"], columns.arrays["test"]
    names = decoded(columns.keys.names, (enrol, test), where)
    if is_table:
        names = _unescaped(names, where)
    keys = TrialKeys.from_codes(names, enrol, test)
    return keys, check_pairs(keys, columns.arrays.get("label"), where)


def _unescaped(names: list[str], where: Where) -> list[str]:
    """Names without the quotes that keep spreadsheets from running them."""
    found = list(map(unescape_formula, names))
    if found == names or len(set(found)) == len(found):
        return found
    again = next(
        name
        for name in names
        if name != unescape_formula(name) and unescape_formula(name) in set(names)
    )
    raise DataError(
        f"{where(0)}: the file names both {again!r} and {unescape_formula(again)!r}, which are one "
        "name in a score table: rename one"
    )


def check_pairs(keys: TrialKeys, is_genuine: NDArray[np.bool_] | None, where: Where) -> PairCounts:
    """Count pairs that occur in both orders, and samples that are compared with themselves.

    Raises:
        DataError: A pair occurs twice in one order, or has both labels; the message names the line.
    """
    earlier, later = repeated_rows(keys.unordered_pairs())
    num_self = int(np.count_nonzero(keys.enrol == keys.test))
    if not len(later):
        return PairCounts(0, num_self)
    rows = np.union1d(earlier, later)
    duplicate = first_duplicate(keys.pairs()[rows])
    if duplicate is not None:
        first, again = (int(rows[place]) for place in duplicate)
        enrol, test = keys.trial(again)
        raise DataError(
            f"{where(again)}: the trial {enrol!r} {test!r} is also in {where(first)}: "
            "every pair may occur once"
        )
    if is_genuine is not None and (is_genuine[earlier] != is_genuine[later]).any():
        place = int(np.argmax(is_genuine[earlier] != is_genuine[later]))
        first, again = sorted((int(earlier[place]), int(later[place])))
        enrol, test = keys.trial(again)
        labels = ["genuine" if is_genuine[row] else "impostor" for row in (again, first)]
        raise DataError(
            f"{where(again)}: the trial {enrol!r} {test!r} is {labels[0]}, but {where(first)} has "
            f"the same pair as {labels[1]}: correct one of the labels"
        )
    return PairCounts(len(later), num_self)


def decoded(names: list[bytes], columns: tuple[Codes, ...], where: Where) -> list[str]:
    """Names as text; the first one that is not UTF-8 is an error that names its line."""
    try:
        return [name.decode("utf-8") for name in names]
    except UnicodeDecodeError as error:
        bad = names.index(error.object)
        rows = [int(np.argmax(codes == bad)) for codes in columns if (codes == bad).any()]
        raise DataError(
            f"{where(min(rows))}: the name {error.object!r} is not UTF-8: convert the file"
        ) from error


def subject_columns(columns: Columns, layout: Layout, where: Where) -> SubjectColumns | None:
    """Subjects of both sides, or None when the file has no such columns."""
    given = [name for name in ("enrol_subject", "test_subject") if name in layout.columns]
    if not given:
        return None
    if len(given) == 1:
        raise DataError(f"{where(0)}: the file has the column {given[0]} only: give both subjects")
    enrol, test = (columns.arrays[name] for name in given)
    names = decoded(columns.subjects.names, (enrol, test), where)
    return SubjectColumns(tuple(names), enrol, test)


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


def folder_subjects(names: Sequence[str]) -> list[str]:
    """The first folder in which names differ, of each; empty where a name has none.

    Examples:
        >>> folder_subjects(["wav/id10270/video/1.wav", "wav/id10271/video/1.wav"])
        ['id10270', 'id10271']
    """
    folders = [name.replace("\\", "/").lstrip("/").split("/")[:-1] for name in names]
    levels = zip(*folders, strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))  # such as test/
    return ["".join(folder[shared : shared + 1]) for folder in folders]


def _from_paths(keys: TrialKeys) -> Subjects | None:
    """Subjects by the first folder in which the names differ; None when a name has none."""
    subjects = folder_subjects(keys.names)
    return (
        None if "" in subjects else _of_names(keys, subjects, "subjects are folders in the names")
    )


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
