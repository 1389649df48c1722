from pathlib import Path

import pytest

from qmargin.errors import DataError
from qmargin.evaluation.score_files import ScoreSet, read_scores
from qmargin.evaluation.subjects import Subjects, find_subjects, read_mapping


def scored(tmp_path: Path, *lines: str) -> ScoreSet:
    path = tmp_path / "s.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_scores(path)


def sides(subjects: Subjects | None) -> list[tuple[str, str]]:
    assert subjects is not None
    codes = zip(subjects.enrol, subjects.test, strict=True)
    return [(subjects.names[a], subjects.names[b]) for a, b in codes]


PATHS = ("ann/1 ann/2 .5 1", "ann/1 bob/1 .1 0")


@pytest.mark.parametrize("how", ["auto", "path"])
@pytest.mark.parametrize("root", ["", "/", "test/", "/data/wav/"])
def test_folders_that_agree_with_the_labels_are_subjects(
    tmp_path: Path, how: str, root: str
) -> None:
    lines = [line.replace("ann", f"{root}ann").replace("bob", f"{root}bob") for line in PATHS]
    subjects = find_subjects(scored(tmp_path, *lines), how)
    assert sides(subjects) == [("ann", "ann"), ("ann", "bob")]
    assert subjects is not None
    assert not subjects.are_files


@pytest.mark.parametrize(
    "lines",
    [
        ("wav/1 wav/2 .5 1", "wav/1 wav/3 .1 0"),  # one folder for all
        ("x/1 y/2 .5 1", "x/1 z/3 .1 0"),  # a folder per video
        ("ann/1 ann2 .5 1", "ann/1 bob/3 .1 0"),  # a name without a folder
        ("wav/ann/1 wav/ann/2 .5 1", "wav/ann/1 wav/3 .1 0"),  # a name without one of its own
    ],
)
def test_folders_that_contradict_a_label_are_not(tmp_path: Path, lines: tuple[str, ...]) -> None:
    score_set = scored(tmp_path, *lines)
    subjects = find_subjects(score_set)
    assert subjects is not None
    assert subjects.are_files
    assert "too narrow" in subjects.note
    with pytest.raises(DataError, match=r"s\.txt, line|has no folder"):
        find_subjects(score_set, "path")


def test_none_means_files(tmp_path: Path) -> None:
    subjects = find_subjects(scored(tmp_path, *PATHS), "none")
    assert sides(subjects) == [("ann/1", "ann/2"), ("ann/1", "bob/1")]


def test_columns_go_before_folders_and_a_file_before_columns(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(
        "enrol,test,score,label,subject1,subject2\nx/1,y/2,.5,1,zoe,zoe\nx/1,x/3,.1,0,zoe,ann\n"
    )
    score_set = read_scores(path)
    subjects = find_subjects(score_set)
    assert sides(subjects) == [("zoe", "zoe"), ("zoe", "ann")]
    assert subjects is not None
    assert subjects.names == ("ann", "zoe")
    mapping = {"x/1": "q", "y/2": "q", "x/3": "p"}
    assert sides(find_subjects(score_set, mapping=mapping)) == [("q", "q"), ("q", "p")]
    with pytest.raises(DataError, match=r"s\.csv, line 3: 'x/3' has no subject"):
        find_subjects(score_set, mapping={"x/1": "q", "y/2": "q"})
    with pytest.raises(DataError, match=r"s\.csv, line 3: the trial is impostor.*'q' and 'q'"):
        find_subjects(score_set, mapping=dict.fromkeys(mapping, "q"))
    with pytest.raises(DataError, match=r"s\.csv, line 2: the trial is genuine.*'x/1' and 'y/2'"):
        find_subjects(score_set, mapping={key: key for key in mapping})


def test_a_file_compared_with_itself_is_no_impostor(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"s\.txt, line 2: the trial is impostor"):
        find_subjects(scored(tmp_path, "a b .5 1", "c c .1 0"))


def test_without_names_there_are_no_subjects(tmp_path: Path) -> None:
    assert find_subjects(scored(tmp_path, ".5 target")) is None


@pytest.mark.parametrize(
    "content", ["subject,group\na,x\nb,y\n", "a,x\nb,y\n", "a x\n\nb y\na x\n", "a\tx\nb\ty\n"]
)
def test_mappings(tmp_path: Path, content: str) -> None:
    path = tmp_path / "groups.csv"
    path.write_text(content)
    mapping, source = read_mapping(path, role="groups")
    assert mapping == {"a": "x", "b": "y"}
    assert source.role == "groups"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("subject,group\n", "is empty"),
        ("a,x\nb\n", "line 2: 'b' is not a name and a group"),
        ("a,x\nb,\n", "line 2: 'b,' is not a name and a group"),
        ("a,x\na,y\n", "line 2: 'a' is 'y', but was 'x' before"),
    ],
)
def test_bad_mappings(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "groups.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_mapping(path, role="groups")
