"""``python -m benchmarks trials`` at a small size."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.trials import TrialsBenchmark, add_subject, make_trials
from qmargin.errors import ConfigError
from qmargin.evaluation.trials import read_trials

SMALL = {"trials": 300, "utterances": 120, "speakers": 10, "cohort": 20, "top": 5, "dim": 8}


def test_it_measures_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_subject(parser.add_subparsers())
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    path = tmp_path / "b.json"
    parsed = parser.parse_args(["trials", *options, "--replicates=3", f"--json={path}"])
    parsed.run(parsed)
    assert "300 trials of 120 embeddings of 8, cohort of 20 (top 5)" in capsys.readouterr().out
    record = json.loads(path.read_bytes())
    assert list(record["seconds"])[-2:] == ["score, with AS-norm", "measure, with intervals"]
    assert (record["num_genuine"], record["num_impostors"]) == (150, 150)
    assert 0.0 < record["eer"] < 0.5
    assert record["peak_bytes"] > 1 << 20


def test_its_trials_are_distinct_and_half_genuine(tmp_path: Path) -> None:
    make_trials({**SMALL, "seed": 0, "folder": str(tmp_path)})
    trials = read_trials(tmp_path / "trials.txt")
    names = trials.keys.names
    pairs = list(zip(trials.keys.enrol.tolist(), trials.keys.test.tolist(), strict=True))
    assert len(set(pairs)) == 300
    assert trials.is_genuine is not None
    for (a, b), is_genuine in zip(pairs, trials.is_genuine, strict=True):
        assert (names[a].split("/")[0] == names[b].split("/")[0]) == is_genuine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speakers": 61}, "2 utterances of each"),
        ({"top": 21}, "top=21 is not from 2 to cohort=20"),
        ({"trials": 100_000}, "more utterances for more of them"),
        ({"dim": 0}, "dim is at least 1"),
    ],
)
def test_sizes_that_make_no_sense(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrialsBenchmark(**{**SMALL, **changes})
