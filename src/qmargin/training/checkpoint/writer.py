"""Checkpoints in the background: a step waits for a copy in memory, not for the disk."""

from __future__ import annotations

import errno
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, QMarginError
from qmargin.files import FileEntry, sync_folder, write_file
from qmargin.training.checkpoint.files import (
    MANIFEST,
    CheckpointState,
    HeadRows,
    Manifest,
    Shard,
    flatten,
    map_tensors,
    read_manifest,
    verify,
    write_tensors,
)
from qmargin.training.checkpoint.folders import (
    delete_checkpoint,
    other_name,
    prune,
    remove_leftovers,
    step_name,
)
from qmargin.training.distributed.consensus import gather, run_on_all
from qmargin.training.distributed.process import Process

T = TypeVar("T")
BACKBONE = "backbone.safetensors"
LOOP = "loop.json"
RECIPE = "recipe.yaml"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    folder: str | Path,
    state: CheckpointState,
    *,
    process: Process | None = None,
    keep: int = 3,
) -> Path:
    """Save a checkpoint as ``folder/step-...``; all ranks call it, and return when it is there.

    Args:
        folder: The folder of checkpoints, on a file system that all ranks share.
        state: This rank's part of the state.
        process: This rank; None if there is no other. A save in the background needs a process
            whose ``control`` is a group of its own: its messages come at any time.
        keep: Whole checkpoints that stay, this one included.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: On every rank, if any of them failed. Nothing of this checkpoint is left,
            and no older one was touched.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}; at least the newest checkpoint has to stay")
    folder = Path(folder)
    save = _Save(folder, state, process or Process())
    try:
        save.begin()
        save.commit(save.write())
    except BaseException:
        save.clean_up()
        raise
    if save.rank == 0:
        prune(folder, step=state.step, keep=keep)
    return folder / step_name(state.step)


class _Save:
    """One save, seen from one rank."""

    def __init__(self, folder: Path, state: CheckpointState, process: Process) -> None:
        self.folder, self.state, self.process = folder, state, process
        self.rank, self.world = process.rank, process.world
        self.final = folder / step_name(state.step)
        self.temporary = other_name(self.final, "tmp")  # rank 0's counts
        self.subject = f"the checkpoint of step {state.step} was not saved"

    def begin(self) -> None:
        """Agree on the step and on the temporary folder."""

        def action() -> tuple[int, str]:
            if self.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.folder)
                self.temporary.mkdir()
            return self.state.step, self.temporary.name

        replies = self._run_on_all(action)
        steps = [step for step, _ in replies]
        if len(set(steps)) > 1:
            raise CheckpointError(f"{self.subject}: the ranks are at the steps {steps}")
        self.temporary = self.folder / replies[0][1]

    def write(self) -> list[dict[str, Any]]:
        """Write this rank's files; what each rank wrote."""
        return self._run_on_all(self._write_files)

    def commit(self, written: list[dict[str, Any]]) -> None:
        """Give the checkpoint its name."""

        def action() -> None:
            if self.rank == 0:
                self._publish(self._manifest(written))

        self._run_on_all(action)

    def _run_on_all(self, action: Callable[[], T]) -> list[T]:
        """What an action returned on each rank; a failure is a ``CheckpointError`` on all."""

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
            raise CheckpointError(f"{self.subject}: {text}") from error

    def clean_up(self) -> None:
        """Remove the temporary folder of a save that failed."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _write_files(self) -> dict[str, Any]:
        files: dict[str, FileEntry] = {}
        shard = None
        if self.rank == 0:
            files.update(_write_common(self.temporary, self.state))
        head = self.state.head
        if head is not None:
            name = f"head-{self.rank:05d}-of-{self.world:05d}.safetensors"
            numbers = {"start": head.start, "stop": head.stop, "num_classes": head.num_classes}
            metadata = {key: str(number) for key, number in numbers.items()}
            files[name] = write_tensors(self.temporary / name, head.tensors, metadata)
            shard = [name, head.start, head.stop, head.num_classes]
        sync_folder(self.temporary)
        return {"files": files, "shard": shard}

    def _manifest(self, written: list[dict[str, Any]]) -> Manifest:
        files = {
            name: FileEntry(*entry) for part in written for name, entry in part["files"].items()
        }
        for name, entry in files.items():
            path = self.temporary / name
            if not path.exists() or path.stat().st_size != entry.size:
                raise CheckpointError(
                    f"{path} was written by another rank and rank 0 does not see it; the output "
                    "folder must be on a file system that all ranks share"
                )
        shards = [part["shard"] for part in written if part["shard"]]
        counts = {num_classes for *_, num_classes in shards}
        if len(counts) > 1:
            raise CheckpointError(f"the ranks count {sorted(counts)} classes; they must agree")
        return Manifest(
            step=self.state.step,
            world=self.world,
            num_classes=counts.pop() if counts else 0,
            recipe_sha256=self.state.recipe_sha256,
            parts=tuple(self.state.parts),
            shards=tuple(
                sorted(
                    (Shard(name, start, stop) for name, start, stop, _ in shards if stop > start),
                    key=lambda shard: shard.start,
                )
            ),
            files=files,
            software={"python": platform.python_version(), "torch": torch.__version__},
        )

    def _publish(self, manifest: Manifest) -> None:
        write_file(self.temporary / MANIFEST, [manifest.to_text().encode()])
        sync_folder(self.temporary)
        if self.final.exists():
            try:
                there = read_manifest(self.final)
                verify(self.final, there)
            except CheckpointError:
                delete_checkpoint(self.final)  # no reader could have used it
            else:
                self._keep_existing(there, manifest)
                return
        self.temporary.rename(self.final)
        sync_folder(self.folder)

    def _keep_existing(self, there: Manifest, manifest: Manifest) -> None:
        """A run that stops right after a save saves the same step again, and changes nothing."""
        if _tensor_files(there) != _tensor_files(manifest):
            raise CheckpointError(
                f"{self.final} exists and holds other values; a checkpoint is never overwritten, "
                "so take it out of the way with set_aside() or choose another output folder"
            )
        self.clean_up()

    def _explain(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            free = shutil.disk_usage(self.folder).free
            return (
                f"{reason} in {self.folder}, where {free:,} bytes are left and this rank writes "
                f"{self.state.num_bytes():,}; earlier checkpoints are intact, free some space and "
                "resume"
            )
        if error.errno == errno.ENOENT:
            return (
                f"{reason}: {error.filename}; the output folder must stay in place, on a file "
                "system that all ranks share"
            )
        return f"{reason}: {error.filename or self.temporary}"


def _write_common(folder: Path, state: CheckpointState) -> dict[str, FileEntry]:
    """What rank 0 writes for everyone."""
    loop, tensors = flatten(state.loop)
    if tensors:
        raise CheckpointError(f"loop holds the tensor {next(iter(tensors))!r}; put it into a part")
    files = {BACKBONE: write_tensors(folder / BACKBONE, state.backbone)}
    for part, tree in state.parts.items():
        text, tensors = flatten(tree)
        files[f"{part}.json"] = write_file(folder / f"{part}.json", [text.encode()])
        path = folder / f"{part}.safetensors"
        files[path.name] = write_tensors(path, tensors)
    files[LOOP] = write_file(folder / LOOP, [loop.encode()])
    files[RECIPE] = write_file(folder / RECIPE, [state.recipe_yaml.encode()])
    return files


def _tensor_files(manifest: Manifest) -> Mapping[str, FileEntry]:
    return {name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")}


class AsyncSaver:
    """Saves checkpoints in a thread, one at a time.

    ``save`` copies the state to host memory and returns; the memory is kept and used again by the
    next save. A failure is raised by the next ``poll``, ``wait`` or ``save``, never dropped. All
    ranks fail together, but each notices at its own time: catch the error of ``poll`` and agree,
    so that no rank is left alone in a collective.

    Args:
        folder: The folder of checkpoints.
        process: This rank, with a ``control`` group that nothing else uses; None if there is no
            other rank.
        keep: Whole checkpoints that stay.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, AsyncSaver(folder) as saver:
        ...     saver.save(CheckpointState(step=5, backbone={"weight": torch.ones(2)}))
        ...     saver.wait().name
        'step-000005'
    """

    def __init__(
        self, folder: str | Path, *, process: Process | None = None, keep: int = 3
    ) -> None:
        self.folder, self.process, self.keep = Path(folder), process or Process(), keep
        self._buffers: list[Tensor] = []  # in the order in which a state's tensors are met
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._path: Path | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the next one would wait for it."""
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
        """The checkpoint that was completed since the last call, if any; raises its error."""
        return None if self.is_busy else self.wait()

    def wait(self) -> Path | None:
        """Wait for the save under way, then do as ``poll``."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:  # what ended the block came first, and is the one to show
                raise

    def _run(self, state: CheckpointState) -> None:
        try:
            self._path = save_checkpoint(self.folder, state, process=self.process, keep=self.keep)
        except Exception as error:
            self._error = error

    def _buffer(self, index: int, tensor: Tensor) -> Tensor:
        """Host memory for a tensor; pinned for one on a GPU, which is copied much faster then."""
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[index]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[index] = buffer.zero_()  # makes the system find the memory now
        return buffer

    def _map(
        self, state: CheckpointState, function: Callable[[Tensor, Tensor], Tensor]
    ) -> CheckpointState:
        """The part of the state that this rank writes, every tensor as ``function`` of a buffer."""
        indices = count()

        def take(path: str, tensor: Tensor) -> Tensor:
            return function(self._buffer(next(indices), tensor), tensor)

        head = state.head
        if head is not None:
            head = HeadRows(head.start, head.num_classes, map_tensors(head.tensors, take))
        if not self.process.is_first:
            return replace(state, head=head, backbone={}, parts={}, loop={})
        return replace(
            state,
            head=head,
            backbone=map_tensors(state.backbone, take),
            parts=map_tensors(state.parts, take),
            loop=map_tensors(state.loop, take),
        )
