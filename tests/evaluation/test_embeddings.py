"""Embeddings come back from every format, and bad ones are errors that say where."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from qmargin.errors import DataError
from qmargin.evaluation.embeddings import read_embeddings, read_seconds
from qmargin.evaluation.scores import read_scores

KEYS = ["id1/a.wav", "id1/b.wav", "îd2/c.wav"]
MATRIX = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0], [1e-20, 5.0, 7.0]], dtype=np.float32)


def ark_entry(key, array):
    """One binary entry, written by the format's description."""
    kind = {4: b"F", 8: b"D"}[array.itemsize] + {1: b"V", 2: b"M"}[array.ndim]
    sizes = b"".join(b"\x04" + struct.pack("<i", size) for size in array.shape)
    return key.encode() + b" \0B" + kind + b" " + sizes + array.tobytes()


def write_ark(path, dtype=np.float32, *, is_matrix=False):
    """An archive, and the offset of each value in it."""
    content, offsets = b"", []
    for key, row in zip(KEYS, MATRIX.astype(dtype), strict=True):
        offsets.append(len(content) + len(key.encode()) + 1)
        content += ark_entry(key, row[None] if is_matrix else row)
    path.write_bytes(content)
    return offsets


def expect_the_matrix(path, dtype=np.float32):
    embeddings = read_embeddings(path)
    assert list(embeddings.keys) == KEYS
    assert embeddings.matrix.dtype == dtype
    np.testing.assert_array_equal(embeddings.matrix, MATRIX.astype(dtype))
    assert embeddings.embedding_dim == 3
    assert len(embeddings) == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_matrix_and_vectors_by_name(tmp_path, dtype, suffix):
    path, matrix = tmp_path / f"e{suffix}", MATRIX.astype(dtype)
    small = torch.from_numpy(MATRIX[:2]).bfloat16()  # which holds these
    if suffix == ".npz":
        np.savez(path, keys=np.array(KEYS), embeddings=matrix)
    else:
        save_file({"embeddings": torch.from_numpy(matrix)}, path, {"keys": json.dumps(KEYS)})
    expect_the_matrix(path, dtype)
    if suffix == ".npz":
        np.savez(path, a=MATRIX[0], b=MATRIX[1])
    else:
        save_file({"a": small[0], "b": small[1]}, path)
    embeddings = read_embeddings(path)
    assert embeddings.keys == ("a", "b")
    np.testing.assert_array_equal(embeddings.matrix, MATRIX[:2])


@pytest.mark.parametrize("is_matrix", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_binary_ark_and_scp(tmp_path, dtype, is_matrix):
    offsets = write_ark(tmp_path / "e.ark", dtype, is_matrix=is_matrix)
    expect_the_matrix(tmp_path / "e.ark", dtype)
    scp = tmp_path / "e.scp"
    lines = [f"{key} {tmp_path}/e.ark:{at}\n" for key, at in zip(KEYS, offsets, strict=True)]
    scp.write_text("".join(lines), encoding="utf-8")
    expect_the_matrix(scp, dtype)
    scp.write_text("".join(line.replace(f"{tmp_path}/", "") for line in lines), encoding="utf-8")
    expect_the_matrix(scp, dtype)  # beside the script file


def test_text_ark(tmp_path):
    path = tmp_path / "e.ark"
    lines = [
        f"{KEYS[0]}  [ 1 -2 0.5 ]",
        f"{KEYS[1]}  [\n  0.25 3 -1 ]",
        f"{KEYS[2]}  [ 1e-20 5 7 ]",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    expect_the_matrix(path)


ENTRY = ark_entry("a", MATRIX[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no embeddings"),
        (ENTRY + ark_entry("b", MATRIX[0, :2]), "byte 24: 'b' has 2 values, but 'a' has 3"),
        (ENTRY + ark_entry("a", MATRIX[0]), "the name 'a' has two embeddings, number 0 and 1"),
        (ENTRY[:-1], "'a' should hold 12 bytes, but 11 follow"),
        (ENTRY + b"b", "byte 24: the archive is cut short in a name"),
        (ENTRY + b"b \0BCM " + b"\0" * 40, "has the type b'CM'.*without compression"),
        (ark_entry("a", MATRIX), "'a' is a matrix of 3 rows"),
        (ark_entry("a", MATRIX[0] * np.float32(np.nan)), "'a' \\(number 0\\) is not finite"),
        (b"a \0BFV \x04\xff\xff\xff\x7f" + b"\0" * 8, "should hold 8,589,934,588 bytes, but 8"),
        (b"a \0BFV \x04\xff\xff\xff\xff" + b"\0" * 8, "has no size where one is expected"),
        (b"a \0BFV \x08\x03\0\0\0" + b"\0" * 12, "has no size where one is expected"),
        (b"a [ 1 2", "has no closing"),
        (b"a [ 1 x ]\n", "a value that is not a number"),
        (b"a 1 2 3\n", "does not begin with"),
        (b"a [\n 1 2\n 3 ]\n", "rows of different widths"),
        (b"no value here\n", "does not begin with"),
        (b"\xff\xfe [ 1 ]\n", "is not UTF-8"),
        (b"justaline\n", "no value follows"),
    ],
)
def test_bad_archives(tmp_path, content, message):
    path = tmp_path / "e.ark"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_embeddings(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a cat e.ark |", "line 2: an entry that runs a command is refused"),
        ("a |cat e.ark", "line 2: an entry that runs a command is refused"),
        ("a e.ark", "line 2: .* is not `key archive:offset`"),
        ("a e.ark:2[0:5]", "line 2: .* is not `key archive:offset`"),
        ("a gone.ark:2", "line 2: the archive 'gone.ark' does not exist"),
        ("a e.ark:7", "line 2: 'a' in e.ark:7"),
    ],
)
def test_bad_script_files(tmp_path, line, message):
    write_ark(tmp_path / "e.ark")
    path = tmp_path / "e.scp"
    path.write_text(f"first e.ark:10\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_embeddings(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"keys": ["a"], "embeddings": [[1.0], [2.0]]}, "1 keys"),
        ({"keys": ["a", "a"], "embeddings": [[1.0], [2.0]]}, "the name 'a' has two embeddings"),
        ({"keys": [1], "embeddings": [[1.0]]}, "the key 1 is a int, not a text"),
        ({"keys": ["a"], "embeddings": [[np.inf]]}, "'a' \\(number 0\\) is not finite"),
        ({"keys": ["a"], "embeddings": [["x"]]}, "not numbers"),
        ({"keys": ["a"], "embeddings": np.zeros((1, 0))}, "nothing to compare"),
        ({"keys": ["a"]}, "is missing: give both"),
        ({"embeddings": [[1.0], [2.0]]}, "is missing: give both"),
        ({"a": [1.0, 2.0], "b": [1.0]}, "'b' has 1 values, but 'a' has 2"),
        ({"a": [[1.0, 2.0]]}, r"'a' has the shape \(1, 2\)"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    path = tmp_path / "e.npz"
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    with pytest.raises(DataError, match=message):
        read_embeddings(path)


def test_bad_safetensors_and_unknown_suffixes(tmp_path):
    path = tmp_path / "e.safetensors"
    for keys, message in (("[1", "not JSON"), ("{}", "not a list")):
        save_file({"embeddings": torch.ones(2, 2)}, path, metadata={"keys": keys})
        with pytest.raises(DataError, match=message):
            read_embeddings(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="cut short"):
        read_embeddings(path)
    with pytest.raises(DataError, match=r"it has to end in \.npz"):
        read_embeddings(tmp_path / "e.pkl")


def test_a_zip_archive_of_other_files_is_named(tmp_path):
    path = tmp_path / "scores.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    for read in (read_scores, read_embeddings):
        with pytest.raises(DataError, match=r"scores\.npz .*'notes\.txt'"):
            read(path)


def test_a_header_that_promises_more_than_there_is_is_refused(tmp_path):
    """Before memory is taken for it."""
    buffer = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    path = tmp_path / "scores.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("genuine.npy", buffer.getvalue() + bytes(80))
        archive.writestr("impostor.npy", buffer.getvalue() + bytes(80))
    for read in (read_scores, read_embeddings):
        with pytest.raises(DataError, match=r"scores\.npz .*'genuine' says .* has 80"):
            read(path)


def test_deep_names_of_embeddings_are_refused(tmp_path):
    path = tmp_path / "e.safetensors"
    path.write_bytes(save({"embeddings": torch.ones(1, 2)}, {"keys": "[" * 100_000}))
    with pytest.raises(DataError, match=r"e\.safetensors: the metadata entry keys"):
        read_embeddings(path)
    with pytest.raises(DataError, match=r"e\.safetensors"):
        read_seconds(path)
