"""Names that are not UTF-8: kept apart by their bytes, or refused; never merged."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.pictures import jpeg, write_tar
from helpers.recordings import encoded, tone
from qmargin.data import open_dataset
from qmargin.errors import QMarginError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.protocols.ijb_release import read_template_list
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.subjects import read_mapping
from qmargin.evaluation.trials import read_trials

NAMES = ("Müller".encode("latin-1"), "Möller".encode("latin-1"))


def folders(root: Path, suffix: str, content: bytes) -> Path:
    for name in NAMES:
        folder = root / os.fsdecode(name)
        try:
            folder.mkdir(parents=True)
        except OSError:
            pytest.skip("this file system takes UTF-8 only")
        (folder / f"1{suffix}").write_bytes(content)
    return root


@pytest.mark.parametrize(
    ("suffix", "content"), [(".jpg", jpeg(0)), (".wav", encoded(tone(0.1)))], ids=["jpg", "wav"]
)
def test_folders_are_kept_apart_by_their_bytes(tmp_path: Path, suffix: str, content: bytes) -> None:
    dataset = open_dataset(folders(tmp_path / "data", suffix, content), verify=True)
    assert dataset.num_classes == 2
    assert {os.fsencode(dataset.class_name(label)) for label in (0, 1)} == set(NAMES)
    assert [dataset.read(0), dataset.read(1)] == [content] * 2
    again = open_dataset(tmp_path / "data", verify=True)
    assert again.labels.tolist() == dataset.labels.tolist() == [0, 1]


def tar_of_identities(folder: Path) -> None:
    members = []
    for number, name in enumerate(NAMES):
        members += [(f"{number}.jpg", jpeg(number)), (f"{number}.id", name)]
    write_tar(folder / "a.tar", members)
    open_dataset(folder / "a.tar")


def tar_with_json(folder: Path) -> None:
    members = []
    for number, name in enumerate(NAMES):
        text = b'{"identity": "' + name + b'"}'
        members += [(f"{number}.jpg", jpeg(number)), (f"{number}.json", text)]
    write_tar(folder / "a.tar", members)
    open_dataset(folder / "a.tar")


def tar_of_speakers(folder: Path) -> None:
    members = []
    for number, name in enumerate(NAMES):
        members += [(f"{number}.wav", encoded(tone(0.1))), (f"{number}.spk", name)]
    write_tar(folder / "a.tar", members)
    open_dataset(folder / "a.tar")


def lines(*parts: bytes) -> bytes:
    return b"".join(part.replace(b"NAME", name) for part in parts for name in NAMES)


def manifest(folder: Path) -> None:
    for number in range(2):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    text = b"path,identity\n0.jpg," + NAMES[0] + b"\n1.jpg," + NAMES[1] + b"\n"
    (folder / "a.csv").write_bytes(text)
    open_dataset(folder / "a.csv")


def recordings_csv(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"path,speaker\n" + lines(b"NAME.wav,NAME\n"))
    open_dataset(folder / "a.csv")


def recordings_csv_header(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"path,speaker," + NAMES[0] + b"\na,b,c\n")
    open_dataset(folder / "a.csv")


def kaldi(folder: Path) -> None:
    (folder / "wav.scp").write_bytes(b"a a.wav\nb b.wav\n")
    (folder / "utt2spk").write_bytes(b"a " + NAMES[0] + b"\nb " + NAMES[1] + b"\n")
    open_dataset(folder)


def json_lines(folder: Path) -> None:
    row = b'{"key": "NAME", "wav": "NAME.wav", "spk": "NAME"}\n'
    (folder / "a.json").write_bytes(lines(row))
    open_dataset(folder / "a.json")


def json_surrogates(folder: Path) -> None:
    rows = "".join(
        f'{{"key": "k{code}", "wav": "{code}.wav", "spk": "M\\u{code}ller"}}\n'
        for code in ("d800", "d801")
    )
    (folder / "a.json").write_text(rows)
    open_dataset(folder / "a.json")


def shard_list(folder: Path) -> None:
    (folder / "tars.txt").write_bytes(b"a.tar\n" + NAMES[0] + b".tar\n")
    open_dataset(folder / "tars.txt")


def groups(folder: Path) -> None:
    (folder / "groups.csv").write_bytes(b"subject,group\n" + lines(b"NAME,NAME\n"))
    read_mapping(folder / "groups.csv", role="groups")


def subjects(folder: Path) -> None:
    (folder / "utt2spk").write_bytes(b"u1 " + NAMES[0] + b"\nu2 " + NAMES[1] + b"\n")
    read_mapping(folder / "utt2spk", role="subjects")


def trials(folder: Path) -> None:
    (folder / "trials.txt").write_bytes(lines(b"NAME a target\n"))
    read_trials(folder / "trials.txt")


def scores(folder: Path) -> None:
    (folder / "scores.txt").write_bytes(lines(b"NAME a 0.5 target\n"))
    read_scores(folder / "scores.txt")


def npz_scores(folder: Path) -> None:
    np.savez(folder / "a.npz", scores=[0.1, 0.2], labels=[0, 1], enrol=NAMES, test=[b"x", b"y"])
    read_scores(folder / "a.npz")


def npz_embeddings(folder: Path) -> None:
    np.savez(folder / "a.npz", keys=np.array(NAMES), embeddings=np.eye(2, dtype=np.float32))
    read_embeddings(folder / "a.npz")


def kaldi_vectors(folder: Path) -> None:
    (folder / "a.ark").write_bytes(lines(b"NAME [ 1 2 ]\n"))
    read_embeddings(folder / "a.ark")


def kaldi_script(folder: Path) -> None:
    (folder / "a.ark").write_bytes(b"x [ 1 2 ]\n")
    (folder / "a.scp").write_bytes(lines(b"NAME a.ark:2\n"))
    read_embeddings(folder / "a.scp")


def templates(folder: Path) -> None:
    text = b"TEMPLATE_ID,SUBJECT_ID\n1," + NAMES[0] + b"\n2," + NAMES[1] + b"\n"
    (folder / "gallery.csv").write_bytes(text)
    read_template_list(folder / "gallery.csv")


READERS = [
    tar_of_identities,
    tar_with_json,
    tar_of_speakers,
    manifest,
    recordings_csv,
    recordings_csv_header,
    kaldi,
    json_lines,
    json_surrogates,
    shard_list,
    groups,
    subjects,
    trials,
    scores,
    npz_scores,
    npz_embeddings,
    kaldi_vectors,
    kaldi_script,
    templates,
]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_lists_with_such_names_are_refused(tmp_path: Path, read: Callable[[Path], None]) -> None:
    with pytest.raises(QMarginError, match=r"UTF-8|utf-8"):
        read(tmp_path)


def test_members_of_tars_are_kept_apart(tmp_path: Path) -> None:
    members = []
    for number, name in enumerate(NAMES):
        stem = os.fsdecode(name)
        members += [(f"{stem}.jpg", jpeg(number)), (f"{stem}.cls", b"%d" % number)]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members), verify=True)
    assert {os.fsencode(dataset.sample_id(row)) for row in (0, 1)} == set(NAMES)
    assert [dataset.read(0), dataset.read(1)] == [jpeg(0), jpeg(1)]
