import json
from pathlib import Path

import pytest

from helpers.results import hostile_result, synthetic_result, write_results
from qmargin.errors import ConfigError, DataError
from qmargin.report import ReportOptions, write, write_report


def test_files_of_a_report(tmp_path: Path) -> None:
    paths = write_results(tmp_path, synthetic_result("A"), synthetic_result("B", seed=1))
    written = write_report(paths, tmp_path / "out", ReportOptions(has_figures=False))
    names = ["index.html", "metrics.json", "tables.md", "tables.tex", "tables.csv"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    panel = metrics["panels"][0]
    assert [system["name"] for system in panel["systems"]] == ["A", "B"]
    assert panel["systems"][0]["measures"]["tar"][0]["far_target"] == 1e-2
    assert len(panel["differences"]) == 5


def test_hostile_results_can_be_written(tmp_path: Path) -> None:
    paths = write_results(tmp_path, *[hostile_result(index) for index in range(7)])
    for path in write_report(paths, tmp_path / "out", ReportOptions(has_figures=False)):
        path.read_text(encoding="utf-8")  # no lone surrogate went through


def test_nothing_is_written_when_an_input_is_bad(tmp_path: Path) -> None:
    paths = write_results(tmp_path, synthetic_result())
    journal = tmp_path / "journal.jsonl"
    journal.write_text("no\nno\n")
    with pytest.raises(DataError):
        write_report(paths, tmp_path / "out", ReportOptions(journals=(journal,), has_figures=False))
    assert not (tmp_path / "out").exists()


def test_levels_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"level is 1\.5"):
        ReportOptions(level=1.5)
    monkeypatch.setattr(write, "has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"qmargin\[figures\]"):
        ReportOptions(has_figures=True)
    assert ReportOptions(has_figures=False).level == 0.95


def test_the_page_of_five_systems_of_a_million_trials_is_small(tmp_path: Path) -> None:
    keys = tuple(f"id{i:05d}/video/{i:05d}.wav" for i in range(20))
    results = [
        synthetic_result(
            f"system {i}",
            seed=i,
            num_genuine=50_000,
            num_impostors=950_000,
            num_replicates=1000,
            groups=("a", "b", "c", "d"),
            keys=keys,
        )
        for i in range(5)
    ]
    paths = write_results(tmp_path, *results)
    written = write_report(paths, tmp_path / "out", ReportOptions(has_figures=False))
    assert written[0].stat().st_size < 600_000
