"""What a checkpoint holds, in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qmargin.errors import CheckpointError, ShapeError
from qmargin.training.trees import Tree, map_tensors

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
