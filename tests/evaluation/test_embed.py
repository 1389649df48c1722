"""Embeddings of images: what mirror images add, what is refused, and runs that are killed."""

import csv
import hashlib
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor, nn

from helpers.faces import ArrayImages, PatchModel, face
from helpers.model_directories import make_model, pictures, write_pictures
from helpers.recordings import encoded, real_speech, speaker_folders, tone
from qmargin.data.open import open_index
from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation import embed
from qmargin.evaluation.embed import (
    FileRow,
    Recordings,
    embed_files,
    embed_samples,
    embed_turned,
    find_files,
    write_embedding_file,
    write_embeddings,
    write_manifest,
    write_private,
)
from qmargin.evaluation.embeddings import map_embeddings, read_embeddings, read_seconds, stored_flip
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.model import Model, load_model
from qmargin.evaluation.protocols.speakers import (
    evaluate_speakers,
)
from qmargin.evaluation.trials import TrialList, read_trials
from qmargin.models.speaker import SpeakerInput, SpeakerResNet


@pytest.fixture
def images() -> ArrayImages:
    return ArrayImages([face(number, 0) for number in range(11)])


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("flip", ["none", "sum", "both"])
def test_rows_are_the_models_answers_in_order(
    images: ArrayImages, flip: str, batch_size: int
) -> None:
    found = embed_samples(PatchModel(), images, flip=flip, batch_size=batch_size, num_workers=3)
    plain = np.stack([PatchModel().embed(image[None])[0] for image in images.images])
    mirror = np.stack([PatchModel().embed(image[None, :, ::-1])[0] for image in images.images])
    assert not np.allclose(plain, mirror)
    expected = {"none": plain, "sum": plain + mirror, "both": np.hstack([plain, mirror])}[flip]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_a_tensor_of_any_precision_is_taken(images: ArrayImages) -> None:
    class Half(PatchModel):
        def embed(self, images: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(super().embed(images)).bfloat16().requires_grad_()

    found = embed_samples(Half(), images)
    np.testing.assert_allclose(found, embed_samples(PatchModel(), images), rtol=1e-2)


def written(path: Path, model: PatchModel, images: ArrayImages, **options: object) -> Path:
    keys = [f"p/{number}.jpg" for number in range(len(images))]
    settings = {"keys": keys, "model_id": "m", "batch_size": 2, "flip": "sum", **options}
    return write_embeddings(model, images, path, **settings)  # type: ignore[arg-type]


def test_the_file_can_be_read_and_only_by_its_owner(tmp_path: Path, images: ArrayImages) -> None:
    calls = []
    path = written(
        tmp_path / "e.safetensors",
        PatchModel(),
        images,
        progress=lambda done, total: calls.append((done, total)),
    )
    found = read_embeddings(path)
    assert found.keys == tuple(f"p/{number}.jpg" for number in range(11))
    expected = embed_samples(PatchModel(), images, flip="sum")
    np.testing.assert_array_equal(found.matrix, expected)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stored_flip(path) == "sum"
    assert calls[-1] == (11, 11)
    assert [each.name for each in tmp_path.iterdir()] == ["e.safetensors"]


def test_a_stopped_run_goes_on_and_ends_in_the_same_bytes(
    tmp_path: Path, images: ArrayImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmargin.evaluation.embed._ROWS_BETWEEN_RECORDS", 4)
    whole = written(tmp_path / "whole.safetensors", PatchModel(), images).read_bytes()

    class Dying(PatchModel):
        def embed(self, images: np.ndarray) -> np.ndarray:
            if self.num_calls == 6:
                raise KeyboardInterrupt
            return super().embed(images)

    path = tmp_path / "parts.safetensors"
    with pytest.raises(KeyboardInterrupt):
        written(path, Dying(), images)
    assert not path.exists()
    record = json.loads((tmp_path / "parts.safetensors.progress").read_bytes())
    assert record["num_done"] == 4
    rest = PatchModel()
    written(path, rest, images)
    assert rest.num_calls == 8  # batches of 2 from the fifth image on, twice
    assert path.read_bytes() == whole


def test_a_part_of_another_model_is_refused(tmp_path: Path, images: ArrayImages) -> None:
    path = tmp_path / "e.safetensors"

    class Dying(PatchModel):
        def embed(self, images: np.ndarray) -> np.ndarray:
            if self.num_calls == 4:
                raise KeyboardInterrupt
            return super().embed(images)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("qmargin.evaluation.embed._ROWS_BETWEEN_RECORDS", 1)
        written(path, Dying(), images)
    with pytest.raises(DataError, match="other inputs or options"):
        written(path, PatchModel(), images, model_id="another")
    written(path, PatchModel(), images, model_id="another", restart=True)
    assert len(read_embeddings(path)) == 11


def test_bad_images_and_answers_are_named(tmp_path: Path, images: ArrayImages) -> None:
    class Broken(ArrayImages):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            if index == 5:
                raise CorruptSample("zero bytes")
            return super().__getitem__(index)

    path = tmp_path / "e.safetensors"
    with pytest.raises(DataError, match=r"'p/5.jpg' cannot be embedded \(zero bytes\)"):
        written(path, PatchModel(), Broken(images.images))
    images.images[3] = images.images[3][:100]
    with pytest.raises(ShapeError, match=r"'p/3.jpg' has the shape \(100, 112, 3\)"):
        written(path, PatchModel(), images)
    images.images[3] = face(3, 0).astype(np.float32)
    with pytest.raises(ShapeError, match=r"'p/3\.jpg' is a float32 array"):
        written(path, PatchModel(), images)


class _Answers:
    def __init__(self, answer: np.ndarray) -> None:
        self.answer = answer

    def embed(self, images: np.ndarray) -> np.ndarray:
        return self.answer[: len(images)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((64,)), r"the shape \(11,\) for 11 samples"),
        (np.zeros((5, 4)), r"the shape \(5, 4\) for 11 samples"),
        (np.zeros((64, 0)), r"the shape \(11, 0\)"),
        (np.where(np.arange(64)[:, None] == 7, np.nan, np.ones((64, 4))), "of '7' is not finite"),
    ],
)
def test_answers_that_are_no_embeddings(
    images: ArrayImages, answer: np.ndarray, message: str
) -> None:
    with pytest.raises((ShapeError, DataError), match=message):
        embed_samples(_Answers(answer), images)


def test_settings_that_are_refused(tmp_path: Path, images: ArrayImages) -> None:
    with pytest.raises(ConfigError, match="flip 'half' is unknown"):
        embed_samples(PatchModel(), images, flip="half")
    with pytest.raises(ConfigError, match="batch_size=0"):
        embed_samples(PatchModel(), images, batch_size=0)
    with pytest.raises(DataError, match="0 samples"):
        embed_samples(PatchModel(), ArrayImages([]))
    path = tmp_path / "e.safetensors"
    with pytest.raises(ConfigError, match=r"does not end in \.safetensors"):
        written(tmp_path / "e.npz", PatchModel(), images)
    with pytest.raises(ShapeError, match="2 keys for 11 samples"):
        written(path, PatchModel(), images, keys=["a", "b"])
    with pytest.raises(DataError, match="the key 'a' names two"):
        written(path, PatchModel(), images, keys=["b", "a", *"acdefghij"])
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_flip_of_a_file_that_does_not_say(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", a=np.ones(3))
    assert stored_flip(tmp_path / "e.npz") is None
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no")
    with pytest.raises(DataError, match="is not a safetensors file"):
        stored_flip(bad)


def test_a_mapped_file_is_the_one_that_is_read(tmp_path: Path, images: ArrayImages) -> None:
    path = written(tmp_path / "e.safetensors", PatchModel(), images)
    mapped, read = map_embeddings(path), read_embeddings(path)
    assert isinstance(mapped.matrix, np.memmap)
    assert (mapped.keys, mapped.source) == (read.keys, read.source)
    np.testing.assert_array_equal(mapped.matrix, read.matrix)


def test_files_that_are_not_mapped(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", keys=np.array(["a"]), embeddings=np.ones((1, 4)))
    assert map_embeddings(tmp_path / "e.npz").keys == ("a",)
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

    def __init__(self, network: nn.Module, stop_at: int | None = None) -> None:
        self.network, self.stop_at, self.lengths = network.eval(), stop_at, list[int]()

    @torch.no_grad()
    def embed(self, waveforms: list[np.ndarray]) -> torch.Tensor:
        if len(self.lengths) == self.stop_at:
            raise KeyboardInterrupt
        self.lengths.append(len(waveforms[0]))
        found: torch.Tensor = self.network(torch.from_numpy(np.stack(waveforms)))
        return found


class MeanSpectrum(nn.Module):
    """How much each bin moves: enough to tell some speakers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend = SpeakerInput()

    def forward(self, waveforms: torch.Tensor) -> torch.Tensor:
        deviations: torch.Tensor = self.frontend(waveforms).std(2)
        return deviations


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.wav"))


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    return speaker_folders(tmp_path / "audio")


def small_network() -> nn.Module:
    torch.manual_seed(3)
    return SpeakerResNet((1, 1, 1, 1), 4, width=4)


def test_every_recording_is_embedded_whole(audio: Path, tmp_path: Path) -> None:
    model, names = Counting(small_network()), names_in(audio)
    out = tmp_path / "e.safetensors"
    assert write_embeddings(model, Recordings(audio, names), out, model_id="m") == out
    found = read_embeddings(out)
    assert list(found.keys) == names
    assert model.lengths == [8000, 9600] * 3
    samples, _ = soundfile.read(audio / names[3], dtype="float32")
    expected = model.network(torch.from_numpy(samples)[None]).detach().numpy()[0]
    np.testing.assert_array_equal(found.matrix[3], expected)
    assert read_seconds(out)[names[3]] == pytest.approx(0.6)
    bare = Recordings(audio, ["id0/video/00001"])  # a name without its suffix
    assert read_embeddings(
        write_embeddings(model, bare, tmp_path / "b.safetensors", model_id="m")
    ).keys == ("id0/video/00001",)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "audio",
        "b.safetensors",
        "e.safetensors",
    ]


def test_a_killed_run_goes_on_and_ends_with_the_same_file(
    audio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "_ROWS_BETWEEN_RECORDS", 2)
    recordings = Recordings(audio, names_in(audio))
    whole, out = tmp_path / "whole.safetensors", tmp_path / "e.safetensors"
    write_embeddings(Counting(small_network()), recordings, whole, model_id="m")
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(Counting(small_network(), stop_at=5), recordings, out, model_id="m")
    assert not out.exists()
    with pytest.raises(DataError, match="begun with other inputs"):
        write_embeddings(Counting(small_network()), recordings, out, model_id="other")
    rest = Counting(small_network())
    write_embeddings(rest, recordings, out, model_id="m")
    assert len(rest.lengths) == 2
    assert out.read_bytes() == whole.read_bytes()


def test_a_very_short_recording_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "short.wav").write_bytes(encoded(tone(0.05)))
    samples, seconds = Recordings(tmp_path, ["short.wav"])[0]
    assert len(samples) == 2400
    assert seconds == 0.05
    np.testing.assert_array_equal(samples[:800], samples[800:1600])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "zero bytes"),
        (b"<html>not found</html>", "not audio"),
        (encoded(tone(1.0))[:20000], "truncated"),
        (None, "there is no such file"),
    ],
)
def test_damaged_recordings_are_named(audio: Path, content: bytes | None, message: str) -> None:
    bad = audio / "id1" / "video" / "00000.wav"
    bad.unlink()
    if content is not None:
        bad.write_bytes(content)
    names = ["id0/video/00000.wav", "id1/video/00000.wav"]
    with pytest.raises(DataError, match=rf"'id1/video/00000.wav' cannot be embedded \(.*{message}"):
        write_embeddings(
            Counting(small_network()),
            Recordings(audio, names),
            audio / "e.safetensors",
            model_id="m",
        )


def test_nothing_outside_the_folder_is_read(audio: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(encoded(tone()))
    with pytest.raises(DataError, match=r"'../secret.wav' cannot be embedded .*is outside"):
        write_embeddings(
            Counting(small_network()),
            Recordings(audio, ["../secret.wav"]),
            tmp_path / "e.safetensors",
            model_id="m",
        )


def test_long_recordings_are_refused_by_their_header(audio: Path, tmp_path: Path) -> None:
    recordings = Recordings(audio, ["id0/video/00001.wav"], max_seconds=0.55)
    with pytest.raises(DataError, match="at most 1 s are read"):
        write_embeddings(
            Counting(small_network()), recordings, tmp_path / "e.safetensors", model_id="m"
        )


def test_durations_from_text(tmp_path: Path) -> None:
    path = tmp_path / "utt2dur"
    path.write_text("a/1 3.5\nb/1 2\n")
    assert read_seconds(path) == {"a/1": 3.5, "b/1": 2.0}
    for text, message in (("a/1 long\n", "'long', no number"), ("a/1 -1\n", "is -1.0: give")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_seconds(path)


def test_durations_from_an_index(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path / "wavs", speakers=2, each=1)
    (root / "id1" / "video" / "00000.wav").write_bytes(b"<html>")
    open_index(root, index=tmp_path / "wavs.qmindex")
    assert read_seconds(tmp_path / "wavs.qmindex") == {"id0/video/00000.wav": 0.5}
    (tmp_path / "other.qmindex").write_bytes(b"{}")
    with pytest.raises(DataError, match=r"other\.qmindex"):
        read_seconds(tmp_path / "other.qmindex")


def test_embeddings_without_durations_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "e.safetensors"
    save_file({"embeddings": np.ones((1, 2), np.float32)}, path, {"keys": json.dumps(["a"])})
    with pytest.raises(DataError, match="has no durations"):
        read_seconds(path)
    path.write_bytes(b"\x00")
    with pytest.raises(DataError, match="is not a safetensors file"):
        read_seconds(path)


def test_real_speech_from_files_to_a_result(tmp_path: Path) -> None:
    """The deviations of 80 bins alone tell these speakers apart far better than chance."""
    audio = real_speech()
    lines = (audio / "trials.txt").read_text().splitlines()
    kept = [line for line in lines if re.search(r"A0[01]\.ogg .*B0[23]\.ogg", line)]
    (tmp_path / "trials.txt").write_text("\n".join(kept) + "\n")
    trials: TrialList = read_trials(tmp_path / "trials.txt")
    out = tmp_path / "e.safetensors"
    recordings = Recordings(audio, trials.keys.names)
    write_embeddings(Counting(MeanSpectrum()), recordings, out, model_id="m")
    options = EvaluationOptions(fars=(1e-1,), num_replicates=0)
    result = evaluate_speakers(read_embeddings(out), trials, options)
    assert 0.0 < result.measures.eer.value < 0.4
    assert result.protocol.num_subjects == 20
    assert 1.0 < min(read_seconds(out).values()) < 10.0


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_model(tmp_path / "m")
    return load_model(tmp_path / "m", fit="exact")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "faces", pictures(6))
    (tmp_path / "faces" / "notes.txt").write_text("not a picture")
    return tmp_path / "faces"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_found_at_any_depth_in_order(folder: Path) -> None:
    (folder / "id00" / "0.png").rename(folder / "id00" / "0.PNG")
    names = find_files(folder, "images")
    assert names[:3] == ["id00/0.PNG", "id00/1.png", "id01/0.png"]
    assert len(names) == 6


def test_every_file_has_its_embedding(model: Model, folder: Path) -> None:
    names, seen = find_files(folder, "images"), []
    found = embed_files(
        model, folder, names, batch_size=4, progress=lambda *numbers: seen.append(numbers)
    )
    assert found.keys == names
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)), atol=1e-6)
    content = (folder / names[2]).read_bytes()
    assert found.files[2] == FileRow(names[2], 2, hashlib.sha256(content).hexdigest())
    assert seen == [(4, 6), (6, 6)]


def test_bad_files_are_left_out_and_told_of(model: Model, folder: Path) -> None:
    (folder / "id00" / "1.png").write_bytes(b"<html>")
    (folder / "id02" / "0.png").write_bytes(b"")
    names = find_files(folder, "images")
    found = embed_files(model, folder, names, max_corrupt=2)
    assert [file.row for file in found.files] == [0, None, 1, 2, None, 3]
    assert "markup" in found.files[1].problem
    assert found.keys == [names[i] for i in (0, 2, 3, 5)]
    np.testing.assert_allclose(found.matrix, model.embed(pictures(6)[[0, 2, 3, 5]]), atol=1e-6)
    with pytest.raises(DataError, match="2 files cannot be embedded and 1 may be left out"):
        embed_files(model, folder, names, max_corrupt=1)
    with pytest.raises(DataError, match="none of 1 files"):
        embed_files(model, folder, ["id02/0.png"])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_is_what_evaluations_read_and_private(tmp_path: Path, suffix: str) -> None:
    matrix = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    path, keys = tmp_path / f"e{suffix}", ["a/0.jpg", 'b "quoted".jpg', "é/1.jpg"]
    before = os.umask(0)
    try:
        write_embedding_file(path, keys, matrix, metadata={"model": "m"})
        write_embedding_file(path, keys, matrix)  # replaces the first
    finally:
        os.umask(before)
    read = read_embeddings(path)
    assert list(read.keys) == keys
    np.testing.assert_array_equal(read.matrix, matrix)
    assert mode_of(path) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_manifest_has_a_line_for_every_file(tmp_path: Path) -> None:
    files = [FileRow("a,b\n.png", 0, "ab"), FileRow("c.png", None, "", "zero bytes")]
    write_manifest(tmp_path / "m.csv", files)
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == ["a,b\n.png", "c.png"]
    assert [row["row"] for row in rows] == ["0", ""]
    assert rows[1]["problem"] == "zero bytes"
    assert mode_of(tmp_path / "m.csv") == 0o600


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def chunks() -> object:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_private(path, chunks())
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_folders_that_cannot_be_embedded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        find_files(tmp_path / "none", "images")
    with pytest.raises(DataError, match="has no images; files have to end in"):
        find_files(tmp_path, "images")
    with pytest.raises(ConfigError, match="no files; embed them in Python"):
        find_files(tmp_path, "arrays")
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"")
    with pytest.raises(DataError, match="not UTF-8"):
        find_files(tmp_path, "images")


def test_sizes_and_names_are_checked(model: Model, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        embed_files(model, folder, ["id00/0.png"], batch_size=0)
    with pytest.raises(ConfigError, match=r"end in \.safetensors or \.npz"):
        write_embedding_file(tmp_path / "e.pt", ["a"], np.zeros((1, 2), np.float32))


def backbone(images: Tensor) -> Tensor:
    weights = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    return images.flatten(1) @ weights


@pytest.mark.parametrize("num_views", [2, 4])
def test_a_cosine_is_the_mean_over_the_turns(num_views: int) -> None:
    images = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    found = F.normalize(embed_turned(backbone, images, num_views))
    turned = [torch.rot90(images, turn, (2, 3)) for turn in range(num_views)]
    units = [F.normalize(backbone(one)) for one in turned]
    mean = torch.stack([unit @ unit.t() for unit in units]).mean(0)
    torch.testing.assert_close(found @ found.t(), mean)
    assert not torch.allclose(mean, units[0] @ units[0].t(), atol=1e-2)


def test_one_view_is_the_embedding_as_it_is() -> None:
    images = torch.rand(5, 1, 6, 6)
    assert torch.equal(embed_turned(backbone, images), backbone(images))


@pytest.mark.parametrize("num_views", [0, 5])
def test_other_numbers_of_views_are_refused(num_views: int) -> None:
    with pytest.raises(ConfigError, match=f"num_views is {num_views}; there are 1 to 4"):
        embed_turned(backbone, torch.rand(1, 1, 6, 6), num_views)
