"""Real portraits from a folder to a report with pictures, by commands alone; no claim is made."""

import csv
import json
import zipfile
from pathlib import Path

import pytest

from helpers.commands import run_command as run
from helpers.pictures import shared_data
from qmargin.evaluation.result import read_result

NUM_TRAINED, NUM_TESTED = 24, 30


@pytest.fixture
def portraits(tmp_path: Path) -> Path:
    """People with two photos, one folder each: some to train on, others to compare in pairs."""
    folder = shared_data("congress_faces")
    with (folder / "manifest.csv").open(encoding="utf-8", newline="") as file:
        photos: dict[str, list[str]] = {}
        for row in csv.DictReader(file):
            photos.setdefault(row["identity"], []).append(row["path"])
    people = [(name, names[:2]) for name, names in photos.items() if len(names) > 1]
    people = people[: NUM_TRAINED + NUM_TESTED]
    with zipfile.ZipFile(folder / "images.zip") as archive:
        for number, (person, names) in enumerate(people):
            place = tmp_path / ("train" if number < NUM_TRAINED else "test") / person
            place.mkdir(parents=True)
            for name in names:
                (place / name).write_bytes(archive.read(name))
    lines = [
        f"{person}/{first},{other}/{second},{int(person == other)}\n"
        for person, (first, _) in people[NUM_TRAINED:]
        for other, (_, second) in people[NUM_TRAINED:]
    ]
    (tmp_path / "pairs.csv").write_text("a,b,label\n" + "".join(lines))
    return tmp_path


def test_a_folder_of_portraits_becomes_a_model_and_a_report(portraits, capsys):
    run("data", "index", portraits / "train")
    run("check-data", portraits / "train", "--threads", 1)
    settings = {
        "data.path": portraits / "train",
        "data.num_workers": 1,
        "data.options.size": 32,
        "data.batch_size": 16,
        "model.backbone": "small_conv",
        "model.embedding_dim": 16,
        "run.max_steps": 4,
    }
    changes = [f"--set={name}={value}" for name, value in settings.items()]
    run("train", "faces_mbf_q_margin", *changes, "--out", portraits / "run", "--device", "cpu")
    model, photos, result = portraits / "model", portraits / "test", portraits / "result.json"
    run("export", portraits / "run", "--out", model)
    few, fit = ("--replicates", 20, "--fars", 0.1, 0.01), ("--fit", "resize")
    files = ("--images", photos, "--model", model, "--out", result, "--workers", 1)
    run("evaluate", "pairs", portraits / "pairs.csv", *files, *few)
    found = read_result(result)
    assert (found.protocol.num_trials, found.protocol.num_genuine) == (NUM_TESTED**2, NUM_TESTED)
    assert found.hardest is not None and found.hardest.false_accepts

    run("export", model, "--result", result)
    capsys.readouterr()
    names = (portraits / "pairs.csv").read_text().split()[1].split(",")[:2]
    pair = [photos / name for name in names]
    run("verify", *pair, "--model", model, "--far", 0.1, *fit, "--json")
    said = json.loads(capsys.readouterr().out)
    assert -1.0 <= said["score"] <= 1.0 and said["far"] == 0.1

    run(
        "evaluate", "all-pairs", photos, "--model", model, *fit, *few, "--out", portraits / "a.json"
    )
    plain = read_result(portraits / "a.json")
    assert (plain.protocol.num_genuine, plain.protocol.num_subjects) == (NUM_TESTED, NUM_TESTED)
    assert plain.run is not None and plain.run.checkpoint_sha256 == plain.weights_sha256
    assert (plain.run.arm, plain.run.steps) == ("faces_mbf_q_margin", 4)
    made, cohort = portraits / "a.embeddings.safetensors", portraits / "cohort.safetensors"
    run("export", portraits / "run", "--prototypes", cohort)
    norm = ("--cohort", cohort, "--as-norm", 8, "--out", portraits / "normalised.json")
    run("evaluate", "all-pairs", made, *norm, *few)
    normalised = read_result(portraits / "normalised.json")
    assert [source.role for source in normalised.sources] == ["embeddings", "cohort"]
    assert normalised.protocol.scoring == "as-norm" and normalised.measures != plain.measures
    assert normalised.protocol.data_sha256 == plain.protocol.data_sha256

    run("report", result, "--out", portraits / "report", "--media", photos, "--no-figures")
    page = (portraits / "report" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") >= 4
