"""Names that are not UTF-8: kept apart by their bytes, or refused; never merged."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.layouts import CONTENTS, SUFFIXES
from helpers.pictures import jpeg, write_tar
from helpers.recordings import encoded, tone
from qmargin.data import open_dataset
from qmargin.errors import QMarginError
from qmargin.evaluation.columns import read_mapping
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.protocols.ijb import read_template_list
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.trials import read_trials

NAMES = ("Müller".encode("latin-1"), "Möller".encode("latin-1"))


@pytest.mark.parametrize("kind", CONTENTS)
def test_folders_are_kept_apart_by_their_bytes(kind: str, tmp_path: Path) -> None:
    content = CONTENTS[kind][0]
    for name in NAMES:
        folder = tmp_path / "data" / os.fsdecode(name)
        try:
            folder.mkdir(parents=True)
        except OSError:
            pytest.skip("this file system takes UTF-8 only")
        (folder / os.fsdecode(b"\xfe." + SUFFIXES[kind].encode())).write_bytes(content)
    dataset = open_dataset(tmp_path / "data", verify=True)
    assert dataset.num_classes == 2
    assert {os.fsencode(dataset.class_name(label)) for label in (0, 1)} == set(NAMES)
    assert [dataset.read(0), dataset.read(1)] == [content] * 2
    again = open_dataset(tmp_path / "data", verify=True)
    assert again.labels.tolist() == dataset.labels.tolist() == [0, 1]


@pytest.mark.parametrize(("suffix", "label"), [("jpg", "id"), ("jpg", "json"), ("wav", "spk")])
def test_labels_in_tars_are_refused(suffix: str, label: str, tmp_path: Path) -> None:
    content = {"jpg": jpeg(0), "wav": encoded(tone(0.1))}[suffix]
    members = []
    for number, name in enumerate(NAMES):
        text = b'{"identity": "' + name + b'"}' if label == "json" else name
        members += [(f"{number}.{suffix}", content), (f"{number}.{label}", text)]
    with pytest.raises(QMarginError, match="UTF-8"):
        open_dataset(write_tar(tmp_path / "a.tar", members))


def test_members_of_tars_are_kept_apart(tmp_path: Path) -> None:
    members = []
    for number, name in enumerate(NAMES):
        stem = os.fsdecode(name)
        members += [(f"{stem}.jpg", jpeg(number)), (f"{stem}.cls", b"%d" % number)]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members), verify=True)
    assert {os.fsencode(dataset.sample_id(row)) for row in (0, 1)} == set(NAMES)
    assert [dataset.read(0), dataset.read(1)] == [jpeg(0), jpeg(1)]


def each(line: bytes) -> bytes:
    """A line for every name."""
    return b"".join(line.replace(b"NAME", name) for name in NAMES)


ROWS = "".join(
    f'{{"key": "k{code}", "wav": "{code}.wav", "spk": "M\\u{code}ller"}}\n'
    for code in ("d800", "d801")
).encode()
read_groups = partial(read_mapping, role="groups")
LISTS: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "manifest": ("a.csv", b"path,identity\n" + each(b"0.jpg,NAME\n"), open_dataset),
    "recordings": ("a.csv", b"path,speaker\n" + each(b"NAME.wav,NAME\n"), open_dataset),
    "header": ("a.csv", b"path,speaker," + NAMES[0] + b"\na,b,c\n", open_dataset),
    "kaldi": ("utt2spk", each(b"NAME NAME\n"), lambda path: open_dataset(path.parent)),
    "json": ("a.json", each(b'{"key": "NAME", "wav": "NAME", "spk": "NAME"}\n'), open_dataset),
    "json surrogates": ("a.json", ROWS, open_dataset),
    "list of tars": ("tars.txt", b"a.tar\n" + NAMES[0] + b".tar\n", open_dataset),
    "groups": ("groups.csv", b"subject,group\n" + each(b"NAME,NAME\n"), read_groups),
    "subjects": ("utt2spk", each(b"u NAME\n"), partial(read_mapping, role="subjects")),
    "trials": ("trials.txt", each(b"NAME a target\n"), read_trials),
    "scores": ("scores.txt", each(b"NAME a 0.5 target\n"), read_scores),
    "kaldi vectors": ("a.ark", each(b"NAME [ 1 2 ]\n"), read_embeddings),
    "kaldi script": ("a.scp", each(b"NAME a.ark:2\n"), read_embeddings),
    "templates": (
        "gallery.csv",
        b"TEMPLATE_ID,SUBJECT_ID\n" + each(b"1,NAME\n"),
        read_template_list,
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_with_such_names_are_refused(name: str, tmp_path: Path) -> None:
    file, content, read = LISTS[name]
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "wav.scp").write_bytes(b"a a.wav\nb b.wav\n")
    (tmp_path / "a.ark").write_bytes(b"x [ 1 2 ]\n")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(QMarginError, match=r"UTF-8|utf-8"):
        read(tmp_path / file)


@pytest.mark.parametrize("read", [read_scores, read_embeddings])
def test_arrays_with_such_names_are_refused(read: Callable[[Path], Any], tmp_path: Path) -> None:
    if read is read_scores:
        arrays = {"scores": [0.1, 0.2], "labels": [0, 1], "enrol": NAMES, "test": [b"x", b"y"]}
    else:
        arrays = {"keys": np.array(NAMES), "embeddings": np.eye(2, dtype=np.float32)}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(QMarginError, match=r"UTF-8|utf-8"):
        read(tmp_path / "a.npz")
