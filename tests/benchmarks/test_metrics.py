"""``python -m benchmarks metrics`` at a small size."""

import json

import numpy as np
import pytest

from benchmarks import metrics
from benchmarks.metrics import MetricsBenchmark, expected_tar, run_metrics_benchmark
from qmargin.errors import BackendError, ConfigError
from qmargin.metrics.operating import tar_at_far

SMALL = MetricsBenchmark(
    scores=3_000, genuine=300, fars=(1e-2, 1e-3), repeats=1, stream=50_001, chunk=4_000, lines=2_000
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("digits", [1, 6])
def test_both_contenders_read_the_same(dtype, digits):
    pytest.importorskip("sklearn", reason="comes with the dev extra")
    job = {
        "scores": 40_000, "genuine": 4_000, "fars": [1e-2, 1e-3, 3e-4], "p_target": 0.05,
        "dtype": dtype, "seed": 1,
    }  # fmt: skip
    scores = np.round(metrics.make_scores(job), digits)
    labels = np.arange(len(scores)) < job["genuine"]
    ours, theirs = (
        metrics.read_with_qmargin(scores, job),
        metrics.read_with_sklearn(scores, labels, job),
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-15)


@pytest.mark.parametrize("chunk", [1_000, 7_777, 60_000])
def test_the_stream_visits_every_value_and_fits_the_closed_form(chunk, monkeypatch):
    seen: list[np.ndarray] = []

    class Spy(metrics.ImpostorTail):
        def update(self, scores: np.ndarray) -> None:
            seen.append(scores.copy())
            super().update(scores)

    monkeypatch.setattr(metrics, "ImpostorTail", Spy)
    job = {"stream": 50_001, "chunk": chunk, "fars": [1e-2, 1e-3, 2e-5]}
    result = metrics.measure_stream(job)
    impostor = np.concatenate(seen)
    np.testing.assert_array_equal(np.sort(impostor), np.arange(50_001.0))
    assert result["tars"] == result["expected"]
    assert result["false_accepts"] == result["allowed"] == [500, 50, 1]
    genuine = metrics.stream_genuine(50_001)
    plain = [tar_at_far(genuine, impostor, far).tar for far in job["fars"]]
    assert plain == result["expected"] == [expected_tar(far, 50_001) for far in job["fars"]]


def test_the_command_prints_tables_and_writes_json(tmp_path, capsys):
    path = tmp_path / "metrics.json"
    run_metrics_benchmark(SMALL, json_path=path)
    printed = capsys.readouterr().out
    record = json.loads(path.read_text(encoding="utf-8"))
    assert "TAR at 2 FARs, EER and minDCF from 3,000 float64 scores" in printed
    assert "stream of 50,001 impostors" in printed
    names = [reading["name"] for reading in record["readings"]]
    assert names[0] == "qmargin" and (names[1:] == ["sklearn"] or record["not_measured"])
    for reading in record["readings"]:
        assert reading["seconds"] > 0 and len(reading["values"]) == 4
        np.testing.assert_allclose(reading["values"], record["readings"][0]["values"], atol=1e-15)
    assert record["stream"]["tars"] == record["stream"]["expected"]
    assert "2,000 trials of 352 files and 44 subjects" in printed
    for step, seconds in record["files"]["seconds"].items():
        assert seconds > 0 and f"| {step}" in printed


def test_impossible_settings_are_refused():
    for options, named in (
        ({"scores": 10, "genuine": 10}, "leaves no impostors"),
        ({"stream": 2**31}, "stream="),
        ({"lines": 5}, "lines=5 is below 100"),
        ({"repeats": 0}, "repeats=0"),
    ):
        with pytest.raises(ConfigError, match=named):
            MetricsBenchmark(**options)


def test_a_failed_measurement_says_why():
    settings = MetricsBenchmark(scores=100, genuine=10, fars=(1e-9,), repeats=1, stream=0, lines=0)
    with pytest.raises(BackendError, match=r"measuring qmargin failed .*not measurable"):
        run_metrics_benchmark(settings)


def test_a_missing_scikit_learn_is_said_in_the_table(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    settings = MetricsBenchmark(scores=300, genuine=100, fars=(0.1,), repeats=1, stream=0, lines=0)
    run_metrics_benchmark(settings)
    assert "scikit-learn: not installed" in capsys.readouterr().out
