"""Checkpoints on the disk: find the newest whole one, and read it into any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.files import open_regular
from qmargin.training.checkpoint.files import (
    PROTOTYPES,
    Checkpoint,
    CheckpointState,
    HeadRows,
    Tree,
    map_tensors,
    open_tensors,
    read_manifest,
    read_tensors,
    unflatten,
    verify,
)
from qmargin.training.checkpoint.folders import list_leftovers, list_steps
from qmargin.training.checkpoint.writer import BACKBONE, LOOP, RECIPE, save_checkpoint
from qmargin.training.distributed.consensus import gather, run_on_all
from qmargin.training.distributed.process import Process

_ROWS = "@rows:"  # marks the place of a tensor that went to the head's shards


def read_class_rows(
    checkpoint: Checkpoint, start: int, stop: int, *, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Prototypes, momentum and the like of the classes ``start`` to ``stop``, bit for bit.

    Only the rows that were asked for are read, whatever the ranges of the ranks that wrote them.

    Args:
        checkpoint: From ``open_checkpoint`` or ``newest``.
        start: The first class.
        stop: One past the last class; equal to ``start`` for a rank without classes.
        names: Of the tensors to read; None for all.

    Returns:
        Tensors by name, ``stop - start`` rows each. An optimizer that has not met a gradient yet
        has no momentum; where only some ranks had one, the rows of the others are zero.
    """
    manifest = checkpoint.manifest
    if not 0 <= start <= stop <= manifest.num_classes:
        raise ConfigError(
            f"the classes {start} to {stop} were asked for and {checkpoint.path} has "
            f"{manifest.num_classes}; the number of classes cannot change on resume"
        )
    rows: dict[str, Tensor] = {}
    for shard in manifest.shards:
        with open_tensors(checkpoint.path / shard.file) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if names is not None and name not in names:
                    continue
                saved = file.get_slice(name)
                if name not in rows:
                    rows[name] = _zeros(saved, stop - start)
                first, last = max(start, shard.start), min(stop, shard.stop)
                if first < last:
                    part = saved[first - shard.start : last - shard.start]
                    rows[name][first - start : last - start] = part
    if rows and PROTOTYPES not in rows:
        raise CheckpointError(f"{checkpoint.path} has no prototypes; resume from another one")
    return rows


def _zeros(saved: Any, num_rows: int) -> Tensor:
    """Room for rows of a tensor on the disk."""
    example: Tensor = saved[:0]
    return torch.zeros((num_rows, *saved.get_shape()[1:]), dtype=example.dtype)


def split_rows(state: Tree, shape: torch.Size) -> tuple[Tree, dict[str, Tensor]]:
    """Take the tensors of the prototypes' shape out of an optimizer's state dict.

    Momentum has one row per class and goes to the head's shards; what is left is the same on every
    rank and becomes a part of the checkpoint. ``join_rows`` puts the two together again.

    Args:
        state: ``optimizer.state_dict()`` of the head's optimizer.
        shape: ``head.prototypes.shape``.

    Returns:
        The state with a mark in place of each such tensor, and the tensors by name.

    Examples:
        >>> state = {"state": {0: {"momentum_buffer": torch.ones(3, 2)}}, "lr": 0.1}
        >>> rest, rows = split_rows(state, torch.Size([3, 2]))
        >>> list(rows), join_rows(rest, rows) == state
        (['momentum_buffer'], True)
    """
    rows: dict[str, Tensor] = {}

    def take(path: str, tensor: Tensor) -> Tensor | str:
        if tensor.shape != shape:
            return tensor
        name = path.rpartition("/")[2]
        if name in rows or name == PROTOTYPES:
            raise CheckpointError(
                f"{path} is the second tensor called {name}; save the optimizer of the head "
                "apart from any other"
            )
        rows[name] = tensor
        return _ROWS + name

    return map_tensors(state, take), rows


def join_rows(state: Tree, rows: Mapping[str, Tensor]) -> Tree:
    """Put rows back into a state that ``split_rows`` took them from."""
    if isinstance(state, str) and state.startswith(_ROWS):
        name = state[len(_ROWS) :]
        if name not in rows:
            raise CheckpointError(
                f"the optimizer's {name} is missing from the head's rows; the checkpoint is not "
                "one of this optimizer"
            )
        return rows[name]
    if isinstance(state, Mapping):
        return {key: join_rows(item, rows) for key, item in state.items()}
    if isinstance(state, list | tuple):
        items = [join_rows(item, rows) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return state


__all__ = [
    "Checkpoint",
    "CheckpointState",
    "HeadRows",
    "Search",
    "agree_on_newest",
    "load_checkpoint",
    "newest",
    "open_checkpoint",
    "read_backbone",
    "read_loop",
    "read_part",
    "read_prototypes",
    "read_recipe",
    "save_checkpoint",
]


@dataclass(frozen=True)
class Search:
    """What ``newest`` found.

    Attributes:
        checkpoint: The newest whole one; None only if no save was ever completed.
        skipped: Newer ones that are not whole, and why; and saves that were never completed.
    """

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def open_checkpoint(path: str | Path, *, check: bool = True) -> Checkpoint:
    """Open one checkpoint by its path.

    Args:
        path: Its folder.
        check: Compare the hash of every file, which reads all of them; skip it only for a
            checkpoint that another rank has just checked.

    Raises:
        CheckpointError: It is not whole; the message names the file and the reason.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if check:
        verify(path, manifest)
    return Checkpoint(path, manifest)


def newest(folder: str | Path) -> Search:
    """The newest checkpoint whose files all match their hashes.

    Args:
        folder: The folder of checkpoints; it may be missing or empty.

    Raises:
        CheckpointError: There are checkpoints and every one of them is bad. A run must not start
            afresh then.
    """
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
            f"none of the {len(steps)} checkpoints in {folder} is whole; restore one of them, or "
            f"start over in another folder ({'; '.join(skipped)})"
        )
    return Search(None, tuple(skipped))


def is_damaged(folder: str | Path) -> bool:
    """Whether there are checkpoints and none is whole; see ``newest``."""
    try:
        newest(folder)
    except CheckpointError:
        return True
    return False


def agree_on_newest(folder: str | Path, process: Process) -> Search:
    """``newest`` for many ranks: rank 0 reads and checks the files, the others take its word."""
    folder = Path(folder)

    def action() -> tuple[str | None, tuple[str, ...]]:
        search = newest(folder) if process.is_first else Search(None, ())
        name = search.checkpoint.path.name if search.checkpoint else None
        return name, search.skipped

    name, skipped = gather(process, run_on_all(process, action))[0]
    checkpoint = None if name is None else open_checkpoint(folder / name, check=False)
    return Search(checkpoint, tuple(skipped))


def load_checkpoint(
    checkpoint: Checkpoint, *, start: int = 0, stop: int | None = None
) -> CheckpointState:
    """Everything in a checkpoint, with the rows of this rank's classes.

    Args:
        checkpoint: From ``open_checkpoint`` or ``newest``.
        start: This rank's first class.
        stop: One past its last class; by default the last of all.
    """
    manifest = checkpoint.manifest
    head = None
    if manifest.num_classes:
        stop = manifest.num_classes if stop is None else stop
        rows = read_class_rows(checkpoint, start, stop)
        head = HeadRows(start, manifest.num_classes, rows)
    return CheckpointState(
        step=manifest.step,
        backbone=read_backbone(checkpoint),
        head=head,
        parts={name: read_part(checkpoint, name) for name in manifest.parts},
        loop=read_loop(checkpoint),
        recipe_yaml=read_recipe(checkpoint),
        recipe_sha256=manifest.recipe_sha256,
    )


def read_backbone(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The backbone's state dict."""
    return read_tensors(checkpoint.path / BACKBONE)


def read_prototypes(checkpoint: Checkpoint, *, at_most: int | None = None) -> Tensor:
    """The class vectors ``[k, d]`` as they were trained, not scaled to length one.

    Args:
        checkpoint: From ``open_checkpoint`` or ``newest``.
        at_most: Take classes at equal steps, no more than this; None for all.

    Raises:
        CheckpointError: It has no head.
    """
    num_classes = checkpoint.manifest.num_classes
    rows = read_class_rows(checkpoint, 0, num_classes, names=[PROTOTYPES]).get(PROTOTYPES)
    if rows is None:
        raise CheckpointError(f"{checkpoint.path} has no prototypes; it was saved without a head")
    step = 1 if at_most is None else -(-len(rows) // at_most)
    return rows[::step]


def read_part(checkpoint: Checkpoint, name: str) -> Tree:
    """One of the trees that were saved as ``parts``."""
    if name not in checkpoint.manifest.parts:
        known = ", ".join(checkpoint.manifest.parts) or "none"
        raise CheckpointError(f"{checkpoint.path} has no part {name!r}; it has {known}")
    text = _read_text(checkpoint, f"{name}.json")
    return unflatten(text, read_tensors(checkpoint.path / f"{name}.safetensors"))


def read_loop(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state of the loop."""
    loop: dict[str, Any] = unflatten(_read_text(checkpoint, LOOP), {})
    return loop


def read_recipe(checkpoint: Checkpoint) -> str:
    """The text of the recipe."""
    return _read_text(checkpoint, RECIPE)


def _read_text(checkpoint: Checkpoint, name: str) -> str:
    path = checkpoint.path / name
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except (OSError, DataError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it, or resume from an older checkpoint"
        ) from error
