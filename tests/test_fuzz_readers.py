"""A short run of ``tests/fuzz_readers.py``; CONTRIBUTING names the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_readers.py")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux")
def test_damaged_files_of_every_format_are_errors_of_ours():
    source = str(SCRIPT.parents[1] / "src")
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", "0.33", "--seed", "1"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert " 0 cases" not in found.stdout
