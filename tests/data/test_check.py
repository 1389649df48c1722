"""``check_data``: every kind of fault is found, counted and named; good data passes."""

from pathlib import Path

import pytest

from helpers.pictures import jpeg, write_folder, write_records
from qmargin.data import open_dataset
from qmargin.data.check import MOST_EXAMPLES, check_data
from qmargin.data.encoded import ImageDataset
from qmargin.data.open import open_index
from qmargin.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path / "faces", [jpeg(seed) for seed in range(9)], [0] * 3 + [1] * 3 + [2] * 3
    )


def test_good_data_is_good(root: Path) -> None:
    reports: list[tuple[int, int]] = []
    report = check_data(open_dataset(root), progress=lambda a, b: reports.append((a, b)))
    assert report.is_good
    assert (report.num_samples, report.num_classes, report.num_corrupt) == (9, 3, 0)
    assert (report.num_empty, report.num_single, report.num_duplicates) == (0, 0, 0)
    assert report.sizes == {(16, 16): 9}
    assert reports


def test_corrupt_files_are_named_with_their_reason(root: Path) -> None:
    (root / "person0" / "0.jpg").write_bytes(b"")
    (root / "person1" / "4.jpg").write_bytes(b"<!DOCTYPE html>")
    (root / "person2" / "7.jpg").write_bytes(jpeg(7)[:-30])
    report = check_data(open_dataset(root), num_threads=3)
    assert report.num_corrupt == 3
    assert report.num_changed == 0  # they were like this when the index was built
    assert [finding.sample_id for finding in report.findings] == [
        "person0/0.jpg", "person1/4.jpg", "person2/7.jpg"
    ]  # fmt: skip
    assert report.findings[0].reason == "zero bytes"
    assert not report.is_good


def test_bit_flips_that_still_decode_are_found(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.rec", [jpeg(seed, 64) for seed in range(5)], [0] * 5)
    dataset = open_dataset(path)
    data = bytearray(path.read_bytes())
    data[int(dataset.index.columns["offset"][3]) + 25] ^= 1  # inside a quantisation table
    path.write_bytes(bytes(data))
    report = check_data(ImageDataset(open_index(path, keep_changed=True)))
    assert (report.num_changed, report.num_corrupt) == (1, 0)
    assert report.findings[0].sample_id == "record 3"
    assert "checksum" in report.findings[0].reason
    assert not report.is_good


def test_duplicates_and_contradictions(root: Path) -> None:
    (root / "person0" / "x.jpg").write_bytes(jpeg(0))
    (root / "person2" / "y.jpg").write_bytes(jpeg(0))
    (root / "person2" / "z.jpg").write_bytes(jpeg(0))
    report = check_data(open_dataset(root))
    assert report.num_duplicates == 3
    assert report.num_conflicts == 2
    assert ("person0/0.jpg", "person2/y.jpg") in report.conflicts
    assert not report.is_good


def test_equal_checksums_alone_are_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmargin.data.recordio_index.zlib.crc32", lambda data, start=0: 7)
    images = [b"one", b"two", b"one"]
    path = write_records(tmp_path / "a.rec", images, [0, 1, 2])
    dataset = open_dataset(path)
    monkeypatch.undo()
    report = check_data(dataset)
    assert report.duplicates == (("record 0", "record 2"),)


def test_identities_with_one_or_no_sample_are_counted(root: Path) -> None:
    (root / "person3").mkdir()
    (root / "person4").mkdir()
    (root / "person4" / "only.jpg").write_bytes(jpeg(20))
    report = check_data(open_dataset(root))
    assert (report.num_classes, report.num_empty, report.num_single) == (5, 1, 1)
    assert report.is_good  # worth knowing, not wrong


def test_examples_are_few_and_counts_are_whole(tmp_path: Path) -> None:
    number = 3 * MOST_EXAMPLES + 64
    path = write_records(tmp_path / "a.rec", [b"bad"] * number, list(range(number)))
    report = check_data(open_dataset(path))
    assert report.num_corrupt == number
    assert report.num_conflicts == number - 1
    assert len(report.findings) == len(report.conflicts) == MOST_EXAMPLES


def test_a_damaged_index_is_told(root: Path) -> None:
    index = open_dataset(root).index
    data = bytearray(index.path.read_bytes())
    data[-1] ^= 1
    index.path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="column"):
        open_index(index.path, keep_changed=True)
