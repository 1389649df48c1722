from pathlib import Path

import pytest

from qmargin.errors import DataError
from qmargin.evaluation.trials import read_trials


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "lines",
    [
        ("a b target", "a c nontarget"),
        ("1 a b", "0 a c"),
        ("a b 1", "a c 0"),
        ("test,enrol,label", "b,a,same", "c,a,different"),
    ],
)
def test_orders_are_found_out(tmp_path: Path, lines: tuple[str, ...]) -> None:
    trials = read_trials(written(tmp_path / "t.txt", *lines))
    assert [trials.keys.trial(row) for row in range(len(trials))] == [("a", "b"), ("a", "c")]
    assert trials.is_genuine is not None
    assert trials.is_genuine.tolist() == [True, False]
    assert trials.trials_sha256() is not None


def test_a_list_without_labels(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path / "t.txt", "a b"))
    assert trials.is_genuine is None
    assert trials.trials_sha256() is None


def test_numbered_templates_are_told_from_labels(tmp_path: Path) -> None:
    """IJB lists ``template template label``; the first template may be number 1 for long."""
    path = written(tmp_path / "t.txt", "1 5 0", "1 7 1", "2 5 1")
    trials = read_trials(path)
    assert trials.keys.trial(2) == ("2", "5")
    with pytest.raises(DataError, match="enrol-test-label or as label-enrol-test"):
        read_trials(written(path, "1 5 0", "0 7 1"))
    trials = read_trials(path, format="label-enrol-test")
    assert trials.keys.trial(0) == ("5", "0")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b target", "line 3: the trial 'a' 'b' is also in .*line 1"),
        ("a d maybe", "line 3: the label 'maybe'"),
        ("a d", "line 3: 2 columns where 3"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "t.txt", "a b target", "a c nontarget", line)
    with pytest.raises(DataError, match=message) as error:
        read_trials(path)
    assert str(path) in str(error.value)


def test_one_subject_column_is_not_enough(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "enrol,test,label,enrol_subject", "a,b,1,ann")
    with pytest.raises(DataError, match="line 2: the file has the column enrol_subject only"):
        read_trials(path)


@pytest.mark.parametrize("labels", ["10", "01"])
def test_a_pair_with_both_labels_is_refused(tmp_path: Path, labels: str) -> None:
    path = tmp_path / "trials.txt"
    path.write_text(f"x y 0\na b {labels[0]}\nb a {labels[1]}\n")
    with pytest.raises(DataError, match=r"line 3: the trial 'b' 'a' is .*line 2"):
        read_trials(path)


def test_pairs_in_both_orders_and_self_pairs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trials.txt"
    path.write_text("x y 0\na b 1\nb a 1\na a 1\ny x 0\n")
    assert read_trials(path).pair_counts == (2, 1)
