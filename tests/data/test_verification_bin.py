"""Verification sets: all variants that circulate load; nothing in a pickle ever runs."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.limits import within
from helpers.pictures import jpeg
from qmargin.data import read_bin
from qmargin.data.readers.verification_bin import convert_bin
from qmargin.errors import DataError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.scores import read_scores

IMAGES = [jpeg(seed) for seed in range(6)]
SAME = [True, False, True]
FLAT = [np.frombuffer(image, dtype=np.uint8) for image in IMAGES]


class Payload:
    """Makes its pickle call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def python_2_pickle() -> bytes:
    """Protocol 0 as Python 2 writes byte strings: ``S'...'`` with escapes."""
    lines = [b"((l"]
    for image in IMAGES:
        text = "".join(f"\\x{byte:02x}" for byte in image)
        lines.append(b"S'" + text.encode() + b"'\na")
    lines.append(b"(l" + b"".join(b"I01\na" if same else b"I00\na" for same in SAME))
    return b"".join(lines) + b"t."


VARIANTS = {
    "bytes": (IMAGES, SAME),
    "list of both": [IMAGES, SAME],
    "flat arrays": (FLAT, SAME),
    "columns, as imencode gives": ([flat[:, None] for flat in FLAT], SAME),
    "numpy booleans": (IMAGES, [np.bool_(same) for same in SAME]),
    "array of booleans": (IMAGES, np.array(SAME)),
    "array of integers": (IMAGES, np.array(SAME, dtype=np.int64)),
    "byte arrays": ([bytearray(image) for image in IMAGES], SAME),
    "integers": (IMAGES, [int(same) for same in SAME]),
}


def check(images: list[bytes], is_genuine: np.ndarray) -> None:
    assert images == IMAGES
    assert all(type(image) is bytes for image in images)
    assert is_genuine.dtype == np.bool_
    assert is_genuine.tolist() == SAME


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads(name: str, protocol: int, tmp_path: Path) -> None:
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps(VARIANTS[name], protocol=protocol))
    check(*read_bin(tmp_path / "lfw.bin"))


def test_old_names_of_numpy_load(tmp_path: Path) -> None:
    """Files written before NumPy 2 say ``numpy.core``."""
    data = pickle.dumps(VARIANTS["numpy booleans"], protocol=2)
    assert b"numpy._core" in data
    (tmp_path / "a.bin").write_bytes(data.replace(b"numpy._core", b"numpy.core"))
    check(*read_bin(tmp_path / "a.bin"))


def test_python_2_files_load(tmp_path: Path) -> None:
    (tmp_path / "lfw.bin").write_bytes(python_2_pickle())
    check(*read_bin(tmp_path / "lfw.bin"))


@pytest.mark.parametrize(
    "payload",
    [
        Payload(os.system, "touch pwned"),
        Payload(eval, "open('pwned', 'w')"),
        Payload(exec, "open('pwned', 'w')"),
        Payload(getattr, "", "join"),
        Payload(bytearray, 10**12),
        Payload(np.zeros, 10**12),
        Payload(np.load, "pwned"),
        Payload(__import__, "os"),
        Payload(io.open, "pwned", "w"),
        np.array([Path("pwned")], dtype=object),
        np.dtype("f8"),
        Path("pwned"),
    ],
    ids=lambda payload: getattr(getattr(payload, "call", [payload])[0], "__name__", "object"),
)
def test_hostile_pickles_are_refused_and_do_nothing(payload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (payload, (IMAGES, [payload]), ([*IMAGES[:5], payload], SAME)):
        Path("evil.bin").write_bytes(pickle.dumps(content))
        with pytest.raises(DataError, match=r"evil\.bin is not a verification set"):
            read_bin("evil.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["evil.bin"]


def test_codecs_other_than_latin_1_are_refused(tmp_path: Path) -> None:
    import _codecs

    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Payload(_codecs.encode, "abc", "rot13")))
    with pytest.raises(DataError, match="rot13"):
        read_bin(tmp_path / "evil.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((IMAGES, SAME[:2]), "6 images for 2 pairs"),
        (([], []), "0 images for 0 pairs"),
        (IMAGES, "a list, not images and labels"),
        ({"a": 1}, "DICT"),
        ((IMAGES, [True, False, 7]), "label 2 is '7'"),
        ((IMAGES, [True, False, b"\xff"]), "label 2"),
        (([*IMAGES[:5], 3], SAME), "image 5 is a int"),
        (([*IMAGES[:5], "text"], SAME), "image 5 is a str"),
        (([*IMAGES[:5], np.arange(3)], SAME), "image 5"),
        ((None, None), "images are a NoneType"),
    ],
)
def test_what_is_not_a_set_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=message):
        read_bin(tmp_path / "a.bin")


def test_damaged_files_are_errors_of_ours(tmp_path: Path) -> None:
    whole = pickle.dumps(VARIANTS["flat arrays"], protocol=2)
    random = np.random.default_rng(0)
    path = tmp_path / "a.bin"
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 4):
            damaged[place] = int(random.integers(256))
        path.write_bytes(bytes(damaged[: random.integers(1, len(whole) + 1)]))
        try:
            images, is_genuine = read_bin(path)
        except DataError:
            continue
        assert len(images) == 2 * len(is_genuine)


def op_codes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


MEGABYTE = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20)
BOMBS = {
    "memo": op_codes(b"Nr\xff\xff\xff\x1f"),
    "bytearray": op_codes(b"\x96" + (1 << 33).to_bytes(8, "little")),
    "bytes": op_codes(b"\x8e" + (1 << 62).to_bytes(8, "little")),
    "negative": op_codes(b"T\xff\xff\xff\xff"),
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "hash": op_codes(b"}", b")q\x01h\x01" + b"\x86q\x01h\x01" * 60, b"0Ns"),
    "label": op_codes(b"](" + b")q\x01h\x01" + b"\x86q\x01h\x01" * 60, b"lh\x01\x85\x86"),
    "encoded": op_codes(
        b"c_codecs\nencode\nq\x00",
        MEGABYTE + b"q\x01",
        b"X\x06\0\0\0latin1q\x02(",
        b"h\x00h\x01h\x02\x86R" * 20_000,
        b"l",
    ),
    "counted array": op_codes(
        b"cnumpy.core.numeric\n_frombuffer\nJ\xff\xff\xff\x7f",
        b"cnumpy\ndtype\nX\x02\0\0\0u1\x85R\x86R",
    ),
    "array states": op_codes(
        MEGABYTE + b"q\x00cnumpy\ndtype\nX\x02\0\0\0u1\x85Rq\x01](",
        b"cnumpy.core.multiarray\n_reconstruct\n)R(NNh\x01Nh\x00tb" * 4_000,
        b"e](" + b"\x88" * 2_000 + b"e\x86",
    ),
    "repeated": op_codes(
        b"](B" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\x01",
        b"h\x01" * 100_000,
        b"e](" + b"\x88" * 50_000 + b"e\x86",
    ),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.bin").write_bytes(BOMBS[name])
    within(convert_bin, tmp_path / "bomb.bin", tmp_path / "out.npz", error=DataError)


def test_a_file_cannot_change_how_others_are_read(tmp_path: Path) -> None:
    """BUILD gives an object its state: a function or a class would keep it."""
    state = b"}X\x04\0\0\0evilK\x01s"
    for name in (b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n"):
        for given in (state, b"N" + state + b"\x86"):
            (tmp_path / "evil.bin").write_bytes(op_codes(name, given, b"b"))
            with pytest.raises(DataError):
                read_bin(tmp_path / "evil.bin")
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps(VARIANTS["flat arrays"], protocol=2))
    check(*read_bin(tmp_path / "lfw.bin"))


def test_images_may_occur_again(tmp_path: Path) -> None:
    """A writer that keeps one object for two pairs stores it once."""
    content = ([IMAGES[0]] * 6, SAME)
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps(content))
    assert read_bin(tmp_path / "lfw.bin")[0] == content[0]


def npy(shape: str, kind: str = "<f8", content: bytes = b"") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def zipped(*members: tuple[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def declared(content: bytes, size: int) -> bytes:
    """An archive whose directory says that its one member is larger."""
    at = content.index(b"PK\x01\x02")
    return content[: at + 24] + size.to_bytes(4, "little") + content[at + 28 :]


NPZ_BOMBS = {
    "shape": zipped(("scores.npy", npy("(1099511627776,)"))),
    "empty items": zipped(("keys.npy", npy("(1099511627776,)", "<U0"))),
    "huge items": zipped(("keys.npy", npy("(1,)", "<U1000000000"))),
    "zeros": zipped(("scores.npy", npy("(67108864,)", content=bytes(8 << 26)))),
    "declared": declared(zipped(("scores.npy", npy("(536870880,)"))), (1 << 32) - 2),
    "lzma": zipped(("scores.npy", npy("(1,)", content=bytes(8))), kind=zipfile.ZIP_LZMA),
    "plain": zipped(("readme.txt", b"hello"), ("a/b.csv", b"1,2")),
    "no zip": b"PK\x03\x04 and then nothing of the kind",
    "objects": zipped(("scores.npy", npy("(1,)", "|O", b"\x80\x04N."))),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux")
@pytest.mark.parametrize("name", NPZ_BOMBS)
@pytest.mark.parametrize("read", [read_bin, read_scores, read_embeddings])
def test_archives_that_unpack_to_too_much_are_refused(name, read, tmp_path):
    (tmp_path / "bomb.npz").write_bytes(NPZ_BOMBS[name])
    within(read, tmp_path / "bomb.npz", error=DataError)


def test_a_converted_set_holds_the_same(tmp_path: Path) -> None:
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps(VARIANTS["flat arrays"]))
    assert convert_bin(tmp_path / "lfw.bin", tmp_path / "lfw.npz") == 3
    check(*read_bin(tmp_path / "lfw.npz"))
    with np.load(tmp_path / "lfw.npz", allow_pickle=False) as arrays:
        assert all(array.dtype != object for array in arrays.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lfw.bin", "lfw.npz"]


def test_a_damaged_conversion_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lfw.npz"
    np.savez(path, images=np.zeros(9, np.uint8), ends=np.array([5, 3]), is_genuine=np.array([True]))
    with pytest.raises(DataError, match="do not fit together"):
        read_bin(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="is not an NPZ file"):
        read_bin(path)
    with pytest.raises(DataError, match=r"does not end in \.npz"):
        convert_bin(path, tmp_path / "a.bin")
