"""What a backward pass leaves: the gradient of the prototypes, in the form that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.heads.step import BlockUpdate, RowsUpdate
from qmargin.kernels.head_records import ClassGradient

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


def leave_classes(
    head: MarginClassifier, gradient: ClassGradient, embeddings: Tensor, bound: Tensor
) -> Tensor | None:
    """The sparse step's gradient, for autograd; None where an optimizer will make it."""
    if head.gradient == "fused":
        _leave_pending(head, (gradient, embeddings, bound))
        return None
    head.may_have_moved = True
    prototypes = head.prototypes.detach()
    classes, rows = head.kernels.prototype_gradient(
        gradient, embeddings, prototypes, head.inverse_norms
    )
    if head.gradient == "sparse":
        return _coo(classes, rows, prototypes)
    return torch.zeros_like(prototypes).index_copy_(0, classes, rows)


def leave_blocks(head: MarginClassifier, update: BlockUpdate) -> Tensor | None:
    """Any other path's gradient, likewise."""
    if head.gradient == "fused":
        _leave_pending(head, update)
        return None
    head.may_have_moved = True
    prototypes = head.prototypes.detach()
    if head.gradient == "sparse":
        parts = [(prototypes.new_empty(0, dtype=torch.int64), prototypes[:0])]  # of no classes
        for where, rows in update.blocks():
            active = (rows != 0).any(1).nonzero().flatten()
            parts.append((where.start + active, rows[active]))
        classes, rows = (torch.cat(column) for column in zip(*parts, strict=True))
        return _coo(classes, rows, prototypes)
    if isinstance(update, RowsUpdate):
        return update.as_dense()
    gradient = torch.empty_like(prototypes)
    for where, rows in update.blocks():
        gradient[where] = rows
    return gradient


def _leave_pending(head: MarginClassifier, pending: Any) -> None:
    """Keep what an optimizer of ``qmargin.heads.updates`` will consume: one batch at a time."""
    if head.pending is not None:
        raise ConfigError(
            "a gradient is pending and gradient='fused' holds only one; call the optimizer's "
            "step() or zero_grad() before the next backward, or accumulate with "
            "gradient='dense' or 'sparse'"
        )
    head.pending = pending


def _coo(classes: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        classes[None], rows, like.shape, is_coalesced=True, check_invariants=False
    )
