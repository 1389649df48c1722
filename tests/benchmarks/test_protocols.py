"""``python -m benchmarks protocols`` at a small size."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import protocols
from benchmarks.protocols import ProtocolsBenchmark, add_subject, make_release
from qmargin.errors import BackendError, ConfigError
from qmargin.evaluation.protocols.ijb import read_ijb

SMALL = {"images": 900, "templates": 60, "subjects": 12, "pairs": 500, "dim": 16, "seed": 0}


def test_it_measures_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_subject(parser.add_subparsers())
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    path = tmp_path / "b.json"
    parsed = parser.parse_args(["protocols", *options, "--replicates=3", f"--json={path}"])
    parsed.run(parsed)
    printed = capsys.readouterr().out
    assert "900 embeddings of 16, 60 templates, 500 pairs" in printed
    record = json.loads(path.read_bytes())
    assert list(record["seconds"])[-2:] == ["score pairs", "measure, with intervals"]
    assert record["num_genuine"] == 48
    assert record["num_impostors"] == 452
    assert record["peak_bytes"] > 1 << 20
    assert 0.0 < record["tar"]["0.1"] <= 1.0


def test_its_release_is_what_it_says(tmp_path: Path) -> None:
    make_release({**SMALL, "folder": str(tmp_path)})
    release = read_ijb(tmp_path)
    pairs = release.pairs()
    assert len(release) == 900
    assert len(set(release.rows.template.tolist())) == 60
    assert len({*zip(pairs.enrol.tolist(), pairs.test.tolist(), strict=True)}) == 500
    assert pairs.is_genuine.sum() == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subjects": 60}, "do not grow"),
        ({"pairs": 48}, "is not above 48"),
        ({"pairs": 577}, "at most 576"),
        ({"dim": 0}, "dim is at least 1"),
    ],
)
def test_sizes_that_make_no_sense(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProtocolsBenchmark(**{**SMALL, **changes})


def test_a_step_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "SUBJECT", "absent")
    with pytest.raises(BackendError, match="the step 'make' failed"):
        protocols.run_protocols_benchmark(ProtocolsBenchmark(**SMALL))
