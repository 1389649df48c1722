from pathlib import Path

import numpy as np
import pytest

from helpers.recordings import encoded, speaker_folders, tone
from qmargin.data import audio_index
from qmargin.data.audio_check import check_audio
from qmargin.data.audio_index import index_audio, measure, read_audio_index
from qmargin.data.audio_lists import open_audio
from qmargin.errors import DataError


def test_records_say_what_is_in_a_file(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path))
    record = measure(collection, 0)
    samples = collection[0][0]
    assert record.size == len(collection.read(0))
    assert (record.sample_rate, record.num_channels, record.num_samples) == (16000, 1, 8000)
    assert record.seconds == 0.5
    assert record.peak == pytest.approx(np.abs(samples).max())
    assert record.rms == pytest.approx(0.3 / np.sqrt(2), rel=1e-3)
    assert (record.clipped, record.error) == (0.0, "")


def test_an_index_is_written_and_read(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path / "wavs"))
    seen = []
    records = index_audio(collection, tmp_path / "i", progress=lambda *done: seen.append(done))
    assert seen == [(number, 6) for number in range(7)]
    assert read_audio_index(tmp_path / "i", collection) == records
    assert not (tmp_path / "i.part").exists()


@pytest.mark.parametrize("cut", [0, 1, 200])
def test_an_interrupted_index_goes_on(cut: int, tmp_path: Path, monkeypatch) -> None:
    collection = open_audio(speaker_folders(tmp_path / "wavs"))
    whole = index_audio(collection, tmp_path / "whole")
    measured = []

    def stopping(collection, index):
        measured.append(index)
        if index == 3 and measured.count(3) == 1:
            raise KeyboardInterrupt
        return measure(collection, index)

    monkeypatch.setattr(audio_index, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        index_audio(collection, tmp_path / "i")
    measured[:] = [3]
    assert not (tmp_path / "i").exists()
    part = tmp_path / "i.part"
    part.write_bytes(part.read_bytes()[: -cut or None])
    num_kept = part.read_bytes().count(b"\n") - 1  # the first line is the header
    assert index_audio(collection, tmp_path / "i", num_threads=1) == whole
    assert (tmp_path / "i").read_bytes() == (tmp_path / "whole").read_bytes()
    assert num_kept == 3 if cut == 0 else num_kept < 3
    assert measured == [3, *range(num_kept, 6)]


def test_a_part_that_ended_inside_its_first_line_starts_again(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path / "wavs"))
    (tmp_path / "i.part").write_bytes(b'{"format"')
    assert len(index_audio(collection, tmp_path / "i")) == 6
    assert len(read_audio_index(tmp_path / "i", collection)) == 6


def test_indexes_of_other_data_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path / "wavs"))
    other = open_audio(speaker_folders(tmp_path / "others", speakers=4))
    path = tmp_path / "i"
    index_audio(collection, path)
    with pytest.raises(DataError, match="of other utterances"):
        read_audio_index(path, other)
    content = path.read_bytes()
    (tmp_path / "j.part").write_bytes(content)
    with pytest.raises(DataError, match="of other utterances"):
        index_audio(other, tmp_path / "j")
    lines = content.splitlines(keepends=True)
    for changed, message in (
        (lines[:-1], "5 of 6 utterances"),
        ([lines[0], lines[2], lines[1], *lines[3:]], "row 2: utterance .* is out of order"),
        ([lines[0], b"{}\n", *lines[2:]], "row 2 is damaged"),
        ([lines[0], b"\xff\n", *lines[2:]], "row 2 is damaged"),
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(DataError, match=message):
            read_audio_index(path, collection)


def test_the_check_finds_everything_that_is_wrong(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path / "wavs", each=3)
    long = tone(1.5)
    for path in root.rglob("*.wav"):
        path.write_bytes(encoded(long * np.float32(0.5 + 0.001 * hash_of(path))))
    collection = open_audio(root)
    index = index_audio(collection, tmp_path / "i")

    def place(number: int) -> Path:
        return collection.path(number)

    place(0).write_bytes(encoded(np.clip(20 * long, -1, 1)))
    place(1).write_bytes(encoded(0.0001 * long))
    place(2).write_bytes(encoded(long[:4000]))
    place(3).write_bytes(place(4).read_bytes())
    place(5).write_bytes(b"<html>")
    place(6).unlink()
    place(7).write_bytes(place(4).read_bytes())
    report = check_audio(collection, index=index)
    names = {
        name: [int_of(collection, key) for key, _ in getattr(report, name)]
        for name in ("clipped", "silent", "short", "duplicates", "unreadable", "changed")
    }
    assert names == {
        "clipped": [0],
        "silent": [1],
        "short": [2],
        "duplicates": [4, 7],
        "unreadable": [5, 6],
        "changed": [0, 1, 2, 3, 5, 6, 7],
    }
    assert "under another speaker ('id1')" in report.duplicates[1][1]
    assert "under another" not in report.duplicates[0][1]
    assert report.has_errors
    assert report.sample_rates == {16000: 7}
    assert [int_of(collection, key) for key, _ in report.conflicts] == [7]
    counts = {name: count for name, count, _ in report.rows()}
    assert counts["cannot be read"] == 2
    assert counts["changed since indexing"] == 7
    assert report.rows()[1][2].endswith("; ...")
    assert not check_audio(collection).changed


def hash_of(path: Path) -> int:
    return sum(path.as_posix()[-20:].encode()) % 400


def int_of(collection, key: str) -> int:
    return list(collection.keys).index(key)


def test_speakers_with_one_utterance_are_listed(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path, each=1))
    report = check_audio(collection)
    assert [name for name, _ in report.lonely] == ["id0", "id1", "id2"]
    assert not report.has_errors
    with pytest.raises(DataError, match="the index has 1 utterances and the collection 3"):
        check_audio(collection, index=[measure(collection, 0)])
