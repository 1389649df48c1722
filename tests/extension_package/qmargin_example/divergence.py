"""A divergence: Pearson's, five functions and a number."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pearson:
    """Pearson's divergence, ``f(u) = weight (u - 1)^2 / 2``.

    Args:
        weight: Times the divergence; one gives SparseMax.
    """

    weight: float = 1.0

    @property
    def edge(self) -> float:
        """Slack at and below which a class leaves the support."""
        return -self.weight

    def generator(self, ratio: Tensor) -> Tensor:
        """``f(u)``."""
        return self.weight * (ratio - 1.0).square() / 2.0

    def derivative(self, ratio: Tensor) -> Tensor:
        """``f'(u)``."""
        return self.weight * (ratio - 1.0)

    def link(self, slack: Tensor) -> Tensor:
        """Ratio of a class with a slack."""
        return (1.0 + slack / self.weight).clamp_min(0.0)

    def link_slope(self, slack: Tensor) -> Tensor:
        """Its derivative."""
        return torch.where(slack > self.edge, 1.0 / self.weight, 0.0)

    def excess(self, slack: Tensor) -> Tensor:
        """``f*(v) + f(0)``."""
        return self.weight * self.link(slack).square() / 2.0
