"""Forms of the prototype gradient: dense, sparse, or fused into the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qmargin.errors import ConfigError
from qmargin.kernels.head_reference import (
    ClassGradient,
    class_parts,
    gradient_blocks,
    update_classes,
)

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


BLOCK_ON_GPU = 1 << 18  # classes whose gradient rows are made at a time: fewer launches


class PrototypeGradient:
    """The prototypes' gradient, made block by block when it is asked for."""

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive ranges of classes, ascending, all of them; the gradient ``[n, d]`` of each.

        It can be asked for as long as the prototypes stay as they are. A consumer may overwrite the
        rows it got, and may step those classes before it asks for the next range.
        """
        raise NotImplementedError

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Return ``blocks`` for a consumer that also reads the prototypes.

        A third item, if any, times the rows is the gradient of the *unit* prototypes.
        """
        return ((where, rows, None) for where, rows in self.blocks())

    def norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, a float64 scalar."""
        return _norm_of(rows for _, rows in self.blocks())

    def is_finite(self) -> Tensor:
        """Whether every element is finite, a boolean scalar on the device; no sync."""
        return self.norm().isfinite()

    def to_dense(self, prototypes: Tensor) -> Tensor:
        """The gradient of all prototypes ``[k, d]``."""
        gradient = torch.empty_like(prototypes)
        for where, rows in self.blocks():
            gradient[where] = rows
        return gradient

    def to_sparse(self, prototypes: Tensor) -> Tensor:
        """The same as a COO tensor of the classes whose gradient is not zero."""
        parts = [(prototypes.new_empty(0, dtype=torch.int64), prototypes[:0])]  # of no classes
        for where, rows in self.blocks():
            active = (rows != 0).any(1).nonzero().flatten()
            parts.append((where.start + active, rows[active]))
        classes, rows = (torch.cat(column) for column in zip(*parts, strict=True))
        return _coo(classes, rows, prototypes)


def _norm_of(parts: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of tensors that are never held together, a float64 scalar."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms) if norms else torch.zeros(0))
    return total.double()


def _coo(classes: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        classes[None], rows, like.shape, is_coalesced=True, check_invariants=False
    )


@dataclass(frozen=True)
class ListedGradient(PrototypeGradient):
    """Gradient of a sparse step: entries for the active classes only.

    Lists are cut and multiplied when the gradient is used: what a host does between a step's wait
    and the next screen leaves a GPU without work.
    """

    head: MarginClassifier
    listed: ClassGradient  # with spare entries, which come last; to be multiplied by the factor
    embeddings: Tensor  # [B, d], unit
    bound: Tensor  # float64 scalar, see ``element_bound``, to be multiplied by the factor
    factor: Tensor  # scalar, or [B] for each row
    length: int | None  # of the lists without spare entries, once it is known

    @property
    def entries(self) -> ClassGradient:
        """The whole gradient."""
        listed = self.listed.part(slice(self.length))
        factor = self.factor if self.factor.ndim == 0 else self.factor[listed.rows.long()]
        return listed._replace(values=listed.values * factor)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        return gradient_blocks(self.entries, *self._tensors())

    def norm(self) -> Tensor:
        rows_of = self.head.kernels.prototype_gradient
        norm = _norm_of(rows_of(part, *self._tensors())[1] for part in class_parts(self.entries))
        return norm.to(self.embeddings.device)

    def is_finite(self) -> Tensor:
        bound = self.bound * self.factor.abs().amax()
        return bound < torch.finfo(self.embeddings.dtype).max  # false for NaN

    def to_dense(self, prototypes: Tensor) -> Tensor:
        classes, rows = self.head.kernels.prototype_gradient(self.entries, *self._tensors())
        return torch.zeros_like(prototypes).index_copy_(0, classes, rows)

    def to_sparse(self, prototypes: Tensor) -> Tensor:
        classes, rows = self.head.kernels.prototype_gradient(self.entries, *self._tensors())
        return _coo(classes, rows, prototypes)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.embeddings, self.head.prototypes.detach(), self.head.inverse_norms


@dataclass(frozen=True)
class RowsGradient(PrototypeGradient):
    """Gradient rows that exist already: of every class, or of the listed ones."""

    rows: Tensor  # [n, d]
    num_classes: int
    classes: Tensor | None = None  # [n] ascending; None for all of them

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        size = update_classes(self.rows.shape[1])
        edges = [*range(0, self.num_classes, size), self.num_classes]
        if self.classes is None:
            for where in pairwise(edges):
                yield slice(*where), self.rows[slice(*where)].clone()
            return
        wanted = torch.tensor(edges, device=self.classes.device)
        cuts = torch.searchsorted(self.classes, wanted).tolist()
        for (start, stop), cut in zip(pairwise(edges), pairwise(cuts), strict=True):
            block = self.rows.new_zeros((stop - start, self.rows.shape[1]))
            part = slice(*cut)
            block.index_copy_(0, self.classes[part] - start, self.rows[part])
            yield slice(start, stop), block

    def to_dense(self, prototypes: Tensor) -> Tensor:
        if self.classes is None:
            return self.rows
        return torch.zeros_like(prototypes).index_copy_(0, self.classes, self.rows)


def element_bound(weights: Tensor, inverse_norms: Tensor, depth: int) -> Tensor:
    """Bound of these weights and of every element of a gradient made of them, a float64 scalar.

    Elements of unit embeddings are at most one; the part along the prototype that is taken out adds
    a factor of ``1 + d``. (An embedding that is not finite has no finite weight.)
    """
    total: Tensor = torch.linalg.vector_norm(weights, 1, dtype=torch.float64)
    if not len(inverse_norms):
        return total
    bound: Tensor = total * ((2 + depth) * inverse_norms.amax()).clamp_min(1.0)
    return bound


def check_delivered(head: MarginClassifier) -> None:
    """Raise where a fused gradient still waits for its optimizer, which takes one at a time."""
    if head.fused_gradient is not None:
        raise ConfigError(
            "a fused gradient is waiting to be applied and gradient='fused' holds only one; call "
            "step() or zero_grad() of qmargin.ExactSGD or SparseSGD before the next backward, or "
            "accumulate with gradient='dense' or 'sparse'"
        )


def deliver(head: MarginClassifier, gradient: PrototypeGradient) -> Tensor | None:
    """The gradient for autograd in the head's form; None where an optimizer will apply it."""
    if head.gradient != "fused":
        head.may_have_moved = True
        prototypes = head.prototypes.detach()
        is_sparse = head.gradient == "sparse"
        return gradient.to_sparse(prototypes) if is_sparse else gradient.to_dense(prototypes)
    check_delivered(head)
    head.fused_gradient = gradient
    if not head.has_optimizer:
        _hook_optimizers()
        _WITHOUT_OPTIMIZER.add(head)
    return None


_WITHOUT_OPTIMIZER: weakref.WeakSet[MarginClassifier] = weakref.WeakSet()


@cache
def _hook_optimizers() -> None:
    """Make every optimizer of torch check for prototypes that it cannot update."""
    register_optimizer_step_pre_hook(_refuse_to_skip)


def _refuse_to_skip(optimizer: Optimizer, *_: Any) -> None:
    """Raise where an optimizer would skip prototypes whose gradient is fused."""
    for head in list(_WITHOUT_OPTIMIZER):
        stepped = (value for group in optimizer.param_groups for value in group["params"])
        is_waiting = head.fused_gradient is not None and not head.has_optimizer
        if is_waiting and any(value is head.prototypes for value in stepped):
            raise ConfigError(
                f"gradient='fused' leaves {type(optimizer).__name__} no gradient of the "
                "prototypes; update them by qmargin.ExactSGD(head, lr=...) or SparseSGD, or build "
                "the head with gradient='dense'"
            )
