import json
import math
from pathlib import Path

import pytest

from qmargin.errors import DataError
from qmargin.report.journal import MOST_POINTS, read_journal
from qmargin.report.plots import support_chart


def write_journal(path: Path, rows: list[dict], end: str = "\n") -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + end, encoding="utf-8")
    return path


def test_long_journals_keep_their_peak_and_their_mean(tmp_path: Path) -> None:
    rows = [
        {"step": step, "support_mean": float(step % 7), "support_max": 10.0} for step in range(7000)
    ]
    rows[4321]["support_max"] = 7976.0
    journal = read_journal(write_journal(tmp_path / "journal.jsonl", rows))
    assert len(journal.steps) <= MOST_POINTS
    assert max(journal.largest) == 7976.0
    assert sum(journal.mean) / len(journal.mean) == pytest.approx(3.0, abs=0.05)
    assert journal.num_steps == 7000


def test_other_lines_and_a_cut_last_line_are_passed_over(tmp_path: Path) -> None:
    rows = [{"epoch": 1}, {"step": 1, "support_mean": 4}, {"step": 2, "support_mean": float("nan")}]
    path = write_journal(tmp_path / "journal.jsonl", rows, '\n{"step": 3, "supp')
    journal = read_journal(path)
    assert (journal.steps, journal.mean) == ((1.0,), (4.0,))


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 1, "support_mean": 2}\n{oops\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"journal\.jsonl, line 2 is not JSON"):
        read_journal(path)
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 is not a JSON object"):
        read_journal(path)
    path.write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="0 lines with a step"):
        read_journal(path)


@pytest.mark.parametrize(
    "row", [{"support_mean": 0.0}, {"support_max": 1.0}, {"support_mean": 1e7, "support_max": 1e9}]
)
def test_one_step_can_be_drawn(tmp_path: Path, row: dict) -> None:
    journal = read_journal(write_journal(tmp_path / "j.jsonl", [{"step": 0, **row}]))
    chart = support_chart([journal])
    assert all(math.isfinite(x + y) for line in chart.shapes["lines"][0].values() for x, y in line)
