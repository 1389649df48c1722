"""Tables of the paper as Markdown and LaTeX: groups, headings, bold numbers, balanced braces."""

import re

import pytest

from qmargin.paper import numbers
from qmargin.paper.captions import points_of_paper, write_captions
from qmargin.paper.layout import Group, Heading, Table, latex, markdown
from qmargin.paper.tables import setting_table


def check_balanced(tex):
    """Braces and environments close in the order in which they were opened."""
    depth, opened = 0, []
    plain = re.sub(r"\\\\|\\[{}]|(?m:^%.*$)", " ", tex)
    for sign in plain:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    for word, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", tex):
        if word == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    assert plain.replace("\\$", "").count("$") % 2 == 0


def columns_of(line):
    """How many columns a line of a table fills."""
    spans = [int(span) for span in re.findall(r"\\multicolumn\{(\d+)\}", line)]
    return line.count(" & ") + 1 + sum(span - 1 for span in spans)


TABLES = {
    "faces": setting_table("t", numbers.FACE, numbers.FACE_COLUMNS, []),
    "speakers": setting_table("t", numbers.SPEAKER, numbers.SPEAKER_COLUMNS, []),
    "odd names": Table(
        "t",
        "50 % of {x_1} \\ †",
        (Group("a&b", ("c{", "1e-4"), source="here"), Group("", ("d",))),
        (Heading("}"), ("1 +- 2", "$", "s=3"), None, ("2", "\\", "-")),
    ),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_latex_is_balanced_and_every_line_is_as_wide_as_the_table(table):
    tex = latex(table)
    check_balanced(tex)
    lines = [line for line in tex.splitlines() if line.endswith(" \\\\")]
    assert {columns_of(line) for line in lines} == {table.width}


def test_the_balance_is_checked():
    for wrong in ("{", "}{", "\\begin{table}\\end{tabular}", "$1"):
        with pytest.raises((AssertionError, IndexError)):
            check_balanced(wrong)


def test_columns_of_the_paper_are_grouped_as_there():
    tex = latex(TABLES["faces"])
    heads = (
        " & \\multicolumn{3}{c}{Parameters} & \\multicolumn{5}{c}{Benchmarks} & "
        "\\multicolumn{2}{c}{IJB-B} & \\multicolumn{2}{c}{IJB-C} \\\\"
    )
    assert heads in tex
    assert "\\cmidrule(lr){10-11} \\cmidrule(lr){12-13}" in tex
    assert "CPLFW & $10^{-4}$ & $10^{-5}$ & $10^{-4}$ & $10^{-5}$" in tex
    assert "\\multicolumn{9}{c}{Paper}" in tex
    assert "\\resizebox{\\textwidth}{!}{%" in tex
    assert "\\resizebox" not in latex(TABLES["speakers"])
    assert "paper, IJB-B: 1e-4" in markdown(TABLES["faces"])


def test_a_table_escapes_what_others_named():
    group = Group("a&b", ("c",), has_best=True)
    table = Table("t", "50 % of x_1", (group,), (("1",), None, ("2",)))
    assert "50 \\% of x\\_1" in latex(table)
    assert "\\multicolumn{1}{c}{a\\&b}" in latex(table)
    assert "\\textbf{2}" in latex(table)
    assert "| **2** |" in markdown(table)


def test_markdown_escapes_no_underscore_inside_a_word():
    table = Table("t", "of small_conv, *x* and _y", (Group("my_faces", ("c",)),), (("a_b",),))
    assert "| my_faces: c |\n| --- |\n| a_b |" in markdown(table)
    assert "of small_conv, \\*x\\* and \\_y\n" in markdown(table)
    assert "my\\_faces" in latex(table) and "small\\_conv" in latex(table)


def test_the_best_is_bold_among_rows_that_compete():
    group = Group("", ("a",), has_best=True)
    rows = (Heading("others"), ("9",), ("3 +- 1",), ("2",))
    text = markdown(Table("t", "", (group,), rows, best_from=2))
    assert "| 9 |" in text and "| **3 +- 1** |" in text
    assert "{\\boldmath$3 \\pm 1$}" in latex(Table("t", "", (group,), rows, best_from=2))
    assert "**" not in markdown(Table("t", "", (group,), rows, best_from=3))


def test_captions_are_balanced_and_name_the_papers_points(tmp_path):
    words = points_of_paper(numbers.SPEAKER, numbers.SPEAKER_COLUMNS)
    assert "TAR@FAR on VoxCeleb1-H at 1e-3 and 1e-4: ArcFace (s=32, m=0.2) 86.62, 72.08;" in words
    names = ["det.svg", "det.pdf"]
    page, tex = write_captions(tmp_path / "figure", names, f"{words} 5 % {{")
    check_balanced(tex.read_text(encoding="utf-8"))
    assert "{det.pdf}" in tex.read_text(encoding="utf-8")
    assert "(det.svg)" in page.read_text(encoding="utf-8")
