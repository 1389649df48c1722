"""A gradient of the prototypes that was not built: what ``gradient="fused"`` leaves to optimizers.

A backward pass leaves one of two things in ``head.pending``: the sparse step's ``ClassGradient``,
embeddings and bound, or an object that yields the gradient block by block. Here both become a
``PendingGradient``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qmargin.kernels.head_records import ClassGradient
from qmargin.kernels.update_reference import class_parts, gradient_blocks

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier
    from qmargin.heads.step import BlockUpdate


@runtime_checkable
class PendingGradient(Protocol):
    """The prototypes' gradient, to be made block by block.

    A path needs to write ``blocks`` only. One whose blocks are costly derives from this class and
    answers ``is_finite`` without making them: an optimizer asks before it steps the first block.
    """

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive ranges of classes, ascending, all of them; the gradient ``[n, d]`` of each.

        The gradient is that of the raw prototypes, the length of each included. It can be asked for
        any number of times as long as the prototypes stay as they are. Within one pass, a consumer
        may overwrite the gradient it got, and may step those classes (their prototypes, inverse
        norms and copy), before it asks for the next range.
        """
        ...

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The same for a consumer that reads the prototypes anyway.

        Where the third item is not None, that number times the rows is the gradient of the *unit*
        prototypes, and ``update_reference.project_rows`` makes the other of it.
        """
        return ((where, rows, None) for where, rows in self.blocks())

    def norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, a float64 scalar."""
        return norm_of(rows for _, rows in self.blocks())

    def is_finite(self) -> Tensor:
        """Whether every element is finite, a boolean scalar on the device; no sync."""
        return self.norm().isfinite()


def norm_of(parts: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of tensors that are never held together, a float64 scalar."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms) if norms else torch.zeros(0))
    return total.double()


def element_bound(weights: Tensor, inverse_norms: Tensor, depth: int) -> Tensor:
    """What neither these nor an element of a gradient made of them exceeds, a float64 scalar.

    For gradients of cosines that add up to at most ``weights`` in absolute value, of any shape,
    every element of a prototype's gradient is at most the sum of the weights, times the inverse
    norm, times ``1 + d`` for the part along the prototype that is taken out: elements of unit
    embeddings are at most one. (An embedding that is not finite has no finite weight.)
    """
    total: Tensor = torch.linalg.vector_norm(weights, 1, dtype=torch.float64)
    if not len(inverse_norms):
        return total
    bound: Tensor = total * ((2 + depth) * inverse_norms.amax()).clamp_min(1.0)
    return bound


def is_bounded(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether numbers up to ``bound`` are finite, a boolean scalar; false for NaN."""
    return bound < torch.finfo(dtype).max


@dataclass(frozen=True)
class SparsePending(PendingGradient):
    """What the sparse step leaves: entries for the active classes only."""

    head: MarginClassifier
    gradient: ClassGradient
    embeddings: Tensor  # [B, d], unit
    bound: Tensor  # float64 scalar, see ``element_bound``

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All classes; the gradient of inactive ones is zero."""
        head = self.head
        return gradient_blocks(
            self.gradient, self.embeddings, head.prototypes.detach(), head.inverse_norms
        )

    def norm(self) -> Tensor:
        """From the active classes alone, some at a time."""
        head = self.head
        tensors = (self.embeddings, head.prototypes.detach(), head.inverse_norms)
        rows_of = head.kernels.prototype_gradient
        norm = norm_of(rows_of(part, *tensors)[1] for part in class_parts(self.gradient))
        return norm.to(self.embeddings.device)

    def is_finite(self) -> Tensor:
        """From a bound of the gradient's elements."""
        return is_bounded(self.bound, self.embeddings.dtype)


@dataclass(frozen=True)
class BlockPending(PendingGradient):
    """A gradient of which nothing is known but its blocks."""

    update: BlockUpdate

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Those of the update."""
        return self.update.blocks()


def as_pending(head: MarginClassifier, left: Any) -> PendingGradient:
    """What a backward pass left in ``head.pending``, as a ``PendingGradient``."""
    if isinstance(left, tuple):
        return SparsePending(head, *left)
    return left if isinstance(left, PendingGradient) else BlockPending(left)
