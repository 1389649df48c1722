"""Results pages: benchmarks put their tables into places of a page, and nothing else changes."""

import re
from pathlib import Path

import pytest

from benchmarks.common import Tables
from helpers.commands import run_benchmark
from qmargin.errors import ConfigError

PAGES = Path(__file__).parents[2] / "docs" / "benchmarks"
MADE = {  # by subject: page, and names of tables
    "loss": ("loss.md", "timings evaluations"),
    "metrics": ("metrics.md", "readings stream files"),
    "data": ("data.md", "reading loading indexing"),
    "features": ("data.md", "banks differences stages"),
    "protocols": ("data.md", "protocols"),
    "trials": ("data.md", "trials"),
    "train": ("training.md", "steps shares"),
}


@pytest.mark.parametrize("subject", MADE)
def test_pages_have_a_place_for_every_table(subject: str, tmp_path: Path) -> None:
    name, tables = MADE[subject]
    page = tmp_path / name
    page.write_bytes((PAGES / name).read_bytes())
    made = Tables(subject, page)
    for table in tables.split():
        made.show(table, f"{table} of today", ["what", "ms"], [["ours", "1.5"]])
    made.write(("numpy",))
    text = page.read_text(encoding="utf-8")
    for table in tables.split():
        assert f"<!-- {table}:begin -->\n{table} of today:\n\n| what |" in text
    assert f"<!-- {subject}-machine:begin -->\n- Command: `python -m benchmarks" in text
    assert re.search(r"numpy \d", text)

    def prose(text: str) -> str:
        for place in (*tables.split(), f"{subject}-machine"):
            text = re.sub(rf"<!-- {place}:begin -->.*?<!-- {place}:end -->", "", text, flags=re.S)
        return text

    assert prose(text) == prose((PAGES / name).read_text(encoding="utf-8"))


def test_a_benchmark_rewrites_its_page(tmp_path: Path) -> None:
    page = tmp_path / "loss.md"
    page.write_bytes((PAGES / "loss.md").read_bytes())
    small = "loss --rows 2 --classes 20 --dim 8 --repeats 1 --alphas 1.5 --page"
    assert run_benchmark([*small.split(), str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "forward + backward on [2, 20] float32" in text and "8ac597e" not in text
    assert "**Which is right, where losses differ.**" in text


def test_a_page_without_places_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(ConfigError, match="loss-machine"):
        Tables("loss", page)
    assert page.read_text() == "# Nothing\n"


def test_a_page_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_benchmark(["loss", "--page", "none.md"])
    assert stop.value.code == 2
    assert "none.md is not a file" in capsys.readouterr().err
