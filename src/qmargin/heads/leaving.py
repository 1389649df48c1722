"""What a backward pass leaves: the gradient of the prototypes, in the form that was asked for."""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
            "a gradient is pending and gradient='fused' holds only one; call step() or zero_grad() "
            "of qmargin.ExactSGD or SparseSGD before the next backward, or accumulate with "
            "gradient='dense' or 'sparse'"
        )
    head.pending = pending
    if not head.has_optimizer:
        _hook_optimizers()
        _WAITING.add(head)


_WAITING: weakref.WeakSet[MarginClassifier] = weakref.WeakSet()  # for a fused optimizer to be made


@cache
def _hook_optimizers() -> None:
    """Have every optimizer of torch look whether it was given prototypes it cannot step."""
    register_optimizer_step_pre_hook(_refuse_to_skip)


def _refuse_to_skip(optimizer: Optimizer, *_: Any) -> None:
    """Raise where an optimizer would pass over prototypes whose gradient is pending."""
    for head in [head for head in _WAITING if head.pending is not None and not head.has_optimizer]:
        stepped = (value for group in optimizer.param_groups for value in group["params"])
        if any(value is head.prototypes for value in stepped):
            raise ConfigError(
                f"gradient='fused' leaves {type(optimizer).__name__} no gradient of the "
                "prototypes; step them with qmargin.ExactSGD(head, lr=...) or SparseSGD, or build "
                "the head with gradient='dense'"
            )


def _coo(classes: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        classes[None], rows, like.shape, is_coalesced=True, check_invariants=False
    )
