import csv
import io
import re

import pytest

from helpers.results import HOSTILE, hostile_result, synthetic_result
from qmargin.report.systems import Panel, arrange
from qmargin.report.tables import (
    CSV_COLUMNS,
    csv_table,
    csv_text,
    latex_table,
    latex_text,
    markdown_tables,
    markdown_text,
)

CARD = {"alpha": "1.25", "scale": "35", "margin": "0.2"}


def panels() -> list[Panel]:
    return arrange(
        [
            synthetic_result("ArcFace", separation=4.8, card={"scale": "64", "margin": "0.5"}),
            synthetic_result("Q-Margin", separation=5.4, seed=1, card=CARD),
            synthetic_result("Q-Margin", protocol="IJB-C", num_impostors=5_000, card=CARD),
        ]
    )


def test_latex_has_the_layout_of_the_paper() -> None:
    text = latex_table(panels())
    for line in (
        r"\begin{tabular}{l @{\hskip 1em} ccc @{\hskip 1em} cccc @{\hskip 1em} cccc}",
        r"& \multicolumn{3}{c}{Parameters} & \multicolumn{4}{c}{VoxCeleb1-H} & "
        r"\multicolumn{4}{c}{IJB-C} \\",
        r"\cmidrule(lr){2-4} \cmidrule(lr){5-8} \cmidrule(lr){9-12}",
        r"Loss & $\alpha$ & $s$ & $m$ & $10^{-2}$ & $10^{-3}$ & $10^{-4}$ & $10^{-5}$ & ",
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
    ):
        assert line in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line]
    assert {row.count("&") for row in rows[1:]} == {11}


def test_best_is_bold_and_what_cannot_be_measured_is_no_number() -> None:
    arc, ours = (row for row in latex_table(panels()).splitlines() if re.search("Face|Q-M", row))
    assert r"\textbf" not in arc
    assert ours.count(r"\textbf") == 4  # alone on IJB-C, so nothing is best there
    assert arc.count(" - ") == 1 + 4  # alpha, and all of IJB-C
    assert ours.count("n.m.") == 2
    assert ours.count(r"$^{\ast}$") == 3


def test_equal_texts_are_equally_bold() -> None:
    text = latex_table(arrange([synthetic_result("A"), synthetic_result("B")]))
    assert text.count(r"\textbf") == 8


def test_csv_gives_back_every_number() -> None:
    made = panels()
    rows = list(csv.DictReader(io.StringIO(csv_table(made))))
    assert tuple(rows[0]) == CSV_COLUMNS
    first = made[0].entries[0].result
    tars = [row for row in rows if row["system"] == "ArcFace" and row["metric"] == "tar"]
    for row, point in zip(tars, first.metrics.tar, strict=True):
        assert float(row["value"]) == point.tar
        assert float(row["threshold"]) == point.threshold
        assert int(row["false_accepts"]) == point.false_accepts
    lost = [row for row in rows if row["status"] == "not measurable"]
    assert {row["value"] for row in lost} == {""}


def test_markdown_has_a_row_for_each_system_and_names_the_rule() -> None:
    text = markdown_tables(panels())
    assert text.count("\n| ArcFace |") == 1
    assert text.count("\n| Q-Margin |") == 2
    assert "conservative rule" in text
    assert "not measurable" in text


@pytest.mark.parametrize("attack", HOSTILE)
def test_names_stay_in_their_cell(attack: str) -> None:
    assert "\n" not in latex_text(attack) + markdown_text(attack) + csv_text(attack)
    assert not re.search(r"(?<!\\)[|<`*_\[]", markdown_text(attack))
    assert not re.search(r"(?<!\\)[&%#_]", latex_text(attack))
    assert csv_text(attack)[0] not in "=+-@"


def test_hostile_results_keep_the_shape_of_the_tables() -> None:
    made = arrange([hostile_result(index) for index in range(len(HOSTILE))])
    rows = list(csv.reader(io.StringIO(csv_table(made))))
    assert {len(row) for row in rows} == {len(CSV_COLUMNS)}
    bodies = [line for line in latex_table(made).splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in bodies[1:]} == {4}
    lines = [line for line in markdown_tables(made).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
