"""``docs/results/run.sh``: a call continues what another one left, from its archive alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
name: small
recipe: debug
set: {run.max_steps: 4, data.batch_size: 16}
data: {num_test: 30, samples_test: 4, num_validation: 30, samples_validation: 4}
arms:
  cosface: {scale: [10, 16], margin: 0.2}
  q_margin: {scale: 16, seeds: 1}
seeds: 2
protocol: {replicates: 0}
search: {measure: eer}
"""

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or sys.platform != "linux", reason="for GPU machines"
)


def call(
    folder: Path, runs: str, out: str, *names: str, root: Path = ROOT, **environment: str
) -> str:
    """Run the script of a checkout in a folder; what it printed."""
    given = {
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "JOBS": "1",
        "RUNS": str(folder / runs),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **environment,
    }
    done = subprocess.run(
        ["bash", str(root / "docs" / "results" / "run.sh"), out, "abc", "none", *names],
        cwd=folder,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_call_continues_from_the_archive_of_another(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    first = call(tmp_path, "first", "state", "small.yaml", OPTIONS="--search-only")
    assert "small: status 0" in first
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["state.tar.gz.00"]
    call(tmp_path, "second", "out", "small.yaml", STATE="state")
    log = (tmp_path / "second" / "pages" / "small.log").read_text()
    assert log.count("2 runs, 2 of them complete") == 1  # the search of the first call
    assert "3 runs, 0 of them complete" in log  # two seeds of one arm, one of the other
    page = (tmp_path / "second" / "pages" / "small.md").read_text()
    assert page.startswith("# Small") and "1 or 2 seeds" in page
    names = {path.name.rpartition("-")[0] for path in (tmp_path / "second/small/runs").iterdir()}
    assert names == {"cosface-seed0", "cosface-seed1", "q_margin-seed0"}


def test_pages_show_no_folder_above_the_checkout(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    (root / "docs" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "run.sh", root / "docs" / "results")
    (root / "small.yaml").write_text(SMALL)
    call(root, "runs/experiments", "out", "small.yaml", root=root)
    page = (root / "runs" / "experiments" / "pages" / "small.md").read_text()
    assert "`qmargin compare small.yaml --devices cpu" in page
    assert "--out runs/experiments/small " in page and str(tmp_path) not in page


def test_the_archive_has_the_newest_checkpoints_of_unfinished_runs_that_fit(tmp_path: Path) -> None:
    for name, size in (("done", 100), ("short", 400_000), ("long", 900_000)):
        for step in ("step-000010", "step-000020"):
            folder = tmp_path / "runs" / "e" / "runs" / name / "checkpoints" / step
            folder.mkdir(parents=True)
            (folder / "weights.safetensors").write_bytes(os.urandom(size))
    (tmp_path / "runs/e/runs/done/result.json").write_text("{}")
    (tmp_path / "runs/e/data").mkdir()
    (tmp_path / "runs/e/data/drawn.npy").write_bytes(bytes(10))
    said = call(tmp_path, "runs", "state", MEGABYTES="1")
    assert "not in the archive: ./e/runs/long/checkpoints/step-000020" in said
    call(tmp_path, "other", "again", STATE="state")
    found = {path.relative_to(tmp_path / "other" / "e").as_posix()
             for path in (tmp_path / "other").rglob("*.*") if path.is_file()}  # fmt: skip
    wanted = "runs/short/checkpoints/step-000020/weights.safetensors"
    assert found == {"runs/done/result.json", wanted}
    copied = (tmp_path / "other" / "e" / wanted).read_bytes()
    assert copied == (tmp_path / "runs" / "e" / wanted).read_bytes()


def test_no_experiment_is_begun_after_the_time(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    said = call(tmp_path, "runs", "out", "small.yaml", MINUTES="1", SAVING="60")
    assert "status" not in said and not (tmp_path / "runs" / "small").exists()
