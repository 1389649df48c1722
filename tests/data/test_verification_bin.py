"""Verification sets: all variants that circulate load; nothing in a pickle ever runs."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.pictures import jpeg
from qmargin.data import read_bin
from qmargin.data.verification_bin import convert_bin
from qmargin.errors import DataError

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
def test_hostile_pickles_are_refused_and_do_nothing(
    payload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (payload, (IMAGES, [payload]), ([*IMAGES[:5], payload], SAME)):
        Path("evil.bin").write_bytes(pickle.dumps(content))
        with pytest.raises(DataError, match=r"evil\.bin is not a verification set"):
            read_bin("evil.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["evil.bin"]


def test_the_refused_name_is_shown(tmp_path: Path) -> None:
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Payload(os.system, "true")))
    with pytest.raises(DataError, match=r"names (posix|nt)\.system"):
        read_bin(tmp_path / "evil.bin")


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
        ({"a": 1}, "a dict, not images and labels"),
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
    with pytest.raises(DataError, match="not a converted"):
        read_bin(path)
    with pytest.raises(DataError, match=r"does not end in \.npz"):
        convert_bin(path, tmp_path / "a.bin")
