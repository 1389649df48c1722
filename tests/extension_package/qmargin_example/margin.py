"""A margin: the cosine margin, halved for cosines below zero."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qmargin.losses.margins import Setting, StatelessMargin, TargetTerm, geometric_term, resolve


@dataclass(frozen=True, eq=False)
class HalfCosine(StatelessMargin):
    """A cosine margin that is halved for cosines below zero.

    Args:
        margin: In cosine units.
    """

    margin: Setting

    def term(
        self, cosines: Tensor, scale: float, labels: Tensor | None, norms: Tensor | None
    ) -> TargetTerm:
        """Target logits and log reference of cosines ``[B]``."""
        share = torch.where(cosines < 0, 0.5, 1.0)
        return geometric_term(cosines - share * resolve(self.margin, cosines, labels), scale)
