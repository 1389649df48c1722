"""``open_dataset`` for recordings: every layout, checksums, and what is kept in memory."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.audio_layouts import csv_list, json_list, kaldi_folder, tar_shards
from helpers.pictures import jpeg, write_folder
from helpers.recordings import encoded, speaker_folders, tone
from qmargin.data import open_dataset
from qmargin.data.audio_collection import AudioCollection
from qmargin.data.audio_lists import open_audio
from qmargin.data.audio_memory import AudioMemory
from qmargin.data.encoded import ImageDataset
from qmargin.data.speech import open_speech
from qmargin.errors import ConfigError, CorruptSample, DataError


@pytest.mark.parametrize("make", [speaker_folders, kaldi_folder, json_list, csv_list, tar_shards])
def test_every_layout_of_recordings_opens(make, tmp_path: Path) -> None:
    dataset = open_dataset(make(tmp_path))
    assert isinstance(dataset, AudioCollection)
    assert (len(dataset), dataset.num_classes) == (6, 3)
    assert [dataset.class_name(label) for label in range(3)] == ["id0", "id1", "id2"]
    samples, label = dataset[5]
    assert (samples.dtype, samples.ndim, label) == (np.float32, 1, 2)
    assert dataset.read(5)[:4] == b"RIFF"
    assert not list(tmp_path.parent.glob("*.qmindex"))  # nothing is written for reading


def test_images_stay_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "faces", [jpeg(seed) for seed in range(4)], [0, 0, 1, 1])
    assert isinstance(open_dataset(root), ImageDataset)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in sorted(root.rglob("*.jpg")):
            tar.add(name, name.name)
    with pytest.raises(DataError):  # a tar of images alone has no labels, and is no audio either
        open_dataset(tmp_path / "a.tar")


def test_options_are_of_one_kind(tmp_path: Path) -> None:
    speaker_folders(tmp_path / "wavs")
    assert open_dataset(tmp_path / "wavs", sample_rate=8000)[0][0].shape == (4000,)
    with pytest.raises(ConfigError, match="has recordings, and decoder is no option of them"):
        open_dataset(tmp_path / "wavs", decoder="pillow")
    with pytest.raises(ConfigError, match="set verify to compare them"):
        open_dataset(tmp_path / "wavs", index=tmp_path / "i")
    root = write_folder(tmp_path / "faces", [jpeg(0), jpeg(1)], [0, 1])
    with pytest.raises(ConfigError, match="has images, and split is no option"):
        open_dataset(root, split="train")


def test_verified_recordings_notice_changed_bytes(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path / "wavs")
    dataset = open_dataset(root, verify=True)
    assert (tmp_path / "wavs.qmindex").exists()
    path = root / "id0" / "video" / "00000.wav"
    content = bytearray(path.read_bytes())
    content[500] ^= 1  # decoders do not notice
    path.write_bytes(content)
    assert open_dataset(root)[0][1] == 0
    for changed in (dataset, open_dataset(root, verify=True)):
        with pytest.raises(CorruptSample, match="the data has changed or is damaged"):
            changed.read(0)
        with pytest.raises(CorruptSample, match="has changed"):
            changed[0]
        assert changed[1][1] == 0


def test_an_index_of_other_recordings_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = speaker_folders(tmp_path / "wavs")
    open_dataset(root, verify=True)
    (root / "id2" / "video" / "00009.wav").write_bytes(encoded(tone()))
    dataset = open_dataset(root, verify=True)
    assert "is made again" in caplog.text
    assert dataset[6][1] == 2


def test_short_utterances_are_left_out_by_their_durations(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path / "wavs")  # 0.5 s and 0.6 s of each speaker
    assert len(open_speech(root, speed_perturbation=False)) == 6
    longer = open_speech(root, speed_perturbation=False, min_seconds=0.55)
    names = [longer.sample_id(index) for index in range(len(longer))]
    assert names == [f"id{speaker}/video/00001.wav" for speaker in range(3)]
    assert longer.labels is not None
    assert longer.labels.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="min_seconds is 9 and no utterance"):
        open_speech(root, min_seconds=9.0)


@pytest.mark.parametrize("make", [speaker_folders, tar_shards])
def test_chunks_are_the_same_from_memory(make, tmp_path: Path) -> None:
    path = make(tmp_path)
    plain, held = (open_speech(path, num_frames=30, in_memory=kept) for kept in (False, True))
    for index in range(len(plain)):
        for seed in range(4):
            (a, first), (b, second) = plain.read(index, seed), held.read(index, seed)
            assert torch.equal(a, b)
            assert first == second


def test_what_cannot_be_decoded_raises_from_memory_as_well(tmp_path: Path) -> None:
    root = speaker_folders(tmp_path)
    (root / "id1" / "video" / "00000.wav").write_bytes(b"<html>")
    speech = open_speech(root, in_memory=True, num_frames=30)
    with pytest.raises(CorruptSample, match="not audio"):
        speech.read(2, 0)
    assert speech.read(3, 0)[0].ndim == 1


def test_a_collection_that_is_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path))
    assert AudioMemory(collection, max_bytes=1 << 20).nbytes == 6 * 4 * 8800
    with pytest.raises(ConfigError, match="set in_memory to false"):
        AudioMemory(collection, max_bytes=1000)
