"""Rows of classes that W ranks wrote, read by V ranks; and state dicts without such rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, ConfigError
from qmargin.training.manifest import Checkpoint
from qmargin.training.state import PROTOTYPES
from qmargin.training.tensor_files import open_tensors
from qmargin.training.trees import Tree, map_tensors

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
