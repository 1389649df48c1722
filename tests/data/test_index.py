"""An index: never stale without a word, whole or absent, resumed, where it is asked to be."""

import errno
import json
import logging
import multiprocessing
import os
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.layouts import CONTENTS, IMAGES, LABELS, LAYOUTS, write, write_files, write_recordio
from helpers.pictures import write_folder, write_records, write_shards, write_tar
from helpers.recordings import speaker_folders
from qmargin.cli.main import main
from qmargin.data import build, index, open_dataset
from qmargin.data.build import measure
from qmargin.data.check import check_data
from qmargin.data.index import indexed_seconds, read_index
from qmargin.data.open import index_place, open_audio, open_images, open_index
from qmargin.data.readers.folder import FolderReader
from qmargin.data.readers.recordio import MAGIC_BYTES, RecordWriter, pack_payload
from qmargin.data.speech import open_speech
from qmargin.data.stored import open_stored
from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.recipes import get_recipe, list_recipes
from qmargin.training.build import build_dataset

Layout = tuple[str, str, Path]


@pytest.fixture(params=LAYOUTS, ids="-".join)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    kind, name = request.param
    return kind, name, write(tmp_path / "in", kind, name)


def test_the_index_is_built_once(layout: Layout) -> None:
    kind, _, path = layout
    reports: list[tuple[int, int]] = []
    first = open_index(path, progress=lambda done, total: reports.append((done, total)))
    assert reports
    assert all(0 <= done <= total for done, total in reports)
    assert first.is_new
    assert not open_index(path).is_new
    again = open_dataset(first.path)  # the index alone is enough
    assert [again.read(row) for row in range(6)] == CONTENTS[kind]
    assert open_dataset(path).index.path == first.path


def test_index_and_data_can_move_together(layout: Layout, tmp_path: Path) -> None:
    kind, _, path = layout
    index = open_index(path)
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / index.path.relative_to(tmp_path / "in")
    dataset = open_dataset(moved, verify=True)
    assert [dataset.read(row) for row in range(6)] == CONTENTS[kind]


def test_changed_bytes_show_when_asked(layout: Layout) -> None:
    kind, _, path = layout
    plain, checked = open_dataset(path), open_dataset(path, verify=True)
    place, content = plain.path(2), CONTENTS[kind][2]
    data = bytearray(place.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1  # decoders do not notice
    place.write_bytes(bytes(data))
    assert plain.read(2) != content
    for read in (checked.read, checked.__getitem__):
        with pytest.raises(CorruptSample, match="changed"):
            read(2)
    assert checked.read(1) == CONTENTS[kind][1]
    kept = check_data(open_stored(open_index(path, keep_changed=True)))
    assert kept.changed.count == 1


def test_data_that_grows_is_indexed_again(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    kind, name, path = layout
    open_index(path)
    suffix = {"images": "jpg", "recordings": "wav"}[kind]
    if name == "folder":
        (path / "id1" / f"new.{suffix}").write_bytes(CONTENTS[kind][0])
    elif name == "recordio":
        write_records(path, IMAGES[:5], LABELS[:5])
    elif name == "tar":
        write_tar(path / "9.tar", [(f"a.{suffix}", CONTENTS[kind][0]), ("a.id", b"id0")])
    else:
        place = path / "wav.scp" if name == "kaldi" else path
        place.write_text("\n".join(place.read_text().splitlines()[:-1]) + "\n")
    count = {"folder": 7, "tar": 7, "tar_list": 3}.get(name, 5)
    if name == "json_lines":
        count = 6  # the last line is blank
    assert len(open_dataset(path)) == len(open_index(path)) == count
    assert "is built again" in caplog.text


def relabel_record(path: Path, row: int, label: int) -> None:
    """Another label in the same bytes of a record."""
    offset = int(path.with_suffix(".idx").read_text().splitlines()[row].split("\t")[1])
    with path.open("r+b") as file:
        file.seek(offset + 8 + 4)
        file.write(struct.pack("<f", label))


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("name", ["records", "tars"])
def test_labels_changed_in_place_are_indexed_again(name, keeps_time, tmp_path):
    """The same size, and the same time too: blocks of the bytes tell."""
    if name == "records":
        path = changed = write_recordio(tmp_path)
    else:
        path = write_shards(tmp_path / "shards", IMAGES, LABELS)
        changed = path / "00000.tar"
    assert open_dataset(path).labels.tolist() == LABELS
    before = changed.stat()
    if name == "records":
        relabel_record(path, 0, 1)
    else:
        with changed.open("r+b") as file:
            file.seek(changed.read_bytes().index(b"00000.cls") + 512)
            file.write(b"1")
    if keeps_time:
        os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    assert open_dataset(path, verify=True).labels.tolist() == [1, *LABELS[1:]]


def test_a_file_put_in_the_place_of_another_is_indexed_again(tmp_path: Path) -> None:
    """The same size and time, as ``cp -p`` leaves them; only the file itself is another."""
    first = write_recordio(tmp_path)
    open_dataset(first)
    status = first.stat()
    copy = tmp_path / "copy"
    copy.write_bytes(first.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(first)
    assert open_index(first).is_new


def test_an_idx_and_a_property_file_that_change_are_noticed(tmp_path: Path) -> None:
    path = write_recordio(tmp_path)
    assert open_dataset(path).num_classes == 3
    (tmp_path / "property").write_text("5,112,112")
    assert open_dataset(path).num_classes == 5
    lines = path.with_suffix(".idx").read_text().replace("3\t", "7\t")
    path.with_suffix(".idx").write_text(lines)
    assert open_dataset(path).sample_id(3) == "record 7"


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_files_that_come_and_go_in_subfolders_are_noticed(kind: str, tmp_path: Path) -> None:
    root, content = write_files(tmp_path / "data", kind), CONTENTS[kind][0]
    suffix = {"images": "jpg", "recordings": "wav"}[kind]
    deep = root / "id0" / "session" / "day"
    deep.mkdir(parents=True)
    assert len(open_dataset(root, verify=True)) == 6
    (deep / f"new.{suffix}").write_bytes(content)
    assert len(open_dataset(root, verify=True)) == 7
    (deep / f"new.{suffix}").unlink()
    assert len(open_dataset(root)) == len(open_dataset(root, verify=True)) == 6
    (root / "id3" / "a").mkdir(parents=True)
    (root / "id3" / "a" / f"b.{suffix}").write_bytes(content)
    assert open_dataset(root).num_classes == open_dataset(root, verify=True).num_classes == 4


def test_verify_compares_labels_of_an_open_dataset(tmp_path: Path) -> None:
    """Data that changes while it is open: the label is in the header of every record."""
    path = write_recordio(tmp_path)
    dataset = open_dataset(path, verify=True)
    relabel_record(path, 2, 0)
    with pytest.raises(CorruptSample, match="label"):
        dataset.read(2)
    assert dataset.read(1) == IMAGES[1]
    assert check_data(dataset).changed.count == 1


@pytest.mark.parametrize("kind", ["cls", "id", "json"])
def test_verify_compares_labels_in_tars(tmp_path: Path, kind: str) -> None:
    texts = {
        "cls": (b"0\n ", b"1\n "),
        "id": (b"ada", b"bea"),
        "json": (b'{"label":0}', b'{"label":1}'),
    }
    name = f"{'long/' * 30}a" if kind == "json" else "a"
    members = []
    for number, text in enumerate(texts[kind]):
        members += [(f"{name}{number}.{kind}", text), (f"{name}{number}.jpg", IMAGES[number])]
    path = write_tar(tmp_path / "a.tar", members)
    dataset = open_dataset(path, verify=True)
    assert [dataset.read(row) for row in range(2)] == IMAGES[:2]
    path.write_bytes(path.read_bytes().replace(*texts[kind], 1))
    with pytest.raises(CorruptSample, match="label"):
        dataset.read(0)
    assert dataset.read(1) == IMAGES[1]


@pytest.mark.parametrize("labels", [[1.0, 0.0], [3.0, 1.0, 2.0, 0.5]])
def test_verify_reads_records_with_several_labels(tmp_path: Path, labels: list[float]) -> None:
    split = bytes(4) + MAGIC_BYTES + b"rest"
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(0, pack_payload(labels, IMAGES[0]))
        writer.write(1, pack_payload(labels, split))
    dataset = open_dataset(tmp_path / "a.rec", verify=True)
    assert [dataset.read(0), dataset.read(1)] == [IMAGES[0], split]
    assert dataset.labels.tolist() == [int(labels[0])] * 2


def test_an_index_opened_by_its_own_path_is_compared_with_the_data(tmp_path: Path) -> None:
    path = write_recordio(tmp_path)
    index = open_index(path).path
    assert len(open_dataset(index)) == 6
    relabel_record(path, 0, 1)
    with pytest.raises(DataError, match="qmargin data index"):
        open_dataset(index)


def test_options_of_a_list_belong_to_its_index(tmp_path: Path) -> None:
    path = write(tmp_path, "recordings", "manifest")
    for split, count in (("a", 3), (None, 6), ("b", 3)):
        assert len(open_audio(path, split=split, verify=True)) == count
        assert len(open_audio(path, split=split)) == count
    assert len(open_audio(path)) == 6  # the index is of another split
    assert len(open_dataset(index_place(path))) == 3


# Damage.


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1, -30])
def test_an_index_cut_off_is_refused(cut: int, tmp_path: Path) -> None:
    for kind in ("images", "recordings"):
        index = open_index(write_files(tmp_path / kind, kind)).path
        index.write_bytes(index.read_bytes()[:cut])
        with pytest.raises(DataError, match="build it again with qmargin data index"):
            read_index(index)


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_an_index_damaged_at_random_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    index = open_index(write(tmp_path, kind, "manifest"))
    whole = index.path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    for turn in range(100):
        damaged = bytearray(whole)
        for place in random.integers(0, size if turn % 2 else len(whole), 3):
            damaged[place] = int(random.integers(256))
        index.path.write_bytes(bytes(damaged))
        try:
            dataset = open_stored(read_index(index.path, index.root))
            for row in range(len(dataset)):
                dataset.read(row)
        except DataError:
            continue


@pytest.mark.parametrize("column", ["label", "offset", "checksum"])
def test_stored_checksums_of_an_index_are_checked_on_opening(tmp_path: Path, column: str) -> None:
    path = write_recordio(tmp_path)
    place = open_index(path).path
    content = bytearray(place.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    begin = json.loads(content[8:size])[column]["data_offsets"][0]
    content[size + begin] ^= 1
    place.write_bytes(bytes(content))
    with pytest.raises(DataError, match=column):
        open_dataset(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b'\\"num_classes\\": 3', b'\\"num_classes\\": 9'), (b"recordio", b"recordia")]
)
def test_the_header_of_an_index_has_a_checksum_too(tmp_path: Path, old: bytes, new: bytes) -> None:
    place = open_index(write_recordio(tmp_path)).path
    content = place.read_bytes()
    assert old in content
    place.write_bytes(content.replace(old, new))
    with pytest.raises(DataError, match="header"):
        read_index(place)


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_an_index_of_an_older_version_is_built_again(kind: str, tmp_path: Path) -> None:
    path = write_files(tmp_path / "data", kind)
    place = open_index(path).path
    content = place.read_bytes()
    place.write_bytes(content.replace(b'"qmargin_index": "3"', b'"qmargin_index": "2"'))
    assert open_dataset(path, verify=True).labels.tolist() == LABELS
    assert b'"qmargin_index": "3"' in place.read_bytes()
    place.write_bytes(b'{"format":"qmargin-audio-index","version":1}\n')  # of recordings in 0.1
    assert open_dataset(path, verify=True).labels.tolist() == LABELS


# Races.


def test_data_as_new_as_its_index_is_not_trusted(tmp_path, monkeypatch):
    """A change in the same tick of the clock has the same time."""
    path = write_recordio(tmp_path)
    monkeypatch.setattr(index.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(index, "clock_of", lambda folder: path.stat().st_mtime_ns + 1)
    assert open_index(path).is_racy
    monkeypatch.undo()
    assert not open_index(path).is_racy
    assert index_place(path).stat().st_mtime_ns > path.stat().st_mtime_ns


def test_a_builder_waits_until_the_clock_has_moved_on(tmp_path: Path) -> None:
    path = write_recordio(tmp_path)
    second = time.time_ns() // 10**9 * 10**9  # a file system that knows whole seconds only
    os.utime(path, ns=(second, second))
    start = time.monotonic()
    assert not open_index(path).is_racy
    assert time.monotonic() - start < 3.0
    assert time.time_ns() - second >= 2 * 10**9


def test_many_folders_are_compared_without_listing_them(tmp_path, monkeypatch):
    """Opening looks at one folder's time each, and never at the images in it."""
    root = write_folder(tmp_path / "faces", [IMAGES[0]] * 60, [number // 3 for number in range(60)])
    open_images(root)
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(str(place)) or scandir(place))
    assert len(open_images(root)) == 60
    assert listed == [str(root)] * len(listed)


def _open_at_once(root: Path, start: Any, results: Any) -> None:
    start.wait()
    dataset = open_dataset(root)
    results.put((len(dataset), dataset.index.path.read_bytes()))


def test_processes_that_open_the_same_data_at_once_find_one_whole_index(tmp_path, monkeypatch):
    """One builds, slowly; the others wait for it and build nothing."""
    root = write_files(tmp_path / "faces", "images")
    context = multiprocessing.get_context("fork")
    builds = context.Value("i", 0)
    samples = FolderReader.samples

    def slowly(self: FolderReader, scan: Any) -> Any:
        with builds.get_lock():
            builds.value += 1
        time.sleep(0.5)
        return samples(self, scan)

    monkeypatch.setattr(FolderReader, "samples", slowly)
    start, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_open_at_once, args=(root, start, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert builds.value == 1
    assert {length for length, _ in found} == {6}
    assert len({content for _, content in found}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faces", "faces.qmindex"]


def test_without_locks_each_process_builds_the_same_index(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def refused(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    root = write_files(tmp_path / "faces", "images")
    contents = [open_index(root, rebuild=True).path.read_bytes() for _ in range(2)]
    assert contents[0] == contents[1]
    assert "other processes may build it too" in caplog.text


# Recordings are measured, and measuring goes on where it was.


def test_an_index_says_what_is_in_a_recording(tmp_path: Path) -> None:
    dataset = open_audio(write_files(tmp_path / "wavs", "recordings"), indexed=True)
    columns, samples = dataset.index.columns, dataset[0][0]
    assert int(columns["length"][0]) == len(dataset.read(0))
    assert [int(columns[name][0]) for name in ("sample_rate", "num_channels")] == [16000, 1]
    assert dataset.index.seconds().tolist() == [0.5, 0.6] * 3
    assert columns["peak"][0] == pytest.approx(np.abs(samples).max())
    assert columns["rms"][0] == pytest.approx(0.3 / np.sqrt(2), rel=1e-3)
    assert columns["clipped"][0] == 0.0
    assert list(dataset.index.texts("error")) == [""] * 6


def test_durations_come_from_an_index(tmp_path: Path) -> None:
    root = write_files(tmp_path / "wavs", "recordings")
    (root / "id1" / "video" / "00000.wav").write_bytes(b"<html>")
    seconds = indexed_seconds(open_index(root).path)
    assert len(seconds) == 5
    assert seconds["id0/video/00001.wav"] == 0.6
    with pytest.raises(DataError, match="images"):
        indexed_seconds(open_index(write_recordio(tmp_path)).path)


@pytest.mark.parametrize("cut", [0, 1, 200])
def test_an_interrupted_index_goes_on(cut: int, tmp_path: Path, monkeypatch) -> None:
    root = write_files(tmp_path / "wavs", "recordings")
    whole = open_index(root, index=tmp_path / "whole").path.read_bytes()
    measured = []

    def stopping(dataset, row):
        measured.append(row)
        if row == 3 and measured.count(3) == 1:
            raise KeyboardInterrupt
        return measure(dataset, row)

    monkeypatch.setattr(build, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        open_index(root, index=tmp_path / "i")
    measured[:] = [3]
    part = tmp_path / "i.part"
    assert not (tmp_path / "i").exists()
    part.write_bytes(part.read_bytes()[: -cut or None])
    num_kept = part.read_bytes().count(b"\n") - 1  # the first line is the header
    assert open_index(root, index=tmp_path / "i", num_threads=1).path.read_bytes() == whole
    assert num_kept == 3 if cut == 0 else num_kept < 3
    assert measured == [3, *range(num_kept, 6)]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["i", "wavs", "whole"]


def test_parts_of_other_recordings_and_damaged_ones_are_refused(tmp_path, monkeypatch):
    root = write_files(tmp_path / "wavs", "recordings")
    part = tmp_path / "i.part"
    part.write_bytes(b'{"format"')  # ended inside its first line
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **o: path == part or unlink(path, **o))
    open_index(root, index=tmp_path / "i")
    monkeypatch.undo()
    lines = part.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    for changed, message in (
        ([lines[0], b"{}\n", *lines[2:]], "line 2 is damaged"),
        ([lines[0], b"\xff\n", *lines[2:]], "line 2 is damaged"),
        ([lines[0], lines[1].replace(b'"length":', b'"length":-'), *lines[2:]], "line 2"),
        ([*lines, lines[1]], "line 8"),
    ):
        part.write_bytes(b"".join(changed))
        with pytest.raises(DataError, match=message):
            open_index(root, index=tmp_path / "i", rebuild=True)
    part.write_bytes(b"".join(lines))
    other = speaker_folders(tmp_path / "others", speakers=4)
    with pytest.raises(DataError, match="of different recordings"):
        open_index(other, index=tmp_path / "i", rebuild=True)


def test_short_recordings_are_left_out_by_their_durations(tmp_path: Path) -> None:
    root = write_files(tmp_path / "wavs", "recordings")  # 0.5 s and 0.6 s of each speaker
    assert len(open_speech(root, speed_perturbation=False)) == 6
    longer = open_speech(root, speed_perturbation=False, min_seconds=0.55)
    names = [longer.sample_id(index) for index in range(len(longer))]
    assert names == [f"id{speaker}/video/00001.wav" for speaker in range(3)]
    assert longer.labels.tolist() == [0, 1, 2]
    assert longer.read(1, seed=0)[1] == 1
    with pytest.raises(ConfigError, match="min_seconds is 9"):
        open_speech(root, min_seconds=9.0)


# Where it goes.


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_writing_an_index_beside_the_data_is_announced(kind, tmp_path, caplog):
    root = write_files(tmp_path / "data", kind)
    with caplog.at_level(logging.WARNING, "qmargin.data"):
        open_dataset(root, verify=True)
    assert str(tmp_path / "data.qmindex") in caplog.text
    assert "index_dir" in caplog.text
    caplog.clear()
    open_dataset(root, verify=True)
    assert not caplog.text


def test_an_index_can_go_into_another_folder(tmp_path: Path) -> None:
    places = tmp_path / "indices"
    places.mkdir()
    for name in ("one", "two"):  # the same name in two folders
        root = write_files(tmp_path / name / "faces", "images")
        assert open_dataset(root, index_dir=places).index.path.parent == places
        assert [path.name for path in root.parent.iterdir()] == ["faces"]
    wavs = write_files(tmp_path / "three" / "wavs", "recordings")
    open_dataset(wavs, verify=True, index_dir=places)
    open_speech(wavs, min_seconds=0.1, index_dir=str(places))
    assert [path.name for path in wavs.parent.iterdir()] == ["wavs"]
    assert len(list(places.iterdir())) == 3
    with pytest.raises(DataError, match="nowhere"):
        open_dataset(root, index_dir=tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset(root, index=tmp_path / "no" / "a.qmindex")


def test_data_in_a_folder_that_cannot_be_written_is_indexed_in_the_cache(tmp_path, monkeypatch):
    root = write_files(tmp_path / "faces", "images")
    monkeypatch.setattr("qmargin.data.open.os.access", lambda place, mode: False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    dataset = open_dataset(root)
    assert dataset.index.path.parent == tmp_path / "home" / ".cache" / "qmargin"
    assert dataset.read(5) == IMAGES[5]
    assert not (tmp_path / "faces.qmindex").exists()


def test_a_recipe_says_where_and_keeps_its_hash(tmp_path: Path) -> None:
    places = tmp_path / "indices"
    places.mkdir()
    speech = next(name for name in list_recipes() if get_recipe(name).data.kind == "audio")
    for name, kind in (("faces_r18_q_margin", "images"), (speech, "recordings")):
        recipe, root = get_recipe(name), write_files(tmp_path / kind, kind)
        options = {"size": 16} if kind == "images" else {"min_seconds": 0.1}
        recipe = replace(recipe, data=replace(recipe.data, path=str(root), options=options))
        moved = replace(recipe, data=replace(recipe.data, index_dir=str(places)))
        assert moved.sha256 == recipe.sha256
        build_dataset(moved)
        assert not root.with_name(f"{kind}.qmindex").exists()
    assert len(list(places.iterdir())) == 2


@pytest.mark.parametrize("command", [("data", "index"), ("check-data",)])
@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_commands_take_a_folder_for_indices(command, kind, tmp_path):
    data = write_files(tmp_path / kind, kind)
    places = tmp_path / "indices"
    places.mkdir()
    assert main([*command, str(data), "--index-dir", str(places)]) == 0
    assert len(list(places.iterdir())) == 1
    assert not data.with_name(f"{kind}.qmindex").exists()
