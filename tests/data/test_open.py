"""One way in for every layout, and what happens to data that changes, hides or lies."""

import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.pictures import (
    jpeg,
    shared_data,
    write_folder,
    write_manifest,
    write_records,
    write_shards,
    write_tar,
)
from qmargin.data import open_dataset
from qmargin.data.encoded import ImageDataset
from qmargin.data.images import decode_image
from qmargin.data.index import read_index
from qmargin.data.open import open_index, recognise
from qmargin.data.reading import OpenFiles
from qmargin.errors import CorruptSample, DataError

IMAGES = [jpeg(seed) for seed in range(8)]
LABELS = [0, 0, 0, 1, 1, 2, 2, 2]
WRITERS: dict[str, Callable[[Path], Path]] = {
    "recordio": lambda folder: write_records(folder / "train.rec", IMAGES, LABELS),
    "folder": lambda folder: write_folder(folder / "faces", IMAGES, LABELS),
    "manifest": lambda folder: write_manifest(folder / "listed", IMAGES, LABELS),
    "tar": lambda folder: write_shards(folder / "shards", IMAGES, LABELS),
}


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path)


def test_every_layout_gives_the_same_samples(path: Path) -> None:
    dataset = open_dataset(path)
    assert len(dataset) == 8
    assert [dataset.read(row) for row in range(8)] == IMAGES
    assert dataset.labels.tolist() == LABELS
    assert np.issubdtype(dataset.labels.dtype, np.integer)
    assert dataset.num_classes == 3
    assert len({dataset.sample_id(row) for row in range(8)}) == 8
    pixels, label = dataset[5]
    assert np.array_equal(pixels, decode_image(IMAGES[5]))
    assert label == 2
    assert type(label) is int


def test_it_is_a_sequence(path: Path) -> None:
    dataset = open_dataset(path)
    assert [label for _, label in dataset] == LABELS
    assert dataset.read(-1) == dataset.read(np.int64(7)) == IMAGES[7]
    for bad in (8, -9):
        with pytest.raises(IndexError, match=f"sample {bad} of 8"):
            dataset.read(bad)
    with pytest.raises(TypeError):
        dataset.read(1.5)  # type: ignore[arg-type]


def test_the_index_is_built_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[int, int]] = []
    first = open_dataset(path, progress=lambda done, total: reports.append((done, total)))
    assert reports
    assert all(0 <= done <= total for done, total in reports)
    written = first.index.path.stat().st_mtime_ns
    assert open_dataset(path).index.path.stat().st_mtime_ns == written
    again = open_dataset(first.index.path)  # the index alone is enough
    assert [again.read(row) for row in range(8)] == IMAGES


def test_index_and_data_can_move_together(path: Path, tmp_path: Path) -> None:
    index = open_dataset(path).index
    data = index.root
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for item in list(index.path.parent.iterdir()):
        if item != moved:
            item.rename(moved / item.name)
    dataset = open_dataset(moved / index.path.name)
    assert dataset.index.root.name == data.name
    assert [dataset.read(row) for row in range(8)] == IMAGES


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(path: Path, method: str) -> None:
    dataset = open_dataset(path)
    dataset.read(0)  # a file is open before the fork
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.map(dataset.read, [1, 6] * 20, chunksize=1)
    assert found == [IMAGES[1], IMAGES[6]] * 20


def test_a_copy_for_a_worker_is_small(path: Path) -> None:
    copied = pickle.dumps(open_dataset(path, verify=True))
    assert len(copied) < 1500  # the index is mapped again, not sent
    again = pickle.loads(copied)
    assert again.verify
    assert again.read(3) == IMAGES[3]


def test_changed_bytes_show_when_asked(path: Path) -> None:
    dataset, checked = open_dataset(path), open_dataset(path, verify=True)
    place = dataset.index.root
    if dataset.index.format == "folder":
        place = place / dataset.sample_id(2)
    elif dataset.index.format == "manifest":
        place = place.parent / dataset.sample_id(2)
    elif dataset.index.format == "tar":
        place = place / "00000.tar"
    data = bytearray(place.read_bytes())
    data[data.index(IMAGES[2]) + 40] ^= 1
    place.write_bytes(bytes(data))
    assert dataset.read(2) != IMAGES[2]
    with pytest.raises(CorruptSample, match="the data has changed or is damaged"):
        checked.read(2)
    assert checked.read(1) == IMAGES[1]


def test_data_that_grows_is_indexed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = WRITERS["folder"](tmp_path)
    assert len(open_dataset(root)) == 8
    (root / "person1" / "new.jpg").write_bytes(jpeg(9))
    with caplog.at_level(logging.WARNING, "qmargin.data"):
        assert len(open_dataset(root)) == 9
    assert "is built again" in caplog.text
    for name in ("recordio", "manifest", "tar"):
        path = WRITERS[name](tmp_path)
        assert len(open_dataset(path)) == 8
        if name == "recordio":
            write_records(path, IMAGES[:5], LABELS[:5])
        elif name == "manifest":
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
        else:
            write_tar(path / "00006.tar", [("a.jpg", b"x" * 9000), ("a.cls", b"0")])
        assert len(open_dataset(path)) in (5, 7)


def test_files_that_vanish_are_corrupt_samples(tmp_path: Path) -> None:
    for name in ("folder", "manifest"):
        dataset = open_dataset(WRITERS[name](tmp_path))
        root = dataset.index.root if name == "folder" else dataset.index.root.parent
        (root / dataset.sample_id(4)).unlink()
        with pytest.raises(CorruptSample, match="No such file"):
            dataset.read(4)
    for name in ("recordio", "tar"):
        dataset = open_dataset(WRITERS[name](tmp_path))
        for item in dataset.index.root.rglob("*") if name == "tar" else [dataset.index.root]:
            item.unlink()
        with pytest.raises(CorruptSample, match="cannot be read"):
            dataset.read(4)


def test_zero_bytes_and_markup_are_indexed_and_corrupt_when_decoded(tmp_path: Path) -> None:
    images = [b"", b"<html>", jpeg(0)]
    writers = {
        "rec": lambda: write_records(tmp_path / "a.rec", images, [0, 0, 1]),
        "folder": lambda: write_folder(tmp_path / "faces", images, [0, 0, 1]),
        "tar": lambda: write_shards(tmp_path / "shards", images, [0, 0, 1]),
    }
    for write in writers.values():
        dataset = open_dataset(write(), verify=True)
        for row, message in enumerate(("zero bytes", "a web page")):
            with pytest.raises(CorruptSample, match=message):
                dataset[row]
        assert dataset[2][1] == 1


def test_folders_of_photos_are_forgiving(tmp_path: Path) -> None:
    root = tmp_path / "faces"
    names = ["b/2.PNG", "b/1.jpg", "a/deep/er/1.jpeg", "a/notes.txt", "c/.hidden.jpg", "stray.jpg"]
    for number, name in enumerate([*names, ".git/x.jpg", "ünï çode/ß.jpg"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(number))
    dataset = open_dataset(root)
    found = [dataset.sample_id(row) for row in range(len(dataset))]
    assert found == ["a/deep/er/1.jpeg", "b/1.jpg", "b/2.PNG", "ünï çode/ß.jpg"]
    assert dataset.labels.tolist() == [0, 1, 1, 3]
    assert dataset.num_classes == 4  # c is empty and keeps its number
    assert dataset.class_name(3) == "ünï çode"
    assert dataset.index.notes == ("1 images outside the folders were left out",)


def test_names_that_are_not_utf_8_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "faces" / os.fsdecode(b"a\xff")
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    (folder / os.fsdecode(b"\xfe.jpg")).write_bytes(jpeg(0))
    assert open_dataset(tmp_path / "faces").read(0) == jpeg(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "does not exist"),
        (lambda folder: folder, "has no folders, archives or records"),
        (
            lambda folder: ((folder / "a.bin").write_bytes(b"") and None) or folder / "a.bin",
            "read_bin",
        ),
        (
            lambda folder: ((folder / "a.zip").write_bytes(b"") and None) or folder / "a.zip",
            "no known",
        ),
        (
            lambda folder: ((folder / "a.idx").write_bytes(b"") and None) or folder / "a.idx",
            "a.rec does",
        ),
    ],
)
def test_what_is_no_dataset_says_what_would_be(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(make(tmp_path))


def test_layouts_are_recognised(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        path = write(tmp_path / name) if (tmp_path / name).mkdir() is None else None
        assert path is not None
        assert recognise(path)[0] == name
        if name in ("recordio", "manifest"):
            assert recognise(path.parent) == (name, path)
    (tmp_path / "recordio" / "more.rec").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 .rec files \(more.rec, train.rec\)"):
        recognise(tmp_path / "recordio")


def test_photos_without_folders_get_a_hint(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(jpeg(0))
    with pytest.raises(DataError, match="a folder of their own"):
        open_dataset(tmp_path)


def test_data_in_a_folder_that_cannot_be_written_is_indexed_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    monkeypatch.setattr("qmargin.data.index.os.access", lambda place, mode: False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    dataset = open_dataset(root)
    assert dataset.index.path.parent == tmp_path / "home" / ".cache" / "qmargin"
    assert dataset.read(7) == IMAGES[7]
    assert not (tmp_path / "faces.qmindex").exists()


def test_a_place_for_the_index_must_exist(tmp_path: Path) -> None:
    path = WRITERS["recordio"](tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset(path, index=tmp_path / "no" / "a.qmindex")


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1, -30])
def test_an_index_cut_off_is_refused(path: Path, cut: int) -> None:
    index = open_index(path).path
    index.write_bytes(index.read_bytes()[:cut])
    with pytest.raises(DataError, match="build it again with qmargin data index"):
        read_index(index)


def test_an_index_damaged_at_random_is_an_error_of_ours(path: Path) -> None:
    index = open_index(path)
    whole = index.path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    for turn in range(100):
        damaged = bytearray(whole)
        for place in random.integers(0, size if turn % 2 else len(whole), 3):
            damaged[place] = int(random.integers(256))
        index.path.write_bytes(bytes(damaged))
        try:
            dataset = ImageDataset(read_index(index.path, index.root))
            for row in range(len(dataset)):
                dataset.read(row)
        except DataError:
            continue


def test_few_files_stay_open(tmp_path: Path) -> None:
    files = OpenFiles(max_open=4)
    opened = Path("/proc/self/fd")
    if not opened.exists():
        pytest.skip("open files are counted on Linux")
    before = len(list(opened.iterdir()))
    for number in range(50):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 3)
        assert files.read_at(tmp_path / f"{number}", 1, 2) == bytes([number]) * 2
    assert len(list(opened.iterdir())) <= before + 4


def test_real_faces_through_a_manifest(tmp_path: Path) -> None:
    """The manifest of the portraits with its own column names."""
    import shutil
    import zipfile

    source = shared_data("congress_faces")
    with zipfile.ZipFile(source / "images.zip") as archive:
        archive.extractall(tmp_path)
    first = next(tmp_path.rglob("*.jpg"))
    shutil.copy(source / "manifest.csv", first.parent)
    dataset = open_dataset(first.parent / "manifest.csv", verify=True)
    assert len(dataset) == 1326
    assert dataset.num_classes == 1128
    pixels, label = dataset[1325]
    assert pixels.shape == (112, 112, 3)
    assert dataset.class_name(label) in dataset.sample_id(1325)
