import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from helpers.audio_layouts import csv_list, json_list, kaldi_folder, shard, write_tar
from helpers.recordings import encoded, real_speech, speaker_folders, tone
from qmargin.data.audio_collection import AudioCollection
from qmargin.data.audio_lists import audio_layout, open_audio
from qmargin.errors import CorruptSample, DataError


def check_three_speakers(collection: AudioCollection) -> None:
    assert len(collection) == 6
    assert collection.speakers == ("id0", "id1", "id2")
    assert collection.num_classes == 3
    assert collection.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert collection.sample_id(3) == "id1/video/00001.wav"
    samples, label = collection[3]
    assert label == 1
    np.testing.assert_array_equal(samples, tone(0.6, hertz=307.0))
    assert collection.read(3) == encoded(tone(0.6, hertz=307.0))
    assert collection.size(3) == len(collection.read(3))


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (speaker_folders, "folder"),
        (kaldi_folder, "kaldi"),
        (json_list, "json"),
        (csv_list, "csv"),
    ],
)
def test_layouts_of_files_give_the_same_utterances(make, layout: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    assert audio_layout(path) == layout
    collection = open_audio(path)
    check_three_speakers(collection)
    check_three_speakers(pickle.loads(pickle.dumps(collection)))  # what a spawned worker gets


def test_shards_are_read_without_extraction(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    paths = [write_tar(folder / f"shard-{number}.tar", shard(number)) for number in range(2)]
    listing = tmp_path / "shard.list"
    listing.write_text("shards/shard-0.tar\nshards/shard-1.tar\n")
    seen = []
    for path in (folder, listing):
        assert audio_layout(path) == "shards"
        collection = open_audio(path, progress=lambda *done: seen.append(done))
        assert collection.labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert collection.sample_id(4) == "id1/v1/00001"
        np.testing.assert_array_equal(collection[4][0], tone(0.2, hertz=250))
        assert collection.source(4) == str(paths[1])
        assert collection.size(4) == len(collection.read(4))
    assert seen[:3] == [(0, 2), (1, 2), (2, 2)]
    assert len(open_audio(paths[0])) == 3
    assert sorted(item.name for item in tmp_path.rglob("*")) == [
        "shard-0.tar", "shard-1.tar", "shard.list", "shards",
    ]  # fmt: skip


def test_rows_are_named_and_splits_are_chosen(tmp_path: Path) -> None:
    path = csv_list(tmp_path)
    train = open_audio(path, split="train")
    assert [train.sample_id(index) for index in range(3)] == [
        f"id{number}/video/00000.wav" for number in range(3)
    ]
    assert train.source(1) == f"{path}, row 4"
    with pytest.raises(DataError, match="no row whose split is 'tain'"):
        open_audio(path, split="tain")


def test_relative_paths_start_at_the_list_or_at_a_given_root(tmp_path: Path) -> None:
    path = csv_list(tmp_path / "data")
    moved = tmp_path / "elsewhere.csv"
    moved.write_bytes(path.read_bytes())
    assert len(open_audio(moved, root=tmp_path / "data")[0][0]) == 8000
    with pytest.raises(CorruptSample, match="No such file"):
        open_audio(moved)[0]
    with pytest.raises(CorruptSample, match="No such file"):
        open_audio(moved).size(0)


@pytest.mark.parametrize(
    "place",
    ["sox a.sph -t wav - |", "| cat a.wav", "pipe:cat a.wav", "ffmpeg -i a.m4a -f wav - |  "],
)
def test_commands_in_lists_are_refused(place: str, tmp_path: Path) -> None:
    key = "id0/video/00000.wav"
    kaldi_folder(tmp_path, scp=f"{key} {place}\n", utt2spk=f"{key} id0\n")
    with pytest.raises(DataError, match=r"wav.scp, row 1: .* is a command, .* never start one"):
        open_audio(tmp_path)
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"key": "a", "wav": place.strip(), "spk": "b"}))
    with pytest.raises(DataError, match=r"raw.jsonl, row 1: .* is a command"):
        open_audio(raw)


@pytest.mark.parametrize(
    ("scp", "utt2spk", "message"),
    [
        ("a a.wav\n", "b x\n", "wav.scp, row 1: key 'a' is not in utt2spk"),
        ("a a.wav\n", "a x y\n", "utt2spk, row 1: 3 columns"),
        ("a a.wav\nb\n", "a x\nb y\n", "wav.scp, row 2: the path is empty"),
        ("a a.wav\na b.wav\n", "a x\n", "row 2: key 'a' was given before, in .*row 1"),
        ("a feats.ark:123\n", "a x\n", "points into a Kaldi archive"),
        ("", "a x\n", "has no utterances"),
        ("a \xff.wav\n", "a x\n", "is not UTF-8"),
    ],
)
def test_wrong_kaldi_lists_are_named(scp: str, utt2spk: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wav.scp").write_bytes(scp.encode("latin-1"))
    (tmp_path / "utt2spk").write_text(utt2spk)
    with pytest.raises(DataError, match=message):
        open_audio(tmp_path)


def test_kaldi_folders_need_speakers_and_no_segments(tmp_path: Path) -> None:
    kaldi_folder(tmp_path)
    (tmp_path / "segments").write_text("")
    with pytest.raises(DataError, match="cuts recordings up"):
        open_audio(tmp_path)
    (tmp_path / "segments").unlink()
    (tmp_path / "utt2spk").unlink()
    with pytest.raises(DataError, match="utt2spk is missing"):
        open_audio(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"key": "a", "wav": "a.wav"', "row 2 is not JSON"),
        ("[" * 100_000, "row 2 is not JSON"),
        ('["a", "a.wav", "b"]', "row 2 is no object"),
        ('{"key": "a", "feat": "a.ark:7", "spk": "b"}', "features made elsewhere"),
        ('{"key": "a", "wav": "a.wav", "spk": "b", "vad": [[0, 1]]}', "spans of speech"),
        ('{"key": "a", "wav": "a.wav"}', "each must be a string"),
        ('{"key": 7, "wav": "a.wav", "spk": "b"}', "each must be a string"),
        ('{"key": "a", "wav": "a\\u0000.wav", "spk": "b"}', "NUL character"),
    ],
)
def test_wrong_json_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "raw.list"
    path.write_text('{"key": "z", "wav": "z.wav", "spk": "y"}\n' + line)
    with pytest.raises(DataError, match=message):
        open_audio(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,speaker\na.wav\n", "row 2: 1 cells under 2 columns"),
        ("path,speaker\na.wav,\n", "row 2: the speaker is empty"),
        ("path,speaker\n,a\n", "row 2: the path is empty"),
        ('path,speaker\n"a.wav,b\n', "is no CSV"),
        ("path,speaker\n" + "a" * (1 << 20) + ",b\n", "more than 1,048,576 characters"),
        ("path,speaker\n", "has no utterances"),
    ],
)
def test_wrong_csvs_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_audio(path)


def test_split_needs_a_csv_with_that_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,speaker\na.wav,b\n")
    with pytest.raises(DataError, match="no column 'split'"):
        open_audio(tmp_path / "a.csv", split="train")
    with pytest.raises(DataError, match="is no CSV; leave it out"):
        open_audio(speaker_folders(tmp_path / "wavs"), split="train")


def test_folders_that_are_one_level_off_are_explained(tmp_path: Path) -> None:
    speaker_folders(tmp_path / "dev" / "wav")
    with pytest.raises(DataError, match="the folders wav, which are parts of a dataset"):
        open_audio(tmp_path / "dev")
    speaker_folders(tmp_path / "corpus" / "mine")
    with pytest.raises(DataError, match="one folder, 'mine', so there is one speaker"):
        open_audio(tmp_path / "corpus")
    (tmp_path / "dev" / "wav" / "stray.wav").write_bytes(b"")
    with pytest.raises(DataError, match="in no speaker's folder"):
        open_audio(tmp_path / "dev" / "wav")


def test_a_csv_in_a_folder_is_preferred_to_the_names_of_its_folders(tmp_path: Path) -> None:
    speaker_folders(tmp_path / "train", speakers=2)
    speaker_folders(tmp_path / "test", speakers=1)
    rows = [
        f"{path.relative_to(tmp_path)},{path.parts[-3]},{path.parts[-4]}"
        for path in sorted(tmp_path.rglob("*.wav"))
    ]
    with pytest.raises(DataError, match="the folders test, train, which are parts"):
        open_audio(tmp_path)
    (tmp_path / "utterances.csv").write_text("\n".join(["path,speaker,split", *rows]) + "\n")
    assert audio_layout(tmp_path) == "csv"
    assert open_audio(tmp_path).speakers == ("id0", "id1")
    assert len(open_audio(tmp_path, split="test")) == 2


def test_files_that_cannot_be_decoded_are_explained(tmp_path: Path) -> None:
    (tmp_path / "id1" / "v").mkdir(parents=True)
    (tmp_path / "id1" / "v" / "0.m4a").write_bytes(b"x")
    with pytest.raises(DataError, match=r"0.m4a and files like it cannot be decoded; convert"):
        open_audio(tmp_path)


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    speaker_folders(tmp_path)
    (tmp_path / "id0" / "again").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"more than 16 folders deep|Too many levels"):
        open_audio(tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.wav": b"x"}, "1 keys without a recording or without a speaker, the first is 'a'"),
        ({"a.spk": b"s", "b.wav": b"x", "b.spk": b"t"}, "the first is 'a'"),
        ({"a.wav": b"x", "a.spk": b""}, "'a.spk' has 0 bytes"),
        ({"a.wav": b"x", "a.spk": b"s" * 2000}, "'a.spk' has 2000 bytes"),
        ({"a.wav": b"x", "a.flac": b"y", "a.spk": b"s"}, "two recordings of 'a'"),
        ({"a.wav": b"x", "a.spk": b"\xff"}, "is not UTF-8"),
    ],
)
def test_wrong_shards_are_named(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=message):
        open_audio(path)


def test_truncated_missing_and_compressed_shards_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", shard(0))
    content = path.read_bytes()
    whole = open_audio(path)
    path.write_bytes(content[:10_000])
    with pytest.raises(DataError, match="ends inside"):
        open_audio(path)
    with pytest.raises(CorruptSample, match="the tar is truncated"):
        whole.read(2)
    listing = tmp_path / "shard.list"
    listing.write_text("none.tar\n")
    with pytest.raises(DataError, match="No such file"):
        open_audio(listing)
    listing.write_text("none.tar\nb.tar.gz\n")
    with pytest.raises(DataError, match=r"row 2: 'b.tar.gz' is no .tar"):
        open_audio(listing)


def test_one_key_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", shard(0))
    with pytest.raises(DataError, match="was given before"):
        open_audio(tmp_path)


def test_other_things_are_not_audio(tmp_path: Path) -> None:
    (tmp_path / "id" / "a.jpg").parent.mkdir()
    (tmp_path / "id" / "a.jpg").write_bytes(b"x")
    (tmp_path / "pairs.csv").write_text("a,b,label\n1,2,1\n")
    (tmp_path / "faces.csv").write_text("path,label\na.jpg,1\n")
    (tmp_path / "x").mkdir()
    write_tar(tmp_path / "x" / "a.tar", {"a.jpg": b"x", "a.cls": b"1"})
    for name in ("", "id", "pairs.csv", "faces.csv", "x", "x/a.tar", "none"):
        assert audio_layout(tmp_path / name) is None
    with pytest.raises(DataError, match="has images, and recordings are expected"):
        open_audio(tmp_path)
    with pytest.raises(DataError, match="is no list or folder of audio that is known"):
        open_audio(tmp_path / "x")


def test_real_speech_opens_as_folder_and_as_csv() -> None:
    folder = real_speech()
    train = open_audio(folder / "train")
    assert (len(train), train.num_classes) == (1200, 40)
    listed = open_audio(folder / "utterances.csv", split="train")
    assert [f"train/{key}" for key in train.keys] == list(listed.keys)
    assert np.array_equal(train.labels, listed.labels)
