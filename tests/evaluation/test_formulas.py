"""No table that is written for people holds a cell that a spreadsheet would run."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from helpers.results import synthetic_result
from qmargin.errors import DataError
from qmargin.evaluation.embed import FileRow, write_manifest
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.result import Source
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import score_trials, write_scores
from qmargin.evaluation.trials import TrialKeys, TrialList
from qmargin.files import FORMULA
from qmargin.report.systems import arrange
from qmargin.report.tables import csv_table

NAMES = ["=1+1", "+a", "-b.wav", "@c", "'=1+1", "''-d", "'quoted'", "plain"]


def trials():
    keys = TrialKeys.from_names(NAMES, [*NAMES[1:], NAMES[0]])
    labels = np.arange(len(NAMES)) % 2 == 0
    return TrialList(keys, labels, Source("t", "ab", "trials"))


def cells_of(path, delimiter):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter=delimiter))


@pytest.mark.parametrize("how", ["scored", "written"])
def test_names_in_a_table_of_scores_are_text_and_come_back(tmp_path, how):
    path, listed = tmp_path / "s.tsv", trials()
    if how == "scored":
        matrix = np.random.default_rng(0).normal(size=(len(NAMES), 4)).astype(np.float32)
        embeddings = Embeddings(tuple(NAMES), matrix, Source("e", "ab", "embeddings"))
        score_trials(embeddings, listed, out=path)
    else:
        write_scores(path, listed, np.linspace(-1.0, 1.0, len(NAMES)))
    rows = cells_of(path, "\t")[1:]
    assert not [cell for row in rows for cell in row[:2] if cell.startswith(FORMULA)]
    assert any(row[2].startswith("-") for row in rows)  # numbers stay numbers
    found = read_scores(path)
    assert [found.keys.trial(row) for row in range(len(NAMES))] == [
        listed.keys.trial(row) for row in range(len(NAMES))
    ]
    joined = read_scores(path, trials=listed)
    assert joined.trials_sha256() == listed.trials_sha256()


def test_two_names_that_a_table_cannot_tell_apart_are_refused(tmp_path):
    path = tmp_path / "s.tsv"
    path.write_text("enrol\ttest\tscore\tlabel\n'=x\ta\t0.5\t1\n=x\tb\t0.4\t0\n")
    with pytest.raises(DataError, match=r"=x.*rename one"):
        read_scores(path)


def test_a_manifest_holds_no_formula(tmp_path):
    files = [FileRow(name, None, "ab", "=cmd|' /C calc'!A0") for name in NAMES]
    write_manifest(tmp_path / "m.csv", files)
    rows = cells_of(tmp_path / "m.csv", ",")[1:]
    assert not [cell for row in rows for cell in row if cell.startswith(FORMULA)]


@pytest.mark.parametrize("sign", FORMULA)
def test_a_table_of_a_report_holds_no_formula(tmp_path, sign):
    result = synthetic_result(f"{sign}SUM(A1)", protocol=f"{sign}1")
    path = tmp_path / "t.csv"
    rule = replace(result.protocol, rule=f"{sign}rule")
    path.write_text(csv_table(arrange([replace(result, protocol=rule)])), encoding="utf-8")
    rows = cells_of(path, ",")[1:]
    texts = [cell for row in rows for cell in row if cell.startswith(FORMULA)]
    assert all(float(cell) < 0 for cell in texts)  # negative numbers
