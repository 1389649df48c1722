"""Checkpoints: complete even after a kill, and readable with any number of ranks.

``step-000123`` is a complete checkpoint: it gets this name by one rename, after all of it is on the
disk, and is never changed. ``step-000123.tmp-...`` is being written or deleted, and readers ignore
it. ``step-000123.aside-...`` is later than the checkpoint that a run resumed from.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, ConfigError, DataError, QMarginError, ShapeError
from qmargin.files import (
    FileEntry,
    check_regular,
    describe_file,
    open_regular,
    sync_folder,
    write_file,
)
from qmargin.schema import decode, encode
from qmargin.training.distributed import Process, gather, run_on_all

T = TypeVar("T")
Tree: TypeAlias = Any  # a tensor, None, bool, int, float, str, or a dict, list or tuple of trees
CHECKPOINTS = "checkpoints"  # in the folder of a run
MANIFEST = "manifest.json"
BACKBONE = "backbone.safetensors"
LOOP = "loop.json"
RECIPE = "recipe.yaml"
PROTOTYPES = "prototypes"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 26
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
_WHOLE = re.compile(r"step-(\d{6,18})")
_LEFTOVER = re.compile(r"step-\d{6,18}\.tmp-[0-9a-f]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PART = re.compile(r"(?!(backbone|loop|manifest|recipe)$)[a-z][a-z0-9_]*")
_ROWS = "@rows:"  # marks the place of a tensor that went to the head's shards
_NUM_HASHERS = 4  # hashing releases the GIL; more threads would only wait for the disk
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def map_leaves(tree: Tree, function: Callable[[str, Any], Any], path: str = "") -> Tree:
    """The same tree with every leaf replaced by ``function(path, leaf)``."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(item, function, _join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_leaves(item, function, _join(path, index)) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return function(path, tree)


def flatten(tree: Tree) -> tuple[str, dict[str, Tensor]]:
    """A tree as JSON text, and its tensors under the names that the text uses."""
    tensors: dict[str, Tensor] = {}
    value = _encode(tree, tensors, "")
    return json.dumps(value, indent=1, allow_nan=False) + "\n", tensors


def unflatten(text: str, tensors: Mapping[str, Tensor]) -> Tree:
    """Rebuild a tree from the output of ``flatten``."""
    try:
        return _decode(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the state is damaged ({type(error).__name__}: {error}); resume from another one"
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
    where = path or "the state"
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{where} is a {type(tree).__name__}; a checkpoint holds tensors, numbers, texts, and "
            "dictionaries, lists and tuples of them"
        )
    for key in tree:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise CheckpointError(f"{where} has the key {key!r}; keys are texts or integers")
    pairs = [[key, _encode(item, tensors, _join(path, key))] for key, item in tree.items()]
    is_plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
    return dict(pairs) if is_plain else {"$items": pairs}


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


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new safetensors file, synced to the disk; tensors reach the host one by one."""
    for name, one in tensors.items():
        is_dense = isinstance(one, Tensor) and one.layout == torch.strided
        if not is_dense or one.dtype not in DTYPES:
            kind = f"{one.layout} tensor of {one.dtype}" if isinstance(one, Tensor) else type(one)
            raise CheckpointError(f"{name!r} is a {kind}, which a checkpoint cannot hold")
    return write_file(path, _chunks(tensors, dict(metadata or {})))


def _chunks(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Iterator[memoryview]:
    # Wide numbers first, which keeps every tensor aligned for readers that map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        start, offset = offset, offset + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        if tensors[name].numel():
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; any problem is a ``CheckpointError``."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, DataError) as error:
        raise _unreadable(path, error) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Copies of all tensors of a file; a mapping would keep a deleted file on the disk."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error}); restore it, or resume from an older checkpoint"
    )


class Shard(NamedTuple):
    """The classes ``start <= class < stop`` and the file that holds their rows."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """Manifest: the files of a checkpoint and their hashes."""

    step: int
    world: int
    num_classes: int  # 0 without a head
    recipe_sha256: str
    parts: tuple[str, ...]
    shards: tuple[Shard, ...]  # in the order of classes; together they hold every class once
    files: dict[str, FileEntry]
    software: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [entry.size for entry in self.files.values()]
        if min(self.step, self.world, self.num_classes, *sizes) < 0:
            raise CheckpointError("the manifest has a count below 0")
        for name in (*self.files, *(f"{part}.json" for part in self.parts)):
            if not _FILE_NAME.fullmatch(name) or name not in self.files or name == MANIFEST:
                raise CheckpointError(f"the manifest names the file {name!r}, which is not allowed")
        reached = 0
        for shard in self.shards:
            if shard.start != reached or shard.stop <= shard.start or shard.file not in self.files:
                raise CheckpointError(f"{shard} does not begin at class {reached}, the next one")
            reached = shard.stop
        if reached != self.num_classes:
            raise CheckpointError(f"the shards end at class {reached} of {self.num_classes}")

    @property
    def sha256(self) -> str:
        """Hash of the checkpoint, which changes with any byte of any file."""
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
        """Read the text of ``to_text``; any other text is a ``CheckpointError``."""
        try:
            body = json.loads(text)["body"]
            version = body["version"]
            if isinstance(version, int) and version > VERSION:
                raise CheckpointError(f"version {version} is newer than {VERSION}; update qmargin")
            manifest: Manifest = decode(Manifest, body, "manifest")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            name = type(error).__name__
            raise CheckpointError(f"the manifest is damaged ({name}: {error})") from error
        if manifest.to_text() != text:
            raise CheckpointError("the manifest is damaged: it does not match its own hash")
        return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, sizes first; the error names the first bad file."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} is missing ({error.strerror})") from error
        if size != entry.size:
            raise CheckpointError(f"{folder / name} has {size:,} bytes, not {entry.size:,}")
    with ThreadPoolExecutor(_NUM_HASHERS) as pool:
        found = pool.map(lambda name: describe_file(folder / name).sha256, manifest.files)
        for name, entry in manifest.files.items():
            try:
                digest = next(found)
            except (OSError, DataError) as error:
                raise CheckpointError(f"{folder / name} cannot be read ({error})") from error
            if digest != entry.sha256:
                hashes = f"{digest:.12}, not {entry.sha256:.12}"
                raise CheckpointError(f"{folder / name} is damaged: its hash is {hashes}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.manifest.step

    @property
    def sha256(self) -> str:
        """Hash of the checkpoint, for records of evaluations and resumed runs."""
        return self.manifest.sha256


@dataclass(frozen=True)
class HeadRows:
    """Rows of one rank's classes; row ``i`` of every tensor belongs to class ``start + i``."""

    start: int
    num_classes: int  # over all ranks
    tensors: Mapping[str, Tensor]  # prototypes and, by any name, momentum and the like

    def __post_init__(self) -> None:
        if PROTOTYPES not in self.tensors:
            raise ShapeError(f"the head's rows are {sorted(self.tensors)}; prototypes are missing")
        for name, tensor in self.tensors.items():
            if tensor.dim() == 0 or len(tensor) != self.stop - self.start:
                shape = tuple(tensor.shape)
                raise ShapeError(f"{name} is {shape} for {self.stop - self.start} prototypes")
        if not 0 <= self.start <= self.stop <= self.num_classes:
            raise ShapeError(
                f"rows are of classes {self.start} to {self.stop} of {self.num_classes}"
            )

    @property
    def stop(self) -> int:
        """One past the last class."""
        return self.start + len(self.tensors[PROTOTYPES])


@dataclass(frozen=True)
class CheckpointState:
    """Everything that a run needs to resume; ranks other than 0 write ``head`` only."""

    step: int
    backbone: Mapping[str, Tensor] = field(default_factory=dict)  # its state dict
    head: HeadRows | None = None  # of this rank
    parts: Mapping[str, Tree] = field(default_factory=dict)  # state dicts of optimizers and others
    loop: Mapping[str, Any] = field(default_factory=dict)  # a tree without tensors
    recipe_yaml: str = ""
    recipe_sha256: str = ""

    def __post_init__(self) -> None:
        for name in self.parts:
            if not _PART.fullmatch(name):
                raise CheckpointError(
                    f"a part is called {name!r}; use lower-case letters, digits and underscores, "
                    "but not backbone, loop, manifest or recipe"
                )

    def num_bytes(self) -> int:
        """Size of its tensors: that of its files without headers."""
        trees = (self.backbone, self.parts, self.head.tensors if self.head else {})
        tensors = [tensor for tree in trees for tensor in flatten(tree)[1].values()]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def split_rows(state: Tree, shape: torch.Size) -> tuple[Tree, dict[str, Tensor]]:
    """Move tensors with the shape of the prototypes, such as momentum, out of a state dict."""
    rows: dict[str, Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape != shape:
            return leaf
        name = path.rpartition("/")[2]
        if name in rows or name == PROTOTYPES:
            raise CheckpointError(f"{path} is the second tensor called {name}; rename it")
        rows[name] = leaf
        return _ROWS + name

    return map_leaves(state, take), rows


def join_rows(state: Tree, rows: Mapping[str, Tensor]) -> Tree:
    """Put rows back into a state of ``split_rows``."""

    def put(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, str) or not leaf.startswith(_ROWS):
            return leaf
        name = leaf[len(_ROWS) :]
        if name not in rows:
            raise CheckpointError(
                f"the optimizer's {name} is missing from the head's rows; use the optimizer that "
                "was saved"
            )
        return rows[name]

    return map_leaves(state, put)


def step_name(step: int) -> str:
    """Name of the checkpoint of a step, such as ``step-000123``."""
    return f"step-{step:06d}"


def other_name(path: Path, kind: str) -> Path:
    """A free name beside a checkpoint, of the kind ``"tmp"`` or ``"aside"``."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def list_steps(folder: Path) -> dict[int, Path]:
    """Paths named as complete checkpoints, newest first; empty if the folder does not exist."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): path for path in paths if (match := _WHOLE.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def list_leftovers(folder: Path) -> list[Path]:
    """Leftovers of killed saves and deletions."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if _LEFTOVER.fullmatch(path.name))


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint; if killed half-way, this leaves a leftover, not a damaged checkpoint."""
    temporary = other_name(path, "tmp")
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # the next save tries again


def set_aside(folder: Path, step: int) -> list[Path]:
    """Rename later checkpoints, so that a run resumed from ``step`` does not find them."""
    later = [path for number, path in list_steps(folder).items() if number > step]
    for path in later:
        path.rename(other_name(path, "aside"))
    if later:
        sync_folder(folder)
    return later


def check_writable(folder: str | Path, *, needed_bytes: int = 0) -> None:
    """Refuse a folder that is not writable, or has too little free space."""
    folder = Path(folder)
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        probe.rename(probe.with_suffix(".done")).unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "change its permissions"
        raise CheckpointError(
            f"{folder} cannot be written to ({error.strerror or error}); "
            f"choose another output folder, or {remedy}"
        ) from error
    if free < needed_bytes:
        raise CheckpointError(
            f"{folder} has {free:,} bytes left, a checkpoint takes {needed_bytes:,}; free space"
        )


def save_checkpoint(
    folder: str | Path, state: CheckpointState, *, process: Process | None = None, keep: int = 3
) -> Path:
    """Save a checkpoint as ``folder/step-...``; all ranks call it, and return when it is complete.

    ``process`` is this rank; in the background it needs a separate ``control`` group, because its
    messages come at any time. ``keep`` complete checkpoints up to this step stay. If any rank
    fails, all raise a ``CheckpointError``, nothing of this checkpoint is left, and older ones are
    unchanged.
    """
    save = _Save(Path(folder), state, process or Process())
    try:
        save.run()
    except BaseException:
        save.clean_up()
        raise
    if save.process.is_first:
        past = [path for step, path in list_steps(save.folder).items() if step <= state.step]
        for path in past[keep:]:
            delete_checkpoint(path)
    return save.final


class _Save:
    """State of one save on one rank."""

    def __init__(self, folder: Path, state: CheckpointState, process: Process) -> None:
        self.folder, self.state, self.process = folder, state, process
        self.final = folder / step_name(state.step)
        self.temporary = other_name(self.final, "tmp")  # rank 0's counts
        self._subject = f"the checkpoint of step {state.step} was not saved"

    def run(self) -> None:
        """Write the files of all ranks under a temporary name, then rename the folder."""
        replies = self._run_on_all(self._begin)
        steps = [step for step, _ in replies]
        if len(set(steps)) > 1:
            raise CheckpointError(f"{self._subject}: the ranks are at the steps {steps}")
        self.temporary = self.folder / replies[0][1]
        written = self._run_on_all(self._write)
        self._run_on_all(lambda: self._publish(written) if self.process.is_first else None)

    def clean_up(self) -> None:
        """Remove the temporary folder."""
        if self.process.is_first:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Run an action on each rank and return the results; a failure raises on all ranks."""

        def explained() -> T:
            try:
                return action()
            except OSError as error:
                raise CheckpointError(self._explain(error)) from error

        try:
            return gather(self.process, run_on_all(self.process, explained))
        except Exception as error:
            is_ours = isinstance(error, QMarginError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self._subject}: {text}") from error

    def _begin(self) -> tuple[int, str]:
        if self.process.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in list_leftovers(self.folder):  # of killed runs: this run has the lock
                shutil.rmtree(path, ignore_errors=True)
            self.temporary.mkdir()
        return self.state.step, self.temporary.name

    def _write(self) -> dict[str, Any]:
        """Write this rank's files."""
        state, folder, head = self.state, self.temporary, self.state.head
        files: dict[str, FileEntry] = {}
        shard = None
        if self.process.is_first:
            loop, tensors = flatten(state.loop)
            if tensors:
                raise CheckpointError(
                    f"loop holds the tensor {next(iter(tensors))!r}; put it in a part"
                )
            texts = {LOOP: loop, RECIPE: state.recipe_yaml}
            files[BACKBONE] = write_tensors(folder / BACKBONE, state.backbone)
            for part, tree in state.parts.items():
                texts[f"{part}.json"], tensors = flatten(tree)
                name = f"{part}.safetensors"
                files[name] = write_tensors(folder / name, tensors)
            for name, text in texts.items():
                files[name] = write_file(folder / name, [text.encode()])
        if head is not None:
            name = f"head-{self.process.rank:05d}-of-{self.process.world:05d}.safetensors"
            numbers = {"start": head.start, "stop": head.stop, "num_classes": head.num_classes}
            metadata = {key: str(number) for key, number in numbers.items()}
            files[name] = write_tensors(folder / name, head.tensors, metadata)
            shard = [name, head.start, head.stop, head.num_classes]
        sync_folder(folder)
        return {"files": files, "shard": shard}

    def _manifest(self, written: list[dict[str, Any]]) -> Manifest:
        pairs = [pair for part in written for pair in part["files"].items()]
        files = {name: FileEntry(*entry) for name, entry in pairs}
        for name, entry in files.items():
            path = self.temporary / name
            if not path.exists() or path.stat().st_size != entry.size:
                raise CheckpointError(
                    f"rank 0 does not see {path}; all ranks must share the folder"
                )
        found = [part["shard"] for part in written if part["shard"]]
        counts = {num_classes for *_, num_classes in found}
        if len(counts) > 1:
            raise CheckpointError(f"the ranks count {sorted(counts)} classes; they must agree")
        shards = [Shard(name, start, stop) for name, start, stop, _ in found if stop > start]
        return Manifest(
            step=self.state.step,
            world=self.process.world,
            num_classes=counts.pop() if counts else 0,
            recipe_sha256=self.state.recipe_sha256,
            parts=tuple(self.state.parts),
            shards=tuple(sorted(shards, key=lambda shard: shard.start)),
            files=files,
            software={"python": platform.python_version(), "torch": torch.__version__},
        )

    def _publish(self, written: list[dict[str, Any]]) -> None:
        """Give the checkpoint its name."""
        manifest = self._manifest(written)
        write_file(self.temporary / MANIFEST, [manifest.to_text().encode()])
        sync_folder(self.temporary)
        if self.final.exists():
            try:
                there = open_checkpoint(self.final).manifest
            except CheckpointError:
                delete_checkpoint(self.final)  # damaged, so that no reader could have used it
            else:
                if _tensor_files(there) != _tensor_files(manifest):
                    raise CheckpointError(f"{self.final} exists with other values; move it away")
                self.clean_up()  # a run that stops right after a save saves the same step again
                return
        self.temporary.rename(self.final)
        sync_folder(self.folder)

    def _explain(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            free, needed = shutil.disk_usage(self.folder).free, self.state.num_bytes()
            return (
                f"{reason} in {self.folder}: {free:,} bytes are left and this rank writes "
                f"{needed:,}; earlier checkpoints are intact, free some space and resume"
            )
        remedy = "; all ranks must share the output folder" * (error.errno == errno.ENOENT)
        return f"{reason}: {error.filename or self.temporary}{remedy}"


def _tensor_files(manifest: Manifest) -> dict[str, FileEntry]:
    return {name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")}


class AsyncSaver:
    """Saves checkpoints in a thread, one at a time: a step waits for a copy, not for the disk.

    A failure is raised by the next ``poll``, ``wait`` or ``save``, never dropped. All ranks fail
    together, but each notices it at a different time: catch the error of ``poll`` and agree, so
    that no rank waits in a collective. Arguments are those of ``save_checkpoint``.
    """

    def __init__(
        self, folder: str | Path, *, process: Process | None = None, keep: int = 3
    ) -> None:
        self.folder, self.process, self.keep = Path(folder), process or Process(), keep
        self._buffers: dict[int, Tensor] = {}  # in the order of a state's tensors
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._path: Path | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is running; the next one would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def reserve(self, state: CheckpointState) -> None:
        """Allocate the host memory for states like this one, so that the first save is fast."""
        self._map(state, lambda buffer, tensor: buffer)

    def save(self, state: CheckpointState) -> None:
        """Copy the state and start to write it, after the save before this one has ended."""
        self.wait()
        devices: set[torch.device] = set()

        def copy(buffer: Tensor, tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                devices.add(tensor.device)
            return buffer.copy_(tensor.detach(), non_blocking=True)

        staged = self._map(state, copy)
        for device in devices:  # the next step may change the tensors
            torch.cuda.current_stream(device).synchronize()
        self._thread = Thread(target=self._run, args=(staged,), name="save", daemon=True)
        self._thread.start()

    def poll(self) -> Path | None:
        """Return the checkpoint completed since the last call, if any; raise its error."""
        return None if self.is_busy else self.wait()

    def wait(self) -> Path | None:
        """Wait for the running save, then do as ``poll``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, path = self._error, self._path
        self._error = self._path = None
        if error is not None:
            raise CheckpointError(str(error)) from error
        return path

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:  # the error of the block came first and is raised
                raise

    def _run(self, state: CheckpointState) -> None:
        try:
            self._path = save_checkpoint(self.folder, state, process=self.process, keep=self.keep)
        except Exception as error:
            self._error = error

    def _map(
        self, state: CheckpointState, function: Callable[[Tensor, Tensor], Tensor]
    ) -> CheckpointState:
        """The part of the state that this rank writes, every tensor as ``function`` of a buffer."""
        indices = count()

        def take(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            index = next(indices)
            buffer = self._buffers.get(index)
            if buffer is None or buffer.shape != leaf.shape or buffer.dtype != leaf.dtype:
                # a GPU copies much faster into pinned memory; zeros make the system find it now
                buffer = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=leaf.is_cuda).zero_()
                self._buffers[index] = buffer
            return function(buffer, leaf)

        head = state.head
        if head is not None:
            head = replace(head, tensors=map_leaves(head.tensors, take))
        shared: dict[str, Any] = {
            name: map_leaves(getattr(state, name), take) if self.process.is_first else {}
            for name in ("backbone", "parts", "loop")
        }
        return replace(state, head=head, **shared)


def open_checkpoint(path: str | Path, *, check: bool = True) -> Checkpoint:
    """Open a checkpoint; without ``check``, only the hash of the manifest is checked."""
    path = Path(path)
    try:
        with open_regular(path / MANIFEST) as file:
            manifest = Manifest.from_text(file.read(MAX_MANIFEST_BYTES).decode())
    except (OSError, UnicodeDecodeError, CheckpointError, DataError) as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error
    if check:
        verify(path, manifest)
    return Checkpoint(path, manifest)


class Search(NamedTuple):
    """Result of ``newest``."""

    checkpoint: Checkpoint | None  # None only if no save was ever completed
    skipped: tuple[str, ...] = ()  # newer incomplete ones, with reasons


def newest(folder: str | Path) -> Search:
    """Return the newest complete checkpoint; raise if all are damaged."""
    folder = Path(folder)
    skipped = [f"{path.name}: never completed" for path in list_leftovers(folder)]
    steps = list_steps(folder)
    for step, path in steps.items():
        try:
            checkpoint = open_checkpoint(path)
            if checkpoint.step != step:
                raise CheckpointError(f"its manifest is that of step {checkpoint.step}")
        except CheckpointError as error:
            skipped.append(f"{path.name}: {error}")
        else:
            return Search(checkpoint, tuple(skipped))
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {folder} is complete; restore one, or start "
            f"again in another folder ({'; '.join(skipped)})"
        )
    return Search(None, tuple(skipped))


def is_damaged(folder: str | Path) -> bool:
    """Whether there are checkpoints but no complete one; see ``newest``."""
    try:
        newest(folder)
    except CheckpointError:
        return True
    return False


def agree_on_newest(folder: Path, process: Process) -> Search:
    """``newest`` for many ranks: rank 0 reads and checks the files and informs the others."""

    def action() -> tuple[str | None, tuple[str, ...]]:
        search = newest(folder) if process.is_first else Search(None)
        return search.checkpoint.path.name if search.checkpoint else None, search.skipped

    name, skipped = gather(process, run_on_all(process, action))[0]
    checkpoint = None if name is None else open_checkpoint(folder / name, check=False)
    return Search(checkpoint, tuple(skipped))


def load_checkpoint(
    checkpoint: Checkpoint, *, start: int = 0, stop: int | None = None
) -> CheckpointState:
    """Everything in a checkpoint, with the rows of the classes ``start`` to ``stop``, or all."""
    manifest, path, head = checkpoint.manifest, checkpoint.path, None
    if manifest.num_classes:
        rows = read_class_rows(checkpoint, start, manifest.num_classes if stop is None else stop)
        head = HeadRows(start, manifest.num_classes, rows)
    return CheckpointState(
        step=manifest.step,
        backbone=read_backbone(checkpoint),
        head=head,
        parts={
            part: unflatten(_read_text(checkpoint, f"{part}.json"), tensors)
            for part in manifest.parts
            for tensors in [read_tensors(path / f"{part}.safetensors")]
        },
        loop=unflatten(_read_text(checkpoint, LOOP), {}),
        recipe_yaml=read_recipe(checkpoint),
        recipe_sha256=manifest.recipe_sha256,
    )


def read_class_rows(
    checkpoint: Checkpoint, start: int, stop: int, *, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Rows of the classes ``start`` to ``stop``, whatever the ranges of the ranks that wrote them.

    If only some ranks had gradients, the momentum of the others is zero.
    """
    manifest = checkpoint.manifest
    if not 0 <= start <= stop <= manifest.num_classes:
        raise ConfigError(
            f"{checkpoint.path} has {manifest.num_classes} classes, not {start} to {stop}; resume "
            "with as many"
        )
    rows: dict[str, Tensor] = {}
    for shard in manifest.shards:
        with open_tensors(checkpoint.path / shard.file) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if names is not None and name not in names:
                    continue
                saved = file.get_slice(name)
                if name not in rows:
                    shape = (stop - start, *saved.get_shape()[1:])
                    rows[name] = torch.zeros(shape, dtype=saved[:0].dtype)
                first, last = max(start, shard.start), min(stop, shard.stop)
                if first < last:
                    part = saved[first - shard.start : last - shard.start]
                    rows[name][first - start : last - start] = part
    if rows and PROTOTYPES not in rows:
        raise CheckpointError(f"{checkpoint.path} has no prototypes; resume from another one")
    return rows


def read_backbone(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The backbone's state dict."""
    return read_tensors(checkpoint.path / BACKBONE)


def read_prototypes(checkpoint: Checkpoint, *, at_most: int | None = None) -> Tensor:
    """The trained class vectors ``[k, d]``, or ``at_most`` of them, evenly spaced."""
    num_classes = checkpoint.manifest.num_classes
    rows = read_class_rows(checkpoint, 0, num_classes, names=[PROTOTYPES]).get(PROTOTYPES)
    if rows is None:
        raise CheckpointError(f"{checkpoint.path} has no prototypes; it was saved without a head")
    return rows[:: 1 if at_most is None else -(-len(rows) // at_most)]


def read_recipe(checkpoint: Checkpoint) -> str:
    """The text of the recipe."""
    return _read_text(checkpoint, RECIPE)


def _read_text(checkpoint: Checkpoint, name: str) -> str:
    path = checkpoint.path / name
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except (OSError, DataError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
