"""``result.json`` is whole, checked, and comes back as it was."""

import json
import math
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.speakers import make_speakers
from qmargin.errors import DataError
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import Result, Value, read_result, result_to_json, write_result
from qmargin.evaluation.score_files import read_scores
from qmargin.files import sha256_of, write_atomically


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    path = make_speakers().write_scores(tmp_path_factory.mktemp("scores") / "s.txt")
    groups = {f"id{i:02d}": "ab"[i % 2] for i in range(12)}
    options = EvaluationOptions(num_replicates=20, group_of=groups, model_card={"data": "made up"})
    return evaluate_scores(read_scores(path), options)


def test_what_is_written_comes_back(tmp_path: Path, result: Result) -> None:
    path = tmp_path / "result.json"
    write_result(path, result, keep_paths=True)
    assert read_result(path) == result
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_no_part_is_left_out(result: Result) -> None:
    """The fixture fills every optional part, so the round trip above covers all of them."""
    assert [f.name for f in fields(result) if getattr(result, f.name) is None] == []


def test_infinities_are_words_and_nan_is_never_written(tmp_path: Path, result: Result) -> None:
    equal = replace(result.metrics.eer, threshold=-math.inf)
    path = tmp_path / "result.json"
    write_result(path, replace(result, metrics=replace(result.metrics, eer=equal)))
    content = json.loads(path.read_text())
    assert content["metrics"]["eer"]["threshold"] == "-inf"
    assert "NaN" not in path.read_text()
    assert read_result(path).metrics.eer.threshold == -math.inf
    lost = replace(result.metrics, eer=replace(equal, value=math.nan))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.eer\.value is None, not a number"):
        write_result(path, replace(result, metrics=lost))
    assert path.read_bytes() == before


def test_a_number_that_may_be_missing_is_null(tmp_path: Path, result: Result) -> None:
    metrics = replace(result.metrics, cllr=Value(math.nan))
    write_result(tmp_path / "r.json", replace(result, metrics=metrics))
    assert read_result(tmp_path / "r.json").metrics.cllr.value is None


def change(content: Any, path: list[Any], value: Any) -> None:
    for step in path[:-1]:
        content = content[step]
    if value is ...:
        del content[path[-1]]
    else:
        content[path[-1]] = value


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["format"], "other", "is not a qmargin-result file"),
        (["version"], 2, "has version 2 of qmargin-result, but this qmargin reads version 1"),
        (["version"], ..., "has version None"),
        (["metrics"], ..., "r.json: metrics is missing"),
        (["metrics", "tar", 0, "far_target"], ..., r"metrics\.tar\[0\]\.far_target is missing"),
        (["metrics", "tar", 1, "tar"], "high", r"metrics\.tar\[1\]\.tar is 'high', not a number"),
        (["metrics", "tar", 0, "status"], "fine", "has the status 'fine'"),
        (["metrics", "eer"], [], "metrics.eer is .*, not an object"),
        (["protocol", "num_trials"], 1.5, "num_trials is 1.5, not an integer"),
        (["protocol", "num_trials"], True, "num_trials is True, not an integer"),
        (["protocol", "name"], None, "name is None, not a text"),
        (["det", "far"], {"a": 1}, "det.far is .*, not a list"),
        (["metrics", "eer", "interval"], [0.1], "interval is .*, not a list of 2"),
        (["replicates", "tar"], [1], "replicates.tar is .*, not an object"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, result: Result, place: list[Any], value: Any, message: str
) -> None:
    content = result_to_json(result)
    change(content, place, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as error:
        read_result(path)
    assert str(path) in str(error.value)


def test_unknown_keys_are_left_to_later_versions(tmp_path: Path, result: Result) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**result_to_json(result), "future": 1}))
    assert read_result(path) == result


@pytest.mark.parametrize("content", [b"", b"{", b"[1, NaN]", b"\xff\xfe", b"[" * 100_000, b"7"])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not JSON|is not a qmargin-result"):
        read_result(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    before = sha256_of(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qmargin.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert sha256_of(path) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('"offset": "inf"', "calibration.offset"),
        ('"offset": 1e999', "calibration.offset"),
        (f'"offset": {10**400}', "calibration.offset"),
        ('"edges": ["inf", 1.0]', "edges"),
        ('"level": "-inf"', "level"),
    ],
)
def test_an_infinite_number_is_refused(
    tmp_path: Path, result: Result, text: str, place: str
) -> None:
    path = tmp_path / "result.json"
    write_result(path, result)
    name = text.partition(":")[0]
    content, count = re.subn(
        name + r": (\[[^]]*\]|[-\d.e+]+)", lambda _: text, path.read_text(), count=1
    )
    assert count == 1
    path.write_text(content)
    with pytest.raises(DataError, match=place):
        read_result(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(DataError, match=r"result\.json is a named pipe"):
        read_result(tmp_path / "result.json")
