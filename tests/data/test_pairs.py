"""Lists of pairs: LFW's own, and CSV."""

from pathlib import Path

import pytest

from qmargin.data.readers.lists import read_pairs
from qmargin.errors import DataError

LFW = "2\t1\nAda\t1\t12\nAda\t1\tBea_X\t3\nBea_X\t1\t2\nBea_X\t2\tAda\t1\n"


def store(folder: Path, text: str, name: str = "pairs.txt") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_lfw_pairs_have_names_labels_and_folds(tmp_path: Path) -> None:
    pairs = read_pairs(store(tmp_path, LFW))
    assert len(pairs) == 4
    assert (pairs.first[0], pairs.second[0]) == ("Ada/Ada_0001.jpg", "Ada/Ada_0012.jpg")
    assert (pairs.first[1], pairs.second[1]) == ("Ada/Ada_0001.jpg", "Bea_X/Bea_X_0003.jpg")
    assert pairs.is_genuine.tolist() == [True, False, True, False]
    assert pairs.folds is not None
    assert pairs.folds.tolist() == [0, 0, 1, 1]
    png = read_pairs(store(tmp_path, LFW), extension="png")
    assert png.second[3] == "Ada/Ada_0001.png"


def test_a_development_list_has_one_count_and_no_folds(tmp_path: Path) -> None:
    pairs = read_pairs(store(tmp_path, "1\nAda\t1\t2\nAda\t1\tBea\t3\n"))
    assert pairs.folds is None
    assert pairs.is_genuine.tolist() == [True, False]


def test_csv_pairs(tmp_path: Path) -> None:
    text = 'a,b,label,fold\nx.jpg,y.jpg,1,0\n"x,1.jpg",z.jpg,nontarget,3\n'
    pairs = read_pairs(store(tmp_path, text, "pairs.csv"))
    assert pairs.first == ("x.jpg", "x,1.jpg")
    assert pairs.is_genuine.tolist() == [True, False]
    assert pairs.folds is not None
    assert pairs.folds.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("2\t1\nAda\t1\t2\n", "p.txt", "has 1 pairs and its first line promises 2 folds of 2 x 1"),
        ("1\t1\nAda\t1\t2\nAda\tx\tBea\t3\n", "p.txt", "line 3: 'Ada x Bea 3' is not a pair"),
        ("Ada 1\n", "p.txt", "line 1"),
        ("", "p.txt", "no pairs"),
        ("a,b,label\n", "p.csv", "no pairs"),
        ("a,b,label\nx,y,2\n", "p.csv", "line 2: the label '2' is not 0 or 1"),
        ("a,b\nx,y\n", "p.csv", "one of label"),
        ("a,b,label,fold\nx,y,1,-1\n", "p.csv", "line 2: the fold '-1'"),
    ],
)
def test_bad_lists_are_named(text: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_pairs(store(tmp_path, text, name))
