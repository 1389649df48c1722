"""Small heads and batches for tests of the fused optimizers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import qmargin
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.gradients import PrototypeGradient

NUM_CLASSES, DIM, ROWS = 331, 12, 24
SETTINGS = [  # alpha, scale, margin
    (1.25, 20.0, qmargin.PriorMargin(0.2)),
    (1.5, 10.0, qmargin.PriorMargin(0.1)),
    (2.0, 4.0, qmargin.AngularMargin(0.3)),
    (3.0, 2.0, qmargin.CosineMargin(0.2)),
    (2.0, 20.0, qmargin.PriorMargin(0.02)),  # few active classes
]


def make_head(
    gradient: str = "fused",
    *,
    setting: int = 0,
    dtype: torch.dtype = torch.float64,
    num_classes: int = NUM_CLASSES,
    screen_dtype: torch.dtype | None = None,
) -> MarginClassifier:
    alpha, scale, margin = SETTINGS[setting]
    head = MarginClassifier(
        DIM,
        num_classes,
        qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale),
        path=qmargin.Sparse(screen_dtype=screen_dtype),
        gradient=gradient,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(num_classes, DIM, generator=generator, dtype=torch.float64)
    head.prototypes.data.copy_(weights)
    return head


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings and labels; labels repeat within a batch."""
    generator = torch.Generator().manual_seed(step)
    embeddings = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    return embeddings.to(dtype), torch.randint(NUM_CLASSES, (ROWS,), generator=generator) // 3


def plain_loss(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The head's loss from all cosines: shares nothing with the sparse step but the loss."""
    unit = nn.functional.normalize
    loss: Tensor = head.loss(unit(embeddings) @ unit(head.prototypes).t(), labels)
    return loss.mean()


def tensors_of(head: MarginClassifier, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything a step may change, as it is now."""
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    kept = [head.prototypes.detach(), head.copy, head.inverse_norms, head.copy_error, *buffers]
    return [tensor.clone() for tensor in kept]


def train(head: MarginClassifier, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        head(*batch(step, head.prototypes.dtype)).backward()
        optimizer.step()


class Blocks(PrototypeGradient):
    """A gradient that comes block by block, as that of the chunked path."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(self.gradient), 90):
            part = slice(start, min(start + 90, len(self.gradient)))
            yield part, self.gradient[part].clone()
