"""Real portraits through embedding, pairs and a report with pictures; no claim is made of them."""

import csv
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers.faces import PatchModel
from qmargin.evaluation.embed import folder_images, write_embeddings
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols.face_sets import evaluate_pairs
from qmargin.evaluation.result import write_result
from qmargin.evaluation.trials import read_trials
from qmargin.report.media import MediaFolder
from qmargin.report.write import ReportOptions, write_report


def data_folder():
    beside = Path(__file__).parents[3] / "shared" / "data"
    return Path(os.environ.get("QMARGIN_DATA", beside)) / "congress_faces"


@pytest.fixture
def portraits(tmp_path):
    """Some people with two photos, one file each in a folder, and a list of pairs."""
    folder = data_folder()
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: set QMARGIN_DATA to the folder of the data sets")
    with (folder / "manifest.csv").open(encoding="utf-8", newline="") as file:
        paths: dict[str, list[str]] = {}
        for row in csv.DictReader(file):
            paths.setdefault(row["identity"], []).append(row["path"])
    people = {name: files[:2] for name, files in paths.items() if len(files) > 1}
    people = dict(list(people.items())[:40])
    images = tmp_path / "images"
    with zipfile.ZipFile(folder / "images.zip") as archive:
        for name, files in people.items():
            (images / name).mkdir(parents=True)
            for file in files:
                (images / name / file).write_bytes(archive.read(file))
    lines = ["enrol,test,label"]
    for name, (first, _) in people.items():
        lines += [
            f"{name}/{first},{other}/{second},{int(name == other)}"
            for other, (_, second) in people.items()
        ]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_portraits_to_a_report_with_pictures(portraits):
    trials = read_trials(portraits / "pairs.csv")
    images = folder_images(portraits / "images", trials.keys.names)
    path = write_embeddings(
        PatchModel(),
        images,
        portraits / "e.safetensors",
        keys=trials.keys.names,
        model_id="patches",
        flip="sum",
    )
    embeddings = read_embeddings(path)
    assert embeddings.matrix.shape == (80, 192)
    options = EvaluationOptions(fars=(0.1, 0.01), num_replicates=20, name="patches")
    found = evaluate_pairs(
        embeddings, trials, options, scores=portraits / "s.tsv", folds=np.arange(1600) % 10
    )
    assert found.protocol.num_subjects == 40
    assert found.measures.eer.value < 0.5  # colours of the background help a little
    assert "10-fold accuracy" in found.measures.extra
    write_result(portraits / "r.json", found)
    media = MediaFolder(portraits / "images")
    assert media.medium(found.hardest.false_accepts[0].enrol).kind == "image"
    options_of_report = ReportOptions(media=portraits / "images")
    write_report([portraits / "r.json"], portraits / "report", options_of_report)
    page = (portraits / "report" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") >= 4
    assert "10-fold accuracy" in page
