"""Tables and figures of a sweep, from results that are made up."""

import csv
import io
from pathlib import Path

import pytest

from qmargin.recipes import get_recipe
from qmargin.sweep.axes import effective_margin, grid, parse_axis, with_point
from qmargin.sweep.figures import GAP, MARGIN, main_axis, margin_panels, write_figures
from qmargin.sweep.summary import PointSummary, Summary
from qmargin.sweep.tables import csv_table, latex_table, loss_name, markdown_table
from qmargin.sweep.trial import TrialResult
from qmargin.training.recipe import LossPart


def summary(*axes: str, value=lambda point: 0.5, state="finished", seeds: int = 2) -> Summary:
    rows = []
    for point in grid([parse_axis(text) for text in axes]):
        recipe = with_point(get_recipe("debug"), point)
        results = []
        for seed in range(seeds):
            metrics = {"eer": 0.02, "tar@0.01": 0.9, "tar@0.001": value(point) + 0.02 * seed}
            results.append(TrialResult(point, seed, recipe.sha256, state, 6, metrics, 1.0))
        rows.append(PointSummary(point, recipe, tuple(results), seeds))
    return Summary(tuple(rows), "tar@0.001")


def by_scale(point: dict[str, str]) -> float:
    return float(point["loss.scale"]) / 100


def test_markdown_has_mean_deviation_and_gap() -> None:
    text = markdown_table(summary("loss.scale=10,32", value=by_scale))
    first, _, low, high = text.splitlines()[:4]
    assert first.startswith("| Loss | alpha | s | m | m_eff | TAR at 0.01 | TAR at 0.001 | EER |")
    assert "| Q-Margin | 1.25 | 10 | 0.2 | 0.259 |" in low and "11.00 ± 1.41" in low
    assert "**33.00 ± 1.41**" in high and "| 2 |  |" in high


def test_latex_has_the_layout_of_the_paper() -> None:
    text = latex_table(summary("loss.scale=10,32", "optimizer.lr=0.1", value=by_scale))
    assert "\\begin{tabular}{l @{\\hskip 1em} ccccc @{\\hskip 1em} ccc}" in text
    assert "\\multicolumn{5}{c}{Parameters} & \\multicolumn{3}{c}{TAR@FAR and EER}" in text
    assert "\\cmidrule(lr){2-6} \\cmidrule(lr){7-9}" in text
    names = "Loss & $\\alpha$ & $s$ & $m$ & $m_{\\mathrm{eff}}$ & optimizer.lr & $10^{-2}$"
    assert names in text and "\\textbf{33.00$\\pm$1.41}" in text
    assert text.count("\\\\\n") == 4 and "over 2 seeds" in text


def test_csv_has_every_number() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_table(summary("loss.scale=10,32", value=by_scale)))))
    assert len(rows) == 6
    row = next(row for row in rows if row["measure"] == "tar@0.001" and row["scale"] == "32.0")
    assert float(row["mean"]) == pytest.approx(0.33) and row["seeds"] == "2"


def test_rows_that_are_not_complete_are_marked_and_never_best() -> None:
    found = summary("loss.scale=10", state="stopped early")
    assert found.best() is None and found.rows[0].note == "2 stopped early"
    text = latex_table(found)
    assert "Q-Margin$^{\\ast}$" in text and "Not all trainings were complete" in text
    assert "\\textbf" not in text and "**" not in markdown_table(found)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (LossPart(1.0, "angular", 0.5, 64.0), "ArcFace"),
        (LossPart(1.0, "cosine", 0.5, 64.0), "CosFace"),
        (LossPart(1.0, "prior", 0.5, 64.0), "CosFace"),
        (LossPart(1.5, "angular", 0.5, 64.0), "EntMax"),
        (LossPart(2.0, "angular", 0.5, 64.0), "SparseMax"),
        (LossPart(1.5, "prior", 0.2, 32.0), "Q-Margin"),
        (LossPart.from_preset("adaface"), "adaface margin"),
    ],
)
def test_losses_have_their_published_names(loss: LossPart, name: str) -> None:
    assert loss_name(loss) == name


def peak(point: dict[str, str]) -> float:
    """A measure that depends on the effective margin alone, with its best at 0.3."""
    gap = effective_margin(with_point(get_recipe("debug"), point))
    assert gap is not None
    return 0.9 - abs(gap - 0.3)


def test_what_the_effective_margin_explains_is_seen() -> None:
    axes = ("loss.alpha=1.25,1.5", "loss.scale=10,32", "loss.margin=0.05,0.1,0.15,0.2,0.25,0.3")
    found = summary(*axes, value=peak, seeds=1)
    panels = margin_panels(found)
    assert list(panels) == [MARGIN, GAP] and len(panels[GAP]) == 4
    places = sorted(point for line in panels[GAP].values() for point in line)
    left = [height for place, height, _ in places if place <= 0.3]
    assert left == sorted(left)  # all lines are one over m_eff, and are not over m
    places = sorted(point for line in panels[MARGIN].values() for point in line)
    heights = [height for place, height, _ in places if place <= 0.15]
    assert heights != sorted(heights)


def test_figures_are_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the figures extra")
    assert main_axis(summary("loss.alpha=1.25,1.5", "loss.scale=10,32")) == "loss.scale"
    assert main_axis(summary("loss.preset=arcface,cosface")) is None
    assert write_figures(summary("loss.preset=arcface,cosface"), tmp_path / "none") == []
    files = write_figures(summary("loss.scale=10,32", "loss.margin=0.1,0.9"), tmp_path)
    assert {path.name for path in files} == {
        f"{name}.{kind}" for name in ("sensitivity", "effective-margin") for kind in ("svg", "pdf")
    }
