"""RecordIO: bytes put together by hand, both layouts of InsightFace, split records, damage."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.pictures import jpeg, write_records
from qmargin.data import open_dataset
from qmargin.data.readers.recordio import RecordWriter, idx_lines, pack_payload, scan_records
from qmargin.errors import CorruptSample, DataError

MAGIC = bytes([0x0A, 0x23, 0xD7, 0xCE])


def part(data: bytes, flag: int = 0) -> bytes:
    """One part, as the format says: magic, flag and length, bytes, zeros up to four."""
    return MAGIC + struct.pack("<I", flag << 29 | len(data)) + data + bytes(-len(data) % 4)


def scalar(label: float, image: bytes) -> bytes:
    return struct.pack("<IfQQ", 0, label, 3, 0) + image


def several(labels: list[float], image: bytes) -> bytes:
    return (
        struct.pack("<IfQQ", len(labels), 0.0, 3, 0)
        + struct.pack(f"<{len(labels)}f", *labels)
        + image
    )


def store(folder: Path, records: list[bytes], keys: list[int] | None = None) -> Path:
    """Write parts and an index file by hand."""
    offsets = np.cumsum([0, *map(len, records)])[:-1].tolist()
    (folder / "train.rec").write_bytes(b"".join(records))
    if keys is not None:
        lines = [f"{key}\t{offset}\n" for key, offset in zip(keys, offsets, strict=True)]
        (folder / "train.idx").write_text("".join(lines))
    return folder / "train.rec"


def part_starts(stored: bytes) -> list[int]:
    """Where parts begin, by their lengths alone."""
    starts, at = [], 0
    while at < len(stored):
        starts.append(at)
        length = struct.unpack_from("<I", stored, at + 4)[0] & (1 << 29) - 1
        at += 8 + length + -length % 4
    return starts


def test_layout_with_a_header_record(tmp_path: Path) -> None:
    """face2rec2: images 1..N, identities N+1..N+K, and key 0 at the end, with a wrong count."""
    images = [jpeg(seed) for seed in range(4)]
    records = [
        part(several([label, 1.0], image))
        for label, image in zip([0, 0, 1, 2], images, strict=True)
    ]
    records += [part(several([first, last], b"")) for first, last in ((1, 3), (3, 4), (4, 5))]
    records += [part(several([99.0, 102.0], b""))]
    store(tmp_path, records, [1, 2, 3, 4, 5, 6, 7, 0])
    dataset = open_dataset(tmp_path)
    assert [dataset.read(row) for row in range(len(dataset))] == images
    assert dataset.labels.tolist() == [0, 0, 1, 2]
    assert dataset.sample_id(0) == "record 1"
    assert dataset.num_classes == 3
    assert dataset.index.notes == ("4 records hold no image (header, ranges of identities)",)


def test_split_records_get_their_magic_back(tmp_path: Path) -> None:
    """A payload with the magic at multiples of four is stored in parts without it."""
    head = several([7.0, 0.0], b"")  # 32 bytes, a multiple of four
    pieces = [b"abcd", b"", b"efghijkl", b"xyz"]
    image = MAGIC.join(pieces)
    stored = (
        part(head + pieces[0], 1) + part(pieces[1], 2) + part(pieces[2], 2) + part(pieces[3], 3)
    )
    unaligned = b"a" + MAGIC + b"bc"
    records = [stored, part(scalar(1, unaligned)), part(scalar(2, jpeg(0)))]
    dataset = open_dataset(store(tmp_path, records, [0, 1, 2]), verify=True)
    assert [dataset.read(row) for row in range(3)] == [image, unaligned, jpeg(0)]
    assert dataset.labels.tolist() == [7, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([MAGIC, b"a", b"bc", b"defg", MAGIC * 2, b""]), max_size=9),
    label=st.integers(0, 2**24),
)
def test_writer_and_reader_are_inverse(pieces, label, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    image = b"".join(pieces)
    with RecordWriter(folder / "a.rec") as writer:
        writer.write(0, pack_payload(label, image))
        writer.write(1, pack_payload([label, 1.0], image + b"\xff"))
    stored = (folder / "a.rec").read_bytes()
    starts = [int(line.split()[1]) for line in (folder / "a.idx").read_text().splitlines()]
    places = [at for at in range(0, len(stored), 4) if stored[at : at + 4] == MAGIC]
    with (folder / "a.rec").open("rb") as file:
        records = list(scan_records(file, name="a.rec", size=len(stored)))
    assert [record.offset for record in records] == starts
    assert bytes(records[0].payload) == pack_payload(label, image)
    assert places == part_starts(stored)  # so that a damaged file can be entered anywhere
    for name in ("a.rec", "a.idx"):  # long ago: no build waits for the clock
        os.utime(folder / name, ns=(10**18, 10**18 + 1))
    dataset = open_dataset(folder / "a.rec")
    assert [dataset.read(0), dataset.read(1)] == [image, image + b"\xff"]


def test_the_file_is_the_same_bytes_as_by_hand(tmp_path: Path) -> None:
    image = b"1234" + MAGIC + b"56789"
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(4, pack_payload(3.0, image, number=3))
    expected = part(scalar(3.0, b"1234"), 1) + part(b"56789", 3)
    assert (tmp_path / "a.rec").read_bytes() == expected


def test_keys_in_any_order_are_found(tmp_path: Path) -> None:
    images = [jpeg(seed) for seed in range(4)]
    records = [part(scalar(row, image)) for row, image in enumerate(images)]
    path = store(tmp_path, records, [9, 4, 7, 1])
    lines = (tmp_path / "train.idx").read_text().splitlines()
    (tmp_path / "train.idx").write_text("\n".join(sorted(lines)))  # by key, without a last newline
    dataset = open_dataset(path)
    assert [dataset.read(row) for row in range(4)] == images
    assert dataset.index.columns["key"].tolist() == [9, 4, 7, 1]


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        ("0\t0\n1\t4\n", "sends key 1 to byte 4, inside a record"),
        ("0\t0\n", "has no line for the record at byte"),
        ("0\t0\n1\t{second}\n2\t999999\n", "sends key 2 to byte 999999, and train.rec has"),
        ("0\t0\nx\t7\n", r"line 2: 'x\\t7' is not a key and an offset"),
        ("0\t0\n1\n", "line 2: '1' is not a key and an offset"),
        ("0\t-4\n", "line 1"),
        ("0\t99999999999999999999999\n", "line 1"),
    ],
)
def test_an_idx_of_another_file_is_refused(idx: str, message: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", [jpeg(0), jpeg(1)], [0, 1])
    second = path.with_suffix(".idx").read_text().split()[3]
    path.with_suffix(".idx").write_text(idx.format(second=second))
    with pytest.raises(DataError, match=message):
        open_dataset(path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["train.idx", "train.rec"]


def test_many_lines_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmargin.data.readers.recordio._IDX_BYTES", 64)
    pairs = [(key, 12 * key) for key in range(100)]
    for lines in (pairs, pairs[::-1]):
        (tmp_path / "a.idx").write_text("".join(f"{key}\t{at}\n" for key, at in lines))
        assert list(idx_lines(tmp_path / "a.idx")) == pairs


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-4], "the file ends after"),
        (lambda data: data[:-4] + b"\0" * 4 + b"ab", "the file ends inside it"),
        (lambda data: b"PK" + data[2:], "damaged or not a RecordIO file"),
        (lambda data: data[:4] + struct.pack("<I", 3 << 29 | 4) + data[8:], "middle part"),
        (lambda data: part(scalar(0, b"a"), 1) + data, "its last part is missing"),
        (lambda data: data[:4] + struct.pack("<I", (1 << 29) - 1) + data[8:], "at most"),
        (lambda data: part(b"short"), "fewer than the 24"),
        (lambda data: part(struct.pack("<IfQQ", 1 << 30, 0, 0, 0)), "labels do not fit"),
        (lambda data: part(scalar(-1, b"a")), r"label -1.0 is not an integer"),
        (lambda data: part(scalar(1.5, b"a")), r"label 1.5 is not an integer"),
        (lambda data: part(scalar(float("nan"), b"a")), "label nan"),
        (lambda data: part(scalar(float("inf"), b"a")), "label inf"),
        (lambda data: part(scalar(2.0**31, b"a")), "not an integer in"),
        (lambda data: b"", "no samples"),
    ],
)
def test_damage_is_named_with_its_place(damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = write_records(tmp_path / "train.rec", [jpeg(0)], [0])
    path.with_suffix(".idx").unlink()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(path)
    assert "train.rec" in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["train.rec"]  # no half index


def test_records_larger_than_the_window_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("qmargin.data.readers.recordio._WINDOW", 64)
    images = [bytes([seed]) * (10 + 37 * seed) for seed in range(12)]
    images[5] = (MAGIC + b"1234") * 30
    dataset = open_dataset(write_records(tmp_path / "a.rec", images, list(range(12))))
    assert [dataset.read(row) for row in range(12)] == images


def test_the_property_file_counts_the_classes(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.rec", [jpeg(0), jpeg(1)], [0, 3])
    (tmp_path / "property").write_text("10,112,112\n2")
    assert open_dataset(path, index=tmp_path / "a.qmindex").num_classes == 10
    for content, message in (
        ("3,112,112", "3 classes and train.rec has the label 3"),
        ("?", "begin"),
    ):
        (tmp_path / "property").write_text(content)
        with pytest.raises(DataError, match=message):
            open_dataset(path, index=tmp_path / "b.qmindex")


def test_a_file_cut_off_after_indexing_gives_corrupt_samples(tmp_path: Path) -> None:
    images = [jpeg(0), b"abcd" + MAGIC + b"abcd", jpeg(1)]
    dataset = open_dataset(write_records(tmp_path / "a.rec", images, [0, 1, 2]))
    with (tmp_path / "a.rec").open("r+b") as file:
        file.truncate(int(dataset.index.columns["offset"][1]) + 4)
    assert dataset.read(0) == images[0]
    for row in (1, 2):
        with pytest.raises(CorruptSample, match="ends"):
            dataset.read(row)
