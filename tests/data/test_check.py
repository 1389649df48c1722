"""``check_data``: every kind of fault is found, counted and named; good data passes."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from helpers.layouts import CONTENTS, LAYOUTS, write, write_files
from helpers.pictures import jpeg, write_folder, write_records
from helpers.recordings import encoded, speaker_folders, tone
from qmargin.data import open_dataset
from qmargin.data.build import measure_recording
from qmargin.data.check import DataReport, Findings, check_data
from qmargin.data.open import open_index
from qmargin.data.stored import open_stored


def names(findings: Findings) -> list[str]:
    assert findings.count == len(findings.examples)
    return [name for name, _ in findings.examples]


def checked(path: Path) -> DataReport:
    return check_data(open_stored(open_index(path, keep_changed=True)), num_threads=3)


@pytest.mark.parametrize(("kind", "name"), LAYOUTS)
def test_good_data_is_good(kind: str, name: str, tmp_path: Path) -> None:
    path, reports = write(tmp_path, kind, name), []
    report = check_data(
        open_stored(open_index(path)), progress=lambda done, total: reports.append((done, total))
    )
    assert report.is_good
    assert (report.num_samples, report.num_classes, report.num_empty) == (6, 3, 0)
    assert (report.single.count, report.duplicates.count) == (0, 0)
    assert report.formats == ({"16 x 16": 6} if kind == "images" else {"16,000 Hz": 6})
    assert report.hours == pytest.approx(0.0 if kind == "images" else 3.3 / 3600)
    assert reports
    assert checked(path).rows() == report.rows()  # read again, or from a new index


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_corrupt_files_are_named_with_their_reason(kind: str, tmp_path: Path) -> None:
    root = write_files(tmp_path / "data", kind)
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    for path, content in zip(
        paths, (b"", b"<!DOCTYPE html>", CONTENTS[kind][2][:-60]), strict=False
    ):
        path.write_bytes(content)
    report = checked(root)
    assert names(report.corrupt) == [path.relative_to(root).as_posix() for path in paths[:3]]
    assert "zero bytes" in report.corrupt.examples[0][1]
    assert report.changed.count == 0  # they were like this when the index was built
    assert not report.is_good


def test_bit_flips_that_still_decode_are_found(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.rec", [jpeg(seed, 64) for seed in range(5)], [0] * 5)
    dataset = open_dataset(path)
    data = bytearray(path.read_bytes())
    data[int(dataset.index.columns["offset"][3]) + 25] ^= 1  # inside a quantisation table
    path.write_bytes(bytes(data))
    report = checked(path)
    assert (names(report.changed), report.corrupt.count) == (["record 3"], 0)
    assert "checksum" in report.changed.examples[0][1]
    assert not report.is_good


def test_everything_that_is_wrong_with_recordings_is_found(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path / "wavs", each=3)
    long = tone(1.5)
    paths = sorted(root.rglob("*.wav"))
    for number, path in enumerate(paths):
        path.write_bytes(encoded(long * np.float32(0.5 + 0.01 * number)))
    open_index(root)
    paths[0].write_bytes(encoded(np.clip(20 * long, -1, 1)))
    paths[1].write_bytes(encoded(0.0001 * long))
    paths[2].write_bytes(encoded(long[:4000]))
    paths[3].write_bytes(paths[4].read_bytes())
    paths[5].write_bytes(b"<html>")
    paths[7].write_bytes(paths[4].read_bytes())
    report = checked(root)
    found = {
        name: [paths.index(root / sample) for sample in names(getattr(report, name))]
        for name in ("clipped", "silent", "short", "duplicates", "conflicts", "corrupt", "changed")
    }
    assert found == {
        "clipped": [0],
        "silent": [1],
        "short": [2],
        "duplicates": [4, 7],
        "conflicts": [7],
        "corrupt": [5],
        "changed": [0, 1, 2, 3, 5, 7],
    }
    assert "'id1'" in report.conflicts.examples[0][1]
    assert not report.is_good
    rows = {title: (count, text) for title, count, text in report.rows()}
    assert rows["changed since indexing"][0] == "6"
    assert rows["changed since indexing"][1].endswith("; ...")


def test_duplicates_and_contradictions(tmp_path: Path) -> None:
    root = write_files(tmp_path / "faces", "images")
    for name in ("id0/x.jpg", "id2/y.jpg", "id2/z.jpg"):
        (root / name).write_bytes(CONTENTS["images"][0])
    report = checked(root)
    assert names(report.duplicates) == ["id0/x.jpg", "id2/y.jpg", "id2/z.jpg"]
    assert names(report.conflicts) == ["id2/y.jpg", "id2/z.jpg"]
    assert not report.is_good


def test_equal_checksums_alone_are_no_duplicates(tmp_path: Path, monkeypatch) -> None:
    path = write_records(tmp_path / "a.rec", [b"one", b"two", b"one"], [0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(zlib, "crc32", lambda data, start=0: 7)
        report = check_data(open_dataset(path))
    assert report.duplicates.examples == [("record 2", "the same bytes as record 0")]


def test_identities_with_one_or_no_sample_are_counted(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "faces", [jpeg(seed) for seed in range(5)], [0, 0, 1, 1, 4])
    (root / "person3").mkdir()
    report = checked(root)
    assert (report.num_classes, report.num_empty) == (4, 1)
    assert names(report.single) == ["person4"]
    assert report.is_good  # worth knowing, not wrong


def test_recordings_of_a_new_index_are_not_decoded_again(tmp_path: Path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        "qmargin.data.check.measure_recording",
        lambda content: calls.append(1) or measure_recording(content),
    )
    root = write_files(tmp_path / "wavs", "recordings")
    assert checked(root).is_good
    assert not calls
    assert checked(root).is_good
    assert len(calls) == 6
