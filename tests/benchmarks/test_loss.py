"""``python -m benchmarks loss`` at a small size."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loss import (
    LossBenchmark,
    cosine_batch,
    count_evaluations,
    entmax_contenders,
    own_contenders,
    run_loss_benchmark,
    time_contenders,
)
from helpers.commands import run_benchmark

SMALL = LossBenchmark(rows=6, classes=300, alphas=(1.0, 1.25, 1.5, 2.0), dim=32, repeats=2)


def test_the_batch_is_made_of_cosines():
    cosines, labels = cosine_batch(SMALL)
    assert cosines.shape == (6, 300) and cosines.abs().max() <= 1.0
    assert torch.equal(cosines, cosine_batch(SMALL)[0])
    assert (cosines.gather(1, labels[:, None]).mean() - 0.4).abs() < 0.2


def test_contenders_of_one_alpha_compute_the_same_loss():
    """The race is fair only if every entry does the same work: losses agree to float32 rounding."""
    cosines, labels = cosine_batch(SMALL)
    others, missing = entmax_contenders(SMALL)
    assert not missing
    timings = time_contenders([*own_contenders(SMALL), *others], cosines, labels, SMALL)
    compared = [timing for timing in timings if timing.loss_difference is not None]
    assert {timing.alpha for timing in compared} == {1.0, 1.25, 1.5, 2.0}
    for timing in compared:
        assert timing.loss_difference < 1e-3, timing
    assert (timings[0].name, timings[0].versus_cross_entropy) == ("F.cross_entropy", 1.0)
    ours = [timing for timing in timings if timing.name == "qmargin.fenchel_young_loss"]
    assert {timing.versus_ours for timing in ours} == {1.0}


def test_solvers_are_counted_for_every_alpha():
    settings = LossBenchmark(rows=3, classes=100, alphas=(1.25, 3.0), dim=16)
    counts = count_evaluations(*cosine_batch(settings), settings)
    bisections = [("bisection", "tight"), ("bisection", "paper")]
    expected = [(1.25, ("newton", "tight")), *((1.25, way) for way in bisections)]
    expected += [(3.0, way) for way in bisections]
    assert [(count.alpha, (count.solver, count.bracket)) for count in counts] == expected
    assert all(count.max_mass_error < 1e-5 for count in counts)


def test_a_missing_entmax_is_said_in_the_table(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "entmax", None)  # what import finds for an absent package
    run_loss_benchmark(LossBenchmark(rows=2, classes=20, alphas=(1.5,), dim=8, repeats=1))
    assert "entmax: not installed" in capsys.readouterr().out


def test_the_file_has_what_is_printed(tmp_path, capsys):
    path = tmp_path / "bench.json"
    small = ["--rows", "4", "--classes", "50", "--dim", "8", "--repeats", "2"]
    assert run_benchmark(["loss", *small, "--alphas", "1", "1.5", "3", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["settings"]["rows"] == 4
    for timing in record["timings"]:
        assert timing["name"] in printed and timing["seconds"] > 0
        assert len(timing["seconds_all"]) == 2
    for count in record["evaluations"]:
        assert count["max_evaluations"] >= count["mean_evaluations"] >= 1


def test_shapes_and_dtypes(tmp_path, capsys):
    path = tmp_path / "shapes.json"
    command = "loss --shapes 4x300 3x50 --dtypes float32 bfloat16 --repeats 2 --json"
    assert run_benchmark([*command.split(), str(path)]) == 0
    found = json.loads(path.read_text())["shapes"]
    assert "[4, 300] bfloat16" in capsys.readouterr().out
    kinds = {(row["rows"], row["classes"], row["dtype"]) for row in found}
    assert len(kinds) == 4 and len(found) == 4 * len({row["name"] for row in found})
    assert all(row["milliseconds"] > 0 and len(row["milliseconds_all"]) == 2 for row in found)
    assert found[0]["name"] == "F.cross_entropy" and found[0]["versus_cross_entropy"] == 1.0
    page, own = tmp_path / "page.md", Path("docs/benchmarks/loss-gpu.md").read_text()
    page.write_text(own)
    assert run_benchmark(["loss", "--from", str(path), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.partition("<!--")[0] == own.partition("<!--")[0]
    assert "[4, 300] float32" in text and "1024x93431" not in text and "commit `" in text
    path.write_text("{}")
    assert run_benchmark(["loss", "--from", str(path)]) == 2
    assert "measure again" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "--head", "--busy 1"])
def test_cpu_compares_with_plain_code(words, capsys):
    options = [
        "--classes",
        "100",
        "--rows",
        "4",
        "--dim",
        "8",
        "--alphas",
        "1",
        "1.5",
        "--repeats",
        "1",
    ]
    assert run_benchmark(["cpu", *options, *words.split()]) == 0
    table = capsys.readouterr().out
    assert "| classes | plain | alpha 1 | alpha 1.5 |" in table and "| 100 |" in table
