"""Tables of a report as Markdown, LaTeX and CSV."""

import csv
import io
import re

from helpers.results import HOSTILE, hostile_result, some_run, synthetic_result
from qmargin.evaluation.result import MarginInfo, Measure
from qmargin.report.systems import Panel, arrange
from qmargin.report.tables import (
    CSV_COLUMNS,
    csv_table,
    latex_tables,
    markdown_tables,
    other_table,
    paper_layout,
)

OURS = some_run(alpha=1.25, scale=35.0)
SUM = some_run(
    "arcface", alpha=None, scale=64.0,
    margins=(MarginInfo("angular", 0.5), MarginInfo("prior", 0.1)),
)  # fmt: skip


def panels() -> list[Panel]:
    return arrange(
        [
            synthetic_result("ArcFace", separation=4.8, run=SUM),
            synthetic_result("Q-Margin", separation=5.4, seed=1, run=OURS),
            synthetic_result("Q-Margin", protocol="IJB-C", num_impostors=5_000, run=OURS),
        ]
    )


def test_latex_has_the_layout_of_the_paper() -> None:
    text = latex_tables(panels())
    for line in (
        r"\begin{tabular}{l @{\hskip 1em} rrr @{\hskip 1em} rrrr @{\hskip 1em} rrrr}",
        r"& \multicolumn{3}{c}{Parameters} & \multicolumn{4}{c}{VoxCeleb1-H} & "
        r"\multicolumn{4}{c}{IJB-C} \\",
        r"\cmidrule(lr){2-4} \cmidrule(lr){5-8} \cmidrule(lr){9-12}",
        r"Loss & $\alpha$ & $s$ & $m$ & 1 \% & 10$^{-3}$ & 10$^{-4}$ & 10$^{-5}$ & ",
    ):
        assert line in text
    assert r"ArcFace & - & 64 & 0.5 + 0.1 & " in text
    assert r"Q-Margin & 1.25 & 35 & 0.2 & " in text


def test_best_is_bold_and_what_cannot_be_measured_is_no_number() -> None:
    text = paper_layout(panels()).to_latex()
    arc, ours = (row for row in text.splitlines() if re.match("ArcFace|Q-M", row))
    assert r"\textbf" not in arc
    assert ours.count(r"\textbf") == 4  # alone on IJB-C, so nothing is best there
    assert arc.count(" - ") == 1 + 4  # alpha, and all of IJB-C
    assert ours.count("n.m.") == 2
    assert ours.count(r"\textsuperscript{few}") == 3


def test_tables_without_runs_have_no_parameters() -> None:
    table = paper_layout(arrange([synthetic_result("A"), synthetic_result("B")]))
    assert [column.title for column in table.columns][:2] == ["Method", "1 %"]
    assert table.to_latex().count(r"\textbf") == 8  # equal texts are equally bold


def test_measures_of_a_protocol_have_columns() -> None:
    result = synthetic_result("A").with_extra(
        {"10-fold accuracy": Measure(0.998, 0.001, "of other folds")}
    )
    table = other_table(arrange([result, synthetic_result("B", seed=1)])[0])
    assert table.columns[-1].title == "10-fold accuracy"
    assert [row[-1].text for row in table.body] == ["0.99800 ± 0.00100", "-"]
    assert table.notes == ("10-fold accuracy: of other folds.",)


def test_csv_gives_back_every_number() -> None:
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


def test_markdown_has_a_row_for_each_system_and_names_the_rule() -> None:
    text = markdown_tables(panels())
    assert text.count("\n| ArcFace |") == 2  # TARs, and measures without a target
    assert text.count("\n| Q-Margin |") == 4
    assert "conservative rule" in text
    assert "not measurable" in text


def test_hostile_results_keep_the_shape_of_the_tables() -> None:
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
