"""The examples run as a user would run them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_comparison_prints_a_row_for_each_loss() -> None:
    printed = run_example("compare_losses.py", "--steps", "5")
    assert "\x1b" not in printed  # plain text outside a terminal
    for name in ("ArcFace", "CosFace", "EntMax", "SparseMax", "Q-Margin"):
        assert f"| {name} " in printed


def test_error_rates_of_the_comparison_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from compare_losses import equal_error_rate, tar_at_far

    genuine = np.array([0.9, 0.8, 0.7, 0.2], dtype=np.float32)
    impostor = np.array([0.75, 0.5, 0.3, 0.1], dtype=np.float32)
    assert tar_at_far(genuine, impostor, 0.25) == 0.75  # one impostor may pass: threshold 0.5
    assert tar_at_far(genuine, impostor, 0.1) == 0.5  # none may pass: threshold 0.75
    assert equal_error_rate(genuine, impostor) == 0.25
    assert equal_error_rate(genuine, genuine - 1) == 0.0


@pytest.mark.slow
def test_own_loop_learns() -> None:
    lines = run_example("own_loop.py").splitlines()
    first, last = (float(line.split("loss")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < 0.5 * first


@pytest.mark.slow
def test_all_losses_of_the_comparison_learn() -> None:
    printed = run_example("compare_losses.py")
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    equal_error_rates = [float(cells[3]) for cells in rows[1:]]
    assert len(equal_error_rates) == 5
    assert max(equal_error_rates) < 25.0  # chance is 50
