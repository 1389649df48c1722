"""What every path shares: the record of a step, and gradients on their way to an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from qmargin.maths.threshold import heights

BLOCK_CLASSES = 1 << 13  # prototypes whose gradient is handed over at a time


@dataclass(frozen=True)
class StepStats:
    """What the last step did.

    Attributes:
        path: The path taken.
        reason: Why, in one sentence.
        support_mean: Classes with positive posterior, mean over the rows.
        support_max: The same, largest row.
        num_candidates: Classes scored exactly, per row.
        num_overflowed: Rows that did not fit and were redone: lists of the sparse path, violated
            checks of the paper's.
        mass_error: Largest ``|sum of the posterior - 1|``.
        active_share: Share of all classes that are in the support of a row, or its target.
    """

    path: str
    reason: str
    support_mean: float
    support_max: int
    num_candidates: float
    num_overflowed: int
    mass_error: float
    active_share: float


class StepRecord(Protocol):
    """What a path keeps of a step; reading it may wait for the device, keeping it does not."""

    def stats(self) -> StepStats:
        """Summarise the step."""


class BlockUpdate(Protocol):
    """A gradient that comes block by block, for an optimizer that applies it block by block."""

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and the gradient of their prototypes, ``[n, d]``, fresh memory.

        A block may be stepped before the next is asked for: its gradient depends on no other.
        """


@dataclass(frozen=True)
class RowsUpdate:
    """Gradient rows that exist already: of every class, or of the listed ones."""

    rows: Tensor  # [n, d]
    num_classes: int
    classes: Tensor | None = None  # [n] ascending; None for all of them

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """See ``BlockUpdate``; classes that are not listed have gradient zero."""
        edges = [*range(0, self.num_classes, BLOCK_CLASSES), self.num_classes]
        cuts = edges
        if self.classes is not None:
            wanted = torch.tensor(edges, device=self.classes.device)
            cuts = torch.searchsorted(self.classes, wanted).tolist()
        for (start, stop), cut in zip(pairwise(edges), pairwise(cuts), strict=True):
            rows = self.rows[slice(*cut)]
            if self.classes is None:
                yield slice(start, stop), rows.clone()
            else:
                local = self.classes[slice(*cut)] - start
                block = rows.new_zeros((stop - start, rows.shape[1]))
                yield slice(start, stop), block.index_copy_(0, local, rows)

    def as_dense(self) -> Tensor:
        """The gradient of every class, ``[k, d]``."""
        if self.classes is None:
            return self.rows
        gradient = self.rows.new_zeros((self.num_classes, self.rows.shape[1]))
        return gradient.index_copy_(0, self.classes, self.rows)


def reference_gradient(
    target_posterior: Tensor, target_level: Tensor, log_reference: Tensor, order: float
) -> Tensor:
    """Gradient of the loss in the target's log reference, ``[B]``: the envelope's (M7)."""
    height = heights(target_level, order).clamp_min(0.0)
    return (target_posterior * height - (-order * log_reference).exp()) / (1.0 + order)
