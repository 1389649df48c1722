"""Tables of whole numbers against Python's own reading, and lines that are something else."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from qmargin.errors import DataError
from qmargin.evaluation.protocols import integers
from qmargin.evaluation.protocols.integers import read_integers


@pytest.mark.parametrize("chunk", [64, 100, 1 << 22])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("has_last_end", [True, False])
def test_numbers_are_those_of_the_lines(
    tmp_path: Path, chunk: int, end: str, has_last_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integers, "_CHUNK_BYTES", chunk)
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 10 ** rng.integers(1, 18, (300, 3)))
    lines = [
        f"{'  ' if i % 7 == 0 else ''}{a} \t{b:05d} {c}{' ' if i % 5 == 0 else ''}"
        for i, (a, b, c) in enumerate(numbers.tolist())
    ]
    lines[20:20] = ["", "   "]
    path = tmp_path / "n.txt"
    content = (end.join(lines) + (end if has_last_end else "")).encode()
    path.write_bytes(content)
    calls: list[tuple[int, int]] = []
    found, sha256 = read_integers(path, 3, progress=lambda *done: calls.append(done))
    np.testing.assert_array_equal(found, numbers)
    assert found.dtype == np.int64
    assert sha256 == hashlib.sha256(content).hexdigest()
    assert calls[-1] == (len(content), len(content))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("1 2", "'1 2'"),
        ("1 2 3 4", "'1 2 3 4'"),
        ("1 2 -3", "'1 2 -3'"),
        ("1 2 x", "'1 2 x'"),
        ("1 2.0 3", "'1 2.0 3'"),
        ("1 2 1234567890123456789", "'1 2 1234567890123456789'"),
        ("<html>", "'<html>'"),
    ],
)
@pytest.mark.parametrize("chunk", [32, 1 << 22])
def test_another_line_is_named(
    tmp_path: Path, line: str, shown: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integers, "_CHUNK_BYTES", chunk)
    path = tmp_path / "n.txt"
    path.write_text("10 20 0\n" * 11 + line + "\n" + "10 20 1\n" * 5)
    with pytest.raises(DataError) as caught:
        read_integers(path, 3)
    assert str(caught.value) == f"{path}, line 12: {shown} is not 3 whole numbers"


def test_empty_and_endless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "_CHUNK_BYTES", 32)
    path = tmp_path / "n.txt"
    path.write_text("\n \n")
    with pytest.raises(DataError, match="is empty"):
        read_integers(path, 3)
    path.write_text("1 " * 1000)
    with pytest.raises(DataError, match="line 1 is too long"):
        read_integers(path, 3)
