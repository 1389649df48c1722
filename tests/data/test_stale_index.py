"""An index never serves what the data no longer says, however little has changed."""

import json
import os
import struct
import time
from pathlib import Path

import pytest

from helpers.pictures import jpeg, write_folder, write_records, write_shards, write_tar
from qmargin.data import fingerprints, open_dataset
from qmargin.data.check import check_data
from qmargin.data.index import default_index, read_index
from qmargin.data.open import open_index
from qmargin.errors import CorruptSample, DataError

IMAGES = [jpeg(seed) for seed in range(4)]
LABELS = [0, 0, 1, 1]


def relabel_record(path: Path, row: int, label: int) -> None:
    """Another label in the same bytes of a record."""
    offset = int(path.with_suffix(".idx").read_text().splitlines()[row].split("\t")[1])
    with path.open("r+b") as file:
        file.seek(offset + 8 + 4)
        file.write(struct.pack("<f", label))


@pytest.mark.parametrize("verify", [False, True])
def test_records_relabelled_in_place_are_indexed_again(tmp_path: Path, verify: bool) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    assert open_dataset(path, verify=verify).labels.tolist() == LABELS
    size = path.stat().st_size
    relabel_record(path, 0, 1)
    assert path.stat().st_size == size
    assert open_dataset(path, verify=verify).labels.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("verify", [False, True])
def test_tars_relabelled_in_place_are_indexed_again(tmp_path: Path, verify: bool) -> None:
    root = write_shards(tmp_path / "shards", IMAGES, LABELS)
    assert open_dataset(root, verify=verify).labels.tolist() == LABELS
    shards = {path.name: path.stat().st_size for path in root.iterdir()}
    write_shards(root, IMAGES, [1, 0, 1, 1])
    assert shards == {path.name: path.stat().st_size for path in root.iterdir()}
    assert open_dataset(root, verify=verify).labels.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("layout", ["records", "tars"])
def test_a_change_that_keeps_size_and_time_is_found_by_its_headers(
    tmp_path: Path, layout: str
) -> None:
    if layout == "records":
        path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
        changed = path
    else:
        path = write_shards(tmp_path / "shards", IMAGES, LABELS)
        changed = path / "00000.tar"
    assert open_dataset(path).labels.tolist() == LABELS
    before = changed.stat()
    if layout == "records":
        relabel_record(path, 0, 1)
    else:
        content = changed.read_bytes()
        place = content.index(b"00000.cls")
        with changed.open("r+b") as file:
            file.seek(place + 512)
            file.write(b"1")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    assert open_dataset(path).labels.tolist() == [1, 0, 1, 1]


def test_a_file_put_in_the_place_of_another_is_indexed_again(tmp_path: Path) -> None:
    """The same size and time, as ``cp -p`` leaves them; only the file itself is another."""
    first = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    written = default_index(first)
    open_dataset(first)
    at, status = written.stat().st_mtime_ns, first.stat()
    copy = tmp_path / "copy"
    copy.write_bytes(first.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(first)
    open_dataset(first)
    assert written.stat().st_mtime_ns > at


def test_an_idx_and_a_property_file_that_change_are_noticed(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    assert open_dataset(path).num_classes == 2
    (tmp_path / "property").write_text("5,112,112")
    assert open_dataset(path).num_classes == 5
    lines = path.with_suffix(".idx").read_text().replace("3\t", "7\t")
    path.with_suffix(".idx").write_text(lines)
    assert open_dataset(path).sample_id(3) == "record 7"


@pytest.mark.parametrize("verify", [False, True])
def test_images_that_come_and_go_in_subfolders_are_noticed(tmp_path: Path, verify: bool) -> None:
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    deep = root / "person0" / "session" / "day"
    deep.mkdir(parents=True)
    assert len(open_dataset(root, verify=verify)) == 4
    (deep / "new.jpg").write_bytes(jpeg(7))
    assert len(open_dataset(root, verify=verify)) == 5
    (deep / "new.jpg").unlink()
    assert len(open_dataset(root, verify=verify)) == 4
    (root / "person2" / "a").mkdir(parents=True)
    (root / "person2" / "a" / "b.jpg").write_bytes(jpeg(8))
    assert open_dataset(root, verify=verify).num_classes == 3


def test_verify_compares_labels_of_an_open_dataset(tmp_path: Path) -> None:
    """Data that changes while it is open: the label is in the header of every record."""
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    dataset = open_dataset(path, verify=True)
    relabel_record(path, 2, 0)
    with pytest.raises(CorruptSample, match="label"):
        dataset.read(2)
    assert dataset.read(1) == IMAGES[1]
    assert not check_data(dataset).is_good


@pytest.mark.parametrize("kind", ["cls", "id", "json"])
def test_verify_compares_labels_in_tars(tmp_path: Path, kind: str) -> None:
    texts = {
        "cls": (b"0\n ", b"1\n "),
        "id": (b"ada", b"bea"),
        "json": (b'{"label":0}', b'{"label":1}'),
    }
    names = {"json": f"{'long/' * 30}a"}
    members = []
    for number, text in enumerate(texts[kind]):
        name = names.get(kind, "a") + str(number)
        members += [(f"{name}.{kind}", text), (f"{name}.jpg", IMAGES[number])]
    path = write_tar(tmp_path / "a.tar", members)
    dataset = open_dataset(path, verify=True)
    assert [dataset.read(row) for row in range(2)] == IMAGES[:2]
    content = path.read_bytes().replace(*texts[kind], 1)
    path.write_bytes(content)
    with pytest.raises(CorruptSample, match="label"):
        dataset.read(0)
    assert dataset.read(1) == IMAGES[1]


@pytest.mark.parametrize("labels", [[1.0, 0.0], [3.0, 1.0, 2.0, 0.5]])
def test_verify_reads_records_with_several_labels(tmp_path: Path, labels: list[float]) -> None:
    from qmargin.data.recordio import MAGIC_BYTES, RecordWriter, pack_payload

    split = bytes(4) + MAGIC_BYTES + b"rest"
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(0, pack_payload(labels, IMAGES[0]))
        writer.write(1, pack_payload(labels, split))
    dataset = open_dataset(tmp_path / "a.rec", verify=True)
    assert [dataset.read(0), dataset.read(1)] == [IMAGES[0], split]
    assert dataset.labels.tolist() == [int(labels[0])] * 2


def test_an_index_opened_by_its_own_path_is_compared_with_the_data(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    index = open_index(path).path
    assert len(open_dataset(index)) == 4
    relabel_record(path, 0, 1)
    with pytest.raises(DataError, match="qmargin data index"):
        open_dataset(index)


@pytest.mark.parametrize("column", ["label", "offset", "checksum"])
def test_stored_checksums_of_an_index_are_checked_on_opening(tmp_path: Path, column: str) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    place = open_index(path).path
    content = bytearray(place.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    begin = json.loads(content[8:size])[column]["data_offsets"][0]
    content[size + begin] ^= 1
    place.write_bytes(bytes(content))
    with pytest.raises(DataError, match=column):
        open_dataset(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b'\\"num_classes\\": 2', b'\\"num_classes\\": 9'), (b"recordio", b"recordia")]
)
def test_the_header_of_an_index_has_a_checksum_too(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    place = open_index(path).path
    content = place.read_bytes()
    assert old in content
    place.write_bytes(content.replace(old, new))
    with pytest.raises(DataError, match="header"):
        read_index(place)


def test_an_index_of_an_older_version_is_built_again(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    place = open_index(path).path
    content = place.read_bytes()
    place.write_bytes(content.replace(b'"qmargin_index": "2"', b'"qmargin_index": "1"'))
    assert open_dataset(path).labels.tolist() == LABELS
    assert b'"qmargin_index": "2"' in place.read_bytes()


def test_data_as_new_as_its_index_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the clock has the same time."""
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    monkeypatch.setattr(fingerprints.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(fingerprints, "clock_of", lambda folder: path.stat().st_mtime_ns + 1)
    first = open_index(path)
    assert first.is_racy
    monkeypatch.undo()
    assert not open_index(path).is_racy
    assert default_index(path).stat().st_mtime_ns > path.stat().st_mtime_ns


def test_a_builder_waits_until_the_clock_has_moved_on(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", IMAGES, LABELS)
    second = time.time_ns() // 10**9 * 10**9  # a file system that knows whole seconds only
    os.utime(path, ns=(second, second))
    start = time.monotonic()
    assert not open_index(path).is_racy
    assert time.monotonic() - start < 3.0
    assert time.time_ns() - second >= 2 * 10**9


def test_many_folders_are_compared_without_listing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening looks at one folder's time each, and never at the images in it."""
    root = write_folder(tmp_path / "faces", [IMAGES[0]] * 60, [number // 3 for number in range(60)])
    open_dataset(root)
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(str(place)) or scandir(place))
    assert len(open_index(root)) == 60
    assert listed == [str(root)] * len(listed)
