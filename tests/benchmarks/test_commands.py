"""``python -m benchmarks``: what its parser refuses, what is documented, and what is shipped."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import build_parser, common
from helpers.commands import run_benchmark
from qmargin.cli.options import commands_of

ROOT = Path(__file__).parents[2]
SUBJECTS = commands_of(build_parser())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "choose from loss, head"),
        ("haed", "did you mean 'head'?"),
        ("loss --rows 0", "0 is not at least 1"),
        ("loss --alphas -1", "-1"),
        ("loss --json none/r.json", "none/r.json is not a file in an existing folder"),
        ("metrics --json .", ". is not a file in an existing folder"),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_benchmark(words.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: python -m benchmarks") and named in told


@pytest.mark.parametrize(
    "words",
    ["loss", "head", "features", "train", "few-classes", "wide-support", "omniglot-recipe x.npz"],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_benchmark([*words.split(), "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "'cuda'" in told


def test_settings_that_contradict_each_other_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_benchmark(["metrics", "--scores", "1"]) == 2
    told = capsys.readouterr().err
    assert "genuine=1000000 of scores=1" in told and told.count("\n") == 1


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_and_option_is_documented(subject: str) -> None:
    page = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in page.split("\n## ")[1:]]
    texts = [text for heading, _, text in blocks if subject in heading.split(", ")]
    assert len(texts) == 1, f"no heading, or several, of docs/benchmarks/index.md name {subject}"
    for option in SUBJECTS[subject]._option_string_actions:
        assert option in ("-h", "--help") or f"`{option}`" in texts[0], option


def test_the_wheel_has_no_benchmarks() -> None:
    """Packages are found below ``src`` and nowhere else."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[tool.setuptools.packages.find]\nwhere = ["src"]\n' in settings
    assert not list((ROOT / "src").rglob("bench*"))


@pytest.mark.parametrize("module", ["metrics", "data", "protocols", "trials"])
def test_workers_are_found_from_any_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(common.BackendError, match="KeyError"):  # what a job without a step ends in
        common.run_in_process(f"benchmarks.{module}", {}, what="it", remedy="none")


def test_the_worker_of_metrics_does_not_import_torch() -> None:
    """Its peak of memory would have it."""
    code = "import sys, benchmarks.metrics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
