"""A reference measure: classes with few samples count less."""

import torch
from torch import Tensor

from qmargin.losses.references import Reference


class RareFirst(Reference):
    """Classes with fewer samples than ``few`` have a smaller measure.

    Args:
        counts: Training samples of each class, given by the data.
        strength: What is taken off their log measure.
        few: Samples.
    """

    def __init__(self, counts: Tensor, strength: float = 1.0, few: int = 10) -> None:
        super().__init__()
        self.strength = strength
        self.register_buffer("is_rare", torch.as_tensor(counts) < few)

    def per_class(self) -> Tensor:
        """Log measure of every class ``[k]``."""
        return -self.strength * self.is_rare.double()
