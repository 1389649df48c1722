"""Folders: one folder per identity, named after it, with images or recordings at any depth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from qmargin.data.index import Hasher, SampleIndex
from qmargin.data.reader import RECORDINGS, Found, Kind, Reader, Sample, Scan, kind_of
from qmargin.errors import DataError
from qmargin.registry import register_reader

MAX_DEPTH = 16
_LOOK_AT = 10_000  # files that decide the kind of a folder, instead of all 42 million images
_UNREADABLE = (".m4a", ".aac", ".wma", ".webm", ".mp4")
_PART_NAMES = (
    "train training test testing val valid validation dev devel development eval evaluation holdout"
)
_LIBRISPEECH = (
    "train-clean-100 train-clean-360 train-other-500 dev-clean dev-other test-clean test-other"
)
PARTS = frozenset(  # lower-case names of folders that hold a part of a dataset
    f"{part}{suffix}"
    for part in _PART_NAMES.split()
    for suffix in ("", "set", "_set", "-set", "_split", "_data", "_images", "_wav")
) | frozenset((*_LIBRISPEECH.split(), "wav", "aac"))


def identity_folders(root: Path) -> list[str]:
    """Names of the folders of a dataset, in order; hidden ones are left out."""
    with os.scandir(root) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


def files_below(
    root: Path,
    folder: str,
    suffixes: tuple[str, ...] = ("",),
    *,
    before_listing: Callable[[str], None] = lambda folder: None,
) -> Iterator[str]:
    """Files of a folder and those below it as paths relative to the root, in order."""
    waiting = [(folder, 0)]
    while waiting:
        folder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            where = f"{root / folder} is more than {MAX_DEPTH} folders deep"
            raise DataError(f"{where}; look for a link to itself")
        before_listing(folder)
        prefix = f"{folder}/" if folder else ""
        subfolders, files = [], []
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    subfolders.append(f"{prefix}{entry.name}")
                elif entry.name.lower().endswith(suffixes):
                    files.append(f"{prefix}{entry.name}")
        yield from sorted(files)
        waiting += [(name, depth + 1) for name in sorted(subfolders, reverse=True)]


def _check_no_parts(root: Path, identities: Sequence[str], suffixes: tuple[str, ...]) -> None:
    """Refuse a path one level too high, whose folders are parts of a dataset, not identities."""

    def first(name: str) -> str:
        return next(files_below(root, name, suffixes), "")

    def is_nested(name: str) -> bool:
        return first(name).count("/") > 1

    parts = [name for name in identities if name.lower() in PARTS]
    if len(identities) == 1 and not parts and is_nested(identities[0]):
        only = root / identities[0]
        raise DataError(f"{root} has one folder, so there is one identity; give {only}")
    if not parts:
        return
    others = (name for name in identities if name.lower() not in PARTS)
    if sum(map(is_nested, parts)) < 2 and any(map(first, others)):
        return  # people may be called Dev or Val
    train = next((name for name in parts if name.lower().startswith("train")), parts[0])
    found = f"{root} has the folders {', '.join(parts[:5])}"
    raise DataError(f"{found}, which are parts of a dataset; give one, such as {root / train}")


@register_reader("folder")
class FolderReader(Reader):
    """A folder with one folder per identity."""

    precedence = -9  # nearly any folder could be one

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        if not path.is_dir() or not identity_folders(path):
            return None
        first = islice(files_below(path, ""), _LOOK_AT)
        names = (f"{name}.wav" if name.lower().endswith(_UNREADABLE) else name for name in first)
        return Found(self, path, kind or kind_of(names))

    def watched(self, scan: Scan) -> list[Path]:
        return [scan.path / name for name in identity_folders(scan.path)]

    def hasher(self, scan: Scan, index: SampleIndex | None, started: int | None) -> Hasher:
        """Names of the identities, and times of all folders that were listed."""
        path, found, known = scan.path, Hasher("folders", started), []
        try:
            for name in () if index is None else index.texts("folder") or ():
                found.add_folder(name, path / name)
                if "/" not in name:
                    known.append(name)
        except (FileNotFoundError, NotADirectoryError):
            found.add_text("a folder is missing")
        if index is not None and known != identity_folders(path):
            found.add_text("other identities")
        return found

    def samples(self, scan: Scan) -> Iterator[Sample]:
        """Samples by the names of the identities; an identity without one keeps its label."""
        root, kind = scan.path, scan.kind

        def note(folder: str) -> None:
            if scan.hasher is not None:
                scan.hasher.add_folder(folder, root / folder)
                scan.folders.append(folder)

        identities = scan.classes = identity_folders(root)
        stray = sum(1 for entry in root.iterdir() if kind.is_name(entry.name))
        if stray:
            scan.notes.append(f"{stray} {kind.name} outside the folders were left out")
        _check_no_parts(root, identities, kind.suffixes)
        is_empty = True
        for number, identity in enumerate(identities, 1):
            for name in files_below(root, identity, kind.suffixes, before_listing=note):
                is_empty = False
                yield Sample(identity, name)
            scan.progress(number, len(identities))
        unreadable = next(files_below(root, "", _UNREADABLE), None) if is_empty else None
        if kind is RECORDINGS and unreadable is not None:
            found = f"{root / unreadable} and files like it cannot be decoded"
            raise DataError(f"{found}; convert them to FLAC or WAV, for example with ffmpeg")
        if is_empty:
            raise DataError(
                f"{root} has no {kind.name} in its folders; give each identity a folder"
            )
