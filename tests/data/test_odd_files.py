"""Pipes, devices and odd numbers where a file is expected: an error of ours, at once."""

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.limits import within
from helpers.pictures import jpeg, write_folder, write_records
from helpers.recordings import encoded, tone
from qmargin.data import open_dataset, read_bin
from qmargin.data.alignment import align_photos
from qmargin.data.audio import decode_audio, read_info
from qmargin.data.index import indexed_seconds, read_index
from qmargin.data.readers.lists import read_pairs
from qmargin.errors import CorruptSample, DataError, QMarginError
from qmargin.evaluation.columns import read_mapping
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.export import read_thresholds
from qmargin.evaluation.protocols.face_sets import read_pair_trials
from qmargin.evaluation.protocols.ijb import read_inside, read_integers, read_template_list
from qmargin.evaluation.result import read_result
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.trials import read_trials
from qmargin.files import open_regular
from qmargin.models.weights import read_weights

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of Unix")

READERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "records": ("a.rec", open_dataset),
    "tar": ("a.tar", open_dataset),
    "manifest": ("a.csv", open_dataset),
    "index": ("a.qmindex", read_index),
    "audio index": ("b.qmindex", indexed_seconds),
    "verification set": ("a.bin", read_bin),
    "converted set": ("a.npz", read_bin),
    "scores": ("a.txt", read_scores),
    "npz scores": ("a.npz", read_scores),
    "trials": ("a.txt", read_trials),
    "pairs": ("a.txt", read_pairs),
    "csv pairs": ("a.csv", read_pairs),
    "pair trials": ("a.csv", read_pair_trials),
    "groups": ("a.csv", lambda path: read_mapping(path, role="groups")),
    "npz embeddings": ("a.npz", read_embeddings),
    "tensors": ("a.safetensors", read_embeddings),
    "ark": ("a.ark", read_embeddings),
    "scp": ("a.scp", read_embeddings),
    "templates": ("a.csv", read_template_list),
    "integers": ("a.txt", lambda path: read_integers(path, 3)),
    "recording": ("a.wav", decode_audio),
    "header": ("a.flac", read_info),
    "weights": ("a.pt", read_weights),
    "thresholds": ("a.json", read_thresholds),
    "result": ("a.json", read_result),
    "image": ("a.jpg", lambda path: read_inside(path.parent, path.name)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_by_every_reader(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    os.mkfifo(tmp_path / file)
    within(read, tmp_path / file, error=QMarginError)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty", "/"])
def test_devices_and_folders_are_refused(device: str) -> None:
    if device == "/dev/tty" and not Path(device).exists():
        pytest.skip("there is no terminal")
    with pytest.raises((DataError, OSError)):
        open_regular(device)


def test_a_device_behind_a_link_is_refused(tmp_path: Path) -> None:
    for name, (file, read) in READERS.items():
        link = tmp_path / file
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/zero")
        assert within(read, link, error=QMarginError), name


def first_of(path: Path) -> None:
    dataset = open_dataset(path)
    dataset.read(0)


def decoded(path: Path) -> None:
    open_dataset(path)[0]


INSIDE: dict[str, tuple[dict[str, str], str, str, Callable[..., Any]]] = {
    "image": ({}, "faces/ada/a.jpg", "faces", open_dataset),
    "manifest": ({"a.csv": "path,label\na.jpg,0\n"}, "a.jpg", "a.csv", open_dataset),
    "recording": ({}, "wavs/id0/a.wav", "wavs", decoded),
    "whole recording": ({}, "wavs/id0/a.wav", "wavs", first_of),
    "tar": ({}, "a.tar", ".", open_dataset),
    "records": ({}, "a.rec", ".", open_dataset),
    "idx": ({"a.rec": "x"}, "a.idx", "a.rec", open_dataset),
    "speakers": ({"wav.scp": "a a.wav\n"}, "utt2spk", ".", open_dataset),
    "archive": ({"a.scp": "a a.ark:0\n"}, "a.ark", "a.scp", read_embeddings),
}


@pytest.mark.parametrize("name", INSIDE)
def test_pipes_inside_data_are_refused(name: str, tmp_path: Path) -> None:
    texts, pipe, opened, read = INSIDE[name]
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    (tmp_path / pipe).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / pipe)
    within(read, tmp_path / opened, error=DataError)


def test_a_pipe_instead_of_an_image_is_refused(tmp_path: Path) -> None:
    dataset = open_dataset(write_folder(tmp_path / "faces", [jpeg(0)] * 2, [0, 1]))
    (tmp_path / "faces" / "person0" / "0.jpg").unlink()
    os.mkfifo(tmp_path / "faces" / "person0" / "0.jpg")
    within(dataset.read, 0, error=DataError)


def test_a_pipe_among_photos_is_reported(tmp_path: Path) -> None:
    (tmp_path / "photos" / "ada").mkdir(parents=True)
    os.mkfifo(tmp_path / "photos" / "ada" / "a.jpg")
    report = align_photos(tmp_path / "photos", tmp_path / "out")
    assert report.corrupt[0][0] == "ada/a.jpg"


@pytest.mark.parametrize(
    "offset", ["99999999999999999999", "9" * 5000, "²", "-1", "1000000", "1e3", "0x4", "", "4:5"]
)
def test_odd_offsets_of_a_script_are_refused(offset: str, tmp_path: Path) -> None:
    (tmp_path / "a.ark").write_bytes(b"a [ 1 2 ]\n")
    (tmp_path / "a.scp").write_text(f"a a.ark:{offset}\n")
    message = within(read_embeddings, tmp_path / "a.scp", error=DataError)
    assert "line 1" in message


@pytest.mark.parametrize("rate", [0, 1, 999, 768_001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_recording_with_an_absurd_rate_is_refused(rate: int, tmp_path: Path) -> None:
    content = bytearray(encoded(tone(0.1)))
    content[24:28] = struct.pack("<I", rate)
    (tmp_path / "a.wav").write_bytes(bytes(content))
    within(decode_audio, tmp_path / "a.wav", error=CorruptSample)


@pytest.mark.parametrize("rate", [1_000, 1_009, 767_999])
def test_recordings_with_odd_rates_are_read_at_once(rate: int, tmp_path: Path) -> None:
    content = bytearray(encoded(tone(0.5)))
    content[24:28] = struct.pack("<I", rate)
    (tmp_path / "a.wav").write_bytes(bytes(content))
    assert len(decode_audio(tmp_path / "a.wav")) == pytest.approx(
        8000 * 16000 / rate, rel=1e-3, abs=1
    )


def flac_that_promises(num_samples: int, *, rate: int = 16000, channels: int = 1) -> bytes:
    """A short FLAC file whose header says that it is long."""
    content = bytearray(encoded(tone(0.2), "flac"))
    packed = rate << 44 | (channels - 1) << 41 | 15 << 36 | num_samples
    content[18:26] = packed.to_bytes(8, "big")
    return bytes(content)


@pytest.mark.parametrize(
    ("seconds", "rate", "channels"), [(14_000, 16000, 1), (14_000, 655_350, 8), (3_000, 48000, 2)]
)
def test_a_recording_that_promises_more_than_it_has_takes_little_memory(
    seconds, rate, channels, tmp_path
):
    path = tmp_path / "a.flac"
    path.write_bytes(flac_that_promises(seconds * rate, rate=rate, channels=channels))
    within(decode_audio, path, error=CorruptSample)


def test_long_recordings_are_decoded_in_blocks(tmp_path: Path, monkeypatch: Any) -> None:
    """The same samples as at once, in memory for one channel."""
    import numpy as np

    from qmargin.data import audio

    stereo = np.stack([tone(1.0), tone(1.0, hertz=900.0)], axis=1)
    for suffix in ("wav", "flac", "ogg"):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(encoded(stereo, suffix))
        span = lambda info: (1_000, 15_000)  # noqa: E731
        monkeypatch.setattr(audio, "_BLOCK_VALUES", 1 << 22)
        whole, part = decode_audio(path), decode_audio(path, span=span)
        monkeypatch.setattr(audio, "_BLOCK_VALUES", 1_000)
        assert np.array_equal(decode_audio(path), whole)
        assert np.array_equal(decode_audio(path, span=span), part)


def test_a_plain_zip_named_npz_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("scores.csv", "a,b,0.5,1\n")
    for read in (read_scores, read_embeddings, read_bin):
        with pytest.raises(DataError, match=r"scores\.csv"):
            read(tmp_path / "a.npz")


def test_an_idx_with_one_long_word_takes_little_memory(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.rec", [jpeg(0)], [0])
    path.with_suffix(".idx").write_bytes(b"0\t0\n" * 200_000 + b"1" * 2_000_000 + b"\t7\n")
    within(open_dataset, path, error=DataError)


@pytest.mark.parametrize(
    "text", ["²\tx", "9" * 5000, "1\t" + "9" * 5000, "Ada\t²\t1", f"Ada\t1\t{'9' * 5000}"]
)
def test_odd_numbers_in_lists_of_pairs_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text(text + "\n")
    with pytest.raises(DataError):
        read_pairs(tmp_path / "pairs.txt")


@pytest.mark.parametrize("fold", ["²", "9" * 5000, "99999999999999999999"])
def test_odd_folds_are_refused(fold: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(f"a,b,label,fold\nx,y,1,{fold}\n")
    with pytest.raises(DataError, match="line 2"):
        read_pairs(tmp_path / "pairs.csv")
