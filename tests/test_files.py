"""Files that are whole or absent."""

import pytest

from qmargin.errors import ConfigError
from qmargin.files import MADE_BY, Guard, replacing, write_atomically


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    for content in (b"old", b"new"):
        write_atomically(path, content)
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise ZeroDivisionError
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"a.txt": b"new"}


@pytest.mark.parametrize("name", ["missing/a.txt", "file/a.txt", "folder"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / name, b"content")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / name), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a.txt"):
        other.read_bytes()
    assert caught.value.filename == str(other)


def test_an_empty_file_may_be_replaced_unless_it_is_an_input(tmp_path):
    """Such as one that mktemp made."""
    path = tmp_path / "new.json"
    path.touch()
    Guard().check(path, MADE_BY)
    with pytest.raises(ConfigError, match=r"new\.json is an input"):
        Guard([path]).check(path, MADE_BY)
