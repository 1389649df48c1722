"""Trial lists: which pairs to compare, and which of them are genuine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.evaluation.columns import Columns, line_of_row, read_columns
from qmargin.evaluation.keys import (
    NO_COUNTS,
    Codes,
    PairCounts,
    TrialKeys,
    first_duplicate,
    repeated_rows,
    trials_sha256,
)
from qmargin.evaluation.layouts import TRIAL_LAYOUTS, Layout, find_layout
from qmargin.evaluation.result import Source
from qmargin.files import Progress, unescape_formula

Where = Callable[[int], str]


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
