"""``qmargin evaluate lfw|ijb|pairs`` from files to tables and results."""

from functools import partial

import numpy as np
import pytest

from helpers.commands import run_command
from helpers.faces import PatchModel, face, folded_pairs, write_bin, write_release
from helpers.model_directories import make_model
from helpers.results import some_run
from qmargin.data.images import encode_image
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embeddings import read_embeddings, stored_flip
from qmargin.evaluation.model import load_model
from qmargin.evaluation.protocols.face_sets import read_pair_trials, read_verification_set
from qmargin.evaluation.result import read_result
from qmargin.models.directory import ModelCard


class CardModel(PatchModel):
    """The model of the tests with a card, as one from a directory has it."""

    card = ModelCard("patches", "images", (3, 112, 112), "small", 192, weights_sha256="ab" * 32)
    run = some_run("patches", checkpoint_sha256="ab" * 32)


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    monkeypatch.setattr("qmargin.evaluation.model.load_model", lambda *_, **__: CardModel())


run = partial(run_command, "evaluate")


@pytest.fixture
def lfw(tmp_path):
    return write_bin(tmp_path / "lfw.bin", *folded_pairs(noise=110.0))


def test_a_set_in_folds(tmp_path, lfw, capsys):
    out = tmp_path / "lfw.json"
    options = ("--out", out, "--replicates", 20, "--insightface", "--pictures", tmp_path / "p")
    run("lfw", lfw, "--model", "DIR", *options)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("10-fold accuracy, InsightFace", "TAR at FAR 10 %"))
    found = read_result(out)
    assert found.system.name == "patches"
    assert found.protocol.name == "lfw"
    assert [source.role for source in found.sources] == ["trials", "embeddings"]
    assert found.protocol.flip == "sum"
    assert found.system.model_card["weights_sha256"] == "ab" * 32
    assert found.run == CardModel.run
    assert any((tmp_path / "p").iterdir())
    made = tmp_path / "lfw.embeddings.safetensors"
    assert stored_flip(made) == "both"
    again = tmp_path / "again.json"
    run("lfw", lfw, "--embeddings", made, "--out", again, "--replicates", 0, "--insightface")
    assert read_result(again).measures.extra == found.measures.extra
    assert read_result(again).measures.eer.value == found.measures.eer.value


def test_embeddings_of_something_else_are_refused(tmp_path, lfw):
    out = tmp_path / "r.json"
    run("lfw", lfw, "--model", "DIR", "--no-flip", "--out", out, "--replicates", 0)
    made = tmp_path / "r.embeddings.safetensors"
    other = write_bin(tmp_path / "cfp.bin", *folded_pairs(each=3))
    np.savez(tmp_path / "e.npz", keys=np.array(["a"]), embeddings=np.ones((1, 4)))
    absent = tmp_path / "absent" / "r.json"
    for arguments, error, message in (
        ((lfw, "--embeddings", made, "--out", out), DataError, "flip=none, but flip=both"),
        ((other, "--embeddings", made, "--no-flip", "--out", out), DataError, "other images"),
        ((lfw, "--embeddings", tmp_path / "e.npz", "--out", out), DataError, "mirror images"),
        ((lfw, "--out", out), ConfigError, "neither --model nor --embeddings"),
        ((lfw, "--model", "DIR", "--out", absent), ConfigError, "--out"),
    ):
        with pytest.raises(error, match=message):
            run("lfw", *arguments)


def test_a_model_directory_of_another_size(tmp_path, lfw, monkeypatch):
    """A network on disk that takes 16 x 16 images: every protocol brings them to its size."""
    monkeypatch.undo()
    make_model(tmp_path / "model")
    release = write_release(tmp_path / "IJBC", num_subjects=4, num_probes=1)
    quick = ("--model", tmp_path / "model", "--replicates", 0, "--fars", 0.5)
    for what in (("lfw", lfw), ("ijb", release.folder)):
        out = tmp_path / f"{what[0]}.json"
        run(*what, "--out", out, *quick)
        assert read_result(out).system.name == "small"
    made = read_embeddings(tmp_path / "lfw.embeddings.safetensors")
    model = load_model(tmp_path / "model")
    images = read_verification_set(lfw).images(16)
    expected = model.embed(np.stack([images[row][0] for row in range(3)]))
    np.testing.assert_allclose(made.matrix[:3, :8], expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_something_else(tmp_path, lfw, monkeypatch):
    monkeypatch.setattr(CardModel, "card", ModelCard("audio", "audio", (), "small", 8))
    with pytest.raises(ConfigError, match="takes"):
        run("lfw", lfw, "--model", "DIR", "--out", tmp_path / "r.json")


def test_templates_one_to_one(tmp_path, capsys):
    release = write_release(tmp_path / "IJBC")
    out = tmp_path / "r.json"
    options = ("--replicates", 20, "--fars", 0.1, "--pictures", tmp_path / "p")
    run("ijb", release.folder, "--model", "DIR", "--out", out, *options)
    assert "subjects are those of the release" in capsys.readouterr().out
    result = read_result(out)
    assert result.protocol.name == "IJBC"
    assert result.protocol.num_trials == len(release.pairs)
    assert result.protocol.kind == "ijb-1:1"
    assert result.protocol.pooling == "norms kept, detector scores used"
    assert any((tmp_path / "p").iterdir())
    made = tmp_path / "r.embeddings.safetensors"
    values = set()
    for number, switches in enumerate(
        [(), ("--unit-embeddings",), ("--no-detector-scores",), ("--rule", "nearest")]
    ):
        path = tmp_path / f"{number}.json"
        run(
            "ijb", release.folder, "--embeddings", made, "--out", path, "--replicates", 0,
            "--fars", 0.1, *switches,
        )  # fmt: skip
        values.add(str(read_result(path).hardest))
    assert len(values) == 3  # the rule changes no score


def test_templates_in_galleries(tmp_path, capsys):
    release = write_release(tmp_path / "IJBC")
    out = tmp_path / "r.json"
    options = ("--task", "1:N", "--replicates", 0, "--fars", 0.2)
    run("ijb", release.folder, "--model", "DIR", "--out", out, *options)
    assert "rank-1 rate in G2" in capsys.readouterr().out
    assert not out.exists()
    for gallery in ("G1", "G2"):
        found = read_result(tmp_path / f"r.{gallery}.json")
        assert next(iter(found.measures.extra)) == f"rank-1 rate in {gallery}"
        assert found.protocol.kind == "ijb-1:N"
        assert found.protocol.num_trials == 24


def write_people(folder, *, extension="png"):
    for identity in range(8):
        (folder / f"n{identity}").mkdir(parents=True)
        for photo in (1, 2):
            path = folder / f"n{identity}" / f"n{identity}_{photo:04d}.{extension}"
            path.write_bytes(encode_image(face(identity, photo), format="PNG"))


def test_the_pairs_of_lfw_have_folds(tmp_path):
    write_people(tmp_path)
    lines = ["2 4\n"]
    for fold in range(2):
        people = range(4 * fold, 4 * fold + 4)
        lines += [f"n{each}\t1\t2\n" for each in people]
        lines += [f"n{each}\t1\tn{(each + 1) % 8}\t2\n" for each in people]
    (tmp_path / "pairs.txt").write_text("".join(lines))
    out = tmp_path / "r.json"
    run(
        "pairs", tmp_path / "pairs.txt", "--model", "DIR", "--out", out, "--replicates", 0,
        "--fars", 0.5, "--extension", "png",
    )  # fmt: skip
    found = read_result(out)
    assert list(found.measures.extra) == ["2-fold accuracy"]
    assert found.measures.extra["2-fold accuracy"].value == 1.0
    assert found.protocol.num_subjects == 8
    (tmp_path / "pairs.txt").write_text("".join([lines[0], *lines[2:], lines[2]]))
    with pytest.raises(DataError, match=r"pairs.txt, pair 16: .* is also in .*, pair 1"):
        run("pairs", tmp_path / "pairs.txt", "--model", "DIR", "--out", out)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.csv", "a,b,label,fold\nn0/n0_0001.png,n0/n0_0002.png,1,0\n"),
        ("p.csv", "n0/n0_0001.png,n0/n0_0002.png,same\n"),
        ("p.txt", "n0/n0_0001.png n0/n0_0002.png target\n"),
    ],
)
def test_lists_of_other_columns(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    found = read_pair_trials(tmp_path / name)
    assert found.trials.keys.trial(0) == ("n0/n0_0001.png", "n0/n0_0002.png")
    assert found.trials.is_genuine.tolist() == [True]
    assert (found.folds is None) == ("fold" not in content)
    (tmp_path / name).write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_pair_trials(tmp_path / name)


def test_pairs_of_files(tmp_path):
    write_people(tmp_path / "img")
    names = [f"n{i}/n{i}_000{photo}.png" for i in range(8) for photo in (1, 2)]
    lines = [f"{a},{b},{int(a[:2] == b[:2])}\n" for a in names[::2] for b in names[1::2]]
    (tmp_path / "pairs.csv").write_text("enrol,test,label\n" + "".join(lines))
    out = tmp_path / "r.json"
    options = ("--model", "DIR", "--out", out, "--replicates", 20, "--fars", 0.1)
    run("pairs", tmp_path / "pairs.csv", "--images", tmp_path / "img", *options)
    result = read_result(out)
    assert result.protocol.interval.method == "subject bootstrap"  # folders are people
    features = {}
    for name in names:
        image = face(int(name[1]), int(name[-5]))[None]
        feature = PatchModel().embed(image) + PatchModel().embed(image[:, :, ::-1])
        features[name] = feature[0] / np.linalg.norm(feature)
    worst = max(
        (float(features[a] @ features[b]), a, b)
        for a in names[::2]
        for b in names[1::2]
        if a[:2] != b[:2]
    )
    first = result.hardest.false_accepts[0]
    assert (first.enrol, first.test) == worst[1:]
    assert first.score == pytest.approx(worst[0], abs=1e-6)
    (tmp_path / "img" / names[6]).write_bytes(b"<html>")
    with pytest.raises(DataError, match=rf"'{names[6]}' cannot be embedded"):
        run("pairs", tmp_path / "pairs.csv", "--images", tmp_path / "img", *options)
    with pytest.raises(ConfigError, match="is not a folder"):
        run("pairs", tmp_path / "pairs.csv", "--images", tmp_path / "none", *options)
