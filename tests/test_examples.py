"""The examples run as a user would run them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_comparison_prints_a_row_for_each_loss():
    printed = run_example("compare_losses.py", "--steps", "5")
    assert "\x1b" not in printed  # plain text outside a terminal
    for name in ("ArcFace", "CosFace", "EntMax", "SparseMax", "Q-Margin"):
        assert f"| {name} " in printed


@pytest.mark.slow
def test_own_loop_learns():
    lines = run_example("own_loop.py").splitlines()
    first, last = (float(line.split("loss")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < 0.5 * first


@pytest.mark.slow
def test_all_losses_of_the_comparison_learn():
    printed = run_example("compare_losses.py")
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    equal_error_rates = [float(cells[3].strip(" *")) for cells in rows[2:]]
    assert len(equal_error_rates) == 5 and max(equal_error_rates) < 25.0  # chance is 50
