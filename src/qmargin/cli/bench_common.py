"""The ArcFace head that most training code has, to compare with.

Nothing here is clever, on purpose: unit vectors, one product under autocast, a clamp, the margin
written into the target's entries, a scale, cross-entropy, and SGD on a dense gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class CommonHead(nn.Module):
    """ArcFace over all classes, or over a sample of them that has the batch's own.

    Args:
        embedding_dim: ``d``.
        num_classes: ``k``.
        scale: Of the logits.
        margin: In radians.
        rate: Share of the classes in a step.
        device: Where the prototypes live.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        scale: float = 64.0,
        margin: float = 0.5,
        rate: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.rate = scale, margin, rate
        self.weight = nn.Parameter(
            torch.empty(num_classes, embedding_dim, device=device).normal_(0.0, 0.01)
        )

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of embeddings ``[B, d]`` with labels ``[B]``."""
        weight: Tensor = self.weight
        if self.rate < 1.0:
            classes = self._sample(labels)
            weight, labels = weight[classes], torch.searchsorted(classes, labels)
        device_type = embeddings.device.type
        half = torch.float16 if device_type == "cuda" else torch.bfloat16
        with torch.autocast(device_type, dtype=half):
            cosines = functional.linear(
                functional.normalize(embeddings), functional.normalize(weight)
            )
        cosines = cosines.float().clamp(-1.0, 1.0)  # [B, k]
        rows = torch.arange(len(labels), device=labels.device)
        target = cosines[rows, labels]
        sine = (1.0 - target.square()).clamp_min(1e-12).sqrt()
        cosines[rows, labels] = target * math.cos(self.margin) - sine * math.sin(self.margin)
        return functional.cross_entropy(cosines * self.scale, labels)

    def _sample(self, labels: Tensor) -> Tensor:
        """Ascending classes: those of the batch first, then others at random."""
        keys = torch.rand(len(self.weight), device=labels.device)
        keys[labels] = 2.0
        num_sampled = min(len(keys), max(len(labels), int(self.rate * len(keys))))
        return keys.topk(num_sampled).indices.sort().values
