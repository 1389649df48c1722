"""Tables as Markdown, LaTeX and CSV: groups, sections, best values, escaping."""

import csv
import io
import re

import pytest

from qmargin.report.table import Column, Number, Section, Table

GROUPED = Table(
    "TAR (%) of x_1",
    (
        Column("Loss", "left"),
        Column("\u03b1", group=("", "Parameters")),
        Column("scale", group=("", "Parameters"), latex="$s$"),
        Column("10⁻⁴", best="max", group=("Paper", "IJB-B")),
        Column("10⁻⁵", best="max", group=("Paper", "IJB-B")),
        Column("EER", best="min", group=("Paper", "IJB-C")),
    ),
    (
        Section("Reported", competes=False),
        ("F²C†", None, 2, Number(99.0), Number(1.0), Number(0.1)),
        Section("Ours"),
        ("=A|B", Number(1.25), 32, Number(96.381, deviation=0.07), Number(3.0), Number(1.0)),
        ("C", None, 4096, Number(96.379), None, Number(-2.0, interval=(-3.0, 1.0), flag="few")),
    ),
    notes=("50 % & more.",),
    label="grouped",
)
ODD = Table(
    "{ \\ $ 100 %",
    (Column("c{", "left", group=("a&b",)), Column("}", "center", best="max")),
    (("$", "\\"), Section(), ("~^", Number(float("nan"))), ("x" * 500, Number(float("inf")))),
)
WIDE = Table("", tuple(Column(str(i)) for i in range(8)), (tuple(range(8)),))


def check_balanced(tex):
    """Braces, environments and dollars close in the order in which they were opened."""
    depth, opened = 0, []
    plain = re.sub(r"\\\\|\\[{}$]|(?m:^%.*$)", " ", tex)
    for sign in plain:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    for word, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", tex):
        if word == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened and plain.count("$") % 2 == 0


@pytest.mark.parametrize("table", [GROUPED, ODD, WIDE])
def test_every_line_fills_all_columns(table):
    tex = table.to_latex()
    check_balanced(tex)
    for line in tex.splitlines():
        if line.endswith(" \\\\"):
            spans = [int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert line.count(" & ") + 1 + sum(spans) == len(table.columns)
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 1}
    rows = list(csv.reader(io.StringIO(table.to_csv())))
    assert len({len(row) for row in rows}) == 1


def test_latex_has_groups_sections_and_the_best_in_bold():
    tex = GROUPED.to_latex()
    assert "\\caption{TAR (\\%) of x\\_1. 50 \\% \\& more.}\n\\label{tab:grouped}" in tex
    assert "{l @{\\hskip 1em} rr @{\\hskip 1em} rr @{\\hskip 1em} r}" in tex
    assert " &  &  & \\multicolumn{3}{c}{Paper} \\\\\n\\cmidrule(lr){4-6}" in tex
    assert "\\cmidrule(lr){2-3} \\cmidrule(lr){4-5} \\cmidrule(lr){6-6}" in tex
    assert "Loss & $\\alpha$ & $s$ & 10$^{-4}$ & 10$^{-5}$ & EER \\\\" in tex
    assert "\\toprule\n\\multicolumn" not in tex and "\\textit{Ours}" in tex
    assert "F$^{2}$C$^{\\dagger}$ & - & 2 & 99.00 & 1.00 & 0.10" in tex
    assert "{\\boldmath\\textbf{96.38 $\\pm$ 0.07}} & 3.00 & 1.00" in tex  # 3.00 has no rival
    assert "4,096 & \\textbf{96.38} & - & {\\boldmath\\textbf{$-$2.00}} {\\scriptsize(" in tex
    assert "table*" not in tex and "table*" in WIDE.to_latex()


def test_markdown_names_groups_in_column_headings():
    text = GROUPED.to_markdown(level=3)
    assert text.startswith("### TAR (%) of x_1\n\n| Loss | Parameters: \u03b1 |")
    assert "| Paper, IJB-B: 10⁻⁴ | Paper, IJB-B: 10⁻⁵ | Paper, IJB-C: EER |" in text
    assert "| --- | ---: |" in text and "| *Ours* |  |" in text
    assert "| =A\\|B | 1.25 | 32 | **96.38 ± 0.07** | 3.00 | 1.00 |" in text
    assert "**\u22122.00** (\u22123.00 to 1.00) \\[few\\] |" in text
    assert text.endswith("|\n\n50 % \\& more.\n")
    assert GROUPED.to_markdown(level=None).endswith("TAR (%) of x_1. 50 % \\& more.\n")


def test_csv_is_unrounded_and_has_no_formulas():
    rows = list(csv.DictReader(io.StringIO(GROUPED.to_csv())))
    assert [row["section"] for row in rows] == ["Reported", "Ours", "Ours"]
    assert rows[1]["Loss"] == "'=A|B"
    assert rows[1]["Paper, IJB-B: 10⁻⁴"] == "96.381"
    assert rows[1]["Paper, IJB-B: 10⁻⁴ deviation"] == "0.07"
    eer = [rows[2][f"Paper, IJB-C: EER{end}"] for end in ("", " low", " high", " flag")]
    assert eer == ["-2.0", "-3.0", "1.0", "few"]
    assert rows[2]["Paper, IJB-B: 10⁻⁵"] == ""


def test_numbers_without_a_value_never_compete():
    assert [cell.is_best for row in ODD.body[2:] for cell in row] == [False] * 4
    assert ODD.body[2][1].text == "-" and ODD.body[3][1].text == "∞"
    assert len(ODD.body[3][0].text) == 120


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="has 1 cells, but there are 2 columns"):
        Table("t", (Column("a"), Column("b")), (("x",),))


def test_files_are_one_of_each_kind():
    assert list(GROUPED.files("faces")) == ["faces.md", "faces.tex", "faces.csv"]
