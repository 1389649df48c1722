"""``python -m benchmarks data`` at a small size."""

import json
from pathlib import Path

import pytest

from benchmarks.data import DataBenchmark
from helpers.commands import run_benchmark
from qmargin.errors import ConfigError


def test_the_benchmark_measures_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--images", 60, "--records", 500, "--batch", 16, "--repeats", 1]
    words = ["data", *map(str, options), "--json", str(tmp_path / "bench.json")]
    assert run_benchmark(words) == 0
    output = capsys.readouterr().out
    assert "records / folder" in output
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["indexing"]["seconds"] > 0
    assert set(record["loading"]) == {"bare", "loader", "first_bytes", "last_bytes"}
    assert len(record["reading"]["rates"]) == 4


def test_impossible_benchmarks_are_refused() -> None:
    for options in ({"images": 0}, {"batch": 9, "images": 8}, {"records": -1}):
        with pytest.raises(ConfigError):
            DataBenchmark(**options)
