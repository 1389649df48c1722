"""``qmargin verify``: a score, a decision, and where it comes from."""

import json
from functools import partial
from pathlib import Path

import pytest

from helpers.commands import run_command
from helpers.model_directories import make_model, pictures, write_pictures
from helpers.results import synthetic_result, write_results
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.export import add_thresholds
from qmargin.evaluation.model import load_model

run = partial(run_command, "verify")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return write_pictures(tmp_path / "faces", pictures(2))


def with_thresholds(model: Path, **options: object) -> None:
    result = synthetic_result(card=None, protocol="LFW\x1b[31m", **options)
    add_thresholds(
        model, *write_results(model.parent / "results", result), flip="sum", is_trusted=True
    )


def test_a_model_without_thresholds_gives_a_score(
    model: Path, pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*pair, "--model", model)
    score = load_model(model).verify(*pair).score
    printed = capsys.readouterr().out
    assert f"score     {score:.4f} (cosine)\n" in printed
    assert "decision  none: the model has no thresholds" in printed
    with pytest.raises(ConfigError, match="small has none"):
        run(*pair, "--model", model, "--far", 0.01)


def test_the_decision_names_its_threshold_and_where_it_was_measured(
    model: Path, pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_thresholds(model)
    run(pair[0], pair[0], "--model", model)
    threshold = load_model(model).thresholds.at(1e-3).threshold
    printed = capsys.readouterr().out
    assert "score     1.0000" in printed
    expected = f"one identity (threshold {threshold:.4f} at FAR 0.001, measured on LFW\\x1b[31m)"
    assert expected in printed
    assert "\x1b" not in printed
    assert "LLR       +" in printed
    with pytest.raises(ProtocolError, match="no threshold was measured at FAR 1e-09"):
        run(*pair, "--model", model, "--far", 1e-9)


def test_json_has_everything(
    model: Path, pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_thresholds(model)
    run(*pair, "--model", model, "--far", 0.01, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"score", "far", "threshold", "is_same", "llr"}
    assert found["far"] == 0.01
    assert found["is_same"] == (found["score"] >= found["threshold"])


def test_what_cannot_be_read_is_named(model: Path, pair: list[Path], tmp_path: Path) -> None:
    pair[1].write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"1\.png' cannot be read"):
        run(*pair, "--model", model)
    with pytest.raises(DataError, match="not a model directory"):
        run(*pair, "--model", tmp_path)
    large = write_pictures(tmp_path / "large", pictures(1, size=20))
    with pytest.raises(DataError, match="has 20 x 20 pixels"):
        run(large[0], large[0], "--model", model, "--fit", "exact")
    run(large[0], large[0], "--model", model, "--fit", "resize")


def test_a_score_next_to_its_threshold_has_digits_that_differ() -> None:
    from types import SimpleNamespace

    from qmargin.cli.verify import _lines
    from qmargin.evaluation.model import Verification

    point = SimpleNamespace(status="ok", note=None)
    thresholds = SimpleNamespace(at=lambda far: point, protocol="LFW")
    found = Verification(0.99999991, 1e-3, 0.99999992, False, None)
    lines = dict(_lines(SimpleNamespace(thresholds=thresholds), found))
    assert lines["score"].startswith("0.99999991 ")
    assert "threshold 0.99999992 " in lines["decision"]
