"""Real portraits from a folder to a report with pictures, by commands alone; no claim is made."""

import csv
import json
import zipfile
from pathlib import Path

import pytest

from helpers.commands import run_command as run
from helpers.pictures import shared_data
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.protocols.all_pairs import evaluate_identities, identities_of
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
    tested = people[NUM_TRAINED:]
    lines = ["a,b,label"]
    for person, (first, _) in tested:
        lines += [
            f"{person}/{first},{other}/{second},{int(person == other)}"
            for other, (_, second) in tested
        ]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_folder_of_portraits_becomes_a_model_and_a_report(
    portraits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("data", "index", portraits / "train")
    assert (portraits / "train.qmindex").is_file()
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
    changes = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    run("train", "faces_mbf_q_margin", *changes, "--out", portraits / "run", "--device", "cpu")
    model = portraits / "model"
    run("export", portraits / "run", "--out", model)
    assert {"backbone.safetensors", "recipe.yaml", "card.json"} <= {
        path.name for path in model.iterdir()
    }

    photos = portraits / "test"
    embeddings = portraits / "e.safetensors"
    run("embed", photos, "--model", model, "--fit", "resize", "--out", embeddings)
    assert embeddings.stat().st_mode & 0o777 == 0o600
    result = portraits / "result.json"
    options = ("--replicates", 20, "--fars", 0.1, 0.01, "--workers", 1)
    run(
        *("evaluate", "pairs", portraits / "pairs.csv", "--images", photos),
        *("--model", model, "--out", result, *options),
    )
    found = json.loads(result.read_text())
    assert found["protocol"]["num_trials"] == NUM_TESTED**2
    assert found["protocol"]["num_genuine"] == NUM_TESTED
    assert len(found["hardest"]["false_accepts"]) > 0

    run("export", model, "--result", result)
    capsys.readouterr()
    pair = [
        photos / name for name in (portraits / "pairs.csv").read_text().split()[1].split(",")[:2]
    ]
    run("verify", *pair, "--model", model, "--far", 0.1, "--fit", "resize", "--json")
    said = json.loads(capsys.readouterr().out)
    assert -1.0 <= said["score"] <= 1.0
    assert said["far"] == 0.1

    everyone = portraits / "all.json"
    fit, few = ("--model", model, "--fit", "resize"), ("--replicates", 20, "--fars", 0.1)
    run("evaluate", "all-pairs", photos, *fit, *few, "--out", everyone)
    plain = read_result(everyone)
    assert (plain.protocol.num_genuine, plain.protocol.num_subjects) == (NUM_TESTED, NUM_TESTED)
    assert plain.run is not None and plain.run.checkpoint_sha256 == plain.weights_sha256
    assert (plain.run.arm, plain.run.steps) == ("faces_mbf_q_margin", 4)
    made = portraits / "all.embeddings.safetensors"
    found = read_embeddings(made)
    again = evaluate_identities(found, identities_of(found.keys))
    assert again.measures.eer.value == plain.measures.eer.value
    cohort = portraits / "cohort.safetensors"
    run("export", portraits / "run", "--prototypes", cohort)
    norm = ("--cohort", cohort, "--as-norm", 8, "--out", portraits / "normalised.json")
    run("evaluate", "all-pairs", made, *norm, *few)
    normalised = read_result(portraits / "normalised.json")
    assert [source.role for source in normalised.sources] == ["embeddings", "cohort"]
    assert normalised.protocol.scoring == "as-norm"
    assert normalised.measures != plain.measures
    assert normalised.protocol.data_sha256 == plain.protocol.data_sha256

    run("report", result, "--out", portraits / "report", "--media", photos, "--no-figures")
    page = (portraits / "report" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") >= 4
