"""Embeddings of images: what mirror images add, what is refused, and runs that are killed."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from helpers.faces import ArrayImages, PatchModel, face
from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.embed import embed_images, map_embeddings, stored_flip, write_embeddings
from qmargin.evaluation.embeddings import read_embeddings


@pytest.fixture
def images() -> ArrayImages:
    return ArrayImages([face(number, 0) for number in range(11)])


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("flip", ["none", "sum", "both"])
def test_rows_are_the_models_answers_in_order(
    images: ArrayImages, flip: str, batch_size: int
) -> None:
    found = embed_images(PatchModel(), images, flip=flip, batch_size=batch_size, num_workers=3)
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

    found = embed_images(Half(), images)
    np.testing.assert_allclose(found, embed_images(PatchModel(), images), rtol=1e-2)


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
    expected = embed_images(PatchModel(), images, flip="sum")
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
        (np.zeros((64,)), r"the shape \(11,\) for 11 images"),
        (np.zeros((5, 4)), r"the shape \(5, 4\) for 11 images"),
        (np.zeros((64, 0)), r"the shape \(11, 0\)"),
        (np.where(np.arange(64)[:, None] == 7, np.nan, np.ones((64, 4))), "of '7' is not finite"),
    ],
)
def test_answers_that_are_no_embeddings(
    images: ArrayImages, answer: np.ndarray, message: str
) -> None:
    with pytest.raises((ShapeError, DataError), match=message):
        embed_images(_Answers(answer), images)


def test_settings_that_are_refused(tmp_path: Path, images: ArrayImages) -> None:
    with pytest.raises(ConfigError, match="flip 'half' is unknown"):
        embed_images(PatchModel(), images, flip="half")
    with pytest.raises(ConfigError, match="batch_size=0"):
        embed_images(PatchModel(), images, batch_size=0)
    with pytest.raises(DataError, match="0 images"):
        embed_images(PatchModel(), ArrayImages([]))
    path = tmp_path / "e.safetensors"
    with pytest.raises(ConfigError, match=r"does not end in \.safetensors"):
        written(tmp_path / "e.npz", PatchModel(), images)
    with pytest.raises(ShapeError, match="2 keys for 11 images"):
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
