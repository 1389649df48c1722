"""The step in plain PyTorch: all cosines ``[B, k]``, any divergence. The others are held to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.collectives import gather_classes
from qmargin.heads.leaving import leave_blocks
from qmargin.heads.shard import ClassShard
from qmargin.heads.step import RowsUpdate, StepStats
from qmargin.kernels.head_reference import inverse_lengths
from qmargin.losses.module import LossOutput

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


class UnitPrototypes(torch.autograd.Function):
    """Unit prototypes of all or of some classes; backward hands their gradient to the head."""

    @staticmethod
    def forward(
        ctx: Any, prototypes: Tensor, classes: Tensor | None, head: MarginClassifier
    ) -> Tensor:
        """Rows of unit length, ``[n, d]``."""
        rows = prototypes if classes is None else prototypes[classes]
        inverse = inverse_lengths(rows)[:, None]
        unit: Tensor = rows * inverse
        ctx.head = head
        ctx.save_for_backward(unit, inverse, classes)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """The part of the gradient along the prototype does not turn it, so it is left out."""
        unit, inverse, classes = ctx.saved_tensors
        rows = (grad - (grad * unit).sum(1, keepdim=True) * unit) * inverse
        head: MarginClassifier = ctx.head
        return leave_blocks(head, RowsUpdate(rows, len(head.shard), classes)), None, None


def unit_prototypes(head: MarginClassifier, classes: Tensor | None = None) -> Tensor:
    """Differentiable unit prototypes of all ranks, ``[k, d]`` or those of ``classes``."""
    apply: Callable[..., Tensor] = UnitPrototypes.apply
    ranks = head.ranks
    if ranks.world == 1:
        return apply(head.prototypes, classes, head)
    shards = [ClassShard.of(head.num_classes, rank, ranks.world) for rank in range(ranks.world)]
    unit = gather_classes(apply(head.prototypes, None, head), ranks, [len(part) for part in shards])
    return unit if classes is None else unit[classes]


@dataclass
class DenseStep:
    """A step whose cosines all exist; they are kept until the next step or the first question."""

    path: str
    output: LossOutput
    cosines: Tensor  # [B, n], detached
    labels: Tensor  # [B], columns of the cosines, negative in rows that do not count
    scale: float
    edge: float
    num_classes: int

    def stats(self) -> StepStats:
        """Summarise the step."""
        support = self.output.support_size
        is_active = (self.cosines * self.scale > (self.output.tau + self.edge)[:, None]).any(0)
        is_active[self.labels[self.labels >= 0]] = True
        return StepStats(
            path=self.path,
            reason="",
            support_mean=float(support.double().mean()),
            support_max=int(support.max()),
            num_candidates=float(self.cosines.shape[1]),
            num_overflowed=0,
            mass_error=float(self.output.mass_error.max()),
            active_share=int(is_active.sum()) / self.num_classes,
        )


def dense_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor | None
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the step's record."""
    loss = head.loss
    cosines = embeddings @ unit_prototypes(head).t()  # [B, k]: what this path is about
    output = loss.with_stats(cosines, torch.where(labels < 0, loss.ignore_index, labels), norms)
    known = LossOutput(*(part.detach() for part in output))
    step = DenseStep(
        "dense",
        known,
        cosines.detach(),
        labels,
        loss.scale,
        loss.divergence.edge,
        head.num_classes,
    )
    return output.loss, step
