"""Checkpoints on the disk: find the newest whole one, and read it into any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qmargin.errors import CheckpointError, DataError
from qmargin.files import open_regular
from qmargin.training.exchange import Exchange, agree, check_ranks
from qmargin.training.folders import list_leftovers, list_steps
from qmargin.training.manifest import Checkpoint, read_manifest, verify
from qmargin.training.resharding import read_class_rows
from qmargin.training.state import PROTOTYPES, CheckpointState, HeadRows
from qmargin.training.tensor_files import read_tensors
from qmargin.training.trees import Tree, unflatten
from qmargin.training.writer import BACKBONE, LOOP, RECIPE, save_checkpoint

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


def agree_on_newest(
    folder: str | Path, *, rank: int = 0, world: int = 1, exchange: Exchange | None = None
) -> Search:
    """``newest`` for many ranks: rank 0 reads and checks the files, the others take its word."""
    exchange, folder = check_ranks(rank, world, exchange), Path(folder)

    def action() -> list[Any]:
        search = newest(folder) if rank == 0 else Search(None, ())
        name = search.checkpoint.path.name if search.checkpoint else None
        return [name, list(search.skipped)]

    replies = agree(exchange, action, subject="the run cannot be resumed")
    name, skipped = replies[0]
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
