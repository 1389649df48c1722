"""``result.json`` is whole, checked, and comes back as it was."""

import json
import math
import re
from dataclasses import fields, replace

import pytest

from helpers.results import some_run
from helpers.speakers import make_speakers
from qmargin.errors import DataError
from qmargin.evaluation.evaluate import EvaluationOptions, evaluate_scores
from qmargin.evaluation.result import (
    Measure,
    Value,
    read_result,
    result_from_json,
    result_to_json,
    write_result,
)
from qmargin.evaluation.scores import read_scores


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = make_speakers().write_scores(tmp_path_factory.mktemp("scores") / "s.txt")
    groups = {f"id{i:02d}": "ab"[i % 2] for i in range(12)}
    options = EvaluationOptions(
        num_replicates=20, group_of=groups, model_card={"data": "made up"}, run=some_run()
    )
    found = evaluate_scores(read_scores(path), options)
    return found.with_extra({"10-fold accuracy": Measure(0.9, 0.01, "made up")})


def test_what_is_written_comes_back(tmp_path, result):
    path = tmp_path / "result.json"
    write_result(path, result, keep_paths=True)
    assert read_result(path) == result
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    assert [f.name for f in fields(result) if getattr(result, f.name) is None] == []
    path.write_text(json.dumps({**result_to_json(result), "future": 1}))
    assert read_result(path) == result  # of a later version


def test_infinities_are_words_and_nan_is_never_written(tmp_path, result):
    equal = replace(result.measures.eer, threshold=-math.inf)
    path = tmp_path / "result.json"
    write_result(path, replace(result, measures=replace(result.measures, eer=equal)))
    content = json.loads(path.read_text())
    assert content["measures"]["eer"]["threshold"] == "-inf"
    assert "NaN" not in path.read_text()
    assert read_result(path).measures.eer.threshold == -math.inf
    missing = replace(result.measures, cllr=Value(math.nan))
    write_result(path, replace(result, measures=missing))
    assert read_result(path).measures.cllr.value is None
    lost = replace(result.measures, eer=replace(equal, value=math.nan))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"measures\.eer\.value is None"):
        write_result(path, replace(result, measures=lost))
    assert path.read_bytes() == before


def change(content, path, value):
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
        (["version"], 3, "has version 3 of qmargin-result"),
        (["version"], True, "has version True"),
        (["version"], ..., "has version None"),
        (["measures"], ..., "r.json: measures is missing"),
        (["measures", "tar", 0, "far_target"], ..., r"measures\.tar\[0\]\.far_target is missing"),
        (["measures", "tar", 1, "tar"], "high", r"measures\.tar\[1\]\.tar is 'high', not a number"),
        (["measures", "tar", 0, "status"], "fine", "status 'fine'"),
        (["measures", "eer"], [], "measures.eer is .*, not an object"),
        (["protocol", "num_trials"], 1.5, "num_trials is 1.5, not an integer"),
        (["protocol", "num_trials"], True, "num_trials is True, not an integer"),
        (["protocol", "name"], None, "name is None, not a text"),
        (["run"], ..., "run is missing"),
        (["run", "seed"], "0", r"run\.seed is '0'"),
        (["run", "margins", 0, "value"], "big", r"run\.margins\[0\]\.value is 'big'"),
        (["measures", "extra"], [], r"measures\.extra is"),
        (["det", "far"], {"a": 1}, "det.far is .*, not a list"),
        (["measures", "eer", "interval"], [0.1], "interval is .*, not a list of 2"),
        (["replicates", "tar"], [1], "replicates.tar is .*, not an object"),
    ],
)
def test_damage_is_named(tmp_path, result, place, value, message):
    content = result_to_json(result)
    change(content, place, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as error:
        read_result(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, NaN]", b"\xff\xfe", b"[" * 100_000, b"7"])
def test_what_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not JSON|is not a qmargin-result"):
        read_result(path)


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
def test_an_infinite_number_is_refused(tmp_path, result, text, place):
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


def as_version_1(result):
    """What version 1 wrote of a result."""
    content = {**result_to_json(result), "version": 1}
    del content["run"]
    content["metrics"] = measures = dict(content.pop("measures"))
    extra = measures.pop("extra")
    content["measures"] = [{"name": name, **measure} for name, measure in extra.items()]
    content["protocol"] = protocol = dict(content["protocol"])
    content["trials_sha256"] = protocol.pop("data_sha256")
    for name in ("kind", "scoring", "flip", "pooling"):
        del protocol[name]
    card = {"weights_sha256": "ab" * 32, "mirror images": "used", **dict.fromkeys(extra, "0.9")}
    content["system"] = {**content["system"], "model_card": card}
    return content


def test_version_1_is_read_with_a_note(tmp_path, result):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(as_version_1(result)))
    found = read_result(path)
    assert found.measures == result.measures
    protocol = replace(result.protocol, kind=None, scoring=None, flip="sum")
    assert (found.run, found.protocol) == (None, protocol)
    assert found.system.model_card == {"weights_sha256": "ab" * 32}
    assert found.weights_sha256 == "ab" * 32
    assert found.notes[:-1] == result.notes
    assert "version 1" in found.notes[-1]
    write_result(path, found)
    assert read_result(path).notes == found.notes


@pytest.mark.parametrize("name", ["metrics", "protocol", "system"])
def test_damage_of_version_1_is_named(result, name):
    for value in (..., "text"):
        content = as_version_1(result)
        change(content, [name], value)
        with pytest.raises(DataError, match=f"old.json: {name}"):
            result_from_json(content, "old.json")
