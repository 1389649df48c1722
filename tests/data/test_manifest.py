"""CSV manifests: names of columns, bad lines with their numbers."""

from pathlib import Path

import pytest

from helpers.pictures import jpeg
from qmargin.data import open_dataset
from qmargin.errors import DataError


def store(folder: Path, text: str, name: str = "list.csv") -> Path:
    for number in range(4):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    (folder / name).write_bytes(text.encode("utf-8"))
    return folder / name


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("path,label\n0.jpg,4\n1.jpg,0\n", [4, 0]),
        ("label,other,file\n4,x,0.jpg\n0,y,1.jpg\n", [4, 0]),
        ("\ufeffPath,Label\r\n0.jpg,4\r\n\r\n1.jpg, 0\r\n", [4, 0]),
        ("path,identity\n0.jpg,zoe\n1.jpg,ada\n", [1, 0]),
        ('filename,subject\n"0.jpg","zoe, the first"\n1.jpg,ada\n', [1, 0]),
    ],
)
def test_columns_are_found_by_their_names(text: str, labels: list[int], tmp_path: Path) -> None:
    dataset = open_dataset(store(tmp_path, text))
    assert dataset.labels.tolist() == labels
    assert [dataset.read(row) for row in range(2)] == [jpeg(0), jpeg(1)]


def test_tabs_separate_in_a_tsv(tmp_path: Path) -> None:
    dataset = open_dataset(store(tmp_path, "path\tidentity\n0.jpg\ta,b\n", "list.tsv"))
    assert dataset.class_name(0) == "a,b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n0.jpg,0\n1.jpg,x\n", "line 3: the label 'x' is not an integer"),
        ("path,label\n0.jpg,-1\n", "line 2: the label '-1'"),
        ("path,label\n0.jpg,1.5\n", "line 2: the label '1.5'"),
        ("path,label\n0.jpg,99999999999\n", "line 2: the label"),
        ("path,label\n0.jpg\n", "line 2: 1 fields for the 2 of the header"),
        ("path,label\n0.jpg,0\nmissing.jpg,1\n", "line 3: .*missing.jpg cannot be read"),
        ("path,age\n0.jpg,0\n", "has the columns path, age; it needs one of label"),
        ("a,label\n0.jpg,0\n", "it needs one of path"),
        ("path,label\n", "no rows"),
        ("", "no rows"),
        ("path,label\n\0,0\n", "line 2|after line"),
    ],
)
def test_bad_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(store(tmp_path, text))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path, "")
    path.write_bytes("path,identity\n0.jpg,Zoë\n".encode("latin-1"))
    with pytest.raises(DataError, match="save it as CSV in UTF-8"):
        open_dataset(path)


def test_the_line_of_a_label_is_known(tmp_path: Path) -> None:
    path = store(tmp_path, "path,label\n0.jpg,4\n\n1.jpg,0\n")
    assert open_dataset(path).source(1) == f"{path}, line 4"
