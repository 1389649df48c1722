"""The official lists: from the package where it is installed, and what is said where it is not."""

import gzip
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from qmargin.errors import BackendError, ConfigError, DataError
from qmargin.evaluation.protocols import voxceleb
from qmargin.evaluation.protocols.voxceleb import OFFICIAL, OfficialList, unpack_official
from qmargin.evaluation.trials import read_trials

LINES = b"1 id1/a/1.wav id1/b/1.wav\n0 id1/a/1.wav id2/c/1.wav\n"


class Installed:
    """A package with one list."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / Path(name).name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "list.txt.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr(voxceleb, "distribution", lambda _: Installed(folder))
    monkeypatch.setitem(OFFICIAL, "H", OfficialList("VoxCeleb1-H", "data/list.txt.gz", 2))
    return folder


def test_a_list_is_written_as_it_is(package: Path, tmp_path: Path) -> None:
    path = unpack_official("H", tmp_path)
    assert path == tmp_path / "voxceleb1-h.txt"
    assert path.read_bytes() == LINES
    trials = read_trials(path)
    assert trials.is_genuine is not None
    assert trials.is_genuine.tolist() == [True, False]


def test_other_lists_are_refused(package: Path, tmp_path: Path) -> None:
    (package / "list.txt.gz").write_bytes(gzip.compress(LINES * 2))
    with pytest.raises(DataError, match="has 4 trials and VoxCeleb1-H has 2"):
        unpack_official("H", tmp_path)
    (package / "list.txt.gz").write_bytes(gzip.compress(LINES)[:20])
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack_official("H", tmp_path)
    with pytest.raises(ConfigError, match="list 'X' is unknown: choose one of O, E, H"):
        unpack_official("X", tmp_path)
    assert not list(tmp_path.glob("*.txt"))


def test_a_bomb_is_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voxceleb, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="is over 10 bytes unpacked"):
        unpack_official("H", tmp_path)


def test_without_the_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(voxceleb, "distribution", absent)
    with pytest.raises(BackendError, match=r"pip install 'qmargin\[voxceleb\]', or give the list"):
        unpack_official("O", tmp_path)


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_installed_lists_are_the_official_ones(name: str, tmp_path: Path) -> None:
    try:
        distribution(voxceleb.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{voxceleb.PACKAGE} is not installed")
    trials = read_trials(unpack_official(name, tmp_path))
    assert len(trials) == {"O": 37_720, "E": 581_480, "H": 552_536}[name]
