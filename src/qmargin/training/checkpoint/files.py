"""Files of a checkpoint: trees of values, streamed safetensors, and a manifest of hashes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, DataError, ShapeError
from qmargin.files import FileEntry, check_regular, describe_file, open_regular, write_file
from qmargin.schema import decode, encode

Tree: TypeAlias = Any  # a tensor, None, bool, int, float, str, or a dict, list or tuple of trees


def map_tensors(tree: Tree, function: Callable[[str, Tensor], Any], path: str = "") -> Tree:
    """The same tree with every tensor replaced by ``function(path, tensor)``."""
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, function, _join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_tensors(item, function, _join(path, index)) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def flatten(tree: Tree) -> tuple[str, dict[str, Tensor]]:
    """A tree as JSON text, and its tensors under the names that the text uses.

    Raises:
        CheckpointError: The tree holds something else than tensors and plain values; the message
            names the place.

    Examples:
        >>> import torch
        >>> text, tensors = flatten({"state": {0: torch.ones(2)}, "betas": (0.9, 0.95)})
        >>> list(tensors)
        ['state/0']
        >>> unflatten(text, tensors)
        {'state': {0: tensor([1., 1.])}, 'betas': (0.9, 0.95)}
    """
    tensors: dict[str, Tensor] = {}
    value = _encode(tree, tensors, "")
    return json.dumps(value, indent=1, allow_nan=False) + "\n", tensors


def unflatten(text: str, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that ``flatten`` took apart."""
    try:
        return _decode(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the state is not one that this version wrote ({type(error).__name__}: {error}); "
            "resume from another checkpoint"
        ) from error


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _encode(tree: Tree, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(tree, Tensor):
        name = path or "value"
        while name in tensors:  # a key may itself contain the separator
            name += "'"
        tensors[name] = tree
        return {"$tensor": name}
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {"$float": str(float(tree))}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, list | tuple):
        items = [_encode(item, tensors, _join(path, index)) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    if isinstance(tree, Mapping):
        return _encode_mapping(tree, tensors, path)
    raise CheckpointError(
        f"{path or 'the state'} is a {type(tree).__name__}; a checkpoint holds tensors, numbers, "
        "texts, and dictionaries, lists and tuples of them"
    )


def _encode_mapping(tree: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    for key in tree:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise CheckpointError(
                f"{path or 'the state'} has the key {key!r}; keys are texts or integers"
            )
    items = [(key, _encode(item, tensors, _join(path, key))) for key, item in tree.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return dict(items)
    return {"$items": [[key, item] for key, item in items]}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    content = value[kind]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$float":
        return float(content)
    if kind == "$tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "$items":
        return {key: _decode(item, tensors) for key, item in content}
    raise ValueError(f"unknown kind {kind}")


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new safetensors file, synced to the disk, and describe it.

    Args:
        path: A name that does not exist yet.
        tensors: On any device; each is brought to the host when its turn comes.
        metadata: Texts for the file's header.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{name!r} is a tensor of {tensor.dtype} in the layout {tensor.layout}; "
                "a checkpoint holds strided tensors of floats, integers or booleans"
            )
    return write_file(path, _chunks(tensors, dict(metadata or {})))


def _chunks(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Iterator[memoryview]:
    # Wide numbers first, which keeps every tensor aligned for readers that map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        if tensors[name].numel():
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; what is wrong with it is a ``CheckpointError``."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, DataError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it, or resume from an older checkpoint"
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in memory of its own.

    The copies matter: a tensor that maps the file would keep a deleted checkpoint on the disk.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


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
    files: dict[str, FileEntry]
    software: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [entry.size for entry in self.files.values()]
        if min(self.step, self.world, self.num_classes, *sizes) < 0:
            raise CheckpointError("the manifest has a count below 0")
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
        text = json.dumps(self._body(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_text(self) -> str:
        """The file's content, which carries a hash of itself."""
        content = {"body": self._body(), "sha256": self.sha256}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def _body(self) -> dict[str, Any]:
        return {"version": VERSION, **encode(self, "manifest")}

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
            manifest: Manifest = decode(Manifest, body, "manifest")
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


PROTOTYPES = "prototypes"
_PART = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("backbone", "loop", "manifest", "recipe")


@dataclass(frozen=True)
class HeadRows:
    """The rows of one rank's classes: prototypes, and whatever has one row per class.

    Attributes:
        start: The first class.
        num_classes: Of all ranks together.
        tensors: ``prototypes`` and, by any name, momentum and the like; row ``i`` of each belongs
            to class ``start + i``. A rank without classes has tensors without rows.
    """

    start: int
    num_classes: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if PROTOTYPES not in self.tensors:
            raise ShapeError(f"the head's rows are {sorted(self.tensors)}; prototypes are missing")
        for name, tensor in self.tensors.items():
            if tensor.dim() == 0 or len(tensor) != len(self.tensors[PROTOTYPES]):
                raise ShapeError(
                    f"{name} has the shape {tuple(tensor.shape)}; it must have one row for each of "
                    f"the {len(self.tensors[PROTOTYPES])} prototypes"
                )
        if not 0 <= self.start <= self.stop <= self.num_classes:
            raise ShapeError(
                f"the rows belong to the classes {self.start} to {self.stop}, but there are "
                f"{self.num_classes} classes"
            )

    @property
    def stop(self) -> int:
        """One past the last class."""
        return self.start + len(self.tensors[PROTOTYPES])


@dataclass(frozen=True)
class CheckpointState:
    """Everything that a run needs to go on.

    Rank 0 writes all of it; the other ranks write ``head`` and may leave the rest empty.

    Attributes:
        step: Steps that have been taken.
        backbone: Its state dict; stored under the same names in ``backbone.safetensors``.
        head: This rank's rows; None for a run without a head.
        parts: Trees of tensors and plain values by name, equal on all ranks: state dicts of
            optimizers, gradient scaler, moving average, the head's extra state.
        loop: A tree of plain values: epoch, position, offset of the journal.
        recipe_yaml: Text of the recipe, for ``recipe.yaml``.
        recipe_sha256: The recipe's hash.
    """

    step: int
    backbone: Mapping[str, Tensor] = field(default_factory=dict)
    head: HeadRows | None = None
    parts: Mapping[str, Tree] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    recipe_yaml: str = ""
    recipe_sha256: str = ""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(f"step is {self.step}; it counts steps from 0")
        for name in self.parts:
            if not _PART.fullmatch(name) or name in _TAKEN:
                raise CheckpointError(
                    f"a part is called {name!r}; use lower-case letters, digits and underscores, "
                    f"and none of {', '.join(_TAKEN)}"
                )
        for name, tensor in self.backbone.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name!r} of the backbone is a {type(tensor).__name__}, not a tensor; put it "
                    "into a part"
                )

    def num_bytes(self) -> int:
        """Size of its tensors, which is that of its files but for a few headers."""
        sizes: list[int] = []
        head = self.head.tensors if self.head else {}
        for tree in (self.backbone, self.parts, head):
            map_tensors(tree, lambda _, tensor: sizes.append(tensor.numel() * tensor.itemsize))
        return sum(sizes)
