"""Files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmargin.errors import ConfigError
from qmargin.files import MADE_BY, Guard, replacing, write_atomically


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        write_atomically(tmp_path / "a.txt", content)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == b"new"


def test_the_old_content_outlives_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.txt") as temporary:
        temporary.write_bytes(b"half")
        raise ZeroDivisionError
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_bytes(b"")
    path = tmp_path / folder / "a.txt"
    with pytest.raises(OSError) as caught:
        write_atomically(path, b"content")
    assert caught.value.filename == str(path)
    assert caught.value.strerror in ("No such file or directory", "Not a directory")


def test_an_error_of_the_last_step_names_it_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "a", b"content")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "a"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a.txt"):
        other.read_bytes()
    assert caught.value.filename == str(other)


def test_an_empty_file_may_be_replaced_unless_it_is_an_input(tmp_path: Path) -> None:
    """Such as one that mktemp made."""
    path = tmp_path / "new.json"
    path.touch()
    Guard().check(path, MADE_BY)
    with pytest.raises(ConfigError, match=r"new\.json is an input"):
        Guard([path]).check(path, MADE_BY)
