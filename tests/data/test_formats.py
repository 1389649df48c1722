"""One way in for images and recordings in every format, and what is refused."""

import json
import multiprocessing
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.layouts import CONTENTS, LABELS, LAYOUTS, names, write, write_files
from helpers.pictures import jpeg, shared_data, write_folder, write_records, write_tar
from helpers.recordings import encoded, real_speech, tone
from qmargin import registry
from qmargin.data import open_dataset
from qmargin.data.audio import decode_audio
from qmargin.data.images import decode_image
from qmargin.data.open import open_audio, open_images, open_index, recognise
from qmargin.data.reader import IMAGES, RECORDINGS, Found, Reader, Sample
from qmargin.data.readers.lists import read_pairs
from qmargin.data.readers.tar import tar_members
from qmargin.data.stored import AudioDataset, ImageDataset, OpenFiles
from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.evaluation.columns import read_mapping
from qmargin.evaluation.embed import folder_images
from qmargin.evaluation.protocols.face_sets import read_pair_trials
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.trials import read_trials

Layout = tuple[str, str, Path]


@pytest.fixture(params=LAYOUTS, ids="-".join)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    kind, name = request.param
    return kind, name, write(tmp_path / "in", kind, name)


def test_every_format_gives_the_same_samples(layout: Layout) -> None:
    kind, name, path = layout
    before = sorted(path.parent.rglob("*"))
    dataset = open_dataset(path)
    if kind == "recordings":  # these are only listed
        assert sorted(path.parent.rglob("*")) == before
    assert type(dataset) is (ImageDataset if kind == "images" else AudioDataset)
    assert (dataset.index.kind, dataset.index.format) == (kind, name.removesuffix("_list"))
    assert (len(dataset), dataset.num_classes) == (6, 3)
    assert [dataset.read(row) for row in range(6)] == CONTENTS[kind]
    assert dataset.labels.tolist() == LABELS
    decoded, label = dataset[3]
    expected = (decode_image if kind == "images" else decode_audio)(CONTENTS[kind][3])
    assert np.array_equal(decoded, expected)
    assert (label, type(label)) == (1, int)
    if name == "recordio":
        assert [dataset.sample_id(row) for row in (0, 5)] == ["record 0", "record 5"]
        return
    assert [dataset.class_name(label) for label in range(3)] == ["id0", "id1", "id2"]
    with pytest.raises(DataError, match="3 classes and the label 3; build the index again"):
        dataset.class_name(3)
    wanted = names(kind)[4].rpartition(".")[0] if "tar" in name else names(kind)[4]
    assert dataset.sample_id(4) == wanted
    line = {"manifest": 6, "json_lines": 5, "kaldi": 5}.get(name)
    assert dataset.source(4).endswith(f", line {line}" if line else f", {wanted}")


@pytest.mark.parametrize("verify", [False, True])
def test_workers_read_the_same(layout, verify):
    kind, _, path = layout
    dataset, wanted = open_dataset(path, verify=verify), CONTENTS[kind]
    assert [label for _, label in dataset] == LABELS
    assert dataset.read(-1) == dataset.read(np.int64(5)) == wanted[5]
    for bad in (6, -7):
        with pytest.raises(IndexError, match=f"sample {bad} of 6"):
            dataset.read(bad)
    copied = pickle.dumps(dataset)
    if verify:
        assert len(copied) < 1500  # the index is mapped again, not sent
    again = pickle.loads(copied)
    assert (again.verify, again.read(3)) == (verify, wanted[3])
    with multiprocessing.get_context("fork").Pool(2) as pool:  # with a file that is open
        assert pool.map(dataset.read, [1, 4] * 9, chunksize=1) == [wanted[1], wanted[4]] * 9


def test_workers_that_are_spawned_read_the_same(tmp_path: Path) -> None:
    dataset = open_dataset(write(tmp_path, "images", "tar"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(dataset.read, [1, 4]) == [CONTENTS["images"][1], CONTENTS["images"][4]]


def test_files_that_vanish_are_corrupt_samples(layout: Layout) -> None:
    _, _, path = layout
    dataset = open_dataset(path)
    shutil.rmtree(path.parent)
    with pytest.raises(CorruptSample, match="No such file"):
        dataset.read(4)
    with pytest.raises(CorruptSample):
        dataset[4]


def test_what_is_no_image_is_indexed_and_corrupt_when_decoded(tmp_path: Path) -> None:
    dataset = open_dataset(write_records(tmp_path / "a.rec", [b"", b"<html>"], [0, 1]), verify=True)
    for row, message in enumerate(("zero bytes", "a web page")):
        with pytest.raises(CorruptSample, match=message):
            dataset[row]


def test_few_files_stay_open(tmp_path: Path) -> None:
    files = OpenFiles(max_open=4)
    opened = Path("/proc/self/fd")
    if not opened.exists():
        pytest.skip("open files are counted on Linux")
    before = len(list(opened.iterdir()))
    for number in range(50):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 3)
        assert files.read_at(tmp_path / f"{number}", 1, 2) == bytes([number]) * 2
    assert len(list(opened.iterdir())) <= before + 4


# What is recognised, and what is not.


def test_formats_are_recognised(tmp_path: Path) -> None:
    for kind, name in LAYOUTS:
        path = write(tmp_path / kind / name, kind, name)
        found = recognise(path)
        assert (found.reader.format, found.kind.name) == (name.removesuffix("_list"), kind)
        if name in ("recordio", "kaldi"):
            assert recognise(found.path.parent).path == found.path
    (found.path.parent / "a.rec").write_bytes(b"")
    (found.path.parent / "b.rec").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 .rec files \(a.rec, b.rec\)"):
        recognise(found.path.parent)


@pytest.mark.parametrize(("kind", "name"), LAYOUTS, ids=str)
def test_the_other_kind_is_named_with_the_setting(kind: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind, name)
    opens, setting = (open_audio, "images") if kind == "images" else (open_images, "audio")
    with pytest.raises(DataError, match=rf"{kind}.*data\.kind.*{setting}"):
        opens(path)
    open_index(path)
    if name == "folder":
        with pytest.raises(DataError, match=rf"{kind}.*data\.kind.*{setting}"):
            opens(path.with_name(path.name + ".qmindex"))


def test_a_folder_with_both_has_what_is_asked_for(tmp_path: Path) -> None:
    write_files(tmp_path, "images")
    write_files(tmp_path, "recordings")
    assert len(open_images(tmp_path, index=tmp_path / "a.qmindex")) == 6
    assert len(open_audio(tmp_path)) == 6
    assert recognise(tmp_path).kind is RECORDINGS


def test_options_are_of_one_kind_and_one_format(tmp_path: Path) -> None:
    wavs, faces = (
        write_files(tmp_path / "wavs", "recordings"),
        write_files(tmp_path / "f", "images"),
    )
    assert open_dataset(wavs, sample_rate=8000)[0][0].shape == (4000,)
    with pytest.raises(ConfigError, match="recordings, to which decoder does not apply"):
        open_dataset(wavs, decoder="pillow")
    with pytest.raises(ConfigError, match="images, to which sample_rate does not apply"):
        open_dataset(faces, sample_rate=8000)
    for path in (wavs, faces):
        with pytest.raises(ConfigError, match=r"split is 'train'.*folder"):
            open_dataset(path, split="train")


def test_a_csv_in_a_folder_is_preferred_to_the_names_of_its_folders(tmp_path: Path) -> None:
    for part, name in (("train", "a"), ("train", "b"), ("test", "c")):
        (tmp_path / part / name).mkdir(parents=True)
        (tmp_path / part / name / "1.wav").write_bytes(encoded(tone(0.1)))
    with pytest.raises(DataError, match="parts of a dataset"):
        open_audio(tmp_path)
    rows = "train/a/1.wav,a,train\ntrain/b/1.wav,b,train\ntest/c/1.wav,c,test\n"
    (tmp_path / "all.csv").write_text("path,speaker,split\n" + rows)
    assert recognise(tmp_path).path == tmp_path / "all.csv"
    assert open_audio(tmp_path).num_classes == 3
    assert len(open_audio(tmp_path, split="train")) == 2


class Lines(Reader):
    """A made-up format: lines of a label and hexadecimal bytes."""

    def find(self, path, kind):
        return Found(self, path, IMAGES) if path.suffix == ".hex" else None

    def samples(self, scan):
        for number, line in enumerate(scan.path.read_text().splitlines()):
            label, data = line.split()
            yield Sample(label, f"s{number}", content=bytes.fromhex(data), by_reader=True)

    def read(self, index, row, read_at):
        return bytes.fromhex(index.root.read_text().splitlines()[row].split()[1])


class Careless(Lines):
    precedence = 1

    def find(self, path, kind):
        return {}[path]


def test_a_reader_of_ones_own_is_one_class(tmp_path: Path, monkeypatch, caplog) -> None:
    from qmargin.data.check import check_data

    monkeypatch.setattr(registry.readers, "_entries", dict(registry.readers._entries))
    registry.register_reader("hex_lines", Lines)
    (tmp_path / "a.hex").write_text(f"bea {jpeg(0).hex()}\nada {jpeg(1).hex()}\n")
    dataset = open_dataset(tmp_path / "a.hex", verify=True)
    assert [dataset.read(0), dataset.read(1)] == [jpeg(0), jpeg(1)]
    assert (dataset.labels.tolist(), dataset.index.format) == ([1, 0], "hex_lines")
    assert check_data(open_images(dataset.index.path)).is_good
    registry.register_reader("broken", lambda: 7)
    registry.register_reader("abstract", Reader)
    registry.register_reader("careless", Careless)
    assert len(open_dataset(tmp_path / "a.hex")) == 2  # the broken ones are logged
    assert all(name in caplog.text for name in ("broken", "abstract", "careless"))
    with pytest.raises(ConfigError, match="broken"):
        ImageDataset(__import__("dataclasses").replace(dataset.index, format="broken"))


# Folders.


@pytest.mark.parametrize("kind", ["images", "recordings"])
def test_folders_are_forgiving(kind: str, tmp_path: Path) -> None:
    root, suffix = tmp_path / "data", {"images": "jpg", "recordings": "wav"}[kind]
    given = ["b/2.PNG", "b/1.jpg", "a/deep/er/1.jpg", "a/notes.txt", "c/.h.jpg", "stray.jpg"]
    for name in [*given, ".git/x.jpg", "ünï çode/ß.jpg"]:
        name = name.replace("jpg", suffix).replace("PNG", suffix.upper())
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(CONTENTS[kind][0])
    dataset = open_dataset(root)
    found = [dataset.sample_id(row) for row in range(len(dataset))]
    expected = [f"a/deep/er/1.{suffix}", f"b/1.{suffix}", f"b/2.{suffix.upper()}"]
    assert found == [*expected, f"ünï çode/ß.{suffix}"]
    assert dataset.labels.tolist() == [0, 1, 1, 3]
    assert dataset.num_classes == 4  # c is empty and keeps its number
    assert dataset.class_name(3) == "ünï çode"
    assert dataset.index.notes == (f"1 {kind} outside the folders were left out",)


def test_links_to_folders_are_followed_and_end(tmp_path: Path) -> None:
    root = write_files(tmp_path / "wavs", "recordings")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "1.wav").write_bytes(encoded(tone(0.1)))
    (root / "id0" / "more").symlink_to(tmp_path / "more")
    assert len(open_audio(root)) == 7
    (root / "id0" / "again").symlink_to(root)
    with pytest.raises(DataError, match=r"more than 16 folders deep|Too many levels"):
        open_audio(root)


PARTS = [("train", "test"), ("Train", "Validation"), ("training", "val"), ("dev",)]
PARTS += [("train-clean-100", "dev-clean", "test-other"), ("train",), ("wav",)]
KINDS = pytest.mark.parametrize("kind", ["images", "recordings"])


@KINDS
@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_parts_of_a_dataset_are_not_identities(kind: str, parts: tuple, tmp_path: Path) -> None:
    """A path one level too high; folders without samples do not hide it."""
    for name in parts:
        write_files(tmp_path / "data" / name, kind)
    (tmp_path / "data" / "meta").mkdir()
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path / "data")
    assert str(tmp_path / "data" / parts[0]) in str(caught.value)
    assert open_dataset(tmp_path / "data" / parts[0]).num_classes == 3


@KINDS
def test_one_folder_around_the_identities_is_no_identity(kind: str, tmp_path: Path) -> None:
    write_files(tmp_path / "data" / "aligned", kind)
    with pytest.raises(DataError, match="aligned"):
        open_dataset(tmp_path / "data")
    for name in ("train", "val"):
        write(tmp_path / "shards" / name, "images", "tar")
    with pytest.raises(DataError, match="train"):
        open_dataset(tmp_path / "shards")


def test_people_may_be_called_like_a_part(tmp_path: Path) -> None:
    """Dev is a name; other identities beside it, and images right in its folder, tell."""
    write_folder(tmp_path / "shards" / "train", [jpeg(0)], [0])
    for name in ("Dev", "Ada", "Val"):
        (tmp_path / "people" / name).mkdir(parents=True)
        (tmp_path / "people" / name / "1.jpg").write_bytes(jpeg(0))
    assert open_dataset(tmp_path / "people").num_classes == 3
    (tmp_path / "one" / "ada").mkdir(parents=True)
    (tmp_path / "one" / "ada" / "1.jpg").write_bytes(jpeg(0))
    assert open_dataset(tmp_path / "one").num_classes == 1


# Lists.


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("path,label\n0.jpg,4\n1.jpg,0\n", [4, 0]),
        ("label,other,file\n4,x,0.jpg\n0,y,1.jpg\n", [4, 0]),
        ("\ufeffPath,Label\r\n0.jpg,4\r\n\r\n1.jpg, 0\r\n", [4, 0]),
        ("path,identity\n0.jpg,zoe\n1.jpg,ada\n", [1, 0]),
        ('filename,subject\n"0.jpg","zoe, the first"\n1.jpg,ada\n', [1, 0]),
        ("path\tidentity\n0.jpg\tz,b\n1.jpg\ta\n", [1, 0]),
    ],
)
def test_columns_are_found_by_their_names(text: str, labels: list[int], tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    path = tmp_path / ("list.tsv" if "\t" in text else "list.csv")
    path.write_bytes(text.encode())
    dataset = open_dataset(path)
    assert dataset.labels.tolist() == labels
    assert [dataset.read(row) for row in range(2)] == [jpeg(0), jpeg(1)]
    if "\r\n\r\n" in text:
        assert dataset.source(1) == f"{path}, line 4"


def test_splits_and_roots_of_lists(tmp_path: Path) -> None:
    images = write(tmp_path / "images", "images", "manifest")
    assert open_dataset(images, split="b").sample_id(2) == names("images")[5]
    path = write(tmp_path / "wavs", "recordings", "manifest")
    first = open_audio(path, split="a")
    assert [first.sample_id(row) for row in range(3)] == names("recordings")[::2]
    with pytest.raises(DataError, match="no rows whose split is 'c'"):
        open_audio(path, split="c")
    moved = tmp_path / "elsewhere.csv"
    moved.write_bytes(path.read_bytes())
    assert len(open_audio(moved, root=path.parent)[0][0]) == 8000
    moved.write_text("path,speaker\na.wav,b\n")
    with pytest.raises(DataError, match="split"):
        open_audio(moved, split="train")


def kaldi(scp: str, utt2spk: str) -> dict[str, str]:
    return {"wav.scp": scp, "utt2spk": utt2spk}


def json_lines(line: str) -> dict[str, str]:
    return {"a.list": json.dumps({"key": "z", "wav": "z.wav", "spk": "y"}) + "\n" + line}


def tar(*members: tuple[str, bytes]) -> dict[str, tuple[tuple[str, bytes], ...]]:
    return {"a.tar": members}


def csv(text: str) -> dict[str, str]:
    return {"a.csv": text}


X = ("0.jpg", b"x")
REFUSED = [  # files, of which the first is opened, and what is said
    ({"gone": None}, "does not exist"),
    ({".": None}, "a separate folder"),
    ({"a.bin": ""}, "read_bin"),
    ({"a.zip": ""}, "no known"),
    ({"a.idx": ""}, "a.rec does"),
    ({".": None, "id1/v/0.m4a": "x"}, "0.m4a and files like it cannot be decoded"),
    (csv("path,label\n0.jpg,0\n0.jpg,x\n"), "line 3: the label 'x' is not an integer"),
    (csv("path,label\n0.jpg,-1\n"), "line 2: the label '-1'"),
    (csv("path,label\n0.jpg,1.5\n"), "line 2: the label '1.5'"),
    (csv("path,label\n0.wav\n"), "line 2: 1 cells"),
    (csv("path,label\n0.jpg,0\ngone.jpg,1\n"), "line 3: .*gone.jpg cannot be read"),
    (csv("path,age\n0.jpg,0\n"), "columns path, age; .*label.* in its first line"),
    (csv("a,label\n0.jpg,0\n"), "one of path"),
    (csv("a.jpg,0\nb.jpg,1\n"), "first line"),
    (csv("path,label\n"), "no rows"),
    (csv(""), "no rows.*first line"),
    (csv("path;label\na.jpg;0\n"), "semicolon.*comma"),
    (csv("path,label\n\0,0\n"), "line 2|after line"),
    (csv("path,label,label\n0.jpg,0,1\n"), "two columns are called 'label'"),
    (csv("path,identity\n0.wav,\n"), "line 2: the identity is empty"),
    (csv("path,speaker\n,ada\n"), "line 2: the path is empty"),
    (csv('path,identity\n"0.jpg,ada\n'), "save it as CSV"),
    (csv("path,identity\n" + "a" * (1 << 20) + ",b\n"), "1,048,576 characters"),
    (kaldi("a a.wav\n", "b x\n"), "wav.scp, line 1: key 'a' is not in utt2spk"),
    (kaldi("a a.wav\n", "a x y\n"), "utt2spk, line 1: 3 columns"),
    (kaldi("a a.wav\nb\n", "a x\nb y\n"), "wav.scp, line 2: the path is empty"),
    (kaldi("a a.wav\na b.wav\n", "a x\n"), "line 2: 'a' was given before, in .*line 1"),
    (kaldi("a feats.ark:123\n", "a x\n"), "points into a Kaldi archive"),
    (kaldi("a sox a.sph -t wav - |\n", "a x\n"), "wav.scp, line 1: .* never run"),
    (kaldi("a | cat a.wav\n", "a x\n"), "is a command"),
    (kaldi("a pipe:cat a.wav\n", "a x\n"), "is a command"),
    (kaldi("", "a x\n"), "no samples"),
    ({"wav.scp": "a a.wav\n"}, "utt2spk is missing"),
    ({**kaldi("a a.wav\n", "a x\n"), "segments": ""}, "segments"),
    (json_lines('{"key": "a", "wav": "a.wav"'), "line 2 is not JSON"),
    (json_lines("[" * 100_000), "line 2 is not JSON"),
    (json_lines('["a", "a.wav", "b"]'), "line 2 is no object"),
    (json_lines('{"key": "a", "feat": "a.ark:7", "spk": "b"}'), "features"),
    (json_lines('{"key": "a", "wav": "a", "spk": "b", "vad": [[0, 1]]}'), "spans of speech"),
    (json_lines('{"key": "a", "wav": "a.wav"}'), "each must be a string"),
    (json_lines('{"key": 7, "wav": "a.wav", "spk": "b"}'), "each must be a string"),
    (json_lines('{"key": "a", "wav": "a.wav", "spk": true}'), "each must be a string"),
    (json_lines('{"key": "a", "wav": "a\\u0000.wav", "spk": "b"}'), "NUL character"),
    (json_lines('{"key": "a", "wav": "cat a |", "spk": "b"}'), "line 2: .* is a command"),
    (json_lines('{"key": "a", "wav": "a.wav", "label": -1}'), "line 2: the label -1"),
    (tar(X), "sample 0: it has .jpg and no label"),
    (tar(X, ("0.cls", b"seven")), "the label 'seven' is not an integer"),
    (tar(X, ("0.cls", b"-1")), "the label '-1'"),
    (tar(X, ("0.cls", b"0" * 70_000)), "70000 bytes, not a label"),
    (tar(X, ("0.json", b"{}")), "no label or identity"),
    (tar(X, ("0.json", b"[")), "no label or identity"),
    (tar(X, ("0.json", b'{"label": 1.5}')), "the label '1.5'"),
    (tar(X, X), "two members 0.jpg"),
    (tar(X, ("0.cls", b"0"), ("1.jpg", b"x"), ("1.id", b"a")), "has the identity 'a'"),
    (tar(("a.wav", b"x")), "sample a: it has .wav and no label"),
    (tar(("a.spk", b"s"), ("b.wav", b"x"), ("b.spk", b"t")), "sample a: it has a label and no"),
    (tar(("a.wav", b"x"), ("a.spk", b"")), "'a.spk' is empty"),
    (tar(("a.wav", b"x"), ("a.flac", b"y"), ("a.spk", b"s")), "two recordings"),
    ({"tars.txt": "none.tar\n"}, "No such file"),
    ({"tars.txt": "none.tar\nb.tar.gz\n"}, "line 2: 'b.tar.gz' is not a .tar"),
]


@pytest.mark.parametrize(("files", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_no_dataset_says_what_would_be(files, words, tmp_path):
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content)
        elif content is not None:
            write_tar(folder / name, list(content))
    options = {"root": tmp_path} if "a.csv" in files else {}
    with pytest.raises(DataError, match=words):
        open_dataset(folder / next(iter(files)), **options)


# Ordinary mistakes.

OTHER_LISTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "pairs": ("a;b;label\nx.jpg;y.jpg;1\n", read_pairs),
    "pair trials": ("a;b;label\nx.jpg;y.jpg;1\n", read_pair_trials),
    "scores": ("enrol;test;score;label\na;b;0.5;1\n", read_scores),
    "scores without a header": ("a;b;0.5;1\n", read_scores),
    "trials": ("enrol;test;label\na;b;1\n", read_trials),
    "groups": ("subject;group\nada;x\n", lambda path: read_mapping(path, role="groups")),
}


@pytest.mark.parametrize("name", OTHER_LISTS)
def test_semicolons_are_named(name: str, tmp_path: Path) -> None:
    text, read = OTHER_LISTS[name]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=r"semicolon.*comma"):
        read(tmp_path / "a.csv")


LFW = "2\t1\nAda\t1\t12\nAda\t1\tBea_X\t3\nBea_X\t1\t2\nBea_X\t2\tAda\t1\n"


@pytest.mark.parametrize(
    ("text", "name", "first", "labels", "folds"),
    [
        (LFW, "a.txt", ("Ada/Ada_0001.jpg", "Ada/Ada_0012.jpg"), [1, 0, 1, 0], [0, 0, 1, 1]),
        ("1\nAda\t1\t2\nAda\t1\tBea\t3\n", "a.txt", None, [1, 0], None),
        ('a,b,label,fold\n"x,1",y,1,0\nx,z,nontarget,3\n', "a.csv", ("x,1", "y"), [1, 0], [0, 3]),
    ],
)
def test_pairs_have_names_labels_and_folds(text, name, first, labels, folds, tmp_path):
    (tmp_path / name).write_text(text)
    pairs = read_pairs(tmp_path / name)
    assert first in (None, (pairs.first[0], pairs.second[0]))
    assert pairs.is_genuine.tolist() == labels
    assert (None if pairs.folds is None else pairs.folds.tolist()) == folds
    if text == LFW:
        assert pairs.second[1] == "Bea_X/Bea_X_0003.jpg"
        assert read_pairs(tmp_path / name, extension="png").second[3] == "Ada/Ada_0001.png"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("2\t1\nAda\t1\t2\n", "p.txt", "has 1 pairs and its first line promises 2 folds of 2 x 1"),
        ("1\t1\nAda\t1\t2\nAda\tx\tBea\t3\n", "p.txt", "line 3: 'Ada x Bea 3' is not a pair"),
        ("Ada 1\n", "p.txt", "line 1"),
        ("", "p.txt", "no pairs"),
        ("a,b,label\n", "p.csv", "no pairs"),
        ("a,b,label\nx,y,2\n", "p.csv", "line 2: the label '2' is not 0 or 1"),
        ("a,b\nx,y\n", "p.csv", "one of label"),
        ("x.jpg,y.jpg,1\nx.jpg,z.jpg,0\n", "p.csv", "first line"),
        ("a,b,label,fold\nx,y,1,-1\n", "p.csv", "line 2: the fold '-1'"),
    ],
)
def test_bad_pairs_are_named(text, name, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_pairs(tmp_path / name)


def test_a_folder_without_the_images_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "right" / "Ada").mkdir(parents=True)
    (tmp_path / "right" / "Ada" / "Ada_0001.png").write_bytes(jpeg(0))
    listed = ("Ada/Ada_0001.jpg", "Ada/Ada_0002.jpg")
    with pytest.raises(DataError, match="--images") as caught:
        folder_images(tmp_path / "wrong", listed)
    assert "Ada/Ada_0001.jpg" in str(caught.value)
    with pytest.raises(DataError, match="--extension png"):
        folder_images(tmp_path / "right", listed)
    with pytest.raises(DataError, match=r"--images .*right"):
        folder_images(tmp_path, ("Ada/Ada_0001.png",))
    assert len(folder_images(tmp_path / "right", ("Ada/Ada_0001.png", "gone.png"))) == 2


# Tar archives.


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "name", ["a", "folder/b", "x" * 90, f"{'p' * 60}/{'n' * 80}", "n" * 300, "é" * 60 + "日本"]
)
def test_every_format_of_names_is_read(format: int, name: str, tmp_path: Path) -> None:
    if format == tarfile.USTAR_FORMAT and len(name.rpartition("/")[2].encode()) > 100:
        pytest.skip("the format has no room")
    path = write_tar(tmp_path / "a.tar", [(name, b"12345"), ("z", b"")], format)
    with path.open("rb") as file:
        members = list(tar_members(file, name="a.tar", max_size=100))
        assert [(member.name, member.size) for member in members] == [(name, 5), ("z", 0)]
        file.seek(members[0].offset)
        assert file.read(5) == b"12345"


def test_labels_of_members(tmp_path: Path) -> None:
    members = [("0.cls", b"3\n"), ("0.jpg", jpeg(0)), ("1.JPEG", jpeg(1)), ("1.cls", b"0")]
    others = [("2.txt", b"words"), ("README", b"")]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members + others))
    assert (dataset.labels.tolist(), dataset.num_classes) == ([3, 0], 4)
    assert dataset.index.notes == ("1 samples without an image were left out",)
    people = [("0.jpg", "zoe"), ("1.jpg", "ada"), ("2.jpg", "zoe"), ("3.jpg", "bea")]
    for kind in ("id", "json"):
        written = []
        for name, person in people:
            label = person if kind == "id" else f'{{"identity": "{person}"}}'
            written += [(name, jpeg(0)), (f"{name[0]}.{kind}", label.encode())]
        dataset = open_dataset(write_tar(tmp_path / f"{kind}.tar", written))
        assert dataset.labels.tolist() == [2, 0, 2, 1]
        assert [dataset.class_name(label) for label in range(3)] == ["ada", "bea", "zoe"]


def test_members_of_a_sample_need_not_be_neighbours(tmp_path: Path) -> None:
    members = [(f"{n}.wav", CONTENTS["recordings"][n]) for n in range(3)]
    members += [(f"{n}.spk", b"s%d" % n) for n in range(3)]
    members += [("a.b.wav", b"x"), ("a.b.spk", b"s0"), ("a.c.wav", b"y"), ("a.c.spk", b"s0")]
    dataset = open_audio(write_tar(tmp_path / "a.tar", members))
    assert sorted(dataset.sample_id(row) for row in range(5)) == ["0", "1", "2", "a.b", "a.c"]
    by_name = {dataset.sample_id(row): dataset.read(row) for row in range(5)}
    assert [by_name["1"], by_name["a.c"]] == [CONTENTS["recordings"][1], b"y"]


def special(kind: bytes) -> bytes:
    info = tarfile.TarInfo("0.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
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
        (special(tarfile.SYMTYPE), "link, device or sparse"),
        (special(tarfile.LNKTYPE), "link, device or sparse"),
        (special(tarfile.CHRTYPE), "link, device or sparse"),
        (special(tarfile.GNUTYPE_SPARSE), "link, device or sparse"),
        (plain(b"77777777777\0"), "ends inside it"),
        (plain(b"\x80" + b"\xff" * 11), "ends inside it"),
        (plain(b"9x\0" + bytes(9)), "is not a number"),
        (plain()[:300], "ends inside its header"),
        (plain().replace(b"0.jpg", b"1.jpg"), "wrong checksum"),
        (b"\x1f\x8b" + bytes(1000), "compressed"),
        (pax(b"99 path=a\n"), "pax"),
        (pax(b"0 path=a\n"), "pax"),
        (pax(b"13 size=9999\n"), "8 GB or sparse"),
        (pax(b"22 GNU.sparse.major=1\n"), "8 GB or sparse"),
    ],
)
def test_hostile_and_damaged_archives_are_refused(data, message, tmp_path):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "a.tar")
    assert [item.name for item in tmp_path.iterdir()] == ["a.tar"]


def test_members_and_names_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmargin.data.readers.tar.MAX_MEMBERS", 2)
    for members, message in (
        ([("a.jpg", b"123")], "3 bytes; at most 2"),
        ([("n" * 5000, b"")], "its name has 5000 characters"),
        ([(f"{number}.jpg", b"") for number in range(3)], "more than 2 members"),
    ):
        path = write_tar(tmp_path / "a.tar", members)
        with path.open("rb") as file, pytest.raises(DataError, match=message):
            list(tar_members(file, name="a", max_size=2))


def test_tars_that_shrink_or_occur_twice_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "recordings", "tar_list")
    cut = path.parent / "tars" / "0.tar"
    whole = open_audio(path)
    cut.write_bytes(cut.read_bytes()[:10_000])
    with pytest.raises(DataError, match="ends inside"):
        open_audio(path)
    with pytest.raises(CorruptSample, match="ends inside"):
        whole.read(1)
    path.write_text("tars/3.tar\ntars/3.tar\n")
    with pytest.raises(DataError, match="was given before"):
        open_audio(path)


def test_archives_damaged_at_random_are_errors_of_ours(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", [("0.jpg", jpeg(0)), ("0.cls", b"0")]).read_bytes()
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, 1536, 3):
            damaged[place] = int(random.integers(256))
        path = tmp_path / "b.tar"
        path.write_bytes(bytes(damaged))
        os.utime(path, ns=(10**18, 10**18 + 1))  # long ago: no build waits for the clock
        try:
            open_images(path, index=tmp_path / "b.qmindex")
        except DataError:
            continue


# Real data.


def test_real_faces_through_a_manifest(tmp_path: Path) -> None:
    source = shared_data("congress_faces")
    with zipfile.ZipFile(source / "images.zip") as archive:
        archive.extractall(tmp_path)
    first = next(tmp_path.rglob("*.jpg"))
    shutil.copy(source / "manifest.csv", first.parent)
    dataset = open_dataset(first.parent / "manifest.csv", verify=True)
    assert (len(dataset), dataset.num_classes) == (1326, 1128)
    pixels, label = dataset[1325]
    assert pixels.shape == (112, 112, 3)
    assert dataset.class_name(label) in dataset.sample_id(1325)


def test_real_speech_opens_as_folder_and_as_csv() -> None:
    folder = real_speech()
    train, listed = (
        open_audio(folder / "train"),
        open_audio(folder / "utterances.csv", split="train"),
    )
    assert (len(train), train.num_classes) == (1200, 40)
    rows = range(1200)
    assert [f"train/{train.sample_id(row)}" for row in rows] == list(map(listed.sample_id, rows))
    assert np.array_equal(train.labels, listed.labels)
