"""Bad score files are errors that name file and line, never a number."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from qmargin.errors import DataError
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.trials import read_trials

GOOD = ["a1 b1 0.5 target", "a1 b2 0.1 nontarget", ""]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def refused(path: Path, message: str, **options: object) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_scores(path, **options)  # type: ignore[arg-type]
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a2 b1 nan target", "the score is NaN"),
        ("a2 b1 -NaN target", "the score is NaN"),
        ("a2 b1 0,5 target", "the score '0,5' is not a number"),
        ("a2 b1 1_0 target", "the score '1_0' is not a number"),
        ("a2 b1 high target", "the score 'high' is not a number"),
        ("a2 b1 0.5 maybe", "the label 'maybe' is not one of 1/0"),
        ("a2 b1 0.5 2", "the label '2' is not one of 1/0"),
        ("a2 b1 0.5", "3 columns where 4 are needed"),
        ("a2 b1 0.5 target more", "5 columns where 4 are needed"),
        ("a1 b2 0.3 nontarget", "the trial 'a1' 'b2' is also in .*, line 2"),
        ("b2 a1 0.3 target", "the trial 'b2' 'a1' is genuine, but .*, line 2 .* impostor"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "scores.txt", [*GOOD, line, "a3 b3 0.2 target"])
    refused(path, rf"scores\.txt, line 4: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a2,b1,nan,1", "the score is NaN"),
        ("a2,b1,,1", "the score is empty"),
        ("a2,b1,0.5", "3 columns where 4 are needed"),
        ('a2,"b1,0.5,1', "1 columns where 4 are needed"),
        ("a1,b1,0.5,1", "the trial 'a1' 'b1' is also in .*, line 2"),
    ],
)
def test_a_bad_line_after_a_header_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "s.csv", ["enrol,test,score,label", "a1,b1,0.5,1", line])
    refused(path, rf"s\.csv, line 3: {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        (["enrol,test,score,label"], "has no trials"),
        (["enrol,test,label,other"], "is empty|no column|none of"),
        (["enrol,score,label", "a,1,1"], "one of enrol and test"),
        (["score,similarity,label", "1,1,1"], "two columns for 'score'"),
        (["a b c d e f g"], "line 1: 7 columns that are none of"),
        (["a b target"], "line 1: the score 'target' is not a number"),
        (["a b 0.5"], "has no labels: give the trial list"),
        (["a b 0 1", "a c 0.5 0.7"], "line 2: 4 columns that are none of"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    refused(written(tmp_path / "scores.csv", lines), message)


def test_a_csv_without_the_column_says_what_it_has(tmp_path: Path) -> None:
    path = written(tmp_path / "s.csv", ["enrol,test,label", "a,b,1"])
    refused(path, "line 1: the header has no column 'score', only enrol, test, label", format="csv")


def test_names_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "scores.txt"
    path.write_bytes(b"a b 0.5 1\na c\xff 0.25 0\n")
    refused(path, r"line 2: the name b'c\\xff' is not UTF-8")


def test_a_line_without_end_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "scores.txt"
    path.write_bytes(b"a" * 3_000_000)
    refused(path, "longer than 1,048,576 bytes")
    path.write_bytes(b"a b 0.5 1\n" + os.urandom(16).hex().encode() * 100_000)
    refused(path, "longer than 1,048,576 bytes")


class TestJoin:
    """A trial list against scores."""

    @pytest.fixture
    def trials(self, tmp_path: Path) -> Path:
        return written(tmp_path / "trials.txt", ["1 a1 b1", "0 a1 b2"])

    def test_a_trial_without_a_score(self, tmp_path: Path, trials: Path) -> None:
        path = written(tmp_path / "scores.txt", ["a1 b1 0.5"])
        with pytest.raises(DataError, match=r"trials\.txt, line 2: the trial 'a1' 'b2' has no sco"):
            read_scores(path, trials=read_trials(trials))

    def test_a_score_without_a_trial(self, tmp_path: Path, trials: Path) -> None:
        path = written(tmp_path / "scores.txt", ["a1 b1 0.5", "z b 0.3", "a1 b2 0.1"])
        with pytest.raises(DataError, match=r"scores\.txt, line 2: the pair 'z' 'b' is not in"):
            read_scores(path, trials=read_trials(trials))
        joined = read_scores(path, trials=read_trials(trials), ignore_extra=True)
        assert joined.scores.tolist() == [0.5, 0.1]

    def test_labels_that_disagree(self, tmp_path: Path, trials: Path) -> None:
        path = written(tmp_path / "scores.txt", ["a1 b2 0.5 1", "a1 b1 0.25 1"])
        with pytest.raises(DataError, match=r"trials\.txt, line 2 and .*scores\.txt, line 1"):
            read_scores(path, trials=read_trials(trials))

    def test_no_labels_anywhere(self, tmp_path: Path) -> None:
        path = written(tmp_path / "scores.txt", ["a1 b1 0.5"])
        trials = read_trials(written(tmp_path / "trials.txt", ["a1 b1"]))
        with pytest.raises(DataError, match="has labels"):
            read_scores(path, trials=trials)

    def test_scores_without_names(self, tmp_path: Path, trials: Path) -> None:
        path = written(tmp_path / "scores.txt", ["0.5 target"])
        with pytest.raises(DataError, match="has no names to find the trials"):
            read_scores(path, trials=read_trials(trials))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"genuine": [0.5], "impostor": [0.1, np.nan]}, r"impostor\[1\]: the score is NaN"),
        ({"scores": [0.5, np.nan], "labels": [1, 0]}, r"scores\[1\]: the score is NaN"),
        ({"scores": [0.5, 0.1], "labels": [1, 2]}, "row 1: the label 2 is not one of"),
        ({"scores": [0.5, 0.1], "labels": [1]}, r"label has the shape \(1,\)"),
        ({"scores": [[0.5, 0.1]], "labels": [1]}, "2 dimensions"),
        ({"scores": ["a"], "labels": [1]}, "one dimension of numbers"),
        ({"numbers": [0.5]}, "has the arrays numbers: it needs genuine and impostor"),
        ({"scores": [0.5], "score": [0.5]}, "two arrays for 'score'"),
        ({"scores": [0.5], "labels": [1], "enrol": ["a"]}, "has enrol only"),
        (
            {"scores": [0.5, 0.6], "labels": [1, 0], "enrol": ["a", "a"], "test": ["b", "b"]},
            "row 1: the trial 'a' 'b' is also in .*row 0",
        ),
        ({"scores": np.array([None]), "labels": [1]}, "not an NPZ file of plain arrays"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    refused(path, message)


def test_a_truncated_npz(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, genuine=np.ones(1000), impostor=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:5000])
    refused(path, "is not an NPZ file")


def test_messages_have_no_full_stop(tmp_path: Path) -> None:
    path = written(tmp_path / "scores.txt", [*GOOD, "a2 b1 nan target"])
    with pytest.raises(DataError) as error:
        read_scores(path)
    assert not re.search(r"\.$", str(error.value))
