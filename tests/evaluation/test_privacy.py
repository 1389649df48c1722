"""Nothing that people pass on holds a folder or the name of this machine, unless asked to."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from dataclasses import replace

import pytest

from helpers.model_directories import make_model
from helpers.results import synthetic_result
from helpers.runs import tiny_recipe
from helpers.speakers import make_speakers
from qmargin.cli.commands import build_parser
from qmargin.evaluation.export import export_run
from qmargin.evaluation.result import Source, read_result, without_paths, write_result
from qmargin.files import without_folders
from qmargin.report.write import ReportOptions, write_report
from qmargin.training.loop import train


def run(monkeypatch, *arguments):
    texts = list(map(str, arguments))
    monkeypatch.setattr(sys, "argv", ["qmargin", *texts])
    parsed = build_parser().parse_args(texts)
    parsed.run(parsed)


def secrets_in(folder, *secrets):
    """Files that hold a secret text."""
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann smith/a=b/x.tsv", "x.tsv"),
        ("C:\\Users\\ann\\x.tsv", "x.tsv"),
        ("--out=/home/ann/x", "--out=x"),
        ("data.path=/home/ann/x", "data.path=x"),
        ("/", "/"),
        ("faces/x.jpg", "faces/x.jpg"),
        ("Accuracy 1/2 = 0.5", "Accuracy 1/2 = 0.5"),
        ("", ""),
    ],
)
def test_folders_are_left_out(text, expected):
    assert without_folders(text) == expected


def test_a_result_has_names_of_files(tmp_path, monkeypatch):
    secret = tmp_path / "ann smith"
    secret.mkdir()
    speakers = make_speakers(4, 3)
    speakers.write_trials(secret / "trials.txt")
    speakers.write_embeddings(secret / "model.npz")
    command = ["evaluate", "trials", secret / "trials.txt", "--embeddings", secret / "model.npz"]
    out = tmp_path / "out"
    out.mkdir()
    run(monkeypatch, *command, "--replicates", 0, "--out", out / "r.json")
    assert secrets_in(out, "ann smith", socket.gethostname()) == []
    result = read_result(out / "r.json")
    assert [source.path for source in result.sources] == ["r.scores.tsv", "trials.txt", "model.npz"]
    assert shlex.split(result.command)[:4] == ["qmargin", "evaluate", "trials", "trials.txt"]
    run(monkeypatch, *command, "--replicates", 0, "--out", out / "r.json", "--keep-paths")
    assert read_result(out / "r.json").sources[1].path == str(secret / "trials.txt")


def test_keys_of_trials_lose_the_folder_they_share():
    keys = tuple(f"/home/ann/faces/id{i}/1.jpg" for i in range(4))
    short = without_paths(synthetic_result(keys=keys)).hardest
    pairs = (*short.false_accepts, *short.false_rejects)
    assert {pair.enrol for pair in pairs} <= {f"id{i}/1.jpg" for i in range(4)}
    relative = synthetic_result(keys=("a/1.jpg", "b/1.jpg", "c/1.jpg", "d/1.jpg"))
    assert without_paths(relative) == relative


@pytest.mark.parametrize("keep_paths", [False, True])
def test_a_report_of_an_older_result_has_none(tmp_path, keep_paths):
    result = replace(
        synthetic_result(),
        sources=(Source("/home/ann/scores.tsv", "ab", "scores"),),
        command="qmargin evaluate scores /home/ann/scores.tsv --out /home/ann/r.json",
    )
    write_result(tmp_path / "r.json", result, keep_paths=True)
    options = ReportOptions(keep_paths=keep_paths)
    write_report([tmp_path / "r.json"], tmp_path / "out", options)
    found = secrets_in(tmp_path / "out", "/home/ann")
    assert sorted(found) == (["index.html", "metrics.json"] if keep_paths else [])


def test_an_exported_model_has_none(tmp_path):
    train(tiny_recipe("run.max_steps=1"), tmp_path / "run", device="cpu")
    export_run(tmp_path / "run", tmp_path / "m")
    assert secrets_in(tmp_path / "m", str(tmp_path), socket.gethostname()) == []


def test_paths_of_a_recipe_are_cut_on_export():
    from qmargin.evaluation.export import _public
    from qmargin.training.recipe_files import from_yaml, to_yaml

    settings = ["data.kind=images", "data.path=/home/ann/faces", "data.options=null"]
    recipe = tiny_recipe(*settings)
    text = _public(recipe, to_yaml(recipe))
    assert "/home/ann" not in text
    assert recipe.sha256 in text
    assert from_yaml(text).data.path == "faces"
    plain = tiny_recipe()
    assert _public(plain, to_yaml(plain)) == to_yaml(plain)


def test_an_onnx_file_names_no_source(tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    make_model(tmp_path / "m")
    run(monkeypatch, "export", tmp_path / "m", "--onnx")
    content = (tmp_path / "m" / "model.onnx").read_bytes()
    assert not re.findall(rb"[\w/.-]*site-packages[\w/.-]*|[\w/.-]+\.py\b", content)
    assert json.loads((tmp_path / "m" / "card.json").read_text())["onnx_file"] == "model.onnx"
