import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qmargin.cli.main import build_parser, main


def run_qmargin(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qmargin", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_help_names_the_commands() -> None:
    result = run_qmargin("--help")
    assert result.returncode == 0
    assert "bench" in result.stdout


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "qmargin 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["bench"], ["fly"], ["bench", "loss", "--rows", "0"], ["bench", "loss", "--alphas", "-1"]],
)
def test_usage_errors_exit_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: qmargin" in capsys.readouterr().err


def test_our_errors_are_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loss", "--rows", "1", "--classes", "2", "--device", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("qmargin: error: device 'nowhere'")
    assert error.count("\n") == 1


def test_every_option_of_bench_loss_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    text = page.read_text(encoding="utf-8")
    arguments = build_parser().parse_args(["bench", "loss"])
    for name in vars(arguments):
        assert name == "run" or f"`--{name.replace('_', '-')}`" in text


def test_bench_loss_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    small = ["--rows", "4", "--classes", "50", "--dim", "8", "--repeats", "2"]
    assert main(["bench", "loss", *small, "--alphas", "1", "1.5", "3", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["settings"]["rows"] == 4
    for timing in record["timings"]:
        assert timing["name"] in printed
        assert len(timing["seconds_all"]) == 2
        assert timing["seconds"] > 0
    for count in record["evaluations"]:
        assert count["max_evaluations"] >= count["mean_evaluations"] >= 1
