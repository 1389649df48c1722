"""Embeddings of images: what mirror images add, what is refused, and runs that are killed."""

import csv
import hashlib
import json
import os
import re
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from safetensors.numpy import save, save_file
from torch import nn

from helpers.faces import ArrayImages, PatchModel, embedded, face
from helpers.model_directories import make_model, pictures, write_pictures
from helpers.recordings import encoded, real_speech, speaker_folders, tone
from qmargin.data.audio import LEAST_SAMPLES
from qmargin.data.open import open_index
from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation import embed
from qmargin.evaluation.embeddings import map_embeddings, read_embeddings, read_seconds, stored_flip
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.model import Inputs, load_model
from qmargin.evaluation.protocols.speakers import evaluate_speakers
from qmargin.evaluation.trials import read_trials
from qmargin.models.speaker import SpeakerInput, SpeakerResNet


@pytest.fixture
def images():
    return ArrayImages([face(number, 0) for number in range(11)])


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("flip", ["none", "sum", "both"])
def test_rows_are_the_models_answers_in_order(images, flip, batch_size):
    found = embedded(images, flip=flip, batch_size=batch_size, num_workers=3)
    plain = np.stack([PatchModel().embed(image[None])[0] for image in images.images])
    mirror = np.stack([PatchModel().embed(image[None, :, ::-1])[0] for image in images.images])
    assert not np.allclose(plain, mirror)
    expected = {"none": plain, "sum": plain + mirror, "both": np.hstack([plain, mirror])}[flip]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_a_tensor_of_any_precision_is_taken(images):
    class Half(PatchModel):
        def embed(self, images):
            return torch.from_numpy(super().embed(images)).bfloat16().requires_grad_()

    np.testing.assert_allclose(embedded(images, model=Half()), embedded(images), rtol=1e-2)


def written(path, model, images, **options):
    keys = [f"p/{number}.jpg" for number in range(len(images))]
    settings = {"keys": keys, "model_id": "m", "batch_size": 2, "flip": "sum", **options}
    return embed.write_embeddings(model, images, path, **settings)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_can_be_read_and_only_by_its_owner(tmp_path, images):
    calls, path = [], tmp_path / "e.safetensors"
    written(path, PatchModel(), images, progress=lambda *numbers: calls.append(numbers))
    found, mapped = read_embeddings(path), map_embeddings(path)
    assert found.keys == tuple(f"p/{number}.jpg" for number in range(11))
    np.testing.assert_array_equal(found.matrix, embedded(images, flip="sum"))
    assert (mode_of(path), stored_flip(path), calls[-1]) == (0o600, "sum", (11, 11))
    assert [each.name for each in tmp_path.iterdir()] == ["e.safetensors"]
    assert isinstance(mapped.matrix, np.memmap)
    assert (mapped.keys, mapped.source) == (found.keys, found.source)
    np.testing.assert_array_equal(mapped.matrix, found.matrix)


class Dying(PatchModel):
    def embed(self, images):
        if self.num_calls == 6:
            raise KeyboardInterrupt
        return super().embed(images)


def test_a_stopped_run_goes_on_and_ends_in_the_same_bytes(tmp_path, images, monkeypatch):
    monkeypatch.setattr(embed, "_ROWS_BETWEEN_RECORDS", 4)
    whole = written(tmp_path / "whole.safetensors", PatchModel(), images).read_bytes()
    path = tmp_path / "parts.safetensors"
    with pytest.raises(KeyboardInterrupt):
        written(path, Dying(), images)
    assert not path.exists()
    record = json.loads((tmp_path / "parts.safetensors.progress").read_bytes())
    assert record["num_done"] == 4
    with pytest.raises(DataError, match="other inputs or options"):
        written(path, PatchModel(), images, model_id="another")
    rest = PatchModel()
    written(path, rest, images)
    assert rest.num_calls == 8  # batches of 2 from the fifth image on, twice
    assert path.read_bytes() == whole
    with pytest.raises(KeyboardInterrupt):
        written(path, Dying(), images)
    written(path, PatchModel(), images, model_id="another", restart=True)
    assert len(read_embeddings(path)) == 11


def test_bad_images_and_answers_are_named(tmp_path, images):
    class Broken(ArrayImages):
        def __getitem__(self, index):
            if index == 5:
                raise CorruptSample("zero bytes")
            return super().__getitem__(index)

    path = tmp_path / "e.safetensors"
    with pytest.raises(DataError, match=r"'p/5.jpg' .*\(zero bytes\)"):
        written(path, PatchModel(), Broken(images.images))
    images.images[3] = images.images[3][:100]
    with pytest.raises(ShapeError, match=r"'p/3.jpg' .*\(100, 112, 3\)"):
        written(path, PatchModel(), images)
    images.images[3] = face(3, 0).astype(np.float32)
    with pytest.raises(ShapeError, match=r"'p/3\.jpg' is a float32 array"):
        written(path, PatchModel(), images)


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def embed(self, images):
        return self.answer[: len(images)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((64,)), r"\(11,\)"),
        (np.zeros((5, 4)), r"\(5, 4\) for 11"),
        (np.zeros((64, 0)), r"\(11, 0\)"),
        (np.where(np.arange(64)[:, None] == 7, np.nan, np.ones((64, 4))), "'7' is not finite"),
    ],
)
def test_answers_that_are_no_embeddings(images, answer, message):
    with pytest.raises((ShapeError, DataError), match=message):
        embedded(images, model=Answers(answer))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("e.safetensors", {"flip": "half"}, ConfigError, "'half'"),
        ("e.safetensors", {"batch_size": 0}, ConfigError, "batch_size=0"),
        ("e.npz", {}, ConfigError, r"\.safetensors"),
        ("e.safetensors", {"keys": ["a", "b"]}, ShapeError, "2 keys for 11 samples"),
        ("e.safetensors", {"keys": [*"baacdefghij"]}, DataError, "key 'a'"),
    ],
)
def test_settings_that_are_refused(tmp_path, images, name, options, error, message):
    with pytest.raises(error, match=message):
        written(tmp_path / name, PatchModel(), images, **options)
    assert list(tmp_path.iterdir()) == []


def test_no_samples_are_refused():
    with pytest.raises(DataError, match="0 samples"):
        embedded(ArrayImages([]))


def test_files_that_are_not_mapped(tmp_path):
    np.savez(tmp_path / "e.npz", keys=np.array(["a"]), embeddings=np.ones((1, 4)))
    assert map_embeddings(tmp_path / "e.npz").keys == ("a",)
    assert stored_flip(tmp_path / "e.npz") is None
    path = tmp_path / "e.safetensors"
    rows = np.ones((2, 4), np.float64)
    save_file({"embeddings": rows}, path, metadata={"keys": '["a", "b"]'})
    assert map_embeddings(path).matrix.dtype == np.float64
    save_file({"embeddings": rows.astype("f4")}, path, metadata={"keys": '["a", "a"]'})
    with pytest.raises(DataError, match="the name 'a' has two"):
        map_embeddings(path)
    for keys in ("[[1], [2]]", "{", '"ab"'):
        save_file({"embeddings": rows.astype("f4")}, path, metadata={"keys": keys})
        with pytest.raises(DataError, match="key"):
            map_embeddings(path)
    rows[1, 2] = np.nan
    save_file({"embeddings": rows.astype("f4")}, path, metadata={"keys": '["a", "b"]'})
    with pytest.raises(DataError, match=r"the embedding of 'b' \(number 1\) is not finite"):
        map_embeddings(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="was it cut short"):
        map_embeddings(path)


class Counting:
    """A network that counts what it is given, and may stop."""

    def __init__(self, network, stop_at=None):
        self.network, self.stop_at, self.lengths = network.eval(), stop_at, list[int]()

    @torch.no_grad()
    def embed(self, waveforms):
        if len(self.lengths) == self.stop_at:
            raise KeyboardInterrupt
        self.lengths.append(len(waveforms[0]))
        return self.network(torch.from_numpy(np.stack(waveforms)))


class MeanSpectrum(nn.Module):
    """How much each bin moves: enough to tell some speakers apart."""

    def __init__(self):
        super().__init__()
        self.frontend = SpeakerInput()

    def forward(self, waveforms):
        return self.frontend(waveforms).std(2)


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.wav"))


@pytest.fixture
def audio(tmp_path):
    return speaker_folders(tmp_path / "audio")


def small_network():
    torch.manual_seed(3)
    return SpeakerResNet((1, 1, 1, 1), 4, width=4)


def test_every_recording_is_embedded_whole(audio, tmp_path):
    model, names = Counting(small_network()), names_in(audio)
    out = tmp_path / "e.safetensors"
    assert embed.write_embeddings(model, embed.Recordings(audio, names), out, model_id="m") == out
    found = read_embeddings(out)
    assert list(found.keys) == names
    assert model.lengths == [8000, 9600] * 3
    samples, _ = soundfile.read(audio / names[3], dtype="float32")
    expected = model.network(torch.from_numpy(samples)[None]).detach().numpy()[0]
    np.testing.assert_array_equal(found.matrix[3], expected)
    assert read_seconds(out)[names[3]] == pytest.approx(0.6)
    bare = embed.Recordings(audio, ["id0/video/00001"])  # a name without its suffix
    path = embed.write_embeddings(model, bare, tmp_path / "b.safetensors", model_id="m")
    assert read_embeddings(path).keys == ("id0/video/00001",)
    assert mode_of(out) == 0o600
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audio", "b.safetensors", "e.safetensors"]


def test_a_killed_run_goes_on_and_ends_with_the_same_file(audio, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "_ROWS_BETWEEN_RECORDS", 2)
    recordings = embed.Recordings(audio, names_in(audio))
    whole, out = tmp_path / "whole.safetensors", tmp_path / "e.safetensors"
    embed.write_embeddings(Counting(small_network()), recordings, whole, model_id="m")
    with pytest.raises(KeyboardInterrupt):
        embed.write_embeddings(Counting(small_network(), stop_at=5), recordings, out, model_id="m")
    assert not out.exists()
    rest = Counting(small_network())
    embed.write_embeddings(rest, recordings, out, model_id="m")
    assert len(rest.lengths) == 2
    assert out.read_bytes() == whole.read_bytes()


def test_a_very_short_recording_is_repeated(tmp_path):
    (tmp_path / "short.wav").write_bytes(encoded(tone(0.05)))
    samples, seconds = embed.Recordings(tmp_path, ["short.wav"])[0]
    assert len(samples) == 2400
    assert seconds == 0.05
    np.testing.assert_array_equal(samples[:800], samples[800:1600])


@pytest.mark.parametrize("seconds", [0.05, 0.104, 0.106, 0.12, 0.2])
def test_trials_and_single_files_repeat_alike(seconds, tmp_path):
    """The threshold of an evaluation is that of ``verify``: both embed the same samples."""
    path = tmp_path / "short.wav"
    path.write_bytes(encoded(tone(seconds)))
    samples, _ = embed.Recordings(tmp_path, ["short.wav"])[0]
    card = SimpleNamespace(modality="audio")
    np.testing.assert_array_equal(samples, Inputs(card).sample(path, "it"))
    assert len(samples) >= LEAST_SAMPLES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "zero bytes"),
        (b"<html>not found</html>", "not audio"),
        (encoded(tone(1.0))[:20000], "truncated"),
        (encoded(tone(1.0)), "at most 1 "),
        (None, "there is no such file"),
    ],
)
def test_damaged_recordings_are_named(audio, content, message):
    bad = audio / "id1" / "video" / "00000.wav"
    bad.unlink()
    if content is not None:
        bad.write_bytes(content)
    recordings = embed.Recordings(
        audio, ["id0/video/00000.wav", "id1/video/00000.wav"], max_seconds=0.55
    )
    with pytest.raises(DataError, match=rf"'id1/video/00000.wav' cannot be embedded \(.*{message}"):
        written(
            audio / "e.safetensors", Counting(small_network()), recordings, keys=None, flip="none"
        )


def test_nothing_outside_the_folder_is_read(audio, tmp_path):
    (tmp_path / "secret.wav").write_bytes(encoded(tone()))
    recordings = embed.Recordings(audio, ["../secret.wav"])
    with pytest.raises(DataError, match=r"'../secret.wav' .*is outside"):
        written(tmp_path / "e.safetensors", PatchModel(), recordings, keys=None)


def test_durations_from_text_and_from_an_index(tmp_path):
    path = tmp_path / "utt2dur"
    path.write_text("a/1 3.5\nb/1 2\n")
    assert read_seconds(path) == {"a/1": 3.5, "b/1": 2.0}
    root = speaker_folders(tmp_path / "wavs", speakers=2, each=1)
    (root / "id1" / "video" / "00000.wav").write_bytes(b"<html>")
    open_index(root, index=tmp_path / "wavs.qmindex")
    assert read_seconds(tmp_path / "wavs.qmindex") == {"id0/video/00000.wav": 0.5}


def test_durations_that_are_none_are_refused(tmp_path):
    tensors = save({"embeddings": np.ones((1, 2), np.float32)}, {"keys": json.dumps(["a"])})
    for name, content, message in (
        ("utt2dur", b"a/1 long\n", "'long'"),
        ("utt2dur", b"a/1 -1\n", "'-1'"),
        ("a.qmindex", b"{}", r"a\.qmindex"),
        ("e.safetensors", tensors, "has no durations"),
        ("e.safetensors", b"\0", "is not a safetensors file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_seconds(tmp_path / name)


def test_real_speech_from_files_to_a_result(tmp_path):
    """The deviations of 80 bins alone tell these speakers apart far better than chance."""
    audio = real_speech()
    lines = (audio / "trials.txt").read_text().splitlines()
    kept = [line for line in lines if re.search(r"A0[01]\.ogg .*B0[23]\.ogg", line)]
    (tmp_path / "trials.txt").write_text("\n".join(kept) + "\n")
    trials = read_trials(tmp_path / "trials.txt")
    out = tmp_path / "e.safetensors"
    recordings = embed.Recordings(audio, trials.keys.names)
    embed.write_embeddings(Counting(MeanSpectrum()), recordings, out, model_id="m")
    options = EvaluationOptions(fars=(1e-1,), num_replicates=0)
    result = evaluate_speakers(read_embeddings(out), trials, options)
    assert 0.0 < result.measures.eer.value < 0.4
    assert result.protocol.num_subjects == 20
    assert 1.0 < min(read_seconds(out).values()) < 10.0


@pytest.fixture
def model(tmp_path):
    make_model(tmp_path / "m")
    return load_model(tmp_path / "m", fit="exact")


@pytest.fixture
def folder(tmp_path):
    write_pictures(tmp_path / "faces", pictures(6))
    (tmp_path / "faces" / "notes.txt").write_text("not a picture")
    return tmp_path / "faces"


def test_files_are_found_at_any_depth_in_order(folder):
    (folder / "id00" / "0.png").rename(folder / "id00" / "0.PNG")
    names = embed.find_files(folder, "images")
    assert names[:3] == ["id00/0.PNG", "id00/1.png", "id01/0.png"]
    assert len(names) == 6


def test_every_file_has_its_embedding(model, folder):
    names, seen = embed.find_files(folder, "images"), []
    found = embed.embed_files(
        model, folder, names, batch_size=4, progress=lambda *numbers: seen.append(numbers)
    )
    assert found.keys == names
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)), atol=1e-6)
    content = (folder / names[2]).read_bytes()
    assert found.files[2] == embed.FileRow(names[2], 2, hashlib.sha256(content).hexdigest())
    assert seen == [(4, 6), (6, 6)]


def test_bad_files_are_left_out_and_told_of(model, folder):
    (folder / "id00" / "1.png").write_bytes(b"<html>")
    (folder / "id02" / "0.png").write_bytes(b"")
    names = embed.find_files(folder, "images")
    found = embed.embed_files(model, folder, names, max_corrupt=2)
    assert [file.row for file in found.files] == [0, None, 1, 2, None, 3]
    assert "markup" in found.files[1].problem
    assert found.keys == [names[i] for i in (0, 2, 3, 5)]
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)[[0, 2, 3, 5]]), atol=1e-6)
    with pytest.raises(DataError, match="2 files cannot be embedded and 1 may be left out"):
        embed.embed_files(model, folder, names, max_corrupt=1)
    with pytest.raises(DataError, match="none of 1 files"):
        embed.embed_files(model, folder, ["id02/0.png"])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_is_what_evaluations_read_and_private(tmp_path, suffix):
    matrix = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    path, keys = tmp_path / f"e{suffix}", ["a/0.jpg", 'b "quoted".jpg', "é/1.jpg"]
    before = os.umask(0)
    try:
        embed.write_embedding_file(path, keys, matrix, metadata={"model": "m"})
        embed.write_embedding_file(path, keys, matrix)  # replaces the first
    finally:
        os.umask(before)
    read = read_embeddings(path)
    assert list(read.keys) == keys
    np.testing.assert_array_equal(read.matrix, matrix)
    assert mode_of(path) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_manifest_has_a_line_for_every_file(tmp_path):
    files = [embed.FileRow("a,b\n.png", 0, "ab"), embed.FileRow("c.png", None, "", "zero bytes")]
    embed.write_manifest(tmp_path / "m.csv", files)
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == ["a,b\n.png", "c.png"]
    assert [row["row"] for row in rows] == ["0", ""]
    assert rows[1]["problem"] == "zero bytes"
    assert mode_of(tmp_path / "m.csv") == 0o600


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        embed.write_private(path, chunks())
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_folders_that_cannot_be_embedded_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        embed.find_files(tmp_path / "none", "images")
    with pytest.raises(DataError, match="has no images; files have to end in"):
        embed.find_files(tmp_path, "images")
    with pytest.raises(ConfigError, match="not files; embed them in Python"):
        embed.find_files(tmp_path, "arrays")
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"")
    with pytest.raises(DataError, match="not UTF-8"):
        embed.find_files(tmp_path, "images")


def test_sizes_and_names_are_checked(model, folder, tmp_path):
    with pytest.raises(ConfigError, match="batch_size is 0"):
        embed.embed_files(model, folder, ["id00/0.png"], batch_size=0)
    with pytest.raises(ConfigError, match=r"end in \.safetensors or \.npz"):
        embed.write_embedding_file(tmp_path / "e.pt", ["a"], np.zeros((1, 2), np.float32))


def backbone(images):
    weights = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    return images.flatten(1) @ weights


@pytest.mark.parametrize("num_views", [2, 4])
def test_a_cosine_is_the_mean_over_the_turns(num_views):
    images = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    found = F.normalize(embed.embed_turned(backbone, images, num_views))
    turned = [torch.rot90(images, turn, (2, 3)) for turn in range(num_views)]
    units = [F.normalize(backbone(one)) for one in turned]
    mean = torch.stack([unit @ unit.t() for unit in units]).mean(0)
    torch.testing.assert_close(found @ found.t(), mean)
    assert not torch.allclose(mean, units[0] @ units[0].t(), atol=1e-2)


def test_one_view_is_the_embedding_as_it_is():
    images = torch.rand(5, 1, 6, 6)
    assert torch.equal(embed.embed_turned(backbone, images), backbone(images))
    for num_views in (0, 5):
        with pytest.raises(ConfigError, match=f"num_views is {num_views}"):
            embed.embed_turned(backbone, images, num_views)
