"""The Partial FC baseline: the loss over the batch's own classes and a sample of the others.

It is not the loss over all classes but an estimate that changes with the sample; it is here to
compare with. Classes outside the sample have gradient zero in this step. What that means depends on
the optimizer: with a dense gradient and ``torch.optim.SGD`` they still move, by their momentum and
weight decay, as in the second version of Partial FC; with a sparse gradient, or ``SparseSGD``, they
stay where they are, as in its first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.heads.dense import DenseStep, unit_prototypes
from qmargin.losses.module import LossOutput, margin_loss_with_stats
from qmargin.maths.margins import Margin, TargetTerm

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

POSITIVE = 2.0  # above every draw, so that the batch's own classes are taken first


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
    if not 0.0 < rate <= 1.0:
        raise ConfigError(f"sample_rate is {rate!r}; choose a share of the classes in (0, 1]")
    generator = torch.Generator(labels.device).manual_seed(seed)
    keys = torch.rand(num_classes, device=labels.device, generator=generator)
    keys.index_fill_(0, labels, POSITIVE)
    num_sampled = max(1, int(rate * num_classes))
    if len(labels) > num_sampled:  # only then can the positives exceed the budget
        num_sampled = max(num_sampled, int((keys == POSITIVE).sum()))
    return keys.topk(num_sampled).indices.sort().values


def sampled_rows(
    head: MarginClassifier, embeddings: Tensor, labels: Tensor, norms: Tensor | None
) -> tuple[Tensor, DenseStep]:
    """Loss of each row ``[B]`` over the sampled classes, and the step's record."""
    loss = head.loss
    classes = sample_classes(
        labels.clamp_min(0), head.num_classes, rate=head.sample_rate, seed=head.next_seed()
    )
    cosines = embeddings @ unit_prototypes(head, classes).t()  # [B, n]
    columns = torch.where(labels < 0, labels, torch.searchsorted(classes, labels))
    output = margin_loss_with_stats(
        cosines,
        torch.where(columns < 0, loss.ignore_index, columns),
        divergence=loss.divergence,
        margin=OwnLabels(loss.margin, labels),
        scale=loss.scale,
        norms=norms,
        ignore_index=loss.ignore_index,
        debug=loss.debug,
    )
    known = LossOutput(*(part.detach() for part in output))
    step = DenseStep(
        "sampled",
        known,
        cosines.detach(),
        columns,
        loss.scale,
        loss.divergence.edge,
        head.num_classes,
    )
    return output.loss, step
