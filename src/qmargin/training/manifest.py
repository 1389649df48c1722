"""The manifest of a checkpoint: size and hash of every file, and which classes are where."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qmargin.errors import CheckpointError, DataError
from qmargin.files import FileEntry, describe_file, open_regular

MANIFEST = "manifest.json"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 26
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NUM_HASHERS = 4  # hashing lets other threads run; more would only wait for the disk


class Shard(NamedTuple):
    """The classes ``start <= class < stop`` and the file that holds their rows."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: Steps that had been taken.
        world: Number of ranks that wrote it.
        num_classes: Rows of the head over all shards; 0 without a head.
        recipe_sha256: The recipe's own hash.
        parts: Names of the trees beside the backbone.
        shards: In the order of their classes, those without any left out; together they hold every
            class once.
        files: Every other file of the folder.
        software: Versions, for the record.
    """

    step: int
    world: int
    num_classes: int
    recipe_sha256: str
    parts: tuple[str, ...]
    shards: tuple[Shard, ...]
    files: Mapping[str, FileEntry]
    software: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
                raise CheckpointError(f"the manifest names the file {name!r}, which is not allowed")
        reached = 0
        for shard in self.shards:
            if shard.start != reached or shard.stop <= shard.start or shard.file not in self.files:
                raise CheckpointError(
                    f"the shard {shard.file} holds the classes {shard.start} to {shard.stop}, "
                    f"but class {reached} is the next one; every class belongs to one shard"
                )
            reached = shard.stop
        if reached != self.num_classes:
            raise CheckpointError(
                f"the shards end at class {reached}, but there are {self.num_classes} classes"
            )

    @property
    def sha256(self) -> str:
        """Identity of the checkpoint: it changes with any byte of any file."""
        return hashlib.sha256(_canonical(_body(self)).encode()).hexdigest()

    def to_text(self) -> str:
        """The file's content, which carries a hash of itself."""
        content = {"body": _body(self), "sha256": self.sha256}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Read ``to_text`` back; any other text, however close to one, is a ``CheckpointError``."""
        try:
            content = json.loads(text)
            body = content["body"]
            version = body["version"]
            if isinstance(version, int) and version > VERSION:
                raise CheckpointError(
                    f"the manifest has version {version} and this program knows {VERSION}; "
                    "install the program that wrote it"
                )
            manifest = _parse(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the manifest is damaged ({type(error).__name__}: {error})"
            ) from error
        if manifest.to_text() != text:
            raise CheckpointError("the manifest is damaged: it does not match its own hash")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps that had been taken."""
        return self.manifest.step

    @property
    def sha256(self) -> str:
        """Identity of the checkpoint, for the record of what was evaluated or resumed."""
        return self.manifest.sha256


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``, its own hash checked and no other."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            content = file.read(MAX_MANIFEST_BYTES)
        return Manifest.from_text(content.decode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, CheckpointError, DataError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, sizes first.

    Raises:
        CheckpointError: Naming the first file that is missing, cut short or changed.
    """
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} is missing ({error.strerror})") from error
        if size != entry.size:
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes and the manifest says {entry.size:,}"
            )
    with ThreadPoolExecutor(_NUM_HASHERS) as pool:
        for name, problem in zip(
            manifest.files,
            pool.map(lambda name: _changed(folder / name, manifest.files[name]), manifest.files),
            strict=True,
        ):
            if problem:
                raise CheckpointError(f"{folder / name} {problem}")


def _changed(path: Path, entry: FileEntry) -> str:
    """What is wrong with a file's content; empty if nothing is."""
    try:
        digest = describe_file(path).sha256
    except (OSError, DataError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    if digest != entry.sha256:
        return f"is damaged: its hash is {digest[:12]}... and the manifest says {entry.sha256:.12}"
    return ""


def _body(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": VERSION,
        "step": manifest.step,
        "world": manifest.world,
        "num_classes": manifest.num_classes,
        "recipe_sha256": manifest.recipe_sha256,
        "parts": list(manifest.parts),
        "shards": [list(shard) for shard in manifest.shards],
        "files": {name: list(entry) for name, entry in manifest.files.items()},
        "software": dict(manifest.software),
    }


def _parse(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=_integer(body["step"]),
        world=_integer(body["world"]),
        num_classes=_integer(body["num_classes"]),
        recipe_sha256=str(body["recipe_sha256"]),
        parts=tuple(str(name) for name in body["parts"]),
        shards=tuple(
            Shard(str(file), _integer(start), _integer(stop))
            for file, start, stop in body["shards"]
        ),
        files={
            str(name): FileEntry(_integer(size), str(digest))
            for name, (size, digest) in body["files"].items()
        },
        software={str(name): str(text) for name, text in body["software"].items()},
    )


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
