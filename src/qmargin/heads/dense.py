"""Steps over all cosines in plain PyTorch: of every class, or of a sample (Partial FC).

The dense step takes any divergence; the other paths are tested against it. The sampled step is not
the loss over all classes but an estimate that changes with the sample, for comparison. Classes
outside the sample have gradient zero in this step. What that means depends on the optimizer: with a
dense gradient and ``torch.optim.SGD`` they still move, by their momentum and weight decay, as in
the second version of Partial FC; with a sparse gradient, or ``SparseSGD``, they stay where they
are, as in its first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qmargin.heads.gradients import RowsGradient, deliver
from qmargin.heads.paths import Sampled
from qmargin.heads.sharding import ClassShard, gather_classes
from qmargin.heads.step import StepStats
from qmargin.kernels.head_reference import inverse_lengths
from qmargin.losses.margin_loss import LossOutput, margin_loss_with_stats
from qmargin.losses.margins import Margin, TargetTerm

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

IN_BATCH = 2.0  # above every draw, so that the batch's own classes are taken first


class UnitPrototypes(torch.autograd.Function):
    """Unit prototypes of all or of some classes; backward delivers their gradient."""

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
        return deliver(head, RowsGradient(rows, len(head.shard), classes)), None, None


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
    """Record of a step whose cosines all exist, kept until the next step or the first question."""

    path: str
    output: LossOutput  # detached
    cosines: Tensor  # [B, n], detached
    labels: Tensor  # [B], columns of the cosines, negative in rows that do not count
    scale: float
    edge: float
    num_classes: int

    def stats(self) -> StepStats:
        """Summarise the step."""
        support = self.output.support_size
        is_active = self.cosines * self.scale > (self.output.tau + self.edge)[:, None]
        has_gradient = is_active.any(0)
        has_gradient[self.labels[self.labels >= 0]] = True
        return StepStats(
            path=self.path,
            reason="",
            support_mean=float(support.double().mean()),
            support_max=int(support.max()),
            num_candidates=float(self.cosines.shape[1]),
            num_overflowed=0,
            mass_error=float(self.output.mass_error.max()),
            active_share=int(has_gradient.sum()) / self.num_classes,
        )


def dense_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` for unit embeddings, and the record of the step."""
    cosines = embeddings @ unit_prototypes(head).t()  # [B, k]: what this path is about
    return _rows_of(head, "dense", cosines, labels, norms, head.loss.margin)


def sampled_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` over the sampled classes, and the record of the step."""
    path = head.path
    assert isinstance(path, Sampled)
    classes = sample_classes(
        labels.clamp_min(0), head.num_classes, rate=path.rate, seed=head.next_seed()
    )
    cosines = embeddings @ unit_prototypes(head, classes).t()  # [B, n]
    columns = torch.where(labels < 0, labels, torch.searchsorted(classes, labels))
    margin = OwnLabels(head.loss.margin, labels)
    return _rows_of(head, "sampled", cosines, columns, norms, margin)


def _rows_of(
    head: MarginClassifier,
    path: str,
    cosines: Tensor,
    columns: Tensor,
    norms: Tensor,
    margin: Margin,
) -> tuple[Tensor, DenseStep]:
    loss = head.loss
    output = margin_loss_with_stats(
        cosines,
        torch.where(columns < 0, loss.ignore_index, columns),
        divergence=loss.divergence,
        margin=margin,
        scale=loss.scale,
        norms=norms,
        ignore_index=loss.ignore_index,
        debug=loss.debug,
    )
    known = LossOutput(*(part.detach() for part in output))
    numbers = (loss.scale, loss.divergence.edge, head.num_classes)
    return output.loss, DenseStep(path, known, cosines.detach(), columns, *numbers)


@dataclass(frozen=True)
class OwnLabels:
    """A margin that looks at the labels among all classes, not at those among the sampled ones."""

    margin: Margin
    labels: Tensor  # [B]

    def __call__(
        self,
        target_cosines: Tensor,
        scale: float,
        *,
        labels: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> TargetTerm:
        """Apply the margin, see ``Margin``."""
        return self.margin(target_cosines, scale, labels=self.labels, norms=norms)

    def effective(self, alpha: float, scale: float) -> float | None:
        """Return that of the margin itself."""
        return self.margin.effective(alpha, scale)


def sample_classes(labels: Tensor, num_classes: int, *, rate: float, seed: int) -> Tensor:
    """Ascending classes: those of the labels, filled up at random to ``rate * num_classes``.

    If the labels alone are more than that, they are all there is.

    Examples:
        >>> sample_classes(torch.tensor([7, 3, 7]), 10, rate=0.4, seed=0)
        tensor([1, 3, 5, 7])
        >>> sample_classes(torch.tensor([7, 3, 7]), 10, rate=0.1, seed=0)
        tensor([3, 7])
    """
    generator = torch.Generator(labels.device).manual_seed(seed)
    keys = torch.rand(num_classes, device=labels.device, generator=generator)
    keys.index_fill_(0, labels, IN_BATCH)
    num_sampled = max(1, int(rate * num_classes))
    if len(labels) > num_sampled:  # only then can the positives exceed the budget
        num_sampled = max(num_sampled, int((keys == IN_BATCH).sum()))
    return keys.topk(num_sampled).indices.sort().values
