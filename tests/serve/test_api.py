"""The interface: embeddings, decisions, searches, batches, errors and their description."""

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import run_command
from helpers.results import synthetic_result
from helpers.runs import tiny_recipe
from helpers.serving import (
    b64,
    face_model,
    picture,
    recording,
    serving,
    voice_model,
    wav,
)
from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError
from qmargin.evaluation import export
from qmargin.evaluation.export import read_thresholds, write_thresholds
from qmargin.evaluation.model import cosine, load_model
from qmargin.evaluation.result import write_result
from qmargin.experiments.measure import embed_dataset, load_backbone
from qmargin.experiments.named import PEOPLE_SIZES, drawn_recipe
from qmargin.models.directory import THRESHOLDS, ModelCard
from qmargin.serve import api
from qmargin.serve.batching import Batcher
from qmargin.serve.gallery import Entry, Gallery, checked_name, name_in
from qmargin.serve.made import find_made
from qmargin.serve.operating import Decisions
from qmargin.serve.service import model_for_service
from qmargin.training.build import build_dataset
from qmargin.training.loop import train
from qmargin.training.recipe_files import apply_settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return face_model(tmp_path_factory.mktemp("serve") / "m")


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    return voice_model(tmp_path_factory.mktemp("serve") / "v")


@pytest.fixture(scope="module")
def server(directory):
    with serving(directory) as started:
        yield started


def test_embeddings_are_those_of_the_model(server, directory, tmp_path):
    paths = []
    for seed in range(3):
        paths.append(tmp_path / f"{seed}.png")
        paths[-1].write_bytes(picture(seed))
    found = server.post("embed", {"inputs": [b64(path.read_bytes()) for path in paths]})
    rows = np.array([one["embedding"] for one in found["results"]])
    np.testing.assert_allclose(rows, load_model(directory).embed(paths), rtol=1e-5, atol=1e-6)


def test_a_comparison_is_that_of_the_model(server, directory, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, path in enumerate(paths):
        path.write_bytes(picture(seed))
    expected = load_model(directory).verify(*paths, far=1e-2)
    pair = [b64(path.read_bytes()) for path in paths]
    found = server.post("verify", {"pairs": [pair, [pair[0]] * 2], "far": 1e-2, "show": True})
    assert found["threshold"] == expected.threshold and found["far"] == 1e-2
    first, same = found["results"]
    assert first["score"] == pytest.approx(expected.score, abs=1e-6)
    assert first["is_same"] == expected.is_same
    assert same["score"] == pytest.approx(1.0) and same["is_same"] is True
    assert "impostor pair" in found["words"]
    assert [set(view) for view in first["shown"]] == [{"image"}] * 2


def test_the_rate_of_a_decision_is_never_above_the_one_that_was_asked_for(directory):
    thresholds = read_thresholds(directory / THRESHOLDS)
    decisions = Decisions(thresholds)
    assert len(decisions.stops) > 10
    limits = [stop.threshold for stop in decisions.stops]
    assert limits == sorted(limits, reverse=True)
    assert all(stop.far <= stop.far_target * (1 + 1e-9) for stop in decisions.stops)
    for point in thresholds.points:
        assert decisions.at(point.far_target).threshold == point.threshold
    with pytest.raises(ProtocolError, match=r"20,000 impostor pairs, which resolve no rate below"):
        decisions.at(1e-6)
    with pytest.raises(ConfigError, match="far is 2; give a rate"):
        decisions.at(2.0)
    with pytest.raises(ConfigError, match=r"no thresholds.*qmargin export MODEL --result"):
        Decisions(None).at(1e-3)


def test_thresholds_without_a_curve_still_decide(directory):
    """As those of model directories that were exported before the curve was kept."""
    older = replace(read_thresholds(directory / THRESHOLDS), det=None, histogram=None)
    decisions = Decisions(older)
    assert {stop.threshold for stop in decisions.stops} <= {p.threshold for p in older.points}
    assert decisions.described()["histogram"] is None


def test_a_file_of_thresholds_without_a_curve_is_read(directory, tmp_path):
    older = replace(read_thresholds(directory / THRESHOLDS), det=None, histogram=None)
    write_thresholds(tmp_path / THRESHOLDS, older)
    content = json.loads((tmp_path / THRESHOLDS).read_text())
    assert "det" not in content and "histogram" not in content  # as before
    assert read_thresholds(tmp_path / THRESHOLDS) == older
    assert (directory / THRESHOLDS).stat().st_size < 60_000


def test_the_rate_of_a_search_is_a_bound_by_the_number_of_comparisons(directory):
    decisions = Decisions(read_thresholds(directory / THRESHOLDS))
    assert decisions.search_at(0.1, 100) == decisions.at(0.1 / 100)
    with pytest.raises(ProtocolError, match=r"among 5,000 samples needs a FAR of 0\.00002 %"):
        decisions.search_at(0.001, 5_000)
    generator = np.random.default_rng(0)  # by trial: dependent scores do not break the bound
    strangers = generator.normal(size=(4_000, 1)) + generator.normal(size=(4_000, 50))
    threshold = np.quantile(strangers, 1.0 - 0.05 / 50)
    assert (strangers.max(axis=1) >= threshold).mean() <= 0.05


def test_a_model_without_thresholds_scores_and_says_how_to_decide(tmp_path):
    plain = face_model(tmp_path / "m", thresholds=False)
    with serving(plain) as server:
        _, described, _ = server.ask("GET", "/v1/model")
        assert described["thresholds"] is None and "qmargin export" in described["how_to"]
        found = server.post("verify", {"pairs": [[b64(picture())] * 2]})
        assert found["results"][0]["is_same"] is None and found["threshold"] is None
        status, message = server.refusal("verify", {"pairs": [[b64(picture())] * 2], "far": 0.1})
        assert status == 422 and "qmargin export" in message
        server.post("gallery", {"name": "Ada", "inputs": [b64(picture())]})
        found = server.post("identify", {"inputs": [b64(picture())]})
        assert found["results"][0]["candidates"][0]["is_accepted"] is None


@pytest.mark.parametrize("make", [face_model, voice_model])
def test_the_commands_that_a_model_without_thresholds_shows_give_it_thresholds(
    make, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    plain = make(tmp_path / "MODEL", thresholds=False)
    files = {face_model: (picture, "png"), voice_model: (recording, "wav")}
    make_file, suffix = files[make]
    for number in range(8):
        place = tmp_path / "DIR" / f"person-{number // 2}" / f"{number}.{suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(make_file(number))
    commands = re.findall("`qmargin (.*?)`", Decisions(None, fit="resize").how_to)
    assert len(commands) == 2 and "--fit resize" in commands[0]
    run_command(*commands[0].split(), "--fars", "0.1", "--replicates", "0")
    run_command(*commands[1].split())
    assert Decisions(load_model(plain).thresholds).at(0.1).far <= 0.1
    assert "--fit" not in Decisions(None).how_to


def test_a_bad_file_of_a_batch_is_an_error_in_its_place(server):
    files = [b64(picture()), b64(b"no picture"), "!", b64(picture(1))]
    results = server.post("embed", {"inputs": files})["results"]
    assert ["embedding" in one for one in results] == [True, False, False, True]
    assert "input 2 cannot be read: not an image" in results[1]["error"]["message"]
    assert "input 3 is not base64" in results[2]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("embed", {"input": []}, 422, "did you mean 'inputs'"),
        ("embed", {"inputs": []}, 422, "0 files; give 1 to 64"),
        ("embed", {"inputs": ["AA=="] * 65}, 413, "65 files; give 1 to 64"),
        ("embed", {"inputs": [""]}, 422, "input 1 has zero bytes"),
        ("embed", ["a"], 422, "the request is a list"),
        ("verify", {"pairs": [["AA=="]]}, 422, "pair 1 has 1 files; give two"),
        ("verify", {"pairs": [["AA==", "AA=="]], "far": 7}, 422, "far is 7"),
        ("identify", {"inputs": ["AA=="], "top": 0}, 422, "top is 0; give 1 to 100"),
        ("gallery", {"name": "a/b", "inputs": ["AA=="]}, 422, "without a slash"),
        ("generate", {"same": True}, 404, "not trained on generated data"),
        ("nowhere", {}, 404, "see /v1/openapi.json"),
    ],
)
def test_bad_requests_are_refused_in_words(server, path, body, status, message):
    found = server.refusal(path, body)
    assert found[0] == status and message in found[1]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/embed", "POST"), ("PUT", "/v1/gallery", "GET, POST"), ("POST", "/", "GET")],
)
def test_a_wrong_method_is_refused_with_the_right_ones(server, method, path, allowed):
    status, content, headers = server.ask(method, path, {} if method == "POST" else None)
    assert status == 405 and f"{path} takes {allowed}" in content["error"]["message"]
    assert headers["allow"].startswith(allowed)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b'{"inputs": NaN}'])
def test_rubbish_is_refused(server, raw):
    status, content, _ = server.ask("POST", "/v1/embed", raw=raw)
    assert status == 422 and content["error"]["code"] == "input"


def test_a_model_of_voices_refuses_pictures_and_silence(voices):
    with serving(voices) as server:
        good = b64(recording())
        for content, message in (
            (picture(), "a picture (PNG) and small compares recordings"),
            (wav(np.zeros(16_000)), "input 1 is silent: its largest sample is 0 of full scale"),
            (recording()[:-500], "the file is truncated"),
            (b"hello", "it is not audio, or damaged"),
        ):
            status, said = server.refusal("embed", {"inputs": [b64(content)]})
            assert status == 422 and message in said
        status, said = server.refusal("verify", {"pairs": [[good, b64(picture())]]})
        assert status == 422 and "file B is a picture" in said
        found = server.post("verify", {"pairs": [[good, good], [good, b64(picture())]]})
        assert "file B of pair 2 is a picture" in found["results"][1]["error"]["message"]
        found = server.post("verify", {"pairs": [[good, b64(recording(1))]], "show": True})
        view = found["results"][0]["shown"][0]
        assert view["seconds"] == 1.0 and len(view["peaks"]) == 400 and view["filter_bank"]


def test_a_model_of_faces_refuses_recordings_and_empty_pictures(server, monkeypatch):
    for content, message in (
        (recording(), "a recording (WAV) and small compares pictures"),
        (picture()[:100], "input 1 cannot be read"),
        (picture(size=8), "input 1 cannot be used: only pictures of 16 x 16 pixels"),
    ):
        status, said = server.refusal("embed", {"inputs": [b64(content)]})
        assert status in (422, 501)
        assert message in said or "no face was found in input 1" in said
    from PIL import Image

    from qmargin.data.images import encode_image

    plain = encode_image(np.array(Image.new("RGB", (16, 16), (9, 9, 9))), format="PNG")
    status, said = server.refusal("embed", {"inputs": [b64(plain)]})
    assert status == 422 and "input 1 has a single colour (9, 9, 9)" in said


def test_a_server_without_a_detector_says_which_pictures_it_takes(directory, monkeypatch, capsys):
    monkeypatch.setattr("qmargin.data.alignment.why_no_detector", lambda: "dlib is missing")
    note = (
        "only pictures of 16 x 16 pixels can be used: dlib is missing; install the extra "
        "qmargin[detector], or start with --fit resize"
    )
    with serving(directory) as server:
        status, said = server.refusal("embed", {"inputs": [b64(picture(size=8))]})
        assert status == 501 and said == f"input 1 cannot be used: {note}"
        assert server.post("embed", {"inputs": [b64(picture())]})
    monkeypatch.setattr("qmargin.serve.server.run", lambda app, listener: None)
    run_command("serve", directory, "--no-open", "--port", 0)
    assert note in capsys.readouterr().out
    run_command("serve", directory, "--no-open", "--port", 0, "--fit", "resize")
    assert "dlib" not in capsys.readouterr().out
    with pytest.raises(BackendError, match="--fit align finds the face in every picture, and dlib"):
        run_command("serve", directory, "--no-open", "--port", 0, "--fit", "align")


def test_a_photo_without_a_face_is_refused(directory, monkeypatch):
    class Detector:
        def find(self, image):
            return []

    monkeypatch.setattr("qmargin.data.alignment.FaceDetector", Detector)
    with serving(directory) as server:
        status, said = server.refusal("embed", {"inputs": [b64(picture(size=50))]})
    assert status == 422 and "no face was found in input 1; give a photo with a face" in said


def test_a_model_of_arrays_cannot_be_served(directory):
    from qmargin.serve.inputs import Limits, Reader

    model = load_model(directory)
    model.card = ModelCard("numbers", "arrays", (4,), "small_mlp", 8)
    with pytest.raises(ConfigError, match="numbers takes arrays, not files"):
        Reader(model, Limits())


def test_who_is_enrolled_is_found_and_forgotten(directory):
    with serving(directory) as server:
        status, said = server.refusal("identify", {"inputs": [b64(picture())]})
        assert status == 422 and "the gallery is empty" in said
        for seed in range(12):
            body = {
                "name": f"Person {seed}",
                "inputs": [b64(picture(seed)), b64(picture(50 + seed))],
            }
            answer = server.post("gallery", body)
        assert answer["num_samples"] == 24 and answer["names"]["Person 3"] == 2
        again = server.post("gallery", body)  # the same files twice are one
        assert again["num_samples"] == 24
        found = server.post("identify", {"inputs": [b64(picture(3))], "fpir": 0.5, "show": True})
        candidates = found["results"][0]["candidates"]
        assert len(candidates) == 10 and candidates[0]["name"] == "Person 3"
        assert candidates[0]["score"] == pytest.approx(1.0)
        assert candidates[0]["is_accepted"] is True
        assert found["far"] == pytest.approx(0.5 / 24)
        scores = [one["score"] for one in candidates]
        assert scores == sorted(scores, reverse=True)
        assert [one["is_accepted"] for one in candidates] == [
            score >= found["threshold"] for score in scores
        ]
        status, content, _ = server.ask("DELETE", "/v1/gallery/Person%203")
        assert status == 200 and "Person 3" not in content["names"]
        status, content, _ = server.ask("DELETE", "/v1/gallery/Person%203")
        assert status == 404 and "the gallery has no 'Person 3'" in content["error"]["message"]


def test_nobody_is_named_below_the_threshold(directory):
    """Open-set rejection: the best candidate is shown and not accepted."""
    with serving(directory) as server:
        server.post("gallery", {"name": "Ada", "inputs": [b64(picture(0))]})
        limits = [server.service.decisions.search_at(fpir, 1).threshold for fpir in (0.5, 0.001)]
        probe = server.post("identify", {"inputs": [b64(picture(1))], "fpir": 0.001})
        best = probe["results"][0]["candidates"][0]
        assert limits[0] < limits[1]
        assert best["is_accepted"] == (best["score"] >= limits[1])


def test_a_store_keeps_embeddings_and_belongs_to_its_model(directory, tmp_path):
    store = tmp_path / "g.safetensors"
    with serving(directory, store=store) as server:
        server.post("gallery", {"name": "Ada", "inputs": [b64(picture(0)), b64(picture(1))]})
        server.post("gallery", {"name": "Bea", "inputs": [b64(picture(2))]})
    with serving(directory, store=store) as server:
        assert server.ask("GET", "/v1/gallery")[1]["names"] == {"Ada": 2, "Bea": 1}
        found = server.post("identify", {"inputs": [b64(picture(2))], "fpir": 0.5})
        assert found["results"][0]["candidates"][0]["name"] == "Bea"
        for name in ("Ada", "Bea"):
            server.ask("DELETE", f"/v1/gallery/{name}")
        assert not store.exists()
        server.post("gallery", {"name": "Ada", "inputs": [b64(picture(0))]})
    about = {"model": "ab", "flip": "none", "fit": "auto"}
    with pytest.raises(ConfigError, match="was written with the model"):
        Gallery(8, about=about, store=store)
    with pytest.raises(ConfigError, match=r"does not end in \.safetensors"):
        Gallery(8, about=about, store=tmp_path / "g.npz")
    with pytest.raises(ConfigError, match="existing folder"):
        Gallery(8, about=about, store=tmp_path / "no" / "g.safetensors")
    foreign = tmp_path / "notes.safetensors"
    foreign.write_bytes(b"not ours")
    with pytest.raises(ConfigError, match="this command did not write it"):
        Gallery(8, about=about, store=foreign)
    assert foreign.read_bytes() == b"not ours"


def test_a_folder_is_a_gallery_and_the_store_spares_its_embedding(directory, tmp_path):
    folder = tmp_path / "people"
    for place, seed in (("Ada/1.png", 1), ("Ada/2.png", 2), ("Bea.png", 3)):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(picture(seed))
    (folder / "Cy.png").write_bytes(b"broken")
    names = ["Ada/1.png", "Ada/2.png", "Bea.png", "Cy.png"]
    store = tmp_path / "g.safetensors"
    with serving(directory, store=store) as server:
        problems = server.service.enrol_folder(folder, names)
        assert [name for name, _ in problems] == ["Cy.png"]
        assert server.service.gallery.names == {"Ada": 2, "Bea": 1}
    with serving(directory, store=store) as server:
        server.service.enrol_folder(folder, names[:3])
        assert server.service._batcher.num_batches == 0


def test_the_store_of_a_large_folder_is_written_few_times(directory, tmp_path, monkeypatch):
    """Every time all of it is written, so that a write for every few files would take hours."""
    folder = tmp_path / "people"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.png").write_bytes(picture(number))
    names = sorted(path.name for path in folder.iterdir())
    (folder / "copy").mkdir()
    (folder / "copy" / "0.png").write_bytes(picture(0))
    monkeypatch.setattr("qmargin.serve.service.ENROLLED_TOGETHER", 2)
    written, done = [], []
    monkeypatch.setattr(
        "qmargin.serve.gallery.write_embedding_file",
        lambda path, keys, matrix, *, metadata: written.append(len(keys)),
    )
    with serving(directory, store=tmp_path / "g.safetensors") as server:
        again = [*names, "copy/0.png", "copy/0.png"]
        progress = lambda *counts: done.append(counts)  # noqa: E731
        assert server.service.enrol_folder(folder, again, progress) == []
        assert server.service.gallery.names == {"copy": 1, **{str(n): 1 for n in range(40)}}
    assert written[-1] == 41 and len(written) <= 6
    assert done[-1] == (42, 42) and len(done) == 21


def test_names_of_the_gallery():
    assert name_in("Ada Lovelace/x/1.png") == "Ada Lovelace" and name_in("Bea.jpg") == "Bea"
    assert checked_name("  Émilie  du Châtelet ") == "Émilie du Châtelet"
    for name in ("", "a/b", "x" * 81, "a\x1b[1m", "\u202egnirts"):
        with pytest.raises(ConfigError, match="printable characters without a slash"):
            checked_name(name)


def test_a_gallery_finds_the_best_sample_of_everybody():
    gallery = Gallery(2, about={})
    rows = [np.array(row, np.float32) for row in ([1, 0], [0, 2], [3, 3])]
    gallery.add([Entry("a", "1"), Entry("a", "2"), Entry("b", "3")], rows)
    found = gallery.search(np.array([0.1, 1.0], np.float32), 5)
    assert [one.name for one in found] == ["a", "b"]
    assert found[0].score == pytest.approx(cosine(rows[1], np.array([0.1, 1.0])))
    with pytest.raises(DataError, match="is zero and has no direction"):
        gallery.search(np.zeros(2, np.float32), 5)


def test_an_exported_model_of_people_scores_as_it_was_evaluated(tmp_path):
    """Its network takes pixels from 0 to 1; a run beside its result has thresholds, too."""
    options = (
        "data.num_classes=8",
        "data.options.samples_per_class=4",
        "data.options.in_memory=true",
    )
    recipe = replace(
        drawn_recipe(PEOPLE_SIZES["cpu"]),
        run=replace(tiny_recipe().run, max_steps=1, save_every_steps=1),
    )
    recipe = apply_settings(recipe, ("data.batch_size=8", *options))
    outcome = train(recipe, tmp_path / "run", device="cpu")
    assert outcome.checkpoint is not None
    model = load_model(tmp_path / "run")
    assert model.card.pixels == "0 to 1" and export.recipe_of(tmp_path / "run") == recipe
    people = build_dataset(recipe).held_out("test", 3, 2)
    plain = embed_dataset(load_backbone(recipe, outcome.checkpoint), people).matrix
    shown = model.embed(list(people.images(np.arange(6))))
    np.testing.assert_allclose(shown, plain, rtol=1e-4, atol=1e-4)
    made = find_made(tmp_path / "run", people.size)
    assert made is not None and made.noun == "person"
    with serving(tmp_path / "run", made=made) as server:
        pair = server.post("generate", {"same": True, "number": 3})["files"]
        assert pair != server.post("generate", {"same": False, "number": 3})["files"]
        assert server.post("verify", {"pairs": [pair]})["results"][0]["score"] <= 1.0


def test_generated_voices_can_be_tried(voices, monkeypatch):
    recipe = tiny_recipe()
    data = replace(recipe.data, kind="voices", options={"seed": 1})
    monkeypatch.setattr(export, "recipe_of", lambda model: replace(recipe, data=data))
    made = find_made(voices, None)
    assert made is not None and made.noun == "voice"
    with serving(voices, made=made) as server:
        assert server.ask("GET", "/v1/model")[1]["generated"] == "voice"
        pair = server.post("generate", {"same": False, "number": 5})["files"]
        assert -1.0 <= server.post("verify", {"pairs": [pair]})["results"][0]["score"] < 1.0


def test_files_beyond_the_largest_gallery_are_left_out_and_the_others_enrolled(
    directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("qmargin.serve.gallery.MOST_ENTRIES", 3)
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(picture(seed=number))
    with serving(directory, fit="resize") as server:
        names = [f"{number}.png" for number in range(5)]
        problems = server.service.enrol_folder(tmp_path, names)
        assert [name for name, _ in problems] == names[3:] and len(server.service.gallery) == 3
        assert "at most 3 are held" in problems[0][1]


def test_a_run_beside_its_result_has_thresholds(tmp_path, capsys):
    directory = face_model(tmp_path / "m", thresholds=False)
    card = load_model(directory).card
    write_result(directory / "result.json", synthetic_result(card=card.to_texts()))
    assert load_model(directory).thresholds is None
    served = model_for_service(directory, device="cpu")
    assert served.thresholds is not None and served.thresholds.det is not None
    write_result(directory / "result.json", synthetic_result(card={"weights_sha256": "0" * 64}))
    assert model_for_service(directory, device="cpu").thresholds is None  # of other weights
    assert "the result is of weights 000000000000" in capsys.readouterr().err


def test_what_waits_goes_through_the_model_together():
    began, go = threading.Event(), threading.Event()
    sizes = []

    def embed(samples):
        sizes.append(len(samples))
        began.set()
        assert go.wait(10)
        return np.array(samples, np.float32)

    batcher = Batcher(embed, most=8)
    futures = [batcher.submit(np.full(2, 0.0))]
    assert began.wait(10)
    futures += [batcher.submit(np.full(2, float(number))) for number in range(1, 11)]
    go.set()
    rows = [future.result(10) for future in futures]
    assert [row[0] for row in rows] == list(range(11)) and sizes == [1, 8, 2]
    batcher.close()


def test_a_sample_that_the_model_refuses_fails_alone():
    def embed(samples):
        if any(sample[0] < 0 for sample in samples):
            raise DataError("negative")
        time.sleep(0.01)
        return np.array(samples, np.float32)

    batcher = Batcher(embed)
    futures = [batcher.submit(np.full(2, float(v))) for v in (1, 2, -1, 3)]
    found = [future.exception(10) for future in futures]
    assert [type(error) for error in found] == [type(None), type(None), DataError, type(None)]
    batcher.close()


def test_a_fault_of_the_model_reaches_everybody_who_waits():
    def embed(samples):
        raise MemoryError("no memory")

    batcher = Batcher(embed)
    assert isinstance(batcher.submit(np.zeros(1)).exception(10), MemoryError)
    assert isinstance(batcher.submit(np.zeros(1)).exception(10), MemoryError)  # it goes on
    batcher.close()


def test_the_client_of_the_guide(server, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "guide" / "serve.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 15
    client: dict[str, Any] = {}
    exec(code, client)
    (tmp_path / "a.png").write_bytes(picture())
    file = client["encoded"](tmp_path / "a.png")
    answer = client["ask"]("verify", {"pairs": [[file, file]]}, url=server.url.rstrip("/"))
    assert answer["results"][0]["score"] == pytest.approx(1.0)


def test_the_description_is_of_what_is_answered(server):
    _, described, _ = server.ask("GET", "/v1/openapi.json")
    assert described["openapi"] == "3.1.0"
    found = {(m.upper(), path) for path, methods in described["paths"].items() for m in methods}
    assert found == {(route.method, route.path) for route in api.ROUTES}
    server.post("gallery", {"name": "Ada", "inputs": [b64(picture())]})
    pair = [b64(picture()), b64(picture(1))]
    for method, path, body in (
        ("GET", "/v1/model", None),
        ("POST", "/v1/embed", {"inputs": [*pair, "!"], "show": True}),
        ("POST", "/v1/verify", {"pairs": [pair], "show": True}),
        ("POST", "/v1/identify", {"inputs": pair, "fpir": 0.1, "show": True}),
        ("GET", "/v1/gallery", None),
        ("POST", "/v1/gallery", {"name": "Ada", "inputs": pair}),
    ):
        status, answer, _ = server.ask(method, path, body)
        assert status == 200
        responses = described["paths"][path][method.lower()]["responses"]
        schema = responses["200"]["content"]["application/json"]["schema"]
        assert list(mismatches(answer, schema, described)) == []
    assert list(mismatches({"results": [{"score": "x"}]}, {"$ref": VERIFY}, described))


VERIFY = "#/components/schemas/VerifyAnswer"
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def mismatches(value, schema, whole, place="answer"):
    """Where a value is not as its JSON schema says; keys that the schema does not know, too."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from mismatches(value, whole["components"]["schemas"][name], whole, place)
    elif "anyOf" in schema:
        if all(list(mismatches(value, part, whole)) for part in schema["anyOf"]):
            yield f"{place} fits none"
    elif "type" in schema:
        if not isinstance(value, TYPES[schema["type"]]):
            yield f"{place} is {type(value).__name__}, not {schema['type']}"
        elif schema["type"] == "array":
            for number, item in enumerate(value):
                yield from mismatches(item, schema["items"], whole, f"{place}[{number}]")
        elif "properties" in schema:
            yield from (f"{place}.{key} is unknown" for key in value.keys() - schema["properties"])
            yield from (f"{place}.{key} is missing" for key in set(schema["required"]) - set(value))
            for key in value.keys() & schema["properties"].keys():
                yield from mismatches(
                    value[key], schema["properties"][key], whole, f"{place}.{key}"
                )
