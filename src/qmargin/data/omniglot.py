"""Omniglot from its official archives: drawn characters, one folder per identity.

The archives' paths are never used: a member is taken by its content's place in the known layout,
and what it is called on the disk is put together here.
"""

from __future__ import annotations

import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from qmargin.data.download import Remote, check_base, fetch, shown
from qmargin.errors import ConfigError, DataError
from qmargin.files import write_file

BASE = "https://github.com/brendenlake/omniglot/raw/master/python"
DOWNLOADS = ".download"  # beside the folder, until it is complete
NOTES = "SOURCE.txt"
MOST_BYTES = 1 << 16  # of a drawing; those of the official archives have a few hundred
MOST_MEMBERS = 100_000
_DRAWING = re.compile(
    r"images_(?:background|evaluation)/([A-Za-z0-9_()\-]{1,80})/(character\d{2})/(\d{4}_\d{2}\.png)"
)
StageProgress = Callable[[str, int, int], None]


class Archive(NamedTuple):
    """One official archive; its drawings become the part ``split``."""

    remote: Remote
    split: str
    num_classes: int
    num_drawings: int


# Sizes and SHA-256 as TensorFlow Datasets lists them for these addresses.
ARCHIVES = (
    Archive(
        Remote(
            "images_background.zip",
            9_464_212,
            "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        ),
        "train",
        964,
        19_280,
    ),
    Archive(
        Remote(
            "images_evaluation.zip",
            6_462_886,
            "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        ),
        "test",
        659,
        13_180,
    ),
)


def get_omniglot(
    out: Path,
    *,
    base: str = BASE,
    archives: Sequence[Archive] = ARCHIVES,
    progress: StageProgress | None = None,
) -> Path:
    """The folder ``out`` with ``train`` and ``test``, each with one folder per character.

    Characters of the two parts are of different alphabets, as their authors divided them. What has
    been downloaded is kept until the folder is complete, so that a call can be repeated.

    Args:
        out: A folder that is not there yet, or one that an earlier call made.
        base: Address of the archives.
        archives: What to fetch.
        progress: Called with a stage, how much is done, and of how much.

    Raises:
        ConfigError: ``out`` is something else, or the address is not one.
        DataError: A download failed, or an archive is not what it should be.
    """
    check_base(base)
    if (out / NOTES).exists():
        return out
    if out.exists():
        raise ConfigError(f"{out} exists and is not complete Omniglot; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    downloads = out.with_name(out.name + DOWNLOADS)
    paths = []
    for archive in archives:
        told = None if progress is None else _stage(progress, archive.remote.name)
        paths.append(fetch(archive.remote, base, downloads, progress=told))
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        for archive, path in zip(archives, paths, strict=True):
            told = None if progress is None else _stage(progress, f"unpacking {archive.split}")
            _unpack(archive, path, temporary / archive.split, told)
        write_file(temporary / NOTES, [_notes(archives, base).encode()])
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(downloads)
    return out


def _stage(progress: StageProgress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _unpack(
    archive: Archive, path: Path, folder: Path, progress: Callable[[int, int], None] | None
) -> None:
    """Write the drawings of an archive below a new folder."""
    written: set[Path] = set()
    folder.mkdir(parents=True)
    for alphabet, character, name, content in _drawings(path):
        identity = folder / f"{alphabet}-{character}"
        place = identity / name
        if place in written:
            raise DataError(f"{path} has {identity.name}/{name} twice; download it again")
        if len(written) == archive.num_drawings:
            raise DataError(f"{path} has more than the {archive.num_drawings:,} drawings expected")
        identity.mkdir(exist_ok=True)
        place.write_bytes(content)
        written.add(place)
        if progress is not None:
            progress(len(written), archive.num_drawings)
    identities = {place.parent for place in written}
    if (len(identities), len(written)) != (archive.num_classes, archive.num_drawings):
        raise DataError(
            f"{path} has {len(written):,} drawings of {len(identities):,} characters; expected "
            f"were {archive.num_drawings:,} of {archive.num_classes:,}"
        )


def _drawings(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Alphabet, character, name and bytes of every drawing; other harmless members are left."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MOST_MEMBERS:
                raise DataError(
                    f"{path} has {len(members):,} members; at most {MOST_MEMBERS:,} are read"
                )
            for member in members:  # all of them before anything is written
                _check_member(path, member)
            for member in members:
                found = _DRAWING.fullmatch(member.filename)
                if found is not None:
                    yield (*found.groups(), _content(path, archive, member))  # type: ignore[misc]
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise DataError(f"{path} is not a sound ZIP archive ({error})") from error


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an archive that tries anything: one bad member is reason enough."""
    name = member.filename
    parts = name.replace("\\", "/").split("/")
    reason = None
    if name.startswith(("/", "\\")) or ":" in name or ".." in parts:
        reason = "leads outside the archive"
    elif "\\" in name or not name.isprintable():
        reason = "has signs that a path must not have"
    elif stat.S_ISLNK(member.external_attr >> 16):
        reason = "is a link"
    elif member.flag_bits & 0x1:
        reason = "is encrypted"
    elif member.file_size > MOST_BYTES:
        reason = f"has {member.file_size:,} bytes, above {MOST_BYTES:,}"
    if reason is not None:
        raise DataError(f"{path}: the member {name!r} {reason}; nothing was unpacked")


def _content(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Bytes of a drawing, however many its header promises."""
    with archive.open(member) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise DataError(f"{path}: the member {member.filename!r} is not a small PNG image")
    return content


def _notes(archives: Sequence[Archive], base: str) -> str:
    lines = [
        "Omniglot, by Brenden Lake and others; MIT licence: github.com/brendenlake/omniglot",
        "train: the background set; test: the evaluation set, of other alphabets",
        *(f"{shown(base)}/{part.remote.name}, SHA-256 {part.remote.sha256}" for part in archives),
    ]
    return "\n".join(lines) + "\n"
