"""Tables as Markdown, LaTeX and CSV: groups, sections, best values, escaping; tables of reports."""

import csv
import io
import re

import pytest

from helpers.results import HOSTILE, hostile_result, some_run, synthetic_result
from qmargin.evaluation.result import MarginInfo, Measure
from qmargin.report.systems import arrange
from qmargin.report.table import Column, Number, Section, Table, csv_text
from qmargin.report.tables import (
    CSV_COLUMNS,
    csv_table,
    latex_tables,
    markdown_tables,
    other_table,
    paper_layout,
)

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


def test_numbers_without_a_value_never_compete_and_rows_of_another_width_are_refused():
    assert [cell.is_best for row in ODD.body[2:] for cell in row] == [False] * 4
    assert ODD.body[2][1].text == "-" and ODD.body[3][1].text == "∞"
    assert len(ODD.body[3][0].text) == 120
    with pytest.raises(ValueError, match="has 1 cells, but there are 2 columns"):
        Table("t", (Column("a"), Column("b")), (("x",),))
    assert list(GROUPED.files("faces")) == ["faces.md", "faces.tex", "faces.csv"]
    assert [csv_text("=1+1"), csv_text("ArcFace")] == ["'=1+1", "ArcFace"]


# -- tables of a report ---------------------------------------------------------------------------

OURS = some_run(alpha=1.25, scale=35.0)
SUM = some_run(
    "arcface", alpha=None, scale=64.0,
    margins=(MarginInfo("angular", 0.5), MarginInfo("prior", 0.1)),
)  # fmt: skip


def panels():
    return arrange(
        [
            synthetic_result("ArcFace", separation=4.8, run=SUM),
            synthetic_result("Q-Margin", separation=5.4, seed=1, run=OURS),
            synthetic_result("Q-Margin", protocol="IJB-C", num_impostors=5_000, run=OURS),
        ]
    )


def test_latex_has_the_layout_of_the_paper():
    text = latex_tables(panels())
    for line in (
        r"\begin{tabular}{l @{\hskip 1em} rrr @{\hskip 1em} rrrr @{\hskip 1em} rrrr}",
        r"& \multicolumn{3}{c}{Parameters} & \multicolumn{4}{c}{VoxCeleb1-H} & "
        r"\multicolumn{4}{c}{IJB-C} \\",
        r"\cmidrule(lr){2-4} \cmidrule(lr){5-8} \cmidrule(lr){9-12}",
        r"Loss & $\alpha$ & $s$ & $m$ & 1 \% & 0.1 \% & 0.01 \% & 0.001 \% & ",
    ):
        assert line in text
    assert r"ArcFace & - & 64 & 0.5 + 0.1 & " in text
    assert r"Q-Margin & 1.25 & 35 & 0.2 & " in text


def test_best_is_bold_and_what_cannot_be_measured_is_no_number():
    text = paper_layout(panels()).to_latex()
    arc, ours = (row for row in text.splitlines() if re.match("ArcFace|Q-M", row))
    assert r"\textbf" not in arc
    assert ours.count(r"\textbf") == 4  # alone on IJB-C, so nothing is best there
    assert arc.count(" - ") == 1 + 4  # alpha, and all of IJB-C
    assert ours.count("n.m.") == 2
    assert ours.count(r"\textsuperscript{few}") == 3

    table = paper_layout(arrange([synthetic_result("A"), synthetic_result("B")]))
    assert [column.title for column in table.columns][:2] == ["Method", "1 %"]
    assert table.to_latex().count(r"\textbf") == 0  # equal systems: nothing is ahead


def test_measures_of_a_protocol_have_columns():
    result = synthetic_result("A").with_extra(
        {"10-fold accuracy": Measure(0.998, 0.001, "of other folds")}
    )
    table = other_table(arrange([result, synthetic_result("B", seed=1)])[0])
    assert table.columns[-1].title == "10-fold accuracy"
    assert [row[-1].text for row in table.body] == ["0.99800 ± 0.00100", "-"]
    assert table.notes == ("10-fold accuracy: of other folds.",)


def test_csv_gives_back_every_number():
    made = panels()
    rows = list(csv.DictReader(io.StringIO(csv_table(made))))
    assert tuple(rows[0]) == CSV_COLUMNS
    first = made[0].entries[0].result
    tars = [row for row in rows if row["system"] == "ArcFace" and row["metric"] == "tar"]
    for row, point in zip(tars, first.measures.tar, strict=True):
        assert float(row["value"]) == point.tar
        assert float(row["threshold"]) == point.threshold
        assert int(row["false_accepts"]) == point.false_accepts
        assert (row["arm"], row["seed"], row["alpha"]) == ("arcface", "0", "")
        assert (row["margin_kind"], row["margin"]) == ("angular + prior", "0.5 + 0.1")
    lost = [row for row in rows if row["status"] == "not measurable"]
    assert {row["value"] for row in lost} == {""}
    text = markdown_tables(made)
    assert text.count("\n| ArcFace |") == 2  # TARs, and measures without a target
    assert "conservative rule" in text and "not measurable" in text


def test_hostile_results_keep_the_shape_of_the_tables():
    made = arrange([hostile_result(index) for index in range(len(HOSTILE))])
    rows = list(csv.reader(io.StringIO(csv_table(made))))
    assert {len(row) for row in rows} == {len(CSV_COLUMNS)}
    assert not any(cell.startswith(("=", "@")) for row in rows for cell in row)
    latex = paper_layout(made).to_latex()
    bodies = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in bodies[1:]}) == 1
    for table in markdown_tables(made).split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1
