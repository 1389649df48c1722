"""Evaluating many scores takes memory for the scores and little more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.speakers import make_speakers
from qmargin.evaluation import columns
from qmargin.evaluation.columns import Growing, SplitScores
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import ScoreSet, read_scores
from qmargin.metrics import curve
from qmargin.metrics.curve import StaircaseParts, det_curve, staircase, thin_curve
from qmargin.metrics.llr import min_cllr, min_cllr_of

MOST_BYTES = 30  # for a score of 8 and a label of 1
CHILD = """
import resource, sys
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.score_files import read_scores
from qmargin.metrics import curve

curve.PART = 1 << 17

def peak(path):
    assert evaluate_scores(read_scores(path)).protocol.num_trials
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small, large = peak(sys.argv[1]), peak(sys.argv[2])
print(large - small)
"""


def write(path: Path, num_scores: int) -> Path:
    generator = np.random.default_rng(0)
    labels = generator.random(num_scores) < 0.1
    scores = np.round(generator.normal(3.0 * labels), 6)
    if path.name.startswith("two"):
        np.savez(path, genuine=scores[labels], impostor=scores[~labels])
    elif path.suffix == ".npz":
        np.savez(path, scores=scores, labels=labels.astype(np.int64))
    else:
        sign = "," if path.suffix == ".csv" else "\t"
        rows = zip(scores.tolist(), labels.tolist(), strict=True)
        path.write_text(f"score{sign}label\n" + "".join(f"{a}{sign}{b:d}\n" for a, b in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two.npz", "labels.npz", "s.csv", "s.tsv"])
def test_bytes_of_a_score_are_few(tmp_path: Path, name: str) -> None:
    num_scores = 2_000_000
    small = write(tmp_path / f"{name.split('.')[0]}-small.{name.split('.')[1]}", 50_000)
    paths = [small, write(tmp_path / name, num_scores)]
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) / num_scores < MOST_BYTES


@pytest.mark.parametrize("kind", ["distinct", "ties", "infinite", "one value", "float32"])
@pytest.mark.parametrize("size", [1, 7, 1000, 10**9])
def test_parts_are_the_whole(kind: str, size: int) -> None:
    generator = np.random.default_rng(3)
    genuine, impostor = generator.normal(1.0, size=60), generator.normal(size=300)
    if kind == "ties":
        genuine, impostor = np.round(genuine), np.round(impostor)
    elif kind == "infinite":
        genuine[:5], impostor[:5], impostor[5:9] = np.inf, np.inf, -np.inf
    elif kind == "one value":
        genuine, impostor = np.ones(60), np.ones(300)
    elif kind == "float32":
        genuine = genuine.astype(np.float32)
    parts = StaircaseParts(genuine, impostor, size=size)
    found = [np.concatenate(column) for column in zip(*parts, strict=True)]
    for column, expected in zip(found, staircase(genuine, impostor), strict=True):
        np.testing.assert_array_equal(column, expected)
    thin, whole = thin_curve(parts, 20), det_curve(genuine, impostor).thin(20)
    for name in ("thresholds", "far", "frr"):
        np.testing.assert_array_equal(getattr(thin, name), getattr(whole, name))
    assert min_cllr_of(parts) == pytest.approx(min_cllr(genuine, impostor), rel=1e-14, abs=1e-15)


def test_a_result_does_not_depend_on_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    scores = np.concatenate([generator.normal(2.0, size=3000), generator.normal(size=40_000)])
    source = Source("a", "b", "scores")
    score_set = ScoreSet(scores, np.arange(len(scores)) < 3000, None, (source,))
    options = EvaluationOptions(num_replicates=0)
    whole = evaluate_scores(score_set, options)
    monkeypatch.setattr(curve, "PART", 5000)
    parts = evaluate_scores(score_set, options)
    assert (parts.metrics, parts.det) == (whole.metrics, whole.det)


def test_an_array_grows_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK", 4)
    growing, split = Growing(np.int32), SplitScores()
    values = np.arange(11)
    for part in (values[:3], values[3:4], values[4:4], values[4:]):
        growing.append(part)
        split.append(part.astype(float), part % 3 == 0)
    assert len(growing) == 11
    assert growing.array().tolist() == values.tolist()
    scores, is_genuine = split.arrays()
    assert scores.tolist() == [0, 3, 6, 9, 1, 2, 4, 5, 7, 8, 10]
    assert is_genuine.sum() == 4


def test_names_keep_the_order_of_the_file(tmp_path: Path) -> None:
    speakers = make_speakers(4, 2)
    score_set = read_scores(speakers.write_scores(tmp_path / "s.txt"))
    assert score_set.is_genuine.tolist() == list(map(bool, speakers.labels))
