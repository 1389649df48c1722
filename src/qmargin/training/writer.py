"""Saving a checkpoint, so that a kill at any moment leaves whole checkpoints and nothing else.

Rank 0 makes a temporary folder; every rank writes its files there and syncs them; when all ranks
say that theirs are on the disk, rank 0 adds the manifest, renames the folder and syncs its parent.
The rename is the moment at which the checkpoint exists. Older ones are deleted after that.
"""

from __future__ import annotations

import errno
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qmargin.errors import CheckpointError
from qmargin.files import FileEntry, sync_folder, write_file
from qmargin.training.exchange import Exchange, agree, check_ranks
from qmargin.training.folders import (
    delete_checkpoint,
    other_name,
    prune,
    remove_leftovers,
    step_name,
)
from qmargin.training.manifest import MANIFEST, Manifest, Shard, read_manifest, verify
from qmargin.training.state import CheckpointState
from qmargin.training.tensor_files import write_tensors
from qmargin.training.trees import flatten

BACKBONE = "backbone.safetensors"
LOOP = "loop.json"
RECIPE = "recipe.yaml"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    folder: str | Path,
    state: CheckpointState,
    *,
    rank: int = 0,
    world: int = 1,
    exchange: Exchange | None = None,
    keep: int = 3,
) -> Path:
    """Save a checkpoint as ``folder/step-...``; all ranks call it, and return when it is there.

    Args:
        folder: The folder of checkpoints, on a file system that all ranks share.
        state: This rank's part of the state.
        rank: This rank, of ``world``.
        world: Number of ranks.
        exchange: How they talk, see ``group_exchange``; not needed for one rank.
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
    save = _Save(folder, state, rank, world, check_ranks(rank, world, exchange))
    try:
        save.begin()
        save.commit(save.write())
    except BaseException:
        save.clean_up()
        raise
    if rank == 0:
        prune(folder, step=state.step, keep=keep)
    return folder / step_name(state.step)


class _Save:
    """One save, seen from one rank."""

    def __init__(
        self, folder: Path, state: CheckpointState, rank: int, world: int, exchange: Exchange
    ) -> None:
        self.folder, self.state, self.rank, self.world = folder, state, rank, world
        self.exchange = exchange
        self.final = folder / step_name(state.step)
        self.temporary = other_name(self.final, "tmp")  # rank 0's counts
        self.subject = f"the checkpoint of step {state.step} was not saved"

    def begin(self) -> None:
        """Agree on the step and on the temporary folder."""

        def action() -> list[Any]:
            if self.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.folder)
                self.temporary.mkdir()
            return [self.state.step, self.temporary.name]

        replies = agree(self.exchange, action, subject=self.subject)
        steps = [step for step, _ in replies]
        if len(set(steps)) > 1 or len(steps) != self.world:
            raise CheckpointError(
                f"{self.subject}: {self.world} ranks should save one step and these came: {steps}"
            )
        self.temporary = self.folder / replies[0][1]

    def write(self) -> list[dict[str, Any]]:
        """Write this rank's files; what each rank wrote."""

        def action() -> dict[str, Any]:
            try:
                return self._write_files()
            except OSError as error:
                raise CheckpointError(self._explain(error)) from error

        return agree(self.exchange, action, subject=self.subject)

    def commit(self, written: list[dict[str, Any]]) -> None:
        """Give the checkpoint its name."""

        def action() -> None:
            if self.rank == 0:
                try:
                    self._publish(self._manifest(written))
                except OSError as error:
                    raise CheckpointError(self._explain(error)) from error

        agree(self.exchange, action, subject=self.subject)

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
                "so take it out of the way with turn_away() or choose another output folder"
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
