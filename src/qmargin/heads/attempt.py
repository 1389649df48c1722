"""A step that was launched on a guess, and may have to be taken again."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qmargin.heads.chunked import ChunkedPending, ChunkedStep
from qmargin.heads.sparse import SparseStep
from qmargin.kernels.head_records import ListOverflow


class KeptMargin:
    """Running statistics of a margin, before it sees a batch."""

    def __init__(self, margin: Any) -> None:
        self.margin, self._state = margin, None
        if isinstance(margin, nn.Module):
            self._state = deepcopy(margin.state_dict())

    def put_back(self) -> None:
        """Forget the batch."""
        if self._state is not None:
            self.margin.load_state_dict(self._state)


@dataclass(frozen=True)
class Attempt:
    """What a step gave, and what the margin was before it."""

    loss: Tensor
    step: SparseStep | ChunkedStep
    margin: KeptMargin

    def stands(self) -> bool:
        """Wait for the device: whether everything that was guessed was enough."""
        try:
            return self.step.confirm()
        except ListOverflow:
            return False

    def has_left(self, pending: Any) -> bool:
        """Whether a pending gradient is that of this step, not of one before it."""
        step = self.step
        if isinstance(step, SparseStep):
            return isinstance(pending, tuple) and pending[1] is step.prepared.embeddings
        return isinstance(pending, ChunkedPending) and pending.solved is step.solved

    def cut(self, pending: Any) -> Any:
        """What is pending, its lists cut to their true length if they are this step's."""
        if not (isinstance(self.step, SparseStep) and self.has_left(pending)):
            return pending
        gradient, *rest = pending
        return (self.step.cut(gradient), *rest)
