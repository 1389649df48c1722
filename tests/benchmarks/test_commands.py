"""``python -m benchmarks``: what its parser refuses, what is documented, and what is shipped."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import build_parser, common
from benchmarks.common import Tables
from helpers.commands import run_benchmark
from qmargin.cli.options import commands_of
from qmargin.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "benchmarks"
SUBJECTS = commands_of(build_parser())
MADE = {  # by subject: page, and names of tables
    "loss": ("loss.md", "timings evaluations"),
    "metrics": ("metrics.md", "readings stream files"),
    "data": ("data.md", "reading loading indexing"),
    "features": ("data.md", "banks differences stages"),
    "protocols": ("data.md", "protocols"),
    "trials": ("data.md", "trials"),
    "synthetic": ("data.md", "synthetic"),
    "train": ("training.md", "steps shares"),
    "scaling": (
        "scaling.md",
        "scaling-predictions scaling-calls scaling-candidates scaling-overlap scaling-assumptions "
        "scaling-shards scaling-fit",
    ),
    "scaling-check": ("scaling.md", "scaling-check"),
}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "choose from loss, head"),
        ("haed", "did you mean 'head'?"),
        ("loss --rows 0", "0 is not at least 1"),
        ("loss --alphas -1", "-1"),
        ("loss --json none/r.json", "none/r.json is not a file in an existing folder"),
        ("metrics --json .", ". is not a file in an existing folder"),
        ("loss --page none.md", "none.md is not a file"),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(words, named, capsys):
    with pytest.raises(SystemExit) as stop:
        run_benchmark(words.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: python -m benchmarks") and named in told


@pytest.mark.parametrize(
    "words",
    [
        "loss",
        "head",
        "features",
        "train",
        "sizes",
        "few-classes",
        "wide-support",
        "omniglot-recipe x.npz",
        "scaling --measure",
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_benchmark([*words.split(), "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "'cuda'" in told


def test_settings_that_contradict_each_other_are_one_line(capsys):
    assert run_benchmark(["metrics", "--scores", "1"]) == 2
    told = capsys.readouterr().err
    assert "genuine=1000000 of scores=1" in told and told.count("\n") == 1


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_and_option_is_documented(subject):
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in page.split("\n## ")[1:]]
    texts = [text for heading, _, text in blocks if subject in heading.split(", ")]
    assert len(texts) == 1, f"no heading, or several, of docs/benchmarks/index.md name {subject}"
    for option in SUBJECTS[subject]._option_string_actions:
        assert option in ("-h", "--help") or f"`{option}`" in texts[0], option


def test_the_wheel_has_no_benchmarks():
    """Packages are found below ``src`` and nowhere else."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[tool.setuptools.packages.find]\nwhere = ["src"]\n' in settings
    assert not list((ROOT / "src").rglob("bench*"))


def test_workers_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(common.BackendError, match="KeyError"):  # what a job without a step ends in
        common.run_in_process("benchmarks.trials", {}, what="it", remedy="none")


def test_the_worker_of_metrics_does_not_import_torch():
    """Its peak of memory would have it."""
    code = "import sys, benchmarks.metrics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("subject", MADE)
def test_pages_have_a_place_for_every_table(subject, tmp_path):
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


def test_a_benchmark_rewrites_its_page(tmp_path):
    page = tmp_path / "loss.md"
    page.write_bytes((PAGES / "loss.md").read_bytes())
    small = "loss --rows 2 --classes 20 --dim 8 --repeats 1 --alphas 1.5 --page"
    assert run_benchmark([*small.split(), str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "forward + backward on [2, 20] float32" in text and "8ac597e" not in text
    assert "**Accuracy of losses that differ.**" in text


def test_a_page_without_places_is_refused_before_anything_is_measured(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(ConfigError, match="loss-machine"):
        Tables("loss", page)
    assert page.read_text() == "# Nothing\n"
