"""Tar shards: what the standard library writes is read in place; hostile archives are refused."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from helpers.pictures import jpeg, write_tar
from qmargin.data import open_dataset
from qmargin.data.tar_members import tar_members
from qmargin.errors import DataError


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a", "folder/b", "x" * 90, f"{'p' * 60}/{'n' * 80}"])
def test_every_format_of_names_is_read(format: int, name: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{name}.jpg", b"12345"), ("z", b"")], format)
    with path.open("rb") as file:
        members = list(tar_members(file, name="a.tar", max_size=100))
        assert [(member.name, member.size) for member in members] == [(f"{name}.jpg", 5), ("z", 0)]
        file.seek(members[0].offset)
        assert file.read(5) == b"12345"


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["n" * 300, "é" * 60 + "日本"])
def test_long_and_foreign_names_are_read(format: int, name: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(name, b"1"), ("short", b"2")], format)
    with path.open("rb") as file:
        names = [member.name for member in tar_members(file, name="a.tar", max_size=9)]
    assert names == [name, "short"]


def test_labels_by_number(tmp_path: Path) -> None:
    members = [("0.cls", b"3\n"), ("0.jpg", jpeg(0)), ("1.JPEG", jpeg(1)), ("1.cls", b"0")]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members))
    assert dataset.labels.tolist() == [3, 0]
    assert [dataset.read(row) for row in range(2)] == [jpeg(0), jpeg(1)]
    assert dataset.sample_id(1) == "1"
    assert dataset.num_classes == 4


@pytest.mark.parametrize("kind", ["id", "json"])
def test_labels_by_name_follow_the_order_of_names(kind: str, tmp_path: Path) -> None:
    people = ["zoe", "ada", "zoe", "bea"]
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        members = []
        for number in (2 * shard, 2 * shard + 1):
            label = people[number] if kind == "id" else f'{{"identity": "{people[number]}"}}'
            members += [(f"{number}.jpg", jpeg(number)), (f"{number}.{kind}", label.encode())]
        write_tar(tmp_path / "shards" / f"{shard}.tar", members)
    dataset = open_dataset(tmp_path / "shards")
    assert dataset.labels.tolist() == [2, 0, 2, 1]
    assert [dataset.class_name(label) for label in range(3)] == ["ada", "bea", "zoe"]
    assert dataset.source(3) == f"{tmp_path / 'shards' / '1.tar'}, 3"
    assert [dataset.read(row) for row in range(4)] == [jpeg(row) for row in range(4)]


def test_samples_without_an_image_are_left_out_and_noted(tmp_path: Path) -> None:
    members = [("0.jpg", jpeg(0)), ("0.cls", b"0"), ("1.txt", b"words"), ("README", b"")]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members))
    assert len(dataset) == 1
    assert dataset.index.notes == ("1 samples without an image were left out",)


def special(kind: bytes) -> bytes:
    info = tarfile.TarInfo("0.jpg")
    info.type = kind
    info.linkname = "/etc/passwd"
    return info.tobuf() + bytes(1024)


def plain(size_field: bytes | None = None, name: str = "0.jpg") -> bytes:
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    if size_field is not None:
        header[124:136] = size_field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pax(record: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    return info.tobuf() + record.ljust(512, b"\0") + plain() + bytes(1024)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (special(tarfile.SYMTYPE), "a link, device or sparse file"),
        (special(tarfile.LNKTYPE), "a link, device or sparse file"),
        (special(tarfile.CHRTYPE), "a link, device or sparse file"),
        (special(tarfile.GNUTYPE_SPARSE), "a link, device or sparse file"),
        (plain(b"77777777777\0"), "the archive ends inside it"),
        (plain(b"\x80" + b"\xff" * 11), "the archive ends inside it"),
        (plain(b"9x\0" + bytes(9)), "is not a number"),
        (plain()[:300], "ends inside its header"),
        (plain().replace(b"0.jpg", b"1.jpg"), "wrong checksum"),
        (b"\x1f\x8b" + bytes(1000), "the archive is compressed"),
        (pax(b"99 path=a\n"), "pax attributes are damaged"),
        (pax(b"0 path=a\n"), "pax attributes are damaged"),
        (pax(b"13 size=9999\n"), "larger than 8 GB or sparse"),
        (pax(b"22 GNU.sparse.major=1\n"), "larger than 8 GB or sparse"),
    ],
)
def test_hostile_and_damaged_archives_are_refused(
    data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "a.tar")
    assert [item.name for item in tmp_path.iterdir()] == ["a.tar"]


def test_members_and_names_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = write_tar(tmp_path / "a.tar", [("a.jpg", b"123")])
    with short.open("rb") as file, pytest.raises(DataError, match="3 bytes; at most 2"):
        list(tar_members(file, name="a", max_size=2))
    long = write_tar(tmp_path / "b.tar", [("n" * 5000, b"")])
    with long.open("rb") as file, pytest.raises(DataError, match="its name has 5000 characters"):
        list(tar_members(file, name="b", max_size=9))
    monkeypatch.setattr("qmargin.data.tar_members.MAX_MEMBERS", 2)
    many = write_tar(tmp_path / "c.tar", [(f"{number}.jpg", b"") for number in range(3)])
    with many.open("rb") as file, pytest.raises(DataError, match="more than 2 members"):
        list(tar_members(file, name="c", max_size=9))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.jpg", b"x")], r"sample 0: it has .jpg and no label"),
        ([("0.jpg", b"x"), ("0.cls", b"seven")], "the label 'seven' is not an integer"),
        ([("0.jpg", b"x"), ("0.cls", b"-1")], "the label '-1'"),
        ([("0.jpg", b"x"), ("0.cls", b"1.5")], "the label '1.5'"),
        ([("0.jpg", b"x"), ("0.cls", b"0" * 70_000)], "70000 bytes, not a label"),
        ([("0.jpg", b"x"), ("0.json", b"{}")], "no label or identity"),
        ([("0.jpg", b"x"), ("0.json", b"[")], "no label or identity"),
        ([("0.jpg", b"x"), ("0.jpg", b"y")], "two members 0.jpg"),
        ([("0.jpg", b"x"), ("0.cls", b"0"), ("1.jpg", b"x"), ("1.id", b"a")], "label is a name"),
    ],
)
def test_bad_labels_are_named(
    members: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(write_tar(tmp_path / "a.tar", members))


def test_archives_damaged_at_random_are_errors_of_ours(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", [("0.jpg", jpeg(0)), ("0.cls", b"0")]).read_bytes()
    random = np.random.default_rng(0)
    for turn in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, 1536, 3):
            damaged[place] = int(random.integers(256))
        path = tmp_path / f"{turn}.tar"
        path.write_bytes(bytes(damaged))
        try:
            open_dataset(path)
        except DataError:
            continue
